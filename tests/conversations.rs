//! Conversations as data, and tuning on them.

use crate::common::runs::{Results, entries};
use checkpoint::resume::find_newest;
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

const CHATML: &str = "<|im_start|>user\nsay one<|im_end|>\n<|im_start|>assistant\none!<|im_end|>\n";

/// A directory with conversations in which the assistant repeats a word.
struct World {
    dir: TempDir,
}

fn conversation(word: &str) -> Value {
    let user = |text: String| json!({ "role": "user", "content": text });
    let assistant = |text: String| json!({ "role": "assistant", "content": text });
    json!({ "messages": [user(format!("say {word}")), assistant(format!("{word}!"))] })
}

impl World {
    fn new() -> Self {
        let world = Self { dir: tempfile::tempdir().unwrap() };
        let words = ["one", "two", "red"];
        let lines: Vec<String> = (0..60).map(|i| conversation(words[i % 3]).to_string()).collect();
        world.write("chat.jsonl", &lines.join("\n"));
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    fn run(&self, arguments: &[&str], input: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
        command.current_dir(self.dir.path()).env("RAYON_NUM_THREADS", "2").args(arguments);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // A command that fails does not read.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        child.wait_with_output().unwrap()
    }

    /// Runs a command and returns what it prints.
    #[track_caller]
    fn succeed(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments, "");
        let (printed, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{arguments:?}: {printed}{err}");
        format!("{printed}{err}")
    }

    /// Checks that a command fails with an error that contains all of `parts`.
    #[track_caller]
    fn fail(&self, arguments: &[&str], parts: &[&str]) {
        let output = self.run(arguments, "");
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(1 | 2)), "{arguments:?}: {output:?}");
        for part in parts {
            assert!(err.contains(part), "{arguments:?}: expected '{part}' in: {err}");
        }
    }

    fn data(&self, more: &[&str]) -> String {
        self.succeed(&[&["data", "chat"], more].concat())
    }

    /// Writes a data set of bytes with the default template.
    fn bytes(&self, out: &str, more: &[&str]) -> String {
        let flags = ["chat.jsonl", "--tokenizer", "bytes", "--chat-template", "chatml", "--out", out];
        self.data(&[&flags[..], more].concat())
    }

    /// Trains a model of bytes on text, in the directory `base`.
    fn base(&self) {
        self.write("text.txt", &"say one two red! say it again. ".repeat(40));
        self.succeed(&["data", "text", "text.txt", "--tokenizer", "bytes", "--out", "text"]);
        let shape = ["--layers", "2", "--heads", "2", "--channels", "32", "--seq", "64", "--batch", "2"];
        let run = ["--train", "text/train_*.bin", "--steps", "2", "--out", "base"];
        self.succeed(&[&TRAIN[..], &shape, &run].concat());
    }
}

const TRAIN: [&str; 5] = ["train", "--device", "cpu", "--sample-every", "0"];

