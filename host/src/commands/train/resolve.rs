//! Resolves flags to settings: opens the model and the data, and fills in defaults.

use super::dial;
use super::shape::{self, Frozen};
use super::sources::{self, SourceTable};
use super::{Config, TrainOptions};
use crate::commands::resources::Fp8Flags;
use crate::corpus;
use crate::datasets::{Datasets, has_masks};
use crate::evaluate::core::{CoreSet, Limits};
use crate::train::MuonSettings;
use crate::values::Count;
use anyhow::{Context, Result, ensure};
use data::core_tasks::Bundle;
use data::mixture::{self, Estimate, Packing, Source};
use data::{Batches, Geometry, Loader, Mixture, MultipleChoice, Tokens, check, mask, tokens};
use engine::open::Opened;
use engine::tensor::DType;
use interchange::ModelSource;
use model::schedule::ScheduleKind;
use model::{Descriptor, Fp8Settings, MasterWeights, Moments, Optimizer, fit};
use std::path::{Path, PathBuf};
use tokenizer::Tokenizer;
use tokenizer::stored::{self, Found, Search};

/// The complete settings of a run. Nothing has been computed or written yet.
pub struct Resolved {
    pub config: Config,
    pub descriptor: Descriptor,
    /// The model with the initial weights; `None` initializes them from the seed.
    pub weights: Option<ModelSource>,
    /// The model whose weights do not change, if the run trains adapters.
    pub frozen: Option<Frozen>,
    /// The data, or `None` for a plan [without data](without_data).
    pub data: Option<TrainingData>,
    pub hellaswag: Option<MultipleChoice>,
    /// The rank's share of the questions.
    pub core: Option<CoreSet>,
    pub tokenizer: Found,
    /// The directory of a data set of conversations, with the chat template that the run keeps.
    pub conversations: Option<PathBuf>,
    /// How the vocabulary of the model grows.
    pub growth: Option<String>,
    /// A description of the depth dial, if the run has one.
    pub dial: Option<String>,
    /// Why there are no data.
    pub note: Option<String>,
}

/// The data of a run.
pub struct TrainingData {
    pub train: Batches,
    /// What the sources of a mixture provide in an epoch.
    pub estimates: Vec<Estimate>,
    pub val: Vec<ValidationData>,
}

/// A source of validation data.
pub struct ValidationData {
    pub name: String,
    pub loader: Batches,
    /// Number of batches in an epoch.
    pub batches: usize,
}

/// Number of steps of a plan without data, if it is one epoch.
pub const UNKNOWN_STEPS: usize = u32::MAX as usize;

/// Returns why a dry run plans a named model without data: there is no `--train`, or its files do not exist yet.
fn without_data(options: &TrainOptions, tables: &[SourceTable]) -> Option<String> {
    options.model.as_ref().filter(|_| options.dry_run)?;
    if tables.is_empty() {
        let reason = "planned without data, for the vocabulary of the model; add --train to use that of the data";
        return Some(reason.to_owned());
    }
    let missing = tables.iter().find_map(|table| tokens::find(table.train.as_deref()?).err())?;
    Some(format!("planned without data, for the vocabulary of the model: --train: {missing}"))
}

/// Defaults of flags.
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

/// Tokens in a sequence, if the model accepts that many.
pub const DEFAULT_SEQ: usize = 1024;

/// The defaults for token files, which are llm.c's, except that the learning rate decays.
const FOR_FILES: Defaults = Defaults {
    b: 4,
    t: DEFAULT_SEQ,
    steps: Count::All,
    lr: 3e-4,
    warmup: 0,
    final_fraction: 0.1,
    weight_decay: 0.0,
    val_every: 20,
    sample_every: Some(20),
    sample_length: 64,
};

/// The defaults for the built-in corpus: a small model that trains in less than a minute on two CPU cores.
const FOR_CORPUS: Defaults = Defaults {
    b: 8,
    t: 64,
    steps: Count::Some(1100),
    lr: 4e-3,
    warmup: 100,
    final_fraction: 0.1,
    weight_decay: 0.1,
    val_every: 500,
    sample_every: None,
    sample_length: 400,
};

/// The final learning rate as a fraction of the peak, for commands with llm.c's flags.
const FINAL_FRACTION_OF_LLM_C: f32 = 1.0;

const VAL_BATCHES: usize = 20;

/// Questions of each task of CORE, as in nanochat.
const CORE_MAX_PER_TASK: usize = 500;

