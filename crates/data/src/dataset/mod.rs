//! The description of a directory of shards: `dataset.json`.
//!
//! It states the tokenizer and the amounts of data. [`Replacement`] writes shards, description and a copy of the tokenizer file
//! into a directory at once.

mod names;
mod replacement;

pub use names::ShardNames;
pub use replacement::{Replacement, Replaces};

use crate::{Tokens, mask, pattern};
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
pub use tokenizer::Identity as Encoding;
use tokenizer::{stored, train};

/// Name of the file.
pub const FILE_NAME: &str = "dataset.json";

/// A description of the shards in a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dataset {
    /// Name of the data set, which the names of its shards begin with; empty for `data text`.
    #[serde(default)]
    pub name: String,
    /// The tokenizer of all shards.
    pub tokenizer: Encoding,
    /// The training split.
    pub train: Split,
    /// The validation split.
    pub val: Split,
    /// The input.
    pub input: Input,
    /// Version of the program that wrote the shards.
    pub program: String,
}

/// The amount of data of a split.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Split {
    /// Number of shards.
    pub shards: usize,
    /// Tokens in all shards.
    pub tokens: usize,
    /// The XXH3 hash of the tokens of each shard, in hexadecimal, by file name. Earlier versions did not record it.
    #[serde(default)]
    pub hashes: BTreeMap<String, String>,
    /// The XXH3 hash of the flags of each mask, in hexadecimal, by file name. Only data sets of conversations have masks.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub masks: BTreeMap<String, String>,
}

/// The amount of text that was read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Input {
    /// Files with text.
    pub files: usize,
    /// Documents with at least one character.
    pub documents: usize,
    /// Documents without text. `data text` leaves them out; in named data sets, they consist of a document token, as in llm.c.
    pub empty_documents: usize,
    /// Bytes of text, as UTF-8.
    pub bytes: usize,
    /// Invalid UTF-8 sequences, each replaced by U+FFFD.
    pub invalid_utf8: usize,
    /// Paths that were not read.
    pub skipped: usize,
}

impl Dataset {
    /// Reads the description in a directory; `None` if there is none.
    pub fn read(directory: &Path) -> Result<Option<Self>> {
        let path = directory.join(FILE_NAME);
        let text = match bounded_file::read_to_string(&path, bounded_file::DESCRIPTION) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        let dataset = serde_json::from_str(&text).with_context(|| {
            format!(
                "{}: expected the description of a data set; make the data set again, or remove the file",
                path.display()
            )
        })?;
        Ok(Some(dataset))
    }

    /// Returns the recorded hash of the tokens of a shard.
    pub fn hash(&self, shard: &Path) -> Option<u64> {
        let name = shard.file_name()?.to_str()?;
        let hash = self.train.hashes.get(name).or_else(|| self.val.hashes.get(name))?;
        u64::from_str_radix(hash, 16).ok()
    }

    /// Returns the recorded hash of the mask of a shard.
    fn mask_hash(&self, shard: &Path) -> Option<u64> {
        let path = mask::path(shard);
        let name = path.file_name()?.to_str()?;
        let hash = self.train.masks.get(name).or_else(|| self.val.masks.get(name))?;
        u64::from_str_radix(hash, 16).ok()
    }

    /// Reports whether this is a data set of conversations.
    pub fn has_masks(&self) -> bool {
        !(self.train.masks.is_empty() && self.val.masks.is_empty())
    }

    /// Adds the recorded hashes to a shard of this data set. Fails if the shard has no mask, but the data set records one, or the other way
    /// around.
    pub fn with_hashes(&self, shard: Tokens) -> Result<Tokens> {
        let path = PathBuf::from(shard.name());
        let recorded = self.mask_hash(&path);
        ensure!(
            recorded.is_none() || shard.mask().is_some(),
            "{}: expected the mask of {shard}, which {FILE_NAME} records, found none; restore the file or make the data set again",
            mask::path(&path).display()
        );
        if let Some(mask) = shard.mask().filter(|_| recorded.is_none()) {
            bail!(
                "{mask}: expected a mask that {FILE_NAME} records, found one that it does not; make the data set again, or remove the file \
                 to train on all tokens"
            );
        }
        Ok(shard.with_recorded_hashes(self.hash(&path), recorded))
    }

    /// Checks that a model with `vocab` ids accepts the tokens. `model` names it.
    pub fn check_vocab(&self, directory: &Path, model: &str, vocab: usize) -> Result<()> {
        let Encoding { name, vocab: ids, .. } = &self.tokenizer;
        ensure!(
            *ids <= vocab,
            "{}: expected a tokenizer with at most {vocab} ids, the vocabulary of {model}, found {name} with {ids}; tokenize the \
             text again with the tokenizer of the model",
            directory.display()
        );
        Ok(())
    }
}

/// Returns the descriptions of the shards that match a glob pattern, each with its directory.
///
/// Fails if the replacement of such a data set was interrupted, because its shards may be partly old.
pub fn read_for_shards(pattern: &str) -> Result<Vec<(PathBuf, Dataset)>> {
    let mut found = BTreeMap::new();
    for path in pattern::paths(pattern)? {
        let directory = path.parent().unwrap_or(Path::new("")).to_owned();
        if is_part(&path) && !found.contains_key(&directory) {
            let dataset = read_for_shard(&path)?;
            found.insert(directory, dataset);
        }
    }
    Ok(found.into_iter().filter_map(|(directory, dataset)| Some((directory, dataset?))).collect())
}

/// Returns the description of the data set of a shard. Returns `None` for other files. Fails as [`read_for_shards`] does.
pub fn read_for_shard(path: &Path) -> Result<Option<Dataset>> {
    let Some(directory) = path.parent().filter(|_| is_part(path)) else { return Ok(None) };
    Replacement::check_finished(directory)?;
    Dataset::read(directory)
}

/// Reports whether a file in an output directory belongs to its data set: a part of it, or a copy of the tokenizer file.
pub(crate) fn is_output(path: &Path) -> bool {
    let is_tokenizer = |name: &str| is_tokenizer(name) || name == train::RANKS || CHAT_FILES.contains(&name);
    is_part(path) || path.file_name().and_then(|name| name.to_str()).is_some_and(is_tokenizer)
}

/// Reports whether a file name is one of those in a data set: a shard, its description, or an unfinished file.
fn is_part(path: &Path) -> bool {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return false };
    name == FILE_NAME
        || ShardNames::of_shard(name).is_some()
        || is_mask(name)
        || name.starts_with(atomic_file::TEMPORARY_PREFIX)
}

/// The files of a data set of conversations for a model that is trained on it: the chat template, and the tokens that begin and end a
/// text.
pub const CHAT_FILES: [&str; 2] = ["chat_template.jinja", "tokenizer_config.json"];

/// Reports whether a file name is that of the mask of a shard.
fn is_mask(name: &str) -> bool {
    let shard = name.strip_suffix(mask::EXTENSION).map(|stem| format!("{stem}bin"));
    shard.is_some_and(|shard| ShardNames::of_shard(&shard).is_some())
}

/// Reports whether a name is that of a copy of a tokenizer file.
fn is_tokenizer(name: &str) -> bool {
    [stored::JSON, stored::TIKTOKEN].contains(&name)
}

#[cfg(test)]
mod tests;
