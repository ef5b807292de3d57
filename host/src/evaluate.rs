//! Evaluations of a model on data that it is not trained on: its loss, and its answers to questions.

use anyhow::Result;
use data::Prefetch;
use engine::Engine;
use model::{Decoder, LayerHooks};
use std::collections::VecDeque;
use system::progress::{self, Unit};

pub mod core;
pub mod exact_match;
pub mod multiple_choice;
pub mod predictions;
pub mod questions;
pub mod text;

/// Batches that are launched before an evaluation waits for the first one, so that a stop request ends it soon.
const AHEAD: usize = 2;

/// Returns a note if an evaluation should read more batches than there are in an epoch. It ends with the data.
pub fn excess_batches(wanted: usize, found: usize) -> Option<String> {
    (wanted > found).then(|| format!("--val-batches {wanted}: the data has {found} batches; all of them are used"))
}

/// Returns the sum of the losses over the next `batches` batches of a model, and the number of targets that are not masked. `hooks` provides the parameters, and may end the evaluation
/// between two batches.
pub fn loss(
    model: &Decoder,
    engine: &mut dyn Engine,
    hooks: &mut dyn LayerHooks,
    data: &mut Prefetch,
    batches: usize,
) -> Result<[f64; 2]> {
    let layout = data.layout();
    engine.zero(model.losses)?;
    let progress = progress::start("validation", Unit::Count, batches as u64);
    let (mut queued, mut targets) = (VecDeque::new(), 0);
    for _ in 0..batches {
        hooks.between_batches()?;
        targets += data.load_next(engine, model.batch, 0)?.targets;
        model.forward(engine, layout, hooks)?;
        model.loss(engine, layout, None)?;
        queued.push_back(engine.read_async(model.losses.slice(0, 1))?);
        if queued.len() > AHEAD
            && let Some(oldest) = queued.pop_front()
        {
            engine.wait(oldest)?;
        }
        progress.add(1);
    }
    for read in queued {
        engine.wait(read)?;
    }
    let tokens = layout.b * layout.t;
    let sum: f64 = engine.read(model.losses.slice(0, tokens))?.into_iter().map(f64::from).sum();
    Ok([sum, targets as f64])
}
