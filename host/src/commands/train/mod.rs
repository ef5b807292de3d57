//! `train`: resolves the flags, plans the memory, and runs the training loop.

mod config;
mod dial;
mod directory;
mod elastic;
pub mod multi_rank;
mod options;
mod reports;
mod resolve;
mod shape;
mod sources;
mod without_effect;

pub use config::Config;
pub use options::{GENERAL, Launch, TrainOptions};
pub use resolve::{DEFAULT_SEQ, TrainingData, UNKNOWN_STEPS, ValidationData};

use super::report::{Setup, planned, zero_stages};
use crate::console::Console;
use crate::datasets::document_start;
use crate::evaluate::core::CoreSet;
use crate::evaluate::{self, text::TokenBytes};
use crate::gpu_info::{GpuErrors, GpuInfo};
use crate::signals::Stop;
use crate::train::{
    Diverged, GroupFlag, HardwareChecks, MuonSettings, OptimizerSettings, Run, Settings, Validation, ValidationSource,
    flight_recorder_name,
};
use crate::values::{Count, Resume};
use anyhow::{Context, Result, bail, ensure};
use checkpoint::resume::{Accepted, Checkpoint, FoundCheckpoint};
use checkpoint::sidecar::Identity;
use checkpoint::writer::CheckpointWriter;
use checkpoint::{RunState, fingerprint};
use data::{Batches, DocumentStart, MultipleChoice, Prefetch};
use directory::{ModelFiles, OutDirectory};
use distributed::Ranks;
use distributed::rendezvous::elastic::Members;
use elastic::Part;
use engine::Engine;
use engine::open::{Device, Opened, Precision};
use engine::plan::Plan;
use engine::trace::BitFlip;
use interchange::ModelSource;
use metrics::report::Summary;
use model::fit::{self, RunLimits};
use model::schedule::Schedule;
use model::{Decoder, Descriptor, Fp8Options, Optimizer, ParamGroup, PlanOptions};
use reports::{draw, read_log, report_dry_run, report_end, report_start};
use resolve::Resolved;
use shape::Frozen;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use system::{thread, time};
use tokenizer::Tokenizer;
use tokenizer::stored::Found;

/// Trains a model as one rank of a run.
pub fn run(args: &TrainOptions) -> Result<()> {
    run_until(args, Stop::on_signals)
}

/// Trains a model as one rank of a run. `stop` creates the source of requests to stop, from the directory in which this rank writes.
pub fn run_until(args: &TrainOptions, stop: impl FnOnce(Option<PathBuf>) -> Result<Stop>) -> Result<()> {
    // An error on one rank ends the run on all ranks.
    let train_as = |args: &TrainOptions, mut ranks: Ranks, start| {
        train(args, &mut ranks, start, stop).map_err(|error| ranks.abort(error))
    };
    let Some(min_ranks) = args.min_ranks.filter(|_| !args.dry_run) else {
        let (ranks, local_rank) = multi_rank::connect(&args.launch)?;
        return train_as(args, ranks, Start { local_rank, opened: None, members: None });
    };
    let args = elastic::flags(args);
    let Some(Part { ranks, start, lock }) = elastic::join(&args, min_ranks)? else { return Ok(()) };
    let result = train_as(&args, ranks, start);
    drop(lock);
    result
}

/// How a process begins as a rank of a run.
pub struct Start {
    local_rank: usize,
    /// The GPU and its engine, if it was opened before the ranks met.
    opened: Option<(usize, Opened)>,
    /// The ranks of a run whose number of ranks may change.
    members: Option<Members>,
}

impl Start {
    /// Returns the number of the GPU of this rank, and the engine.
    fn open(self, args: &TrainOptions, ranks: &Ranks) -> Result<(usize, Opened)> {
        if let Some(opened) = self.opened {
            return Ok(opened);
        }
        let gpu = multi_rank::gpu_of(self.local_rank, ranks.world_size() == 1, args.hardware.device)?;
        Ok((gpu, if args.dry_run { args.hardware.open_to_plan(gpu) } else { args.hardware.open_on(gpu) }?))
    }

