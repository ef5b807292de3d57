//! Commands that the program prints for data: they work as printed.

use crate::common::{fail, text};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

const LINE: &str = "A machine prints a command, and a person runs the command that it has printed. ";
const TINY: &[&str] = &["--layers", "1", "--heads", "2", "--channels", "16", "--batch", "2", "--seq", "16"];

/// Runs a command line in a shell.
fn shell(directory: &Path, command: &str) -> Output {
    let mut shell = Command::new("sh");
    // Without cargo's variable, hints name the program as it was called.
    shell.current_dir(directory).args(["-c", command]).env_remove("CARGO").output().unwrap()
}

fn succeeds(directory: &Path, command: &str) -> String {
    let output = shell(directory, command);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command}: {out}{err}");
    out.into_owned()
}

/// Writes a parquet file with a column of names and one of texts.
fn write_parquet(path: &Path) {
    let schema = Arc::new(parse_message_type("message m { required binary id; required binary story; }").unwrap());
    let file = fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(WriterProperties::default())).unwrap();
    let mut group = writer.next_row_group().unwrap();
    for value in ["", LINE] {
        let mut column = group.next_column().unwrap().unwrap();
        let values = vec![ByteArray::from(value); 20];
        column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
        column.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
}

/// Writes text in each format that `data text` reads.
fn write_texts(directory: &Path) {
    let docs = directory.join("my docs");
    fs::create_dir(&docs).unwrap();
    fs::write(docs.join("data.md"), LINE.repeat(20)).unwrap();
    fs::write(directory.join("plain.txt"), LINE.repeat(20)).unwrap();
    succeeds(directory, "gzip -k plain.txt");
    let repeated = |row: &str| row.replace("LINE", LINE).repeat(20);
    fs::write(directory.join("lines.jsonl"), repeated("{\"text\": \"LINE\"}\n")).unwrap();
    fs::write(directory.join("nested.jsonl"), repeated("{\"id\": \"1\", \"of\": {\"body\": \"LINE\"}}\n")).unwrap();
    fs::write(directory.join("table.csv"), format!("id,the words\n{}", repeated("1,\"LINE\"\n"))).unwrap();
    write_parquet(&directory.join("rows.parquet"));
}

#[test]
fn text_instead_of_token_files_is_an_error_with_the_command_that_tokenizes_it() {
    let dir = tempfile::tempdir().unwrap();
    write_texts(dir.path());
    let program = env!("CARGO_BIN_EXE_llm-rs");
    for (pattern, out, flags) in [
        ("my docs/data.md", "data/data", ""),
        ("my docs", "data/my docs", ""),
        ("my docs/*.md", "data/my docs-2", ""),
        ("plain.txt", "data/plain", ""),
        ("plain.txt.gz", "data/plain-2", ""),
        ("lines.jsonl", "data/lines", ""),
        ("nested.jsonl", "data/nested", "--field of.body"),
        ("table.csv", "data/table", "--field 'the words'"),
        ("rows.parquet", "data/rows", "--field story"),
    ] {
        let output = shell(dir.path(), &format!("{program} train --device cpu --train '{pattern}'"));
        let err = String::from_utf8_lossy(&output.stderr);
        let start = format!("error: --train: {pattern}: expected token files (.bin), found text; tokenize it first: ");
        let command = err.strip_prefix(&start).unwrap_or_else(|| panic!("{err}")).trim_end();
        assert!(command.contains(&format!("{program} data text ")) && command.contains(flags), "{command}");
        succeeds(dir.path(), command);
        let train = format!("{program} train --device cpu --steps 1 --train '{out}/train_*.bin' {}", TINY.join(" "));
        succeeds(dir.path(), &train);
    }
    // Other files that are no token files.
    fs::write(dir.path().join("model.safetensors"), [0; 2000]).unwrap();
    let other = dir.path().join("model.safetensors");
    let printed = fail(&["train", "--device", "cpu", "--train", text(&other)], &["model.safetensors", "magic"]);
    assert!(!printed.contains("data text"), "{printed}");
    let shards = dir.path().join("data/lines");
    fail(&["train", "--device", "cpu", "--train", text(&shards)], &["found a directory; use the pattern", "/*.bin'"]);
}

/// The sizes differ from those of the default batch of `train`.
#[test]
fn the_command_after_data_text_works_as_printed() {
    let dir = tempfile::tempdir().unwrap();
    let play = dir.path().join("play.txt");
    for (i, (lines, flags)) in [
        (400, "--val-fraction 0.05"),
        // The validation split has fewer tokens than a sequence.
        (20, "--val-fraction 0.01"),
        // The last shard is smaller than the others.
        (40, "--shard-tokens 500"),
    ]
    .into_iter()
    .enumerate()
    {
        fs::write(&play, LINE.repeat(lines)).unwrap();
        let program = env!("CARGO_BIN_EXE_llm-rs");
        let data = format!("{program} data text play.txt --out 'out [{i}]' --tokenizer bytes {flags}");
        let printed = succeeds(dir.path(), &data);
        let next = printed.lines().find_map(|line| line.strip_prefix("next: ")).unwrap();
        assert!(!next.contains("d12"), "{next}");
        assert_eq!(next.contains("--val-every"), next.contains("--val "), "{next}");
        let short = next.replace("--steps 100", "--steps 2");
        assert_ne!(short, next, "{next}");
        let trained = succeeds(dir.path(), &format!("{short} --device cpu"));
        assert!(trained.contains("step    2/2 | loss "), "{trained}");
    }
}
