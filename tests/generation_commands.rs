//! `sample` and `chat` as a user runs them, with a small model of bytes.

use crate::common::{fail, succeed, text};
use serde_json::Value;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::{fs, str};

/// Trains a model for a few steps, so that its texts vary.
fn train(out: &Path) {
    let model = ["--layers", "1", "--channels", "32", "--heads", "2", "--seq", "32", "--batch", "2", "--steps", "6"];
    let run = ["--lr", "0.01", "--warmup", "0", "--val-every", "0", "--sample-every", "0", "--out", text(out)];
    succeed(&[&["train", "--device", "cpu"], &model[..], &run].concat());
}

/// Runs the program with this standard input and returns its standard output, which must be valid UTF-8.
fn with_input(args: &[&str], input: &str) -> String {
    with_bytes(args, input.as_bytes()).0
}

/// Runs the program with this standard input and returns standard output and standard error.
fn with_bytes(args: &[&str], input: &[u8]) -> (String, String) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_llm-rs"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{args:?}: {err}");
    (String::from_utf8(output.stdout).unwrap(), err)
}

#[test]
fn texts_are_printed_as_text_or_json() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run);
    let sample = |more: &[&str]| {
        succeed(
            &[&["sample", "--device", "cpu", "--model", text(&run), "-g", "40", "--prompt", "to be"], more].concat(),
        )
    };
    let lines = sample(&["--n", "3", "--json", "--seed", "5", "--top-k", "200", "--min-p", "0.001"]);
    let objects: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(objects.len(), 3);
    for (i, object) in objects.iter().enumerate() {
        assert_eq!(
            (&object["index"], &object["prompt"], &object["finish_reason"]),
            (&i.into(), &"to be".into(), &"length".into())
        );
        assert_eq!(object["tokens"].as_array().unwrap().len(), 40);
        // Text i is that of its seed alone, printed as it is generated.
        let alone = sample(&["--seed", &(5 + i).to_string(), "--top-k", "200", "--min-p", "0.001"]);
        assert_eq!(alone, format!("to be{}\n", object["text"].as_str().unwrap()));
    }
    assert_ne!(objects[0]["text"], objects[1]["text"]);
    let printed = sample(&["--n", "2", "--temperature", "0"]);
    let parts: Vec<&str> = printed.split("---\n").collect();
    assert_eq!((parts.len(), parts[0]), (2, parts[1]));

    // A stop string is not part of the text.
    let greedy = sample(&["--temperature", "0"]);
    let rest = greedy.strip_prefix("to be").unwrap().trim_end_matches('\n');
    let stop: String = rest.chars().skip(3).take(2).collect();
    let first = rest.find(&stop).unwrap();
    let stopped = sample(&["--temperature", "0", "--stop", "never there", "--stop", &stop, "--json"]);
    let stopped: Value = serde_json::from_str(&stopped).unwrap();
    assert_eq!((&stopped["text"], &stopped["finish_reason"]), (&rest[..first].into(), &"stop".into()));

    // The prompt may come from a file or from standard input.
    let file = dir.path().join("prompt.txt");
    fs::write(&file, "to be").unwrap();
    let from = |path: &str, input: &str| {
        let args = [
            "sample",
            "--device",
            "cpu",
            "--model",
            text(&run),
            "-g",
            "40",
            "--temperature",
            "0",
            "--prompt-file",
            path,
        ];
        with_input(&args, input)
    };
    assert_eq!(from(text(&file), ""), greedy);
    assert_eq!(from("-", "to be"), greedy);

    let of_run = |more: &[&'static str]| [&["sample", "--device", "cpu", "--model", text(&run)][..], more].concat();
    fail(&of_run(&["--top-p", "1.5"]), &["--top-p", "expected a number from 0 to 1"]);
    fail(&of_run(&["--repetition-penalty", "0"]), &["--repetition-penalty", "expected a finite number above 0"]);
    fail(&of_run(&["--prompt-file", "nowhere.txt"]), &["nowhere.txt", "cannot read"]);
    fail(&of_run(&["--prompt-file", "-", "--prompt", "x"]), &["--prompt"]);
}

