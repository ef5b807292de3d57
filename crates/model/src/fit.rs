//! Check that a run fits into memory, before anything is allocated.

use crate::descriptor::Positions;
use crate::memory_plan::workload;
use crate::{Decoder, Descriptor, MasterWeights, Moments, Offloadable, Optimizer, PlanOptions, Recompute, Shard, Zero};
use anyhow::{Result, ensure};
use clap::ValueEnum;
use distributed::ShardGroups;
use engine::Engine;
use engine::plan::Plan;
use engine::tensor::DType;
use std::cmp::Ordering;

/// Maximum number of tokens in a batch: positions are stored as i32.
const MAX_TOKENS: usize = i32::MAX as usize;

/// Maximum number of values of activations. Up to this limit, the size of a plan in bytes fits into a `usize`: a layer keeps fewer than 8
/// tensors of each width.
const MAX_VALUES: u128 = 1 << 56;

/// Minimum sequence length that the advice names.
const MIN_ADVISED_SEQ: usize = 64;

/// Maximum number of ranks that the advice names.
const MAX_RANKS_ADVISED: usize = 1024;

/// Settings of a run that bound the changes by which it could fit.
#[derive(Clone, Copy, Debug)]
pub struct RunLimits {
    /// Number of ranks.
    pub ranks: usize,
    /// The place of this rank in its shard group, whether or not the run shards anything.
    pub shard: Shard,
    /// Tokens of an optimizer step if they are fixed: a multiple of those of a micro-batch of all ranks.
    pub total_batch: Option<usize>,
    /// Most ranks that share the memory of a host.
    pub local_ranks: usize,
    /// Bytes of device memory that the run may take, if there is a limit.
    pub memory: Option<usize>,
}

impl RunLimits {
    /// One rank that accepts any batch.
    pub const SINGLE: Self =
        Self { ranks: 1, shard: Shard::UNSHARDED, total_batch: None, local_ranks: 1, memory: None };

    /// Returns the bytes of device memory that the run may take.
    pub fn free_memory(&self, engine: &dyn Engine) -> Result<usize> {
        Ok(engine.free_memory()?.min(self.memory.unwrap_or(usize::MAX)))
    }

    /// Returns the number of NCCL communicators of a run with a sharding.
    pub fn communicators(&self, zero: Zero) -> usize {
        // Advice may name more ranks than the run has.
        let ranks = self.ranks.max(zero.shard().ranks);
        ShardGroups::new(ranks, zero.shard().ranks).map_or(1, ShardGroups::communicators)
    }
}

/// Plans a model on one rank. If its memory exceeds the engine's, the error states by how much, and what would fit.
pub fn plan(descriptor: Descriptor, options: PlanOptions, engine: &mut dyn Engine) -> Result<(Decoder, Plan)> {
    plan_run(descriptor, options, RunLimits::SINGLE, engine)
}

/// Plans a model on one of several ranks. If it needs more memory than the engine has, the error states how much is missing and
/// names settings that fit.
pub fn plan_run(
    descriptor: Descriptor,
    options: PlanOptions,
    limits: RunLimits,
    engine: &mut dyn Engine,
) -> Result<(Decoder, Plan)> {
    let PlanOptions { b, t, .. } = options;
    check_batch(&descriptor, b, t)?;
    options.zero.check(&descriptor)?;
    ensure!(
        b * t <= MAX_TOKENS / options.zero.expert_ranks(),
        "--batch {b} x --seq {t}: expected at most {MAX_TOKENS} tokens of {} ranks at once; use a smaller batch",
        options.zero.expert_ranks()
    );
    ensure!(
        options.fp8.is_none() || !options.zero.shares_experts(),
        "--expert-parallel: expected --precision bf16 or fp32, found fp8; leave one of the flags out"
    );
    engine.check(&workload(&descriptor, &options))?;
    let free = limits.free_memory(engine)?;
    ensure!(
        !options.offload.contains(Offloadable::Params) || !options.zero.is_sharded(),
        "--offload params: expected --zero-stage 0, found {}; each rank keeps all parameters in the host's memory",
        options.zero.stage()
    );
    ensure!(
        options.moments != Moments::EightBit || options.optimizer == Optimizer::AdamW,
        "--moments 8bit: expected --optimizer adamw, found muon; use --moments bf16"
    );
    if options.offload.contains(Offloadable::Activations) {
        ensure!(
            options.recompute == Recompute::Layers,
            "--offload activations: expected --recompute 3, which keeps only the outputs of layers, found --recompute {}",
            u8::from(options.recompute)
        );
        ensure!(
            descriptor.has_plain_residual(),
            "--offload activations: expected layers that read only the output of the layer before, found a model that scales the residual \
             stream or reads an earlier one; offload only master, moments and params"
        );
    }
    let reserved = engine.reserved_memory(limits.communicators(options.zero));
    let (mut model, mut plan) = Decoder::plan(descriptor, options, engine);
    if plan.bytes().saturating_add(reserved) > free && options.fp8.is_some() {
        let options = PlanOptions { keeps_fp8_weights: false, ..options };
        (model, plan) = Decoder::plan(descriptor, options, engine);
    }
    check_host(options, limits.local_ranks, plan.host_bytes(), engine.free_host_memory().unwrap_or(0))?;
    let needed = plan.bytes().saturating_add(reserved);
    if needed > free {
        let mut bytes = |options: PlanOptions| {
            if options.offload.contains(Offloadable::Activations) && !descriptor.has_plain_residual() {
                return usize::MAX;
            }
            let reserved = engine.reserved_memory(limits.communicators(options.zero));
            let options = PlanOptions { keeps_fp8_weights: false, ..options };
            Decoder::plan(descriptor, options, engine).1.bytes().saturating_add(reserved)
        };
        let advice = Search { descriptor, options, limits, free, bytes: &mut bytes }.advice();
        let with = if reserved > 0 {
            format!(" (with {} for CUDA graphs, code and NCCL)", size(reserved))
        } else {
            String::new()
        };
        anyhow::bail!(
            "the model does not fit: batch {b} x seq {t} takes {}{with}, {} more than the {} {} {}; {advice}",
            size(needed),
            size(needed - free),
            size(free),
            if limits.memory == Some(free) { "of --memory-limit on" } else { "free on" },
            engine.describe(),
        );
    }
    Ok((model, plan))
}

