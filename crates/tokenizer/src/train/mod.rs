//! Training of byte-level byte-pair encodings.
//!
//! A [`Splitter`] splits text into [`Pieces`], which [`train`] merges. The result is a `tokenizer.json` and a file of ranks. Reading the text
//! does not belong here.
//!
//! The merges are those of Hugging Face's `BpeTrainer` with the 256 characters of `ByteLevel.alphabet()`. Of several pairs with the same
//! count, the one with the smallest left id is merged, and of those the one with the smallest right id. Ids are those of GPT-2's
//! vocabulary: bytes in the order of its alphabet, then merged tokens in the order of their merges, and then special tokens.

mod merges;
mod pieces;
mod splitter;

pub use pieces::{Pieces, Table};
pub use splitter::Splitter;

use crate::{BYTE_VOCAB, DOCUMENT_TOKENS, byte_level, json_file, stored};
use anyhow::{Result, bail, ensure};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use merges::Merges;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

/// Name of the file of ranks. It is not [`stored::TIKTOKEN`], which implies Llama 3's pattern and special tokens.
pub const RANKS: &str = "tokenizer.tiktoken";

/// Settings of a training.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Number of ids, with the special tokens.
    pub vocab: usize,
    /// Special tokens, which get the last ids. Text that looks like one is ordinary text.
    pub special: Vec<String>,
    /// Occurrences that a pair needs to be merged.
    pub min_frequency: u64,
}

impl Settings {
    /// Checks the settings.
    pub fn check(&self) -> Result<()> {
        let Self { vocab, special, .. } = self;
        for (i, token) in special.iter().enumerate() {
            ensure!(!token.is_empty(), "--special: expected text, found an empty token; remove it");
            ensure!(
                !special[..i].contains(token),
                "--special {token}: expected distinct tokens, found it twice; remove one"
            );
            let is_byte = byte_level::bytes(token).is_some_and(|bytes| bytes.len() == 1);
            ensure!(
                !is_byte,
                "--special {token}: expected at least two characters, found one, which is the token of a byte; use a \
                 longer text, such as <|{token}|>"
            );
        }
        if !special.iter().any(|token| DOCUMENT_TOKENS.contains(&&**token)) {
            bail!(
                "--special: expected a token that precedes documents, one of {}, found {}; add one",
                DOCUMENT_TOKENS.join(", "),
                if special.is_empty() { "none".to_owned() } else { special.join(", ") }
            );
        }
        let least = BYTE_VOCAB + special.len();
        ensure!(
            *vocab >= least,
            "--vocab-size {vocab}: expected at least {least}, for {BYTE_VOCAB} bytes and {} special tokens; use a larger number",
            special.len()
        );
        Ok(())
    }
}

/// Creates the output directory, and checks that it has no tokenizer, unless it may be replaced.
pub fn check_output(directory: &Path, overwrite: bool) -> Result<()> {
    ensure!(
        !directory.is_file(),
        "--out {}: expected a directory, found a file; name another one",
        directory.display()
    );
    for name in [stored::JSON, RANKS] {
        let path = directory.join(name);
        let can_replace = overwrite && path.is_file();
        ensure!(
            can_replace || path.symlink_metadata().is_err(),
            "{}: expected no such file, found one; choose another --out{}",
            path.display(),
            if overwrite { "" } else { ", or replace it with --overwrite" }
        );
    }
    atomic_file::create_directory(directory)
}

/// A trained encoding.
#[derive(Debug)]
pub struct Trained {
    merges: Merges,
    special: Vec<String>,
    regex: String,
}

/// Trains an encoding of pieces, which `splitter` has made. Calls `merged` after each merge.
pub fn train(pieces: Pieces, splitter: &Splitter, settings: &Settings, merged: &mut dyn FnMut()) -> Result<Trained> {
    settings.check()?;
    let Settings { vocab, special, min_frequency } = settings;
    // The text of a token in the file is that of its bytes in GPT-2's alphabet. It differs from those of the special tokens.
    let reserved: Vec<Vec<u8>> = special.iter().filter_map(|token| byte_level::bytes(token)).collect();
    let merges = merges::train(pieces, vocab - special.len(), *min_frequency, &reserved, merged);
    Ok(Trained { merges, special: special.clone(), regex: splitter.regex().to_owned() })
}

impl Trained {
    /// Returns the number of ids. It is smaller than the setting if no more pairs are frequent enough.
    pub fn vocab(&self) -> usize {
        self.merges.tokens.len() + self.special.len()
    }

    /// Returns the number of merges.
    pub fn merges(&self) -> usize {
        self.merges.pairs.len()
    }

    /// Returns the number of tokens of the training text.
    pub fn encoded(&self) -> u64 {
        self.merges.encoded
    }

    /// Writes both files into a directory. The `tokenizer.json`, which other commands read, is written last.
    pub fn write(&self, directory: &Path) -> Result<()> {
        for (name, text) in [(RANKS, self.ranks()), (stored::JSON, self.json()?)] {
            atomic_file::write(&directory.join(name), |out| Ok(out.write_all(text.as_bytes())?))?;
        }
        Ok(())
    }

    /// Returns the contents of the `tokenizer.json`.
    pub fn json(&self) -> Result<String> {
        let Merges { tokens, pairs, .. } = &self.merges;
        let texts: Vec<String> =
            tokens.iter().map(|token| token.iter().map(|&byte| byte_level::character(byte)).collect()).collect();
        let vocab = texts.iter().zip(0..).map(|(text, id): (_, u32)| (text.clone(), id.into())).collect();
        let line = |&(left, right): &(u32, u32)| format!("{} {}", texts[left as usize], texts[right as usize]);
        let lines: Vec<String> = pairs.iter().map(line).collect();
        let special: Vec<(&str, usize)> = self.special.iter().map(String::as_str).zip(tokens.len()..).collect();
        json_file::with_pattern(&vocab, &lines, &special, &self.regex)
    }

    /// Returns the contents of the file of ranks: a line with base64 and rank for each token, without special tokens.
    pub fn ranks(&self) -> String {
        let mut text = String::new();
        for (rank, token) in self.merges.tokens.iter().enumerate() {
            let _ = writeln!(text, "{} {rank}", BASE64_STANDARD.encode(token));
        }
        text
    }
}

#[cfg(test)]
mod tests;
