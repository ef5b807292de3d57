//! The order in which the trainer computes and communicates (`model::data_parallel`, `model::TrainStep`), as a simulation of the compute
//! and the communication stream of one rank.
//!
//! A collective starts when the work before it and the collectives before it are complete. The compute stream waits where the trainer
//! waits. While a collective runs, kernels are slower, because they share SMs and memory with it.

use crate::cluster::{Cluster, Members};
use crate::compute::Compute;
use crate::links::{Algorithm, Links, Operation};
use model::params::Params;
use model::{Descriptor, Muon, Optimizer, Param, ParamKind, Recompute, Unit, Zero};
use serde::Serialize;

/// Measured loss of kernels beside collectives, as a multiple of the time of the collectives: two H200 with NVLink
/// (docs/internals/scaling.md).
pub const SLOWDOWN: f64 = 1.5;

/// The name of the tensors that ranks exchange in Muon's update.
const UPDATES: &str = "updates of matrices";

/// The ranks of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// All ranks.
    World,
    /// The ranks of a shard group.
    ShardGroup,
    /// The ranks with the same shard.
    Replicas,
}

/// One step of a run.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// The layout of parameters and gradients, sharded as in the run.
    pub layout: &'a Params,
    /// Bytes of a parameter or gradient.
    pub element_bytes: usize,
    /// ZeRO stage; 0 if the shards have one rank.
    pub stage: u8,
    /// Optimizer of the layers' matrices.
    pub optimizer: Optimizer,
    /// Micro-batches of a rank.
    pub micro_batches: usize,
    /// Set if the ranks of a shard group share the experts.
    pub tokens: Option<TokenExchange>,
    /// The cluster.
    pub cluster: Cluster,
    /// Its connections.
    pub links: &'a Links,
    /// The times of one GPU.
    pub compute: Compute,
    /// Parts of the time of a micro-batch.
    pub passes: Passes,
    /// Time that kernels lose while a collective runs, as a multiple of the collective's time.
    pub slowdown: f64,
}

/// The values of tokens that the ranks of a shard group exchange in each layer, if they share the experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenExchange {
    /// Elements of the residual stream of all tokens.
    channels: usize,
    /// Elements of the router's logits of all tokens.
    logits: usize,
    /// Bytes of the gradients of all choices.
    choices: usize,
    recompute: Recompute,
}

impl TokenExchange {
    /// Returns the exchange of a micro-batch of `tokens` tokens on each rank.
    pub fn new(descriptor: &Descriptor, zero: Zero, tokens: usize, recompute: Recompute) -> Self {
        let tokens = zero.expert_ranks() * tokens;
        let active = descriptor.experts.map_or(0, |experts| experts.active as usize);
        Self {
            channels: tokens * descriptor.channels,
            logits: tokens * descriptor.experts.map_or(0, |experts| experts.count as usize),
            choices: tokens * active * size_of::<f32>(),
            recompute,
        }
    }
}

/// Parts of the time of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Passes {
    /// The forward pass through one layer.
    pub forward: f64,
    /// The backward pass through one layer, with what it recomputes.
    pub backward: f64,
    /// The head, in both passes.
    pub head: f64,
}

/// The collectives of a step that have the same purpose and size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Collective {
    /// The tensors that are communicated.
    pub part: &'static str,
    /// The operation.
    pub operation: Operation,
    /// The ranks that take part.
    pub scope: Scope,
    /// Their number and their nodes.
    pub members: Members,
    /// The fastest algorithm.
    pub algorithm: Algorithm,
    /// Number in a step.
    pub times: f64,
    /// Bytes of one, of the whole.
    pub bytes: usize,
    /// Time of one in seconds.
    pub seconds_each: f64,
    /// Time of a step in which the GPU waits for them.
    pub exposed_seconds: f64,
}

