use super::*;
use std::fs;
use tokenizer::Tokenizer;

fn dataset(tokens: usize) -> Dataset {
    Dataset {
        name: String::new(),
        tokenizer: Encoding::from(&Tokenizer::gpt2()),
        train: Split { shards: 1, tokens, ..Split::default() },
        val: Split::default(),
        input: Input::default(),
        program: "test".into(),
    }
}

fn shard(directory: &Path, name: &str, content: &str) {
    fs::write(directory.join(name), content).unwrap();
}

fn replace(out: &Path, names: &[&str]) {
    let replacement = Replacement::begin(out, Replaces::Everything).unwrap();
    for name in names {
        shard(replacement.directory(), name, "new");
    }
    replacement.commit(&dataset(names.len()), None, &[]).unwrap();
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn replacement_removes_old_shards_and_keeps_other_files() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a/b");
    replace(&out, &["train_000000.bin", "train_000001.bin", "val_000000.bin"]);
    shard(&out, "notes.txt", "mine");
    shard(&out, "train_tokens.bin", "mine");
    replace(&out, &["train_000000.bin"]);
    assert_eq!(names(&out), ["dataset.json", "notes.txt", "train_000000.bin", "train_tokens.bin"]);
    assert_eq!(Dataset::read(&out).unwrap(), Some(dataset(1)));
}

#[test]
fn the_tokenizer_file_belongs_to_the_data_set() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path();
    let file = |name, text: &str| tokenizer::File { name, bytes: text.into() };
    let replacement = Replacement::begin(out, Replaces::Nothing).unwrap();
    assert_eq!(names(out), [".unfinished-dataset"]);
    replacement.commit(&dataset(0), Some(&file("tokenizer.json", "first")), &[]).unwrap();
    assert_eq!(names(out), ["dataset.json", "tokenizer.json"]);
    // It is never replaced by accident.
    let message = Replacement::begin(out, Replaces::Nothing).unwrap_err().to_string();
    assert!(message.contains("tokenizer.json already exists: expected a directory without a data set"), "{message}");
    drop(Replacement::begin(out, Replaces::Everything).unwrap());
    assert_eq!(fs::read_to_string(out.join("tokenizer.json")).unwrap(), "first");
    let replacement = Replacement::begin(out, Replaces::Everything).unwrap();
    replacement.commit(&dataset(0), Some(&file("tokenizer.model", "second")), &[]).unwrap();
    assert_eq!(names(out), ["dataset.json", "tokenizer.model"]);
    assert_eq!(fs::read_to_string(out.join("tokenizer.model")).unwrap(), "second");
    Replacement::begin(out, Replaces::Everything).unwrap().commit(&dataset(0), None, &[]).unwrap();
    assert_eq!(names(out), ["dataset.json"]);
    // The directory of a model.
    fs::remove_file(out.join("dataset.json")).unwrap();
    fs::write(out.join("tokenizer.json"), "model").unwrap();
    for replaces in [Replaces::Nothing, Replaces::Everything, Replaces::Same(ShardNames::FINEWEB)] {
        let message = Replacement::begin(out, replaces).unwrap_err().to_string();
        assert!(message.contains("found a tokenizer without dataset.json"), "{message}");
    }
    assert_eq!(fs::read_to_string(out.join("tokenizer.json")).unwrap(), "model");
}

#[test]
fn an_unfinished_replacement_is_discarded() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path();
    shard(out, "train_000000.bin", "old");
    // A killed process leaves the directory behind.
    let replacement = Replacement::begin(out, Replaces::Everything).unwrap();
    shard(replacement.directory(), "train_000000.bin", "new");
    std::mem::forget(replacement);
    assert!(out.join(".unfinished-dataset/train_000000.bin").exists());
    assert_eq!(fs::read_to_string(out.join("train_000000.bin")).unwrap(), "old");
    assert!(read_for_shards(&out.join("train_*.bin").to_string_lossy()).unwrap().is_empty());
}

