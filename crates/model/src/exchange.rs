//! What ranks exchange while a pass goes on: gradients, and where they divide them, parameters.
//!
//! Operations run beside the engine's. A layer's parameters come while the layer before it is computed, its gradients go
//! while the one below is; each waits only for what was queued before it, and is waited for only once what comes next is queued
//! behind it.

use crate::{Gpt2, Layers, Training, Unit, Zero};
use anyhow::Context;
use distributed::Ranks;
use distributed::tcp_group::Reduction;
use engine::{AdamW, BatchLayout, Engine, Recurring, Result};

/// What is in the buffers that layers take turns in, see [`crate::store`].
#[derive(Debug, Default)]
pub struct Turns {
    /// The layer whose parameters are in a buffer, or come.
    parameters: [Option<usize>; 2],
    /// They come: the engine does not wait for them yet.
    coming: [bool; 2],
    /// A layer's gradients go from there: the engine does not wait for that yet.
    going: [bool; 2],
}

pub struct Exchange<'a> {
    pub model: &'a Gpt2,
    pub ranks: &'a mut Ranks,
    pub turns: &'a mut Turns,
    /// Whether gradients are complete after this pass.
    pub last: bool,
}

impl Exchange<'_> {
    /// Forward pass, loss and backward pass of the batch that is loaded, with its seed; `dloss` as [`Gpt2::loss`] has it. Where
    /// nothing is exchanged meanwhile, it is repeated as `recurring`, if that is given: `layout` and `dloss` must be the same each
    /// time. Gives what [`Engine::repeat`] does.
    pub fn micro_step(
        &mut self,
        engine: &mut dyn Engine,
        layout: BatchLayout,
        dloss: f32,
        recurring: Option<&Recurring>,
    ) -> Result<Option<String>> {
        let model = self.model;
        let exchanges = if self.last {
            !matches!(self.ranks, Ranks::Single) || model.zero != Zero::NONE
        } else {
            model.zero.divides_gradients()
        };
        let mut passes = |engine: &mut dyn Engine| {
            model.forward_with(engine, layout, self)?;
            model.loss(engine, layout, Some(dloss))?;
            model.backward_with(engine, layout, self)
        };
        match recurring.filter(|_| !exchanges) {
            Some(recurring) => engine.repeat(recurring, &mut passes),
            None => passes(engine).map(|()| None),
        }
    }

    /// What the engine is given from here on comes after all that was exchanged so far.
    pub fn settle(&mut self, engine: &mut dyn Engine) -> Result<()> {
        self.turns.coming = [false; 2];
        self.turns.going = [false; 2];
        self.ranks.wait_on_stream(engine)
    }

    /// Leaves the step's loss, summed over the ranks, and its gradients' norm in the model's stats.
    pub fn measure(&mut self, engine: &mut dyn Engine) -> Result<()> {
        let Training { stats, squares, .. } = self.training()?;
        self.model.measure(engine)?;
        for sum in [Some(stats.slice(0, 1)), squares].into_iter().flatten() {
            self.ranks.all_reduce_sum(engine, sum)?;
        }
        self.settle(engine)?;
        self.model.take_root(engine)
    }

    /// Updates this rank's part, and gathers what all ranks keep of the others'.
    pub fn apply(&mut self, engine: &mut dyn Engine, settings: &AdamW) -> Result<()> {
        self.model.apply(engine, settings, self)?;
        if self.model.zero.divides_optimizer() { self.settle(engine) } else { Ok(()) }
    }

    fn training(&self) -> Result<Training> {
        self.model.training.context("this model was planned for inference only")
    }

    /// Begins to gather the parameters of `layer`, unless they are there. Nothing that is queued later uses its buffer for
    /// another layer.
    fn fetch(&mut self, engine: &mut dyn Engine, layer: usize) -> Result<()> {
        let turn = layer % 2;
        if self.turns.parameters[turn] == Some(layer) {
            return Ok(());
        }
        let (store, unit) = (self.model.param_store(), Unit::Layer(layer));
        self.ranks.all_gather(engine, store.divided(unit))?;
        self.turns.parameters[turn] = Some(layer);
        self.turns.coming[turn] = true;
        Ok(())
    }
}

impl Layers for Exchange<'_> {
    fn parameters(&mut self, engine: &mut dyn Engine, layer: usize, next: Option<usize>) -> Result<()> {
        if !self.model.zero.divides_parameters() {
            return Ok(());
        }
        self.fetch(engine, layer)?;
        if self.turns.coming[layer % 2] {
            self.settle(engine)?;
        }
        next.map_or(Ok(()), |next| self.fetch(engine, next))
    }

    fn gradients(&mut self, engine: &mut dyn Engine, layer: usize) -> Result<()> {
        if !self.model.zero.divides_gradients() {
            return Ok(());
        }
        if self.turns.going[layer % 2] {
            self.settle(engine)?;
        }
        let training = self.training()?;
        let (store, unit) = (self.model.grad_store(&training), Unit::Layer(layer));
        let (whole, own) = (store.unit(unit), store.own(unit));
        engine.zero(whole)?;
        // What earlier micro-steps have left here is this rank's to add: the sum over the ranks has it once.
        let share = self.model.zero.share();
        engine.copy(whole.part(share.rank, share.ranks), own)
    }

    fn differentiated(&mut self, engine: &mut dyn Engine, unit: Unit) -> Result<()> {
        let training = self.training()?;
        let store = self.model.grad_store(&training);
        match (self.model.zero.stage(), unit) {
            (0, _) if self.last => self.ranks.all_reduce_mean(engine, store.unit(unit)),
            (1, _) if self.last => self.ranks.reduce_scatter(engine, store.divided(unit), Reduction::Mean),
            (2.., Unit::Layer(layer)) => {
                // Waits for what went while this layer was computed; what goes now, for nothing yet.
                self.settle(engine)?;
                self.ranks.reduce_scatter(engine, store.divided(unit), Reduction::Sum)?;
                self.turns.going[layer % 2] = true;
                Ok(())
            }
            (2.., Unit::Embeddings) if self.last => {
                self.ranks.reduce_scatter(engine, store.divided(unit), Reduction::Sum)
            }
            _ => Ok(()),
        }
    }

    fn updated(&mut self, engine: &mut dyn Engine, unit: Unit) -> Result<()> {
        let zero = self.model.zero;
        if !zero.divides_optimizer() {
            return Ok(());
        }
        if zero.divides_parameters() && unit != Unit::Embeddings {
            // What is in the buffers is of before the update.
            self.turns.parameters = [None; 2];
            return Ok(());
        }
        let store = self.model.param_store();
        self.ranks.all_gather(engine, store.divided(unit))
    }
}