/// The predicted times of a step, in seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Timeline {
    /// The step.
    pub step: f64,
    /// Computing without communication.
    pub compute: f64,
    /// Additional time of kernels because collectives run at the same time.
    pub slowed: f64,
    /// Waiting for collectives inside a node.
    pub exposed_intra: f64,
    /// Waiting for collectives between nodes.
    pub exposed_inter: f64,
    /// Sum of all collectives, hidden or not.
    pub communication: f64,
    /// The collectives.
    pub collectives: Vec<Collective>,
}

impl Timeline {
    /// Returns the part of the communication that computing hides.
    pub fn hidden(&self) -> f64 {
        if self.communication > 0.0 {
            1.0 - (self.exposed_intra + self.exposed_inter) / self.communication
        } else {
            0.0
        }
    }
}

/// Simulates a step.
pub fn simulate(step: &Step) -> Timeline {
    /// Micro-batches that differ: the first, whose parameters are not gathered yet, the second, those in the middle, and the last.
    const DISTINCT: usize = 4;
    let mut simulation = Simulation {
        step,
        now: 0.0,
        idle_at: 0.0,
        running: Vec::new(),
        weight: 1.0,
        parameters: [None; 2],
        gathering: [false; 2],
        timeline: Timeline::default(),
    };
    let simulated = step.micro_batches.min(DISTINCT);
    for micro_batch in 1..=simulated {
        let repeated = step.micro_batches - simulated;
        simulation.weight = if micro_batch == DISTINCT - 1 { (1 + repeated) as f64 } else { 1.0 };
        simulation.micro_batch(micro_batch == simulated);
    }
    simulation.weight = 1.0;
    simulation.wait();
    simulation.measure();
    simulation.update();
    simulation.timeline
}

struct Simulation<'a> {
    step: &'a Step<'a>,
    /// Time of the compute stream.
    now: f64,
    /// Time at which the communication stream has nothing left to do.
    idle_at: f64,
    /// Collectives that the compute stream has not waited for: start, end, and index in the timeline.
    running: Vec<(f64, f64, usize)>,
    /// Number of micro-batches that the simulated one stands for.
    weight: f64,
    /// The layers whose parameters the buffers of ZeRO-3 have.
    parameters: [Option<usize>; 2],
    /// Whether the compute stream has not waited for them yet.
    gathering: [bool; 2],
    timeline: Timeline,
}

