//! Conversations as shards with masks, on all cores and in bounded memory.
//!
//! The `record` module reads the formats, a [`Render`] turns messages into text by the chat template of a model, the `encode` module turns
//! the text into tokens with flags, and the `shards` module writes them. Chat templates do not belong here.

mod encode;
mod json;
mod record;
mod shards;
#[cfg(test)]
mod tests;

pub use json::Json;

use crate::dataset::{Dataset, Encoding, Input, Replacement, Replaces, Split};
use crate::documents::{Format, Found, Record, Skipped, read_records};
use crate::text::check_shard_tokens;
use anyhow::{Context, Result, bail, ensure};
use encode::{Encoded, Encoder};
use rayon::prelude::*;
use shards::Shards;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use system::progress::{self, Unit};
use tokenizer::Tokenizer;

/// Bytes and number of records that are encoded at a time.
const BATCH_BYTES: usize = 4 << 20;
const BATCH_RECORDS: usize = 1024;

/// The text of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// The turns of the assistant, in bytes of the text.
    pub turns: Vec<Range<usize>>,
    /// Whether the turns are exactly the text with loss. Otherwise, a turn may end with white space after its end token, which is not
    /// part of it.
    pub is_exact: bool,
}

/// The reason why a conversation has no text.
#[derive(Debug)]
pub enum RenderError {
    /// The template does not accept the conversation.
    Rejected(String),
    /// The template cannot be used.
    Failed(anyhow::Error),
}

/// Renders conversations by a chat template.
pub trait Render: Sync {
    /// Renders the values of a template, a JSON object.
    fn render(&self, values: &str) -> Result<Rendered, RenderError>;
}

/// The reason why a record is skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// No known field.
    Format,
    /// No message.
    Empty,
    /// No message of the assistant.
    NoAssistant,
    /// A role that templates do not know.
    Role,
    /// A content that is not text.
    Content,
    /// The template rejects the conversation.
    Rejected,
    /// The template gives no token of the assistant.
    NoTarget,
    /// A special token in a text, which the tokenizer cannot encode as ordinary text.
    Special,
    /// A character that marks special tokens.
    Reserved,
}

impl Reason {
    fn because(self, detail: String) -> Skip {
        Skip { reason: self, detail }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Format => "records without messages, conversations, or prompt and completion",
            Self::Empty => "conversations without messages",
            Self::NoAssistant => "conversations without an assistant turn",
            Self::Role => "conversations with unknown roles",
            Self::Content => "conversations with contents other than text",
            Self::Rejected => "conversations that the chat template rejects",
            Self::NoTarget => "conversations without a token of the assistant in the text of the chat template",
            Self::Special => "conversations with special tokens that this tokenizer cannot encode as ordinary text (--allow-special encodes \
                              them as special tokens)",
            Self::Reserved => "conversations with the reserved characters U+FDD0 to U+FDD2",
        })
    }
}

/// A record that is skipped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skip {
    reason: Reason,
    detail: String,
}

/// The numbers of skipped records, each with the first example.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SkippedRecords(BTreeMap<Reason, (usize, String)>);

impl SkippedRecords {
    fn add(&mut self, place: &str, skip: &Skip) {
        let first = || (0, format!("{place}: {}", skip.detail));
        self.0.entry(skip.reason).or_insert_with(first).0 += 1;
    }

    /// Returns the number of records.
    pub fn total(&self) -> usize {
        self.0.values().map(|(count, _)| count).sum()
    }
}

/// One line for each reason.
impl fmt::Display for SkippedRecords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (reason, (count, example))) in self.0.iter().enumerate() {
            let separator = if i > 0 { "\n" } else { "" };
            write!(f, "{separator}skipped {reason}: {count} (first: {example})")?;
        }
        Ok(())
    }
}

/// Settings of [`write()`].
#[derive(Clone, Debug)]
pub struct ChatOptions {
    /// The tokenizer, with all special tokens of the template.
    pub tokenizer: Tokenizer,
    /// Encode special tokens in messages, such as `<|im_end|>`, as special tokens instead of ordinary text.
    pub allow_special: bool,
    /// The format of the files; `None` infers it from each name.
    pub format: Option<Format>,
    /// Fraction of the conversations in the validation split, in [0, 1).
    pub val_fraction: f64,
    /// Maximum number of tokens in a shard. A longer conversation is a shard of its own.
    pub shard_tokens: usize,
    /// Replace existing shards in the output directory.
    pub overwrite: bool,
    /// Version of the program, for the description of the data set.
    pub program: String,
}

/// The amounts of data read and written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// The input. Its documents are conversations, and its bytes those of their text.
    pub input: Input,
    /// Paths that were not read.
    pub skipped: Skipped,
    /// Records that were left out.
    pub skipped_records: SkippedRecords,
    /// Files with invalid UTF-8, each with the number of invalid sequences.
    pub invalid_utf8: Vec<(PathBuf, usize)>,
    /// Special tokens in messages that were encoded as ordinary text.
    pub plain_special: usize,
    /// Turns of the assistant, and those of them that do not end with a special token.
    pub turns: usize,
    /// Turns of the assistant that do not end with a special token.
    pub endless_turns: usize,
    /// The special token that ends most turns.
    pub end: Option<u32>,
    /// Tokens of the longest conversation.
    pub longest: usize,
    /// Tokens with loss in both splits.
    pub targets: usize,
    /// The training split.
    pub train: Split,
    /// The validation split.
    pub val: Split,
}

