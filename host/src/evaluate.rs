//! The loss on data that is not trained on.

use anyhow::Result;
use data::Prefetch;
use engine::Engine;
use model::{Decoder, LayerHooks};
use system::progress::{self, Unit};

pub mod multiple_choice;
pub mod predictions;
pub mod text;

/// Returns a note if an evaluation should read more batches than there are in an epoch. It ends with the data.
pub fn excess_batches(wanted: usize, found: usize) -> Option<String> {
    (wanted > found).then(|| format!("--val-batches {wanted}: the data has {found} batches; all of them are used"))
}

/// Mean loss per token over the next `batches` batches of a model. `hooks` provides the parameters.
pub fn loss(
    model: &Decoder,
    engine: &mut dyn Engine,
    hooks: &mut dyn LayerHooks,
    data: &mut Prefetch,
    batches: usize,
) -> Result<f64> {
    let layout = data.layout();
    engine.zero(model.losses)?;
    let progress = progress::start("validation", Unit::Count, batches as u64);
    for _ in 0..batches {
        data.load_next(engine, model.batch, 0)?;
        model.forward(engine, layout, hooks)?;
        model.loss(engine, layout, None)?;
        progress.add(1);
    }
    let tokens = layout.b * layout.t;
    let sum: f64 = engine.read(model.losses.slice(0, tokens))?.into_iter().map(f64::from).sum();
    Ok(sum / (batches * tokens) as f64)
}