impl Simulation<'_> {
    fn advance(&mut self, seconds: f64) {
        self.now += seconds;
        self.timeline.step += self.weight * seconds;
    }

    /// Computes for `seconds`, and longer while collectives run.
    fn compute(&mut self, seconds: f64) {
        let (busy, slower) = ((self.idle_at - self.now).max(0.0), 1.0 + self.step.slowdown);
        let elapsed = if seconds * slower <= busy { seconds * slower } else { busy + seconds - busy / slower };
        self.timeline.compute += self.weight * seconds;
        self.timeline.slowed += self.weight * (elapsed - seconds);
        self.advance(elapsed);
    }

    /// Begins a collective.
    fn begin(&mut self, part: &'static str, operation: Operation, scope: Scope, bytes: usize) {
        let step = self.step;
        let shard_size = step.layout.shard().ranks;
        let members = match scope {
            Scope::World => step.cluster.world(),
            Scope::ShardGroup => step.cluster.shard_group(shard_size),
            Scope::Replicas => step.cluster.replicas(shard_size),
        };
        if members.ranks == 1 {
            return;
        }
        let estimate = step.links.time(operation, bytes as f64, members);
        let start = self.idle_at.max(self.now);
        self.idle_at = start + estimate.seconds;
        let known = &mut self.timeline.collectives;
        let same = |c: &Collective| (c.part, c.operation, c.scope, c.bytes) == (part, operation, scope, bytes);
        let index = known.iter().position(same).unwrap_or_else(|| {
            known.push(Collective {
                part,
                operation,
                scope,
                members,
                algorithm: estimate.algorithm,
                times: 0.0,
                bytes,
                seconds_each: estimate.seconds,
                exposed_seconds: 0.0,
            });
            known.len() - 1
        });
        known[index].times += self.weight;
        self.timeline.communication += self.weight * estimate.seconds;
        self.running.push((start, self.idle_at, index));
    }

    /// Waits for all collectives.
    fn wait(&mut self) {
        for (start, end, index) in std::mem::take(&mut self.running) {
            let seconds = self.weight * (end - start.max(self.now)).max(0.0);
            let collective = &mut self.timeline.collectives[index];
            collective.exposed_seconds += seconds;
            if collective.members.spans_nodes() {
                self.timeline.exposed_inter += seconds;
            } else {
                self.timeline.exposed_intra += seconds;
            }
        }
        self.advance((self.idle_at - self.now).max(0.0));
        self.gathering = [false; 2];
    }

    fn bytes(&self, unit: Unit) -> usize {
        self.step.layout.unit(unit).len() * self.step.element_bytes
    }

    /// Begins to gather the parameters of a layer, unless a buffer has them.
    fn gather(&mut self, layer: usize) {
        if self.step.stage < 3 || self.parameters[layer % 2] == Some(layer) {
            return;
        }
        self.begin("parameters of a layer", Operation::AllGather, Scope::ShardGroup, self.bytes(Unit::Layer(layer)));
        self.parameters[layer % 2] = Some(layer);
        self.gathering[layer % 2] = true;
    }

    fn micro_batch(&mut self, last: bool) {
        let Step { stage, passes, compute, layout, .. } = *self.step;
        let layers = layout.descriptor().layers;
        let communicates = stage >= 2 || self.step.tokens.is_some() || (last && self.step.cluster.gpus > 1);
        // Micro-batches that communicate are not CUDA graphs. The launches are spread over the passes.
        let launches = if communicates { 1.0 + compute.launches / compute.micro_batch } else { 1.0 };
        self.gather(0);
        for layer in 0..layers {
            if self.gathering[layer % 2] {
                self.wait();
            }
            if layer + 1 < layers {
                self.gather(layer + 1);
            }
            self.gather_tokens(true);
            self.compute(passes.forward * launches);
            self.reduce_tokens();
        }
        self.compute(passes.head * launches);
        for layer in (0..layers).rev() {
            if let Some(TokenExchange { recompute, .. }) = self.step.tokens
                && recompute > Recompute::Nothing
            {
                self.gather_tokens(recompute == Recompute::Layers);
            }
            self.gather_tokens(false);
            self.compute(passes.backward * launches);
            if let Some(TokenExchange { choices, .. }) = self.step.tokens {
                self.begin("gradients of choices", Operation::ReduceScatter, Scope::ShardGroup, choices);
            }
            self.reduce_tokens();
            let bytes = self.bytes(Unit::Layer(layer));
            if stage >= 2 {
                // The whole layer is zeroed, and this rank's shard copied.
                let moved = bytes + 2 * bytes / layout.shard().ranks;
                self.compute(moved as f64 / compute.memory_bandwidth);
                self.wait();
            }
            self.reduce("gradients of a layer", bytes, last, stage >= 2 || last);
            let bytes = self.bytes(Unit::ValueEmbedding(layer));
            self.reduce("gradients of a value embedding", bytes, last, last && bytes > 0);
            for unit in [Unit::ExpertsFc(layer), Unit::ExpertsFcproj(layer)] {
                let bytes = self.bytes(unit) / layout.shard().ranks;
                if last && bytes > 0 {
                    self.begin("gradients of experts", Operation::AllReduce, Scope::Replicas, bytes);
                }
            }
            if layer >= 2 {
                self.gather(layer - 2);
            }
        }
        self.reduce("gradients of embeddings", self.bytes(Unit::Embeddings), last, last);
    }

    /// Gathers the values of tokens, and the logits of their routers, if ranks share the experts.
    fn gather_tokens(&mut self, logits: bool) {
        let Some(exchange) = self.step.tokens else { return };
        let bytes = self.step.element_bytes;
        self.begin("tokens", Operation::AllGather, Scope::ShardGroup, exchange.channels * bytes);
        if logits {
            self.begin("router logits", Operation::AllGather, Scope::ShardGroup, exchange.logits * bytes);
        }
        self.wait();
    }

    /// Sums the values of tokens, if ranks share the experts.
    fn reduce_tokens(&mut self) {
        let Some(exchange) = self.step.tokens else { return };
        let bytes = exchange.channels * self.step.element_bytes;
        self.begin("tokens", Operation::ReduceScatter, Scope::ShardGroup, bytes);
        self.wait();
    }

    /// Begins to reduce gradients. After the `last` micro-batch, they are also averaged over the replicas.
    fn reduce(&mut self, part: &'static str, bytes: usize, last: bool, due: bool) {
        if !due {
            return;
        }
        if self.step.stage == 0 {
            return self.begin(part, Operation::AllReduce, Scope::World, bytes);
        }
        self.begin(part, Operation::ReduceScatter, Scope::ShardGroup, bytes);
        if last {
            self.begin(part, Operation::AllReduce, Scope::Replicas, bytes / self.step.layout.shard().ranks);
        }
    }

    /// Computes the loss and the gradient norm.
    fn measure(&mut self) {
        self.compute(self.step.compute.rest);
        self.begin("loss", Operation::AllReduce, Scope::World, size_of::<f32>());
        if self.step.stage > 0 {
            self.begin("gradient norm", Operation::AllReduce, Scope::ShardGroup, size_of::<f32>());
            self.begin("gradient norm", Operation::AllReduce, Scope::Replicas, size_of::<f32>());
        }
        self.wait();
    }

    /// Updates the parameters and gathers the shards of the others.
    fn update(&mut self) {
        let Step { stage, layout, compute, optimizer, .. } = *self.step;
        let shards = layout.shard().ranks as f64;
        if stage == 0 {
            return self.compute(compute.update);
        }
        let update = compute.update / shards;
        let mut updated = Vec::new();
        if optimizer == Optimizer::AdamW {
            // The gathers of all units but the last could overlap with the update of the next ones. On GPUs they do not: their kernels
            // find no free SM while AdamW's blocks fill the GPU.
            self.compute(update);
        }
        let layers = layout.descriptor().layers;
        let group = Muon::most_layers(layers, layout.shard());
        for unit in layout.units() {
            if let (Optimizer::Muon, Unit::Layer(layer)) = (optimizer, unit)
                && layer.is_multiple_of(group)
            {
                let of_group = layer..layers.min(layer + group);
                let bytes = of_group.clone().map(|layer| self.muon_bytes(layer)).sum();
                self.begin(UPDATES, Operation::Exchange, Scope::ShardGroup, bytes);
                self.wait();
                for unit in updated.drain(..) {
                    self.gather_updated(unit);
                }
                self.compute(update * of_group.len() as f64 / layers as f64);
                self.begin(UPDATES, Operation::Exchange, Scope::ShardGroup, bytes);
                self.wait();
            }
            updated.push(unit);
        }
        for unit in updated {
            self.gather_updated(unit);
        }
        self.wait();
    }

    fn gather_updated(&mut self, unit: Unit) {
        let part = match unit {
            Unit::Layer(_) if self.step.stage == 3 => return,
            Unit::Layer(_) => "parameters of a layer",
            Unit::Embeddings => "parameters of embeddings",
            Unit::ValueEmbedding(_) => "parameters of a value embedding",
            Unit::ExpertsFc(_) | Unit::ExpertsFcproj(_) => return,
        };
        self.begin(part, Operation::AllGather, Scope::ShardGroup, self.bytes(unit));
    }

    /// Returns the bytes of the matrices of a layer that Muon updates.
    fn muon_bytes(&self, layer: usize) -> usize {
        let descriptor = self.step.layout.descriptor();
        // AdamW updates the tables of value embeddings.
        let is_updated = |param: &Param| {
            param.layered()
                && param.is_matrix()
                && param.kind() != ParamKind::ValueEmbedding
                && param.layers(descriptor).any(|found| found == layer)
                && !self.step.layout.unit_of(*param, layer).is_of_experts()
        };
        let elements: usize = descriptor.params().filter(is_updated).map(|param| param.len(descriptor)).sum();
        elements * self.step.element_bytes
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "these results are exact")]
mod tests {
    use super::*;
    use crate::compute::Source;
    use model::Shard;

