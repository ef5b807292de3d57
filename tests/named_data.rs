//! The commands of named data sets, `data check` and `data show`, and training on many or damaged shards.

use crate::common::hub::{Defect, Hub, pages};
use crate::common::{NO_SERVER, fail, llm_rs, succeed, text};
use data::Tokens;
use data::tokens::{self, Width};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

const TINY: &[&str] = &["--layers", "1", "--heads", "2", "--channels", "16", "--batch", "2", "--seq", "16"];

fn printed(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Returns the names of the files in a directory.
fn entries(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn write(dir: &Path, name: &str, ids: &[u16]) -> PathBuf {
    let path = dir.join(name);
    tokens::write(&path, ids, Width::U16).unwrap();
    path
}

#[test]
fn training_reads_more_shards_than_a_process_may_open_files() {
    let dir = tempfile::tempdir().unwrap();
    let shard = fs::read(write(dir.path(), "train_0000.bin", &[7; 40])).unwrap();
    for i in 1..3000 {
        fs::write(dir.path().join(format!("train_{i:04}.bin")), &shard).unwrap();
    }
    let pattern = dir.path().join("train_*.bin");
    let program = env!("CARGO_BIN_EXE_llm-rs");
    let command =
        format!("ulimit -n 256; exec {program} train --device cpu --train '{}' --steps 3 \"$@\"", pattern.display());
    for shuffle in ["0", "1"] {
        let mut bash = Command::new("bash");
        bash.args(["-c", &command, "bash", "--shuffle", shuffle, "--out", text(&dir.path().join(shuffle))]).args(TINY);
        let output = bash.output().unwrap();
        assert!(output.status.success(), "{}", printed(&output));
        assert!(printed(&output).contains("step    3/3 | loss "), "{}", printed(&output));
    }
}

#[test]
fn damaged_ids_are_found_before_the_first_step() {
    let dir = tempfile::tempdir().unwrap();
    let good = vec![7u16; 1000];
    let mut bad = good.clone();
    bad[995] = 50257;
    for i in 0..8 {
        write(dir.path(), &format!("train_{i}.bin"), if i == 6 { &bad } else { &good });
    }
    let train = dir.path().join("train_*.bin");
    let out = dir.path().join("out");
    let args = ["train", "--device", "cpu", "--train", text(&train), "--steps", "2", "--out", text(&out)];
    let expected = ["train_6.bin: token 50257 at position 995", "below 50257"];
    let printed = fail(&[&args[..], TINY].concat(), &expected);
    assert!(!printed.contains("step "), "{printed}");
    assert!(!out.join("main.log").exists());
    let good = write(dir.path(), "good.bin", &good);
    let val = write(dir.path(), "val.bin", &bad);
    let args = ["train", "--device", "cpu", "--train", text(&good), "--val", text(&val), "--steps", "2"];
    fail(&[&args[..], TINY].concat(), &["--val", "val.bin: token 50257 at position 995"]);
}

#[test]
fn check_prints_a_table_and_each_problem() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "a_0.bin", &[50256, 1, 2, 50256, 3, 4, 5]);
    write(dir.path(), "a_1.bin", &[6, 7, 50256, 8]);
    let all = dir.path().join("a_*.bin");
    let table = succeed(&["data", "check", text(&all)]);
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[1][..6], ["7", "16", "2", "4", "50256", "document"], "{table}");
    assert_eq!(rows[2][..6], ["4", "16", "1", "2", "50256", "inside"], "{table}");
    assert!(table.ends_with("11 tokens, 3 documents in 2 files\n"), "{table}");

    let bad = dir.path().join("a_2.bin");
    fs::write(&bad, &fs::read(dir.path().join("a_0.bin")).unwrap()[..1030]).unwrap();
    write(dir.path(), "a_3.bin", &[50256, 60000, 1, 50257]);
    write(dir.path(), "a_4.bin", &[1, 2, 3]);
    reports(
        &[text(&all)],
        &[
            "a_2.bin is truncated: expected 1038 bytes for the 7 tokens in the header, found 1030",
            "a_3.bin: token 60000 at position 1: expected ids below 50257",
            "a_3.bin: token 50257 at position 3: expected ids below 50257",
            "a_4.bin: expected token 50256 before each document, found none",
        ],
        5,
    );
    let output = llm_rs(&["data", "check", text(&all), "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(!output.status.success() && json["problems"] == 4 && json["documents"] == 4, "{json}");
    let files = json["files"].as_array().unwrap();
    assert_eq!((&files[0]["tokens"], &files[0]["starts_with_document"]), (&7.into(), &true.into()), "{json}");
    assert!(files[2]["tokens"].is_null() && files[2]["problems"][0].as_str().unwrap().contains("a_2.bin is truncated"));
    let second = dir.path().join("a_1.bin");
    let problems = ["token 50256 at position 2: expected ids below 8", "token 8 at position 3: expected ids below 8"];
    reports(&[text(&second), "--vocab", "8"], &problems, 1);
    let problems =
        ["token 50256 at position 2: expected ids below 256", "expected token 10 before each document, found none"];
    reports(&[text(&second), "--tokenizer", "bytes"], &problems, 1);
    let problems = ["expected a token file (.bin), found a directory; use the pattern"];
    reports(&[text(dir.path())], &problems, 1);
    fail(&["data", "check", "/nowhere/*.bin"], &["no file matches '/nowhere/*.bin'"]);

    let wide = dir.path().join("wide.bin");
    tokens::write(&wide, &[128_000u32, 128_255, 5], Width::U32).unwrap();
    assert!(succeed(&["data", "check", text(&wide)]).contains("1 document in 1 file\n"));
    tokens::write(&wide, &[128_000u32, 128_256], Width::U32).unwrap();
    reports(&[text(&wide)], &["token 128256 at position 1: expected ids below 128256"], 1);
}

#[test]
fn shards_inside_of_long_documents_pass_the_check_and_damaged_ones_do_not() {
    let dir = tempfile::tempdir().unwrap();
    let words = "The rain in Spain stays mainly in the plain. ";
    for i in 0..3 {
        fs::write(dir.path().join(format!("{i}.txt")), words.repeat(300)).unwrap();
    }
    let write = |out: &str, file: &str, flags: &[&str]| {
        let (out, file) = (dir.path().join(out), dir.path().join(file));
        let data = ["data", "text", text(&file), "--out", text(&out), "--shard-tokens", "1000"];
        succeed(&[&data[..], flags].concat());
        out
    };
    let one = write("one", "0.txt", &[]);
    let several = write("several", "?.txt", &["--val-fraction", "0.2"]);
    for out in [&one, &several] {
        let table = succeed(&["data", "check", text(&out.join("*.bin"))]);
        assert!(table.contains(" 0 ") && table.contains(" inside "), "{table}");
        // Each file passes alone, too.
        for name in entries(out).iter().filter(|name| Path::new(name).extension().is_some_and(|kind| kind == "bin")) {
            succeed(&["data", "check", text(&out.join(name))]);
        }
    }
    let shard = one.join("train_000001.bin");
    let bytes = fs::read(&shard).unwrap();
    let different = |damaged: &[u8]| {
        fs::write(&shard, damaged).unwrap();
        reports(
            &[text(&one.join("*.bin"))],
            &["train_000001.bin: expected tokens with hash "],
            entries(&one).len() - 1,
        );
    };
    let mut one_bit = bytes.clone();
    one_bit[2000] ^= 1;
    different(&one_bit);
    different(&[&bytes[..1024], &vec![0; bytes.len() - 1024]].concat());
    fs::write(&shard, &bytes).unwrap();
    succeed(&["data", "check", text(&one.join("*.bin"))]);
    // Earlier versions recorded no hashes.
    let description = one.join("dataset.json");
    let mut json: serde_json::Value = serde_json::from_str(&fs::read_to_string(&description).unwrap()).unwrap();
    for split in ["train", "val"] {
        json[split].as_object_mut().unwrap().remove("hashes");
    }
    fs::write(&description, json.to_string()).unwrap();
    succeed(&["data", "check", text(&one.join("*.bin"))]);
}

/// Asserts that `data check` prints these problems in this number of files, and no others.
fn reports(args: &[&str], problems: &[&str], files: usize) {
    let s = |n: usize| if n == 1 { "" } else { "s" };
    let found = problems.len();
    let error = format!("expected valid token files, found {found} problem{} in {files} file{}", s(found), s(files));
    let printed = fail(&[&["data", "check"], args].concat(), &[&error]);
    let found: Vec<&str> = printed.lines().filter(|line| line.starts_with("problem: ")).collect();
    assert_eq!(found.len(), problems.len(), "{printed}");
    for (found, problem) in found.iter().zip(problems) {
        assert!(found.contains(problem), "expected '{problem}' in: {found}");
    }
}

#[test]
fn show_prints_tokens_and_text_around_a_position() {
    let dir = tempfile::tempdir().unwrap();
    // "Hello world" and a line break.
    let file = write(dir.path(), "a.bin", &[50256, 15496, 995, 198, 65535, 50256]);
    let printed = succeed(&["data", "show", text(&file), "--at", "2", "--count", "3"]);
    let lines: Vec<Vec<&str>> = printed.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[3], ["1", "15496", "Hello"]);
    assert_eq!(lines[4], [">", "2", "995", "world"]);
    assert_eq!(lines[5], ["3", "198", "\\n"]);
    assert!(printed.ends_with("\n\nHello world\n\n"), "{printed}");
    let printed = succeed(&["data", "show", text(&file), "--at", "5", "--count", "2"]);
    assert!(printed.contains("65535  (outside the vocabulary of 50257 tokens)"), "{printed}");
    assert!(printed.contains(">          5   50256  <|endoftext|>"), "{printed}");
    assert_eq!(succeed(&["data", "show", text(&file)]).matches("<|endoftext|>").count(), 4);
    fail(&["data", "show", text(&file), "--at", "6"], &["--at 6: expected a position below 6"]);
    fail(&["data", "show", "/nowhere/a.bin"], &["/nowhere/a.bin"]);
    let wide = dir.path().join("wide.bin");
    tokens::write(&wide, &[128_000u32, 5], Width::U32).unwrap();
    let printed = succeed(&["data", "show", text(&wide)]);
    assert!(printed.contains("128000") && printed.contains("--tokenizer FILE"), "{printed}");
}

