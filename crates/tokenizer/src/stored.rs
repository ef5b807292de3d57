//! The tokenizer in the directory of a model, a run or a data set.
//!
//! A Hugging Face directory has a `tokenizer.json`, a `tokenizer.model`, or a `vocab.json` with a `merges.txt`; that of a checkpoint of
//! nanochat may have a `tokenizer.pkl`. The directory of a run has, in addition, [`IDENTITY`], which also names built-in tokenizers.

use crate::vocab_and_merges::{MERGES, VOCAB};
use crate::{Identity, Tokenizer};
use anyhow::{Context, Result, bail, ensure};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Name of the file with the identity of a run's tokenizer.
pub const IDENTITY: &str = "tokenizer_identity.json";

/// Name of Hugging Face's tokenizer files.
pub const JSON: &str = "tokenizer.json";

/// Name of Llama 3's tokenizer files.
pub const TIKTOKEN: &str = "tokenizer.model";

/// Name of nanochat's tokenizer files.
pub const PICKLE: &str = "tokenizer.pkl";

/// Places to search for the tokenizer of a model.
#[derive(Clone, Copy, Debug, Default)]
pub struct Search<'a> {
    /// The tokenizer of the flag `--tokenizer`.
    pub named: Option<&'a Tokenizer>,
    /// The directory of the model, or that of a resumed run.
    pub model: Option<&'a Path>,
    /// The directory of a data set, and the tokenizer of its tokens.
    pub data: Option<(&'a Path, &'a Identity)>,
    /// Vocabulary size of the model.
    pub vocab: usize,
}

/// The result of a [`Search`].
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// `None` if it is unknown.
    pub tokenizer: Option<Tokenizer>,
    /// Whether it is the named one, or that of the model or the data. Otherwise it follows from the vocabulary size.
    pub is_stated: bool,
    /// Why the tokenizer of the model or the data cannot be used.
    pub note: Option<String>,
}

impl Search<'_> {
    /// Returns the first of these: the named tokenizer, the one in the directory of the model, that of the data, and the built-in
    /// one for the vocabulary size.
    ///
    /// Fails if the tokenizers of model and data differ, and if the tokenizer has more ids than the model.
    pub fn find(&self) -> Result<Found> {
        let mut note = None;
        let mut readable = |opened: Result<Option<Tokenizer>>| {
            opened.unwrap_or_else(|error| {
                note.get_or_insert_with(|| format!("the tokenizer is unknown: {error:#}"));
                None
            })
        };
        let of_model = match self.named {
            Some(tokenizer) => Some(tokenizer.clone()),
            None => self.model.and_then(|directory| readable(in_directory(directory))),
        };
        if let Some(tokenizer) = of_model {
            self.check(&tokenizer.identity())?;
            return Ok(Found { tokenizer: Some(tokenizer), is_stated: true, note: None });
        }
        let of_data =
            self.data.and_then(|(directory, identity)| readable(with_identity(identity, directory).map(Some)));
        let is_stated = of_data.is_some();
        // A tokenizer that cannot be opened is not the built-in one.
        let built_in = || Tokenizer::of_vocab(self.vocab).ok().filter(|_| self.data.is_none() && note.is_none());
        Ok(Found { tokenizer: of_data.or_else(built_in), is_stated, note })
    }

    /// Compares the tokenizer of the flag or of the model with the size of the model and with the data.
    fn check(&self, identity: &Identity) -> Result<()> {
        let source = match (self.named, self.model) {
            (None, Some(directory)) => format!("the model in {}", directory.display()),
            _ => "--tokenizer".to_owned(),
        };
        let vocab = self.vocab;
        ensure!(
            identity.vocab <= vocab,
            "{source}: expected a tokenizer with at most {vocab} ids, the vocabulary of the model, found {identity}; pass the \
             model's tokenizer with --tokenizer"
        );
        let Some((directory, of_data)) = self.data else { return Ok(()) };
        ensure!(
            of_data.has_vocabulary_of(identity),
            "{}: expected tokens of {identity}, the tokenizer of {source}, found tokens of {of_data}; tokenize the text with \
             `data text --tokenizer {}`",
            directory.display(),
            identity.name
        );
        Ok(())
    }
}

/// Opens the tokenizer in a directory. Returns `None` if there is none.
pub fn in_directory(directory: &Path) -> Result<Option<Tokenizer>> {
    match read_identity(directory)? {
        Some(identity) => Ok(Some(with_identity(&identity, directory)?)),
        None => files_in(directory).next().map(|file| Tokenizer::open(&file)).transpose(),
    }
}

/// Opens the tokenizer with this identity: a built-in one, a file in `directory`, or the file that the identity names.
pub fn with_identity(identity: &Identity, directory: &Path) -> Result<Tokenizer> {
    let opened: Vec<Result<Tokenizer>> = match &identity.name[..] {
        "gpt2" => vec![Ok(Tokenizer::gpt2())],
        "bytes" => vec![Ok(Tokenizer::bytes())],
        name => {
            let original = Some(PathBuf::from(name)).filter(|file| file.is_file());
            files_in(directory).chain(original).map(|file| Tokenizer::open(&file)).collect()
        }
    };
    let mut found = Vec::new();
    for tokenizer in opened {
        match tokenizer {
            Ok(tokenizer) if tokenizer.identity().has_vocabulary_of(identity) => return Ok(tokenizer),
            Ok(tokenizer) => found.push(tokenizer.identity().to_string()),
            Err(error) => found.push(format!("{error:#}")),
        }
    }
    bail!(
        "{}: expected the tokenizer {identity} as {JSON} or {TIKTOKEN}, found {}; copy the file there",
        directory.display(),
        if found.is_empty() { "none".to_owned() } else { found.join(", ") }
    )
}

/// Writes the tokenizer of a run into its directory, for [`in_directory`].
pub fn write(tokenizer: &Tokenizer, directory: &Path) -> Result<()> {
    if let Some(file) = tokenizer.file() {
        atomic_file::write(&directory.join(file.name), |out| Ok(out.write_all(&file.bytes)?))?;
    }
    atomic_file::write(&directory.join(IDENTITY), |out| {
        serde_json::to_writer_pretty(&mut *out, &tokenizer.identity())?;
        Ok(out.write_all(b"\n")?)
    })
}

fn read_identity(directory: &Path) -> Result<Option<Identity>> {
    let path = directory.join(IDENTITY);
    let text = match bounded_file::read_to_string(&path, bounded_file::DESCRIPTION) {
        Ok(text) => text,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let identity = serde_json::from_str(&text).with_context(|| {
        format!("{}: expected name, vocab and fingerprint of a tokenizer; remove the file", path.display())
    })?;
    Ok(Some(identity))
}

/// Returns the tokenizer files in a directory, the preferred one first.
pub(crate) fn files_in(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let names = [JSON, TIKTOKEN, "original/tokenizer.model", PICKLE];
    let pair = directory.join(MERGES).is_file().then_some(VOCAB);
    let files: Vec<PathBuf> = names.into_iter().chain(pair).map(|name| directory.join(name)).collect();
    files.into_iter().filter(|file| file.is_file())
}

#[cfg(test)]
mod tests;