    /// Simulates d12 on 16 GPUs with a micro-batch of 37 ms: 1 ms forward and 2 ms backward for each layer, 1 ms for the head.
    fn step(stage: u8, shard_size: usize, micro_batches: usize, slowdown: f64) -> Timeline {
        let descriptor: Descriptor = "d12".parse().unwrap();
        let zero = Zero::new(stage, Shard { rank: 0, ranks: shard_size });
        let compute = Compute {
            micro_batch: 37e-3,
            launches: 0.0,
            update: 8e-3,
            rest: 1e-3,
            memory_bandwidth: f64::INFINITY,
            source: Source::Assumed,
        };
        simulate(&Step {
            layout: &zero.layout(descriptor),
            element_bytes: 2,
            stage: zero.stage(),
            optimizer: Optimizer::AdamW,
            micro_batches,
            tokens: None,
            cluster: Cluster::new(16, 8).unwrap(),
            links: &Links::new(400e9, 50e9),
            compute,
            passes: Passes { forward: 1e-3, backward: 2e-3, head: 1e-3 },
            slowdown,
        })
    }

    fn times(timeline: &Timeline, operation: Operation, scope: Scope) -> f64 {
        let of = timeline.collectives.iter().filter(|c| (c.operation, c.scope) == (operation, scope) && c.bytes > 4);
        of.map(|c| c.times).sum()
    }

