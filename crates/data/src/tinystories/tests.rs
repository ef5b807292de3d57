use super::*;
use crate::Tokens;
use crate::dataset::Dataset;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::json;
use std::fs::File;
use tar::{Builder, Header};

/// Stories with white space at both ends and special tokens. Python's `strip` removes `\x1f`.
fn story(file: usize, i: usize) -> String {
    format!(
        "\n \u{1f}Story {i} of file {file}.\n\n{}<|endoftext|> The end.\u{a0} \n",
        "Once upon a time. ".repeat(i % 5)
    )
}

fn stripped(file: usize, i: usize) -> String {
    story(file, i).replace('\u{1f}', "").trim().to_owned()
}

/// The JSON files: data00.json with 10 stories, data01.json with 10, data02.json with 10.
fn json_files() -> Vec<(String, Vec<u8>)> {
    let object = |file, i| {
        json!({
            "story": story(file, i), "instruction": {"prompt:": "Write a story.", "words": ["a"], "features": []},
            "summary": "…", "source": "GPT-4"
        })
    };
    let array = |file| serde_json::to_vec(&(0..10).map(|i| object(file, i)).collect::<Vec<_>>()).unwrap();
    (0..3).map(|file| (format!("data{file:02}.json"), array(file))).collect()
}

fn archive(path: &Path, files: &[(String, Vec<u8>)]) {
    let mut builder = Builder::new(GzEncoder::new(File::create(path).unwrap(), Compression::fast()));
    for (name, bytes) in files {
        let mut header = Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        header.set_cksum();
        builder.append_data(&mut header, name, &bytes[..]).unwrap();
    }
    builder.into_inner().unwrap().finish().unwrap();
}

fn run(from: &Path, out: &Path) -> Result<Summary> {
    write(from, out, &Tokenizer::gpt2(), "test")
}

fn tokens(path: &Path) -> Vec<u32> {
    let file = Tokens::open(path).unwrap();
    let mut ids = vec![0; file.len()];
    file.read(0, &mut ids).unwrap();
    ids
}

/// Orders of `random.Random(seed).shuffle(list(range(10)))` in Python.
const ORDER_1337: [usize; 10] = [0, 3, 7, 2, 1, 6, 4, 5, 8, 9];
const ORDER_1338: [usize; 10] = [1, 0, 6, 2, 9, 8, 3, 7, 4, 5];

fn expected(parts: &[(usize, [usize; 10])]) -> Vec<u32> {
    let documents = parts.iter().flat_map(|(file, order)| order.iter().map(|&i| stripped(*file, i)));
    documents.flat_map(|text| [vec![50256], Tokenizer::gpt2().encode(&text).unwrap()].concat()).collect()
}

#[test]
fn stories_are_stripped_shuffled_and_split_as_in_llm_c() {
    let dir = tempfile::tempdir().unwrap();
    let tar = dir.path().join("TinyStories_all_data.tar.gz");
    let mut files = json_files();
    // The order in the archive does not matter, and other files are ignored.
    files.reverse();
    files.push(("notes/README.txt".into(), b"text".to_vec()));
    files.push(("._data00.json".into(), b"metadata of a Mac".to_vec()));
    archive(&tar, &files);
    let directory = dir.path().join("json");
    fs::create_dir(&directory).unwrap();
    for (name, bytes) in json_files() {
        fs::write(directory.join(name), bytes).unwrap();
    }
    for from in [&tar, &directory] {
        let out = dir.path().join("out");
        let summary = run(from, &out).unwrap();
        let (val, train) = (tokens(&out.join("TinyStories_val.bin")), tokens(&out.join("TinyStories_train.bin")));
        assert!(val == expected(&[(0, ORDER_1337)]));
        // The seeds of the training files count from 1337 again.
        assert!(train == expected(&[(1, ORDER_1337), (2, ORDER_1338)]));
        let dataset = Dataset::read(&out).unwrap().unwrap();
        assert_eq!((dataset.name.as_str(), dataset.tokenizer.name.as_str()), ("TinyStories", "gpt2"));
        assert_eq!((dataset.val.tokens, dataset.train.tokens), (val.len(), train.len()));
        assert_eq!((dataset.input.files, dataset.input.documents), (3, 30));
        assert_eq!(dataset.input, summary.input);
        let mut names: Vec<_> = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["TinyStories_train.bin", "TinyStories_val.bin", "dataset.json"]);
    }
}

fn error(from: &Path) -> String {
    let out = tempfile::tempdir().unwrap();
    fs::write(out.path().join("TinyStories_val.bin"), "old").unwrap();
    let message = format!("{:#}", run(from, out.path()).unwrap_err());
    let kept: Vec<_> = fs::read_dir(out.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(kept, ["TinyStories_val.bin"], "{message}");
    message
}

#[test]
fn bad_input_is_an_error_that_keeps_the_old_files() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("json");
    fs::create_dir(&from).unwrap();
    assert!(error(&from).contains("expected files that end in .json, found none"));
    fs::write(from.join("data00.json"), &json_files()[0].1).unwrap();
    assert!(error(&from).contains("expected at least 2 JSON files"));
    for (json, part) in [
        ("[{\"story\": \"a\"}, {\"text\": \"b\"}]", "missing field `story`"),
        ("[{\"story\": 5}]", "invalid type: integer `5`, expected a string"),
        ("{\"story\": \"a\"}", "expected a sequence"),
        ("[{\"story\": \"a\"}", "EOF while parsing"),
        ("[]", "found an empty array"),
        ("[{\"story\": \"\\ud800\"}]", "hex escape"),
        ("", "EOF while parsing"),
    ] {
        fs::write(from.join("data01.json"), json).unwrap();
        let message = error(&from);
        assert!(message.contains("data01.json: expected") && message.contains(part), "{json}: {message}");
    }
    assert!(error(&dir.path().join("none.tar.gz")).contains("none.tar.gz"));
    let tar = dir.path().join("x.tar.gz");
    fs::write(&tar, "not an archive").unwrap();
    assert!(error(&tar).contains("x.tar.gz: expected a complete .tar.gz archive"));
    archive(&tar, &json_files());
    let complete = fs::read(&tar).unwrap();
    fs::write(&tar, &complete[..complete.len() - 20]).unwrap();
    assert!(error(&tar).contains("x.tar.gz: expected a complete .tar.gz archive"));
    archive(&tar, &[json_files()[0].clone(), ("other/data00.json".into(), b"[]".to_vec())]);
    assert!(error(&tar).contains("expected one file data00.json, found two"));
    archive(&tar, &[("a.txt".into(), b"text".to_vec())]);
    assert!(error(&tar).contains("found none of its files"));
}

#[test]
fn stories_without_text_are_documents() {
    let dir = tempfile::tempdir().unwrap();
    for (i, json) in [r#"[{"story": " "}]"#, r#"[{"story": ""}, {"story": "a"}]"#].into_iter().enumerate() {
        fs::write(dir.path().join(format!("data0{i}.json")), json).unwrap();
    }
    let out = dir.path().join("out");
    run(dir.path(), &out).unwrap();
    assert_eq!(tokens(&out.join("TinyStories_val.bin")), [50256]);
    assert_eq!(tokens(&out.join("TinyStories_train.bin")).len(), 3);
}

#[test]
fn shards_of_another_data_set_are_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in json_files() {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    fs::write(out.join("train_000000.bin"), "other").unwrap();
    let message = run(dir.path(), &out).unwrap_err().to_string();
    assert!(message.contains("train_000000.bin") && message.contains("use another --out"), "{message}");
    assert_eq!(fs::read_dir(&out).unwrap().count(), 1);
}