/// A failure of the machine costs at most this many minutes and one step.
const CHECKPOINT_MINUTES: f32 = 15.0;

/// Change of the biases of routers in each step, as in DeepSeek-V3.
const ROUTER_BIAS_RATE: f32 = 0.001;

/// Fraction of the steps in which a trapezoidal schedule decays.
const WARMDOWN: f64 = 0.4;

impl Resolved {
    /// Resolves the flags for rank `rank` of `ranks`.
    ///
    /// A run that is `resumed` has the model of its checkpoint, since the files of its initial weights may have been deleted, and its final
    /// learning rate, since the default was another one in earlier versions.
    pub fn new(
        options: &TrainOptions,
        opened: &Opened,
        resumed: Option<&(Descriptor, Option<f32>)>,
        rank: usize,
        ranks: usize,
    ) -> Result<Self> {
        let (resumed, final_fraction) =
            resumed.map_or((None, None), |&(descriptor, fraction)| (Some(descriptor), fraction));
        let mut tables = sources::tables(options)?;
        let note = without_data(options, &tables);
        let from_files = !tables.is_empty() || note.is_some();
        let defaults = if from_files { FOR_FILES } else { FOR_CORPUS };
        let named = options.tokenizer.as_deref().map(Tokenizer::named).transpose().context("--tokenizer")?;
        let datasets = Datasets::open(&sources::patterns(&tables))?;
        let of_data = datasets.tokenizer().map(|(_, identity)| identity.vocab);
        let vocab = of_data.or_else(|| named.as_ref().map(Tokenizer::vocab));
        let seq = options.seq.unwrap_or(defaults.t);
        let (shape, descriptor, weights) = shape::resolve(options, vocab, seq, from_files, resumed)?;
        let Grown { weights, tokenizer: extended, note: growth } =
            grow(weights, &datasets, options.tokenizer.as_deref())?;
        let mut weights = weights;
        let descriptor = weights.as_ref().map_or(descriptor, ModelSource::descriptor);
        let (descriptor, frozen) = shape::with_adapters(options, descriptor, &mut weights, resumed)?;
        ensure!(
            frozen.is_none() || growth.is_none(),
            "--lora-rank: expected data without new special tokens, whose embeddings would be frozen, found {}; tune the whole model, or \
             use the chat template of the model",
            growth.unwrap_or_default()
        );
        let named = extended.or(named);
        let (options, dial) = &dial::complete(options, descriptor)?;
        check_optimizer(options, descriptor, opened)?;
        let batch = BatchSize::new(options, &defaults, descriptor, ranks)?;
        let model = options.model.as_ref().map_or_else(|| "the model".to_owned(), |name| format!("--model {name}"));
        datasets.check_vocab(&model, descriptor.vocab)?;
        let resumed_from = options.out().filter(|_| resumed.is_some());
        let search = Search {
            named: named.as_ref(),
            model: resumed_from.or(frozen
                .as_ref()
                .map(|frozen| &frozen.source)
                .or(weights.as_ref())
                .map(ModelSource::directory)),
            data: datasets.tokenizer(),
            vocab: descriptor.vocab,
        };
        let tokenizer = search.find()?;
        let data = match &note {
            Some(_) => None,
            None => Some(training_data(options, descriptor, (&datasets, &tokenizer), &mut tables, &batch, rank)?),
        };
        let hellaswag = options.hellaswag.as_deref().filter(|path| note.is_none() || path.exists());
        let hellaswag =
            hellaswag.map(|path| MultipleChoice::open_first(path, options.hellaswag_examples)).transpose()?;
        let hellaswag = hellaswag.map(|set| set.with_tokenizer(tokenizer.tokenizer.as_ref())).transpose()?;
        if let Some(set) = &hellaswag {
            set.check(descriptor.vocab, batch.t)?;
        }
        let core = options.core.as_deref().filter(|path| note.is_none() || path.exists());
        let core = core.map(|path| core_set(path, options, &tokenizer, batch.t, [rank, ranks]));
        let core = core.transpose()?;
        let steps = steps(options.steps.unwrap_or(defaults.steps), data.as_ref(), &batch)?;
        if let Some(data) = &data {
            check_epochs(data, steps, &batch)?;
        }
        let mut config = config(options, &defaults, &batch, steps, opened)?;
        if tables.len() > 1 || !options.data.is_empty() {
            (config.flags.train, config.flags.val, config.flags.data) = (Vec::new(), Vec::new(), tables);
        }
        config.final_fraction = options.final_fraction.or(final_fraction).unwrap_or(config.final_fraction);
        let all = data.iter().flat_map(|data| &data.val).map(|val| val.batches).max();
        if let (Some(Count::All), Some(all)) = (options.val_batches, all) {
            config.val_batches = all;
        }
        if let Some(data) = &data {
            save_packing(&mut config, data);
        }
        let biased = frozen.is_none() && descriptor.experts.is_some_and(|experts| experts.bias);
        config.router_bias_rate = biased.then(|| options.router_bias_rate.unwrap_or(ROUTER_BIAS_RATE));
        shape.save(&mut config.flags);
        let conversations = datasets.conversations()?;
        Ok(Self {
            config,
            descriptor,
            weights,
            frozen,
            data,
            hellaswag,
            core,
            tokenizer,
            conversations,
            growth,
            dial: dial.clone(),
            note,
        })
    }
}

