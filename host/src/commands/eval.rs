//! `eval`: the loss of a model file on token files.

use super::resources::{Hardware, load};
use crate::checkpoint::model::ModelFile;
use crate::cli::count;
use crate::data::{Geometry, Loader, Prefetch, Tokens};
use crate::evaluate;
use anyhow::{Result, ensure};
use std::io::{Write, stdout};
use std::path::PathBuf;

/// Measures a model's loss on token files
#[derive(Debug, clap::Args)]
pub struct Eval {
    /// Model file (.bin), as training writes it
    #[arg(short = 'e', long, value_name = "FILE")]
    model: PathBuf,

    /// Token files (.bin) to measure on; quote the pattern
    #[arg(short = 'j', long, value_name = "GLOB")]
    val: String,

    /// Sequences in a batch
    #[arg(short, long, default_value = "4", value_parser = count)]
    batch: usize,

    /// Tokens in a sequence [default: as many as the model takes, 1024 at most]
    #[arg(short = 't', long, value_parser = count)]
    seq: Option<usize>,

    /// Batches to take [default: all there are]
    #[arg(short = 'm', long, value_parser = count)]
    val_batches: Option<usize>,

    #[command(flatten)]
    hardware: Hardware,
}

pub fn run(args: &Eval) -> Result<()> {
    let file = ModelFile::open(&args.model)?;
    let descriptor = file.descriptor();
    let t = args.seq.unwrap_or(descriptor.max_seq_len.min(1024));
    ensure!(
        t <= descriptor.max_seq_len,
        "--seq {t}: {} takes sequences of up to {} tokens",
        args.model.display(),
        descriptor.max_seq_len
    );
    let loader = Loader::new(Tokens::open_all(&args.val)?, Geometry::single(args.batch, t), descriptor.vocab, None)?;
    let batches = args.val_batches.unwrap_or(loader.batches_per_epoch());
    let mut engine = args.hardware.open_quietly()?;
    let model = load(file, args.batch, t, &mut *engine)?;
    let mut data = Prefetch::start(loader, &*engine)?;
    let loss = evaluate::loss(&model, &mut *engine, &mut data, batches)?;
    let tokens = batches * args.batch * t;
    writeln!(stdout(), "val loss {loss:.6} | perplexity {:.2} | {tokens} tokens", loss.exp())?;
    Ok(())
}
