//! Settings of `train` that fit a machine and a data set, for the suggested command.

use crate::commands::resources::Hardware;
use data::dataset::Split;
use data::text::Summary;
use engine::open::{Device, Precision, planning_engine};
use model::{Decoder, Descriptor, PlanOptions};
use std::thread::available_parallelism;

/// Tokens in a sequence, if the shards have that many.
const SEQ: usize = 1024;

/// Sequences in a micro-batch on a GPU, the preferred number first.
const BATCHES: [usize; 7] = [64, 32, 16, 8, 4, 2, 1];

/// Models for a GPU, the largest first, each with the number of training tokens from which it is suggested.
const MODELS: [(&str, usize); 3] = [("d24", 4_000_000_000), ("d12", 20_000_000), ("d6", 0)];

/// Steps that an epoch should have.
const MIN_STEPS: usize = 100;

/// Fraction of the free memory of a GPU that a suggested run may use.
const MEMORY_FRACTION: f64 = 0.9;

/// Number of CPU cores from which a model of 30 million parameters is suggested instead of one of 7 million.
const MANY_CORES: usize = 16;

/// Fewest tokens of a validation shard that is used.
const MIN_VALIDATION: usize = 33;

/// The device that `train` uses by default.
#[derive(Clone, Copy, Debug)]
pub enum Machine {
    /// A CPU with a number of cores.
    Cpu(usize),
    /// A GPU with an amount of free memory in bytes.
    Gpu(usize),
}

impl Machine {
    /// Returns this machine.
    pub fn current() -> Self {
        let opened = Hardware::default().open().ok().filter(|opened| opened.device == Device::Cuda);
        let free = opened.and_then(|opened| opened.engine.free_memory().ok());
        free.map_or_else(|| Self::Cpu(available_parallelism().map_or(1, usize::from)), Self::Gpu)
    }
}

/// The amounts of data of a data set.
#[derive(Clone, Copy, Debug)]
pub struct Amounts {
    vocab: usize,
    train: usize,
    /// Tokens of the smallest training shard.
    train_shard: usize,
    /// Tokens of the smallest validation shard, or 0.
    val_shard: usize,
}

impl Amounts {
    /// `shard_tokens` is the size of all shards of a split but the last.
    pub fn new(written: &Summary, shard_tokens: usize, vocab: usize) -> Self {
        let last = |split: &Split| split.tokens - split.shards.saturating_sub(1) * shard_tokens.min(split.tokens);
        let [train_shard, val_shard] = [&written.train, &written.val].map(|split| last(split).min(shard_tokens));
        Self { vocab, train: written.train.tokens, train_shard, val_shard }
    }

    /// Returns whether the validation split has enough tokens for a batch.
    pub fn has_validation(self) -> bool {
        self.val_shard >= MIN_VALIDATION
    }

    /// Returns the tokens that a batch may have: a shard needs one more.
    fn batch_tokens(self) -> usize {
        let smallest = if self.has_validation() { self.train_shard.min(self.val_shard) } else { self.train_shard };
        smallest.saturating_sub(1)
    }
}

