//! Locations of a model's values when ranks shard them (ZeRO, Rajbhandari et al. 2020).
//!
//! The ranks of a shard group shard them. If there are several groups (hybrid sharding), each has all values, and the ranks with the
//! same shard are replicas of each other.
//!
//! Each rank keeps one shard of every layer. Passes need whole layers. They find them in two buffers that alternate between
//! layers: layer `l` uses buffer `l % 2`, so that one buffer can be filled or drained while the other is in use.
//!
//! With expert parallelism, the ranks of a shard group share the experts of each layer. A rank computes with its own experts only, for the
//! tokens of all ranks, so nothing gathers them or reduces their gradients over the group.

use super::Descriptor;
use super::descriptor::Experts;
use super::params::{ALIGNMENT, Param, Params, Shard, Unit};
use anyhow::{Context, ensure};
use distributed::Transfer;
use engine::ops::{ExpertRange, Router};
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
    shares_experts: bool,
}

impl Zero {
    /// Every rank keeps everything.
    pub const NONE: Self = Self { stage: 0, shard: Shard::UNSHARDED, shares_experts: false };

    /// Creates a stage. A shard group of one rank shards nothing.
    pub fn new(stage: u8, shard: Shard) -> Self {
        if shard.ranks == 1 || stage == 0 { Self::NONE } else { Self { stage, shard, shares_experts: false } }
    }

    /// Makes the ranks of a shard group share the experts if `on` (expert parallelism). Without sharding, nothing changes.
    pub fn share_experts(self, on: bool) -> Self {
        Self { shares_experts: on && self.is_sharded(), ..self }
    }