/// Encodes the questions of `--core` that `rank` of `ranks` answers, for sequences of `longest` tokens.
fn core_set(
    path: &Path,
    options: &TrainOptions,
    tokenizer: &Found,
    longest: usize,
    rank_of_ranks: [usize; 2],
) -> Result<CoreSet> {
    let tokenizer = tokenizer.tokenizer.as_ref();
    let tokenizer =
        tokenizer.context("--core: expected the tokenizer of the token files, found none; name it with --tokenizer")?;
    let bundle = Bundle::open(path, None).context("--core")?;
    let per_task = Some(options.core_max_per_task.unwrap_or(CORE_MAX_PER_TASK));
    CoreSet::encode(&bundle, tokenizer, Limits { longest, per_task }, rank_of_ranks).context("--core")
}

/// A model whose vocabulary has grown for its data.
struct Grown {
    weights: Option<ModelSource>,
    /// The tokenizer of the data, if it has more special tokens than that of the model.
    tokenizer: Option<Tokenizer>,
    note: Option<String>,
}

/// Adds ids to the vocabulary of a model if the tokenizer of the data is its own with more special tokens.
fn grow(weights: Option<ModelSource>, datasets: &Datasets, named: Option<&str>) -> Result<Grown> {
    let same = |weights| Ok(Grown { weights, tokenizer: None, note: None });
    let (Some(source), Some((directory, identity))) = (&weights, datasets.tokenizer()) else { return same(weights) };
    // Other differences are reported where the tokenizers are compared.
    let Ok(Some(own)) = source.tokenizer(named) else { return same(weights) };
    if own.identity().has_vocabulary_of(identity) || identity.vocab <= own.vocab() {
        return same(weights);
    }
    let Ok(extended) = stored::with_identity(identity, directory) else { return same(weights) };
    if !extended.extends(&own) {
        return same(weights);
    }
    let (old, added) =
        (source.descriptor().vocab, extended.special().iter().filter(|token| token.id as usize >= own.vocab()));
    let added: Vec<&str> = added.map(|token| token.text.as_str()).collect();
    let weights = weights.map(|source| source.with_vocab(extended.vocab()));
    let vocab = weights.as_ref().map_or(old, |source| source.descriptor().vocab);
    let how = if vocab > old {
        format!(
            "the vocabulary of the model grows from {old} to {vocab} ids; the new rows of the embeddings are the mean of the others"
        )
    } else {
        "the vocabulary of the model has unused ids for them".to_owned()
    };
    let note = Some(format!("new special tokens: {}: {how}", added.join(", ")));
    Ok(Grown { weights, tokenizer: Some(extended), note })
}

/// Writes the packing and the document mask of a run into its settings. Their defaults depend on the data.
fn save_packing(config: &mut Config, data: &TrainingData) {
    let is_masked = data.train.shards().iter().any(|shard| shard.mask().is_some());
    config.flags.document_mask.get_or_insert(is_masked);
    // The settings of earlier versions do not name the default.
    config.flags.packing = match &data.train {
        Batches::Mixture(mixture) => Some(mixture.packing()).filter(|&packing| packing != Packing::Stream || is_masked),
        Batches::Shards(_) => None,
    };
}