/// Returns flags of `train`. Returns `None` if a shard is too small for a sequence.
pub fn settings(machine: Machine, amounts: Amounts) -> Option<Vec<String>> {
    let most = amounts.batch_tokens();
    if most == 0 {
        return None;
    }
    let words = |text: String| Some(text.split(' ').map(str::to_owned).collect());
    match machine {
        Machine::Cpu(cores) => {
            let (shape, batch, seq) = if cores < MANY_CORES {
                ("--layers 4 --heads 4 --channels 128", 8, 64)
            } else {
                ("--model d6", 8, 256)
            };
            let seq = most.min(seq);
            let batch = batch.min(most / seq);
            let validation = if amounts.has_validation() { " --val-every 50" } else { "" };
            let steps = format!("--steps {MIN_STEPS} --lr 1e-3 --warmup 10{validation} --sample-every 50");
            words(format!("{shape} --batch {batch} --seq {seq} {steps}"))
        }
        Machine::Gpu(free) => {
            let seq = SEQ.min(most);
            let enough_data = |batch: usize| batch * seq <= most && batch * seq * MIN_STEPS <= amounts.train;
            let candidates =
                MODELS.into_iter().filter(|(_, tokens)| amounts.train >= *tokens).flat_map(|(model, _)| {
                    BATCHES
                        .into_iter()
                        .filter(|&batch| batch == 1 || enough_data(batch))
                        .map(move |batch| (model, batch))
                });
            let memory = (free as f64 * MEMORY_FRACTION) as usize;
            let fits = |&(model, batch): &(&str, usize)| needed(model, amounts.vocab, batch, seq) <= memory;
            let smallest = MODELS.last().map(|(model, _)| (*model, 1));
            let (model, batch) = candidates.into_iter().find(fits).or(smallest)?;
            words(format!("--model {model} --batch {batch} --seq {seq}"))
        }
    }
}

/// Returns the memory in bytes that training needs on a GPU.
fn needed(model: &str, vocab: usize, batch: usize, seq: usize) -> usize {
    let Ok(known) = model.parse::<Descriptor>() else { return usize::MAX };
    let mut engine = planning_engine(Precision::Bf16);
    let (_, plan) = Decoder::plan(Descriptor { vocab, ..known }, PlanOptions::training(batch, seq), &mut *engine);
    plan.bytes() + engine.reserved_memory(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: usize = 1 << 30;

    fn suggested(machine: Machine, train: usize, val: usize, shard: usize) -> String {
        let split = |tokens: usize| Split { shards: tokens.div_ceil(shard), tokens, ..Split::default() };
        let written = Summary { train: split(train), val: split(val), ..Summary::default() };
        settings(machine, Amounts::new(&written, shard, 50257)).map_or_else(String::new, |words| words.join(" "))
    }

    #[test]
    fn suggested_models_fit_the_gpu_and_the_data() {
        let gpu = |gib: usize, tokens| suggested(Machine::Gpu(gib * GIB), tokens, tokens / 100, 100_000_000);
        assert_eq!(gpu(79, 10_000_000_000), "--model d24 --batch 64 --seq 1024");
        assert_eq!(gpu(23, 10_000_000_000), "--model d24 --batch 16 --seq 1024");
        assert_eq!(gpu(79, 1_000_000_000), "--model d12 --batch 64 --seq 1024");
        assert_eq!(gpu(7, 1_000_000_000), "--model d12 --batch 8 --seq 1024");
        assert_eq!(gpu(79, 1_000_000), "--model d6 --batch 8 --seq 1024");
        assert_eq!(gpu(79, 2000), "--model d6 --batch 1 --seq 1024");
        assert_eq!(gpu(1, 1_000_000_000), "--model d6 --batch 1 --seq 1024");
    }

    #[test]
    fn suggested_batches_fit_the_smallest_shard() {
        let cpu = |train, val, shard| {
            let suggested = suggested(Machine::Cpu(2), train, val, shard);
            let number = |flag: &str| {
                let after = suggested.split(&format!("{flag} ")).nth(1)?;
                after.split(' ').next()?.parse::<usize>().ok()
            };
            assert_eq!(suggested.contains("--val-every"), val >= MIN_VALIDATION, "{suggested}");
            (number("--batch"), number("--seq"))
        };
        assert_eq!(cpu(1_000_000, 10_000, 100_000_000), (Some(8), Some(64)));
        assert_eq!(cpu(1_000_000, 200, 100_000_000), (Some(3), Some(64)));
        // The validation split is left out.
        assert_eq!(cpu(1_000_000, 20, 100_000_000), (Some(8), Some(64)));
        assert_eq!(cpu(1_000_040, 10_000, 1000), (Some(1), Some(39)));
        assert_eq!(cpu(1001, 0, 1000), (None, None));
        assert_eq!(cpu(2, 0, 1000), (Some(1), Some(1)));
    }
}