    /// Checks that the ranks of a shard group can share the experts of a model, if they should.
    pub fn check(self, descriptor: &Descriptor) -> Result<()> {
        if !self.shares_experts {
            return Ok(());
        }
        let experts = descriptor.experts.context(
            "--expert-parallel: expected a model with experts, found one with a dense MLP; leave the flag out",
        )?;
        ensure!(
            descriptor.adapters.is_none(),
            "--expert-parallel: expected a run that trains all weights, found --lora; leave one of the flags out"
        );
        let (count, ranks) = (experts.count as usize, self.shard.ranks);
        ensure!(
            count.is_multiple_of(ranks),
            "--expert-parallel: expected a number of experts that the {ranks} ranks of a shard group divide, found {count}; use a \
             --shard-size that divides it, or leave the flag out"
        );
        for param in [Param::Fcw, Param::Fcprojw] {
            let elements = param.len(descriptor) / ranks;
            ensure!(
                elements.is_multiple_of(ALIGNMENT),
                "--expert-parallel: expected a multiple of {ALIGNMENT} elements of {} on each of {ranks} ranks, found {elements}; leave \
                 the flag out",
                param.name()
            );
        }
        Ok(())
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

    /// Reports whether the ranks of a shard group share the experts.
    pub fn shares_experts(self) -> bool {
        self.shares_experts
    }

    /// Reports whether the forward passes of the ranks of a shard group communicate, so that all ranks must run equally many.
    pub fn forward_communicates(self) -> bool {
        self.shards_parameters() || self.shares_experts
    }

    /// Reports whether the passes of every micro-batch communicate. Then gradients are sums over the shard group: each micro-batch adds to
    /// sharded gradients, and those of shared experts are sums over the tokens of all ranks. Otherwise gradients are averaged over the
    /// group.
    pub fn passes_communicate(self) -> bool {
        self.shards_gradients() || self.shares_experts
    }

    /// Returns the number of ranks that share experts, and exchange tokens.
    pub fn expert_ranks(self) -> usize {
        if self.shares_experts { self.shard.ranks } else { 1 }
    }

    /// Returns the gradient of each token's loss, where a rank has `tokens` of a step. Gradients are summed or averaged over the shard
    /// group, see [`passes_communicate`](Self::passes_communicate), and averaged over the replicas after the last micro-batch.
    pub fn dloss(self, tokens: usize) -> f32 {
        let summed = if self.passes_communicate() { self.shard.ranks } else { 1 };
        1.0 / (tokens * summed) as f32
    }

    /// Returns the layout of parameters, gradients and optimizer state.
    pub fn layout(self, descriptor: Descriptor) -> Params {
        if self.shares_experts {
            Params::with_shared_experts(descriptor, self.shard)
        } else {
            Params::sharded(descriptor, self.shard)
        }
    }

    /// Returns the router of a model's experts, with those of this rank as the local ones.
    pub fn router(self, experts: &Experts) -> Router {
        let router = experts.router();
        let count = router.count / self.expert_ranks();
        let first = if self.shares_experts { self.shard.rank * count } else { 0 };
        Router { local: ExpertRange { first, count }, ..router }
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
    /// All values, in layout order; of experts that ranks share, this rank's shards.
    Whole,
    /// This rank's shards of all units, one after another.
    Shards,
    /// All embeddings, then this rank's shards of the layers and of shared experts. Passes use copies of the layers.
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
            let experts = (layout.elements() - layout.experts()) / layout.shard().ranks;
            return (plan.add(group, name, &[layout.experts() + experts], dtype), None);
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

    /// Reports whether this rank keeps only its shard of a unit.
    pub fn is_sharded(&self, unit: Unit) -> bool {
        matches!((self.form, unit), (Form::Shards, _) | (Form::Buffered(_), Unit::Layer(_))) || unit.is_of_experts()
    }

    /// Returns a whole unit; for buffered layers, its buffer.
    ///
    /// # Panics
    /// If only shards exist.
    pub fn unit(&self, unit: Unit) -> Tensor {
        let range = self.layout.unit(unit);
        match (self.form, unit) {
            (Form::Shards, _) | (_, Unit::ExpertsFc(_) | Unit::ExpertsFcproj(_)) => {
                panic!("{unit:?} is sharded: no rank has all of it")
            }
            (Form::Buffered(copies), Unit::Layer(layer)) => copies.layers.part(layer % 2, 2).slice(0, range.len()),
            (Form::Buffered(Copies { embeddings: Some(embeddings), .. }), _) => {
                embeddings.slice(range.start, range.len())
            }
            _ => self.kept.slice(range.start, range.len()),
        }
    }

    /// Returns the values that all ranks have, and this rank's shards of the others. Either may be empty.
    ///
    /// # Panics
    /// If only shards exist.
    pub fn replicated_and_own(&self) -> [Tensor; 2] {
        let replicated = match self.form {
            Form::Shards => panic!("the values are sharded: no rank has all of them"),
            Form::Whole => self.layout.experts(),
            Form::Buffered(_) if self.layout.shard().ranks == 1 => self.kept.len,
            Form::Buffered(_) => self.layout.embeddings(),
        };
        [self.kept.slice(0, replicated), self.kept.slice(replicated, self.kept.len - replicated)]
    }

    /// Returns the copy of everything before the layers and its source, if the values are in the host's memory.
    pub(super) fn copy_of_embeddings(&self) -> Option<[Tensor; 2]> {
        let Form::Buffered(Copies { embeddings, .. }) = self.form else { return None };
        Some([embeddings?, self.kept.slice(0, self.layout.embeddings())])
    }

    /// Returns a whole tensor in its [`unit`](Self::unit), or the part of this rank's experts if ranks share them.
    pub fn tensor(&self, param: Param, layer: usize) -> Tensor {
        let (range, unit) = (self.layout.range(param, layer), self.layout.unit_of(param, layer));
        if unit.is_of_experts() {
            return self.own(unit);
        }
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
        // Units before `whole` are kept as a whole, and shards of the others follow.
        let whole = match self.form {
            Form::Shards => 0,
            Form::Buffered(_) => self.layout.embeddings(),
            Form::Whole => self.layout.experts(),
        };
        let at = if start < whole { own.start } else { whole + (start - whole) / ranks };
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
                let own = self.layout.units().filter(|unit| !self.is_sharded(*unit)).map(|unit| self.own(unit));
                own.chain([self.kept.slice(embeddings, self.kept.len - embeddings)]).collect()
            }
        }
    }

    /// Returns the elements of a tensor that this rank keeps between steps, and where they are.
    pub fn held(&self, param: Param, layer: usize) -> Option<(Range<usize>, Tensor)> {
        let (range, unit) = (self.layout.range(param, layer), self.layout.unit_of(param, layer));
        if !self.is_sharded(unit) {
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

    /// Returns the largest number of rows that a rank has in this forward pass, if ranks exchange tokens.
    fn common_rows(&mut self, rows: usize) -> Result<usize> {
        Ok(rows)
    }

    /// Begins to gather the values of the tokens of all ranks that share the experts of `layer`.
    fn gather_tokens(&mut self, _engine: &mut dyn Engine, _layer: usize, _of: Sharded) -> Result<()> {
        Ok(())
    }

    /// Begins to sum the values of the tokens of all ranks that share the experts of `layer`. This rank's part is of its own tokens.
    fn reduce_tokens(&mut self, _engine: &mut dyn Engine, _layer: usize, _of: Sharded) -> Result<()> {
        Ok(())
    }

    /// Called before the pass reads what it has gathered or reduced, and before it overwrites the source.
    fn wait_for_tokens(&mut self, _engine: &mut dyn Engine) -> Result<()> {
        Ok(())
    }

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