    /// Returns the size of the shard groups. Adds notes on what differs from the flags, because ranks are missing.
    fn shard_size(&self, args: &TrainOptions, ranks: &Ranks, notes: &mut Vec<String>) -> Option<usize> {
        let (Some(members), wanted) = (&self.members, args.shard_size) else { return args.shard_size };
        notes.extend(elastic::note(members, args));
        let (size, note) = elastic::shard_size(ranks.world_size(), wanted?);
        notes.extend(note.filter(|_| args.zero_stage > 0));
        Some(size)
    }
}

/// A run whose memory is planned; nothing has been allocated or written yet.
struct PlannedRun {
    config: Config,
    weights: Option<ModelSource>,
    frozen: Option<Frozen>,
    train: Batches,
    val: Vec<ValidationData>,
    hellaswag: Option<MultipleChoice>,
    core: Option<CoreSet>,
    tokenizer: Found,
    conversations: Option<PathBuf>,
    identity: Identity,
    checkpoint: Option<Checkpoint>,
    notes: Vec<String>,
    out: Option<OutDirectory>,
    model: Decoder,
    plan: Plan,
    console: Console,
}

fn train(
    args: &TrainOptions,
    ranks: &mut Ranks,
    start: Start,
    stop: impl FnOnce(Option<PathBuf>) -> Result<Stop>,
) -> Result<()> {
    let started = time::now();
    check_out(args)?;
    let mut elastic_notes = Vec::new();
    let shard = multi_rank::shard(ranks, start.shard_size(args, ranks, &mut elastic_notes))?;
    let (gpu, mut opened) = start.open(args, ranks)?;
    // Rank 0 owns the output directory and reads the checkpoint that the run resumes from.
    let out = args.out().filter(|_| ranks.is_first());
    let mut out = out.map(|path| OutDirectory::inspect(path, args)).transpose()?;
    let FoundCheckpoint { checkpoint, mut notes } =
        out.as_mut().map(|out| std::mem::take(&mut out.found)).unwrap_or_default();
    notes.extend(elastic_notes);
    let resumed = checkpoint.as_ref().map(|checkpoint| (checkpoint.descriptor(), checkpoint.final_fraction()));
    let resumed = ranks.broadcast(resumed)?;
    let Resolved {
        mut config,
        descriptor,
        weights,
        frozen,
        data,
        hellaswag,
        core,
        tokenizer,
        conversations,
        growth,
        dial,
        note: without_data,
    } = Resolved::new(args, &opened, resumed.as_ref(), ranks.rank(), ranks.world_size())?;
    notes.extend(growth);
    notes.extend(dial);
    let out = claim(out, ranks, args, &mut config)?;
    let mut console = multi_rank::console(ranks, args, &config)?;
    let gpu_info = (config.flags.gpu_info_every > 0).then(|| gpu_info(opened.device, gpu));
    let setup = Setup {
        config: &config,
        ranks: ranks.world_size(),
        descriptor,
        data: data.as_ref(),
        hellaswag: hellaswag.as_ref(),
        core: core.as_ref(),
        tokenizer: tokenizer.tokenizer.as_ref(),
        opened: &opened,
        gpu_info: gpu_info.as_ref(),
    };
    console.line(&setup.table())?;
    notes.extend(without_effect::notes(args, &config, &opened, ranks.world_size()));
    notes.extend(excess_val_batches(args, &config, data.as_ref()));
    let engine = &mut *opened.engine;
    // The GPU, if this process computes on it.
    let gpu = (opened.device == Device::Cuda && !opened.plans_only).then_some(gpu);
    let identity = identify(ranks, engine, &config, data.as_ref(), &tokenizer, gpu)?;
    notes.extend(tokenizer.note.clone().filter(|_| config.flags.sample_every != Some(0)));
    if let Some(checkpoint) = &checkpoint {
        notes.extend(checkpoint.check_settings(&identity, descriptor, TrainOptions::may_change, args.accepted())?);
    }
    let limits = RunLimits {
        ranks: ranks.world_size(),
        shard,
        total_batch: args.total_batch,
        local_ranks: multi_rank::local_ranks(ranks),
        memory: args.memory_limit,
    };
    let (model, plan, stages) = plan(&config, descriptor, limits, engine)?;
    let buffers = if args.verbose || args.dry_run { plan.to_string() } else { plan.summary() };
    console.line(&format!("\n{buffers}\n{stages}"))?;
    if args.dry_run {
        ranks.close()?;
        let is_known = !opened.plans_only || limits.memory.is_some();
        let free = if is_known { Some(limits.free_memory(engine)?) } else { None };
        let reserved = engine.reserved_memory(limits.communicators(model.zero));
        return report_dry_run(&console, &notes, &planned(&plan, reserved, free), without_data.as_deref());
    }
    let TrainingData { train, val, .. } = data.context("--train: expected data, found none")?;
    if let Some(Ok(info)) = gpu_info {
        console.report_gpu(info, config.flags.gpu_info_every);
    }
    // A machine without NVML is not watched.
    console.report_errors(gpu.and_then(|gpu| GpuInfo::open(gpu).ok()).and_then(GpuErrors::watch));
    let planned = PlannedRun {
        config,
        weights,
        frozen,
        train,
        val,
        hellaswag,
        core,
        tokenizer,
        conversations,
        identity,
        checkpoint,
        notes,
        out,
        model,
        plan,
        console,
    };
    planned.execute(ranks, engine, args, gpu, started, stop)
}

