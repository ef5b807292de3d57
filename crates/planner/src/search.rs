//! The memory and the predicted step of every setting, and the best one.

use crate::cluster::Cluster;
use crate::compute::{self, Assumptions, Compute, MicroBatch, Source};
use crate::links::Links;
use crate::measured::{MeasuredStep, Storage};
use crate::schedule::{self, Passes, Step, Timeline, TokenExchange};
use anyhow::{Context, Result, ensure};
use engine::Engine;
use engine::open::Precision;
use engine::plan::{Group, Plan};
use model::fit::{self, RunLimits};
use model::{Descriptor, Fp8Options, Fp8Settings, PlanOptions, Recompute, Shard, Zero};
use serde::Serialize;

/// The run and the cluster to plan.
#[derive(Clone, Debug)]
pub struct Request {
    /// The model.
    pub descriptor: Descriptor,
    /// The cluster.
    pub cluster: Cluster,
    /// Its connections.
    pub links: Links,
    /// Time that kernels lose while a collective runs, as a multiple of the collective's time.
    pub slowdown: f64,
    /// Memory of a GPU in bytes.
    pub hbm: usize,
    /// Tokens of a sequence.
    pub seq: usize,
    /// Tokens of a step; without them, each rank computes one micro-batch.
    pub total_batch: Option<usize>,
    /// Sequences of a micro-batch to plan.
    pub batches: Vec<usize>,
    /// Recomputation levels to plan.
    pub recompute: Vec<Recompute>,
    /// ZeRO stages to plan.
    pub stages: Vec<u8>,
    /// Shard sizes to plan for stages 1 to 3. Each divides the number of GPUs.
    pub shard_sizes: Vec<usize>,
    /// Whether the ranks of a shard group share the experts. Then only stages 1 to 3 are planned.
    pub expert_parallel: bool,
    /// Number formats.
    pub precision: Precision,
    /// Settings of FP8, if that is the precision.
    pub fp8: Option<Fp8Settings>,
    /// Optimizer, and the storage of its state.
    pub storage: Storage,
    /// Measured steps.
    pub measured: Vec<MeasuredStep>,
    /// Rates where nothing was measured.
    pub assumptions: Assumptions,
}

/// The memory of a GPU in bytes, by category of the plan of `train`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Parameters.
    pub parameters: usize,
    /// Gradients.
    pub gradients: usize,
    /// Optimizer state.
    pub optimizer: usize,
    /// Activations.
    pub activations: usize,
    /// Temporary buffers.
    pub workspace: usize,
    /// Tokens and targets.
    pub batch: usize,
    /// Bytes of the plan, with alignment.
    pub planned: usize,
    /// Estimate of what is outside the plan: CUDA graphs, code, NCCL.
    pub reserved: usize,
    /// All of it.
    pub total: usize,
}

impl Memory {
    fn of(plan: &Plan, reserved: usize) -> Self {
        let group = |group| plan.group_bytes(group);
        Self {
            parameters: group(Group::Parameters),
            gradients: group(Group::Gradients),
            optimizer: group(Group::Optimizer),
            activations: group(Group::Activations),
            workspace: group(Group::Workspace),
            batch: group(Group::Batch),
            planned: plan.bytes(),
            reserved,
            total: plan.bytes() + reserved,
        }
    }
}

/// The resource that limits the speed of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bottleneck {
    /// The GPU computes for most of the step.
    Compute,
    /// It mostly waits for collectives inside a node.
    IntraNode,
    /// It mostly waits for collectives between nodes.
    InterNode,
    /// The setting does not fit, or a faster one of the same stage and shard size does not.
    Memory,
}

impl Bottleneck {
    /// Returns the name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::IntraNode => "intra-node",
            Self::InterNode => "inter-node",
            Self::Memory => "memory",
        }
    }
}

/// A planned setting.
#[derive(Clone, Debug, Serialize)]
pub struct Planned {
    /// ZeRO stage.
    pub zero_stage: u8,
    /// Ranks that shard together; 1 in stage 0.
    pub shard_size: usize,
    /// Whether they share the experts.
    pub expert_parallel: bool,
    /// Sequences of a micro-batch.
    pub batch: usize,
    /// Micro-batches of a rank in a step.
    pub micro_batches: usize,
    /// Recomputation level.
    pub recompute: Recompute,
    /// Tokens of a step.
    pub total_batch: usize,
    /// Memory of a GPU.
    pub memory: Memory,
    /// Whether the memory suffices.
    pub fits: bool,
    /// The source of the compute times.
    pub source: Source,
    /// Predicted times.
    pub timeline: Timeline,
    /// Predicted tokens per second of all GPUs.
    pub tokens_per_second: f64,
    /// Predicted model FLOPs utilization.
    pub mfu: f64,
    /// The resource that limits the speed.
    pub bottleneck: Bottleneck,
}

