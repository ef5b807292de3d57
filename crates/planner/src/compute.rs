//! The time that one GPU computes: measured, scaled from a measurement of the same model, or assumed.
//!
//! Rules, in this order:
//! 1. A measurement of the same model, sequence, batch and recomputation level counts as it is. Steps with several numbers of
//!    micro-batches give the time of a micro-batch and that of the rest of a step by least squares.
//! 2. Between two measured batches of the same level, the time is linear in the batch.
//! 3. Otherwise the time is that of the nearest measured batch, in proportion to [FLOPs](MicroBatch::flops) and to the
//!    [cost of the level](MicroBatch::recompute_factor).
//! 4. Without any measurement of the model, the time follows from an assumed MFU.
//!
//! The update is memory-bound: its time is in proportion to the [bytes](Storage::traffic) that it reads and writes.

use crate::measured::{MeasuredStep, Storage};
use engine::open::Precision;
use model::{Descriptor, MasterWeights, Moments, Optimizer, Param, Recompute};
use serde::Serialize;

/// The rates of a GPU without measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Assumptions {
    /// Model FLOPs utilization while a GPU computes micro-batches.
    pub mfu: f64,
    /// Peak rate in FLOPs per second.
    pub peak: f64,
    /// Memory bandwidth of the update, in bytes per second.
    pub memory_bandwidth: f64,
}

/// A micro-batch of a model.
#[derive(Clone, Copy, Debug)]
pub struct MicroBatch {
    /// The model.
    pub descriptor: Descriptor,
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub seq: usize,
    /// Recomputation level.
    pub recompute: Recompute,
    /// Number formats.
    pub precision: Precision,
    /// Optimizer, and the storage of its state.
    pub storage: Storage,
}

impl MicroBatch {
    /// Returns the FLOPs of a micro-batch, without recomputation.
    pub fn flops(&self) -> f64 {
        (self.descriptor.flops_per_token(self.seq) * self.batch * self.seq) as f64
    }

    /// Returns the part of the FLOPs of a forward pass through one layer, and that of the head in both passes.
    pub fn shares(&self) -> Shares {
        let d = &self.descriptor;
        let matrices = d.params().filter(|param| param.layered() && param.is_matrix());
        let linear: usize = matrices.map(|param| param.active_len(d)).sum();
        // The forward pass has a third of the FLOPs of attention. Layers with a window have fewer, the others more than this mean.
        let attention = 2 * d.attention_channels() * d.doubled_keys(self.seq);
        let forward = (2 * linear) as f64 + attention as f64 / d.layers as f64;
        let head = (6 * Param::Wte.len(d)) as f64;
        let all = 3.0 * forward * d.layers as f64 + head;
        Shares { forward: forward / all, head: head / all }
    }

    /// Returns the time of a micro-batch as a multiple of that without recomputation. Level 3 computes the layers' forward pass again;
    /// the others cost what the advice for a run that does not fit assumes.
    pub fn recompute_factor(&self) -> f64 {
        match self.recompute {
            Recompute::Nothing => 1.0,
            Recompute::Activation => 1.01,
            Recompute::ActivationAndNorms => 1.03,
            Recompute::Layers => 1.0 + self.shares().forward * self.descriptor.layers as f64,
        }
    }

    fn is_of(&self, step: &MeasuredStep) -> bool {
        let (name, fp8) = match self.precision {
            Precision::Bf16 => ("bf16", false),
            Precision::Fp8 => ("bf16", true),
            Precision::Fp32 => ("f32", false),
        };
        step.ranks == 1
            && (step.descriptor, step.storage.optimizer) == (self.descriptor, self.storage.optimizer)
            && (step.precision.as_str(), step.fp8) == (name, fp8)
    }
}

/// Parts of the FLOPs of a micro-batch without recomputation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shares {
    /// The forward pass through one layer; the backward pass takes twice that.
    pub forward: f64,
    /// The head, in both passes.
    pub head: f64,
}

