//! Locations of a model's values when ranks shard them (ZeRO, Rajbhandari et al. 2020).
//!
//! The ranks of a shard group shard them. If there are several groups (hybrid sharding), each has all values, and the ranks with the
//! same shard are replicas of each other.
//!
//! Each rank keeps one shard of every layer. Passes need whole layers. They find them in two buffers that alternate between
//! layers: layer `l` uses buffer `l % 2`, so that one buffer can be filled or drained while the other is in use.

use super::Descriptor;
use super::params::{Param, Params, Shard, Unit};
use distributed::Transfer;
use engine::plan::{Group, Location, Plan};
use engine::tensor::{DType, Sharded, Tensor};
use engine::{Engine, Result};
use std::ops::Range;

/// The ZeRO stage of a run and this rank's shard: its place in its shard group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zero {
    /// 0: nothing; 1: optimizer state; 2: gradients as well; 3: parameters as well.
    stage: u8,
    shard: Shard,
}

impl Zero {
    /// Every rank keeps everything.
    pub const NONE: Self = Self { stage: 0, shard: Shard::UNSHARDED };

    /// Creates a stage. A shard group of one rank shards nothing.
    pub fn new(stage: u8, shard: Shard) -> Self {
        if shard.ranks == 1 || stage == 0 { Self::NONE } else { Self { stage, shard } }
    }

    /// Returns the stage.
    pub fn stage(self) -> u8 {
        self.stage
    }

    /// Returns this rank's shard.
    pub fn shard(self) -> Shard {
        self.shard
    }

    /// Reports whether anything is sharded.
    pub fn is_sharded(self) -> bool {
        self.stage > 0
    }

    /// Reports whether ranks shard the optimizer state.
    pub fn shards_optimizer(self) -> bool {
        self.stage >= 1
    }

    /// Reports whether ranks shard the gradients.
    pub fn shards_gradients(self) -> bool {
        self.stage >= 2
    }

    /// Reports whether ranks shard the parameters.
    pub fn shards_parameters(self) -> bool {
        self.stage >= 3
    }

    /// Returns the gradient of each token's loss, where a rank has `tokens` of a step. Sharded gradients are summed over the shard group
    /// after every micro-batch, and averaged over the replicas after the last one. Others are averaged over all ranks after the last one.
    pub fn dloss(self, tokens: usize) -> f32 {
        let summed = if self.shards_gradients() { self.shard.ranks } else { 1 };
        1.0 / (tokens * summed) as f32
    }

    /// Returns the layout of parameters, gradients and optimizer state.
    pub fn layout(self, descriptor: Descriptor) -> Params {
        Params::sharded(descriptor, self.shard)
    }
}

/// A value for every parameter: parameters, gradients, moments or master weights.
#[derive(Clone, Copy, Debug)]
pub struct Store<'a> {
    layout: &'a Params,
    kept: Tensor,
    form: Form,
}

#[derive(Clone, Copy, Debug)]
enum Form {
    /// All values, in layout order.
    Whole,
    /// This rank's shards of all units, one after another.
    Shards,
    /// All embeddings, then this rank's shards of the layers. Passes use copies.
    Buffered(Copies),
}

/// Copies of values, which passes use.
#[derive(Clone, Copy, Debug)]
pub struct Copies {
    /// Whole layers pass through the halves of this buffer.
    layers: Tensor,
    /// Everything before the layers, if the values are in the host's memory.
    embeddings: Option<Tensor>,
}

impl<'a> Store<'a> {
    /// Plans the memory of parameters or gradients and, if ranks shard them, the buffer that whole layers pass through.
    pub(super) fn plan(
        plan: &mut Plan,
        (group, name): (Group, &str),
        layout: &Params,
        dtype: DType,
        sharded: bool,
        location: Location,
    ) -> (Tensor, Option<Copies>) {
        let is_on_host = location == Location::Host;
        if !sharded && !is_on_host {
            return (plan.add(group, name, &[layout.elements()], dtype), None);
        }
        let embeddings = layout.embeddings();
        let layers = (layout.elements() - embeddings) / if sharded { layout.shard().ranks } else { 1 };
        let kept = plan.add_in(location, group, name, &[embeddings + layers], dtype);
        let copies = Copies {
            layers: plan.add(group, format!("{name} of two layers"), &[2, layout.largest_layer()], dtype),
            embeddings: is_on_host.then(|| plan.add(group, format!("{name} before the layers"), &[embeddings], dtype)),
        };
        (kept, Some(copies))
    }