impl Planned {
    /// Reports whether two settings have the same stage and shard size.
    pub fn is_like(&self, other: &Self) -> bool {
        (self.zero_stage, self.shard_size) == (other.zero_stage, other.shard_size)
    }
}

/// A setting before it is planned.
#[derive(Clone, Copy)]
struct Setting {
    stage: u8,
    shard_size: usize,
    batch: usize,
    micro_batches: usize,
    recompute: Recompute,
}

impl Request {
    /// Plans every setting, in the order of stages, shard sizes, batches and levels. `engine` plans the memory of one GPU.
    pub fn plan(&self, engine: &mut dyn Engine) -> Result<Vec<Planned>> {
        ensure!(
            !self.measured.is_empty() || compute::can_assume(self.storage),
            "--optimizer muon: expected a measured step, found none; pass a file of `bench step --optimizer muon --json` with --measured"
        );
        self.check_expert_parallel()?;
        let settings = self.settings();
        ensure!(
            !settings.is_empty(),
            "--total-batch {}: expected a multiple of --batch x --seq x --gpus, at least {}, found another number; use such a multiple",
            self.total_batch.unwrap_or_default(),
            self.batches.iter().min().unwrap_or(&1) * self.seq * self.cluster.gpus
        );
        let mut planned = settings.iter().map(|setting| self.planned(setting, engine)).collect::<Result<Vec<_>>>()?;
        mark_memory(&mut planned);
        Ok(planned)
    }

    /// Returns what the ranks of a shard group share.
    fn zero(&self, stage: u8, shard_size: usize) -> Zero {
        Zero::new(stage, Shard { rank: 0, ranks: shard_size }).share_experts(self.expert_parallel)
    }

    /// Checks that there is a setting in which ranks can share the experts, if they should.
    fn check_expert_parallel(&self) -> Result<()> {
        if !self.expert_parallel {
            return Ok(());
        }
        let sizes = self.shard_sizes.iter().filter(|size| **size > 1);
        let checks: Vec<Result<()>> = sizes.map(|&size| self.zero(1, size).check(&self.descriptor)).collect();
        ensure!(
            self.stages.iter().any(|stage| *stage > 0) && !checks.is_empty(),
            "--expert-parallel: expected a --zero-stage from 1 to 3 and a --shard-size of at least 2, found none"
        );
        if checks.iter().any(Result::is_ok) { Ok(()) } else { checks.into_iter().collect() }
    }

    /// Returns the settings whose micro-batches divide a step.
    fn settings(&self) -> Vec<Setting> {
        let mut settings = Vec::new();
        for &stage in self.stages.iter().filter(|&&stage| stage > 0 || !self.expert_parallel) {
            let sizes = if stage == 0 { &[1][..] } else { &self.shard_sizes };
            let is_possible = |size: usize| size > 1 && self.zero(stage, size).check(&self.descriptor).is_ok();
            for &shard_size in sizes.iter().filter(|&&size| stage == 0 || is_possible(size)) {
                for &batch in &self.batches {
                    let tokens = batch * self.seq * self.cluster.gpus;
                    let total = self.total_batch.unwrap_or(tokens);
                    if !total.is_multiple_of(tokens) || total == 0 {
                        continue;
                    }
                    let of =
                        |&recompute| Setting { stage, shard_size, batch, micro_batches: total / tokens, recompute };
                    settings.extend(self.recompute.iter().map(of));
                }
            }
        }
        settings
    }