/// Checks that the flags of the optimizer and of the schedule apply.
fn check_optimizer(options: &TrainOptions, descriptor: Descriptor, opened: &Opened) -> Result<()> {
    let TrainOptions { muon_lr, muon_momentum, muon_momentum_warmup, muon_coefficients, .. } = options;
    let TrainOptions { muon_momentum_final, weight_decay_schedule, .. } = options;
    let muon = options.optimizer() == Optimizer::Muon;
    for (flag, given) in [
        ("--muon-lr", muon_lr.is_some()),
        ("--muon-momentum", muon_momentum.is_some()),
        ("--muon-momentum-warmup", muon_momentum_warmup.is_some()),
        ("--muon-momentum-final", muon_momentum_final.is_some()),
        ("--weight-decay-schedule", weight_decay_schedule.is_some()),
        ("--muon-coefficients", muon_coefficients.is_some()),
    ]
    .into_iter()
    .chain(options.muon_additions.given())
    {
        ensure!(muon || !given, "{flag}: expected --optimizer muon, found adamw; add it or omit this flag");
    }
    for (flag, given) in [
        (format!("--moments {}", options.moments.name()), options.moments != Moments::F32),
        ("--master-weights 2".to_owned(), options.master_weights == MasterWeights::Remainder),
    ] {
        let bf16 = opened.engine.dtype() == DType::Bf16;
        ensure!(bf16 || !given, "{flag}: expected bf16 parameters, found f32; omit this flag");
    }
    for (flag, given) in
        [("--warmdown", options.warmdown.is_some()), ("--muon-momentum-final", muon_momentum_final.is_some())]
    {
        ensure!(
            options.schedule() == ScheduleKind::Trapezoidal || !given,
            "{flag}: expected --schedule trapezoidal, found another schedule; add it or omit this flag"
        );
    }
    ensure!(
        options.head_lr.is_none() || !descriptor.tied,
        "--head-lr: expected a model with an untied head, found one whose head is the token embedding; use --embedding-lr"
    );
    Ok(())
}

/// The batch of a step.
struct BatchSize {
    b: usize,
    t: usize,
    ranks: usize,
    /// Tokens in one micro-batch of all ranks.
    tokens: usize,
    /// Tokens in an optimizer step.
    total: usize,
}

impl BatchSize {
    fn new(options: &TrainOptions, defaults: &Defaults, descriptor: Descriptor, ranks: usize) -> Result<Self> {
        let b = options.batch.unwrap_or(defaults.b);
        let t = options.seq.unwrap_or(defaults.t.min(descriptor.max_seq_len));
        fit::check_batch(&descriptor, b, t)?;
        let tokens = b * t * ranks;
        let total = options.total_batch.unwrap_or(tokens);
        ensure!(
            total.is_multiple_of(tokens),
            "--total-batch {total}: expected a multiple of batch x seq{} = {b} x {t}{} = {tokens}",
            if ranks > 1 { " x ranks" } else { "" },
            if ranks > 1 { format!(" x {ranks}") } else { String::new() }
        );
        Ok(Self { b, t, ranks, tokens, total })
    }
}

/// Opens the training data and the validation data. Writes the weights of the sources into their tables.
fn training_data(
    options: &TrainOptions,
    descriptor: Descriptor,
    (datasets, tokenizer): (&Datasets, &Found),
    tables: &mut [SourceTable],
    batch: &BatchSize,
    rank: usize,
) -> Result<TrainingData> {
    let geometry = Geometry { b: batch.b, t: batch.t, ranks: batch.ranks, rank };
    let (sources, val) = open_sources(options, descriptor, (datasets, tokenizer), tables)?;
    check_vocabulary(&sources, &val, descriptor, geometry)?;
    // Conversations are not cut into windows, unless a flag says so.
    let is_masked = sources.iter().any(|source| has_masks(&source.shards));
    let packing = options.packing.unwrap_or(if is_masked { Packing::Pad } else { Packing::Stream });
    let is_single = sources::is_single(tables, packing) && !is_masked;
    let settings = mixture::Settings {
        geometry,
        vocab: descriptor.vocab,
        shuffle: options.shuffle.then_some(options.seed),
        packing,
        separator: tokenizer.tokenizer.as_ref().map(Tokenizer::document),
    };
    // Text is read in windows, and conversations as in training.
    let in_order = |name: &str, shards: Vec<Tokens>| -> Result<Batches> {
        if !has_masks(&shards) {
            return Ok(Loader::new(shards, geometry, descriptor.vocab, None)?.into());
        }
        let source = Source { name: name.to_owned(), shards, weight: 1.0, max_epochs: Some(1) };
        let packing = options.packing.unwrap_or(Packing::Pad);
        Ok(Mixture::new(vec![source], mixture::Settings { shuffle: None, packing, ..settings })?.into())
    };
    let mut shards = || sources[0].shards.clone();
    let train = if options.overfit_one_batch {
        // All micro-batches of a step are the same batch, too.
        let first = val.first().map_or_else(&mut shards, |(_, val)| val.clone());
        in_order("train", first)?.rewinding_after(1)
    } else if !is_single {
        Mixture::new(sources, settings)?.into()
    } else if options.shuffle {
        Loader::new(shards(), geometry, descriptor.vocab, Some(options.seed))?.into()
    } else {
        let loader = Loader::new(shards(), geometry, descriptor.vocab, None)?;
        loader.with_whole_steps(batch.total / batch.tokens)?.into()
    };
    let estimates = match &train {
        Batches::Mixture(mixture) => mixture.estimates()?,
        Batches::Shards(_) => Vec::new(),
    };
    let validation = |(name, shards): (String, Vec<Tokens>)| {
        let loader = in_order(&name, shards)?;
        Ok(ValidationData { batches: loader.batches_per_epoch()?, name, loader })
    };
    Ok(TrainingData { train, estimates, val: val.into_iter().map(validation).collect::<Result<_>>()? })
}