    /// Creates a view of values that are whole, or sharded with a buffer for whole layers.
    pub(super) fn whole_or_buffered(layout: &'a Params, kept: Tensor, copies: Option<Copies>) -> Self {
        Self { layout, kept, form: copies.map_or(Form::Whole, Form::Buffered) }
    }

    /// Creates a view of this rank's shards.
    pub(super) fn shards(layout: &'a Params, kept: Tensor) -> Self {
        Self { layout, kept, form: Form::Shards }
    }

    /// Returns the elements of a rank's shards of all units.
    pub(super) fn shard_elements(layout: &Params) -> usize {
        layout.elements() / layout.shard().ranks
    }

    /// Returns a whole unit; for buffered layers, its buffer.
    ///
    /// # Panics
    /// If only shards exist.
    pub fn unit(&self, unit: Unit) -> Tensor {
        let range = self.layout.unit(unit);
        match (self.form, unit) {
            (Form::Shards, _) => panic!("{unit:?} is sharded: no rank has all of it"),
            (Form::Buffered(copies), Unit::Layer(layer)) => copies.layers.part(layer % 2, 2).slice(0, range.len()),
            (Form::Buffered(Copies { embeddings: Some(embeddings), .. }), _) => {
                embeddings.slice(range.start, range.len())
            }
            _ => self.kept.slice(range.start, range.len()),
        }
    }

    /// Returns everything before the layers.
    ///
    /// # Panics
    /// If only shards exist.
    pub fn embeddings(&self) -> Tensor {
        assert!(!matches!(self.form, Form::Shards), "the embeddings are sharded: no rank has all of them");
        self.kept.slice(0, self.layout.embeddings())
    }

    /// Returns the copy of everything before the layers and its source, if the values are in the host's memory.
    pub(super) fn copy_of_embeddings(&self) -> Option<[Tensor; 2]> {
        let Form::Buffered(Copies { embeddings, .. }) = self.form else { return None };
        Some([embeddings?, self.kept.slice(0, self.layout.embeddings())])
    }

    /// Returns a whole tensor in its [`unit`](Self::unit).
    pub fn tensor(&self, param: Param, layer: usize) -> Tensor {
        let (range, unit) = (self.layout.range(param, layer), self.layout.unit_of(param, layer));
        self.unit(unit).slice(range.start - self.layout.unit(unit).start, range.len())
    }

    /// Returns a unit and this rank's shard of it.
    pub fn sharded(&self, unit: Unit) -> Sharded {
        Sharded { whole: self.unit(unit), shard: self.own(unit) }
    }

    /// Returns this rank's shard of a unit, padding included.
    pub fn own(&self, unit: Unit) -> Tensor {
        let (own, start) = (self.layout.own(unit), self.layout.unit(unit).start);
        let ranks = self.layout.shard().ranks;
        let embeddings = self.layout.embeddings();
        let at = match (self.form, unit) {
            (Form::Shards, _) => start / ranks,
            (Form::Buffered(_), Unit::Layer(_)) => embeddings + (start - embeddings) / ranks,
            _ => own.start,
        };
        self.kept.slice(at, own.len())
    }

    /// Returns elements of the layout that lie in this rank's shard of `unit`.
    pub fn at(&self, unit: Unit, elements: Range<usize>) -> Tensor {
        self.own(unit).slice(elements.start - self.layout.own(unit).start, elements.len())
    }

    /// Returns all units in layout order.
    ///
    /// # Panics
    /// If ranks shard them.
    pub fn all(&self) -> Tensor {
        assert_eq!(self.kept.len, self.layout.elements(), "the values are sharded: no rank has all of them");
        self.kept
    }

    /// Returns tensors that together hold this rank's shards of all units.
    pub fn all_own(&self) -> Vec<Tensor> {
        match self.form {
            Form::Shards => vec![self.kept],
            Form::Whole => self.layout.units().map(|unit| self.own(unit)).collect(),
            Form::Buffered(_) => {
                let embeddings = self.layout.embeddings();
                let own = self.layout.units().filter(|unit| !matches!(unit, Unit::Layer(_))).map(|unit| self.own(unit));
                own.chain([self.kept.slice(embeddings, self.kept.len - embeddings)]).collect()
            }
        }
    }

