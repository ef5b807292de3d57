//! `data tinyshakespeare`.

use super::download::local_or_downloaded;
use super::output::{print_next, print_summary, program};
use super::suggestion::Amounts;
use anyhow::Result;
use data::tinyshakespeare::{self, NAMES};
use std::path::PathBuf;
use tokenizer::Tokenizer;

/// Download and tokenize Tiny Shakespeare: 338,025 tokens, split as in llm.c
#[derive(Debug, clap::Args)]
pub struct Tinyshakespeare {
    /// Read the text from this file instead of downloading it
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,

    /// Directory for tiny_shakespeare_train.bin and tiny_shakespeare_val.bin
    #[arg(short, long, value_name = "DIR", default_value = "data/tinyshakespeare")]
    out: PathBuf,

    /// Tokenizer: gpt2, bytes, or a tokenizer.json or Llama 3 tokenizer.model, or its directory
    #[arg(long, value_name = "NAME|PATH", default_value = "gpt2")]
    tokenizer: String,
}

/// Writes the data set.
pub fn run(args: &Tinyshakespeare) -> Result<()> {
    let tokenizer = Tokenizer::named(&args.tokenizer)?;
    let text = local_or_downloaded(args.from.as_deref(), || Ok(tinyshakespeare::remote()), &args.out)?;
    let written = tinyshakespeare::write(&text, &args.out, &tokenizer, &program())?;
    print_summary(&args.out, NAMES, &written)?;
    print_next(&args.out, NAMES, &Amounts::new(&written, usize::MAX, &tokenizer))
}
