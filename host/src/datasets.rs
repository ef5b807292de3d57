//! The descriptions of the data sets that a command reads.

use anyhow::{Context, Result, ensure};
use data::dataset::{self, Dataset};
use std::path::{Path, PathBuf};
use tokenizer::Identity;

/// The data sets that have a description, each with its directory. All have the same tokenizer.
#[derive(Clone, Debug)]
pub struct Datasets(Vec<(PathBuf, Dataset)>);

impl Datasets {
    /// Reads the descriptions of the data sets of `--train` and `--val`.
    pub fn open(train: Option<&str>, val: Option<&str>) -> Result<Self> {
        let mut found = Vec::new();
        for (flag, pattern) in [("--train", train), ("--val", val)] {
            let described = pattern.map(dataset::read_for_shards).transpose().context(flag)?;
            found.extend(described.unwrap_or_default());
        }
        for pair in found.windows(2) {
            let [(first, a), (second, b)] = pair else { continue };
            ensure!(
                a.tokenizer.has_vocabulary_of(&b.tokenizer),
                "{}: expected the tokenizer of {}, {}, found {}; tokenize both with the same one",
                second.display(),
                first.display(),
                a.tokenizer,
                b.tokenizer
            );
        }
        Ok(Self(found))
    }

    /// Returns the tokenizer, and the directory that contains its file. Returns `None` if no data set has a description.
    pub fn tokenizer(&self) -> Option<(&Path, &Identity)> {
        self.0.first().map(|(directory, dataset)| (directory.as_path(), &dataset.tokenizer))
    }

    /// Checks that a model with `vocab` ids accepts the tokens. `model` names it.
    pub fn check_vocab(&self, model: &str, vocab: usize) -> Result<()> {
        self.0.iter().try_for_each(|(directory, dataset)| dataset.check_vocab(directory, model, vocab))
    }
}
