//! Data parallelism: overlaps collective communication with the forward and backward passes.
//!
//! Gradients are reduced, and under ZeRO-3 parameters gathered, on a stream of their own. The parameters of a layer are gathered
//! while the previous layer is computed. The gradients of a layer are reduced while the layer below is computed. Each
//! collective waits only for the work launched before it. The engine waits for it only when the next collective is already
//! launched.
//!
//! With several shard groups, the collectives of ZeRO stay in a group. After the last micro-batch, each shard of the gradients is
//! also averaged over its replicas.

use super::decoder::{Decoder, Training};
use super::fp8::Fp8;
use super::params::Unit;
use super::sharding::{Interrupted, LayerHooks};
use anyhow::Context;
use distributed::tcp_group::Reduction;
use distributed::{Ranks, Scope, Transfer};
use engine::tensor::Sharded;
use engine::{Engine, Result};

/// State of the two buffers that alternate between layers, see [`sharding`](crate::sharding).
#[derive(Debug, Default)]
pub struct LayerBuffers {
    /// The layer whose parameters are in a buffer, or are being gathered into it.
    parameters: [Option<usize>; 2],
    /// The gather is in flight: the engine does not wait for it yet.
    gathering: [bool; 2],
    /// The reduction of a layer's gradients is in flight: the engine does not wait for it yet.
    reducing: [bool; 2],
    /// Whether the copy of the parameters before the layers is valid.
    holds_embeddings: bool,
}

/// Communicates on behalf of a model's passes.
pub struct DataParallel<'a> {
    /// The model.
    pub model: &'a Decoder,
    /// The ranks of the run.
    pub ranks: &'a mut Ranks,
    /// State of the layer buffers.
    pub buffers: &'a mut LayerBuffers,
    /// Whether gradients are complete after this pass: it is the last micro-batch of a step.
    pub last: bool,
    /// Request that ends an evaluation early.
    pub stop: StopRequest<'a>,
}

/// A request to end an evaluation early. The functions return whether this rank has got one.
#[derive(Clone, Copy)]
pub enum StopRequest<'a> {
    /// There is none.
    Never,
    /// Only this rank evaluates.
    OfThisRank(&'a dyn Fn() -> bool),
    /// All ranks evaluate, and all end after the same batch.
    OfAnyRank(&'a dyn Fn() -> bool),
}

impl DataParallel<'_> {
    /// Reports whether the passes of a micro-batch communicate.
    pub fn communicates(&self) -> bool {
        if self.model.copies_ahead() {
            true
        } else if self.last {
            !matches!(self.ranks, Ranks::Single) || self.model.zero.is_sharded()
        } else {
            self.model.zero.passes_communicate()
        }
    }

    /// Orders all work launched from now on after all communication so far.
    pub fn wait_on_stream(&mut self, engine: &mut dyn Engine) -> Result<()> {
        self.buffers.gathering = [false; 2];
        self.buffers.reducing = [false; 2];
        engine.wait_for_copies()?;
        self.ranks.wait_on_stream(engine)
    }

    /// Computes the step's loss, summed over the ranks, and the gradient norm in the model's stats.
    pub fn measure(&mut self, engine: &mut dyn Engine) -> Result<()> {
        let Training { stats, squares, .. } = self.training()?;
        self.model.measure(engine)?;
        self.ranks.all_reduce_sum(engine, Scope::World, stats.slice(0, 1))?;
        if let Some(squares) = squares {
            self.ranks.all_reduce_sum(engine, Scope::ShardGroup, squares)?;
            // Groups may sum in different orders, but all ranks must clip by the same norm.
            self.ranks.all_reduce_max(engine, Scope::Replicas, squares)?;
        }
        for amaxes in self.model.fp8.iter().flat_map(Fp8::shared_amaxes) {
            self.ranks.all_reduce_max(engine, Scope::World, amaxes)?;
        }
        self.wait_on_stream(engine)?;
        self.model.finish_norm(engine)
    }

    fn training(&self) -> Result<Training> {
        self.model.training.context("this model was planned for inference only")
    }

    /// Begins to reduce the gradients of `unit` to this rank's shard: over the shard group, and if they are complete, over the replicas.
    fn reduce_to_shard(&mut self, engine: &mut dyn Engine, unit: Unit) -> Result<()> {
        let training = self.training()?;
        let of = self.model.grad_store(&training).sharded(unit);
        let reduction = if self.model.zero.passes_communicate() { Reduction::Sum } else { Reduction::Mean };
        self.ranks.set_part(|| unit.to_string());
        self.ranks.reduce_scatter(engine, of, reduction)?;
        if self.last { self.average_shard(engine, unit) } else { Ok(()) }
    }

    /// Begins to average this rank's shard of the gradients of `unit` over the replicas.
    fn average_shard(&mut self, engine: &mut dyn Engine, unit: Unit) -> Result<()> {
        let training = self.training()?;
        self.ranks.set_part(|| unit.to_string());
        self.ranks.all_reduce_mean(engine, Scope::Replicas, self.model.grad_store(&training).own(unit))
    }

    /// Begins to gather the parameters of `layer` unless its buffer has them. No later launch may use that buffer for another layer.
    fn gather(&mut self, engine: &mut dyn Engine, layer: usize) -> Result<()> {
        let parity = layer % 2;
        if self.buffers.parameters[parity] == Some(layer) {
            return Ok(());
        }
        let (store, unit) = (self.model.param_store(), Unit::Layer(layer));
        if self.model.zero.shards_parameters() {
            self.ranks.set_part(|| unit.to_string());
            self.ranks.all_gather(engine, store.sharded(unit))?;
        } else {
            engine.copy_ahead(store.unit(unit), store.own(unit))?;
        }
        self.buffers.parameters[parity] = Some(layer);
        self.buffers.gathering[parity] = true;
        Ok(())
    }
}