/// Fails if a run is resumed without a directory, or would write into the Hugging Face directory of its model, whose tokenizer it could
/// replace.
fn check_out(args: &TrainOptions) -> Result<()> {
    ensure!(
        args.resume != Resume::Required || args.out().is_some(),
        "--resume: expected the --out of a run, found --out none; name its directory"
    );
    let (Some(model), Some(out)) = (&args.model, args.out()) else { return Ok(()) };
    let is_hugging_face = Path::new(model).join(interchange::config::FILE).is_file();
    let canonical = |path: &Path| path.canonicalize().ok();
    ensure!(
        !is_hugging_face || canonical(Path::new(model)) != canonical(out),
        "--out: expected a directory other than that of the model, found {}; choose a new one",
        out.display()
    );
    Ok(())
}

/// Returns a note if there are fewer validation batches than a flag says.
fn excess_val_batches(args: &TrainOptions, config: &Config, data: Option<&TrainingData>) -> Option<String> {
    let found = data?.val.iter().map(|val| val.batches).min()?;
    let Some(Count::Some(wanted)) = args.val_batches else { return None };
    let note = evaluate::excess_batches(wanted, found);
    note.filter(|_| config.val_every > 0)
}

/// Marks the output directory on rank 0, and creates one if `--out` is absent. All ranks write into that of rank 0.
fn claim(
    out: Option<OutDirectory>,
    ranks: &mut Ranks,
    args: &TrainOptions,
    config: &mut Config,
) -> Result<Option<OutDirectory>> {
    if args.dry_run {
        return Ok(out);
    }
    let mut out = match out {
        None if ranks.is_first() && !args.saves_nothing() => {
            Some(OutDirectory::create(&directory::model_name(config))?)
        }
        out => out,
    };
    out.as_mut().map(OutDirectory::mark).transpose()?;
    let path = ranks.broadcast(out.as_ref().map(|out| out.path.clone()))?;
    if args.out.is_none() {
        config.flags.out = path;
    }
    Ok(out)
}

/// Returns the identity of the run, after checking that the ranks agree on it. `gpu` is this rank's.
fn identify(
    ranks: &mut Ranks,
    engine: &dyn Engine,
    config: &Config,
    data: Option<&TrainingData>,
    tokenizer: &Found,
    gpu: Option<usize>,
) -> Result<Identity> {
    let train = data.map(|data| fingerprint::of_shards(data.train.shards())).transpose()?.unwrap_or_default();
    let val = data.into_iter().flat_map(|data| &data.val).flat_map(|val| val.loader.shards());
    let val = Some(fingerprint::of_shards(val)?).filter(|val| !val.is_empty());
    let identity = Identity::new(config.values()?, engine.describe(), train, val, ranks.world_size());
    multi_rank::check_ranks(ranks, &identity, gpu)?;
    let sample_together = config.flags.zero_stage == 3 || config.flags.expert_parallel;
    multi_rank::check_tokenizer(ranks, tokenizer.tokenizer.as_ref(), sample_together)?;
    Ok(identity)
}

