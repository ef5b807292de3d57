//! `eval`: the loss of a model file on token files, and its score on HellaSwag.

use super::resources::{Hardware, load};
use crate::cli::count;
use crate::evaluate::{self, multiple_choice};
use anyhow::{Result, ensure};
use checkpoint::model_file::ModelFile;
use data::{Geometry, Loader, MultipleChoice, Prefetch, Tokens};
use engine::BatchLayout;
use model::Unsharded;
use std::io::{Write, stdout};
use std::path::PathBuf;

/// Measures a model's loss on token files, and how often it finds the right ending of a text
#[derive(Debug, clap::Args)]
pub struct Eval {
    /// Model file (.bin), as training writes it
    #[arg(short = 'e', long, value_name = "FILE")]
    model: PathBuf,

    /// Token files (.bin) to measure on; quote the pattern
    #[arg(short = 'j', long, value_name = "GLOB", required_unless_present = "hellaswag")]
    val: Option<String>,

    /// Evaluation file (.bin), as `data hellaswag` makes it
    #[arg(long, value_name = "FILE")]
    hellaswag: Option<PathBuf>,

    /// Examples of --hellaswag to take, the first ones [default: all there are]
    #[arg(long, value_name = "N", value_parser = count, requires = "hellaswag")]
    hellaswag_examples: Option<usize>,

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
    let (b, t) = (args.batch, args.seq.unwrap_or(descriptor.max_seq_len.min(1024)));
    ensure!(
        t <= descriptor.max_seq_len,
        "--seq {t}: {} takes sequences of up to {} tokens",
        args.model.display(),
        descriptor.max_seq_len
    );
    let loader = |val: &String| Loader::new(Tokens::open_all(val)?, Geometry::single(b, t), descriptor.vocab, None);
    let loader = args.val.as_ref().map(loader).transpose()?;
    let hellaswag = args.hellaswag.as_deref();
    let hellaswag = hellaswag.map(|path| MultipleChoice::open_first(path, args.hellaswag_examples)).transpose()?;
    if let Some(set) = &hellaswag {
        set.check(descriptor.vocab, t)?;
    }
    let mut engine = args.hardware.open_quietly()?;
    let model = load(file, b, t, &mut *engine)?;
    if let Some(loader) = loader {
        let batches = args.val_batches.unwrap_or(loader.batches_per_epoch());
        let mut data = Prefetch::start(loader, &*engine)?;
        let loss = evaluate::loss(&model, &mut *engine, &mut Unsharded, &mut data, batches)?;
        let tokens = batches * b * t;
        writeln!(stdout(), "val loss {loss:.6} | perplexity {:.2} | {tokens} tokens", loss.exp())?;
    }
    if let Some(set) = hellaswag {
        let score = multiple_choice::score(
            &model,
            &mut *engine,
            &mut Unsharded,
            BatchLayout { b, t },
            &set,
            set.share(0, 1),
            0,
        )?;
        writeln!(stdout(), "HellaSwag: {score}")?;
    }
    Ok(())
}
