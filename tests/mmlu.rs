//! MMLU: the evaluation file against one written by `scripts/multiple_choice_reference.py`, and every error of the CSV files.

use data::mmlu::{self, Split};
use data::multiple_choice::{Example, MultipleChoice, write};
use std::fs;
use std::path::{Path, PathBuf};
use std::slice;

const BIN: &[u8] = include_bytes!("data/mmlu.bin");

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/mmlu")
}

#[test]
fn evaluation_file_matches_the_reference_writer() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("set.bin");
    let files = mmlu::find(&fixture(), Split::Test, dir.path()).unwrap();
    let names: Vec<_> = files.iter().map(|file| file.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(names, ["arithmetic_test.csv", "world_literature_test.csv"]);
    let questions = mmlu::read(&files, 1023).unwrap();
    assert_eq!(questions.shortened, 0);
    write(&path, &questions.examples).unwrap();
    assert!(fs::read(&path).unwrap() == BIN, "the bytes differ");
    assert_eq!(MultipleChoice::read("fixture".into(), BIN).unwrap().examples(), questions.examples);
    let labels: Vec<usize> = questions.examples.iter().map(|example| example.label).collect();
    assert_eq!(labels, [1, 2, 0, 3, 1]);
    // Question: What is 2 + 2?\n\nAnswer:
    let context = [24361, 25, 1867, 318, 362, 1343, 362, 30, 198, 198, 33706, 25];
    assert_eq!(questions.examples[0].context, context);
    assert_eq!(questions.examples[0].completions, [[513], [604], [642], [2534]]);
}

#[test]
fn files_are_found_in_the_directories_of_the_archive() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "Q,1,2,3,4,A\n").unwrap();
        path
    };
    let find = |split| mmlu::find(dir.path(), split, Path::new("unused"));
    let message = find(Split::Val).unwrap_err().to_string();
    assert!(
        message.contains("expected files *_val.csv in it, in val/ or in data/val/, found none; extract"),
        "{message}"
    );
    let archive = [file("data/test/b_test.csv"), file("data/test/a_test.csv")];
    file("data/test/readme.txt");
    file("data/dev/a_dev.csv");
    assert_eq!(find(Split::Test).unwrap(), [archive[1].clone(), archive[0].clone()]);
    assert!(find(Split::Dev).unwrap()[0].ends_with("data/dev/a_dev.csv"));
    let nearer = file("test/z_test.csv");
    assert_eq!(find(Split::Test).unwrap(), [nearer]);
    let nearest = file("c_test.csv");
    assert_eq!(find(Split::Test).unwrap(), slice::from_ref(&nearest));
    // A file is taken whatever its name is.
    assert_eq!(mmlu::find(&nearest, Split::Dev, Path::new("unused")).unwrap(), [nearest]);
}

#[test]
fn long_questions_lose_their_beginning() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("long_test.csv");
    fs::write(&path, format!("{},1,2,3 4 5,6,C\nWhat?,1,2,3 4 5,6,C\n", "word ".repeat(100).trim())).unwrap();
    let files = [path];
    let whole = mmlu::read(&files, 1023).unwrap();
    assert_eq!(whole.shortened, 0);
    let longest = whole.examples[0].longest();
    let cut = mmlu::read(&files, longest - 7).unwrap();
    assert_eq!(cut.shortened, 1);
    assert_eq!(cut.examples[1], whole.examples[1]);
    let Example { context, completions, label } = &cut.examples[0];
    assert_eq!(
        (&context[..], completions, label),
        (&whole.examples[0].context[7..], &whole.examples[0].completions, &2)
    );
    assert_eq!(mmlu::read(&files, longest).unwrap(), whole);
    let message = format!("{:#}", mmlu::read(&files, 3).unwrap_err());
    let expected =
        "long_test.csv, line 1: column C: expected a choice of fewer than 3 tokens, found 3; use a larger --max-tokens";
    assert!(message.ends_with(expected), "{message}");
}

#[test]
fn errors_name_the_file_the_line_and_the_column() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad_test.csv");
    let error_of = |row: &[u8]| {
        let good = b"\"Two\nlines?\",1,2,3,4,A\n\n";
        fs::write(&path, [good, row, b"\nQ,1,2,3,4,B\n"].concat()).unwrap();
        let message = format!("{:#}", mmlu::read(slice::from_ref(&path), 1023).unwrap_err());
        assert!(message.contains("bad_test.csv, line 4: "), "{message}");
        message
    };
    for (row, expected) in [
        ("Q,1,2,3,A", "expected 6 columns (question, A, B, C, D, answer), found 5"),
        ("Q,1,2,3,4,5,A", "expected 6 columns (question, A, B, C, D, answer), found 7"),
        ("Q, with a comma,1,2,3,4,A", "found 7"),
        ("{\"question\": 1}", "found 1"),
        ("Q,1,2,3,4,E", "column answer: expected A, B, C or D, found 'E'"),
        ("Q,1,2,3,4,a", "found 'a'"),
        ("Q,1,2,3,4,A ", "found 'A '"),
        ("Q,1,2,3,4,", "found ''"),
        ("question,A,B,C,D,answer", "found 'answer' (the files have no header)"),
        (",1,2,3,4,A", "column question: expected text, found none"),
        ("\" \n\",1,2,3,4,A", "column question: expected text, found none"),
        // The quote extends to the end of the file.
        ("Q,1,2,3,4,\"A", "column answer: expected A, B, C or D, found 'A"),
        ("\"Q,1,2,3,4,A", "expected 6 columns (question, A, B, C, D, answer), found 1"),
    ] {
        let message = error_of(row.as_bytes());
        assert!(message.contains(expected), "{expected}: {message}");
    }
    assert!(error_of(b"Q,1,\xff,3,4,A").contains("column B: expected UTF-8, found other bytes"));
    assert!(error_of(b"\xc3,1,2,3,4,A").contains("column question: expected UTF-8"));
    assert!(error_of(b"Q,1,2,3,4,\xff").contains("column answer: expected UTF-8"));

    let error = |file: &Path| format!("{:#}", mmlu::read(&[file.to_owned()], 1023).unwrap_err());
    fs::write(&path, "\n\n").unwrap();
    assert!(error(&path).contains("bad_test.csv: expected at least one row, found none"));
    assert!(error(Path::new("none_test.csv")).contains("cannot read none_test.csv: No such file"));
    assert!(error(dir.path()).contains("cannot read "));
    fs::write(&path, "Q,1,2,3,4,A\n".repeat(65_536)).unwrap();
    assert!(error(&path).contains("expected at most 65535 questions in all files, found 65536"));
}
