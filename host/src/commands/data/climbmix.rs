//! `data climbmix`.

use super::download::{DOWNLOADS, downloaded};
use super::output::{print_next, print_summary, program};
use super::suggestion::Amounts;
use crate::values::count;
use anyhow::Result;
use data::climbmix::{self, NAMES, TRAINING_FILES};
use std::io::{Write, stdout};
use std::path::PathBuf;
use tokenizer::Tokenizer;

/// Download and tokenize a part of ClimbMix, the text of nanochat, with nanochat's validation split
#[derive(Debug, clap::Args)]
pub struct Climbmix {
    /// Parquet files of the training split, 1 to 6542, each of about 100 MB and 50 million tokens. The file of the validation split is
    /// added to them
    #[arg(long, value_name = "N", default_value = "170", value_parser = files)]
    shards: usize,

    /// Download the parquet files to the directory source in --out, and end. `tokenizer train` reads them
    #[arg(long, conflicts_with_all = ["from", "tokenizer", "shard_tokens"])]
    download_only: bool,

    /// Read the parquet files in a directory instead of downloading them. The last one by name is the validation split
    #[arg(long, value_name = "DIR", conflicts_with = "shards")]
    from: Option<PathBuf>,

    /// Directory for the shards
    #[arg(short, long, value_name = "DIR", default_value = "data/climbmix")]
    out: PathBuf,

    /// Tokenizer: gpt2, bytes, or a tokenizer.json or Llama 3 tokenizer.model, or its directory
    #[arg(long, value_name = "NAME|PATH", default_value = "gpt2")]
    tokenizer: String,

    /// Tokens in a shard
    #[arg(long, value_name = "N", default_value = "100000000", value_parser = count)]
    shard_tokens: usize,
}

fn files(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (1..=TRAINING_FILES).contains(number));
    number.ok_or_else(|| format!("expected a whole number from 1 to {TRAINING_FILES}"))
}

/// Writes the data set.
pub fn run(args: &Climbmix) -> Result<()> {
    let tokenizer = Tokenizer::named(&args.tokenizer)?;
    let files = if let Some(from) = &args.from {
        climbmix::files(from)?
    } else {
        let remote = climbmix::remote_files(args.shards)?;
        remote.iter().map(|remote| downloaded(remote, &args.out, "DIR")).collect::<Result<_>>()?
    };
    if args.download_only {
        writeln!(stdout(), "downloaded {} parquet files: {}", files.len(), args.out.join(DOWNLOADS).display())?;
        return Ok(());
    }
    let written = climbmix::write(&files, &args.out, args.shard_tokens, &tokenizer, &program())?;
    print_summary(&args.out, NAMES, &written)?;
    print_next(&args.out, NAMES, &Amounts::new(&written, args.shard_tokens, &tokenizer))
}
