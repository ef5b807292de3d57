//! `train`: from flags to a run.

mod options;
mod resolve;

pub use options::Options;

use super::PROGRAM;
use super::report::{Setup, summary};
use crate::atomic;
use crate::config::Config;
use crate::console::Console;
use crate::data::Prefetch;
use crate::fit;
use crate::log::Log;
use crate::model::Capacity;
use crate::schedule::Schedule;
use crate::tokenizer::Tokenizer;
use crate::train::{Outcome, Run, Settings, initialise, tune};
use anyhow::Result;
use resolve::Resolved;
use std::time::Instant;

pub fn run(args: &Options) -> Result<()> {
    let started = Instant::now();
    let mut opened = args.hardware.open()?;
    let Resolved { config, descriptor, geometry, weights, train, val, hellaswag } = Resolved::new(args, &opened)?;
    let settings = settings(&config);
    let console = Console::new(config.steps);
    let setup = Setup {
        config: &config,
        descriptor,
        train: &train,
        val: val.as_ref(),
        hellaswag: hellaswag.as_ref(),
        engine: &*opened.engine,
        note: opened.note.as_deref(),
    };
    console.line(&setup.table())?;
    let engine = &mut *opened.engine;
    let capacity = Capacity {
        b: geometry.b,
        t: geometry.t,
        training: true,
        master_weights: config.master_weights,
        recompute: config.recompute,
    };
    let (model, plan) = fit::plan(descriptor, capacity, engine)?;
    console.line(&format!("\n{plan}\n"))?;
    engine.allocate(&plan)?;
    if let Some(text) = tune(&model, engine, train.layout())? {
        console.line(&text)?;
    }
    match weights {
        Some(file) => file.load(&model, engine)?,
        None => initialise(&model, engine, config.seed)?,
    }
    if let Some(out) = &config.out {
        atomic::create_directory(out)?;
        config.save(out)?;
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
        log: Log::create(config.out.as_deref())?,
    };
    let outcome = run.train()?;
    run.console.line(&summary(&outcome, config.total_batch, started.elapsed(), config.out.as_deref()))?;
    run.console.line(&format!("\nnext: {}", next_command(&config, &outcome)))
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
        val_every: every(config.val_every),
        val_batches: config.val_batches,
        sample_every: every(config.sample_every),
        sample_tokens: config.sample_length,
        checkpoint_every: config.out.as_ref().and(every(config.checkpoint_every)),
        out: config.out.clone(),
    }
}

fn next_command(config: &Config, outcome: &Outcome) -> String {
    match &outcome.model_file {
        Some(file) => format!("{PROGRAM} sample --model {} --prompt 'Once upon a time'", file.display()),
        None if config.train.is_some() => "the same with --out DIR, to keep the log and the model".to_owned(),
        None => format!("{PROGRAM} data tinyshakespeare"),
    }
}