#[test]
fn tinystories_are_written_and_can_be_trained_on() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("json");
    fs::create_dir(&from).unwrap();
    let json = r#"[{"story": "\nOnce upon a time there was a cat.\n", "source": "GPT-4"}, {"story": "The end."}]"#;
    for i in 0..9 {
        fs::write(from.join(format!("data0{i}.json")), json).unwrap();
    }
    let out = dir.path().join("out");
    let printed = succeed(&["data", "tinystories", "--from", text(&from), "--out", text(&out)]);
    assert!(printed.contains("read 18 documents, 369 bytes, from 9 files"), "{printed}");
    // Ids of tiktoken: 1 + 9 and 1 + 3 tokens.
    let (train, val) = (out.join("TinyStories_train.bin"), out.join("TinyStories_val.bin"));
    assert!(printed.contains(&format!("wrote 112 tokens for train, 1 shard: {}", train.display())), "{printed}");
    assert!(printed.contains(&format!("wrote 14 tokens for val, 1 shard: {}", val.display())), "{printed}");
    // The validation split is too small for a batch.
    assert!(printed.contains(&format!(" train --train {} --", train.display())), "{printed}");
    let training =
        [&["train", "--device", "cpu", "--train", text(&train), "--steps", "1", "--out", "none"], TINY].concat();
    succeed(&training);
    let description = fs::read_to_string(out.join("dataset.json")).unwrap();
    // The data set is replaced without a flag.
    succeed(&["data", "tinystories", "--from", text(&from), "--out", text(&out)]);
    assert_eq!(fs::read_to_string(out.join("dataset.json")).unwrap(), description);
    let bytes = dir.path().join("bytes");
    succeed(&["data", "tinystories", "--from", text(&from), "--out", text(&bytes), "--tokenizer", "bytes"]);
    // The tokenizer is that of dataset.json.
    let table = succeed(&["data", "check", text(&bytes.join("*.bin"))]);
    assert!(table.contains("18 documents in 2 files"), "{table}");
    assert!(succeed(&["data", "show", text(&bytes.join("TinyStories_val.bin"))]).contains("Once upon a time"));
    // The stories have 33 and 8 bytes.
    let val = tokens::find(text(&bytes.join("TinyStories_val.bin"))).unwrap();
    assert_eq!(data::Tokens::open(&val[0]).unwrap().len(), 33 + 8 + 2);
    fail(
        &["data", "tinystories", "--from", text(&from), "--out", text(&out), "--tokenizer", "none.json"],
        &["none.json"],
    );
}