/// Renders and tokenizes conversations, and writes `train_NNNNNN.bin` and `val_NNNNNN.bin`, a mask for each, `dataset.json`, and a copy of
/// the tokenizer's file into `out`. `others` returns the contents of further files, which [`CHAT_FILES`](crate::dataset::CHAT_FILES)
/// names.
///
/// A data set in `out` is replaced when the new one is complete. The validation split consists of evenly spaced conversations.
pub fn write(
    found: &Found,
    out: &Path,
    options: &ChatOptions,
    renderer: &dyn Render,
    others: impl FnOnce(&Summary) -> Result<Vec<(&'static str, Vec<u8>)>>,
) -> Result<Summary> {
    ensure!(
        (0.0..1.0).contains(&options.val_fraction),
        "--val-fraction {}: expected at least 0 and less than 1",
        options.val_fraction
    );
    check_shard_tokens(options.shard_tokens)?;
    let replaces = if options.overwrite { Replaces::Everything } else { Replaces::Nothing };
    let replacement = Replacement::begin(out, replaces)?;
    replacement.check_chat_files()?;
    let mut shards = Shards::new(replacement.directory(), options);
    let encoder = Encoder::new(&options.tokenizer, options.allow_special, renderer);
    let mut summary = Summary::default();
    let mut ends = BTreeMap::new();
    let read = thread::scope(|scope| {
        let (send, batches) = sync_channel(1);
        let reader = scope.spawn(move || read_all(found, options.format, &send));
        let encode = || -> Result<()> {
            for batch in batches {
                let encode = |Record { place, json }: Record| {
                    let encoded = encoder.encode(&json).with_context(|| place.clone())?;
                    anyhow::Ok((place, encoded))
                };
                let encoded = batch.into_par_iter().map(encode).collect::<Result<Vec<_>>>()?;
                for (place, encoded) in encoded {
                    match encoded {
                        Ok(encoded) => {
                            summary.add(&encoded, &mut ends);
                            shards.push(&encoded)?;
                        }
                        Err(skip) => summary.skipped_records.add(&place, &skip),
                    }
                }
            }
            Ok(())
        };
        let encoded = encode();
        // After an error, the reader cannot send, and only reports that.
        let read = reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        encoded.and(read)
    })?;
    summary.end = ends.into_iter().max_by_key(|(_, count)| *count).map(|(id, _)| id);
    summary.add_read(read)?;
    (summary.train, summary.val) = shards.finish()?;
    let dataset = Dataset {
        name: String::new(),
        tokenizer: Encoding::from(&options.tokenizer),
        train: summary.train.clone(),
        val: summary.val.clone(),
        input: summary.input.clone(),
        program: options.program.clone(),
    };
    let others = others(&summary)?;
    replacement.commit(&dataset, options.tokenizer.file(), &others)?;
    Ok(summary)
}

impl Summary {
    fn add(&mut self, encoded: &Encoded, ends: &mut BTreeMap<u32, usize>) {
        self.input.documents += 1;
        self.input.bytes += encoded.bytes;
        self.plain_special += encoded.plain_special;
        self.turns += encoded.ends.len();
        self.longest = self.longest.max(encoded.ids.len());
        self.targets += encoded.targets();
        for end in &encoded.ends {
            match end {
                Some(id) => *ends.entry(*id).or_default() += 1,
                None => self.endless_turns += 1,
            }
        }
    }

    /// Adds what the reader has found. Fails without a conversation.
    fn add_read(&mut self, read: Self) -> Result<()> {
        (self.skipped, self.invalid_utf8) = (read.skipped, read.invalid_utf8);
        self.input = Input {
            files: read.input.files,
            invalid_utf8: read.input.invalid_utf8,
            skipped: self.skipped.total(),
            ..self.input
        };
        let lines = [self.skipped_records.to_string(), self.skipped.to_string()];
        let lines: Vec<&str> = lines.iter().map(String::as_str).filter(|line| !line.is_empty()).collect();
        if self.input.documents == 0 {
            let lines = if lines.is_empty() { String::new() } else { format!("\n{}", lines.join("\n")) };
            bail!(
                "expected at least one conversation with an assistant turn, found none in {} files{lines}",
                self.input.files
            );
        }
        Ok(())
    }
}

/// Reads all files, and sends their records in batches. Returns the files and paths.
fn read_all(found: &Found, format: Option<Format>, send: &SyncSender<Vec<Record>>) -> Result<Summary> {
    let progress = progress::start_unbounded("rendering conversations", Unit::Bytes, found.bytes());
    let mut summary = Summary { skipped: found.skipped.clone(), ..Summary::default() };
    let (mut batch, mut bytes) = (Vec::new(), 0);
    for file in &found.files {
        let report = read_records(file, format, &record::FIELDS, &progress, &mut |record| {
            bytes += record.json.len();
            batch.push(record);
            if bytes >= BATCH_BYTES || batch.len() == BATCH_RECORDS {
                bytes = 0;
                // The receiver has failed, and reports the reason.
                send.send(std::mem::take(&mut batch)).context("the encoder has stopped")?;
            }
            Ok(())
        })?;
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
    if !batch.is_empty() {
        send.send(batch).context("the encoder has stopped")?;
    }
    Ok(summary)
}
