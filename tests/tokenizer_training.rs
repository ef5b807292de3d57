//! `tokenizer train` and `tokenizer compare`, and the use of a trained tokenizer.

use crate::common::{fail, llm_rs, succeed, text};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;
use tokenizer::Tokenizer;

const SPLIT: &str =
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";

/// A directory with text.
struct Fixture(TempDir);

impl Fixture {
    fn new() -> Self {
        let fixture = Self(tempfile::tempdir().unwrap());
        let part = include_str!("../docs/testing.md");
        fs::write(fixture.at("text.md"), part.repeat(3)).unwrap();
        let line = serde_json::json!({"body": part, "n": 1}).to_string();
        fs::write(fixture.at("text.jsonl"), line).unwrap();
        fixture
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Trains on text.md into `out`, with more flags.
    fn train(&self, out: &str, flags: &[&str]) -> String {
        succeed(&[&["tokenizer", "train", text(&self.at("text.md")), "--out", text(&self.at(out))], flags].concat())
    }
}

fn names(directory: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<String> = fs::read_dir(directory).unwrap().map(name).collect();
    names.sort();
    names
}

#[test]
fn a_trained_tokenizer_is_used_for_data_training_and_sampling() {
    let fixture = Fixture::new();
    let [out, shards, run] = ["tok", "shards", "run"].map(|name| fixture.at(name));
    let printed = fixture.train("tok", &["--vocab-size", "600", "--special", "<|bos|>", "--special", "<|user_start|>"]);
    assert!(printed.contains("trained 600 tokens, 342 merges, on "), "{printed}");
    assert!(printed.contains("next: ") && printed.contains("--tokenizer"), "{printed}");
    assert_eq!(names(&out), ["tokenizer.json", "tokenizer.tiktoken"]);
    let tokenizer = Tokenizer::open(&out).unwrap();
    assert_eq!((tokenizer.vocab(), tokenizer.document(), tokenizer.special().len()), (600, 598, 2));
    let play = fixture.at("text.md");
    succeed(&["data", "text", text(&play), "--tokenizer", text(&out), "--out", text(&shards), "--val-fraction", "0.2"]);
    let (train, val) = (shards.join("train_*.bin"), shards.join("val_*.bin"));
    let shape = ["--layers", "1", "--heads", "2", "--channels", "8", "--batch", "2", "--seq", "16", "--steps", "2"];
    let data = ["train", "--device", "cpu", "--train", text(&train), "--val", text(&val), "--out", text(&run)];
    succeed(&[&data[..], &shape].concat());
    assert_eq!(Tokenizer::open(&run).unwrap(), tokenizer);
    succeed(&["sample", "--model", text(&run), "--tokens", "4", "--device", "cpu"]);
    let compared = succeed(&["tokenizer", "compare", text(&out), "bytes", "--text", text(&play)]);
    let rows: Vec<Vec<&str>> = compared.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!([rows[2][0], rows[3][0], rows[4][0]], [text(&out.join("tokenizer.json")), "bytes", "gpt2"]);
    assert_eq!((rows[2][1], rows[3][3], rows[4][1]), ("600", "1.000", "50257"));
    assert!(rows[2..].iter().all(|row| row[4] == "equal"), "{compared}");
}

#[test]
fn patterns_formats_and_samples_are_chosen_by_flags() {
    let fixture = Fixture::new();
    fixture.train("nanochat", &["--vocab-size", "500", "--pattern", SPLIT]);
    let json = fs::read_to_string(fixture.at("nanochat/tokenizer.json")).unwrap();
    assert!(json.contains(r"\\p{N}{1,2}"), "{json}");
    // The field of the lines holds a third of the text, and so does the sample.
    let bytes = include_str!("../docs/testing.md").len().to_string();
    let third = |out: &str, more: &[&str]| {
        let out = fixture.at(out);
        succeed(&[&["tokenizer", "train", "--vocab-size", "500", "--out", text(&out)], more].concat());
        fs::read(out.join("tokenizer.json")).unwrap()
    };
    let [markdown, lines] = ["text.md", "text.jsonl"].map(|name| fixture.at(name));
    let sample = third("sample", &[text(&markdown), "--max-bytes", &bytes]);
    assert_eq!(third("lines", &[text(&lines), "--field", "body"]), sample);
    assert_eq!(third("again", &[text(fixture.0.path()), "--extensions", "md", "--max-bytes", &bytes]), sample);
    let mut child = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
    let args =
        ["tokenizer", "train", "-", "--vocab-size", "500", "--out", text(&fixture.at("stdin"))].map(str::to_owned);
    let mut child = child.args(args).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(include_bytes!("../docs/testing.md")).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(fs::read(fixture.at("stdin/tokenizer.json")).unwrap(), sample);
}

#[test]
fn unusable_input_is_an_error_before_the_work() {
    let fixture = Fixture::new();
    let (play, out, empty, blank) =
        (fixture.at("text.md"), fixture.at("out"), fixture.at("empty"), fixture.at("blank"));
    fs::write(&empty, "").unwrap();
    fs::write(&blank, ". . .\n").unwrap();
    let train = |flags: &[&str], part: &str| {
        fail(&[&["tokenizer", "train", text(&play), "--out", text(&out)], flags].concat(), &[part]);
        assert!(!out.exists(), "{flags:?}");
    };
    train(&["--vocab-size", "256"], "--vocab-size 256: expected at least 257");
    train(&["--vocab-size", "0"], "expected a whole number from 1");
    train(&["--pattern", "(a"], "--pattern: expected gpt2, gpt4, llama3, qwen2 or a regular expression");
    train(&["--pattern", "a*"], "found an empty match");
    train(&["--special", ""], "found an empty token");
    train(&["--special", "<s>", "--special", "<s>"], "expected distinct tokens");
    train(&["--special", "<x>"], "expected a token that precedes documents");
    train(&["--max-bytes", "0"], "expected a whole number of at least 1");
    let out = text(&out);
    fail(
        &["tokenizer", "train", text(&empty), "--out", out],
        &["expected at least one document with text", "empty files: 1"],
    );
    fail(&["tokenizer", "train", "/nowhere", "--out", out], &["cannot read /nowhere"]);
    fail(&["tokenizer", "train", text(&play), "--out", text(&play)], &["expected a directory, found a file"]);
    fail(&["tokenizer", "compare", out, "--text", text(&play)], &[out]);
    fail(&["tokenizer", "compare", "--text", "-"], &["found standard input"]);
    // Text with few pairs fills a part of the vocabulary.
    let printed = succeed(&["tokenizer", "train", text(&blank), "--out", out, "--pattern", "gpt2"]);
    assert!(printed.contains("warning: vocabulary: expected 32768 tokens, found 258"), "{printed}");
    let old = fs::read(Path::new(out).join("tokenizer.json")).unwrap();
    fail(&["tokenizer", "train", text(&play), "--out", out], &["tokenizer.json", "--overwrite"]);
    assert_eq!(fs::read(Path::new(out).join("tokenizer.json")).unwrap(), old);
    succeed(&["tokenizer", "train", text(&play), "--out", out, "--vocab-size", "300", "--overwrite"]);
    assert_eq!(Tokenizer::open(Path::new(out)).unwrap().vocab(), 300);
}

#[test]
fn an_interrupted_training_leaves_the_old_tokenizer() {
    let fixture = Fixture::new();
    let out = fixture.at("out");
    fixture.train("out", &["--vocab-size", "300"]);
    let old = fs::read(out.join("tokenizer.json")).unwrap();
    // The input does not end.
    let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
    let args = ["tokenizer", "train", "-", "--overwrite", "--out", text(&out)];
    let mut child = command.args(args).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(&b"some text\n".repeat(1 << 20)).unwrap();
    thread::sleep(Duration::from_millis(200));
    let kill = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(kill.success() && !child.wait().unwrap().success());
    assert_eq!(names(&out), ["tokenizer.json", "tokenizer.tiktoken"]);
    assert_eq!(fs::read(out.join("tokenizer.json")).unwrap(), old);
}

#[test]
fn compared_texts_are_read_like_those_of_data_text() {
    let fixture = Fixture::new();
    let lines = fixture.at("text.jsonl");
    let output = llm_rs(&["tokenizer", "compare", "--text", text(&lines), "--field", "body"]);
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(printed.starts_with(&format!("{} bytes of text\n", include_str!("../docs/testing.md").len())), "{printed}");
    fail(&["tokenizer", "compare", "--text", text(&lines)], &["text.jsonl, line 1: expected a field"]);
}
