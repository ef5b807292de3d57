//! `tokenizer`: trains tokenizers and compares them.

mod compare;
mod train;

use super::data::check_threads;
use anyhow::Result;

/// Train a tokenizer, and compare tokenizers on a text
#[derive(Debug, clap::Args)]
pub struct Tokenizer {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Train(train::Train),
    Compare(compare::Compare),
}

/// Trains a tokenizer or compares some.
pub fn run(args: &Tokenizer) -> Result<()> {
    check_threads()?;
    match &args.command {
        Command::Train(args) => train::run(args),
        Command::Compare(args) => compare::run(args),
    }
}
