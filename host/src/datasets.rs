//! The descriptions of the data sets that a command reads.

use crate::hints;
use anyhow::{Context, Result, anyhow, ensure};
use data::dataset::{self, Dataset};
use data::{DocumentStart, Tokens};
use interchange::companions;
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
        let with_hashes = |tokens: Tokens| {
            let directory = Path::new(tokens.name()).parent().map(Path::to_owned);
            let dataset = self.0.iter().find(|(found, _)| directory.as_ref() == Some(found));
            dataset.map_or(Ok(tokens.clone()), |(_, dataset)| dataset.with_hashes(tokens))
        };
        open_tokens(pattern)?.into_iter().map(with_hashes).collect()
    }

    /// Returns the directory of a data set of conversations; `None` if there is none. Fails if several have other chat templates.
    pub fn conversations(&self) -> Result<Option<PathBuf>> {
        let mut found = self.0.iter().filter(|(_, dataset)| dataset.has_masks()).map(|(directory, _)| directory);
        let Some(first) = found.next() else { return Ok(None) };
        let template = |directory: &Path| -> Result<Option<String>> {
            Ok(companions::chat_template(directory, &serde_json::Value::Null)?.map(|(_, source)| source))
        };
        let expected = template(first)?;
        for other in found {
            ensure!(
                template(other)? == expected,
                "{}: expected the chat template of {}, found another one; make both data sets with one --chat-template",
                other.display(),
                first.display()
            );
        }
        Ok(Some(first.clone()))
    }

    /// Checks that a model with `vocab` ids accepts the tokens. `model` names it.
    pub fn check_vocab(&self, model: &str, vocab: usize) -> Result<()> {
        self.0.iter().try_for_each(|(directory, dataset)| dataset.check_vocab(directory, model, vocab))
    }
}

/// Returns whether the shards are conversations, which have masks.
pub fn has_masks(shards: &[Tokens]) -> bool {
    shards.iter().any(|shard| shard.mask().is_some())
}

/// Returns what begins a document, if attention stays within documents. Only conversations need no document token.
pub fn document_start(
    document_mask: bool,
    tokenizer: Option<&Tokenizer>,
    only_conversations: bool,
) -> Result<Option<DocumentStart>> {
    let token = tokenizer.map(Tokenizer::document);
    ensure!(
        !document_mask || only_conversations || token.is_some(),
        "--document-mask: expected the tokenizer of the token files, whose document token begins each document, found none; name it \
         with --tokenizer"
    );
    Ok(document_mask.then_some(DocumentStart { token }))
}
