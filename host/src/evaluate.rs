//! The loss on data that is not trained on.

use anyhow::Result;
use data::Prefetch;
use engine::Engine;
use model::{Gpt2, Layers};

pub mod multiple_choice;

/// Mean loss per token over the next `batches` batches of a model whose parameters `layers` has.
pub fn loss(
    model: &Gpt2,
    engine: &mut dyn Engine,
    layers: &mut dyn Layers,
    data: &mut Prefetch,
    batches: usize,
) -> Result<f64> {
    let layout = data.layout();
    engine.zero(model.losses)?;
    for _ in 0..batches {
        data.load_next(engine, model.batch, 0)?;
        model.forward_with(engine, layout, layers)?;
        model.loss(engine, layout, None)?;
    }
    let tokens = layout.b * layout.t;
    let sum: f64 = engine.read(model.losses.slice(0, tokens))?.into_iter().map(f64::from).sum();
    Ok(sum / (batches * tokens) as f64)
}
