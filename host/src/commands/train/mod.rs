//! `train`: from flags to a run.

mod directory;
mod options;
mod resolve;
pub mod together;

pub use options::{Launch, Options};

use super::PROGRAM;
use super::report::{Setup, planned, stages, summary};
use crate::console::Console;
use crate::gpu_info::GpuInfo;
use crate::signals::Stop;
use crate::train::{Outcome, Run, Settings};
use anyhow::{Result, ensure};
use checkpoint::config::Config;
use checkpoint::model_file::ModelFile;
use checkpoint::resume::{Checkpoint, FoundCheckpoint};
use checkpoint::sidecar::Identity;
use checkpoint::writer::CheckpointWriter;
use checkpoint::{RunState, fingerprint};
use data::Prefetch;
use data::tokenizer::Tokenizer;
use directory::OutDirectory;
use distributed::Ranks;
use engine::Engine;
use engine::open::Device;
use engine::plan::Plan;
use model::fit;
use model::schedule::Schedule;
use model::{Descriptor, Gpt2, PlanOptions, Shard, Zero};
use resolve::Resolved;
use std::time::{Duration, Instant};

pub fn run(args: &Options) -> Result<()> {
    let (mut ranks, local_rank) = together::meet(&args.launch)?;
    // An error here ends the run everywhere.
    train(args, &mut ranks, local_rank).map_err(|error| ranks.abort(error))
}

fn train(args: &Options, ranks: &mut Ranks, local_rank: usize) -> Result<()> {
    let started = Instant::now();
    let gpu = together::gpu_of(local_rank, args.hardware.device)?;
    let mut opened = if args.dry_run { args.hardware.open_to_plan(gpu) } else { args.hardware.open_on(gpu) }?;
    // Rank 0 keeps what is kept, and goes on from it.
    let out = args.out.as_deref().filter(|_| ranks.is_first());
    let mut out = out.map(|path| OutDirectory::look(path, args)).transpose()?;
    let FoundCheckpoint { checkpoint, mut notes } = out.as_mut().map(|out| std::mem::take(&mut out.found)).unwrap_or_default();
    let resumed = ranks.broadcast(checkpoint.as_ref().map(Checkpoint::descriptor))?;
    let Resolved { config, descriptor, weights, mut train, val, hellaswag } =
        Resolved::new(args, &opened, resumed, ranks.rank(), ranks.world_size())?;
    let settings = settings(&config, ranks.world_size());
    let mut console = together::console(ranks, args, config.steps)?;
    let gpu_info = (config.gpu_info_every > 0).then(|| gpu_info(opened.device, gpu));
    let setup = Setup {
        config: &config,
        ranks: ranks.world_size(),
        descriptor,
        train: &train,
        val: val.as_ref(),
        hellaswag: hellaswag.as_ref(),
        engine: &*opened.engine,
        note: opened.note.as_deref(),
        gpu_info: gpu_info.as_ref(),
    };
    console.line(&setup.table())?;
    let engine = &mut *opened.engine;
    let identity = Identity::new(
        &config,
        engine.describe(),
        fingerprint::of_loader(&train)?,
        val.as_ref().map(fingerprint::of_loader).transpose()?,
        ranks.world_size(),
    )?;
    let on_gpu = opened.device == Device::Cuda && !opened.plans_only;
    together::agree(ranks, &identity, on_gpu.then_some(gpu))?;
    if let Some(checkpoint) = &checkpoint {
        notes.extend(checkpoint.check_settings(&identity, descriptor, args.force_resume)?);
    }
    let zero = Zero::new(config.zero_stage, Shard { rank: ranks.rank(), ranks: ranks.world_size() });
    let (model, plan) = plan(&config, descriptor, zero, ranks.world_size(), engine, &console)?;
    if args.dry_run {
        ranks.close()?;
        let free = if opened.plans_only { None } else { Some(engine.free_memory()?) };
        return console.line(&planned(&plan, free));
    }
    if let Some(Ok(info)) = gpu_info {
        console.tell_of(info, config.gpu_info_every);
    }
    engine.allocate(&plan)?;
    ranks.init_communicator(engine, model.params)?;
    if let Some(text) = ranks.describe() {
        console.line(&format!("{} ranks, connected by {text}\n", ranks.world_size()))?;
    }
    if checkpoint.as_ref().is_some_and(|checkpoint| !checkpoint.adopt_algorithms(engine)) {
        notes
            .push("matrix products were computed by algorithms of another GPU or library: last bits may differ".into());
    }
    if let Some(text) = together::tune_together(ranks, &model, engine, train.layout())? {
        console.line(&text)?;
    }
    let newest = ranks.broadcast(checkpoint.as_ref().map(|checkpoint| checkpoint.step))?;
    let state = match checkpoint {
        Some(checkpoint) => {
            checkpoint.load(&model, engine, &mut train, config.total_batch, args.force_resume, &mut notes)?
        }
        None => RunState::fresh(train.position()),
    };
    fill(newest, weights, &model, engine, ranks, &config)?;
    let state = together::share(ranks, &model, engine, state, &mut train)?;
    tell_of_start(&console, &notes, state.step, config.steps)?;
    let evaluated = state.progress.evaluated;
    let (log, mut checkpoints) = match (out, &config.out) {
        (Some(out), _) => Some(out.open(&config, identity, newest, evaluated)?).unzip(),
        (None, Some(out)) if zero.shards_optimizer() => {
            (None, Some(CheckpointWriter::for_other_rank(out.clone(), identity, newest)))
        }
        _ => (None, None),
    };
    if let Some(checkpoints) = checkpoints.as_mut().filter(|_| config.checkpoint_every > 0) {
        checkpoints.prepare(&model, engine, &state)?;
    }
    let kept_by_this = config.out.clone().filter(|_| ranks.is_first());
    let mut run = Run {
        settings: &settings,
        ranks,
        model: &model,
        tokenizer: Tokenizer::of_vocab(descriptor.vocab).ok(),
        train: Prefetch::start(train, engine)?,
        val: val.map(|val| Prefetch::start(val.rewinding_after(config.val_batches), engine)).transpose()?,
        hellaswag,
        engine,
        console,
        log: log.unwrap_or_default(),
        state,
        checkpoints,
        stop: Stop::on_signals(kept_by_this)?,
    };
    let outcome = run.train()?;
    tell_how_it_went(&run.console, &outcome, &config, started.elapsed())
}