/// Returns two files of the training split of ClimbMix, which do not follow one another, and that of the validation split.
fn climbmix() -> Vec<(&'static str, Vec<u8>)> {
    let file = |name: &'static str, documents: usize| {
        let text = |i: usize| format!("{name}, page {i}.\n{}", "All the world's a stage. ".repeat(i % 7));
        (name, pages(&(0..documents).map(text).collect::<Vec<_>>()))
    };
    vec![
        file("shard_00000.parquet", 40),
        file("shard_00001.parquet", 30),
        file("shard_00003.parquet", 20),
        file("shard_06542.parquet", 10),
    ]
}

/// Runs `data climbmix` with a server.
fn run_climbmix(hub: &Hub, flags: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
    command.args(["data", "climbmix"]).args(flags).env("HF_ENDPOINT", &hub.address).output().unwrap()
}

/// Returns the tokens of all shards that match a pattern.
fn tokens_of(pattern: &Path) -> Vec<u32> {
    let shards = Tokens::open_all(text(pattern)).unwrap();
    let read = |shard: &Tokens| {
        let mut ids = vec![0; shard.len()];
        shard.read(0, &mut ids).unwrap();
        ids
    };
    shards.iter().flat_map(read).collect()
}

#[test]
fn climbmix_is_downloaded_once_and_has_the_tokens_of_data_text() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let (out, source, tokenizer) = (path("out"), path("out/source"), path("tokenizer"));
    let hub = Hub::new(climbmix(), Defect::Interrupted("shard_00001.parquet"));
    let half = climbmix()[1].1.len() / 2;
    let run = |flags: &[&str]| {
        let output = run_climbmix(&hub, &[&["--out", text(&out), "--shards", "2"], flags].concat());
        assert!(output.status.success(), "{}", printed(&output));
        printed(&output)
    };
    let shown = run(&["--download-only"]);
    assert!(shown.contains(&format!("downloaded 3 parquet files: {}\n", source.display())), "{shown}");
    let names = ["shard_00000.parquet", "shard_00001.parquet", "shard_06542.parquet"];
    assert_eq!(entries(&source), names);
    let request = |name: &str, start| (name.to_owned(), start);
    let [first, second, last] = names;
    assert_eq!(
        hub.requests(),
        [request(first, None), request(second, None), request(second, Some(half)), request(last, None)]
    );
    // The training files, from which a tokenizer is trained before the tokenization.
    let pattern = source.join("shard_00*.parquet");
    let training = ["--vocab-size", "300", "--special", "<|bos|>", "--out", text(&tokenizer)];
    let shown = succeed(&[&["tokenizer", "train", text(&pattern)], &training[..]].concat());
    assert!(shown.contains("read 70 documents, "), "{shown}");

    let with = ["--tokenizer", text(&tokenizer)];
    let shown = run(&[&with[..], &["--shard-tokens", "500"]].concat());
    assert!(shown.contains("read 80 documents, ") && shown.contains("climbmix_train_*.bin"), "{shown}");
    assert_eq!(hub.requests(), []);
    for (split, files) in [("train", "shard_00*.parquet"), ("val", "shard_06542.parquet")] {
        let (expected, files) = (path(split), source.join(files));
        succeed(&[&["data", "text", text(&files), "--out", text(&expected)], &with[..]].concat());
        let expected = tokens_of(&expected.join("train_*.bin"));
        assert!(tokens_of(&out.join(format!("climbmix_{split}_*.bin"))) == expected, "{split}");
    }
    assert!(fs::metadata(out.join("climbmix_train_000001.bin")).is_ok());
    succeed(&["data", "check", text(&out.join("*.bin"))]);
    // Local files give the same data set.
    let (copy, from) = (path("copy"), ["--from", text(&source), "--shard-tokens", "500"]);
    succeed(&[&["data", "climbmix", "--out", text(&copy)], &from[..], &with[..]].concat());
    let description = |directory: &Path| fs::read_to_string(directory.join("dataset.json")).unwrap();
    assert_eq!(description(&copy), description(&out));
}

