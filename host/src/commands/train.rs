//! `train`: from flags to a run.

use super::PROGRAM;
use super::report::{Setup, summary};
use super::resources::Hardware;
use crate::atomic;
use crate::checkpoint::model::ModelFile;
use crate::cli::{count, non_negative};
use crate::console::Console;
use crate::data::{Geometry, Loader, Prefetch, Tokens, corpus};
use crate::engine::open::Opened;
use crate::fit;
use crate::log::Log;
use crate::model::descriptor::GPT2_VOCAB;
use crate::model::{Capacity, Descriptor};
use crate::schedule::{Kind, Schedule};
use crate::tokenizer::{BYTE_VOCAB, Tokenizer};
use crate::train::{Outcome, Run, Settings, initialise};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Trains a model
///
/// With no argument: a small model on a text that comes with the program, in less than a minute.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Token files (.bin) to train on; quote the pattern [default: a text that comes with the program, as bytes]
    #[arg(short = 'i', long, value_name = "GLOB", help_heading = "Data")]
    train: Option<String>,

    /// Token files (.bin) to measure progress on
    #[arg(short = 'j', long, value_name = "GLOB", requires = "train", help_heading = "Data")]
    val: Option<String>,

    /// Directory for main.log, main.jsonl and model files [default: nothing is kept]
    #[arg(short, long, value_name = "DIR", help_heading = "Data")]
    out: Option<PathBuf>,

    /// d6, d12 (GPT-2 124M), d24, d36, d48, gpt3:c768 …, or a model file (.bin) to begin from [default: d12; a small model
    /// for the text that comes with the program]
    #[arg(short = 'e', long, value_name = "NAME|FILE", help_heading = "Model")]
    model: Option<String>,

    /// In place of --model, with --heads and --channels: a free shape
    #[arg(long, value_name = "N", value_parser = count, requires = "heads", requires = "channels", conflicts_with = "model", help_heading = "Model")]
    layers: Option<usize>,

    /// Attention heads
    #[arg(long, value_name = "N", value_parser = count, requires = "layers", help_heading = "Model")]
    heads: Option<usize>,

    /// Width; a multiple of --heads (GPUs take heads of 64, 80, 96 or 128 channels)
    #[arg(long, value_name = "N", value_parser = count, requires = "layers", help_heading = "Model")]
    channels: Option<usize>,

    /// Seed of the initial weights and of the order of the data
    #[arg(long, default_value = "42", help_heading = "Model")]
    seed: u32,

    /// Sequences that are computed at once [default: 4]
    #[arg(short, long, value_name = "B", value_parser = count, help_heading = "Batch")]
    batch: Option<usize>,

    /// Tokens in a sequence [default: 1024, or fewer if the model takes fewer]
    #[arg(short = 't', long, value_name = "T", value_parser = count, help_heading = "Batch")]
    seq: Option<usize>,

    /// Tokens of an optimizer step, a multiple of batch x seq: gradients are accumulated [default: batch x seq]
    #[arg(short = 'd', long, value_name = "N", value_parser = count, help_heading = "Batch")]
    total_batch: Option<usize>,

    /// Optimizer steps [default: as many as go once through the data]
    #[arg(short = 'x', long, value_name = "N", value_parser = count, help_heading = "Optimizer")]
    steps: Option<usize>,

    /// How the learning rate changes
    #[arg(short = 'k', long, value_enum, default_value = "cosine", help_heading = "Optimizer")]
    schedule: Kind,

    /// Highest learning rate [default: 3e-4]
    #[arg(short, long, value_parser = non_negative, help_heading = "Optimizer")]
    lr: Option<f32>,

    /// Steps over which the learning rate rises [default: 0]
    #[arg(short = 'u', long, value_name = "N", help_heading = "Optimizer")]
    warmup: Option<usize>,

    /// Last learning rate, as a fraction of the highest [default: 1]
    #[arg(short = 'q', long, value_parser = non_negative, help_heading = "Optimizer")]
    final_fraction: Option<f32>,

    /// Weight decay of matrices and embeddings [default: 0]
    #[arg(short = 'c', long, value_parser = non_negative, help_heading = "Optimizer")]
    weight_decay: Option<f32>,

    /// Measure the validation loss every N steps [default: 20]
    #[arg(short, long, value_name = "N", value_parser = count, help_heading = "While it runs")]
    val_every: Option<usize>,

    /// Batches of a validation; -1: all there are [default: 20]
    #[arg(short = 'm', long, value_name = "N", value_parser = val_batches, allow_hyphen_values = true, help_heading = "While it runs")]
    val_batches: Option<ValBatches>,

    /// Write some text every N steps and at the end; 0: never [default: 20]
    #[arg(short, long, value_name = "N", help_heading = "While it runs")]
    sample_every: Option<usize>,

    /// Tokens of such a text [default: 64]
    #[arg(short = 'g', long, value_name = "N", value_parser = count, help_heading = "While it runs")]
    sample_length: Option<usize>,

    /// With --out: write a model file every N steps and at the end; 0: never [default: at the end]
    #[arg(short = 'n', long, value_name = "N", requires = "out", help_heading = "While it runs")]
    checkpoint_every: Option<usize>,

    #[command(flatten)]
    hardware: Hardware,
}

