//! `bench tokenizer`: the speed of a tokenizer on one core.

use crate::terminal;
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::time::Instant;
use system::progress::{self, Unit};

/// Time a tokenizer on one core; scripts/tokenizer_speed.py compares with tiktoken and Hugging Face
#[derive(Clone, Debug, clap::Args)]
pub struct Tokenizer {
    /// Text files
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Tokenizer: gpt2, bytes, or a tokenizer.json or Llama 3 tokenizer.model, or its directory
    #[arg(long, value_name = "NAME|PATH", default_value = "gpt2")]
    tokenizer: String,
}

/// Encodes each file once to warm up, then prints the tokens and the seconds of a second pass.
pub fn run(options: &Tokenizer) -> Result<()> {
    let tokenizer = tokenizer::Tokenizer::named(&options.tokenizer)?;
    let read = |path: &PathBuf| {
        bounded_file::read_to_string(path, bounded_file::TEXT)
            .with_context(|| format!("cannot read {}", path.display()))
    };
    let texts = options.files.iter().map(read).collect::<Result<Vec<String>>>()?;
    let bytes: usize = texts.iter().map(String::len).sum();
    let progress = progress::start("encoding", Unit::Bytes, 2 * bytes as u64);
    let mut line = String::new();
    for _ in 0..2 {
        let start = Instant::now();
        let mut tokens = 0;
        for text in &texts {
            tokens += tokenizer.encode_with_special(text)?.len();
            progress.add(text.len() as u64);
        }
        let seconds = start.elapsed().as_secs_f64();
        line = format!("{bytes} bytes, {tokens} tokens, {seconds:.4} s, {:.1} MB/s", bytes as f64 / seconds / 1e6);
    }
    drop(progress);
    terminal::line(&format!("{tokenizer}: {line}"))
}