impl LayerHooks for DataParallel<'_> {
    fn between_batches(&mut self) -> Result<()> {
        let stop = match self.stop {
            StopRequest::Never => false,
            StopRequest::OfThisRank(requested) => requested(),
            StopRequest::OfAnyRank(requested) => self.ranks.any_rank(requested())?,
        };
        if stop { Err(Interrupted.into()) } else { Ok(()) }
    }

    fn gather_embeddings(&mut self, engine: &mut dyn Engine) -> Result<()> {
        let Some([to, from]) = self.model.param_store().copy_of_embeddings() else { return Ok(()) };
        if !self.buffers.holds_embeddings {
            engine.copy(to, from)?;
            self.buffers.holds_embeddings = true;
        }
        Ok(())
    }

    fn gather_parameters(&mut self, engine: &mut dyn Engine, layer: usize, next: Option<usize>) -> Result<()> {
        if !self.model.copies_layers() {
            return Ok(());
        }
        self.gather(engine, layer)?;
        if self.buffers.gathering[layer % 2] {
            if self.model.zero.shards_parameters() {
                self.wait_on_stream(engine)?;
            } else {
                self.wait_for_copies(engine)?;
            }
        }
        next.map_or(Ok(()), |next| self.gather(engine, next))
    }

    fn common_rows(&mut self, rows: usize) -> Result<usize> {
        // The micro-batches of a step have the same size on all ranks.
        let differ = self.model.zero.shares_experts() && !matches!(self.stop, StopRequest::Never);
        if differ { self.ranks.largest(rows) } else { Ok(rows) }
    }

    fn gather_tokens(&mut self, engine: &mut dyn Engine, layer: usize, of: Sharded) -> Result<()> {
        self.ranks.set_part(|| format!("the tokens of layer {layer}"));
        self.ranks.gather_tokens(engine, of)
    }

    fn reduce_tokens(&mut self, engine: &mut dyn Engine, layer: usize, of: Sharded) -> Result<()> {
        self.ranks.set_part(|| format!("the tokens of layer {layer}"));
        self.ranks.reduce_tokens(engine, of)
    }

    fn wait_for_tokens(&mut self, engine: &mut dyn Engine) -> Result<()> {
        self.wait_on_stream(engine)
    }

    fn wait_for_copies(&mut self, engine: &mut dyn Engine) -> Result<()> {
        if !self.model.zero.shards_parameters() {
            self.buffers.gathering = [false; 2];
        }
        engine.wait_for_copies()
    }

    fn begin_gradients(&mut self, engine: &mut dyn Engine, layer: usize) -> Result<()> {
        if !self.model.zero.shards_gradients() {
            return Ok(());
        }
        if self.buffers.reducing[layer % 2] {
            self.wait_on_stream(engine)?;
        }
        let training = self.training()?;
        let (store, unit) = (self.model.grad_store(&training), Unit::Layer(layer));
        let (whole, own) = (store.unit(unit), store.own(unit));
        engine.zero(whole)?;
        // This rank adds the sum of the earlier micro-batches, which its shard holds, so that the reduction counts it once.
        let shard = self.model.zero.shard();
        engine.copy(whole.part(shard.rank, shard.ranks), own)
    }

    fn gradients_ready(&mut self, engine: &mut dyn Engine, unit: Unit) -> Result<()> {
        match (self.model.zero.stage(), unit) {
            // They are the sums over all tokens of the shard group.
            (_, Unit::ExpertsFc(_) | Unit::ExpertsFcproj(_)) if self.last => self.average_shard(engine, unit),
            (0, _) if self.last => {
                let training = self.training()?;
                self.ranks.set_part(|| unit.to_string());
                self.ranks.all_reduce_mean(engine, Scope::World, self.model.grad_store(&training).unit(unit))
            }
            (2.., Unit::Layer(layer)) => {
                // Waits for the reduction that overlapped this layer; the next one is not waited for yet.
                self.wait_on_stream(engine)?;
                self.reduce_to_shard(engine, unit)?;
                self.buffers.reducing[layer % 2] = true;
                Ok(())
            }
            (1.., _) if self.last => self.reduce_to_shard(engine, unit),
            _ => Ok(()),
        }
    }

    fn parameters_updated(&mut self, engine: &mut dyn Engine, unit: Unit) -> Result<()> {
        if unit.is_of_experts() {
            return Ok(());
        }
        // The copies hold parameters from before the update.
        if self.model.copies_layers() && matches!(unit, Unit::Layer(_)) {
            self.buffers.parameters = [None; 2];
            return Ok(());
        }
        self.buffers.holds_embeddings = false;
        if !self.model.zero.shards_optimizer() {
            return Ok(());
        }
        let store = self.model.param_store();
        self.ranks.set_part(|| unit.to_string());
        self.ranks.all_gather(engine, store.sharded(unit))
    }

    fn exchange(&mut self, engine: &mut dyn Engine, transfers: &[Transfer]) -> Result<()> {
        self.ranks.exchange(engine, transfers)
    }

    fn wait_for_exchanges(&mut self, engine: &mut dyn Engine) -> Result<()> {
        self.wait_on_stream(engine)
    }
}
