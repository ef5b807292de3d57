//! TinyStories' and FineWeb's files, as `data tinystories` and `data fineweb` read them.

use crate::files::gzip;
use crate::kinds::Kinds;
use crate::parquet::{SCHEMA, file};
use ::parquet::basic::Compression;
use anyhow::Result;
use data::dataset::ShardNames;
use data::{fineweb, tinystories};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tar::{Builder, EntryType, Header};
use tokenizer::Tokenizer;

const STORIES: &str = "[{\"story\": \"Once upon a time.\"}]";

pub fn run(kinds: &mut Kinds) {
    story_files(kinds);
    archives(kinds);
    fineweb_files(kinds);
}

fn write_stories(kinds: &Kinds, from: &Path) -> Result<()> {
    tinystories::write(from, &kinds.out().join("tinystories"), &Tokenizer::gpt2(), "test").map(drop)
}

fn story_files(kinds: &mut Kinds) {
    let directory = kinds.file("stories/data00.json", STORIES.as_bytes()).parent().unwrap().to_owned();
    kinds.fails("TinyStories, one file", &["stories: expected at least 2 JSON files", "found 1"], |kinds| {
        write_stories(kinds, &directory)
    });
    for (kind, json, part) in [
        ("empty file", "", "EOF while parsing"),
        ("no JSON", "Once upon a time", "expected value"),
        ("truncated", &STORIES[..20], "EOF while parsing"),
        ("object", "{\"story\": \"a\"}", "expected a sequence"),
        ("array of strings", "[\"a\"]", "expected struct Story"),
        ("missing field", "[{\"text\": \"a\"}]", "missing field `story`"),
        ("duplicate field", "[{\"story\": \"a\", \"story\": \"b\"}]", "duplicate field `story`"),
        ("number in the field", "[{\"story\": 5}]", "invalid type: integer `5`, expected a string"),
        ("null in the field", "[{\"story\": null}]", "invalid type: null, expected a string"),
        ("lone surrogate", "[{\"story\": \"\\ud800\"}]", "hex escape"),
        ("no stories", "[]", "found an empty array"),
        ("trailing garbage", "[{\"story\": \"a\"}] x", "trailing characters"),
    ] {
        kinds.file("stories/data01.json", json.as_bytes());
        kinds.fails(&format!("TinyStories, {kind}"), &["data01.json: expected", part], |kinds| {
            write_stories(kinds, &directory)
        });
    }
    without_files(kinds, "TinyStories", "json", write_stories);
}

/// Paths without files of a data set, which end in `extension`.
fn without_files(kinds: &mut Kinds, name: &str, extension: &str, write: fn(&Kinds, &Path) -> Result<()>) {
    let missing = kinds.path(&format!("none.{extension}"));
    let parts = ["cannot read", &format!("none.{extension}"), "No such file"];
    kinds.fails(&format!("{name}, missing file"), &parts, |kinds| write(kinds, &missing));
    let empty = kinds.path(&format!("without {extension}"));
    fs::create_dir(&empty).unwrap();
    // A Mac stores metadata in such files.
    fs::write(empty.join(format!("._a.{extension}")), "metadata").unwrap();
    let part = format!("without {extension}: expected files that end in .{extension}, found none");
    kinds.fails(&format!("{name}, directory without files"), &[&part], |kinds| write(kinds, &empty));
}

/// Returns an archive. The names are not checked, unlike those of `tar::Builder::append_data`.
fn archive(files: &[(&str, EntryType)]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (name, kind) in files {
        let mut header = Header::new_gnu();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_entry_type(*kind);
        header.set_size(if kind.is_file() { STORIES.len() as u64 } else { 0 });
        header.set_mode(0o644);
        if kind.is_symlink() {
            header.as_old_mut().linkname[..6].copy_from_slice(b"/etc/x");
        }
        header.set_cksum();
        builder.append(&header, if kind.is_file() { STORIES.as_bytes() } else { &[] }).unwrap();
    }
    builder.into_inner().unwrap()
}

