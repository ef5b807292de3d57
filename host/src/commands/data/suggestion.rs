//! Settings of `train` that fit a machine and a data set, for the suggested command.

use crate::commands::resources::Hardware;
use data::dataset::Split;
use data::text::Summary;
use engine::open::{Device, Precision, planning_engine};
use interchange::{ModelSource, config};
use model::{Decoder, Descriptor, PlanOptions};
use std::path::Path;
use std::thread::available_parallelism;
use tokenizer::Tokenizer;

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

/// Peak learning rate for a model that has been trained.
const FINE_TUNING_RATE: &str = "3e-5";

/// Minimum number of tokens of a validation shard that is used.
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

/// The amounts of data of a data set, and what its tokenizer implies.
#[derive(Clone, Debug)]
pub struct Amounts {
    vocab: usize,
    /// The path and the shape of the model in the directory of the tokenizer.
    model: Option<(String, Descriptor)>,
    train: usize,
    /// Tokens of the smallest training shard.
    train_shard: usize,
    /// Tokens of the smallest validation shard, or 0.
    val_shard: usize,
}

impl Amounts {
    /// `shard_tokens` is the size of all shards of a split but the last.
    pub fn new(written: &Summary, shard_tokens: usize, tokenizer: &Tokenizer) -> Self {
        let last = |split: &Split| split.tokens - split.shards.saturating_sub(1) * shard_tokens.min(split.tokens);
        let [train_shard, val_shard] = [&written.train, &written.val].map(|split| last(split).min(shard_tokens));
        let (vocab, model) = (tokenizer.vocab(), model_of(tokenizer));
        Self { vocab, model, train: written.train.tokens, train_shard, val_shard }
    }

    /// Returns whether the validation split has enough tokens for a batch.
    pub fn has_validation(&self) -> bool {
        self.val_shard >= MIN_VALIDATION
    }

    /// Returns the tokens that a batch may have: a shard needs one more.
    fn batch_tokens(&self) -> usize {
        let smallest = if self.has_validation() { self.train_shard.min(self.val_shard) } else { self.train_shard };
        smallest.saturating_sub(1)
    }
}

/// Returns the path and the shape of the model in the directory of a tokenizer.
fn model_of(tokenizer: &Tokenizer) -> Option<(String, Descriptor)> {
    let directory = atomic_file::parent(Path::new(tokenizer.file().map(|_| tokenizer.name())?));
    let source = directory.join(config::FILE).is_file().then(|| ModelSource::open(directory).ok())??;
    Some((directory.to_str()?.to_owned(), source.descriptor()))
}

/// Returns flags of `train` that fine-tune the model of the tokenizer or, without one, train a model from scratch. Returns `None` if a
/// shard is too small for a sequence.
pub fn settings(machine: Machine, amounts: &Amounts) -> Option<Vec<String>> {
    let model = amounts.model.as_ref();
    let most = amounts.batch_tokens().min(model.map_or(usize::MAX, |(_, descriptor)| descriptor.max_seq_len));
    if most == 0 {
        return None;
    }
    let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let named = |name: &str| vec!["--model".to_owned(), name.to_owned()];
    let rate = if model.is_some() { FINE_TUNING_RATE } else { "1e-3" };
    match machine {
        Machine::Cpu(cores) => {
            let (shape, batch, seq) = match model {
                Some((name, _)) => (named(name), 8, 64),
                None if cores < MANY_CORES => (words("--layers 4 --heads 4 --channels 128"), 8, 64),
                None => (named("d6"), 8, 256),
            };
            let seq = most.min(seq);
            let batch = batch.min(amounts.batch_tokens() / seq);
            let validation = if amounts.has_validation() { " --val-every 50" } else { "" };
            let steps = format!("--steps {MIN_STEPS} --lr {rate} --warmup 10{validation} --sample-every 50");
            Some([shape, words(&format!("--batch {batch} --seq {seq} {steps}"))].concat())
        }
        Machine::Gpu(free) => {
            let seq = SEQ.min(most);
            let enough_data =
                |batch: usize| batch * seq <= amounts.batch_tokens() && batch * seq * MIN_STEPS <= amounts.train;
            let known = |(name, tokens): (&str, usize)| {
                let descriptor = name.parse().ok().filter(|_| amounts.train >= tokens)?;
                Some((name.to_owned(), Descriptor { vocab: amounts.vocab, ..descriptor }))
            };
            let models =
                model.map_or_else(|| MODELS.into_iter().filter_map(known).collect(), |model| vec![model.clone()]);
            let batches = || BATCHES.into_iter().filter(|&batch| batch == 1 || enough_data(batch));
            let mut candidates = models.iter().flat_map(|model| batches().map(move |batch| (model, batch)));
            let memory = (free as f64 * MEMORY_FRACTION) as usize;
            let fitting = candidates.find(|((_, descriptor), batch)| needed(*descriptor, *batch, seq) <= memory);
            let ((name, _), batch) = fitting.or(models.last().map(|model| (model, 1)))?;
            let rate = if model.is_some() { format!(" --lr {rate}") } else { String::new() };
            Some([named(name), words(&format!("--batch {batch} --seq {seq}{rate}"))].concat())
        }
    }
}

/// Returns the memory in bytes that training needs on a GPU.
fn needed(descriptor: Descriptor, batch: usize, seq: usize) -> usize {
    let mut engine = planning_engine(Precision::Bf16);
    let (_, plan) = Decoder::plan(descriptor, PlanOptions::training(batch, seq), &mut *engine);
    plan.bytes() + engine.reserved_memory(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: usize = 1 << 30;

    fn suggested(machine: Machine, train: usize, val: usize, shard: usize) -> String {
        let split = |tokens: usize| Split { shards: tokens.div_ceil(shard), tokens, ..Split::default() };
        let written = Summary { train: split(train), val: split(val), ..Summary::default() };
        let amounts = Amounts::new(&written, shard, &Tokenizer::gpt2());
        settings(machine, &amounts).map_or_else(String::new, |words| words.join(" "))
    }

    #[test]
    fn a_model_is_fine_tuned_within_its_longest_sequence() {
        let written = Summary { train: Split { shards: 1, tokens: 100_000, ..Split::default() }, ..Summary::default() };
        let suggested = |machine, longest| {
            let model = Some(("my model".to_owned(), Descriptor::gpt2(2, 2, 64, longest, 50257).unwrap()));
            let amounts = Amounts { model, ..Amounts::new(&written, 1_000_000, &Tokenizer::gpt2()) };
            settings(machine, &amounts).unwrap()[1..].join(" ")
        };
        let flags = "--steps 100 --lr 3e-5 --warmup 10 --sample-every 50";
        assert_eq!(suggested(Machine::Cpu(2), 256), format!("my model --batch 8 --seq 64 {flags}"));
        assert_eq!(suggested(Machine::Cpu(2), 32), format!("my model --batch 8 --seq 32 {flags}"));
        assert_eq!(suggested(Machine::Gpu(8 * GIB), 128), "my model --batch 4 --seq 128 --lr 3e-5");
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