/// Checks that the host has the memory for offloaded tensors: `bytes` for each rank, and `free` for all.
fn check_host(options: PlanOptions, ranks: usize, bytes: usize, free: usize) -> Result<()> {
    let needed = bytes * ranks;
    let of_ranks = if ranks > 1 { format!(" for {ranks} ranks") } else { String::new() };
    ensure!(
        needed <= free,
        "--offload {}: expected {} of free memory of the host{of_ranks}, found {} (of the machine or of the control group); offload less, \
         or use --moments bf16 and --master-weights 2",
        options.offload,
        size(needed),
        size(free)
    );
    Ok(())
}

/// Checks that the model accepts batches of `b` sequences of `t` tokens. Sizes within these limits do not overflow.
pub fn check_batch(descriptor: &Descriptor, b: usize, t: usize) -> Result<()> {
    ensure!(
        b.checked_mul(t).is_some_and(|tokens| tokens <= MAX_TOKENS),
        "--batch {b} x --seq {t}: expected at most {MAX_TOKENS} tokens at once"
    );
    ensure!(
        t <= descriptor.max_seq_len,
        "--seq {t}: expected at most {}, the longest sequence of the model; {}",
        descriptor.max_seq_len,
        match descriptor.positions {
            Positions::Learned => "it has no embeddings for later positions",
            Positions::Rotary(_) =>
                "for longer ones, raise max_position_embeddings in the config.json of a Hugging Face directory",
        }
    );
    let mlp_rows = descriptor.experts.map_or(b * t, |experts| experts.router().rows(b * t));
    let product =
        |rows: usize, widths: [usize; 2]| rows as u128 * widths.map(|width| width as u128).iter().sum::<u128>();
    let layer = product(b * t, [descriptor.qkv_channels(), descriptor.channels])
        + product(mlp_rows, [descriptor.fc_channels(), descriptor.mlp_channels]);
    let values = descriptor.layers as u128 * layer + product(b * t, [descriptor.padded_vocab(), 0]);
    ensure!(
        values < MAX_VALUES,
        "--batch {b} x --seq {t}: expected activations that fit into an address space, found {values} values; use a smaller batch \
         or model"
    );
    Ok(())
}

fn size(bytes: usize) -> String {
    let mib = bytes as f64 / (1u64 << 20) as f64;
    if mib < 100.0 { format!("{mib:.2} MiB") } else { format!("{:.2} GiB", mib / 1024.0) }
}

/// FLOPs that a GPU computes in the time in which PCIe moves a byte. The estimate assumes 400 TFLOP/s and 40 GB/s.
const FLOPS_PER_BYTE: f64 = 10_000.0;

/// A search for settings that fit. Every setting that it names has been planned.
struct Search<'a> {
    descriptor: Descriptor,
    /// The settings that do not fit.
    options: PlanOptions,
    limits: RunLimits,
    /// Free memory in bytes.
    free: usize,
    /// Returns the bytes that a run takes.
    bytes: &'a mut dyn FnMut(PlanOptions) -> usize,
}

