//! The descriptions of the data sets that a command reads.

use crate::hints;
use anyhow::{Context, Result, anyhow, ensure};
use data::Tokens;
use data::dataset::{self, Dataset};
use std::path::{Path, PathBuf};
use tokenizer::{Identity, Tokenizer};

/// Opens the token files that match a glob pattern. If they are files with text, the error names the command that tokenizes them.
pub fn open_tokens(pattern: &str) -> Result<Vec<Tokens>> {
    Tokens::open_all(pattern).map_err(|error| match hints::tokenize(pattern) {
        Some(command) => {
            anyhow!("{pattern}: expected token files (.bin), found text; tokenize it first: {command}")
        }
        None => error,
    })
}

/// The data sets that have a description, each with its directory. All have the same tokenizer.
#[derive(Clone, Debug)]
pub struct Datasets(Vec<(PathBuf, Dataset)>);

impl Datasets {
    /// Reads the descriptions of the data sets of patterns, each of which has a flag.
    pub fn open(patterns: &[(&'static str, &str)]) -> Result<Self> {
        let mut found = Vec::new();
        for (flag, pattern) in patterns {
            found.extend(dataset::read_for_shards(pattern).context(*flag)?);
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

    /// Opens the token files that match a glob pattern, with their recorded hashes.
    pub fn tokens(&self, pattern: &str) -> Result<Vec<Tokens>> {
        let with_hash = |tokens: Tokens| {
            let path = Path::new(tokens.name());
            let mut in_directory = self.0.iter().filter(|(directory, _)| path.parent() == Some(directory));
            let hash = in_directory.find_map(|(_, dataset)| dataset.hash(path));
            tokens.with_recorded_hash(hash)
        };
        Ok(open_tokens(pattern)?.into_iter().map(with_hash).collect())
    }

    /// Checks that a model with `vocab` ids accepts the tokens. `model` names it.
    pub fn check_vocab(&self, model: &str, vocab: usize) -> Result<()> {
        self.0.iter().try_for_each(|(directory, dataset)| dataset.check_vocab(directory, model, vocab))
    }
}
/// Returns the token that begins a document, if attention stays within documents.
pub fn separator(document_mask: bool, tokenizer: Option<&Tokenizer>) -> Result<Option<u32>> {
    let tokenizer = document_mask.then(|| {
        tokenizer.context(
            "--document-mask: expected the tokenizer of the token files, whose document token begins each document, found none; \
             name it with --tokenizer",
        )
    });
    Ok(tokenizer.transpose()?.map(Tokenizer::document))
}
