//! `data`: text to token files, and questions to evaluation files.

use super::PROGRAM;
use crate::cli::count;
use anyhow::Result;
use data::{hellaswag, multiple_choice, text, tinyshakespeare};
use indicatif::{ProgressBar, ProgressStyle};
use std::fmt::Write as _;
use std::fs;
use std::io::{IsTerminal, Write, stderr, stdout};
use std::path::PathBuf;

/// Makes token files (.bin) from text, and evaluation files, with GPT-2's encoding
#[derive(Debug, clap::Args)]
pub struct Data {
    #[command(subcommand)]
    source: Source,
}

#[derive(Debug, clap::Subcommand)]
enum Source {
    Text(Text),
    Tinyshakespeare(Tinyshakespeare),
    Hellaswag(Hellaswag),
}

/// From any text files; each is a document
#[derive(Debug, clap::Args)]
struct Text {
    /// Text files, or directories to search for them
    #[arg(required = true)]
    files: Vec<PathBuf>,

    /// Directory for the shards, `train_NNNNNN.bin` and `val_NNNNNN.bin`
    #[arg(short, long)]
    out: PathBuf,

    /// Share of the documents kept for validation; of each document's end, where there are few
    #[arg(long, default_value = "0")]
    val_fraction: f64,

    /// In directories, take files with these endings only, such as rs,md
    #[arg(long, value_delimiter = ',')]
    extensions: Vec<String>,

    /// Tokens in a shard
    #[arg(long, default_value = "100000000", value_parser = count)]
    shard_tokens: usize,

    /// Replace the shards that lie in the directory
    #[arg(long)]
    overwrite: bool,
}

/// The works of Shakespeare, 338,025 tokens, split as llm.c splits them
#[derive(Debug, clap::Args)]
struct Tinyshakespeare {
    /// The text, if it is not to be downloaded
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,

    /// Directory for `tiny_shakespeare_train.bin` and `tiny_shakespeare_val.bin`
    #[arg(short, long, default_value = "data/tinyshakespeare")]
    out: PathBuf,
}

/// The HellaSwag set, for `--hellaswag`: four endings of a text, of which a model should find one likeliest
#[derive(Debug, clap::Args)]
struct Hellaswag {
    /// The set as JSON lines with ctx, endings and label: hellaswag_val.jsonl of <https://github.com/rowanz/hellaswag>
    #[arg(long, value_name = "FILE")]
    from: PathBuf,

    /// Evaluation file to write
    #[arg(short, long, value_name = "FILE", default_value = "data/hellaswag/hellaswag_val.bin")]
    out: PathBuf,
}

pub fn run(args: &Data) -> Result<()> {
    match &args.source {
        Source::Text(args) => from_text(args),
        Source::Tinyshakespeare(args) => from_tinyshakespeare(args),
        Source::Hellaswag(args) => from_hellaswag(args),
    }
}

fn from_text(args: &Text) -> Result<()> {
    let files = text::find(&args.files, &args.extensions)?;
    let bytes = files.iter().filter_map(|file| fs::metadata(file).ok()).map(|m| m.len()).sum();
    let progress = if stderr().is_terminal() { ProgressBar::new(bytes) } else { ProgressBar::hidden() };
    progress.set_style(ProgressStyle::with_template("{bar:30} {bytes}/{total_bytes} | {bytes_per_sec} | {eta} left")?);
    let options =
        text::Options { val_fraction: args.val_fraction, shard_tokens: args.shard_tokens, overwrite: args.overwrite };
    let written = text::write(&files, &args.out, &options, &progress)?;
    progress.finish_and_clear();
    let mut out = stdout();
    writeln!(out, "read {} documents, {} bytes", written.documents, written.bytes)?;
    let directory = args.out.display();
    let mut next = format!("{PROGRAM} train --model d12");
    for (name, part) in [("train", &written.train), ("val", &written.val)] {
        if part.shards > 0 {
            let shards = if part.shards == 1 { "shard" } else { "shards" };
            writeln!(
                out,
                "wrote {} tokens for {name}, {} {shards}: {directory}/{name}_*.bin",
                part.tokens, part.shards
            )?;
            write!(next, " --{name} '{directory}/{name}_*.bin'")?;
        }
    }
    writeln!(out, "\nnext: {next}")?;
    Ok(())
}

fn from_tinyshakespeare(args: &Tinyshakespeare) -> Result<()> {
    let written = tinyshakespeare::write(args.from.as_deref(), &args.out)?;
    let mut out = stdout();
    for (path, tokens) in [&written.val, &written.train] {
        writeln!(out, "wrote {tokens} tokens to {}", path.display())?;
    }
    let (train, val) = (written.train.0.display(), written.val.0.display());
    writeln!(out, "\nnext: {PROGRAM} train --train {train} --val {val} --model d6 --batch 4 --seq 64 --steps 100")?;
    Ok(())
}

fn from_hellaswag(args: &Hellaswag) -> Result<()> {
    let examples = hellaswag::read(&args.from)?;
    if let Some(directory) = args.out.parent() {
        atomic_file::create_directory(directory)?;
    }
    multiple_choice::write(&args.out, &examples)?;
    let file = args.out.display();
    writeln!(
        stdout(),
        "wrote {} examples to {file}\n\nnext: {PROGRAM} eval --model FILE --hellaswag {file}",
        examples.len()
    )?;
    Ok(())
}
