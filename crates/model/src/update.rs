//! The optimizer update: gradient norm, clipping and AdamW.

use super::decoder::Decoder;
use super::sharding::{LayerHooks, Store};
use engine::ops::{AdamW, AdamWUpdate, GlobalNorm, SquareRoot, SquaredSum, Sum};
use engine::{Engine, Result};

impl Decoder {
    /// Computes the sum of `losses` in `stats[0]` and the gradient norm in `stats[1]`.
    ///
    /// If ranks shard the update, it computes the squared norm of this rank's shard in `squares` instead; after the sum over
    /// the ranks, [`finish_norm`](Self::finish_norm) completes the norm.
    pub fn measure(&self, engine: &mut dyn Engine) -> Result<()> {
        let training = self.training()?;
        engine.run(Sum { out: training.stats.slice(0, 1), values: self.losses })?;
        match training.squares {
            Some(out) => engine.run(SquaredSum { out, values: &self.grad_store(training).all_own() }),
            None => engine.run(GlobalNorm { norm: training.stats.slice(1, 1), grads: training.grads }),
        }
    }

    /// Computes the square root of `squares`, if present, in `stats[1]`.
    pub fn finish_norm(&self, engine: &mut dyn Engine) -> Result<()> {
        let training = self.training()?;
        let Some(value) = training.squares else { return Ok(()) };
        engine.run(SquareRoot { out: training.stats.slice(1, 1), value })
    }

    /// Clips the gradients by the measured norm and applies AdamW to this rank's shard, with weight decay on matrices and
    /// embeddings only. Nothing changes unless loss and norm are finite.
    ///
    /// If ranks shard the update, it proceeds unit by unit and calls `hooks` after each.
    pub fn apply_adamw(&self, engine: &mut dyn Engine, settings: &AdamW, hooks: &mut dyn LayerHooks) -> Result<()> {
        let training = self.training()?;
        let sharded = self.zero.shards_optimizer();
        let ranges = self.layout.decay_ranges();
        for ranges in ranges.chunk_by(|a, b| !sharded || a.unit == b.unit) {
            let unit = sharded.then_some(ranges[0].unit);
            let own = unit.map_or(0..self.layout.elements(), |unit| self.layout.own(unit));
            let of = |store: Store| unit.map_or_else(|| store.all(), |unit| store.own(unit));
            let state = |tensor| of(self.state_store(tensor));
            let own_ranges: Vec<_> = ranges.iter().filter_map(|range| range.within(&own)).collect();
            engine.run(AdamWUpdate {
                params: of(self.param_store()),
                grads: of(self.grad_store(training)),
                m: state(training.m),
                v: state(training.v),
                master: training.master.map(state),
                ranges: &own_ranges,
                stats: training.stats,
                settings: *settings,
            })?;
            for ranges in ranges.chunk_by(|a, b| a.unit == b.unit) {
                hooks.parameters_updated(engine, ranges[0].unit)?;
            }
        }
        Ok(())
    }
}