impl PlannedRun {
    /// Allocates the memory, loads the weights and the state, and trains.
    fn execute(
        mut self,
        ranks: &mut Ranks,
        engine: &mut dyn Engine,
        args: &TrainOptions,
        gpu: Option<usize>,
        started: Instant,
        stop: impl FnOnce(Option<PathBuf>) -> Result<Stop>,
    ) -> Result<()> {
        self.allocate(ranks, engine)?;
        let Self { mut config, model, console, mut train, mut notes, out, .. } = self;
        let newest = ranks.broadcast(self.checkpoint.as_ref().map(|checkpoint| checkpoint.step))?;
        // Any rank may be rank 0 after the next restart.
        if let Some(step) = newest.filter(|_| args.min_ranks.is_some() && !ranks.is_first()) {
            multi_rank::open_checkpoint(&config, step)?;
        }
        let state = match self.checkpoint {
            Some(checkpoint) => checkpoint.load(
                &model,
                engine,
                &mut train,
                config.total_batch,
                args.accepted() != Accepted::Nothing,
                &mut notes,
            )?,
            None => RunState::fresh(train.position()),
        };
        let source = self.frozen.as_ref().filter(|_| newest.is_none()).map(|frozen| &frozen.source);
        let source = self.weights.as_ref().or(source);
        let companions = source.and_then(ModelSource::companions);
        let template = source.and_then(ModelSource::template_of_run);
        let digest =
            self.frozen.map(|frozen| load_frozen(frozen, newest, &model, engine, ranks, &config)).transpose()?;
        load_weights(newest, self.weights, &model, engine, ranks, &config)?;
        let mut state = state;
        check_frozen(digest, &mut state, &config)?;
        let state = multi_rank::broadcast_start(ranks, &model, engine, state, &mut train)?;
        check_hashes(&model, engine, ranks, &state)?;
        let settings = settings(&config, ranks.world_size(), gpu)?;
        if let Some(fp8) = state.progress.fp8.as_ref().filter(|_| config.precision == Precision::Fp8)
            && !fp8.restore(&model, engine, settings.dloss(&model, train.layout()))?
        {
            notes.push("the FP8 scales are reset, because the recipe or the size of gradients has changed".to_owned());
        }
        report_start(&console, &notes, state.step, config.steps)?;
        let (log, mut checkpoints) = match out {
            Some(out) => {
                let progress = &state.progress;
                let conversations = self.conversations.as_deref().map(|data| (data, model.descriptor));
                let files = ModelFiles { tokenizer: &self.tokenizer, companions, template, conversations };
                Some(out.open(&config, &files, self.identity, newest, progress, args.tensorboard)?).unzip()
            }
            None => (None, writer_of_other_rank(ranks, &model, &config, self.identity, newest)),
        };
        let writes = config.flags.checkpoint_every != Some(0) || config.checkpoint_minutes > 0.0;
        if let Some(checkpoints) = checkpoints.as_mut().filter(|_| writes) {
            checkpoints.prepare(&model, engine, &state)?;
        }
        if let Some(out) = &config.flags.out {
            ranks.set_flight_recorder_file(out.join(flight_recorder_name(ranks.rank())));
        }
        let (stop, printed) =
            (stop(config.flags.out.clone().filter(|_| ranks.is_first()))?, args.json && ranks.is_first());
        let has_documents = config.flags.document_mask.unwrap_or(false);
        let mut shards = train.shards().into_iter().chain(self.val.iter().flat_map(|val| val.loader.shards()));
        let only_conversations = shards.all(|shard| shard.mask().is_some());
        let documents = document_start(has_documents, self.tokenizer.tokenizer.as_ref(), only_conversations)?;
        let mut run = Run {
            settings: &settings,
            ranks,
            model: &model,
            val: validation(self.val, &config, self.tokenizer.tokenizer.as_ref(), (engine, documents))?,
            tokenizer: self.tokenizer.tokenizer,
            train: Prefetch::start_with_documents(train, engine, documents)?,
            hellaswag: self.hellaswag,
            core: self.core,
            engine,
            console,
            log: log.unwrap_or_default().printed(printed),
            state,
            checkpoints,
            stop,
        };
        let outcome = run.train();
        // The curves of a failed run may show why it failed. The directory may have been moved.
        let directory = run.checkpoints.as_ref().map(CheckpointWriter::directory).filter(|_| run.ranks.is_first());
        let logged = directory.and_then(read_log);
        let drawn = draw(directory, logged.as_ref());
        config.flags.out = directory.map(Path::to_owned).or(config.flags.out.take());
        let outcome = outcome?;
        let train_loss = logged.and_then(|log| Summary::new(&log.ok()?).train_loss);
        report_end(&run.console, &outcome, &config, time::now() - started, train_loss, drawn)?;
        if outcome.stopped.is_some() {
            return Err(run.stop.stopped().into());
        }
        // All ranks have the same losses. Rank 0 reports them.
        let text = |divergence| if run.ranks.is_first() { divergence } else { String::new() };
        outcome.divergence.map_or(Ok(()), |divergence| Err(Diverged(text(divergence)).into()))
    }