fn archives(kinds: &mut Kinds) {
    let (regular, link) = (EntryType::Regular, EntryType::Symlink);
    let good = archive(&[("data00.json", regular), ("data01.json", regular)]);
    let complete = "expected a complete .tar.gz archive or a directory of JSON files";
    for (kind, bytes, part) in [
        ("empty file", Vec::new(), complete),
        ("text", b"not an archive".to_vec(), complete),
        ("truncated archive", gzip(&good)[..gzip(&good).len() - 20].to_vec(), complete),
        ("truncated within a file", gzip(&good[..700]), complete),
        ("archive without gzip", good.clone(), complete),
        ("empty archive", gzip(&archive(&[])), "found none of its files"),
        ("archive without JSON", gzip(&archive(&[("a.txt", regular)])), "found none of its files"),
        ("one file in the archive", gzip(&archive(&[("data00.json", regular)])), "expected at least 2 JSON files"),
        (
            "one name twice in the archive",
            gzip(&archive(&[("a/data00.json", regular), ("b/data00.json", regular)])),
            "expected one file data00.json, found two",
        ),
        (
            "link in the archive",
            gzip(&archive(&[("data00.json", regular), ("data01.json", link)])),
            "expected a regular file data01.json, found a link",
        ),
        (
            "path out of the directory",
            gzip(&archive(&[("../../escaped.json", regular)])),
            "expected at least 2 JSON files",
        ),
    ] {
        let path = kinds.file("stories.tar.gz", &bytes);
        kinds.fails(&format!("TinyStories archive, {kind}"), &["stories.tar.gz", part], |kinds| {
            write_stories(kinds, &path)
        });
    }
    for place in ["escaped.json", "../escaped.json"] {
        assert!(!kinds.path(place).exists(), "{place}");
    }
}

fn write_fineweb(kinds: &Kinds, from: &Path) -> Result<()> {
    let files: Vec<PathBuf> = fineweb::files(from)?;
    let options = fineweb::FinewebOptions {
        names: ShardNames::EDU_FINEWEB,
        shard_tokens: 4,
        tokenizer: Tokenizer::gpt2(),
        program: "test".into(),
    };
    fineweb::write(&files, &kinds.out().join("fineweb"), &options).map(drop)
}

fn fineweb_files(kinds: &mut Kinds) {
    let text: Option<&[u8]> = Some(b"one two three four five six");
    let with = |schema: &str, rows: &[Option<&[u8]>]| file(schema, rows, Compression::SNAPPY);
    let good = with(SCHEMA, &[text]);
    for (kind, bytes, parts) in [
        ("text", b"This is a text file.".to_vec(), &["web.parquet"][..]),
        ("truncated", good[..good.len() / 2].to_vec(), &["web.parquet"]),
        (
            "missing column",
            with("message m { OPTIONAL INT64 id; }", &[text]),
            &["web.parquet", "expected a column", "found id"],
        ),
        (
            "integers",
            with("message m { OPTIONAL INT64 text; }", &[text]),
            &["web.parquet", "expected strings, found INT64"],
        ),
        ("too little for two shards", with(SCHEMA, &[Some(b"hi")]), &["expected more than 4 tokens", "--shard-tokens"]),
        ("no rows", with(SCHEMA, &[]), &["web.parquet: expected parquet files with documents, found no rows"]),
        ("no text", with(SCHEMA, &[Some(b"")]), &["expected at least one document with text, found none in 1 file"]),
    ] {
        let path = kinds.file("web.parquet", &bytes);
        kinds.fails(&format!("FineWeb, {kind}"), parts, |kinds| write_fineweb(kinds, &path));
    }
    without_files(kinds, "FineWeb", "parquet", write_fineweb);
    let fifo = kinds.path("fifo");
    if Command::new("mkfifo").arg(&fifo).status().is_ok_and(|status| status.success()) {
        let parts = ["fifo: expected a parquet file, found a pipe or device"];
        kinds.fails("FineWeb, pipe", &parts, |kinds| write_fineweb(kinds, &fifo));
    }
}
