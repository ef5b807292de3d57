//! `sample`: generates text with a model.

use super::resources::{Hardware, load};
use crate::sample::{Sampling, generate};
use crate::values::{count, non_negative, seed, whole_number};
use anyhow::{Context, Result};
use interchange::ModelSource;
use model::Unsharded;
use std::io::{Write, stdout};
use std::path::PathBuf;

/// Generate text with a model
#[derive(Debug, clap::Args)]
pub struct Sample {
    /// Model file (.bin), directory of a run (its newest checkpoint) or Hugging Face directory
    #[arg(short = 'e', long, value_name = "FILE|DIR")]
    model: PathBuf,

    /// Text to continue [default: none; the model starts a new document]
    #[arg(short, long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    prompt: String,

    /// Tokenizer: gpt2, bytes, or a tokenizer.json or tokenizer.model [default: that next to the model, or by
    /// the vocabulary size]
    #[arg(long, value_name = "NAME|FILE")]
    tokenizer: Option<String>,

    /// Number of tokens to generate
    #[arg(short = 'g', long, value_name = "N", default_value = "256", value_parser = count)]
    tokens: usize,

    /// Sample from the N most likely tokens; 0: from all
    #[arg(long, value_name = "N", default_value = "0", value_parser = whole_number)]
    top_k: usize,

    /// Divides the logits: values below 1 favor likely tokens; 0 always takes the most likely token
    #[arg(long, value_name = "X", default_value = "1.0", value_parser = non_negative)]
    temperature: f32,

    /// Seed of the random numbers
    #[arg(long, value_name = "N", default_value = "1337", value_parser = seed)]
    seed: u32,

    #[command(flatten)]
    hardware: Hardware,
}

/// Prints the prompt and its continuation.
pub fn run(args: &Sample) -> Result<()> {
    let file = ModelSource::open(&args.model)?;
    let descriptor = file.descriptor();
    let tokenizer = file.tokenizer(args.tokenizer.as_deref())?.with_context(|| {
        format!(
            "{}: expected a tokenizer.json or tokenizer.model next to the model, or a vocabulary of 50257 (GPT-2) or 256 (bytes), \
             found a vocabulary of {}; pass the model's tokenizer with --tokenizer FILE",
            file.path().display(),
            descriptor.vocab
        )
    })?;
    let mut prompt = vec![tokenizer.document()];
    prompt.extend(tokenizer.encode_with_special(&args.prompt)?);
    let mut engine = args.hardware.open_quietly()?;
    let t = descriptor.max_seq_len.min(prompt.len().saturating_add(args.tokens));
    let model = load(file, 1, t, &mut *engine)?;
    let sampling = Sampling { top_k: args.top_k, temperature: args.temperature, seed: args.seed };
    let mut out = stdout();
    out.write_all(args.prompt.as_bytes())?;
    // Write bytes rather than text: a character may consist of several tokens.
    generate(&model, &mut *engine, &mut Unsharded, &prompt, args.tokens, sampling, |token| {
        out.write_all(&tokenizer.decode(&[token]))?;
        Ok(out.flush()?)
    })?;
    Ok(out.write_all(b"\n")?)
}
