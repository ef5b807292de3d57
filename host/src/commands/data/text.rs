//! `data text`: tokenizes documents in text, JSON lines, CSV and parquet files.

use crate::hints::Invocation;
use crate::values::{count, fraction};
use crate::version;
use anyhow::Result;
use data::documents::{self, Format, Reading};
use data::text::{self, Summary};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write, stderr, stdout};
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

    /// Format of all files, instead of the one that each name implies
    #[arg(long, value_name = "text|jsonl|parquet|csv", value_parser = format)]
    format: Option<Format>,

    /// Field or column with the text; a.b is field b of field a
    #[arg(long, value_name = "NAME", default_value = "text")]
    field: String,

    /// Text that ends a document in a text file, with the line break after it; without it, each file is one document
    #[arg(long, value_name = "TEXT")]
    separator: Option<String>,

    /// Tokenizer: gpt2, bytes, or a tokenizer.json, a Llama 3 tokenizer.model, or a directory with one of them
    #[arg(long, value_name = "NAME", default_value = "gpt2")]
    tokenizer: String,

    /// Encode special tokens in the text, such as <|endoftext|>, as ordinary text
    #[arg(long)]
    keep_special: bool,

    /// Fraction of the documents used for validation; with few documents, the fraction at the end of each
    #[arg(long, value_name = "X", default_value = "0", value_parser = fraction)]
    val_fraction: f64,

    /// In directories, use only files with these extensions, such as rs,md
    #[arg(long, value_name = "EXT", value_delimiter = ',')]
    extensions: Vec<String>,

    /// Tokens in a shard
    #[arg(long, value_name = "N", default_value = "100000000", value_parser = count)]
    shard_tokens: usize,

    /// Replace the shards in the directory, once the new ones are complete
    #[arg(long)]
    overwrite: bool,
}

fn format(text: &str) -> Result<Format, &'static str> {
    match text {
        "text" => Ok(Format::Text),
        "jsonl" => Ok(Format::Jsonl),
        "parquet" => Ok(Format::Parquet),
        "csv" => Ok(Format::Csv),
        _ => Err("expected text, jsonl, parquet or csv"),
    }
}

/// Tokenizes the files.
pub fn run(args: &Text) -> Result<()> {
    let found = documents::find(&args.files, &args.extensions, Some(&args.out))?;
    let options = text::Options {
        tokenizer: Tokenizer::named(&args.tokenizer)?,
        keep_special: args.keep_special,
        reading: Reading { format: args.format, field: args.field.clone(), separator: args.separator.clone() },
        val_fraction: args.val_fraction,
        shard_tokens: args.shard_tokens,
        overwrite: args.overwrite,
        program: format!("llm-rs {}", version::short()),
    };
    let progress = progress(found.bytes())?;
    let written = text::write(&found, &args.out, &options, &progress)?;
    progress.finish_and_clear();
    report(args, &written)
}

/// Returns a progress bar over the bytes of the input files.
fn progress(bytes: Option<u64>) -> Result<ProgressBar> {
    if !stderr().is_terminal() {
        return Ok(ProgressBar::hidden());
    }
    let Some(bytes) = bytes else {
        let style = ProgressStyle::with_template("{spinner} {bytes} | {bytes_per_sec}")?;
        return Ok(ProgressBar::no_length().with_style(style));
    };
    let style = ProgressStyle::with_template("{bar:30} {bytes}/{total_bytes} | {bytes_per_sec} | {eta} left")?;
    Ok(ProgressBar::new(bytes).with_style(style))
}

/// Prints the amounts of data, everything that was left out or changed, and the next command.
fn report(args: &Text, written: &Summary) -> Result<()> {
    let mut out = stdout();
    let input = &written.input;
    writeln!(out, "read {} documents, {} bytes, from {} files", input.documents, input.bytes, input.files)?;
    if written.skipped.total() > 0 {
        writeln!(out, "{}", written.skipped)?;
    }
    if input.empty_documents > 0 {
        writeln!(out, "skipped empty documents: {}", input.empty_documents)?;
    }
    if input.invalid_utf8 > 0 {
        let name = |(path, count): &(PathBuf, usize)| format!("{} ({count})", path.display());
        let names: Vec<String> = written.invalid_utf8.iter().take(3).map(name).collect();
        let (count, files, more) = (input.invalid_utf8, written.invalid_utf8.len(), written.invalid_utf8.len() > 3);
        let more = if more { ", …" } else { "" };
        let names = names.join(", ");
        writeln!(
            out,
            "warning: expected UTF-8, found {count} invalid sequences in {files} files: {names}{more}; each became U+FFFD"
        )?;
    }
    if let Some(separator) = args.separator.as_ref().filter(|_| written.without_separator > 0) {
        let files = written.without_separator;
        writeln!(out, "warning: --separator: expected '{separator}' in each text file, found {files} without it")?;
    }
    if written.forced_cuts > 0 {
        writeln!(
            out,
            "warning: long documents were cut at {} places where the tokens may differ from those of the whole document",
            written.forced_cuts
        )?;
    }
    let directory = args.out.display();
    let mut next: Vec<String> = ["train", "--model", "d12"].map(str::to_owned).into();
    for (name, part) in [("train", &written.train), ("val", &written.val)] {
        if part.shards > 0 {
            let shards = if part.shards == 1 { "shard" } else { "shards" };
            writeln!(
                out,
                "wrote {} tokens for {name}, {} {shards}: {directory}/{name}_*.bin",
                part.tokens, part.shards
            )?;
            next.extend([format!("--{name}"), format!("{directory}/{name}_*.bin")]);
        }
    }
    if args.val_fraction > 0.0 && written.val.tokens < DEFAULT_BATCH_TOKENS {
        writeln!(
            out,
            "warning: validation split: expected at least {DEFAULT_BATCH_TOKENS} tokens, one batch of train's defaults --batch 4 \
             --seq 1024, found {}; use more text or a larger --val-fraction, or train with smaller batches",
            written.val.tokens
        )?;
    }
    writeln!(out, "\nnext: {}", Invocation::current().command(next.iter().map(String::as_str)))?;
    Ok(())
}