#[test]
fn defects_of_climbmix_are_errors_that_name_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let fails = |defect: Defect, shards: &str, parts: &[&str]| {
        let output = run_climbmix(&Hub::new(climbmix(), defect), &["--out", text(&out), "--shards", shards]);
        let shown = printed(&output);
        assert!(!output.status.success() && shown.matches("error: ").count() == 1, "{shown}");
        for part in parts {
            assert!(shown.contains(part), "expected '{part}' in: {shown}");
        }
    };
    fails(Defect::None, "3", &["expected shard_00002.parquet in the list of files, found 4 files", "smaller --shards"]);
    assert!(!out.exists());
    let name = "shard_00001.parquet";
    fails(Defect::Missing(name), "2", &["cannot download ", name, "expected status 200 (OK), found 404", "--from DIR"]);
    let size = climbmix()[1].1.len();
    let expected = format!("expected a file of {size} bytes, found {} bytes", size - 9);
    fails(Defect::Truncated(name), "2", &["cannot download ", name, &expected]);
    // What was downloaded before is kept, and there is no partial file.
    assert_eq!(entries(&out), ["source"]);
    assert_eq!(entries(&out.join("source")), ["shard_00000.parquet"]);

    let source = out.join("source");
    let from = ["data", "climbmix", "--from", text(&source), "--out", text(&out)];
    fail(&from, &["expected at least 2 parquet files", "found 1", "--from"]);
    let (_, last) = &climbmix()[3];
    fs::write(source.join("shard_06542.parquet"), &last[..last.len() / 2]).unwrap();
    fail(&from, &["shard_06542.parquet: expected a complete parquet file"]);
    fs::write(source.join("shard_06542.parquet"), pages(&[] as &[&str])).unwrap();
    fail(&from, &["validation split: expected parquet files with documents, found no rows"]);
    assert_eq!(entries(&out), ["source"]);
    for shards in ["0", "6543", "all"] {
        let output = llm_rs(&["data", "climbmix", "--shards", shards]);
        assert_eq!(output.status.code(), Some(2));
        assert!(printed(&output).contains("expected a whole number from 1 to 6542"), "{}", printed(&output));
    }
}

