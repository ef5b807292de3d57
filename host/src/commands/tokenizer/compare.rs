//! `tokenizer compare`: the bytes per token of several tokenizers on a text.

use crate::commands::data::input::ReadingFlags;
use crate::terminal;
use anyhow::{Result, ensure};
use data::documents::{self, STDIN};
use data::text::vocabulary::{Usage, count_tokens};
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use tokenizer::Tokenizer;

/// Compare the bytes per token of tokenizers, GPT-2's among them, on a text
#[derive(Debug, clap::Args)]
pub struct Compare {
    /// Tokenizers: gpt2, bytes, or a tokenizer.json or Llama 3 tokenizer.model, or its directory
    #[arg(value_name = "TOKENIZER")]
    tokenizers: Vec<String>,

    /// Files, directories or quoted patterns with text that none of the tokenizers was trained on
    #[arg(long, required = true, num_args = 1.., value_name = "PATH")]
    text: Vec<PathBuf>,

    #[command(flatten)]
    input: ReadingFlags,
}

/// Prints a table with a row for each tokenizer.
pub fn run(args: &Compare) -> Result<()> {
    ensure!(
        !args.text.iter().any(|path| path == Path::new(STDIN)),
        "--text {STDIN}: expected files, found standard input; each tokenizer reads the text: write it to a file"
    );
    // GPT-2's tokenizer is the reference.
    let gpt2 = (!args.tokenizers.iter().any(|name| name == "gpt2")).then_some("gpt2");
    let names = args.tokenizers.iter().map(String::as_str).chain(gpt2);
    let tokenizers = names.map(Tokenizer::named).collect::<Result<Vec<_>>>()?;
    let found = documents::find(&args.text, &args.input.extensions, None)?;
    let width = tokenizers.iter().map(|tokenizer| tokenizer.name().chars().count()).max().unwrap_or(0);
    let mut out = stdout();
    for (i, tokenizer) in tokenizers.iter().enumerate() {
        if let Some(note) = tokenizer.note() {
            terminal::note(&note)?;
        }
        let Usage { tokens, bytes, is_exact } = count_tokens(&found, &args.input.reading(), tokenizer)?;
        if i == 0 {
            writeln!(out, "{bytes} bytes of text")?;
            writeln!(out, "{:width$}  vocabulary        tokens  bytes per token  decoded text", "tokenizer")?;
        }
        let (ratio, decoded) = (bytes as f64 / tokens.max(1) as f64, if is_exact { "equal" } else { "differs" });
        writeln!(out, "{:width$}  {:10}  {tokens:12}  {ratio:15.3}  {decoded}", tokenizer.name(), tokenizer.vocab())?;
    }
    Ok(())
}
