//! `sample`: text from a model file.

use super::resources::{Hardware, load};
use crate::cli::{count, non_negative};
use crate::sample::{Sampling, generate};
use anyhow::Result;
use checkpoint::model_file::ModelFile;
use data::tokenizer::Tokenizer;
use model::Unsharded;
use std::io::{Write, stdout};
use std::path::PathBuf;

/// Writes text with a model
#[derive(Debug, clap::Args)]
pub struct Sample {
    /// Model file (.bin), as training writes it
    #[arg(short = 'e', long, value_name = "FILE")]
    model: PathBuf,

    /// Text to continue; without it the model begins a document of its own
    #[arg(short, long, default_value = "")]
    prompt: String,

    /// Tokens to write
    #[arg(short = 'g', long, default_value = "256", value_parser = count)]
    tokens: usize,

    /// Choose among the likeliest so many tokens only; 0: among all
    #[arg(long, default_value = "0")]
    top_k: usize,

    /// Below 1 the likely tokens come more often than the model says, above 1 less often; 0: always the likeliest
    #[arg(long, default_value = "1.0", value_parser = non_negative)]
    temperature: f32,

    /// Another number, another text
    #[arg(long, default_value = "1337")]
    seed: u32,

    #[command(flatten)]
    hardware: Hardware,
}

pub fn run(args: &Sample) -> Result<()> {
    let file = ModelFile::open(&args.model)?;
    let descriptor = file.descriptor();
    let tokenizer = Tokenizer::of_vocab(descriptor.vocab)?;
    let mut prompt = vec![tokenizer.document()];
    prompt.extend(tokenizer.encode(&args.prompt));
    let mut engine = args.hardware.open_quietly()?;
    let t = descriptor.max_seq_len.min(prompt.len() + args.tokens);
    let model = load(file, 1, t, &mut *engine)?;
    let sampling = Sampling { top_k: args.top_k, temperature: args.temperature, seed: args.seed };
    let mut out = stdout();
    out.write_all(args.prompt.as_bytes())?;
    // Bytes as they come: a character may be spread over several tokens.
    generate(&model, &mut *engine, &mut Unsharded, &prompt, args.tokens, sampling, |token| {
        out.write_all(&tokenizer.decode(&[token]))?;
        Ok(out.flush()?)
    })?;
    Ok(out.write_all(b"\n")?)
}
