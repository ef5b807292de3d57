//! From flags to settings: opens the model's description and the data, and fills in what was not given.

use super::options::{Count, Options};
use crate::corpus;
use anyhow::{Context, Result, ensure};
use checkpoint::config::Config;
use checkpoint::model_file::ModelFile;
use data::tokenizer::{BYTE_VOCAB, Tokenizer};
use data::{Geometry, Loader, MultipleChoice, Tokens};
use engine::open::Opened;
use model::Descriptor;
use model::descriptor::GPT2_VOCAB;
use std::path::Path;

/// A run that is settled; nothing has been computed or written yet.
pub struct Resolved {
    pub config: Config,
    pub descriptor: Descriptor,
    /// Where the weights come from, if not from the seed.
    pub weights: Option<ModelFile>,
    pub train: Loader,
    pub val: Option<Loader>,
    pub hellaswag: Option<MultipleChoice>,
}

/// What flags default to.
struct Defaults {
    b: usize,
    t: usize,
    steps: Count,
    lr: f32,
    warmup: usize,
    final_fraction: f32,
    weight_decay: f32,
    val_every: usize,
    /// `None`: at the end.
    sample_every: Option<usize>,
    sample_length: usize,
}

/// llm.c's.
const FOR_FILES: Defaults = Defaults {
    b: 4,
    t: 1024,
    steps: Count::All,
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
    steps: Count::Some(1500),
    lr: 4e-3,
    warmup: 100,
    final_fraction: 0.1,
    weight_decay: 0.1,
    val_every: 500,
    sample_every: None,
    sample_length: 400,
};

const VAL_BATCHES: usize = 20;

/// (layers, heads, channels), with heads of a size that GPUs take.
const SMALL: (usize, usize, usize) = (2, 2, 128);

impl Resolved {
    /// A run that goes on has the model `resumed`; the file that it began from need not be there any more.
    /// `rank` of `ranks` reads its own part of the data.
    pub fn new(
        options: &Options,
        opened: &Opened,
        resumed: Option<Descriptor>,
        rank: usize,
        ranks: usize,
    ) -> Result<Self> {
        let defaults = if options.train.is_some() { FOR_FILES } else { FOR_CORPUS };
        let (shape, descriptor, weights) = shape(options, &defaults, resumed)?;
        let b = options.batch.unwrap_or(defaults.b);
        let t = options.seq.unwrap_or(defaults.t.min(descriptor.max_seq_len));
        ensure!(
            t <= descriptor.max_seq_len,
            "--seq {t}: expected at most {}, the longest sequence the model has position embeddings for",
            descriptor.max_seq_len
        );
        let at_once = b * t * ranks;
        let total_batch = options.total_batch.unwrap_or(at_once);
        ensure!(
            total_batch.is_multiple_of(at_once),
            "--total-batch {total_batch}: expected a multiple of batch x seq{} = {b} x {t}{} = {at_once}",
            if ranks > 1 { " x ranks" } else { "" },
            if ranks > 1 { format!(" x {ranks}") } else { String::new() }
        );
        let geometry = Geometry { b, t, ranks, rank };
        let (train, val) = tokens(options, descriptor)?;
        let in_order = |shards| Loader::new(shards, geometry, descriptor.vocab, None);
        let train = if options.overfit_one_batch {
            // The same for every micro-batch of a step, too.
            in_order(val.clone().unwrap_or(train))?.rewinding_after(1)
        } else if options.shuffle {
            Loader::new(train, geometry, descriptor.vocab, Some(options.seed))?
        } else {
            in_order(train)?.with_whole_steps(total_batch / at_once)?
        };
        let val = val.map(in_order).transpose()?;
        let hellaswag = options.hellaswag.as_deref();
        let hellaswag =
            hellaswag.map(|path| MultipleChoice::open_first(path, options.hellaswag_examples)).transpose()?;
        if let Some(set) = &hellaswag {
            set.check(descriptor.vocab, t)?;
        }
        let steps = match options.steps.unwrap_or(defaults.steps) {
            Count::Some(steps) => steps,
            // Without a shuffle each shard has a tail that fills no step.
            Count::All if !train.shuffles() => train.batches_per_epoch() * at_once / total_batch,
            Count::All => train.tokens() / total_batch,
        };
        ensure!(
            steps > 0,
            "{} tokens to train on are less than one --total-batch of {total_batch}: use a smaller one, or give --steps",
            train.tokens()
        );
        let config = Config {
            train: options.train.clone(),
            val: options.val.clone(),
            shuffle: options.shuffle,
            overfit_one_batch: options.overfit_one_batch,
            out: options.out.clone(),
            model: shape.model,
            layers: shape.free.map(|(layers, _, _)| layers),
            heads: shape.free.map(|(_, heads, _)| heads),
            channels: shape.free.map(|(_, _, channels)| channels),
            seed: options.seed,
            batch: b,
            seq: t,
            total_batch,
            steps,
            schedule: options.schedule,
            lr: options.lr.unwrap_or(defaults.lr),
            warmup: options.warmup.unwrap_or(defaults.warmup.min(steps / 10)),
            final_fraction: options.final_fraction.unwrap_or(defaults.final_fraction),
            weight_decay: options.weight_decay.unwrap_or(defaults.weight_decay),
            skip_loss_z: options.skip_loss_z,
            skip_norm_z: options.skip_norm_z,
            max_bad_steps: options.max_bad_steps,
            val_every: options.val_every.unwrap_or(defaults.val_every),
            val_batches: match (options.val_batches, &val) {
                (Some(Count::All), Some(val)) => val.batches_per_epoch(),
                (Some(Count::Some(n)), _) => n,
                _ => VAL_BATCHES,
            },
            hellaswag: options.hellaswag.clone(),
            hellaswag_examples: options.hellaswag_examples,
            sample_every: options.sample_every.or(defaults.sample_every).unwrap_or(steps),
            sample_length: options.sample_length.unwrap_or(defaults.sample_length),
            checkpoint_every: options.checkpoint_every.unwrap_or(steps),
            gpu_info_every: options.gpu_info_every,
            check_ranks: options.check_ranks,
            zero_stage: options.zero_stage,
            recompute: options.recompute,
            master_weights: options.master_weights,
            keep: options.keep,
            major_every: options.major_every,
            device: opened.device,
            precision: opened.precision(),
            tf32: opened.tf32,
            gelu_fusion: opened.engine.gelu_fusion(),
            matmul: options.hardware.matmul,
            kernels: options.hardware.kernels.clone(),
        };
        Ok(Self { config, descriptor, weights, train, val, hellaswag })
    }
}

