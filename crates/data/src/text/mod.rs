//! Tokenization of documents to shards, on all cores and in bounded memory.
//!
//! A thread reads documents into chunks, the thread pool encodes a batch of chunks, and another thread writes their tokens in
//! order. The shards do not depend on the number of threads or the size of the batches.

mod chunks;
mod splits;

use crate::dataset::{Dataset, Encoding, Input, Replacement, Split};
use crate::documents::{self, Found, Reading, Skipped};
use crate::tokens::{self, Width};
use anyhow::{Result, anyhow, ensure};
use chunks::{Chunk, Chunker, Counts, SIZES, Sizes};
use indicatif::ProgressBar;
use rayon::prelude::*;
use splits::{Encoded, Splits};
use std::panic;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, ScopedJoinHandle};
use tokenizer::Tokenizer;

/// Settings of [`write()`].
#[derive(Clone, Debug)]
pub struct Options {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Encode special tokens in the text, such as `<|endoftext|>`, as ordinary text.
    pub keep_special: bool,
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
    /// Cuts in long documents at which the tokens may differ from those of the whole document.
    pub forced_cuts: usize,
    /// The training split.
    pub train: Split,
    /// The validation split.
    pub val: Split,
}

/// Tokenizes documents and writes `train_NNNNNN.bin`, `val_NNNNNN.bin`, `dataset.json` and a copy of the tokenizer's file into
/// `out`.
///
/// A data set in `out` is replaced when the new one is complete. The validation split consists of evenly spaced documents. With
/// fewer than `1 / val_fraction` documents, it consists of the end of each document instead. Invalid UTF-8 becomes U+FFFD.
pub fn write(found: &Found, out: &Path, options: &Options, progress: &ProgressBar) -> Result<Summary> {
    write_with(found, out, options, progress, SIZES)
}

fn write_with(found: &Found, out: &Path, options: &Options, progress: &ProgressBar, sizes: Sizes) -> Result<Summary> {
    ensure!(
        (0.0..1.0).contains(&options.val_fraction),
        "--val-fraction {}: expected at least 0 and less than 1",
        options.val_fraction
    );
    ensure!(
        (1..=tokens::MAX_SHARD_TOKENS).contains(&options.shard_tokens),
        "--shard-tokens {}: expected 1 to {}",
        options.shard_tokens,
        tokens::MAX_SHARD_TOKENS
    );
    ensure!(
        options.reading.separator.as_deref() != Some(""),
        "--separator: expected at least one character, found none; without it, a text file is one document"
    );
    let replacement = Replacement::begin(out, options.overwrite)?;
    let width = Width::of_vocab(options.tokenizer.vocab());
    let mut splits = Splits::new(replacement.directory(), width, options.val_fraction, options.shard_tokens)?;
    let mut summary = thread::scope(|scope| {
        let (send_chunks, chunks) = sync_channel(1);
        let (send_tokens, tokens) = sync_channel(1);
        let reader = scope.spawn(move || read_all(found, options, progress, sizes, send_chunks));
        let writer = scope.spawn(|| write_all(tokens, &mut splits));
        let encoded = encode_all(chunks, &send_tokens, options);
        drop(send_tokens);
        let (written, read) = (join(writer), join(reader));
        // If the writer or the encoder failed, the reader only reports that they stopped.
        written?;
        encoded?;
        read
    })?;
    ensure!(
        summary.input.documents > 0,
        "expected at least one document with text, found none in {} files{}",
        found.files.len(),
        if summary.skipped.total() > 0 { format!("\n{}", summary.skipped) } else { String::new() }
    );
    (summary.train, summary.val) = splits.finish()?;
    let dataset = Dataset {
        tokenizer: Encoding::from(&options.tokenizer),
        train: summary.train.clone(),
        val: summary.val.clone(),
        input: summary.input.clone(),
        program: options.program.clone(),
    };
    replacement.commit(&dataset, options.tokenizer.file())?;
    Ok(summary)
}

fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
}

/// Reads all files. Returns the summary without the amounts of the splits.
fn read_all(
    found: &Found,
    options: &Options,
    progress: &ProgressBar,
    sizes: Sizes,
    send: SyncSender<Vec<Chunk>>,
) -> Result<Summary> {
    let mut summary = Summary { skipped: found.skipped.clone(), ..Summary::default() };
    let mut chunker = Chunker::new(&options.tokenizer, sizes, send);
    for file in &found.files {
        let report = documents::read(file, &options.reading, progress, &mut chunker)?;
        if let Some(reason) = report.skipped {
            summary.skipped.add(reason, file);
            continue;
        }
        summary.input.files += 1;
        if report.invalid_utf8 > 0 {
            summary.input.invalid_utf8 += report.invalid_utf8;
            summary.invalid_utf8.push((file.clone(), report.invalid_utf8));
        }
    }
    let Counts { documents, empty, bytes, forced_cuts } = chunker.finish()?;
    summary.forced_cuts = forced_cuts;
    let skipped = summary.skipped.total();
    summary.input = Input { documents, empty_documents: empty, bytes, skipped, ..summary.input };
    Ok(summary)
}

/// Encodes batches of chunks and passes them on in order.
fn encode_all(batches: Receiver<Vec<Chunk>>, send: &SyncSender<Vec<Encoded>>, options: &Options) -> Result<()> {
    for batch in batches {
        let encoded = batch.into_par_iter().map(|chunk| encode(&chunk, options)).collect::<Result<_>>()?;
        if send.send(encoded).is_err() {
            // The writer failed and reports the reason.
            break;
        }
    }
    Ok(())
}

/// Returns the tokens of a chunk. A token precedes each document.
fn encode(chunk: &Chunk, options: &Options) -> Result<Encoded> {
    let tokenizer = &options.tokenizer;
    let mut encoded = Encoded { ids: Vec::with_capacity(chunk.text.len() / 3), starts: Vec::new() };
    for (begins, text) in chunk.parts() {
        if begins {
            encoded.starts.push(encoded.ids.len());
            encoded.ids.push(tokenizer.document());
        }
        let ids = if options.keep_special { tokenizer.encode(text) } else { tokenizer.encode_with_special(text) }?;
        encoded.ids.extend(ids);
    }
    // Parts of a tokenizer.json may not be consistent with each other.
    let highest = encoded.ids.iter().max();
    if let Some(id) = highest.filter(|&&id| id as usize >= tokenizer.vocab()) {
        return Err(anyhow!("{tokenizer}: expected ids below {}, found {id}; check the tokenizer", tokenizer.vocab()));
    }
    Ok(encoded)
}

fn write_all(batches: Receiver<Vec<Encoded>>, splits: &mut Splits) -> Result<()> {
    for batch in batches {
        for encoded in batch {
            splits.push(&encoded)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