    /// Allocates the memory, connects the ranks, and tunes the GEMMs.
    fn allocate(&mut self, ranks: &mut Ranks, engine: &mut dyn Engine) -> Result<()> {
        engine.allocate(&self.plan)?;
        ranks.init_communicator(engine, self.model.params, self.model.zero.shard().ranks)?;
        if let Some(text) = ranks.describe() {
            self.console.line(&format!("{} ranks, connected by {text}\n", ranks.world_size()))?;
        }
        if self.checkpoint.as_ref().is_some_and(|checkpoint| !checkpoint.adopt_algorithms(engine)) {
            self.notes.push(
                "the checkpoint used GEMM algorithms of another GPU or cuBLASLt version: results may differ in the last bits"
                    .into(),
            );
        }
        if let Some(text) = multi_rank::tune(ranks, &self.model, engine, self.train.layout())? {
            self.console.line(&text)?;
        }
        Ok(())
    }
}

/// Starts the loaders of the validation data.
fn validation(
    data: Vec<ValidationData>,
    config: &Config,
    tokenizer: Option<&Tokenizer>,
    (engine, documents): (&dyn Engine, Option<DocumentStart>),
) -> Result<Validation> {
    let start = |ValidationData { name, loader, batches }: ValidationData| {
        let batches = config.val_batches.min(batches);
        Ok(ValidationSource {
            name,
            batches,
            data: Prefetch::start_with_documents(loader.rewinding_after(batches), engine, documents)?,
        })
    };
    let sources = data.into_iter().map(start).collect::<Result<Vec<_>>>()?;
    let tokenizer = tokenizer.filter(|_| sources.len() > 1);
    Ok(Validation { sources, token_bytes: tokenizer.map(TokenBytes::new).unwrap_or_default() })
}

/// Returns the checkpoint writer of a rank without the output directory, if it takes part in writing.
fn writer_of_other_rank(
    ranks: &Ranks,
    model: &Decoder,
    config: &Config,
    identity: Identity,
    newest: Option<usize>,
) -> Option<CheckpointWriter> {
    let out = config.flags.out.clone().filter(|_| model.zero.shards_optimizer())?;
    // The other shard groups have the same shards as the first.
    let in_first_group = ranks.rank() < model.zero.shard().ranks;
    let writer = if in_first_group { CheckpointWriter::for_other_rank } else { CheckpointWriter::for_replica };
    Some(writer(out, identity, newest))
}

