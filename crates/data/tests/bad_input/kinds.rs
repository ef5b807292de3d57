//! Runs kinds of bad input beside an existing data set.

use anyhow::Result;
use data::documents::{self, Format, Reading};
use data::text::{self, Summary, TextOptions};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use tokenizer::Tokenizer;

/// Runs readers and checks their errors.
pub struct Kinds {
    dir: TempDir,
    /// The existing data set, which must not change.
    before: Vec<(PathBuf, Vec<u8>)>,
    names: BTreeSet<String>,
    /// Kinds without the expected error.
    problems: Vec<String>,
}

/// Returns the settings of `data text --overwrite`.
pub fn options() -> TextOptions {
    TextOptions {
        tokenizer: Tokenizer::gpt2(),
        allow_special: false,
        reading: Reading::default(),
        val_fraction: 0.0,
        shard_tokens: 100,
        overwrite: true,
        program: "test".into(),
    }
}

/// Returns all files below a directory with their contents, and its directories.
fn snapshot(directory: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(snapshot(&path));
            found.push((path, Vec::new()));
        } else {
            let bytes = fs::read(&path).unwrap();
            found.push((path, bytes));
        }
    }
    found.sort();
    found
}

impl Kinds {
    /// Writes data sets into `out` and directories in it.
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let good = dir.path().join("good.txt");
        fs::write(&good, "All the world's a stage, and all the men and women merely players. ".repeat(40)).unwrap();
        let found = documents::find(&[good], &[], None).unwrap();
        text::write(&found, &out, &options()).unwrap();
        // A directory holds one data set.
        for name in ["fineweb/edu_fineweb_val_000000.bin", "tinystories/TinyStories_val.bin", "set.bin"] {
            fs::create_dir_all(out.join(name).parent().unwrap()).unwrap();
            fs::copy(out.join("train_000000.bin"), out.join(name)).unwrap();
        }
        let before = snapshot(&out);
        assert!(before.len() > 5);
        Self { dir, before, names: BTreeSet::new(), problems: Vec::new() }
    }

    /// Returns the number of kinds. Each must have given the expected error.
    pub fn finish(self) -> usize {
        assert!(self.problems.is_empty(), "{}", self.problems.join("\n"));
        self.names.len()
    }

    /// Returns the directory of the existing data set.
    pub fn out(&self) -> PathBuf {
        self.dir.path().join("out")
    }

    /// Returns a path for input.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a file for input.
    pub fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    /// Counts a kind.
    pub fn add(&mut self, kind: &str) {
        assert!(self.names.insert(kind.to_owned()), "{kind}: expected each kind once");
    }

    /// Expects that `run` fails with a message that contains all `parts`, and loses nothing.
    pub fn fails<T>(&mut self, kind: &str, parts: &[&str], run: impl FnOnce(&Self) -> Result<T>) {
        self.add(kind);
        let message = run(self).err().map_or("no error".to_owned(), |error| format!("{error:#}"));
        for part in parts {
            if !message.contains(part) {
                self.problems.push(format!("{kind}: expected '{part}' in: {message}"));
            }
        }
        if snapshot(&self.out()) != self.before {
            self.problems.push(format!("{kind}: the data set changed"));
        }
    }

    /// Replaces the data set by good text and the inputs at `paths`.
    pub fn tokenize(&self, paths: &[PathBuf], options: &TextOptions) -> Result<Summary> {
        let good = self.file("input/a good file.txt", b"This document is read first.");
        let paths = [&[good], paths].concat();
        let found = documents::find(&paths, &[], Some(&self.out()))?;
        text::write(&found, &self.out(), options)
    }

    /// Expects that `data text --overwrite` fails for a good file and a bad one, and names the bad one.
    pub fn rejects(&mut self, kind: &str, name: &str, bytes: &[u8], parts: &[&str]) {
        self.rejects_field(kind, name, bytes, "text", parts);
    }

    /// Same as [`rejects`](Self::rejects), with `--field`.
    pub fn rejects_field(&mut self, kind: &str, name: &str, bytes: &[u8], field: &str, parts: &[&str]) {
        let path = self.file(&format!("input/{name}"), bytes);
        let mut options = options();
        options.reading.field = field.into();
        self.fails(kind, &[parts, &[name]].concat(), |kinds| kinds.tokenize(&[path], &options));
    }

    /// Expects that `data text --overwrite` reports an input that it skips: with this input alone, there are no documents.
    pub fn skips(&mut self, kind: &str, path: PathBuf, parts: &[&str]) {
        self.fails(kind, parts, |kinds| {
            let found = documents::find(&[path], &[], Some(&kinds.out()))?;
            text::write(&found, &kinds.out(), &options())
        });
    }

    /// Expects that a new data set can be made from an input, and returns what is reported.
    pub fn reports(&mut self, kind: &str, name: &str, bytes: &[u8], reading: Reading) -> Summary {
        self.add(kind);
        let path = self.file(&format!("input/{name}"), bytes);
        let found = documents::find(&[path], &[], None).unwrap();
        let out = tempfile::tempdir().unwrap();
        text::write(&found, out.path(), &TextOptions { reading, ..options() }).unwrap()
    }
}

/// Returns how files of a format are read.
pub fn format(format: Format) -> Reading {
    Reading { format: Some(format), ..Reading::default() }
}