/// Checks that the ids of the data are below the vocabulary size. Each rank checks its share of the shards.
fn check_vocabulary(
    train: &[Source],
    val: &[(String, Vec<Tokens>)],
    descriptor: Descriptor,
    geometry: Geometry,
) -> Result<()> {
    let share = |shards: &mut dyn Iterator<Item = &Tokens>| -> Vec<Tokens> {
        shards.skip(geometry.rank).step_by(geometry.ranks).cloned().collect()
    };
    let train = share(&mut train.iter().flat_map(|source| &source.shards));
    let val = share(&mut val.iter().flat_map(|(_, shards)| shards));
    for (flag, shards) in [("--train", train), ("--val", val)] {
        check::vocabulary(&shards, descriptor.vocab).context(flag)?;
        mask::check(&shards).context(flag)?;
    }
    Ok(())
}

/// Returns the number of steps of the run.
fn steps(wanted: Count, data: Option<&TrainingData>, batch: &BatchSize) -> Result<usize> {
    let (steps, tokens) = match (wanted, data.map(|data| &data.train)) {
        (Count::Some(steps), _) => return Ok(steps),
        (Count::All, None) => return Ok(UNKNOWN_STEPS),
        // Without shuffling, the tokens at the end of a shard that do not fill a step are skipped.
        (Count::All, Some(Batches::Shards(train))) if !train.shuffles() => {
            (train.batches_per_epoch() * batch.tokens / batch.total, train.tokens())
        }
        (Count::All, Some(Batches::Shards(train))) => (train.tokens() / batch.total, train.tokens()),
        // As many sequences as an epoch of all sources has.
        (Count::All, Some(Batches::Mixture(_))) => {
            let rows: f64 = data.iter().flat_map(|data| &data.estimates).map(|estimate| estimate.rows).sum();
            let tokens = rows as usize * batch.t;
            (tokens / batch.total, tokens)
        }
    };
    ensure!(
        steps > 0,
        "--total-batch {}: expected at most the {tokens} tokens of the training data; use a smaller one, or set --steps",
        batch.total
    );
    Ok(steps)
}

/// Checks that the sources of a mixture have enough sequences for the steps of the run.
fn check_epochs(data: &TrainingData, steps: usize, batch: &BatchSize) -> Result<()> {
    let Batches::Mixture(mixture) = &data.train else { return Ok(()) };
    let rows = (steps * (batch.total / batch.t)) as u64;
    let (_, missing) = mixture.rows_of_run(&data.estimates, rows);
    let found = (rows as f64 - missing) as usize * batch.t;
    ensure!(
        missing < 1.0,
        "--steps {steps}: expected at most {}, since all sources reach their max_epochs after {found} tokens; use fewer steps, or raise \
         max_epochs",
        found / batch.total
    );
    Ok(())
}

