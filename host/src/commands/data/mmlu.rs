//! `data mmlu`: converts MMLU to an evaluation file.

use super::evaluation;
use crate::values::count;
use anyhow::Result;
use data::mmlu::{self, Split};
use std::io::{Write, stdout};
use std::path::PathBuf;

/// Convert MMLU for --mmlu: questions about 57 subjects, with four choices each
#[derive(Debug, clap::Args)]
pub struct Mmlu {
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

/// Converts the files and prints a summary.
pub fn run(args: &Mmlu) -> Result<()> {
    let files = mmlu::find(&args.from, args.split)?;
    let questions = mmlu::read(&files, args.max_tokens)?;
    writeln!(stdout(), "read {} questions in {} files", questions.examples.len(), files.len())?;
    if questions.shortened > 0 {
        let (shortened, most) = (questions.shortened, args.max_tokens);
        writeln!(stdout(), "{shortened} questions of more than {most} tokens lost their beginning (--max-tokens)")?;
    }
    let default = || PathBuf::from(format!("data/mmlu/mmlu_{}.bin", args.split));
    evaluation::write("--mmlu", &args.out.clone().unwrap_or_else(default), &questions.examples)
}