    fn planned(&self, setting: &Setting, engine: &mut dyn Engine) -> Result<Planned> {
        let Setting { stage, shard_size, batch, micro_batches, recompute } = *setting;
        let shard = Shard { rank: 0, ranks: shard_size };
        let (descriptor, storage) = (self.descriptor, self.storage);
        let zero = self.zero(stage, shard_size);
        let fp8 = self.fp8.map(|settings| Fp8Options::new(settings, &descriptor, [batch, self.seq], engine));
        let options = PlanOptions {
            recompute,
            zero,
            optimizer: storage.optimizer,
            master_weights: storage.master_weights,
            moments: storage.moments,
            fp8: fp8.transpose()?,
            ..PlanOptions::training(batch, self.seq)
        };
        let limits = RunLimits { ranks: self.cluster.gpus, shard, ..RunLimits::SINGLE };
        // The engine has unlimited memory: only its kernels limit the sizes.
        let (_, plan) = fit::plan_run(descriptor, options, limits, engine)?;
        let memory = Memory::of(&plan, engine.reserved_memory(limits.communicators(zero)));
        let shape = MicroBatch { descriptor, batch, seq: self.seq, recompute, precision: self.precision, storage };
        let compute = compute::compute(&shape, &self.measured, &self.assumptions);
        let timeline = schedule::simulate(&Step {
            layout: &zero.layout(descriptor),
            element_bytes: engine.dtype().bytes(),
            stage: zero.stage(),
            optimizer: storage.optimizer,
            micro_batches,
            tokens: zero.shares_experts().then(|| TokenExchange::new(&descriptor, zero, batch * self.seq, recompute)),
            cluster: self.cluster,
            links: &self.links,
            compute,
            passes: passes(&shape, &compute),
            slowdown: self.slowdown,
        });
        let total_batch = batch * self.seq * self.cluster.gpus * micro_batches;
        let tokens_per_second = total_batch as f64 / timeline.step;
        let flops = descriptor.flops_per_token(self.seq) as f64 * tokens_per_second;
        let fits = memory.total <= self.hbm;
        Ok(Planned {
            zero_stage: stage,
            shard_size,
            expert_parallel: self.expert_parallel,
            batch,
            micro_batches,
            recompute,
            total_batch,
            memory,
            fits,
            source: compute.source,
            bottleneck: if fits { bottleneck(&timeline) } else { Bottleneck::Memory },
            timeline,
            tokens_per_second,
            mfu: flops / (self.assumptions.peak * self.cluster.gpus as f64),
        })
    }
}

/// Divides the time of a micro-batch in proportion to FLOPs. What is recomputed belongs to the backward pass.
fn passes(shape: &MicroBatch, compute: &Compute) -> Passes {
    let (shares, layers) = (shape.shares(), shape.descriptor.layers as f64);
    let once = compute.micro_batch / shape.recompute_factor();
    let (forward, head) = (shares.forward * once, shares.head * once);
    Passes { forward, backward: (compute.micro_batch - head) / layers - forward, head }
}

fn bottleneck(timeline: &Timeline) -> Bottleneck {
    let Timeline { compute, slowed, exposed_intra, exposed_inter, .. } = timeline;
    let (compute, exposed) = (compute + slowed, exposed_intra.max(*exposed_inter));
    match (compute >= exposed, exposed_intra >= exposed_inter) {
        (true, _) => Bottleneck::Compute,
        (false, true) => Bottleneck::IntraNode,
        (false, false) => Bottleneck::InterNode,
    }
}

/// Minimum gain in speed for which missing memory counts as the bottleneck.
const MATTERS: f64 = 1.01;

/// Marks settings that are slower than one of the same stage and shard size that does not fit.
fn mark_memory(planned: &mut [Planned]) {
    for i in 0..planned.len() {
        let of = &planned[i];
        let faster = |other: &&Planned| other.tokens_per_second > MATTERS * of.tokens_per_second;
        let excluded = planned.iter().filter(faster).any(|other| !other.fits && other.is_like(of));
        if of.fits && excluded && of.bottleneck == Bottleneck::Compute {
            planned[i].bottleneck = Bottleneck::Memory;
        }
    }
}

/// Returns the index of the fastest setting that fits; of equally fast ones, the first.
pub fn best(planned: &[Planned]) -> Option<usize> {
    let fitting = planned.iter().enumerate().filter(|(_, planned)| planned.fits);
    let fastest = fitting.reduce(|a, b| if b.1.tokens_per_second > a.1.tokens_per_second { b } else { a });
    fastest.map(|(index, _)| index)
}

/// Returns the index of one setting for each stage and shard size: the fastest that fits, or the smallest.
pub fn best_of_each(planned: &[Planned]) -> Result<Vec<usize>> {
    let mut at = 0;
    let groups = planned.chunk_by(Planned::is_like).map(|group| {
        let smallest = || group.iter().enumerate().min_by_key(|(_, planned)| planned.memory.total).map(|(i, _)| i);
        let index = best(group).or_else(smallest).context("a group has a setting")?;
        at += group.len();
        Ok(at - group.len() + index)
    });
    groups.collect()
}

#[cfg(test)]
mod tests;