#[test]
fn a_base_model_is_tuned_on_conversations() {
    let world = World::new();
    world.base();
    let flags = ["chat.jsonl", "--tokenizer", "base", "--chat-template", "chatml", "--out", "chat"];
    let printed = world.data(&[&flags[..], &["--val-fraction", "0.1"]].concat());
    for part in [
        "read 60 conversations",
        "tokens of the assistant, which have loss: 300 of ",
        "note: added special tokens to the tokenizer: <|im_start|>, <|im_end|>",
        "wrote 1728 tokens for train, 1 shard: chat/train_*.bin",
    ] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    let mut found = entries(&world.path("chat"));
    found.sort();
    let expected = "chat_template.jinja dataset.json tokenizer.json tokenizer_config.json train_000000.bin train_000000.mask \
        val_000000.bin val_000000.mask";
    assert_eq!(found.join(" "), expected);
    let config: Value = serde_json::from_str(&world.read("chat/tokenizer_config.json")).unwrap();
    assert_eq!((&config["eos_token"], &config["bos_token"]), (&json!("<|im_end|>"), &Value::Null));

    let checked = world.succeed(&["data", "check", "chat/*.bin"]);
    assert!(checked.contains("with loss, 60 documents in 2 files"), "{checked}");
    let shown = world.succeed(&["data", "show", "chat/train_000000.bin", "--count", "32"]);
    assert!(shown.contains("id  loss  text") && shown.ends_with(&format!("\n{CHATML}\n")), "{shown}");
    assert_eq!(shown.lines().filter(|line| line.get(20..26) == Some("     1")).count(), 5, "{shown}");

    let tune =
        ["--model", "base", "--train", "chat/train_*.bin", "--val", "chat/val_*.bin", "--batch", "8", "--seq", "64"];
    let rest = ["--steps", "120", "--lr", "0.01", "--val-every", "40", "--out", "tuned"];
    let printed = world.succeed(&[&TRAIN[..], &tune, &rest].concat());
    for part in [
        "new special tokens: <|im_start|>, <|im_end|>: the vocabulary of the model grows from 256 to 258 ids",
        "1 source, best-fit packing with padding, shuffled, loss on the assistant's tokens, attention within documents",
    ] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    // The model answers by the template, and stops.
    let answer = |model: &str| {
        let arguments = ["chat", "--device", "cpu", "--model", model, "-g", "20", "--temperature", "0"];
        let output = world.run(&arguments, "say two\nsay red\n");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert_eq!(answer("tuned"), "two!\nred!\n");
    // So does its export.
    world.succeed(&["export", "--format", "hf", "tuned", "exported"]);
    assert_eq!(answer("exported"), "two!\nred!\n");
    assert_eq!(world.read("exported/chat_template.jinja"), world.read("chat/chat_template.jinja"));
    let generation: Value = serde_json::from_str(&world.read("exported/generation_config.json")).unwrap();
    assert_eq!(generation["eos_token_id"], 257);
    // The loss is that of the assistant's tokens.
    let output = world.run(&["eval", "--device", "cpu", "--model", "tuned", "--val", "chat/val_*.bin", "--json"], "");
    assert!(output.status.success(), "{output:?}");
    let evaluated: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(evaluated["validation"]["tokens"], 30);
    assert!(evaluated["validation"]["loss"].as_f64().unwrap() < 0.1, "{evaluated}");
    let log = world.read("tuned/main.jsonl");
    let last = log.lines().rfind(|line| line.contains("val_loss")).unwrap();
    let last: Value = serde_json::from_str(last).unwrap();
    let difference = last["val_loss"].as_f64().unwrap() - evaluated["validation"]["loss"].as_f64().unwrap();
    assert!(difference.abs() < 1e-6, "{last} {evaluated}");
    // Text with the same tokenizer is a second source.
    world.succeed(&["data", "text", "text.txt", "--tokenizer", "chat", "--out", "more"]);
    let both =
        ["--model", "tuned", "--train", "chat/train_*.bin=0.5", "--train", "more/train_*.bin=0.5", "--steps", "2"];
    let printed =
        world.succeed(&[&TRAIN[..], &both, &["--seq", "32", "--val", "chat/val_*.bin", "--out", "both"]].concat());
    assert!(printed.contains("2 sources, best-fit packing with padding"), "{printed}");
}

/// The chat template of the recipe of nanochat's model.
#[test]
fn the_template_of_nanochat_writes_its_special_tokens() {
    let world = World::new();
    let system = json!({ "role": "system", "content": "Be brief." });
    let message = |role: &str, content: &str| json!({ "role": role, "content": content });
    let dialog =
        [message("user", "Hi."), message("assistant", "Yes?"), message("user", "Bye."), message("assistant", "")];
    let with_system = [&[system][..], &dialog].concat();
    let tool = [message("user", "a"), message("tool", "b"), message("assistant", "c")];
    let lines = [&dialog[..], &with_system, &tool].map(|messages| json!({ "messages": messages }).to_string());
    world.write("chat.jsonl", &lines.join("\n"));
    let template = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/nanochat.jinja");
    let names = ["bos", "user_start", "user_end", "assistant_start", "assistant_end"].map(|name| format!("<|{name}|>"));
    let special = names.iter().flat_map(|name| ["--special", name.as_str()]);
    let flags = ["chat.jsonl", "--tokenizer", "bytes", "--chat-template", template.to_str().unwrap(), "--out", "chat"];
    let printed = world.data(&flags.into_iter().chain(special).collect::<Vec<_>>());
    // In each of the two conversations, the assistant says four characters, and ends two turns.
    assert!(printed.contains("tokens of the assistant, which have loss: 12 of "), "{printed}");
    assert!(printed.contains("expected messages of user and assistant, found tool"), "{printed}");
    let shown = world.succeed(&["data", "show", "chat/train_000000.bin", "--count", "200"]);
    let turns = |first: &str| {
        format!(
            "<|bos|><|user_start|>{first}<|user_end|><|assistant_start|>Yes?<|assistant_end|><|user_start|>Bye.<|user_end|>\
             <|assistant_start|><|assistant_end|>"
        )
    };
    let expected = format!("{}{}", turns("Hi."), turns("Be brief.\n\nHi."));
    assert!(shown.ends_with(&format!("\n{expected}\n")), "{shown}");
}

#[test]
fn a_resumed_tune_has_the_bits_of_an_uninterrupted_one() {
    let world = World::new();
    world.base();
    world.bytes("chat", &["--val-fraction", "0.1"]);
    let flags = "--model base --train chat/train_*.bin --val chat/val_*.bin --batch 2 --total-batch 256 --seq 32 --steps 12 --lr 0.003 \
        --val-every 4 --checkpoint-every 4 --keep 0";
    let flags: Vec<&str> = flags.split_whitespace().collect();
    let train = |more: &[&str]| world.succeed(&[&TRAIN[..], &flags, more].concat());
    train(&["--out", "whole"]);
    for step in [4, 8] {
        let copy = format!("part-{step}");
        fs::create_dir_all(world.path(&copy).join("hugging_face")).unwrap();
        for name in entries(&world.path("whole")) {
            let of = name.split(['_', '.']).find_map(|part| part.parse::<usize>().ok());
            if of.is_none_or(|of| of <= step) && world.path("whole").join(&name).is_file() {
                fs::copy(world.path("whole").join(&name), world.path(&copy).join(&name)).unwrap();
            }
        }
        assert_eq!(find_newest(&world.path(&copy)).unwrap().checkpoint.unwrap().step, step);
        train(&["--out", &copy, "--resume"]);
        let results = |run: &str| Results::read(&world.path(run), 12);
        results(&copy).assert_equals(&results("whole"), &copy);
    }
    // Another mask of the same tokens is other data.
    let mask = world.path("chat/train_000000.mask");
    let mut bytes = fs::read(&mask).unwrap();
    let at = bytes.len() - 1;
    bytes[at] ^= 1;
    fs::write(&mask, &bytes).unwrap();
    let error = |parts: &[&str]| world.fail(&[&TRAIN[..], &flags, &["--out", "whole", "--resume"]].concat(), parts);
    error(&["error: --train: chat/train_000000.mask: expected flags with hash"]);
    fs::remove_file(&mask).unwrap();
    error(&["error: --train: chat/train_000000.mask: expected the mask of chat/train_000000.bin"]);
}

#[test]
fn templates_that_cannot_be_used_are_errors() {
    let world = World::new();
    let chat = |template: &str, parts: &[&str]| {
        world.write("t.jinja", template);
        let flags = ["data", "chat", "chat.jsonl", "--tokenizer", "gpt2", "--chat-template", "t.jinja", "--out", "x"];
        world.fail(&flags, parts);
        assert!(!world.path("x").exists());
    };
    let turns =
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}";
    // A loop that needs few steps of the renderer, but multiplies its text.
    let grows = "{% if messages %}{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}{% endif %}";
    chat(grows, &["t.jinja: expected a chat template"]);
    let recurses = "{% if messages %}{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}{% endif %}";
    world.write("t.jinja", recurses);
    let flags = ["data", "chat", "chat.jsonl", "--tokenizer", "gpt2", "--chat-template", "t.jinja", "--out", "x"];
    world.fail(
        &flags,
        &[
            "found none in 1 files",
            "skipped conversations that the chat template rejects: 60 (first: chat.jsonl, line 1",
        ],
    );
    chat(
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        &["t.jinja: expected a chat template of at most"],
    );
    chat("{% nothing %}", &["t.jinja: expected a valid chat template", "unknown statement nothing"]);
    chat("", &["--chat-template t.jinja: expected chatml or a file with a template, found an empty file"]);
    chat(
        &turns.replace("{{ m.content }}", "{{ m.content if loop.last else '' }}"),
        &["chat.jsonl, line ", "found", "at message 2 of 2", "{% generation %}", "--chat-template FILE"],
    );
    world.fail(
        &["data", "chat", "chat.jsonl", "--tokenizer", "gpt2", "--out", "x"],
        &["--tokenizer gpt2: expected a model with a chat template", "--chat-template chatml"],
    );
    world.fail(
        &["data", "chat", "chat.jsonl", "--tokenizer", "gpt2", "--chat-template", "none.jinja", "--out", "x"],
        &["--chat-template none.jinja: expected chatml or a file with a template"],
    );
    // The assistant's turns do not end.
    world.write("t.jinja", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}");
    let flags = ["chat.jsonl", "--tokenizer", "gpt2", "--chat-template", "t.jinja", "--out", "x"];
    let printed = world.data(&flags);
    assert!(printed.contains("found 60 of 60 turns without one") && printed.contains("--special"), "{printed}");
}