/// Plans the memory and tells of it.
fn plan(
    config: &Config,
    descriptor: Descriptor,
    zero: Zero,
    ranks: usize,
    engine: &mut dyn Engine,
    console: &Console,
) -> Result<(Gpt2, Plan)> {
    let of_stages = |engine: &mut dyn Engine| stages(descriptor, plan_options(config), zero.stage(), ranks, engine);
    let stages = if ranks > 1 { of_stages(engine) } else { String::new() };
    let (model, plan) = fit::plan(descriptor, PlanOptions { zero, ..plan_options(config) }, engine)?;
    console.line(&format!("\n{plan}\n{stages}"))?;
    Ok((model, plan))
}

fn tell_of_start(console: &Console, notes: &[String], step: usize, steps: usize) -> Result<()> {
    notes.iter().try_for_each(|note| console.line(&format!("note: {note}")))?;
    if step > 0 { console.line(&format!("going on after {step} of {steps} steps\n")) } else { Ok(()) }
}

fn tell_how_it_went(console: &Console, outcome: &Outcome, config: &Config, wall: Duration) -> Result<()> {
    console.line(&summary(outcome, config.total_batch, wall, config.out.as_deref()))?;
    if let Some(step) = outcome.stopped {
        return console.line(&format!("\n{}", stopped(step, config)));
    }
    console.line(&format!("\nnext: {}", next_command(config, outcome)))
}

/// How a run that was asked to stop can go on.
fn stopped(step: usize, config: &Config) -> String {
    let how = match config.out {
        Some(_) => "go on with the same command and --resume",
        None => "nothing is kept without --out",
    };
    format!("stopped after {step} of {} steps; {how}", config.steps)
}

fn gpu_info(device: Device, gpu: usize) -> Result<GpuInfo> {
    ensure!(device == Device::Cuda, "the run is on the CPU");
    GpuInfo::open(gpu)
}

/// Gives the model its first weights, from a file or from the seed, or on ranks other than the first, their part of the
/// checkpoint of step `newest`: what each rank does not get from the first.
fn fill(
    newest: Option<usize>,
    file: Option<ModelFile>,
    model: &Gpt2,
    engine: &mut dyn Engine,
    ranks: &Ranks,
    config: &Config,
) -> Result<()> {
    let divided = model.zero.shards_optimizer();
    match (newest, file) {
        (Some(step), _) if divided && !ranks.is_first() => together::load_part(config, step, model, engine),
        (None, Some(file)) if divided || ranks.is_first() => file.load(model, engine),
        (None, None) if divided || ranks.is_first() => model.initialize(engine, config.seed),
        _ => Ok(()),
    }
}

fn plan_options(config: &Config) -> PlanOptions {
    let Config { batch: b, seq: t, master_weights, recompute, .. } = *config;
    PlanOptions { master_weights, recompute, ..PlanOptions::training(b, t) }
}

/// What the loop reads of the configuration.
fn settings(config: &Config, ranks: usize) -> Settings {
    let every = |n: usize| (n > 0).then_some(n);
    Settings {
        steps: config.steps,
        grad_accum: config.grad_accum(ranks),
        schedule: Schedule {
            kind: config.schedule,
            peak: config.lr,
            warmup: config.warmup,
            steps: config.steps,
            final_fraction: config.final_fraction,
        },
        weight_decay: config.weight_decay,
        clip: Config::CLIP,
        limits: config.limits(),
        val_every: every(config.val_every),
        val_batches: config.val_batches,
        sample_every: every(config.sample_every),
        sample_tokens: config.sample_length,
        checkpoint_every: every(config.checkpoint_every),
        check_ranks_every: every(config.check_ranks),
    }
}

fn next_command(config: &Config, outcome: &Outcome) -> String {
    match &outcome.model_file {
        Some(file) => format!("{PROGRAM} sample --model {} --prompt 'Once upon a time'", file.display()),
        None if config.train.is_some() => "the same with --out DIR, to keep the log and the model".to_owned(),
        None => format!("{PROGRAM} data tinyshakespeare"),
    }
}