impl Search<'_> {
    fn fits(&mut self, options: PlanOptions) -> bool {
        (self.bytes)(options) <= self.free
    }

    /// Returns the changes that make the run fit: more recomputation or sharding, a smaller batch, or all of them.
    fn advice(&mut self) -> String {
        let same_storage = self.levels(self.options);
        let enough = same_storage.iter().copied().skip(1).find(|&level| self.fits(level));
        let unchanged = self.largest_batch(self.options);
        let divides = if self.limits.total_batch.is_some() { "divides --total-batch and " } else { "" };
        let smaller = format!("the largest batch that {divides}fits is --batch {unchanged}");
        if let Some(level) = enough {
            let otherwise = if unchanged > 0 { format!("; otherwise, {smaller}") } else { String::new() };
            return format!("use {}{otherwise}", self.changes(level));
        }
        match (unchanged, self.largest_of(&same_storage)) {
            (0, (b @ 1.., level)) => format!("--batch {b} with {} fits", self.changes(level)),
            (0, _) => self.last_resorts(),
            (_, (b, level)) if b > unchanged => format!("{smaller}, or --batch {b} with {}", self.changes(level)),
            _ => smaller,
        }
    }

    /// Returns changes for a run that does not fit with one sequence at a time.
    fn last_resorts(&mut self) -> String {
        let offloads = [self.options].into_iter().chain(offloads(self.options));
        let storages = offloads.flat_map(|offload| [offload].into_iter().chain(compact_storage(offload)));
        let levels: Vec<_> = storages.flat_map(|storage| self.levels(storage)).collect();
        let fitting = levels.into_iter().map(|level| PlanOptions { b: self.largest_batch(level), ..level });
        let fitting: Vec<_> = fitting.filter(|level| level.b > 0).collect();
        // Without master weights, updates are less exact than with any other setting.
        let key =
            |level: &PlanOptions| (level.master_weights == MasterWeights::None, self.cost(level), usize::MAX - level.b);
        let order = |a: &&PlanOptions, b: &&PlanOptions| key(a).partial_cmp(&key(b)).unwrap_or(Ordering::Equal);
        if let Some(&fastest) = fitting.iter().min_by(order) {
            return format!("--batch {} with {} fits", fastest.b, self.changes(fastest));
        }
        let mut resorts = vec!["use a smaller --model".to_owned()];
        let single = PlanOptions { b: 1, ..self.options };
        let halves = std::iter::successors(Some(single.t / 2), |t| Some(t / 2)).take_while(|&t| t >= MIN_ADVISED_SEQ);
        let shorter: Vec<_> = halves.flat_map(|t| self.levels(PlanOptions { t, ..single })).collect();
        if let Some(found) = shorter.into_iter().find(|&level| self.is_allowed(level) && self.fits(level)) {
            resorts.push(format!("--seq {} with {}", found.t, ["--batch 1", &self.changes(found)].join(" ").trim()));
        }
        let ranks = std::iter::successors(Some(2 * self.limits.ranks), |ranks| Some(2 * ranks));
        let ranks = ranks.take_while(|&ranks| self.options.training && ranks <= MAX_RANKS_ADVISED);
        let sharded = ranks.map(|ranks| PlanOptions {
            zero: self.zero(3, Shard { rank: 0, ranks }),
            recompute: Recompute::Layers,
            ..single
        });
        let sharded: Vec<_> = sharded.collect();
        if let Some(found) = sharded.into_iter().find(|&level| self.is_allowed(level) && self.fits(level)) {
            let ranks = found.zero.shard().ranks;
            let group = if self.is_hybrid() { format!(" --shard-size {ranks}") } else { String::new() };
            resorts.push(format!("{ranks} ranks with --zero-stage 3{group} --recompute 3 --batch 1"));
        }
        if resorts.len() == 1 {
            resorts.push("a smaller --seq".to_owned());
        }
        format!("not even --batch 1 fits: {}", resorts.join(", or "))
    }

    /// Returns a ZeRO stage, with expert parallelism if the run has it.
    fn zero(&self, stage: u8, shard: Shard) -> Zero {
        Zero::new(stage, shard).share_experts(self.options.zero.shares_experts())
    }

    /// Returns `options` and those with more recomputation or sharding, in the order of the time that they cost.
    fn levels(&self, options: PlanOptions) -> Vec<PlanOptions> {
        if !options.training {
            return vec![options];
        }
        let stages = if self.limits.shard.ranks > 1 { options.zero.stage()..=3 } else { 0..=0 };
        let stages = stages.map(|stage| PlanOptions { zero: self.zero(stage, self.limits.shard), ..options });
        let all_ranks = Shard { rank: 0, ranks: self.limits.ranks };
        let larger = options.zero.stage().max(1)..=if self.is_hybrid() { 3 } else { 0 };
        let larger = larger.map(|stage| PlanOptions { zero: self.zero(stage, all_ranks), ..options });
        let stages = stages.chain(larger);
        let with_recompute = |options: PlanOptions| {
            let more = Recompute::ALL.into_iter().filter(move |&level| level >= options.recompute);
            more.map(move |recompute| PlanOptions { recompute, ..options })
        };
        let mut levels: Vec<_> = stages.flat_map(with_recompute).collect();
        levels.sort_by_key(percent);
        levels
    }

    /// Returns the predicted time that one rank takes to train on a token, in the FLOPs that it could compute in that time.
    ///
    /// Offloaded parameters move to the GPU in both passes of a micro-batch, and the outputs of layers move out and back, while the GPU
    /// computes. Offloaded state moves in both directions once per step.
    fn cost(&self, options: &PlanOptions) -> f64 {
        let (d, batch) = (self.descriptor, (options.b * options.t) as f64);
        let step = self.limits.total_batch.map_or(batch, |total| total as f64 / self.limits.ranks as f64);
        let offloaded = |kind, bytes: usize| if options.offload.contains(kind) { bytes as f64 } else { 0.0 };
        let of_parameters = |kind, bytes: usize| offloaded(kind, bytes * d.parameters());
        let moments = options.moments.dtypes(DType::Bf16).map(DType::bytes).into_iter().sum();
        let master = match options.master_weights {
            MasterWeights::None => 0,
            MasterWeights::F32 => 4,
            MasterWeights::Remainder => 2,
        };
        let computing = d.flops_per_token(options.t) as f64 * (1.0 + f64::from(percent(options)) / 100.0);
        let passes = 2.0 * of_parameters(Offloadable::Params, 2) / batch
            + 2.0 * offloaded(Offloadable::Activations, 2 * d.channels * d.layers);
        let update = of_parameters(Offloadable::Moments, moments)
            + of_parameters(Offloadable::Master, master)
            + of_parameters(Offloadable::Params, 2);
        computing.max(FLOPS_PER_BYTE * passes) + FLOPS_PER_BYTE * 2.0 * update / step
    }

    /// Reports whether the shard groups have fewer ranks than the run.
    fn is_hybrid(&self) -> bool {
        self.limits.shard.ranks < self.limits.ranks
    }

    /// Returns the largest batch that fits with one of `levels`, and the first of them that permits it.
    fn largest_of(&mut self, levels: &[PlanOptions]) -> (usize, PlanOptions) {
        let mut largest = (0, self.options);
        for &level in levels {
            let b = self.largest_batch(level);
            if b > largest.0 {
                largest = (b, level);
            }
        }
        largest
    }

    /// Returns the largest allowed batch up to that of the run that fits, or 0 if none does.
    fn largest_batch(&mut self, options: PlanOptions) -> usize {
        let allowed = self.allowed_batches();
        let batch = |i: usize| allowed.as_ref().map_or(i, |allowed| allowed[i - 1]);
        let (mut fits, mut too_large) = (0, allowed.as_ref().map_or(options.b, Vec::len) + 1);
        while fits + 1 < too_large {
            let middle = fits.midpoint(too_large);
            if self.fits(PlanOptions { b: batch(middle), ..options }) {
                fits = middle;
            } else {
                too_large = middle;
            }
        }
        if fits == 0 { 0 } else { batch(fits) }
    }

    /// Returns all batches up to that of the run that divide a step, in ascending order, or `None` if any batch does.
    fn allowed_batches(&self) -> Option<Vec<usize>> {
        let PlanOptions { b, t, .. } = self.options;
        let sequences = self.limits.total_batch? / (t * self.limits.ranks);
        let small = (1..).take_while(|i| i * i <= sequences).filter(|&i| sequences.is_multiple_of(i));
        let mut all: Vec<usize> = small.flat_map(|i| [i, sequences / i]).filter(|&i| i <= b).collect();
        all.sort_unstable();
        all.dedup();
        Some(all)
    }

    /// Reports whether a step consists of whole micro-batches of these settings.
    fn is_allowed(&self, options: PlanOptions) -> bool {
        let tokens = options.b * options.t * options.zero.shard().ranks.max(self.limits.ranks);
        options.zero.check(&self.descriptor).is_ok()
            && self.limits.total_batch.is_none_or(|total| total.is_multiple_of(tokens))
    }

    /// Returns the flags in which `options` differ from those of the run, except batch and sequence.
    fn changes(&self, options: PlanOptions) -> String {
        let mut flags = Vec::new();
        if options.zero.stage() != self.options.zero.stage() {
            flags.push(format!("--zero-stage {}", options.zero.stage()));
        }
        if options.zero.is_sharded() && options.zero.shard().ranks != self.limits.shard.ranks {
            flags.push(format!("--shard-size {}", options.zero.shard().ranks));
        }
        if options.recompute != self.options.recompute {
            flags.push(format!("--recompute {}", u8::from(options.recompute)));
        }
        if options.master_weights != self.options.master_weights {
            flags.push(format!("--master-weights {}", options.master_weights));
        }
        if options.moments != self.options.moments {
            flags.push(format!("--moments {}", options.moments.name()));
        }
        if options.offload != self.options.offload {
            flags.push(format!("--offload {}", options.offload));
        }
        flags.join(" ")
    }
}