impl Storage {
    /// Returns the bytes that AdamW reads and writes for each parameter.
    pub fn traffic(&self, precision: Precision) -> f64 {
        if precision == Precision::Fp32 {
            // Parameters and moments are read and written, gradients are read.
            return 28.0;
        }
        let moments = match self.moments {
            Moments::F32 => 16.0,
            Moments::Bf16 => 8.0,
            Moments::EightBit => 4.0,
        };
        let masters = match self.master_weights {
            MasterWeights::F32 => 8.0,
            MasterWeights::Remainder => 6.0,
            MasterWeights::None => 2.0,
        };
        // Parameters are written, gradients are read.
        4.0 + moments + masters
    }
}

/// The source of a computing time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// A measurement of this setting.
    Measured,
    /// A measurement of the same model with another setting.
    Scaled,
    /// An assumed MFU.
    Assumed,
}

/// The times of one GPU, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Compute {
    /// A micro-batch, as a CUDA graph.
    pub micro_batch: f64,
    /// The additional time of a micro-batch whose kernels are launched individually.
    pub launches: f64,
    /// The update of all parameters.
    pub update: f64,
    /// The rest of a step: the gradient norm, zeroed gradients, loss.
    pub rest: f64,
    /// Bandwidth of memory-bound kernels in bytes per second.
    pub memory_bandwidth: f64,
    /// The source of the times.
    pub source: Source,
}

/// The times of a measured setting.
#[derive(Clone, Copy, Debug)]
struct Setting {
    batch: usize,
    seq: usize,
    recompute: Recompute,
    compute: Compute,
}

impl Setting {
    /// Combines measurements that differ in the number of micro-batches only.
    fn of(steps: &[&MeasuredStep], shape: &MicroBatch) -> Self {
        let MeasuredStep { batch, seq, recompute, .. } = *steps[0];
        let count = steps.len() as f64;
        let update = steps.iter().map(|step| step.update).sum::<f64>() / count;
        let alone = |step: &&MeasuredStep| (step.step - step.update).max(0.0) / step.micro_batches as f64;
        // Least squares of the relative error of rest + k · micro-batch.
        let (mut kk, mut k1, mut ones, mut k, mut one) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for step in steps {
            let (x, y) = (step.micro_batches as f64 / step.step, 1.0 / step.step);
            kk += x * x;
            k1 += x * y;
            ones += y * y;
            k += x;
            one += y;
        }
        let determinant = kk * ones - k1 * k1;
        let differ = steps.iter().any(|step| step.micro_batches != steps[0].micro_batches);
        let fitted = ((k * ones - one * k1) / determinant, (one * kk - k * k1) / determinant);
        // Measurements of different clocks can lead to a rest below the update, which is part of it.
        let (micro_batch, fixed) = if differ && fitted.1 > update && fitted.0 > 0.0 {
            fitted
        } else {
            (steps.iter().map(alone).sum::<f64>() / count, update)
        };
        let launches = steps.iter().map(|step| {
            step.without_graphs.map_or(0.0, |time| (time - step.step).max(0.0) / step.micro_batches as f64)
        });
        let scale = shape.storage.traffic(shape.precision) / steps[0].storage.traffic(shape.precision);
        let parameters = shape.descriptor.parameters() as f64;
        let compute = Compute {
            micro_batch,
            launches: launches.sum::<f64>() / count,
            update: update * scale,
            rest: fixed - update,
            memory_bandwidth: steps[0].storage.traffic(shape.precision) * parameters / update,
            source: Source::Measured,
        };
        Self { batch, seq, recompute, compute }
    }

    /// Scales the times to another batch, sequence or level.
    fn scaled(&self, shape: &MicroBatch) -> Compute {
        let own = MicroBatch { batch: self.batch, seq: self.seq, recompute: self.recompute, ..*shape };
        let factor = shape.flops() * shape.recompute_factor() / (own.flops() * own.recompute_factor());
        Compute { micro_batch: self.compute.micro_batch * factor, source: Source::Scaled, ..self.compute }
    }
}