#[test]
fn two_processes_cannot_write_into_one_directory_and_a_dropped_replacement_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    shard(dir.path(), "train_000000.bin", "old");
    let first = Replacement::begin(dir.path(), Replaces::Everything).unwrap();
    shard(first.directory(), "train_000000.bin", "new");
    let message = Replacement::begin(dir.path(), Replaces::Everything).unwrap_err().to_string();
    assert!(message.contains("no other process"), "{message}");
    drop(first);
    assert_eq!(names(dir.path()), ["train_000000.bin"]);
    let message = Replacement::begin(dir.path(), Replaces::Nothing).unwrap_err().to_string();
    assert!(message.contains("train_000000.bin already exists") && message.contains("--overwrite"), "{message}");
    assert_eq!(names(dir.path()), ["train_000000.bin"]);
}

/// The state after a crash while files are moved: some are at their place, others are not.
#[test]
fn an_interrupted_replacement_is_reported_and_then_completed() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path();
    let staging = out.join(".unfinished-dataset");
    fs::create_dir(&staging).unwrap();
    shard(out, "train_000000.bin", "new");
    shard(out, "train_000001.bin", "old");
    shard(out, "train_000002.bin", "old");
    shard(&staging, "train_000001.bin", "new");
    shard(&staging, "dataset.json", &serde_json::to_string(&dataset(2)).unwrap());
    shard(&staging, "COMPLETE", "dataset.json\ntrain_000000.bin\ntrain_000001.bin");
    let pattern = out.join("train_*.bin").to_string_lossy().into_owned();
    let message = read_for_shards(&pattern).unwrap_err().to_string();
    assert!(message.contains("interrupted") && message.contains("`data` command"), "{message}");
    // It completes the replacement, although it then fails.
    assert!(Replacement::begin(out, Replaces::Nothing).is_err());
    assert_eq!(names(out), ["dataset.json", "train_000000.bin", "train_000001.bin"]);
    assert_eq!(fs::read_to_string(out.join("train_000001.bin")).unwrap(), "new");
    assert_eq!(read_for_shards(&pattern).unwrap(), [(out.to_owned(), dataset(2))]);
}

#[test]
fn descriptions_are_found_for_shards_only_and_errors_name_the_file() {
    let dir = tempfile::tempdir().unwrap();
    shard(dir.path(), "hellaswag_val.bin", "");
    shard(dir.path(), "dataset.json", "{}");
    let find = |name: &str| read_for_shards(&dir.path().join(name).to_string_lossy());
    assert!(find("*.bin").unwrap().is_empty());
    shard(dir.path(), "tiny_shakespeare_val.bin", "");
    let message = format!("{:#}", find("*.bin").unwrap_err());
    assert!(message.contains("dataset.json") && message.contains("tokenizer"), "{message}");
    assert!(find("train_*.bin").unwrap().is_empty());
    assert!(find("[").is_err());
}

