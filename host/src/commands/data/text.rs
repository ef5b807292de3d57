//! `data text`: tokenizes documents in text, JSON lines, CSV and parquet files.

use super::input::ReadingFlags;
use super::output::{print_next, print_summary, program};
use super::suggestion::Amounts;
use crate::terminal;
use crate::values::{count, fraction};
use anyhow::Result;
use data::dataset::ShardNames;
use data::documents;
use data::text;
use std::io::{Write, stdout};
use std::path::PathBuf;
use tokenizer::Tokenizer;

/// Tokens that a validation split needs for one batch with the default --batch 4 --seq 1024 of `train`.
const DEFAULT_BATCH_TOKENS: usize = 4 * 1024 + 1;

/// Tokenize text, JSON lines, CSV and parquet files, also compressed with gzip or zstd
#[derive(Debug, clap::Args)]
pub struct Text {
    /// Files, directories to search, quoted patterns such as 'docs/*.md', or - for standard input
    #[arg(required = true, value_name = "PATH")]
    files: Vec<PathBuf>,

    /// Directory for the shards train_NNNNNN.bin and val_NNNNNN.bin and their description dataset.json
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,

    #[command(flatten)]
    input: ReadingFlags,

    /// Tokenizer: gpt2, bytes, or a tokenizer.json or Llama 3 tokenizer.model, or its directory
    #[arg(long, value_name = "NAME|PATH", default_value = "gpt2")]
    tokenizer: String,

    /// Encode special tokens in the text, such as <|endoftext|>, as special tokens instead of ordinary text. Only for text that you
    /// trust: each <|endoftext|> begins a new document
    #[arg(long)]
    allow_special: bool,

    /// Fraction of the documents used for validation; with few documents, the fraction at the end of each
    #[arg(long, value_name = "X", default_value = "0", value_parser = fraction)]
    val_fraction: f64,

    /// Tokens in a shard
    #[arg(long, value_name = "N", default_value = "100000000", value_parser = count)]
    shard_tokens: usize,

    /// Replace the shards in the directory, once the new ones are complete
    #[arg(long)]
    overwrite: bool,
}

/// Tokenizes the files.
pub fn run(args: &Text) -> Result<()> {
    let found = documents::find(&args.files, &args.input.extensions, Some(&args.out))?;
    let options = text::TextOptions {
        tokenizer: Tokenizer::named(&args.tokenizer)?,
        allow_special: args.allow_special,
        reading: args.input.reading(),
        val_fraction: args.val_fraction,
        shard_tokens: args.shard_tokens,
        overwrite: args.overwrite,
        program: program(),
    };
    if let Some(note) = options.tokenizer.note() {
        terminal::note(&note)?;
    }
    let written = text::write(&found, &args.out, &options)?;
    print_summary(&args.out, ShardNames::TEXT, &written)?;
    if written.plain_special > 0 {
        terminal::note(&format!(
            "note: special tokens in the text that became ordinary text: {}; for text that you trust, --allow-special encodes them as \
             special tokens",
            written.plain_special
        ))?;
    }
    if let Some(separator) = args.input.separator.as_ref().filter(|_| written.without_separator > 0) {
        let files = written.without_separator;
        writeln!(stdout(), "warning: --separator: expected '{separator}' in each text file, found {files} without it")?;
    }
    if args.val_fraction > 0.0 && written.val.tokens < DEFAULT_BATCH_TOKENS {
        writeln!(
            stdout(),
            "warning: validation split: expected at least {DEFAULT_BATCH_TOKENS} tokens, one batch of train's defaults --batch 4 \
             --seq 1024, found {}; use more text or a larger --val-fraction, or train with smaller batches",
            written.val.tokens
        )?;
    }
    print_next(&args.out, ShardNames::TEXT, &Amounts::new(&written, args.shard_tokens, &options.tokenizer))
}