/// Returns the times of one GPU, by the rules of this module.
pub fn compute(shape: &MicroBatch, measured: &[MeasuredStep], assumptions: &Assumptions) -> Compute {
    let settings = settings(shape, measured);
    let same_level = |setting: &&Setting| (setting.seq, setting.recompute) == (shape.seq, shape.recompute);
    if let Some(setting) = settings.iter().find(|setting| same_level(setting) && setting.batch == shape.batch) {
        return setting.compute;
    }
    let level = settings.iter().filter(same_level);
    let below = level.clone().filter(|setting| setting.batch < shape.batch).max_by_key(|setting| setting.batch);
    let above = level.filter(|setting| setting.batch > shape.batch).min_by_key(|setting| setting.batch);
    if let (Some(below), Some(above)) = (below, above) {
        let part = (shape.batch - below.batch) as f64 / (above.batch - below.batch) as f64;
        let micro_batch = below.compute.micro_batch * (1.0 - part) + above.compute.micro_batch * part;
        return Compute { micro_batch, source: Source::Scaled, ..above.compute };
    }
    let distance = |setting: &Setting| {
        let batch = (setting.batch as f64 / shape.batch as f64).ln().abs();
        (setting.seq != shape.seq, setting.recompute != shape.recompute, batch)
    };
    let nearest = settings.iter().min_by(|a, b| {
        let (a, b) = (distance(a), distance(b));
        (a.0, a.1).cmp(&(b.0, b.1)).then(a.2.total_cmp(&b.2))
    });
    nearest.map_or_else(|| assumed(shape, assumptions), |setting| setting.scaled(shape))
}

/// Returns the measured settings of a model.
fn settings(shape: &MicroBatch, measured: &[MeasuredStep]) -> Vec<Setting> {
    let mut steps: Vec<&MeasuredStep> = measured.iter().filter(|step| shape.is_of(step)).collect();
    let key = |step: &&MeasuredStep| (step.batch, step.seq, u8::from(step.recompute));
    steps.sort_by_key(key);
    steps.chunk_by(|a, b| key(a) == key(b)).map(|steps| Setting::of(steps, shape)).collect()
}

fn assumed(shape: &MicroBatch, assumptions: &Assumptions) -> Compute {
    let traffic = shape.storage.traffic(shape.precision) * shape.descriptor.parameters() as f64;
    Compute {
        micro_batch: shape.flops() * shape.recompute_factor() / (assumptions.mfu * assumptions.peak),
        launches: 0.0,
        update: traffic / assumptions.memory_bandwidth,
        rest: 0.0,
        memory_bandwidth: assumptions.memory_bandwidth,
        source: Source::Assumed,
    }
}

/// Reports whether an assumption can replace a measurement: Muon's update is not memory-bound.
pub fn can_assume(storage: Storage) -> bool {
    storage.optimizer == Optimizer::AdamW
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "these results are exact")]
mod tests {
    use super::*;
    use std::path::PathBuf;

    const ADAMW: Storage =
        Storage { optimizer: Optimizer::AdamW, master_weights: MasterWeights::F32, moments: Moments::F32 };
    const ASSUMED: Assumptions = Assumptions { mfu: 0.5, peak: 1000e12, memory_bandwidth: 3e12 };

    fn shape(batch: usize, recompute: Recompute) -> MicroBatch {
        let descriptor = "d12".parse().unwrap();
        MicroBatch { descriptor, batch, seq: 1024, recompute, precision: Precision::Bf16, storage: ADAMW }
    }