/// Plans the memory of a rank. The text compares the ZeRO stages if there are several ranks.
fn plan(
    config: &Config,
    descriptor: Descriptor,
    limits: RunLimits,
    engine: &mut dyn Engine,
) -> Result<(Decoder, Plan, String)> {
    let shard = limits.shard;
    let zero = multi_rank::zero(config.flags.zero_stage, shard, limits.ranks, config.flags.expert_parallel)?;
    let options = PlanOptions { zero, ..capacity(config, &descriptor, engine)? };
    let (model, plan) = fit::plan_run(descriptor, options, limits, engine)?;
    if shard.ranks == 1 {
        return Ok((model, plan, String::new()));
    }
    let stages = zero_stages(descriptor, options, (zero.stage(), limits), engine);
    // The engine keeps the places of the plan that it made last.
    let (model, plan) = Decoder::plan(descriptor, options, engine);
    Ok((model, plan, stages))
}

fn gpu_info(device: Device, gpu: usize) -> Result<GpuInfo> {
    ensure!(device == Device::Cuda, "the run uses the CPU");
    GpuInfo::open(gpu)
}

/// Loads what this rank does not receive from rank 0: initial weights from a model or from the seed, or this rank's shard of the
/// checkpoint of step `newest`.
fn load_weights(
    newest: Option<usize>,
    source: Option<ModelSource>,
    model: &Decoder,
    engine: &mut dyn Engine,
    ranks: &Ranks,
    config: &Config,
) -> Result<()> {
    let sharded = model.zero.shards_optimizer();
    match (newest, source) {
        (Some(step), _) if sharded && !ranks.is_first() => multi_rank::load_shard(config, step, model, engine),
        (None, Some(source)) if sharded || ranks.is_first() => source.load(model, engine),
        (None, None) if model.descriptor.adapters.is_none() && (sharded || ranks.is_first()) => {
            thread::check(1)?;
            model.initialize(engine, config.flags.seed)
        }
        _ => Ok(()),
    }
}

/// Loads the weights that do not change on every rank, and the adapters with which the run starts. Returns the hash and the type of the weights.
fn load_frozen(
    frozen: Frozen,
    newest: Option<usize>,
    model: &Decoder,
    engine: &mut dyn Engine,
    ranks: &Ranks,
    config: &Config,
) -> Result<String> {
    let Frozen { source, adapters } = frozen;
    let starts = newest.is_none() && (model.zero.shards_optimizer() || ranks.is_first());
    match adapters.filter(|_| starts) {
        Some(file) => file.load(&source, model, engine)?,
        None if starts => model.initialize(engine, config.flags.seed)?,
        None => {}
    }
    load_source(source, model, engine)?;
    model.frozen_digest(engine)?.context("internal error: no frozen weights; please report it")
}

/// Loads the frozen weights.
pub fn load_source(source: ModelSource, model: &Decoder, engine: &mut dyn Engine) -> Result<()> {
    match model.frozen_model().filter(|_| !model.descriptor.is_fp8_base()) {
        Some(whole) => source.load(&whole, engine),
        None => model.load_frozen(engine, |param, layer| source.read_floats(param, layer)),
    }
}

/// Fails if the frozen weights of a resumed run are not those with which it started. They may have another type.
fn check_frozen(digest: Option<String>, state: &mut RunState, config: &Config) -> Result<()> {
    let Some(digest) = digest else { return Ok(()) };
    let saved = state.progress.frozen.get_or_insert_with(|| digest.clone());
    let same_type = saved.split(' ').nth(1) == digest.split(' ').nth(1);
    ensure!(
        !same_type || *saved == digest,
        "--model {}: expected the weights with which the run started, found others; restore them, or export the adapters of the run and \
         start a new run with --lora",
        config.flags.model.as_deref().unwrap_or_default()
    );
    Ok(())
}

fn capacity(config: &Config, descriptor: &Descriptor, engine: &dyn Engine) -> Result<PlanOptions> {
    let Config { batch: b, seq: t, .. } = *config;
    let TrainOptions { master_weights, moments, offload, recompute, fp8, .. } = config.flags;
    let optimizer = config.flags.optimizer();
    let fp8 = fp8.resolve(config.precision)?;
    let fp8 = fp8.map(|settings| Fp8Options::new(settings, descriptor, [b, t], engine)).transpose()?;
    Ok(PlanOptions { master_weights, moments, offload, recompute, optimizer, fp8, ..PlanOptions::training(b, t) })
}