#[test]
fn vocabulary_of_the_model_must_hold_all_ids() {
    let directory = Path::new("shards");
    assert!(dataset(1).check_vocab(directory, "--model d12", 50257).is_ok());
    let message = dataset(1).check_vocab(directory, "--model tiny.bin", 256).unwrap_err().to_string();
    for part in ["shards", "gpt2 with 50257", "--model tiny.bin", "at most 256"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn a_directory_holds_one_data_set() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path();
    shard(out, "edu_fineweb_val_000000.bin", "old");
    shard(out, "edu_fineweb_train_000001.bin", "old");
    shard(out, "hellaswag_val.bin", "mine");
    let expected = ["edu_fineweb_train_000001.bin", "edu_fineweb_val_000000.bin", "hellaswag_val.bin"];
    for other in [ShardNames::FINEWEB, ShardNames::TINY_STORIES] {
        let message = Replacement::begin(out, Replaces::Same(other)).unwrap_err().to_string();
        for part in [&*out.to_string_lossy(), other.data_set, "edu_fineweb_train_000001.bin", "another --out"] {
            assert!(message.contains(part), "{message}");
        }
        assert_eq!(names(out), expected);
    }
    let replacement = Replacement::begin(out, Replaces::Same(ShardNames::EDU_FINEWEB)).unwrap();
    shard(replacement.directory(), "edu_fineweb_val_000000.bin", "new");
    fs::create_dir(replacement.directory().join("source")).unwrap();
    shard(replacement.directory(), "source/data00.json", "temporary");
    replacement.commit(&dataset(1), None, &[]).unwrap();
    assert_eq!(names(out), ["dataset.json", "edu_fineweb_val_000000.bin", "hellaswag_val.bin"]);
    assert_eq!(fs::read_to_string(out.join("edu_fineweb_val_000000.bin")).unwrap(), "new");
    replace(out, &["train_000000.bin"]);
    assert_eq!(names(out), ["dataset.json", "hellaswag_val.bin", "train_000000.bin"]);
}

#[test]
fn a_directory_in_the_way_is_an_error_before_anything_is_moved() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("train_000001.bin")).unwrap();
    let message = Replacement::begin(dir.path(), Replaces::Everything).unwrap_err().to_string();
    assert!(message.contains("train_000001.bin") && message.contains("found a directory"), "{message}");
    assert_eq!(names(dir.path()), ["train_000001.bin"]);
}

#[test]
fn a_file_of_another_program_is_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    shard(dir.path(), "dataset.json", "{\"title\": \"mine\"}");
    for replaces in [Replaces::Nothing, Replaces::Same(ShardNames::FINEWEB)] {
        let message = format!("{:#}", Replacement::begin(dir.path(), replaces).unwrap_err());
        assert!(message.contains("dataset.json: expected the description of a data set"), "{message}");
    }
    assert_eq!(fs::read_to_string(dir.path().join("dataset.json")).unwrap(), "{\"title\": \"mine\"}");
}

#[test]
fn shards_are_recognized_by_their_names() {
    for (names, shards, patterns) in [
        (ShardNames::TEXT, ["train_000012.bin", "val_000000.bin"], ["train_*.bin", "val_*.bin"]),
        (
            ShardNames::TINY_SHAKESPEARE,
            ["tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin"],
            ["tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin"],
        ),
        (
            ShardNames::TINY_STORIES,
            ["TinyStories_train.bin", "TinyStories_val.bin"],
            ["TinyStories_train.bin", "TinyStories_val.bin"],
        ),
        (
            ShardNames::FINEWEB,
            ["fineweb_train_000012.bin", "fineweb_val_000000.bin"],
            ["fineweb_train_*.bin", "fineweb_val_*.bin"],
        ),
        (
            ShardNames::EDU_FINEWEB,
            ["edu_fineweb_train_000012.bin", "edu_fineweb_val_000000.bin"],
            ["edu_fineweb_train_*.bin", "edu_fineweb_val_*.bin"],
        ),
    ] {
        assert_eq!([names.file("train", 12), names.file("val", 0)], shards);
        assert_eq!([names.pattern("train"), names.pattern("val")], patterns);
        assert!(shards.iter().all(|file| ShardNames::of_shard(file) == Some(names)), "{shards:?}");
    }
    assert_eq!(ShardNames::of_shard("train_1234567.bin"), Some(ShardNames::TEXT));
    for other in [
        "train.bin",
        "train_00000.bin",
        "train_00000x.bin",
        "train_000000.txt",
        "test_000000.bin",
        "hellaswag_val.bin",
        "mmlu_val.bin",
        "tiny_shakespeare_train_000000.bin",
        "fineweb_train.bin",
        "my_fineweb_train_000000.bin",
    ] {
        assert_eq!(ShardNames::of_shard(other), None, "{other}");
    }
}

/// Descriptions of earlier versions have no name.
#[test]
fn descriptions_without_a_name_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut old = serde_json::to_value(dataset(5)).unwrap();
    old.as_object_mut().unwrap().remove("name").unwrap();
    shard(dir.path(), "dataset.json", &old.to_string());
    assert_eq!(Dataset::read(dir.path()).unwrap(), Some(dataset(5)));
}