    #[test]
    fn each_stage_communicates_as_the_trainer_does() {
        use Operation::{AllGather, AllReduce, ReduceScatter};
        // 12 layers and the embeddings, K = 6 micro-batches.
        assert_eq!(times(&step(0, 1, 6, 0.0), AllReduce, Scope::World), 13.0);
        for (stage, reduced, gathered) in
            [(1, 13, 13), (2, 6 * 12 + 1, 13), (3, 6 * 12 + 1, 12 + 10 + 5 * (10 + 10) + 1)]
        {
            let timeline = step(stage, 8, 6, 0.0);
            assert_eq!(times(&timeline, ReduceScatter, Scope::ShardGroup), f64::from(reduced), "{stage}");
            assert_eq!(times(&timeline, AllGather, Scope::ShardGroup), f64::from(gathered), "{stage}");
            assert_eq!(times(&timeline, AllReduce, Scope::Replicas), 13.0, "{stage}");
        }
    }

    #[test]
    fn steps_consist_of_computing_and_exposed_communication() {
        for (stage, shard_size) in [(0, 1), (1, 8), (2, 16), (3, 8)] {
            for micro_batches in [1, 3, 9] {
                let timeline = step(stage, shard_size, micro_batches, 0.5);
                let exposed = timeline.exposed_intra + timeline.exposed_inter;
                let sum = timeline.compute + timeline.slowed + exposed;
                assert!((timeline.step / sum - 1.0).abs() < 1e-9, "{timeline:?}");
                let update = 8e-3 / shard_size as f64;
                let computed = 37e-3 * micro_batches as f64 + update + 1e-3;
                assert!((timeline.compute / computed - 1.0).abs() < 1e-9, "{timeline:?}");
                let waits: f64 = timeline.collectives.iter().map(|collective| collective.exposed_seconds).sum();
                assert!((waits - exposed).abs() < 1e-9 && exposed <= timeline.communication + 1e-9, "{timeline:?}");
            }
        }
        // One GPU's shard: nothing to slow down without overlap.
        assert_eq!(step(1, 8, 1, 0.0).slowed, 0.0);
        assert!(step(1, 8, 1, 2.0).slowed > step(1, 8, 1, 1.0).slowed);
    }
}