#[test]
fn conversations_continue_until_the_input_ends() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run);
    let args = ["chat", "--device", "cpu", "--model", text(&run), "-g", "6", "--temperature", "0"];
    let plain = with_input(&args, "to be\n\nor not\n/clear\nto be\n/exit\nignored\n");
    let answers: Vec<&str> = plain.split_terminator('\n').collect();
    assert!(answers.len() >= 3, "{plain:?}");
    // A new conversation begins anew.
    let alone = with_input(&args, "to be\n");
    assert!(plain.starts_with(&alone) && plain.ends_with(&alone), "{plain:?} {alone:?}");
    // The conversation exceeds the model's 32 tokens.
    assert!(!with_input(&args, &"to be or not to be\n".repeat(4)).is_empty());
    fail(&[&args[..], &["--system", "x"]].concat(), &["--system", "expected a model with a chat template"]);

    // With a template the model reads the messages in its form.
    fs::write(
        run.join("chat_template.jinja"),
        "\n{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:",
    )
    .unwrap();
    let sampled = ["sample", "--device", "cpu", "--model", text(&run), "-g", "6", "--temperature", "0"];
    let expected = succeed(&[&sampled[..], &["--prompt", "u:to be;a:"]].concat());
    let answer = with_input(&args, "to be\n");
    // `sample` begins a document with a newline, as this template does; `chat` adds no token of its own.
    assert_eq!(expected, format!("u:to be;a:{answer}"));
    // A long message is refused, a long conversation loses its oldest messages.
    let long = "x".repeat(60);
    assert_eq!(with_input(&args, &format!("{long}\nto be\n")), answer);
    assert!(!with_input(&args, &"to be\n".repeat(5)).is_empty());
}

/// The model reads 32 tokens. Its template contains only the user's messages, so that the number of tokens is known.
#[test]
fn conversations_fill_the_context() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run);
    let template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}";
    fs::write(run.join("chat_template.jinja"), template).unwrap();
    let chat = |lengths: &[usize], context: &str| {
        let args = ["chat", "--device", "cpu", "--model", text(&run), "-g", "100", "--temperature", "0", "--context"];
        let lines: String = lengths.iter().map(|&length| "x".repeat(length) + "\n").collect();
        with_bytes(&[&args[..], &[context]].concat(), lines.as_bytes())
    };
    // A quarter of the context is left for an answer.
    let (_, err) = chat(&[12, 12], "32");
    assert!(
        !err.contains("removed the oldest") && err.matches("the context of 32 tokens is full").count() == 2,
        "{err}"
    );
    let (_, err) = chat(&[12, 13], "32");
    assert!(err.contains("exceed 32 tokens; removed the oldest 2 messages\n"), "{err}");
    // A single message may fill it, and has an answer of one token then.
    let (answer, err) = chat(&[32], "32");
    assert!(answer.len() > 1 && !err.contains("error: "), "{answer:?} {err}");
    let (_, err) = chat(&[33], "32");
    assert!(err.contains("error: message: expected at most 32 tokens with its template, found 33; "), "{err}");
    assert!(!err.contains("--context"), "{err}");
    let (_, err) = chat(&[32], "33");
    assert!(
        err.contains("note: --context 33 is longer than the longest sequence of the model; the context is 32 tokens"),
        "{err}"
    );
}

#[test]
fn lines_that_are_no_messages_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run);
    let args = ["chat", "--device", "cpu", "--model", text(&run), "-g", "6", "--temperature", "0"];
    let (answers, err) = with_bytes(&args, b"\xff\xfe\nto be\r\n");
    assert_eq!(answers, with_input(&args, "to be\n"));
    assert!(err.contains("error: message: expected UTF-8 text"), "{err}");
    // A line without end.
    let output = Command::new(env!("CARGO_BIN_EXE_llm-rs"))
        .args(args)
        .stdin(fs::File::open("/dev/zero").unwrap())
        .output()
        .unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(err.contains("error: message: expected a line of at most 1048576 bytes"), "{err}");
    // A template that recurses.
    fs::write(run.join("chat_template.jinja"), "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}").unwrap();
    fail(&args, &["chat_template.jinja", "exceeds a limit or overflows the stack"]);
}