#[test]
fn formats_are_recognized_and_special_tokens_are_text() {
    let world = World::new();
    let lines = [
        json!({ "conversations": [{ "from": "human", "value": "a <|im_end|> b" }, { "from": "gpt", "value": "c" }] }),
        json!({ "prompt": "d", "completion": "e" }),
        json!({ "messages": [{ "role": "user", "content": "f" }] }),
        json!({ "messages": [{ "role": "wizard", "content": "f" }] }),
        json!({ "text": "g" }),
    ];
    let lines: Vec<String> = lines.iter().map(Value::to_string).collect();
    let mut encoder = Vec::new();
    encoder.extend(lines.join("\n").into_bytes());
    fs::write(world.path("mixed.ndjson"), &encoder).unwrap();
    let flags = ["mixed.ndjson", "--tokenizer", "gpt2", "--chat-template", "chatml", "--out", "mixed"];
    let printed = world.data(&flags);
    for part in [
        "read 2 conversations",
        "skipped conversations without an assistant turn: 1 (first: mixed.ndjson, line 3",
        "skipped conversations with unknown roles: 1 (first: mixed.ndjson, line 4: message 1: found role wizard)",
        "skipped records without messages, conversations, or prompt and completion: 1 (first: mixed.ndjson, line 5",
        "note: special tokens in messages that became ordinary text: 1",
    ] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    let shown = world.succeed(&["data", "show", "mixed/train_000000.bin", "--count", "100"]);
    assert!(
        shown.contains("<|im_start|>user\na <|im_end|> b<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"),
        "{shown}"
    );
    // <|im_end|> is a token of its own twice per conversation.
    assert_eq!(shown.matches("  50258 ").count(), 4, "{shown}");
    // Standard input has JSON lines.
    let output = world.run(&["data", "chat", "-", "--tokenizer", "mixed", "--out", "again"], &lines[1]);
    assert!(output.status.success(), "{output:?}");
    let (one, two) = (world.read("mixed/tokenizer.json"), world.read("again/tokenizer.json"));
    assert_eq!(one, two);
    world.fail(
        &["data", "chat", "mixed", "--tokenizer", "gpt2", "--chat-template", "chatml", "--out", "x"],
        &["expected JSON lines"],
    );
}
