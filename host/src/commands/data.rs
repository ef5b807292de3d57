//! `data`: converts text and named data sets to token files, and shows and checks them.

mod check;
mod evaluation;
mod fineweb;
mod hellaswag;
mod mmlu;
mod named;
mod show;
mod tinyshakespeare;
mod tinystories;

use crate::hints::Invocation;
use crate::values::{count, fraction};
use anyhow::Result;
use data::text;
use indicatif::{ProgressBar, ProgressStyle};
use std::fs;
use std::io::{IsTerminal, Write, stderr, stdout};
use std::path::PathBuf;

/// Convert text and named data sets to token files (.bin), and show and check them
#[derive(Debug, clap::Args)]
pub struct Data {
    #[command(subcommand)]
    source: Source,
}

#[derive(Debug, clap::Subcommand)]
enum Source {
    Text(Text),
    Tinyshakespeare(tinyshakespeare::Tinyshakespeare),
    Tinystories(tinystories::Tinystories),
    Fineweb(fineweb::Fineweb),
    Hellaswag(hellaswag::Hellaswag),
    Mmlu(mmlu::Mmlu),
    Check(check::Check),
    Show(show::Show),
}

/// Tokenize text files, each as one document
#[derive(Debug, clap::Args)]
struct Text {
    /// Text files, or directories to search
    #[arg(required = true, value_name = "PATH")]
    files: Vec<PathBuf>,

    /// Directory for the shards train_NNNNNN.bin and val_NNNNNN.bin
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,

    /// Fraction of the documents used for validation; with few documents, the fraction at the end of each
    #[arg(long, value_name = "X", default_value = "0", value_parser = fraction)]
    val_fraction: f64,

    /// In directories, use only files with these extensions, such as rs,md
    #[arg(long, value_name = "EXT", value_delimiter = ',')]
    extensions: Vec<String>,

    /// Tokens in a shard
    #[arg(long, value_name = "N", default_value = "100000000", value_parser = count)]
    shard_tokens: usize,

    /// Replace existing shards in the directory
    #[arg(long)]
    overwrite: bool,
}

/// Converts, shows or checks data.
pub fn run(args: &Data) -> Result<()> {
    match &args.source {
        Source::Text(args) => from_text(args),
        Source::Tinyshakespeare(args) => tinyshakespeare::run(args),
        Source::Tinystories(args) => tinystories::run(args),
        Source::Fineweb(args) => fineweb::run(args),
        Source::Hellaswag(args) => hellaswag::run(args),
        Source::Mmlu(args) => mmlu::run(args),
        Source::Check(args) => check::run(args),
        Source::Show(args) => show::run(args),
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
    writeln!(out, "\nnext: {}", Invocation::current().command(next.iter().map(String::as_str)))?;
    Ok(())
}
