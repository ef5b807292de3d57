//! `data`: converts text to token files, and HellaSwag and MMLU to evaluation files.

use crate::hints::Invocation;
use crate::values::{count, fraction};
use anyhow::Result;
use data::mmlu::{self, Split};
use data::multiple_choice::{self, Example};
use data::{hellaswag, text, tinyshakespeare};
use indicatif::{ProgressBar, ProgressStyle};
use std::fs;
use std::io::{IsTerminal, Write, stderr, stdout};
use std::path::{Path, PathBuf};

/// Convert text to token files (.bin), and HellaSwag and MMLU to evaluation files, with the GPT-2 encoding
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
    Mmlu(Mmlu),
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

/// Download and tokenize Tiny Shakespeare: 338,025 tokens, split as in llm.c
#[derive(Debug, clap::Args)]
struct Tinyshakespeare {
    /// Read the text from this file instead of downloading it
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,

    /// Directory for tiny_shakespeare_train.bin and tiny_shakespeare_val.bin
    #[arg(short, long, value_name = "DIR", default_value = "data/tinyshakespeare")]
    out: PathBuf,
}

/// Convert HellaSwag for --hellaswag: questions that ask for the most plausible of four endings
#[derive(Debug, clap::Args)]
struct Hellaswag {
    /// JSON lines with ctx, endings and label, such as hellaswag_val.jsonl of <https://github.com/rowanz/hellaswag>
    #[arg(long, value_name = "FILE")]
    from: PathBuf,

    /// Evaluation file to write
    #[arg(short, long, value_name = "FILE", default_value = "data/hellaswag/hellaswag_val.bin")]
    out: PathBuf,
}

/// Convert MMLU for --mmlu: questions about 57 subjects, with four choices each
#[derive(Debug, clap::Args)]
struct Mmlu {
    /// CSV file, or directory with SUBJECT_test.csv files, such as data.tar of <https://github.com/hendrycks/test>
    #[arg(long, value_name = "DIR|FILE")]
    from: PathBuf,

    /// Part to convert: dev, val or test. Determines which files of a directory are read
    #[arg(long, value_name = "NAME", default_value = "test", value_parser = split)]
    split: Split,

    /// Tokens of the longest question with its longest choice. Longer questions lose their beginning. llm.c requires fewer than 1024
    #[arg(long, value_name = "N", default_value = "1023", value_parser = count)]
    max_tokens: usize,

    /// Evaluation file to write [default: data/mmlu/mmlu_SPLIT.bin]
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
}

fn split(text: &str) -> Result<Split, &'static str> {
    let splits = [Split::Dev, Split::Val, Split::Test];
    splits.into_iter().find(|split| split.to_string() == text).ok_or("expected dev, val or test")
}

/// Converts a data set.
pub fn run(args: &Data) -> Result<()> {
    match &args.source {
        Source::Text(args) => from_text(args),
        Source::Tinyshakespeare(args) => from_tinyshakespeare(args),
        Source::Hellaswag(args) => from_hellaswag(args),
        Source::Mmlu(args) => from_mmlu(args),
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

fn from_tinyshakespeare(args: &Tinyshakespeare) -> Result<()> {
    let written = tinyshakespeare::write(args.from.as_deref(), &args.out)?;
    let mut out = stdout();
    for (path, tokens) in [&written.val, &written.train] {
        writeln!(out, "wrote {tokens} tokens to {}", path.display())?;
    }
    let (train, val) = (written.train.0.to_string_lossy(), written.val.0.to_string_lossy());
    let settings = ["--model", "d6", "--batch", "4", "--seq", "64", "--steps", "100"];
    let next = ["train", "--train", &train, "--val", &val].into_iter().chain(settings);
    writeln!(out, "\nnext: {}", Invocation::current().command(next))?;
    Ok(())
}

fn from_hellaswag(args: &Hellaswag) -> Result<()> {
    write_evaluation("--hellaswag", &args.out, &hellaswag::read(&args.from)?)
}

fn from_mmlu(args: &Mmlu) -> Result<()> {
    let files = mmlu::find(&args.from, args.split)?;
    let questions = mmlu::read(&files, args.max_tokens)?;
    writeln!(stdout(), "read {} questions in {} files", questions.examples.len(), files.len())?;
    if questions.shortened > 0 {
        let (shortened, most) = (questions.shortened, args.max_tokens);
        writeln!(stdout(), "{shortened} questions of more than {most} tokens lost their beginning (--max-tokens)")?;
    }
    let default = || PathBuf::from(format!("data/mmlu/mmlu_{}.bin", args.split));
    write_evaluation("--mmlu", &args.out.clone().unwrap_or_else(default), &questions.examples)
}

/// Writes an evaluation file for `flag` of `eval`.
fn write_evaluation(flag: &str, out: &Path, examples: &[Example]) -> Result<()> {
    if let Some(directory) = out.parent() {
        atomic_file::create_directory(directory)?;
    }
    multiple_choice::write(out, examples)?;
    let file = out.to_string_lossy();
    let next = Invocation::current().command(["eval", "--model", "FILE", flag, &file]);
    writeln!(stdout(), "wrote {} examples to {file}\n\nnext: {next}", examples.len())?;
    Ok(())
}
