//! `train`: from flags to a run.

mod directory;
mod options;
mod resolve;

pub use options::Options;

use super::PROGRAM;
use super::report::{Setup, planned, summary};
use crate::checkpoint::resume::{Checkpoint, Found};
use crate::checkpoint::sidecar::Identity;
use crate::checkpoint::{RunState, fingerprint};
use crate::config::Config;
use crate::console::Console;
use crate::data::Prefetch;
use crate::engine::open::{Device, GPU};
use crate::fit;
use crate::gpu_info::GpuInfo;
use crate::model::Capacity;
use crate::schedule::Schedule;
use crate::signals::Stop;
use crate::tokenizer::Tokenizer;
use crate::train::{Outcome, Run, Settings, initialise, tune};
use anyhow::{Result, ensure};
use directory::OutDirectory;
use resolve::Resolved;
use std::time::Instant;

pub fn run(args: &Options) -> Result<()> {
    let started = Instant::now();
    let mut opened = if args.dry_run { args.hardware.open_to_plan() } else { args.hardware.open() }?;
    let mut out = args.out.as_deref().map(|path| OutDirectory::look(path, args)).transpose()?;
    let Found { checkpoint, mut notes } = out.as_mut().map(|out| std::mem::take(&mut out.found)).unwrap_or_default();
    let resumed = checkpoint.as_ref().map(Checkpoint::descriptor);
    let Resolved { config, descriptor, geometry, weights, mut train, val, hellaswag } =
        Resolved::new(args, &opened, resumed)?;
    let settings = settings(&config);
    let mut console = Console::new(config.steps);
    let gpu_info = (config.gpu_info_every > 0).then(|| gpu_info(opened.device));
    let setup = Setup {
        config: &config,
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
        fingerprint::of(&train)?,
        val.as_ref().map(fingerprint::of).transpose()?,
    )?;
    if let Some(checkpoint) = &checkpoint {
        notes.extend(checkpoint.compare(&identity, descriptor, args.force_resume)?);
    }
    let capacity = Capacity {
        b: geometry.b,
        t: geometry.t,
        training: true,
        master_weights: config.master_weights,
        recompute: config.recompute,
    };
    let (model, plan) = fit::plan(descriptor, capacity, engine)?;
    console.line(&format!("\n{plan}\n"))?;
    if args.dry_run {
        let free = if opened.plans_only { None } else { Some(engine.memory_free()?) };
        return console.line(&planned(&plan, free));
    }
    if let Some(Ok(info)) = gpu_info {
        console.tell_of(info, config.gpu_info_every);
    }
    engine.allocate(&plan)?;
    if checkpoint.as_ref().is_some_and(|checkpoint| !checkpoint.adopt_algorithms(engine)) {
        notes
            .push("matrix products were computed by algorithms of another GPU or library: last bits may differ".into());
    }
    if let Some(text) = tune(&model, engine, train.layout())? {
        console.line(&text)?;
    }
    let newest = checkpoint.as_ref().map(|checkpoint| checkpoint.step);
    let state = if let Some(checkpoint) = checkpoint {
        checkpoint.load(&model, engine, &mut train, config.total_batch, args.force_resume, &mut notes)?
    } else {
        match weights {
            Some(file) => file.load(&model, engine)?,
            None => initialise(&model, engine, config.seed)?,
        }
        RunState::fresh(train.position())
    };
    for note in notes {
        console.line(&format!("note: {note}"))?;
    }
    let evaluated = state.progress.evaluated;
    let (log, mut checkpoints) = out.map(|out| out.open(&config, identity, newest, evaluated)).transpose()?.unzip();
    if let Some(checkpoints) = checkpoints.as_mut().filter(|_| config.checkpoint_every > 0) {
        checkpoints.prepare(&model, engine, &state)?;
    }
    if let Some(step) = newest {
        console.line(&format!("going on after {step} of {} steps\n", config.steps))?;
    }
    let mut run = Run {
        settings: &settings,
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
        stop: Stop::on_signals(config.out.clone())?,
    };
    let outcome = run.train()?;
    run.console.line(&summary(&outcome, config.total_batch, started.elapsed(), config.out.as_deref()))?;
    if let Some(step) = outcome.stopped {
        return run.console.line(&format!("\n{}", stopped(step, &config)));
    }
    run.console.line(&format!("\nnext: {}", next_command(&config, &outcome)))
}

/// How a run that was asked to stop can go on.
fn stopped(step: usize, config: &Config) -> String {
    let how = match config.out {
        Some(_) => "go on with the same command and --resume",
        None => "nothing is kept without --out",
    };
    format!("stopped after {step} of {} steps; {how}", config.steps)
}

fn gpu_info(device: Device) -> Result<GpuInfo> {
    ensure!(device == Device::Cuda, "the run is on the CPU");
    GpuInfo::open(GPU)
}

/// What the loop reads of the configuration.
fn settings(config: &Config) -> Settings {
    let every = |n: usize| (n > 0).then_some(n);
    Settings {
        steps: config.steps,
        grad_accum: config.grad_accum(),
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
    }
}

fn next_command(config: &Config, outcome: &Outcome) -> String {
    match &outcome.model_file {
        Some(file) => format!("{PROGRAM} sample --model {} --prompt 'Once upon a time'", file.display()),
        None if config.train.is_some() => "the same with --out DIR, to keep the log and the model".to_owned(),
        None => format!("{PROGRAM} data tinyshakespeare"),
    }
}