/// Returns the rough cost of recomputation and sharding, in percent of a step. ZeRO-1 communicates as much as plain data parallelism.
fn percent(options: &PlanOptions) -> u32 {
    const RECOMPUTE: [u32; 4] = [0, 1, 3, 30];
    const ZERO: [u32; 4] = [0, 0, 2, 10];
    RECOMPUTE[usize::from(u8::from(options.recompute))] + ZERO[usize::from(options.zero.stage())]
}

/// Returns the options with smaller types of the optimizer state, in the order of their effect on the results: remainders are exact.
fn compact_storage(options: PlanOptions) -> Vec<PlanOptions> {
    let masters = match options.master_weights {
        MasterWeights::None => vec![MasterWeights::None],
        MasterWeights::F32 | MasterWeights::Remainder => vec![MasterWeights::Remainder, MasterWeights::None],
    };
    let moments = Moments::value_variants().iter().copied().skip_while(|&moments| moments != options.moments);
    let moments = moments.filter(|&moments| options.optimizer == Optimizer::AdamW || moments != Moments::EightBit);
    let all = masters.into_iter().flat_map(|master_weights| {
        moments.clone().map(move |moments| PlanOptions { master_weights, moments, ..options })
    });
    let smaller = all.filter(|storage| {
        options.training && (storage.master_weights, storage.moments) != (options.master_weights, options.moments)
    });
    smaller.collect()
}