    /// A step with a rest of 0.5 ms and an update of 1 ms.
    fn step(batch: usize, micro_batches: usize, micro_batch: f64) -> MeasuredStep {
        MeasuredStep {
            file: PathBuf::new(),
            descriptor: "d12".parse().unwrap(),
            machine: "NVIDIA H200".into(),
            precision: "bf16".into(),
            fp8: false,
            batch,
            seq: 1024,
            micro_batches,
            recompute: Recompute::Nothing,
            storage: ADAMW,
            ranks: 1,
            zero_stage: 0,
            shard_size: 1,
            step: 1.5e-3 + micro_batches as f64 * micro_batch,
            update: 1e-3,
            without_graphs: Some(1.5e-3 + micro_batches as f64 * (micro_batch + 2e-4)),
        }
    }

    fn close(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 1e-9, "{found} instead of {expected}");
    }

    #[test]
    fn measured_settings_count_as_they_are() {
        let measured = [step(64, 1, 0.1), step(64, 4, 0.1), step(16, 2, 0.03)];
        let found = compute(&shape(64, Recompute::Nothing), &measured, &ASSUMED);
        close(found.micro_batch, 0.1);
        close(found.update, 1e-3);
        close(found.rest, 5e-4);
        close(found.launches, 2e-4);
        // 28 bytes for each of 124,475,904 parameters.
        close(found.memory_bandwidth, 28.0 * 124_475_904.0 / 1e-3);
        assert_eq!(found.source, Source::Measured);
        // One measurement: everything outside the update is in the micro-batches.
        let found = compute(&shape(16, Recompute::Nothing), &measured, &ASSUMED);
        close(found.micro_batch, 0.03025);
        assert_eq!(found.rest, 0.0);
    }

    #[test]
    fn other_settings_are_scaled() {
        let measured = [step(64, 1, 0.1), step(64, 4, 0.1), step(16, 1, 0.03), step(16, 2, 0.03)];
        let found = compute(&shape(40, Recompute::Nothing), &measured, &ASSUMED);
        close(found.micro_batch, 0.065);
        assert_eq!(found.source, Source::Scaled);
        // Beyond the measured batches, in proportion to the nearest one.
        close(compute(&shape(128, Recompute::Nothing), &measured, &ASSUMED).micro_batch, 0.2);
        close(compute(&shape(8, Recompute::Nothing), &measured, &ASSUMED).micro_batch, 0.015);
        close(compute(&shape(64, Recompute::Activation), &measured, &ASSUMED).micro_batch, 0.101);
        let compact = Storage { master_weights: MasterWeights::Remainder, moments: Moments::Bf16, ..ADAMW };
        let compact = MicroBatch { storage: compact, ..shape(64, Recompute::Nothing) };
        close(compute(&compact, &measured, &ASSUMED).update, 1e-3 * 18.0 / 28.0);
    }

    #[test]
    fn level_3_computes_the_forward_pass_of_the_layers_again() {
        let shape = shape(64, Recompute::Layers);
        let shares = shape.shares();
        close(12.0 * 3.0 * shares.forward + shares.head, 1.0);
        // The matrices of a layer of d12: 12 · 768². Attention: 2 · 768 · 1024.
        let forward = (2 * 12 * 768 * 768 + 2 * 768 * 1024) as f64;
        close(shares.forward, forward / (36.0 * forward + (6 * 50_304 * 768) as f64));
        close(shape.recompute_factor(), 1.0 + 12.0 * shares.forward);
    }

    #[test]
    fn other_models_and_precisions_are_assumed() {
        let measured = [step(64, 1, 0.1)];
        let others = [
            MicroBatch { descriptor: "d24".parse().unwrap(), ..shape(64, Recompute::Nothing) },
            MicroBatch { precision: Precision::Fp8, ..shape(64, Recompute::Nothing) },
        ];
        for shape in others {
            let found = compute(&shape, &measured, &ASSUMED);
            assert_eq!(found.source, Source::Assumed);
            close(found.micro_batch, shape.flops() / 500e12);
            close(found.update, 28.0 * shape.descriptor.parameters() as f64 / 3e12);
        }
        let several = [MeasuredStep { ranks: 2, ..step(64, 1, 0.1) }];
        assert_eq!(compute(&shape(64, Recompute::Nothing), &several, &ASSUMED).source, Source::Assumed);
    }
}