/// Returns the settings of the training loop.
fn settings(config: &Config, ranks: usize, gpu: Option<usize>) -> Result<Settings> {
    let every = |n: usize| (n > 0).then_some(n);
    Ok(Settings {
        steps: config.steps,
        grad_accum: config.grad_accum(ranks),
        schedule: Schedule {
            kind: config.flags.schedule(),
            peak: config.lr,
            warmup: config.warmup,
            steps: config.steps,
            final_fraction: config.final_fraction,
            warmdown: config.flags.warmdown.unwrap_or(0.0),
        },
        optimizer: optimizer(config),
        weight_decay: config.weight_decay,
        clip: config.flags.clip(),
        limits: config.limits(),
        val_every: every(config.val_every),
        core_every: every(config.flags.core_every.unwrap_or(config.steps)),
        sample_every: every(config.flags.sample_every.unwrap_or(config.steps)),
        sample_tokens: config.sample_length,
        checkpoint_every: every(config.flags.checkpoint_every.unwrap_or(config.steps)),
        fp8_stats_every: config.fp8_stats.and_then(every),
        checkpoint_after: (config.checkpoint_minutes > 0.0)
            .then(|| Duration::try_from_secs_f64(60.0 * f64::from(config.checkpoint_minutes)).unwrap_or(Duration::MAX)),
        check_ranks_every: every(config.flags.check_ranks),
        hardware: HardwareChecks {
            verify_every: every(config.flags.verify_every),
            hash_every: every(config.flags.hash_every),
            flip: bit_flip()?,
            gpu,
        },
    })
}

/// Returns the bit that tests of the detection of faulty hardware flip.
fn bit_flip() -> Result<Option<BitFlip>> {
    let variable = HardwareChecks::FLIP_VARIABLE;
    let text = std::env::var(variable).ok();
    text.map(|text| text.parse().with_context(|| variable)).transpose()
}

/// Compares the hashes of the loaded parameters and optimizer state with those of the checkpoint. Values of a type that the checkpoint did
/// not have are not compared.
fn check_hashes(model: &Decoder, engine: &mut dyn Engine, ranks: &mut Ranks, state: &RunState) -> Result<()> {
    let saved = &state.progress.hashes;
    if saved.is_empty() {
        return Ok(());
    }
    let loaded = model.digests(engine, ranks)?;
    for (name, expected) in saved {
        let Some(found) = loaded.get(name).filter(|found| *found != expected) else { continue };
        bail!(
            "{name} of the checkpoint of step {}: expected hash {expected}, as before it was written, found {found} in memory; the \
             memory of this machine, its GPU or its disk may be faulty: resume from an earlier checkpoint on another machine",
            state.step
        );
    }
    Ok(())
}

/// Returns the settings of the optimizer.
fn optimizer(config: &Config) -> OptimizerSettings {
    let (default, flags) = (MuonSettings::DEFAULT, &config.flags);
    let of_rate =
        |(group, lr): (_, Option<f32>)| lr.map(|lr| GroupFlag::new(group, [Some(lr), None, None, None, None]));
    let rates = [(ParamGroup::Embeddings, flags.embedding_lr), (ParamGroup::Head, flags.head_lr)];
    OptimizerSettings {
        groups: rates.into_iter().filter_map(of_rate).chain(flags.group.iter().copied()).collect(),
        router_bias_rate: config.router_bias_rate.unwrap_or(0.0),
        muon: (flags.optimizer() == Optimizer::Muon).then(|| MuonSettings {
            lr: flags.muon_lr.unwrap_or(default.lr),
            momentum: flags.muon_momentum.unwrap_or(default.momentum),
            warmup: flags.muon_momentum_warmup.unwrap_or(default.warmup),
            final_momentum: flags.muon_momentum_final,
            weight_decay: flags.weight_decay_schedule.unwrap_or_default(),
            coefficients: flags.muon_coefficients.unwrap_or_default(),
            additions: flags.muon_additions.additions(),
        }),
    }
}