    /// Returns the elements of a tensor that this rank keeps between steps, and where they are.
    pub fn held(&self, param: Param, layer: usize) -> Option<(Range<usize>, Tensor)> {
        let (range, unit) = (self.layout.range(param, layer), self.layout.unit_of(param, layer));
        let of_layer = matches!(unit, Unit::Layer(_));
        if matches!((self.form, of_layer), (Form::Whole, _) | (Form::Buffered(_), false)) {
            return Some((0..range.len(), self.kept.slice(range.start, range.len())));
        }
        let own = self.layout.own(unit);
        let held = range.start.max(own.start)..range.end.min(own.end);
        (!held.is_empty()).then(|| (held.start - range.start..held.end - range.start, self.at(unit, held)))
    }

    /// Writes the values of a tensor that this rank keeps.
    pub fn write(&self, engine: &mut dyn Engine, param: Param, layer: usize, values: &[f32]) -> Result<()> {
        match self.held(param, layer) {
            Some((elements, to)) => engine.write(to, &values[elements]),
            None => Ok(()),
        }
    }
}

/// Callbacks of a pass at the boundaries of layers: they provide parameters and take gradients.
pub trait LayerHooks {
    /// Called between the batches of an evaluation. Fails with [`Interrupted`] if a stop was requested.
    fn between_batches(&mut self) -> Result<()> {
        Ok(())
    }

    /// Called before the pass reads the parameters outside of layers.
    fn gather_embeddings(&mut self, _engine: &mut dyn Engine) -> Result<()> {
        Ok(())
    }

    /// Called before the pass reads the parameters of `layer`, possibly several times until it is called for another layer. The
    /// pass will read those of `next` afterwards.
    fn gather_parameters(&mut self, engine: &mut dyn Engine, layer: usize, next: Option<usize>) -> Result<()>;

    /// Called when the queries, keys and values `qkv` (B, T, NH + 2 KV, HS) of a layer are complete, before its attention. Generation copies
    /// keys and values to its cache. If the batch continues a sequence, `qkv` begins with the rows of its past, which the callback provides.
    fn qkv_computed(&mut self, _engine: &mut dyn Engine, _layer: usize, _qkv: Tensor) -> Result<()> {
        Ok(())
    }

    /// Called before the pass adds to the gradients of `layer`. It still adds to those of the layer above until these are
    /// [ready](Self::gradients_ready).
    fn begin_gradients(&mut self, engine: &mut dyn Engine, layer: usize) -> Result<()>;

    /// Called when the pass will not change the gradients of `unit` again.
    fn gradients_ready(&mut self, engine: &mut dyn Engine, unit: Unit) -> Result<()>;

    /// Called when this rank's shard of `unit` is updated.
    fn parameters_updated(&mut self, engine: &mut dyn Engine, unit: Unit) -> Result<()>;

    /// Called with parts of Muon's update that this rank, or another one, has computed. The pass reads the received ones after
    /// [`wait_for_exchanges`](Self::wait_for_exchanges).
    fn exchange(&mut self, _engine: &mut dyn Engine, _transfers: &[Transfer]) -> Result<()> {
        Ok(())
    }

    /// Called before the pass uses tensors that [`Engine::copy_ahead`] copies.
    fn wait_for_copies(&mut self, engine: &mut dyn Engine) -> Result<()> {
        engine.wait_for_copies()
    }

    /// Called before the pass reads what it has exchanged.
    fn wait_for_exchanges(&mut self, _engine: &mut dyn Engine) -> Result<()> {
        Ok(())
    }
}

/// The error of an evaluation that a stop request has ended early. Its results are incomplete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a stop was requested during an evaluation")]
pub struct Interrupted;

/// The hooks of a model that is not sharded: they do nothing.
#[derive(Clone, Copy, Debug)]
pub struct Unsharded;

impl LayerHooks for Unsharded {
    fn gather_parameters(&mut self, _: &mut dyn Engine, _: usize, _: Option<usize>) -> Result<()> {
        Ok(())
    }

    fn begin_gradients(&mut self, _: &mut dyn Engine, _: usize) -> Result<()> {
        Ok(())
    }

    fn gradients_ready(&mut self, _: &mut dyn Engine, _: Unit) -> Result<()> {
        Ok(())
    }

    fn parameters_updated(&mut self, _: &mut dyn Engine, _: Unit) -> Result<()> {
        Ok(())
    }
}