/// How the shape was given: by a name or a file, or as (layers, heads, channels).
struct Shape {
    model: Option<String>,
    free: Option<(usize, usize, usize)>,
}

fn shape(
    options: &Options,
    defaults: &Defaults,
    resumed: Option<Descriptor>,
) -> Result<(Shape, Descriptor, Option<ModelFile>)> {
    let from_files = options.train.is_some();
    let vocab = if from_files { GPT2_VOCAB } else { BYTE_VOCAB };
    let given = options.layers.zip(options.heads).zip(options.channels).map(|((l, h), c)| (l, h, c));
    let model = options.model.clone().or_else(|| (from_files && given.is_none()).then(|| "d12".to_owned()));
    match model {
        Some(name) if Path::new(&name).extension().is_some_and(|e| e == "bin") => {
            if let Some(descriptor) = resumed {
                return Ok((Shape { model: Some(name), free: None }, descriptor, None));
            }
            let file = ModelFile::open(Path::new(&name))?;
            Ok((Shape { model: Some(name), free: None }, file.descriptor(), Some(file)))
        }
        Some(name) => {
            let known: Descriptor = name.parse().context("--model")?;
            Ok((Shape { model: Some(name), free: None }, Descriptor { vocab, ..known }, None))
        }
        None => {
            let free = given.unwrap_or(SMALL);
            let (layers, heads, channels) = free;
            let seq = options.seq.unwrap_or(defaults.t);
            let descriptor =
                Descriptor::new(layers, heads, channels, seq, vocab).context("--layers, --heads, --channels")?;
            Ok((Shape { model: None, free: Some(free) }, descriptor, None))
        }
    }
}

/// Shards to train on and to validate on.
fn tokens(options: &Options, descriptor: Descriptor) -> Result<(Vec<Tokens>, Option<Vec<Tokens>>)> {
    let Some(train) = &options.train else {
        let tokenizer = Tokenizer::of_vocab(descriptor.vocab).context("the built-in corpus")?;
        let (train, val) = corpus::tokens(tokenizer);
        return Ok((vec![train], Some(vec![val])));
    };
    let train = Tokens::open_all(train).context("--train")?;
    let val = options.val.as_deref().map(Tokens::open_all).transpose().context("--val")?;
    Ok((train, val))
}
