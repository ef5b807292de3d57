//! Tokenization of documents to shards, on all cores and in bounded memory.
//!
//! [`write()`] makes a data set of any documents. The modules of named data sets call `write_shards` with llm.c's rules.
//! [`vocabulary`] counts what documents consist of, and writes nothing.

mod chunks;
mod encoder;
mod splits;
pub mod vocabulary;

pub(crate) use encoder::Encoder;
pub(crate) use splits::{Layout, Validation};

use crate::dataset::{Dataset, Encoding, Input, Replacement, Replaces, ShardNames, Split};
use crate::documents::{self, Found, Reading, Sink, Skipped};
use crate::tokens::{MAX_SHARD_TOKENS, Width};
use anyhow::{Result, ensure};
use chunks::{Counts, SIZES, Sizes};
use splits::Splits;
use std::fmt;
use std::path::{Path, PathBuf};
use system::progress::{self, Unit};
use tokenizer::Tokenizer;

/// Settings of [`write()`].
#[derive(Clone, Debug)]
pub struct TextOptions {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Encode special tokens in the text, such as `<|endoftext|>`, as special tokens instead of ordinary text.
    pub allow_special: bool,
    /// How the files are read.
    pub reading: Reading,
    /// Fraction of the text in the validation split, in [0, 1).
    pub val_fraction: f64,
    /// Tokens per shard. The last shard of a split holds the remaining tokens.
    pub shard_tokens: usize,
    /// Replace existing shards in the output directory.
    pub overwrite: bool,
    /// Version of the program, for the description of the data set.
    pub program: String,
}

/// The amounts of data read and written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// The input.
    pub input: Input,
    /// Paths that were not read.
    pub skipped: Skipped,
    /// Files with invalid UTF-8, each with the number of invalid sequences.
    pub invalid_utf8: Vec<(PathBuf, usize)>,
    /// Text files without the separator that was given, each read as one document.
    pub without_separator: usize,
    /// Cuts in long documents at which the tokens may differ from those of the whole document.
    pub forced_cuts: usize,
    /// Special tokens in the text that were encoded as ordinary text.
    pub plain_special: usize,
    /// The training split.
    pub train: Split,
    /// The validation split.
    pub val: Split,
}

impl Summary {
    /// Adds the amount of text. Fails if there is none.
    fn add(&mut self, counts: &Counts) -> Result<()> {
        let Counts { documents, empty, bytes, forced_cuts, plain_special } = *counts;
        (self.forced_cuts, self.plain_special) = (forced_cuts, plain_special);
        let skipped = self.skipped.total();
        self.input = Input { documents, empty_documents: empty, bytes, skipped, ..self.input };
        let files = self.input.files + skipped;
        ensure!(
            documents > 0,
            "expected at least one document with text, found none in {files} {}; pass files with text{}",
            if files == 1 { "file" } else { "files" },
            if skipped > 0 { format!("\n{}", self.skipped) } else { String::new() }
        );
        Ok(())
    }
}

/// Tokenizes documents and writes `train_NNNNNN.bin`, `val_NNNNNN.bin`, `dataset.json` and a copy of the tokenizer's file into
/// `out`.
///
/// A data set in `out` is replaced when the new one is complete. The validation split consists of evenly spaced documents. With
/// fewer than `1 / val_fraction` documents, it consists of the end of each document instead. Invalid UTF-8 becomes U+FFFD.
pub fn write(found: &Found, out: &Path, options: &TextOptions) -> Result<Summary> {
    write_with(found, out, options, SIZES)
}

fn write_with(found: &Found, out: &Path, options: &TextOptions, sizes: Sizes) -> Result<Summary> {
    ensure!(
        (0.0..1.0).contains(&options.val_fraction),
        "--val-fraction {}: expected at least 0 and less than 1",
        options.val_fraction
    );
    check_shard_tokens(options.shard_tokens)?;
    check_separator(&options.reading)?;
    let replaces = if options.overwrite { Replaces::Everything } else { Replaces::Nothing };
    let replacement = Replacement::begin(out, replaces)?;
    let TextOptions { tokenizer, allow_special, val_fraction, shard_tokens, program, .. } = options;
    let encoder = Encoder { tokenizer, allow_special: *allow_special, keep_empty: false, sizes };
    let validation = Validation::Fraction(*val_fraction);
    let layout = Layout { names: ShardNames::TEXT, shard_tokens: *shard_tokens, validation };
    write_shards(replacement, &encoder, layout, program, |sink| read_all(found, &options.reading, "tokenizing", sink))
}

/// Checks the value of `--separator`.
fn check_separator(reading: &Reading) -> Result<()> {
    ensure!(
        reading.separator.as_deref() != Some(""),
        "--separator: expected at least one character, found none; without it, a text file is one document"
    );
    Ok(())
}

/// Checks the value of `--shard-tokens`.
pub(crate) fn check_shard_tokens(shard_tokens: usize) -> Result<()> {
    ensure!(
        (1..=MAX_SHARD_TOKENS).contains(&shard_tokens),
        "--shard-tokens {shard_tokens}: expected 1 to {MAX_SHARD_TOKENS}"
    );
    Ok(())
}

/// Tokenizes the documents that `read` writes into its sink, and replaces the data set. `read` returns a summary without the
/// amounts of text and tokens.
pub(crate) fn write_shards(
    replacement: Replacement,
    encoder: &Encoder,
    layout: Layout,
    program: &str,
    read: impl FnOnce(&mut dyn Sink) -> Result<Summary> + Send,
) -> Result<Summary> {
    let width = Width::of_vocab(encoder.tokenizer.vocab());
    let mut splits = Splits::new(replacement.directory(), width, layout)?;
    let (mut summary, counts) = encoder.run(read, |encoded| splits.push(encoded))?;
    summary.add(&counts)?;
    (summary.train, summary.val) = splits.finish()?;
    let dataset = Dataset {
        name: layout.names.data_set.to_owned(),
        tokenizer: Encoding::from(encoder.tokenizer),
        train: summary.train.clone(),
        val: summary.val.clone(),
        input: summary.input.clone(),
        program: program.to_owned(),
    };
    replacement.commit(&dataset, encoder.tokenizer.file(), &[])?;
    Ok(summary)
}

/// The error of a sink that needs no more documents.
#[derive(Debug)]
struct Enough;

impl fmt::Display for Enough {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the sink needs no more documents")
    }
}

impl std::error::Error for Enough {}

/// Reads all files, or those before the sink returns [`Enough`]. `work` is the name of the progress bar.
fn read_all(found: &Found, reading: &Reading, work: &str, sink: &mut dyn Sink) -> Result<Summary> {
    let progress = progress::start_unbounded(work, Unit::Bytes, found.bytes());
    let mut summary = Summary { skipped: found.skipped.clone(), ..Summary::default() };
    for file in &found.files {
        let report = match documents::read(file, reading, &progress, sink) {
            Err(error) if error.is::<Enough>() => {
                summary.input.files += 1;
                break;
            }
            report => report?,
        };
        if let Some(reason) = report.skipped {
            summary.skipped.add(reason, file);
            continue;
        }
        summary.input.files += 1;
        summary.without_separator += usize::from(report.without_separator);
        if report.invalid_utf8 > 0 {
            summary.input.invalid_utf8 += report.invalid_utf8;
            summary.invalid_utf8.push((file.clone(), report.invalid_utf8));
        }
    }
    Ok(summary)
}

#[cfg(test)]
mod tests;
