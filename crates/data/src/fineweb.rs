//! FineWeb and FineWeb-Edu, with the shards of llm.c's `dev/data/fineweb.py`.

use crate::dataset::ShardNames;
use crate::download::{self, Remote};
use crate::text::{self, Layout, Summary, Validation};
use crate::web_pages;
use anyhow::Result;
use std::fmt;
use std::path::{Path, PathBuf};
use tokenizer::Tokenizer;

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
    /// Returns the names of the shards.
    pub fn names(self) -> ShardNames {
        if self.edu { ShardNames::EDU_FINEWEB } else { ShardNames::FINEWEB }
    }

    /// Returns the name of llm.c's directory, such as `edu_fineweb10B`.
    pub fn directory(self) -> String {
        format!("{}{}", self.names().data_set, self.version)
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
pub struct FinewebOptions {
    /// The names of the shards.
    pub names: ShardNames,
    /// Tokens per shard. The last shard holds the remaining tokens.
    pub shard_tokens: usize,
    /// The encoding.
    pub tokenizer: Tokenizer,
    /// Version of the program, for the description of the data set.
    pub program: String,
}

/// Tokenizes the column `text` of parquet files and writes `NAME_val_000000.bin`, `NAME_train_NNNNNN.bin` and `dataset.json`
/// into `out`.
///
/// The documents form one sequence of tokens, each after a document token. A shard is a range of `shard_tokens` tokens of it,
/// so a document may continue in the next shard. Shard 0 is the validation split.
pub fn write(files: &[PathBuf], out: &Path, options: &FinewebOptions) -> Result<Summary> {
    let FinewebOptions { names, shard_tokens, tokenizer, program } = options;
    text::check_shard_tokens(*shard_tokens)?;
    web_pages::count_rows(files)?;
    let validation = Validation::FirstTokens(*shard_tokens);
    let layout = Layout { names: *names, shard_tokens: *shard_tokens, validation };
    web_pages::write(files, out, layout, tokenizer, program)
}

#[cfg(test)]
mod tests;