#[test]
fn without_a_network_errors_name_the_address_and_the_flag() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let hub = format!("{NO_SERVER}/api/datasets");
    fail(
        &["data", "tinystories", "--out", text(&out)],
        &[&format!("cannot download {hub}/roneneldan/TinyStories/tree/main;"), "--from FILE|DIR"],
    );
    fail(
        &["data", "climbmix", "--out", text(&out)],
        &[&format!("cannot download {hub}/karpathy/climbmix-400b-shuffle/tree/main;"), "--from FILE|DIR"],
    );
    for (flags, path) in [
        (&[][..], "fineweb/tree/main/sample/10BT"),
        (&["--edu", "--version", "100B"], "fineweb-edu/tree/main/sample/100BT"),
    ] {
        let args = [&["data", "fineweb", "--out", text(&out)], flags].concat();
        fail(&args, &[&format!("cannot download {hub}/HuggingFaceFW/{path};"), "--from FILE|DIR"]);
    }
    fail(&["data", "fineweb", "--from", text(dir.path()), "--out", text(&out)], &["end in .parquet, found none"]);
    assert!(!out.exists());
    let output = llm_rs(&["data", "fineweb", "--version", "1B"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(printed(&output).contains("expected 10B or 100B"));
}

/// Returns a temporary directory, a text in it that is long enough for Tiny Shakespeare's splits, and an unused path.
fn play() -> (TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let (play, out) = (dir.path().join("play.txt"), dir.path().join("out"));
    fs::write(&play, "All the world's a stage,\nAnd all the men and women merely players.\n\n".repeat(2000)).unwrap();
    (dir, play, out)
}

#[test]
fn a_directory_holds_one_data_set() {
    let (_dir, play, out) = play();
    let plays = ["data", "tinyshakespeare", "--from", text(&play), "--out", text(&out)];
    succeed(&plays);
    let named = ["dataset.json", "tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin"];
    assert_eq!(entries(&out), named);
    let words = ["data", "text", text(&play), "--out", text(&out)];
    fail(&words, &["tiny_shakespeare_train.bin already exists", "another --out directory, or --overwrite"]);
    assert_eq!(entries(&out), named);
    succeed(&[&words[..], &["--overwrite"]].concat());
    assert_eq!(entries(&out), ["dataset.json", "train_000000.bin"]);
    let message = fail(&plays, &[text(&out), "train_000000.bin", "use another --out directory"]);
    assert!(!message.contains("--overwrite"), "{message}");
    assert_eq!(entries(&out), ["dataset.json", "train_000000.bin"]);
    fail(&["data", "tinyshakespeare", "--from", text(&play), "--out", text(&play)], &["play.txt"]);
}

/// The state after a crash while the files are moved.
#[test]
fn an_interrupted_replacement_is_reported_and_completed() {
    let (_dir, play, out) = play();
    let plays = ["data", "tinyshakespeare", "--from", text(&play), "--out", text(&out)];
    succeed(&plays);
    let staging = out.join(".unfinished-dataset");
    fs::create_dir(&staging).unwrap();
    fs::write(staging.join("COMPLETE"), "dataset.json\ntiny_shakespeare_train.bin\ntiny_shakespeare_val.bin").unwrap();
    fs::rename(out.join("tiny_shakespeare_val.bin"), staging.join("tiny_shakespeare_val.bin")).unwrap();
    let train = out.join("tiny_shakespeare_train.bin");
    let interrupted = [text(&out), "the program was interrupted", "the `data` command with this --out"];
    reports(&[text(&train)], &["the program was interrupted"], 1);
    fail(&[&["train", "--device", "cpu", "--train", text(&train), "--steps", "1"], TINY].concat(), &interrupted);
    // The replacement is completed, although the input is too short.
    fs::write(&play, "short").unwrap();
    fail(&plays, &["expected more than 32768 tokens"]);
    assert_eq!(entries(&out), ["dataset.json", "tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin"]);
    succeed(&["data", "check", text(&out.join("*.bin"))]);
}
