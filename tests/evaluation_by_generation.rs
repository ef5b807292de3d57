//! `eval generate`: rendering of questions, answers and the command's results.

use crate::common::{fail, succeed, text};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// A GPT-2 that was trained on sentences such as `The color of coal is black.`, and on questions with `\nAnswer: `.
fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/core/model")
}

struct Fixture {
    directory: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn file(&self, name: &str, lines: &[&str]) -> PathBuf {
        let path = self.at(name);
        fs::write(&path, lines.join("\n")).unwrap();
        path
    }

    /// Evaluates a file. Returns the results, and the answers to each question.
    fn evaluate(&self, model: &Path, file: &Path, more: &[&str]) -> (Value, Vec<Value>) {
        let out = self.at("answers.jsonl");
        let command = ["eval", "generate", text(model), text(file), "--device", "cpu", "--out", text(&out), "--json"];
        let results = serde_json::from_str(&succeed(&[&command[..], more].concat())).unwrap();
        let answers = fs::read_to_string(&out).unwrap();
        (results, answers.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
    }
}

const PROMPTS: [&str; 5] = [
    r#"{"prompt": "The color of coal is", "answer": " black."}"#,
    r#"{"prompt": "What is the capital of Peru?\nAnswer:", "answer": "Lima"}"#,
    "",
    r#"{"prompt": "The color of grass in spring is", "answer": "purple."}"#,
    r#"{"prompt": "The color of the clear sky is", "answer": "blue."}"#,
];

#[test]
fn answers_are_generated_greedily_up_to_the_stop() {
    let fixture = Fixture::new();
    let file = fixture.file("prompts.jsonl", &PROMPTS);
    let (results, answers) = fixture.evaluate(&model(), &file, &["--stop", "\n", "--tokens", "12"]);
    let lines: Vec<_> = answers.iter().map(|answer| answer["line"].as_u64().unwrap()).collect();
    assert_eq!(lines, [1, 2, 4, 5]);
    let texts: Vec<&str> = answers.iter().map(|answer| answer["answers"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(texts, [" black.", " Lima", " green.", " blue."]);
    let correct: Vec<bool> = answers.iter().map(|answer| answer["answers"][0]["correct"].as_bool().unwrap()).collect();
    assert_eq!(correct, [true, true, false, true]);
    assert_eq!((&answers[0]["reference"], &answers[0]["prompt"]), (&"black.".into(), &"The color of coal is".into()));
    assert_eq!(answers[0]["answers"][0]["finish_reason"], "stop");
    assert_eq!(
        (&results["correct"], &results["questions"], &results["accuracy"]),
        (&3.into(), &4.into(), &0.75.into())
    );
    let tokens: u64 = answers.iter().map(|answer| answer["answers"][0]["tokens"].as_u64().unwrap()).sum();
    assert_eq!(results["tokens"], tokens);

    // One answer at a time, and without JSON.
    let model = model();
    let command = ["eval", "generate", text(&model), text(&file), "--device", "cpu", "--stop", "\n", "--batch", "1"];
    assert_eq!(succeed(&command), "accuracy: 3/4 = 0.750000\n");
    assert_eq!(succeed(&[&command[..], &["--max", "2"]].concat()), "accuracy: 2/2 = 1.000000\n");
}

#[test]
fn examples_precede_the_question() {
    let fixture = Fixture::new();
    let question = |question: &str, answer: &str| json!({ "question": question, "answer": answer }).to_string();
    let questions = [("1 + 1?", "It is two.\n#### 2"), ("2 + 2?", "#### 4"), ("3 + 3?", "#### 6")];
    let questions = questions.map(|(asked, answer)| question(asked, answer));
    let file = fixture.file("questions.jsonl", &questions.each_ref().map(String::as_str));
    let (results, answers) = fixture.evaluate(&model(), &file, &["--shots", "2", "--tokens", "3"]);
    let expected =
        "Question: 1 + 1?\nAnswer: It is two.\n#### 2\n\nQuestion: 2 + 2?\nAnswer: #### 4\n\nQuestion: 3 + 3?\nAnswer:";
    assert_eq!((&answers[0]["prompt"], &answers[0]["line"]), (&expected.into(), &3.into()));
    assert_eq!((answers.len(), &results["questions"]), (1, &1.into()));
    let shots = fixture.file("shots.jsonl", &PROMPTS);
    let (_, answers) =
        fixture.evaluate(&model(), &file, &["--shots", "1", "--shots-from", text(&shots), "--tokens", "1"]);
    let expected = "The color of coal is black.\n\nQuestion: 1 + 1?\nAnswer:";
    assert_eq!((&answers[0]["prompt"], answers.len()), (&expected.into(), 3));
}

#[test]
fn samples_have_a_mean_accuracy_and_a_pass_rate() {
    let fixture = Fixture::new();
    let file = fixture.file("prompts.jsonl", &PROMPTS);
    let more = ["--samples", "5", "--temperature", "1.5", "--stop", "\n", "--tokens", "8"];
    let (results, answers) = fixture.evaluate(&model(), &file, &more);
    let correct =
        |answer: &Value| answer["answers"].as_array().unwrap().iter().filter(|a| a["correct"] == true).count();
    let counts: Vec<usize> = answers.iter().map(correct).collect();
    let total: usize = counts.iter().sum();
    let passed = counts.iter().filter(|&&count| count > 0).count();
    assert!((1..20).contains(&total) && passed >= 1, "{counts:?}");
    assert_eq!((&results["correct"], &results["samples"]), (&total.into(), &5.into()));
    assert_eq!(
        (&results["accuracy"], &results["pass"]),
        (&(total as f64 / 20.0).into(), &(passed as f64 / 4.0).into())
    );
    let model = model();
    let command = ["eval", "generate", text(&model), text(&file), "--device", "cpu"];
    let printed = succeed(&[&command[..], &more].concat());
    let expected =
        format!("accuracy: {total}/20 = {:.6}\npass@5: {passed}/4 = {:.6}\n", total as f64 / 20.0, passed as f64 / 4.0);
    assert_eq!(printed, expected);
}

/// The template writes the roles in capitals, and the document token.
#[test]
fn a_chat_template_renders_questions_as_turns() {
    let fixture = Fixture::new();
    let chat = fixture.at("chat");
    fs::create_dir(&chat).unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(model().join(name), chat.join(name)).unwrap();
    }
    let template = "<|endoftext|>{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}ASSISTANT:";
    fs::write(chat.join("chat_template.jinja"), template).unwrap();
    let conversation = r#"{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Color of coal?"}, {"role": "assistant", "content": "black"}]}"#;
    let file = fixture.file("mixed.jsonl", &[PROMPTS[3], PROMPTS[0], conversation]);
    let (_, answers) = fixture.evaluate(&chat, &file, &["--shots", "1", "--tokens", "2"]);
    let shot = "<|endoftext|>USER: The color of grass in spring is\nASSISTANT: purple.\n";
    let prompts: Vec<&str> = answers.iter().map(|answer| answer["prompt"].as_str().unwrap()).collect();
    let asked = format!("{shot}USER: The color of coal is\nASSISTANT:");
    let talked = format!("{shot}SYSTEM: Be brief.\nUSER: Hi\nASSISTANT: Yes?\nUSER: Color of coal?\nASSISTANT:");
    assert_eq!(prompts, [asked, talked]);
    assert_eq!(answers[1]["reference"], "black");
    let model = model();
    let command = ["eval", "generate", text(&model), text(&file), "--device", "cpu"];
    fail(&command, &["mixed.jsonl, line 3: messages: expected a model with a chat template, found none"]);
}

#[test]
fn errors_name_the_flag_or_the_line() {
    let fixture = Fixture::new();
    let file = fixture.file("prompts.jsonl", &PROMPTS);
    let model = model();
    let command = ["eval", "generate", text(&model), text(&file), "--device", "cpu"];
    let with = |more: &[&str], parts: &[&str]| fail(&[&command[..], more].concat(), parts);
    with(&["--samples", "2"], &["--samples 2: expected a --temperature above 0"]);
    with(&["--shots", "4"], &["--shots 4: expected as many questions in ", "and others to evaluate, found 4"]);
    with(&["--out", "/nowhere/x"], &["cannot write /nowhere/x"]);
    with(&["--tokenizer", "gpt2"], &["--tokenizer: expected a tokenizer with at most 448 ids"]);
    let bad = fixture.file("bad.jsonl", &[PROMPTS[0], r#"{"prompt": "a"}"#]);
    let wrong = ["eval", "generate", text(&model), text(&bad), "--device", "cpu"];
    fail(&wrong, &["bad.jsonl, line 2: expected the field 'answer', found none"]);
    let empty = fixture.file("empty.jsonl", &["", ""]);
    let wrong = ["eval", "generate", text(&model), text(&empty)];
    fail(&wrong, &["empty.jsonl: expected one question per line, found none"]);
}
