//! `data fineweb`.

use super::download::downloaded;
use super::output::{print_next, print_summary, program};
use super::suggestion::Amounts;
use crate::values::count;
use anyhow::Result;
use data::fineweb::{self, FinewebOptions, Sample, Version};
use std::path::{Path, PathBuf};
use tokenizer::Tokenizer;

/// Download and tokenize a sample of FineWeb or FineWeb-Edu, sharded as in llm.c
#[derive(Debug, clap::Args)]
pub struct Fineweb {
    /// Sample: 10B (28 GB to download) or 100B (280 GB) tokens
    #[arg(long, value_name = "10B|100B", default_value = "10B")]
    version: Version,

    /// FineWeb-Edu instead of FineWeb
    #[arg(long)]
    edu: bool,

    /// Read a parquet file, or the parquet files in a directory, instead of downloading them
    #[arg(long, value_name = "FILE|DIR")]
    from: Option<PathBuf>,

    /// Directory for the shards [default: data/fineweb10B, data/edu_fineweb10B, ...]
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Tokenizer: gpt2, bytes, or a tokenizer.json or Llama 3 tokenizer.model, or its directory
    #[arg(long, value_name = "NAME|PATH", default_value = "gpt2")]
    tokenizer: String,

    /// Tokens in a shard. The first shard is the validation split
    #[arg(long, value_name = "N", default_value = "100000000", value_parser = count)]
    shard_tokens: usize,
}

/// Writes the data set.
pub fn run(args: &Fineweb) -> Result<()> {
    let tokenizer = Tokenizer::named(&args.tokenizer)?;
    let sample = Sample { edu: args.edu, version: args.version };
    let out = args.out.clone().unwrap_or_else(|| Path::new("data").join(sample.directory()));
    let files = if let Some(from) = &args.from {
        fineweb::files(from)?
    } else {
        let remote = sample.remote_files()?;
        remote.iter().map(|remote| downloaded(remote, &out, "FILE|DIR")).collect::<Result<_>>()?
    };
    let names = sample.names();
    let options = FinewebOptions { names, shard_tokens: args.shard_tokens, tokenizer, program: program() };
    let written = fineweb::write(&files, &out, &options)?;
    print_summary(&out, names, &written)?;
    print_next(&out, names, &Amounts::new(&written, args.shard_tokens, &options.tokenizer))
}
