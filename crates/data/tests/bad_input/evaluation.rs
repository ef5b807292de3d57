//! HellaSwag's JSON lines, MMLU's CSV files, and evaluation files, as `data hellaswag`, `data mmlu` and `eval` read them.

use crate::kinds::Kinds;
use data::multiple_choice::{self, MultipleChoice};
use data::{hellaswag, mmlu};
use std::fs;
use std::path::Path;

const EXAMPLE: &str = r#"{"ctx": "He", "label": 2, "endings": ["eats.", "sleeps.", "runs.", "sits."]}"#;

pub fn run(kinds: &mut Kinds) {
    hellaswag_kinds(kinds);
    mmlu_kinds(kinds);
    file_kinds(kinds);
}

fn hellaswag_kinds(kinds: &mut Kinds) {
    let mut rejects = |kind: &str, bytes: &[u8], parts: &[&str]| {
        let path = kinds.file("set.jsonl", bytes);
        kinds.fails(&format!("HellaSwag, {kind}"), &[parts, &["set.jsonl"]].concat(), |kinds| {
            multiple_choice::write(&kinds.out().join("set.bin"), &hellaswag::read(&path)?)
        });
    };
    let mut line = |kind: &str, from: &str, to: &str, parts: &[&str]| {
        let bad = EXAMPLE.replace(from, to);
        assert!(bad != EXAMPLE);
        rejects(kind, format!("{EXAMPLE}\n{bad}\n").as_bytes(), &[parts, &["line 2"]].concat());
    };
    line("no JSON", EXAMPLE, "He sits.", &["not valid JSON"]);
    line("unterminated object", "}", "", &["not valid JSON"]);
    line("array", EXAMPLE, "[1]", &["expected an object, found an array"]);
    line("missing context", "\"ctx\"", "\"context\"", &["field 'ctx' is missing"]);
    line("missing endings", "\"endings\"", "\"ends\"", &["field 'endings' is missing"]);
    line("missing label", "\"label\"", "\"gold\"", &["field 'label' is missing"]);
    line("empty context", "\"He\"", "\"\"", &["field 'ctx': expected text, found an empty string"]);
    line("number as context", "\"He\"", "7", &["field 'ctx': expected a string, found 7"]);
    line("label out of range", ": 2", ": 4", &["field 'label': expected 0, 1, 2 or 3", "found 4"]);
    line("negative label", ": 2", ": -1", &["field 'label': expected 0, 1, 2 or 3", "found -1"]);
    line("empty label of the test set", ": 2", ": \"\"", &["a test set without labels", "found an empty string"]);
    line("three endings", "\"eats.\", ", "", &["field 'endings': expected 4 strings, found 3"]);
    line("five endings", "\"eats.\"", "\"a\", \"b\"", &["field 'endings': expected 4 strings, found 5"]);
    line(
        "endings that are no array",
        "[\"eats.\", \"sleeps.\", \"runs.\", \"sits.\"]",
        "\"eats.\"",
        &["an array of strings"],
    );
    line("number as ending", "\"eats.\"", "1.5", &["field 'endings': expected strings, found 1.5"]);
    rejects("empty file", b"", &["expected 1 to 65535 examples, one per line, found 0"]);
    rejects("blank lines only", b"\n\n", &["expected 1 to 65535 examples, one per line, found 0"]);
    rejects("invalid UTF-8", b"{\"ctx\": \"\xff\"}", &["cannot read", "valid UTF-8"]);
    rejects("too many examples", "\n{}".repeat(65_536).as_bytes(), &["expected 1 to 65535 examples", "found 65536"]);
    let directory = kinds.out();
    kinds.fails("HellaSwag, directory", &["cannot read", "out", "directory"], |_| hellaswag::read(&directory));
}