/// Returns the options with more tensors in the host's memory.
fn offloads(options: PlanOptions) -> Vec<PlanOptions> {
    if !options.training {
        return Vec::new();
    }
    let [moments, master] = [Offloadable::Moments, Offloadable::Master];
    let mut sets = vec![vec![moments], vec![moments, master]];
    if !options.zero.is_sharded() {
        sets.push(vec![moments, master, Offloadable::Params]);
    }
    let all = sets.last().into_iter().flatten().copied().chain([Offloadable::Activations]).collect();
    sets.push(all);
    let more = sets.into_iter().map(|kinds| {
        let recompute = if kinds.contains(&Offloadable::Activations) { Recompute::Layers } else { options.recompute };
        let kept = Offloadable::ALL.into_iter().filter(|&kind| options.offload.contains(kind));
        PlanOptions { offload: kept.chain(kinds).collect(), recompute, ..options }
    });
    more.filter(|more| more.offload != options.offload).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::cpu::Cpu;
    use engine::cuda::{EmulatedGpu, Precision};
    use engine::plan::Group;

    fn d12() -> Descriptor {
        "d12".parse().unwrap()
    }

    fn options(b: usize, recompute: Recompute) -> PlanOptions {
        PlanOptions { recompute, ..PlanOptions::training(b, 1024) }
    }

    fn bytes(descriptor: Descriptor, options: PlanOptions, engine: &mut dyn Engine) -> usize {
        Decoder::plan(descriptor, options, engine).1.bytes()
    }

    fn of_d12(options: PlanOptions) -> usize {
        bytes(d12(), options, &mut Cpu::new())
    }

    fn advice(options: PlanOptions, free: usize) -> String {
        Search { descriptor: d12(), options, limits: RunLimits::SINGLE, free, bytes: &mut of_d12 }.advice()
    }

    #[test]
    fn the_largest_batch_fits_and_one_more_does_not() {
        let options = options(1000, Recompute::Nothing);
        let bytes = |b| of_d12(PlanOptions { b, ..options });
        let largest = |free| {
            Search { descriptor: d12(), options, limits: RunLimits::SINGLE, free, bytes: &mut of_d12 }
                .largest_batch(options)
        };
        for expected in [1, 2, 37, 999] {
            let (free, more) = (bytes(expected), bytes(expected + 1));
            for free in [free, more - 1] {
                assert_eq!(largest(free), expected);
            }
        }
        assert_eq!(largest(bytes(1) - 1), 0);
    }

    #[test]
    fn batches_divide_the_step() {
        let options = options(64, Recompute::Nothing);
        let shard = Shard { rank: 0, ranks: 2 };
        let limits = RunLimits { ranks: 2, shard, total_batch: Some(2 * 1024 * 192), ..RunLimits::SINGLE };
        let search =
            |free| Search { descriptor: d12(), options, limits, free, bytes: &mut of_d12 }.largest_batch(options);
        let bytes = |b| of_d12(PlanOptions { b, ..options });
        // 192 sequences of each rank in a step: 37 does not divide them.
        assert_eq!([search(bytes(37)), search(bytes(32) - 1), search(bytes(1) - 1)], [32, 24, 0]);
        let allowed = Search { descriptor: d12(), options, limits, free: 0, bytes: &mut of_d12 }.allowed_batches();
        assert_eq!(allowed.unwrap(), [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]);
    }

    #[test]
    fn advice_of_hybrid_sharding_names_a_larger_group() {
        let limits = RunLimits { ranks: 8, shard: Shard { rank: 1, ranks: 2 }, ..RunLimits::SINGLE };
        let zero = |ranks| Zero::new(3, Shard { rank: 0, ranks });
        let options = PlanOptions { zero: zero(2), ..options(1, Recompute::Layers) };
        let free = of_d12(PlanOptions { zero: zero(8), ..options });
        assert!(free < of_d12(options));
        let advice = |free| Search { descriptor: d12(), options, limits, free, bytes: &mut of_d12 }.advice();
        assert_eq!(advice(free), "use --shard-size 8");
        assert!(
            advice(free - 1).contains("16 ranks with --zero-stage 3 --shard-size 16 --recompute 3"),
            "{}",
            advice(free - 1)
        );
    }

    #[test]
    fn advice_names_the_least_change_that_fits() {
        let bytes = |b, recompute| of_d12(options(b, recompute));
        let advice = |b, recompute, free| advice(options(b, recompute), free);
        let [nothing, gelu, norms, layers] = Recompute::ALL;
        assert!([layers, norms, gelu, nothing].map(|level| bytes(8, level)).is_sorted());
        let text = advice(8, nothing, bytes(8, gelu));
        assert!(text.starts_with("use --recompute 1; otherwise, the largest batch that fits is --batch "), "{text}");
        let text = advice(8, nothing, bytes(8, gelu) - 1);
        assert!(text.starts_with("use --recompute 2"), "{text}");
        assert_eq!(advice(1, nothing, bytes(1, norms)), "use --recompute 2");
        // 20 sequences fit without recomputation, more with it, but fewer than requested.
        let text = advice(256, nothing, bytes(20, nothing));
        assert!(text.starts_with("the largest batch that fits is --batch 20, or --batch "), "{text}");
        assert!(text.ends_with(" with --recompute 3"), "{text}");
        assert_eq!(advice(64, layers, bytes(20, layers)), "the largest batch that fits is --batch 20");
        assert_eq!(advice(64, nothing, bytes(1, layers)), "--batch 1 with --recompute 3 fits");
        let inference = PlanOptions { training: false, ..options(64, nothing) };
        let free = of_d12(PlanOptions { b: 5, ..inference });
        assert_eq!(super::tests::advice(inference, free), "the largest batch that fits is --batch 5");
    }

    /// A GPU that stores bf16, without its memory.
    fn gpu() -> Box<dyn Engine> {
        engine::cuda::emulated(EmulatedGpu::new(true), Precision::Bf16, None, false)
    }

    #[test]
    fn ranks_shard_before_they_recompute_layers() {
        let mut engine = gpu();
        let descriptor: Descriptor = "llama3:1b".parse().unwrap();
        let options = PlanOptions { t: 2048, ..options(8, Recompute::Nothing) };
        let shard = Shard { rank: 1, ranks: 2 };
        let limits = RunLimits { ranks: 2, shard, ..RunLimits::SINGLE };
        let mut of = |options| bytes(descriptor, options, &mut *engine);
        let at = |stage, recompute| PlanOptions { zero: Zero::new(stage, shard), recompute, ..options };
        let [zero_1, zero_3] = [1, 3].map(|stage| of(at(stage, Recompute::Nothing)));
        let all = of(at(3, Recompute::Layers));
        assert!(of(options) > zero_1 && zero_1 > zero_3 && zero_3 > all);
        let mut advice = |free| Search { descriptor, options, limits, free, bytes: &mut of }.advice();
        assert!(advice(zero_1).starts_with("use --zero-stage 1; otherwise, "), "{}", advice(zero_1));
        assert!(advice(all).starts_with("use --zero-stage 3 --recompute 3"), "{}", advice(all));
        assert!(advice(all - 1).contains("--zero-stage 3 --recompute 3"), "{}", advice(all - 1));
    }

    /// Extracts the settings that a piece of advice names, and checks that their plan fits.
    fn assert_fits(
        text: &str,
        options: PlanOptions,
        ranks: usize,
        free: usize,
        of: &mut dyn FnMut(PlanOptions) -> usize,
    ) {
        let number = |flag: &str| {
            let rest = text.split_once(flag)?.1;
            rest.split(|c: char| !c.is_ascii_digit()).find(|digits| !digits.is_empty())?.parse::<usize>().ok()
        };
        let word = |flag: &str| text.split_once(flag)?.1.split_whitespace().next();
        let shard = Shard { rank: 0, ranks };
        let changed = PlanOptions {
            b: number("--batch ").unwrap_or(options.b),
            t: number("--seq ").unwrap_or(options.t),
            recompute: number("--recompute ").map_or(options.recompute, |level| (level as u8).try_into().unwrap()),
            zero: number("--zero-stage ").map_or(options.zero, |stage| Zero::new(stage as u8, shard)),
            master_weights: word("--master-weights ").map_or(options.master_weights, |name| name.parse().unwrap()),
            moments: word("--moments ").map_or(options.moments, |name| Moments::from_str(name, false).unwrap()),
            offload: word("--offload ").map_or(options.offload, |list| list.parse().unwrap()),
            ..options
        };
        assert!(of(changed) <= free, "{text}: {changed:?} takes {} of {free}", of(changed));
    }

    #[test]
    fn every_named_setting_fits() {
        const GIB: usize = 1 << 30;
        let mut engine = gpu();
        for (name, t, b) in [("llama3:1b", 8192, 8), ("llama3:8b", 4096, 2), ("qwen3:0.6b", 32_768, 4)] {
            let descriptor: Descriptor = name.parse().unwrap();
            let options = PlanOptions { t, ..options(b, Recompute::Nothing) };
            for ranks in [1, 2] {
                let shard = Shard { rank: 0, ranks };
                let limits = RunLimits { ranks, shard, total_batch: Some(16 * t * ranks), ..RunLimits::SINGLE };
                let mut of = |options| bytes(descriptor, options, &mut *engine);
                let whole = of(options);
                for free in [24, 40, 80, 141].map(|gib| gib * GIB).into_iter().filter(|&free| free < whole) {
                    let text = Search { descriptor, options, limits, free, bytes: &mut of }.advice();
                    for text in text.split("; ").flat_map(|text| text.split(", or ")) {
                        // A model of another size, or more ranks, are not settings of this run.
                        if text.contains("smaller --") || text.contains("ranks with") {
                            continue;
                        }
                        assert_fits(text, options, ranks, free, &mut of);
                    }
                }
            }
        }
    }

    #[test]
    fn moments_in_8_bits_need_adamw() {
        let muon =
            PlanOptions { moments: Moments::EightBit, optimizer: Optimizer::Muon, ..options(1, Recompute::Nothing) };
        let error = plan(d12(), muon, &mut *h200()).unwrap_err().to_string();
        assert_eq!(error, "--moments 8bit: expected --optimizer adamw, found muon; use --moments bf16");
        assert!(plan(d12(), PlanOptions { optimizer: Optimizer::AdamW, ..muon }, &mut *h200()).is_ok());
        // The advice for a run with Muon does not name 8-bit moments.
        let storages = compact_storage(PlanOptions { moments: Moments::F32, ..muon });
        assert!(storages.iter().all(|storage| storage.moments != Moments::EightBit), "{storages:?}");
    }

    #[test]
    fn runs_that_need_more_ranks_say_how_many() {
        const GIB: usize = 1 << 30;
        let mut engine = gpu();
        let descriptor: Descriptor = "llama3:8b".parse().unwrap();
        let options = PlanOptions { t: 4096, ..options(2, Recompute::Nothing) };
        let mut of = |options| bytes(descriptor, options, &mut *engine);
        let mut advice_for = |limits, free| Search { descriptor, options, limits, free, bytes: &mut of }.advice();
        // In a large step, the state moves rarely.
        let large = RunLimits { total_batch: Some(1 << 20), ..RunLimits::SINGLE };
        let storage = "--master-weights remainder --moments 8bit";
        assert_eq!(advice_for(large, 60 * GIB), format!("--batch 1 with {storage} --offload master,moments fits"));
        let mut advice = |free| advice_for(RunLimits::SINGLE, free);
        assert_eq!(advice(60 * GIB), format!("--batch 2 with --recompute 3 {storage} --offload moments fits"));
        assert_eq!(
            advice(30 * GIB),
            format!("--batch 2 with --recompute 3 {storage} --offload master,moments,params fits")
        );
        let free = 20 * GIB;
        let expected =
            "not even --batch 1 fits: use a smaller --model, or 16 ranks with --zero-stage 3 --recompute 3 --batch 1";
        assert_eq!(advice(free), expected);
        let sharded = |ranks| PlanOptions {
            b: 1,
            zero: Zero::new(3, Shard { rank: 0, ranks }),
            recompute: Recompute::Layers,
            ..options
        };
        assert!(of(sharded(8)) > free && of(sharded(16)) <= free);
    }

    #[test]
    fn ranks_share_the_memory_of_the_host() {
        let gib = |n: usize| n << 30;
        let options = PlanOptions { offload: "master,moments".parse().unwrap(), ..options(1, Recompute::Nothing) };
        check_host(options, 2, gib(5), gib(10)).unwrap();
        check_host(options, 1, gib(6), gib(10)).unwrap();
        let error = check_host(options, 2, gib(6), gib(10)).unwrap_err().to_string();
        let expected =
            "--offload master,moments: expected 12.00 GiB of free memory of the host for 2 ranks, found 10.00 GiB";
        assert!(error.starts_with(expected), "{error}");
    }

    /// Sizes are computed in 64 bits. Test builds in the dev profile panic if one overflows.
    #[test]
    fn long_sequences_are_planned() {
        let mut engine = gpu();
        for (name, t, b) in [("llama3:1b", 32_768, 4), ("llama3:8b", 131_072, 64), ("qwen3:1.7b", 40_960, 52_428)] {
            let descriptor: Descriptor = name.parse().unwrap();
            check_batch(&descriptor, b, t).unwrap();
            for recompute in Recompute::ALL {
                let options = PlanOptions { t, ..options(b, recompute) };
                let (model, plan) = Decoder::plan(descriptor, options, &mut *engine);
                let rows = b * t;
                // One tensor of the MLP has more elements than 32 bits count.
                let fc = rows as u128 * descriptor.fc_channels() as u128;
                assert!(fc > u128::from(u32::MAX) / 2, "{fc}");
                let kept = if recompute == Recompute::Layers { 1 } else { descriptor.layers as u128 };
                assert!(plan.bytes() as u128 > 2 * kept * fc, "{name} {recompute:?}: {}", plan.bytes());
                assert_eq!(model.rotary_table.unwrap().len, t * descriptor.head_size);
                assert!(model.logits.len <= rows * descriptor.padded_vocab());
            }
        }
    }

    #[test]
    fn memory_outside_the_arena_is_reserved() {
        let reserved = [0, 1, 3].map(|communicators| gpu().reserved_memory(communicators));
        assert!(reserved[0] > 0 && reserved.is_sorted_by(|a, b| a < b), "{reserved:?}");
        assert_eq!(Cpu::new().reserved_memory(1), 0);
    }

    /// Returns an engine that plans for one H200 in bf16.
    fn h200() -> Box<dyn Engine> {
        engine::cuda::emulated(EmulatedGpu::new(true), Precision::Bf16, None, false)
    }

    #[test]
    fn sizes_without_kernels_are_refused() {
        let gpt2 = d12();
        let cases = [
            (Descriptor { head_size: 32, heads: 24, kv_heads: 24, ..gpt2 }, "head size of 64, 80, 96, 128, found 32"),
            (Descriptor { channels: 100, ..gpt2 }, "multiple of 8 channels up to"),
            (Descriptor { mlp_channels: 100, ..gpt2 }, "multiple of 8 channels, found 100"),
        ];
        for (descriptor, expected) in cases {
            let options = options(1, Recompute::Nothing);
            let error = plan(descriptor, options, &mut *h200()).err().map(|error| error.to_string());
            assert!(error.as_ref().is_some_and(|error| error.contains(expected)), "{error:?}");
            assert!(plan(descriptor, options, &mut Cpu::new()).is_ok());
        }
        assert!(plan(gpt2, options(1, Recompute::Nothing), &mut *h200()).is_ok());
    }

    /// Returns the size of the optimizer state in bytes per parameter.
    fn state_bytes(engine: &mut dyn Engine, master_weights: MasterWeights, moments: Moments) -> usize {
        let options = PlanOptions { master_weights, moments, ..options(1, Recompute::Nothing) };
        let (model, plan) = Decoder::plan(d12(), options, engine);
        let (bytes, elements) = (plan.group_bytes(Group::Optimizer), model.layout.elements());
        assert!(bytes.is_multiple_of(elements));
        bytes / elements
    }

    #[test]
    fn optimizer_state_takes_the_bytes_of_its_types() {
        let masters = [MasterWeights::None, MasterWeights::F32, MasterWeights::Remainder];
        for (moments, expected) in
            [(Moments::F32, [8, 12, 10]), (Moments::Bf16, [4, 8, 6]), (Moments::EightBit, [2, 6, 4])]
        {
            assert_eq!(masters.map(|masters| state_bytes(&mut *h200(), masters, moments)), expected, "{moments:?}");
            // An engine that stores f32 ignores both settings.
            assert_eq!(masters.map(|masters| state_bytes(&mut Cpu::new(), masters, moments)), [8; 3]);
        }
    }

    #[test]
    fn llama3_8b_fits_an_h200() {
        const GIB: usize = 1 << 30;
        let descriptor: Descriptor = "llama3:8b".parse().unwrap();
        let default = PlanOptions { t: 4096, ..options(1, Recompute::Layers) };
        let compact = PlanOptions { master_weights: MasterWeights::Remainder, moments: Moments::Bf16, ..default };
        let (_, plan) = Decoder::plan(descriptor, compact, &mut *h200());
        println!("{plan}");
        assert!(plan.bytes() < 130 * GIB, "{plan}");
        // The default storage does not fit 120 GiB, and the error names the one that changes the results least.
        let mut of = |options| bytes(descriptor, options, &mut *h200());
        assert!(of(default) > 120 * GIB);
        let mut advice = |options, free| {
            let text = Search { descriptor, options, limits: RunLimits::SINGLE, free, bytes: &mut of }.advice();
            assert_fits(&text, options, 1, free, &mut of);
            text
        };
        let text = advice(PlanOptions { b: 2, ..default }, 120 * GIB);
        assert!(text.starts_with("--batch 2 with --master-weights remainder fits"), "{text}");
        let text = advice(PlanOptions { b: 2, ..default }, 90 * GIB);
        assert!(text.contains("--master-weights remainder --moments bf16 fits"), "{text}");
        let text = advice(PlanOptions { master_weights: MasterWeights::None, ..default }, 80 * GIB);
        assert!(text.contains("--moments bf16 fits"), "{text}");
    }

    #[test]
    fn a_model_that_is_too_large_is_refused_with_sizes() {
        let descriptor: Descriptor = "gpt3:c12288".parse().unwrap();
        let options = PlanOptions { t: 2048, ..options(64, Recompute::Nothing) };
        let message = plan(descriptor, options, &mut Cpu::new()).unwrap_err().to_string();
        assert!(message.contains("GiB more than") && message.contains("not even --batch 1"), "{message}");
    }

    #[test]
    fn sequences_longer_than_the_model_are_refused() {
        let error = |name: &str, t| {
            let descriptor = Descriptor { layers: 1, ..name.parse().unwrap() };
            plan(descriptor, PlanOptions::inference(1, t), &mut Cpu::new()).map(drop).map_err(|error| error.to_string())
        };
        let text = error("d12", 1025).unwrap_err();
        assert!(
            text.starts_with("--seq 1025: expected at most 1024, the longest sequence of the model; it has no"),
            "{text}"
        );
        let text = error("qwen3:0.6b", 40_961).unwrap_err();
        assert!(text.contains("expected at most 40960") && text.contains("raise max_position_embeddings"), "{text}");
        error("d12", 1024).unwrap();
    }

    #[test]
    fn batches_with_too_many_tokens_are_refused() {
        let descriptor = Descriptor::gpt2(1, 1, 1, MAX_TOKENS, 50_257).unwrap();
        let error = |b, t| {
            plan(descriptor, PlanOptions { t, ..options(b, Recompute::Nothing) }, &mut Cpu::new())
                .unwrap_err()
                .to_string()
        };
        for (b, t) in [(2, 1 << 30), (MAX_TOKENS, MAX_TOKENS), (usize::MAX, usize::MAX)] {
            assert_eq!(error(b, t), format!("--batch {b} x --seq {t}: expected at most 2147483647 tokens at once"));
        }
        assert!(error(1, MAX_TOKENS).contains("GiB more than"));
    }
}
