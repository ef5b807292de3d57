//! FineWeb and FineWeb-Edu, with the shards of llm.c's `dev/data/fineweb.py`.

use crate::download::{self, Remote};
use crate::encode::{self, Push};
use crate::parquet_text::TextColumn;
use crate::shard_set::{ShardFile, ShardSet, Written};
use crate::tokens::{MAX_SHARD_TOKENS, Width};
use anyhow::{Result, bail, ensure};
use indicatif::ProgressBar;
use std::fmt;
use std::path::{Path, PathBuf};
use tokenizer::Tokenizer;

const COLUMN: &str = "text";

/// The size of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// About 10 billion tokens.
    B10,
    /// About 100 billion tokens.
    B100,
}

impl std::str::FromStr for Version {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "10B" => Ok(Self::B10),
            "100B" => Ok(Self::B100),
            _ => Err("expected 10B or 100B"),
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::B10 => "10B",
            Self::B100 => "100B",
        })
    }
}

/// A sample of FineWeb or FineWeb-Edu.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// FineWeb-Edu instead of FineWeb.
    pub edu: bool,
    /// The size.
    pub version: Version,
}

impl Sample {
    /// Returns the prefix of the file names: `fineweb` or `edu_fineweb`.
    pub fn prefix(self) -> &'static str {
        if self.edu { "edu_fineweb" } else { "fineweb" }
    }

    /// Returns the name of llm.c's directory, such as `edu_fineweb10B`.
    pub fn directory(self) -> String {
        format!("{}{}", self.prefix(), self.version)
    }

    /// Returns the parquet files on the Hugging Face Hub.
    pub fn remote_files(self) -> Result<Vec<Remote>> {
        let data_set = if self.edu { "HuggingFaceFW/fineweb-edu" } else { "HuggingFaceFW/fineweb" };
        download::huggingface_files(data_set, &format!("sample/{}T", self.version), ".parquet")
    }
}

/// Returns the parquet files at a path: the file itself, or those in a directory, sorted by name.
pub fn files(from: &Path) -> Result<Vec<PathBuf>> {
    crate::local_files::find(from, "parquet")
}

/// Settings of [`write()`].
#[derive(Clone, Debug)]
pub struct Options {
    /// Prefix of the file names.
    pub prefix: &'static str,
    /// Tokens per shard. The last shard holds the remaining tokens.
    pub shard_tokens: usize,
    /// The encoding.
    pub tokenizer: Tokenizer,
}

/// Opens the files and returns their number of rows.
pub fn rows(files: &[PathBuf]) -> Result<usize> {
    files.iter().map(|file| TextColumn::open(file, COLUMN).map(|column| column.rows())).sum()
}

/// Tokenizes the column `text` of parquet files and writes `PREFIX_val_000000.bin` and `PREFIX_train_NNNNNN.bin` into
/// `out`.
///
/// The documents form one sequence of tokens, each after a document token. A shard is a range of `shard_tokens` tokens of it,
/// so a document may continue in the next shard. Shard 0 is the validation split.
pub fn write(files: &[PathBuf], out: &Path, options: &Options, progress: &ProgressBar) -> Result<Vec<Written>> {
    let Options { prefix, shard_tokens, tokenizer } = options;
    ensure!(
        (1..=MAX_SHARD_TOKENS).contains(shard_tokens),
        "--shard-tokens {shard_tokens}: expected 1 to {MAX_SHARD_TOKENS}"
    );
    let mut shards = Shards {
        set: ShardSet::create(out, Width::of_vocab(tokenizer.vocab()))?,
        prefix,
        size: *shard_tokens,
        current: None,
        index: 0,
    };
    let read = |push: &mut Push| {
        for file in files {
            TextColumn::open(file, COLUMN)?.read(&mut |text| {
                progress.inc(1);
                push(text)
            })?;
        }
        Ok(())
    };
    encode::documents(tokenizer, read, |ids| shards.extend(ids))?;
    let (set, shards) = shards.finish()?;
    if shards < 2 {
        bail!(
            "{prefix}: expected more than {shard_tokens} tokens, because the first shard is the validation split, found one \
             shard; use a smaller --shard-tokens"
        );
    }
    let digits = "[0-9]".repeat(6);
    set.commit(&[&format!("{prefix}_train_{digits}.bin"), &format!("{prefix}_val_{digits}.bin")])
}

/// Divides a sequence of tokens into shards.
struct Shards<'a> {
    set: ShardSet,
    prefix: &'a str,
    size: usize,
    current: Option<ShardFile>,
    /// Number of completed shards.
    index: usize,
}

impl Shards<'_> {
    fn extend(&mut self, mut ids: &[u32]) -> Result<()> {
        while !ids.is_empty() {
            let mut shard = match self.current.take() {
                Some(shard) => shard,
                None => self.set.shard(&self.name())?,
            };
            let (head, tail) = ids.split_at(ids.len().min(self.size - shard.len()));
            shard.extend(head)?;
            ids = tail;
            if shard.len() == self.size {
                self.set.finish(shard)?;
                self.index += 1;
            } else {
                self.current = Some(shard);
            }
        }
        Ok(())
    }

    fn name(&self) -> String {
        let split = if self.index == 0 { "val" } else { "train" };
        format!("{}_{split}_{:06}.bin", self.prefix, self.index)
    }

    /// Returns the set and its number of shards.
    fn finish(mut self) -> Result<(ShardSet, usize)> {
        if let Some(shard) = self.current.take() {
            self.set.finish(shard)?;
            self.index += 1;
        }
        Ok((self.set, self.index))
    }
}

#[cfg(test)]
mod tests;