#[derive(Clone, Copy, Debug)]
enum ValBatches {
    All,
    Some(usize),
}

fn val_batches(text: &str) -> Result<ValBatches, String> {
    if text == "-1" {
        return Ok(ValBatches::All);
    }
    count(text).map(ValBatches::Some).map_err(|e| e + ", or -1 for all")
}

/// What flags default to.
struct Defaults {
    b: usize,
    t: usize,
    steps: Option<usize>,
    lr: f32,
    warmup: usize,
    final_fraction: f32,
    weight_decay: f32,
    val_every: usize,
    sample_every: Option<usize>,
    sample_length: usize,
}

/// llm.c's.
const FOR_FILES: Defaults = Defaults {
    b: 4,
    t: 1024,
    steps: None,
    lr: 3e-4,
    warmup: 0,
    final_fraction: 1.0,
    weight_decay: 0.0,
    val_every: 20,
    sample_every: Some(20),
    sample_length: 64,
};

/// For the small model on the text that comes with the program: under a minute on two CPU cores.
const FOR_CORPUS: Defaults = Defaults {
    b: 8,
    t: 64,
    steps: Some(1500),
    lr: 4e-3,
    warmup: 100,
    final_fraction: 0.1,
    weight_decay: 0.1,
    val_every: 500,
    sample_every: None,
    sample_length: 400,
};

/// (layers, heads, channels), with heads of a size that GPUs take.
const SMALL: (usize, usize, usize) = (2, 2, 128);

pub fn run(args: &Options) -> Result<()> {
    let started = Instant::now();
    let defaults = if args.train.is_some() { FOR_FILES } else { FOR_CORPUS };
    let b = args.batch.unwrap_or(defaults.b);
    let (descriptor, file) = args.model(&defaults)?;
    let t = args.seq.unwrap_or(defaults.t.min(descriptor.max_seq_len));
    ensure!(
        t <= descriptor.max_seq_len,
        "--seq {t}: expected at most {}, the longest sequence the model has position embeddings for",
        descriptor.max_seq_len
    );
    let total_batch = args.total_batch.unwrap_or(b * t);
    ensure!(
        total_batch.is_multiple_of(b * t),
        "--total-batch {total_batch}: expected a multiple of batch x seq = {b} x {t} = {}",
        b * t
    );
    let (train, val) = args.data(descriptor)?;
    let geometry = Geometry::single(b, t);
    let train = Loader::new(train, geometry, descriptor.vocab, Some(args.seed))?;
    let val = val.map(|shards| Loader::new(shards, geometry, descriptor.vocab, None)).transpose()?;
    let val_batches = match (args.val_batches, &val) {
        (Some(ValBatches::All), Some(val)) => val.batches_per_epoch(),
        (Some(ValBatches::Some(n)), _) => n,
        _ => 20,
    };
    let steps = args.steps.or(defaults.steps).unwrap_or(train.tokens() / total_batch);
    ensure!(
        steps > 0,
        "{} tokens to train on are less than one --total-batch of {total_batch}: use a smaller one, or give --steps",
        train.tokens()
    );
    let settings = Settings {
        steps,
        grad_accum: total_batch / (b * t),
        schedule: Schedule {
            kind: args.schedule,
            peak: args.lr.unwrap_or(defaults.lr),
            warmup: args.warmup.unwrap_or(defaults.warmup),
            steps,
            final_fraction: args.final_fraction.unwrap_or(defaults.final_fraction),
        },
        weight_decay: args.weight_decay.unwrap_or(defaults.weight_decay),
        clip: 1.0,
        val_every: args.val_every.unwrap_or(defaults.val_every),
        val_batches,
        sample_every: args.sample_every.or(defaults.sample_every).filter(|&n| n > 0),
        sample_tokens: match args.sample_every {
            Some(0) => 0,
            _ => args.sample_length.unwrap_or(defaults.sample_length),
        },
        checkpoint_every: args.out.as_ref().and(Some(args.checkpoint_every.unwrap_or(steps))).filter(|&n| n > 0),
        out: args.out.clone(),
    };

    let console = Console::new(steps);
    let Opened { mut engine, note } = args.hardware.open()?;
    let setup = Setup {
        settings: &settings,
        descriptor,
        geometry,
        train: &train,
        val: val.as_ref(),
        engine: &*engine,
        note: note.as_deref(),
        seed: args.seed,
        model: args.model_name(),
    };
    console.line(&setup.table())?;
    let capacity = Capacity { b, t, training: true, master_weights: true };
    let (model, plan) = fit::plan(descriptor, capacity, &mut *engine)?;
    console.line(&format!("\n{plan}\n"))?;
    engine.allocate(&plan)?;
    match file {
        Some(file) => file.load(&model, &mut *engine)?,
        None => initialise(&model, &mut *engine, args.seed)?,
    }
    if let Some(out) = &args.out {
        atomic::create_directory(out)?;
    }
    let mut run = Run {
        settings: &settings,
        model: &model,
        tokenizer: Tokenizer::of_vocab(descriptor.vocab).ok(),
        train: Prefetch::start(train, &*engine)?,
        val: val.map(|val| Prefetch::start(val.rewinding_after(val_batches), &*engine)).transpose()?,
        engine: &mut *engine,
        console,
        log: Log::create(args.out.as_deref())?,
    };
    let outcome = run.train()?;
    run.console.line(&summary(&outcome, total_batch, started.elapsed(), args.out.as_deref()))?;
    run.console.line(&format!("\nnext: {}", args.next_command(&outcome)))
}

