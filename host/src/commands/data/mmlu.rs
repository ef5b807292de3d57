//! `data mmlu`: converts MMLU to an evaluation file.

use super::download::local_or_downloaded;
use super::evaluation;
use crate::terminal::counted;
use crate::values::count;
use anyhow::{Context, Result};
use data::mmlu::{self, Split};
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};

/// Download and convert MMLU for --mmlu: questions about 57 subjects, with four choices each
#[derive(Debug, clap::Args)]
pub struct Mmlu {
    /// Read a CSV file, a directory with SUBJECT_test.csv files, or data.tar of <https://github.com/hendrycks/test> instead of
    /// downloading data.tar (166 MB)
    #[arg(long, value_name = "DIR|FILE")]
    from: Option<PathBuf>,

    /// Part to convert: dev, val or test. Determines which files of a directory are read
    #[arg(long, value_name = "NAME", default_value = "test", value_parser = split)]
    split: Split,

    /// Maximum number of tokens in a question with its longest choice. Longer questions are truncated at the beginning. llm.c requires
    /// fewer than 1024
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

/// Converts the files and prints a summary.
pub fn run(args: &Mmlu) -> Result<()> {
    let out = args.out.clone().unwrap_or_else(|| PathBuf::from(format!("data/mmlu/mmlu_{}.bin", args.split)));
    evaluation::check(&out)?;
    let directory = out.parent().unwrap_or(Path::new(""));
    let from = local_or_downloaded(args.from.as_deref(), || Ok(mmlu::remote()), directory)?;
    let extracted = tempfile::tempdir().context("cannot create a temporary directory for the CSV files")?;
    let files = mmlu::find(&from, args.split, extracted.path())?;
    let questions = mmlu::read(&files, args.max_tokens)?;
    let [found, files] =
        [(questions.examples.len(), "question"), (files.len(), "file")].map(|(n, noun)| counted(n, noun));
    writeln!(stdout(), "read {found} in {files}")?;
    if questions.shortened > 0 {
        let (shortened, most) = (counted(questions.shortened, "question"), args.max_tokens);
        writeln!(stdout(), "truncated {shortened} of more than {most} tokens at the beginning (--max-tokens)")?;
    }
    evaluation::write("--mmlu", &out, &questions.examples)
}
