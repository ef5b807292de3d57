//! `data tinystories`.

use super::download::local_or_downloaded;
use super::output::{print_next, print_summary, program};
use super::suggestion::Amounts;
use anyhow::{Context, Result};
use data::download;
use data::tinystories::{self, NAMES};
use std::path::PathBuf;
use tokenizer::Tokenizer;

/// Download (1.6 GB) and tokenize TinyStories: 944,697,029 tokens, split as in llm.c
#[derive(Debug, clap::Args)]
pub struct Tinystories {
    /// Read TinyStories_all_data.tar.gz, or a directory with its JSON files, instead of downloading it
    #[arg(long, value_name = "FILE|DIR")]
    from: Option<PathBuf>,

    /// Directory for TinyStories_train.bin and TinyStories_val.bin
    #[arg(short, long, value_name = "DIR", default_value = "data/tinystories")]
    out: PathBuf,

    /// Tokenizer: gpt2, bytes, or a tokenizer.json or Llama 3 tokenizer.model, or its directory
    #[arg(long, value_name = "NAME|PATH", default_value = "gpt2")]
    tokenizer: String,
}

/// Writes the data set.
pub fn run(args: &Tinystories) -> Result<()> {
    let tokenizer = Tokenizer::named(&args.tokenizer)?;
    let remote = || {
        let files = download::huggingface_files(tinystories::DATA_SET, "", tinystories::ARCHIVE)?;
        files.into_iter().next().context("the list of files is empty")
    };
    let from = local_or_downloaded(args.from.as_deref(), remote, &args.out)?;
    let written = tinystories::write(&from, &args.out, &tokenizer, &program())?;
    print_summary(&args.out, NAMES, &written)?;
    print_next(&args.out, NAMES, &Amounts::new(&written, usize::MAX, &tokenizer))
}