impl Options {
    /// The model's shape, and the file its weights come from.
    fn model(&self, defaults: &Defaults) -> Result<(Descriptor, Option<ModelFile>)> {
        let seq = self.seq.unwrap_or(defaults.t);
        let vocab = if self.train.is_some() { GPT2_VOCAB } else { BYTE_VOCAB };
        let free = |(layers, heads, channels)| {
            Descriptor::new(layers, heads, channels, seq, vocab).context("--layers, --heads, --channels")
        };
        match (&self.model, self.layers.zip(self.heads).zip(self.channels)) {
            (Some(name), _) if Path::new(name).extension().is_some_and(|e| e == "bin") => {
                let file = ModelFile::open(Path::new(name))?;
                Ok((file.descriptor(), Some(file)))
            }
            (Some(name), _) => {
                let known: Descriptor = name.parse().context("--model")?;
                Ok((Descriptor { vocab, ..known }, None))
            }
            (None, Some(((layers, heads), channels))) => Ok((free((layers, heads, channels))?, None)),
            (None, None) if self.train.is_some() => Ok(("d12".parse()?, None)),
            (None, None) => Ok((free(SMALL)?, None)),
        }
    }

    fn model_name(&self) -> String {
        match (&self.model, self.layers.is_some() || self.train.is_none()) {
            (Some(name), _) => name.clone(),
            (None, true) => "a free shape".to_owned(),
            (None, false) => "d12".to_owned(),
        }
    }

    /// Shards to train on and to validate on.
    fn data(&self, descriptor: Descriptor) -> Result<(Vec<Tokens>, Option<Vec<Tokens>>)> {
        let Some(train) = &self.train else {
            let tokenizer = Tokenizer::of_vocab(descriptor.vocab).context("the built-in corpus")?;
            let (train, val) = corpus::tokens(tokenizer);
            return Ok((vec![train], Some(vec![val])));
        };
        let train = Tokens::open_all(train).context("--train")?;
        let val = self.val.as_deref().map(Tokens::open_all).transpose().context("--val")?;
        Ok((train, val))
    }

    fn next_command(&self, outcome: &Outcome) -> String {
        match &outcome.model_file {
            Some(file) => format!("{PROGRAM} sample --model {} --prompt 'Once upon a time'", file.display()),
            None if self.train.is_some() => "the same with --out DIR, to keep the log and the model".to_owned(),
            None => format!("{PROGRAM} data tinyshakespeare"),
        }
    }
}