/// Returns the settings, except those that depend on the shape of the model and on the size of the validation data.
fn config(
    options: &TrainOptions,
    defaults: &Defaults,
    batch: &BatchSize,
    steps: usize,
    opened: &Opened,
) -> Result<Config> {
    let final_fraction = match options.schedule() {
        ScheduleKind::Trapezoidal => 0.0,
        _ if options.spelled_for_llm_c && options.reads_files() => FINAL_FRACTION_OF_LLM_C,
        _ => defaults.final_fraction,
    };
    let fp8 = options.fp8.resolve(opened.precision)?;
    ensure!(
        fp8.is_some() || options.fp8_stats == 0,
        "--fp8-stats: expected --precision fp8, found another precision; add it or omit this flag"
    );
    Ok(Config {
        batch: batch.b,
        seq: batch.t,
        total_batch: batch.total,
        steps,
        lr: options.lr.unwrap_or(defaults.lr),
        warmup: options.warmup.unwrap_or(defaults.warmup.min(steps / 10)),
        final_fraction,
        weight_decay: options.weight_decay.unwrap_or(defaults.weight_decay),
        router_bias_rate: None,
        val_every: options.val_every.unwrap_or(defaults.val_every),
        val_batches: if let Some(Count::Some(n)) = options.val_batches { n } else { VAL_BATCHES },
        sample_length: options.sample_length.unwrap_or(defaults.sample_length),
        checkpoint_minutes: checkpoint_minutes(options),
        fp8_stats: fp8.map(|_| options.fp8_stats),
        precision: opened.precision,
        gelu_fusion: opened.engine.gelu_fusion(),
        flags: flags(options, defaults, fp8, opened),
    })
}

/// Returns the flags with the final values of those that [`Config`] does not replace.
fn flags(options: &TrainOptions, defaults: &Defaults, fp8: Option<Fp8Settings>, opened: &Opened) -> TrainOptions {
    let mut flags = options.clone();
    flags.out = options.out().map(Path::to_owned);
    flags.sample_every = options.sample_every.or(defaults.sample_every);
    if options.schedule() == ScheduleKind::Trapezoidal {
        flags.warmdown.get_or_insert(WARMDOWN);
    }
    if options.optimizer() == Optimizer::Muon {
        flags.muon_lr.get_or_insert(MuonSettings::DEFAULT.lr);
        flags.muon_momentum.get_or_insert(MuonSettings::DEFAULT.momentum);
        flags.muon_momentum_warmup.get_or_insert(MuonSettings::DEFAULT.warmup);
        flags.muon_coefficients.get_or_insert_default();
    }
    (flags.optimizer, flags.schedule) = (Some(options.optimizer()), Some(options.schedule()));
    flags.hardware.device = opened.device;
    flags.hardware.tf32 = opened.tf32;
    flags.fp8 = Fp8Flags {
        fp8_recipe: fp8.map(|fp8| fp8.recipe),
        fp8_gradients: flags.fp8.fp8_gradients,
        fp8_accumulation: fp8.map(|fp8| fp8.accumulation),
        fp8_head: fp8.map(|fp8| fp8.head),
    };
    flags
}

/// Returns the minutes between checkpoints that no number of steps requests.
fn checkpoint_minutes(options: &TrainOptions) -> f32 {
    let default =
        if !options.saves_nothing() && options.checkpoint_every != Some(0) { CHECKPOINT_MINUTES } else { 0.0 };
    options.checkpoint_minutes.unwrap_or(default)
}

/// The shards of the training data, and the names and shards of the validation data.
type Shards = (Vec<Source>, Vec<(String, Vec<Tokens>)>);

/// Opens the shards of the training data and of the validation data.
fn open_sources(
    options: &TrainOptions,
    descriptor: Descriptor,
    (datasets, tokenizer): (&Datasets, &Found),
    tables: &mut [SourceTable],
) -> Result<Shards> {
    if tables.is_empty() {
        let tokenizer = tokenizer.tokenizer.clone().map_or_else(|| Tokenizer::of_vocab(descriptor.vocab), Ok);
        let (train, val) = corpus::tokens(&tokenizer.context("the built-in corpus")?)?;
        let name = "built-in";
        let source = Source { name: name.to_owned(), shards: vec![train], weight: 1.0, max_epochs: None };
        return Ok((vec![source], vec![(name.to_owned(), vec![val])]));
    }
    let train = sources::open_sources(options, datasets, tables)?;
    let open_val = |table: &SourceTable| {
        let val = table.val.as_deref()?;
        Some(sources::open(options, datasets, "--val", val).map(|shards| (table.name.clone(), shards)))
    };
    Ok((train, tables.iter().filter_map(open_val).collect::<Result<_>>()?))
}
