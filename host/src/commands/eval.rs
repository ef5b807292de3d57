//! `eval`: the loss of a model on token files, and its HellaSwag accuracy.

use super::resources::{Hardware, load};
use crate::evaluate::{self, multiple_choice};
use crate::values::count;
use anyhow::{Result, ensure};
use checkpoint::model_file::ModelFile;
use data::{Geometry, Loader, MultipleChoice, Prefetch, Tokens};
use engine::BatchLayout;
use model::Unsharded;
use std::io::{Write, stdout};
use std::path::PathBuf;

/// Compute a model's loss on token files, and its HellaSwag accuracy
#[derive(Debug, clap::Args)]
pub struct Eval {
    /// Model file (.bin) of a checkpoint
    #[arg(short = 'e', long, value_name = "FILE")]
    model: PathBuf,

    /// Token files (.bin); quote the pattern
    #[arg(short = 'j', long, value_name = "GLOB", required_unless_present = "hellaswag")]
    val: Option<String>,

    /// Evaluation file (.bin) of `llm-rs data hellaswag`
    #[arg(long, value_name = "FILE")]
    hellaswag: Option<PathBuf>,

    /// Use only the first N examples of --hellaswag [default: all]
    #[arg(long, value_name = "N", value_parser = count, requires = "hellaswag")]
    hellaswag_examples: Option<usize>,

    /// Sequences in a batch
    #[arg(short, long, value_name = "B", default_value = "4", value_parser = count)]
    batch: usize,

    /// Tokens in a sequence [default: 1024, or the model's maximum if that is smaller]
    #[arg(short = 't', long, value_name = "T", value_parser = count)]
    seq: Option<usize>,

    /// Number of batches [default: all]
    #[arg(short = 'm', long, value_name = "N", value_parser = count)]
    val_batches: Option<usize>,

    #[command(flatten)]
    hardware: Hardware,
}

/// Prints the loss and the accuracy.
pub fn run(args: &Eval) -> Result<()> {
    let file = ModelFile::open(&args.model)?;
    let descriptor = file.descriptor();
    let (b, t) = (args.batch, args.seq.unwrap_or(descriptor.max_seq_len.min(1024)));
    ensure!(
        t <= descriptor.max_seq_len,
        "--seq {t}: expected at most {}, the longest sequence that {} supports",
        descriptor.max_seq_len,
        args.model.display()
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
