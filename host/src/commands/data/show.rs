//! `data show`.

use crate::style::{Tone, is_colored, paint};
use crate::values::{count, whole_number};
use anyhow::{Context, Result, ensure};
use data::tokens::Width;
use data::{Tokens, dataset, mask};
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use tokenizer::{Tokenizer, stored};

/// Show the tokens and the text around a position of a token file
#[derive(Debug, clap::Args)]
pub struct Show {
    /// Token file (.bin)
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Position of the token in the middle
    #[arg(long, value_name = "N", default_value = "0", value_parser = whole_number)]
    at: usize,

    /// Number of tokens
    #[arg(long, value_name = "M", default_value = "32", value_parser = count)]
    count: usize,

    /// Tokenizer: gpt2, bytes, or a tokenizer.json or Llama 3 tokenizer.model, or its directory [default: that of dataset.json, or
    /// gpt2 for 16-bit files]
    #[arg(long, value_name = "NAME|PATH")]
    tokenizer: Option<String>,
}

/// Prints the tokens, one per line, and the text.
pub fn run(args: &Show) -> Result<()> {
    let tokens = Tokens::open(&args.file)?;
    let len = tokens.len();
    ensure!(args.at < len, "--at {}: expected a position below {len}, the number of tokens in {tokens}", args.at);
    let start = args.at.saturating_sub(args.count / 2).min(len.saturating_sub(args.count));
    let mut ids = vec![0; args.count.min(len - start)];
    tokens.read(start, &mut ids)?;
    let named = args.tokenizer.as_deref().map(Tokenizer::named).transpose()?;
    let tokenizer = match named {
        Some(tokenizer) => Some(tokenizer),
        None => default_tokenizer(&args.file, &tokens)?,
    };
    let flags = match tokens.mask() {
        Some(mask) => {
            let mut flags = vec![0; ids.len()];
            mask.read(start, &mut flags)?;
            Some(flags)
        }
        None => None,
    };
    let has_loss = |i: usize| flags.as_ref().is_some_and(|flags| flags[i] & mask::LOSS != 0);
    let mut out = stdout();
    let column = if flags.is_some() { "  loss" } else { "" };
    writeln!(out, "{tokens}: {len} tokens\n\n  {:>10} {:>7}{column}  text", "position", "id")?;
    for (i, &id) in ids.iter().enumerate() {
        let position = start + i;
        let marker = if position == args.at { '>' } else { ' ' };
        let text = tokenizer.as_ref().map_or_else(String::new, |tokenizer| text_of(tokenizer, id));
        let loss = if column.is_empty() {
            ""
        } else if has_loss(i) {
            "     1"
        } else {
            "      "
        };
        writeln!(out, "{}", format!("{marker} {position:>10} {id:>7}{loss}  {text}").trim_end())?;
    }
    match tokenizer {
        Some(tokenizer) => {
            let colored = flags.is_some() && is_colored(&out);
            let positions: Vec<usize> = (0..ids.len()).collect();
            let text: String = positions
                .chunk_by(|&one, &next| has_loss(one) == has_loss(next))
                .map(|run| {
                    let text = tokenizer.text(&ids[run[0]..run[0] + run.len()]);
                    paint(&text, Tone::Good, colored && has_loss(run[0]))
                })
                .collect();
            writeln!(out, "\n{text}")?;
        }
        None => writeln!(out, "\nFor the text, pass the tokenizer of these 32-bit tokens with --tokenizer FILE.")?,
    }
    Ok(())
}

/// Returns the text of a token on one line.
fn text_of(tokenizer: &Tokenizer, id: u32) -> String {
    if id as usize >= tokenizer.vocab() {
        return format!("(outside the vocabulary of {} tokens)", tokenizer.vocab());
    }
    tokenizer.text(&[id]).escape_debug().to_string()
}

/// Returns the tokenizer of a file without `--tokenizer`: the one in the description of its data set, or else GPT-2's for 16-bit
/// tokens. Fails if the data set has a description, but its tokenizer is missing.
pub fn default_tokenizer(file: &Path, tokens: &Tokens) -> Result<Option<Tokenizer>> {
    if let Some(dataset) = dataset::read_for_shard(file)? {
        let directory = file.parent().unwrap_or(Path::new(""));
        let tokenizer = stored::with_identity(&dataset.tokenizer, directory);
        return tokenizer.map(Some).with_context(|| format!("{}: pass the tokenizer with --tokenizer", file.display()));
    }
    Ok((tokens.width() == Some(Width::U16)).then(Tokenizer::gpt2))
}