#[test]
fn commands_of_a_conversation_repeat_answers_and_save_it() {
    let dir = tempfile::tempdir().unwrap();
    let [run, talk, other] = ["run", "my talk.json", "other.json"].map(|name| dir.path().join(name));
    train(&run);
    let args = ["chat", "--device", "cpu", "--model", text(&run), "-g", "3", "--temperature", "0", "--stop", "\n"];
    // A model without a template has a text, and no instructions.
    let input = format!("to be\n/retry\n/system x\n/save {}\n", talk.display());
    let (answers, err) = with_bytes(&args, input.as_bytes());
    let answers: Vec<&str> = answers.lines().collect();
    assert_eq!(answers[0], answers[1]);
    assert!(
        err.contains("no chat template") && err.contains("/system: expected a model with a chat template"),
        "{err}"
    );
    let saved: Value = serde_json::from_str(&fs::read_to_string(&talk).unwrap()).unwrap();
    assert_eq!(saved["text"], format!("to be{}", answers[1]));
    fs::remove_file(&talk).unwrap();

    fs::write(run.join("chat_template.jinja"), "{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    fs::write(&other, "mine").unwrap();
    let input = format!(
        "/retry\nto be\n/retry\n/save {talk}\n/system s\nor\n/save {talk}\n/save {other}\n/save\n/help\n/unknown\n",
        talk = talk.display(),
        other = other.display()
    );
    let (answers, err) = with_bytes(&args, input.as_bytes());
    let answers: Vec<&str> = answers.lines().collect();
    assert_eq!((answers.len(), answers[0]), (4, answers[1]), "{answers:?} {err}");
    let saved: Value = serde_json::from_str(&fs::read_to_string(&talk).unwrap()).unwrap();
    let message = |role: &str, content: &str| serde_json::json!({ "role": role, "content": content });
    let expected = [
        message("system", "s"),
        message("user", "to be"),
        message("assistant", answers[1]),
        message("user", "or"),
        message("assistant", answers[2]),
    ];
    assert_eq!(saved["messages"], Value::from(expected.to_vec()));
    assert_eq!(fs::read_to_string(&other).unwrap(), "mine");
    for part in [
        "/retry: expected a message before it",
        "in place of the earlier state",
        "other.json: expected a new file, found an existing one",
        "/save: expected the name of a file",
        "/save FILE    write the conversation",
    ] {
        assert!(err.contains(part), "{part}: {err}");
    }
}

/// The answers to a conversation are those of computing each prompt as a whole, and the settings of the model count.
#[test]
fn generation_settings_of_a_model_are_the_defaults_of_chat() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    train(&run);
    fs::write(run.join("chat_template.jinja"), "{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    let chat = |config: &str, flags: &[&str]| {
        fs::write(run.join("generation_config.json"), config).unwrap();
        let args = ["chat", "--device", "cpu", "--model", text(&run), "-g", "8"];
        with_bytes(&[&args[..], flags].concat(), b"to be\nor\n")
    };
    let (greedy, _) = chat("{}", &["--temperature", "0"]);
    let (plain, err) = chat(r#"{"temperature": 0.01}"#, &[]);
    assert!(plain != greedy && !err.contains("sampling of generation_config.json"), "{err}");
    let (stated, err) = chat(r#"{"do_sample": false}"#, &[]);
    assert!(stated == greedy && err.contains("unless flags say otherwise: temperature 0\n"), "{err}");
    assert_eq!(chat(r#"{"do_sample": true, "top_k": 1}"#, &[]).0, greedy);
    assert_eq!(chat(r#"{"do_sample": false}"#, &["--temperature", "1"]).0, plain);
    fs::write(run.join("generation_config.json"), r#"{"do_sample": true, "top_p": 2}"#).unwrap();
    fail(
        &["chat", "--device", "cpu", "--model", text(&run)],
        &["generation_config.json", "top_p: expected a number from 0 to 1, found 2"],
    );
}