fn mmlu_kinds(kinds: &mut Kinds) {
    let good = "What is 1 + 1?,1,2,3,4,B\n";
    for (kind, rows, parts) in [
        (
            "five columns",
            &b"Q,1,2,3,B\n"[..],
            &["expected 6 columns (question, A, B, C, D, answer), found 5", "line 2"][..],
        ),
        ("seven columns", b"Q,1,2,3,4,B,x\n", &["expected 6 columns", "found 7", "line 2"]),
        ("answer out of range", b"Q,1,2,3,4,E\n", &["column answer: expected A, B, C or D, found 'E'", "line 2"]),
        ("number as answer", b"Q,1,2,3,4,1\n", &["column answer: expected A, B, C or D, found '1'", "line 2"]),
        ("header", b"question,A,B,C,D,answer\n", &["found 'answer' (the files have no header)", "line 2"]),
        ("empty question", b" ,1,2,3,4,A\n", &["column question: expected text, found none", "line 2"]),
        ("invalid UTF-8", b"Q,\xff,2,3,4,A\n", &["column A: expected UTF-8, found other bytes", "line 2"]),
        ("unterminated quotation mark", b"\"Q,1,2,3,4,A\nQ,1,2,3,4,A\n", &["expected 6 columns", "found 1", "line 2"]),
    ] {
        let path = kinds.file("art_test.csv", &[good.as_bytes(), rows].concat());
        kinds.fails(&format!("MMLU, {kind}"), &[parts, &["art_test.csv"]].concat(), |kinds| {
            multiple_choice::write(&kinds.out().join("set.bin"), &mmlu::read(&[path], 1023)?.examples)
        });
    }
    let path = kinds.file("art_test.csv", b"");
    kinds.fails("MMLU, empty file", &["art_test.csv: expected at least one row, found none"], |_| {
        mmlu::read(&[path], 1023)
    });
    let path = kinds.file("art_test.csv", format!("Q,{},2,3,4,A\n", "word ".repeat(2000)).as_bytes());
    let parts =
        ["art_test.csv, line 1", "column A: expected a choice of fewer than 1023 tokens, found", "--max-tokens"];
    kinds.fails("MMLU, long choice", &parts, |_| mmlu::read(&[path], 1023));
    let parts = ["out: expected files *_test.csv", "found none", "extract data.tar"];
    kinds.fails("MMLU, directory without the split", &parts, |kinds| {
        mmlu::find(&kinds.out(), mmlu::Split::Test, Path::new("unused"))
    });
}

fn file_kinds(kinds: &mut Kinds) {
    let jsonl = kinds.file("good.jsonl", EXAMPLE.as_bytes());
    let path = kinds.path("good_set.bin");
    multiple_choice::write(&path, &hellaswag::read(&jsonl).unwrap()).unwrap();
    let good = fs::read(&path).unwrap();
    let word = |at: usize, value: u16| {
        let mut bytes = good.clone();
        bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
        bytes
    };
    for (kind, bytes, parts) in [
        ("truncated header", good[..500].to_vec(), &["expected a header of 1024 bytes, found 500"][..]),
        ("token file", fs::read(kinds.out().join("set.bin")).unwrap(), &["expected magic 20240522, found 20240520"]),
        ("no examples", word(8, 0), &["number of examples: expected 1 to 65535 in the header, found 0"]),
        ("truncated example", good[..good.len() - 2].to_vec(), &["example 0 of 1: truncated: expected"]),
        ("missing example", word(8, 2), &["example 1 of 2: truncated"]),
        ("trailing bytes", [&good[..], &[0]].concat(), &["too long: expected the end of the file after 1 examples"]),
        ("wrong marker", word(1024, 1), &["example 0 of 1: expected the marker 65535, found 1"]),
        ("odd size", word(1026, 41), &["example 0 of 1: expected an even size"]),
        ("wrong index", word(1028, 9), &["example 0 of 1: expected index 0, found 9"]),
        ("label out of range", word(1030, 4), &["example 0 of 1: expected a label of 0 to 3, found 4"]),
        ("five completions", word(1032, 5), &["example 0 of 1: expected 4 completions, found 5"]),
        ("context beyond the example", word(1034, 60_000), &["the context extends beyond the example's"]),
        ("empty context", word(1034, 0), &["the context has no tokens"]),
    ] {
        let path = kinds.file("bad_set.bin", &bytes);
        kinds.fails(&format!("evaluation file, {kind}"), &[parts, &["bad_set.bin"]].concat(), |_| {
            MultipleChoice::open(&path)
        });
    }
}
