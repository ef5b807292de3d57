//! Output of `train` before the first step and after the last.

use super::resources::describe;
use super::train::{Config, TrainOptions, TrainingData, UNKNOWN_STEPS, ValidationData};
use crate::evaluate::core::CoreSet;
use crate::gpu_info::GpuInfo;
use crate::terminal::counted;
use crate::train::Outcome;
use anyhow::Result;
use data::mixture::{Counts, Estimate, Packing, SourceState};
use data::{Batches, Mixture, MultipleChoice, Tokens};
use engine::open::{Device, Opened, Precision};
use engine::ops::Fp8Accumulation;
use engine::plan::{Group, Plan};
use engine::{Engine, GeluFusion};
use model::fit::RunLimits;
use model::guards::{Limits, Skips};
use model::schedule::ScheduleKind;
use model::{Decoder, Descriptor, Fp8Recipe, MasterWeights, Moments, Optimizer, PlanOptions, Recompute, Shard, Zero};
use std::time::Duration;
use tokenizer::Tokenizer;

/// The settings of a run, for the table that `train` prints first.
pub struct Setup<'a> {
    pub config: &'a Config,
    /// World size.
    pub ranks: usize,
    pub descriptor: Descriptor,
    /// `None` for a plan without data.
    pub data: Option<&'a TrainingData>,
    pub hellaswag: Option<&'a MultipleChoice>,
    pub core: Option<&'a CoreSet>,
    pub tokenizer: Option<&'a Tokenizer>,
    pub opened: &'a Opened,
    /// NVML if --gpu-info-every asks for it, or the reason why it is not available.
    pub gpu_info: Option<&'a Result<GpuInfo>>,
}

impl Setup<'_> {
    /// Returns a table of names and values.
    pub fn table(&self) -> String {
        let Self { config, descriptor, opened, .. } = self;
        let flags = &config.flags;
        let mut rows = vec![("device", describe(opened) + &self.by_ranks())];
        rows.extend(opened.note.clone().filter(|_| opened.device != Device::Cpu).map(|note| ("", note)));
        rows.extend([
            ("model", format!("{}: {descriptor}", flags.model.as_deref().unwrap_or("custom"))),
            ("parameters", format!("{}, {}", descriptor.parameters(), parameter_storage(config))),
            ("matmuls", matmuls(config)),
            ("recomputation", recomputation(flags.recompute).to_owned()),
        ]);
        rows.extend(self.training_data());
        rows.extend(self.validation_data());
        rows.push(("tokenizer", self.tokenizer.map_or("unknown".to_owned(), ToString::to_string)));
        rows.extend(self.optimizer());
        rows.extend(self.evaluation());
        if let Some(info) = self.gpu_info {
            let info = match info {
                Ok(_) => format!("every {} steps", flags.gpu_info_every),
                Err(why) => format!("none: {why:#}"),
            };
            rows.push(("GPU information", info));
        }
        if let Some(out) = &flags.out {
            let checkpoints = interval(flags.checkpoint_every, config.steps);
            rows.push(("output", format!("{}, checkpoints {checkpoints}", out.display())));
        }
        rows.iter().map(|(name, value)| format!("{name:<20} {value}")).collect::<Vec<_>>().join("\n")
    }

    fn by_ranks(&self) -> String {
        if self.ranks > 1 { format!(" x {} ranks", self.ranks) } else { String::new() }
    }

    fn training_data(&self) -> Vec<(&'static str, String)> {
        let Config { batch, seq, total_batch, steps, .. } = *self.config;
        let train = match self.data.map(|data| &data.train) {
            None => {
                let steps = if steps == UNKNOWN_STEPS { "one epoch".to_owned() } else { steps.to_string() };
                let patterns = self.config.flags.patterns(|table| table.train.as_deref(), &self.config.flags.train);
                return vec![("training data", describe_patterns(&patterns)), ("steps", steps)];
            }
            Some(train) if self.config.flags.overfit_one_batch => {
                let one = format!("one batch, repeated, of {}", describe_data(&train.shards()));
                return vec![("training data", one), ("steps", steps.to_string())];
            }
            Some(Batches::Mixture(mixture)) => return self.mixture(mixture),
            Some(Batches::Shards(train)) => train,
        };
        let batches = train.batches_per_epoch();
        let order = if train.shuffles() { "shuffled" } else { "in order" };
        let tokens = batches * batch * seq * self.ranks;
        let epochs = (steps * total_batch) as f64 / tokens as f64;
        let steps_per_epoch = batches / self.config.grad_accum(self.ranks);
        vec![
            ("training data", describe_data(&train.shards().iter().collect::<Vec<_>>())),
            ("epoch", format!("{tokens} tokens in {batches} batches, {steps_per_epoch} steps, {order}")),
            ("steps", format!("{steps}, {epochs:.2} epochs")),
        ]
    }

    /// Describes the sources of a mixture, with what the run reads of each.
    fn mixture(&self, mixture: &Mixture) -> Vec<(&'static str, String)> {
        let Config { seq, total_batch, steps, .. } = *self.config;
        let estimates = self.data.map(|data| &data.estimates[..]).unwrap_or_default();
        let packing = match mixture.packing() {
            Packing::Stream => "",
            Packing::BestFit => ", best-fit packing",
            Packing::Pad => ", best-fit packing with padding",
        };
        let n = estimates.len();
        let order = if mixture.shuffles() { "shuffled" } else { "in order" };
        let conversations = mixture.shards().any(|shard| shard.mask().is_some());
        let loss = if conversations { ", loss on the assistant's tokens" } else { "" };
        let documents = self.config.flags.document_mask.unwrap_or(false);
        let attention = if documents { ", attention within documents" } else { "" };
        let heading = format!("{n} {}{packing}, {order}{loss}{attention}", if n == 1 { "source" } else { "sources" });
        let (rows, _) = mixture.rows_of_run(estimates, (steps * (total_batch / seq)) as u64);
        let total: f64 = mixture.sources().map(|source| source.weight).sum();
        let source = |((source, estimate), rows): ((&SourceState, &Estimate), &f64)| {
            let Estimate { counts: Counts { used, cropped, padded, shortened }, is_exact, .. } = *estimate;
            let percent = |part: u64, whole: u64| 100.0 * part as f64 / whole.max(1) as f64;
            let about = if is_exact { "" } else { "about " };
            let padding = match mixture.packing() {
                Packing::Pad => format!(", {:.1} % of the sequences padding", percent(padded, used + padded)),
                Packing::Stream | Packing::BestFit => String::new(),
            };
            let shortened = if shortened > 0 {
                format!(
                    " ({about}{} longer than --seq {seq} + 1 lose their end)",
                    counted(shortened as usize, "conversation")
                )
            } else {
                String::new()
            };
            format!(
                "{}: weight {:.2} %, {} tokens, {:.2} epochs; {about}{:.1} % of the tokens used, {:.1} % cropped{shortened}{padding}",
                source.name,
                100.0 * source.weight / total,
                source.tokens,
                rows / estimate.rows,
                percent(used, used + cropped),
                percent(cropped, used + cropped),
            )
        };
        let sources = mixture.sources().zip(estimates).zip(&rows).map(source);
        let mut table = vec![("training data", heading)];
        table.extend(sources.map(|text| ("", text)));
        table.push(("steps", steps.to_string()));
        table
    }

    fn validation_data(&self) -> Vec<(&'static str, String)> {
        let name = |i: usize| if i == 0 { "validation data" } else { "" };
        match self.data.map(|data| &data.val[..]) {
            None => {
                let patterns = self.config.flags.patterns(|table| table.val.as_deref(), &self.config.flags.val);
                vec![(name(0), describe_patterns(&patterns))]
            }
            Some([]) => vec![(name(0), "none".to_owned())],
            Some([only]) => vec![(name(0), describe_data(&only.loader.shards()))],
            Some(sources) => {
                let describe =
                    |source: &ValidationData| format!("{}: {}", source.name, describe_data(&source.loader.shards()));
                sources.iter().enumerate().map(|(i, source)| (name(i), describe(source))).collect()
            }
        }
    }

    fn optimizer(&self) -> Vec<(&'static str, String)> {
        let config = self.config;
        let Config { batch, seq, total_batch, lr, warmup, flags, .. } = config;
        let micro_batches = format!("{}{}", config.grad_accum(self.ranks), self.by_ranks());
        let warmdown = flags.warmdown.map_or_else(String::new, |part| format!(", warmdown {part} of the steps"));
        let schedule = match flags.schedule() {
            ScheduleKind::Constant => format!("constant, {lr:.2e}"),
            kind => {
                let (kind, last) = (format!("{kind:?}").to_lowercase(), lr * config.final_fraction);
                let constant =
                    if last >= *lr && last > 0.0 { ", so that it does not decay: see --final-fraction" } else { "" };
                format!("{kind}{warmdown}, peak {lr:.2e}, warmup {warmup} steps, final {last:.2e}{constant}")
            }
        };
        let rows = vec![
            ("batch", format!("{batch} x {seq} tokens x {micro_batches} = {total_batch} per step")),
            ("optimizer", optimizer_name(flags)),
            ("learning rate", schedule),
            ("weight decay, clip", format!("{}, {}", config.weight_decay, flags.clip())),
            ("skipped updates", skipped_updates(config)),
            ("seed", flags.seed.to_string()),
        ];
        let default = flags.optimizer() == Optimizer::AdamW
            && flags.embedding_lr.or(flags.head_lr).is_none()
            && flags.group.is_empty();
        rows.into_iter().filter(|(name, _)| !default || *name != "optimizer").collect()
    }

    fn evaluation(&self) -> Vec<(&'static str, String)> {
        let config = self.config;
        let row = |every: Option<usize>, what: String| match every {
            Some(0) => interval(every, config.steps),
            _ => format!("{}, {what}", interval(every, config.steps)),
        };
        let mut rows = Vec::new();
        let available = match self.data {
            Some(data) => data.val.iter().map(|val| val.batches).max(),
            None => config.flags.names_validation().then_some(usize::MAX),
        };
        if let Some(available) = available {
            let batches = config.val_batches.min(available);
            rows.push(("validation", row(Some(config.val_every), format!("{batches} batches"))));
        }
        if let Some(set) = self.hellaswag {
            let examples = format!("{}, {} examples", set.name(), set.examples().len());
            rows.push(("HellaSwag", row(Some(config.val_every), examples)));
        }
        if let Some(set) = self.core {
            let questions = format!("{}, {} questions", counted(set.tasks(), "task"), set.questions());
            rows.push(("CORE", row(config.flags.core_every.or(Some(config.steps)), questions)));
        }
        rows.push(("samples", row(config.flags.sample_every, format!("{} tokens", config.sample_length))));
        rows
    }
}

fn interval(every: Option<usize>, steps: usize) -> String {
    match every {
        Some(0) => "never".to_owned(),
        Some(n) if n < steps => format!("every {n} steps"),
        _ => "at the end".to_owned(),
    }
}

/// Returns a table of the memory that each ZeRO stage needs on a GPU, and of what it saves compared to stage 0. `chosen` is the stage of
/// the run.
pub fn zero_stages(
    descriptor: Descriptor,
    options: PlanOptions,
    (chosen, limits): (u8, RunLimits),
    engine: &mut dyn Engine,
) -> String {
    let mut planned = |stage| {
        let zero = Zero::new(stage, Shard { rank: 0, ..limits.shard }).share_experts(options.zero.shares_experts());
        let (_, plan) = Decoder::plan(descriptor, PlanOptions { zero, ..options }, engine);
        let groups = [Group::Parameters, Group::Gradients, Group::Optimizer].map(|group| plan.group_bytes(group));
        (groups, plan.bytes())
    };
    let (_, unsharded) = planned(0);
    let mib = |bytes: i128| bytes as f64 / f64::from(1 << 20);
    let RunLimits { ranks, shard, .. } = limits;
    let name = match ranks / shard.ranks {
        1 => format!("ZeRO, {ranks} ranks"),
        groups => format!("ZeRO, {groups} groups of {}", shard.ranks),
    };
    let head = format!(
        "{:<22} {:>10} {:>10} {:>10} {:>10} {:>10}\n",
        name, "parameters", "gradients", "optimizer", "total, MiB", "saved"
    );
    let rows = (0..=3).map(|stage| {
        let (groups, all) = planned(stage);
        let [params, grads, state] = groups.map(|bytes| mib(bytes as i128));
        let name = format!("  stage {stage}{}", if stage == chosen { ", this run" } else { "" });
        let (total, saved) = (mib(all as i128), mib(unsharded as i128 - all as i128));
        format!("{name:<22} {params:>10.1} {grads:>10.1} {state:>10.1} {total:>10.1} {saved:>10.1}\n")
    });
    head + &rows.collect::<String>()
}

/// Returns the memory that a planned run needs. `reserved` bytes are not in the plan. `free` is the free memory of the device, if
/// known.
pub fn planned(plan: &Plan, reserved: usize, free: Option<usize>) -> String {
    let gib = |bytes: usize| format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64);
    let free = free.map_or("free memory unknown".to_owned(), |free| format!("{} is free", gib(free)));
    let more =
        if reserved > 0 { format!(", and {} for CUDA graphs, code and NCCL", gib(reserved)) } else { String::new() };
    format!("planned: {}{more} ({free}); nothing was computed or written", gib(plan.bytes()))
}

/// Returns the optimizer and the learning rates that differ from the others.
fn optimizer_name(flags: &TrainOptions) -> String {
    let optimizer = match (flags.optimizer(), flags.muon_lr, flags.muon_momentum) {
        (Optimizer::Muon, Some(lr), Some(momentum)) => {
            format!("Muon for the layers' matrices, peak {lr:.2e}, momentum {momentum}; AdamW")
        }
        _ => "AdamW".to_owned(),
    };
    let rate = |name, lr: Option<f32>| lr.map_or_else(String::new, |lr| format!(", {name} peak {lr:.2e}"));
    let rates = [rate("embeddings", flags.embedding_lr), rate("head", flags.head_lr)];
    let groups = flags.group.iter().map(|group| format!(", {group}"));
    std::iter::once(optimizer).chain(rates).chain(groups).collect::<Vec<_>>().concat()
}

fn skipped_updates(config: &Config) -> String {
    let Limits { loss_z, norm_z, bad_steps } = config.limits();
    let above =
        |what, limit: Option<f64>| limit.map_or(String::new(), |z| format!(", z-score of the {what} above {z}"));
    format!(
        "not finite (the run ends after {bad_steps} in a row){}{}",
        above("loss", loss_z),
        above("gradient norm", norm_z)
    )
}

fn parameter_storage(config: &Config) -> String {
    if config.precision == Precision::Fp32 || config.flags.hardware.device == Device::Cpu {
        return "f32".to_owned();
    }
    let weights = match config.flags.master_weights {
        MasterWeights::F32 => "bf16, master weights in f32",
        MasterWeights::Remainder => "bf16, master weights in f32 as 16-bit remainders",
        MasterWeights::None => "bf16, updated with stochastic rounding",
    };
    let moments = match config.flags.moments {
        Moments::F32 => "",
        Moments::Bf16 => ", moments in bf16",
        Moments::EightBit => ", moments in 8 bits",
    };
    format!("{weights}{moments}")
}

fn matmuls(config: &Config) -> String {
    let inputs = match config.precision {
        Precision::Bf16 => "bf16",
        Precision::Fp8 => return fp8_matmuls(&config.flags),
        Precision::Fp32 if config.flags.hardware.tf32 => "tf32",
        Precision::Fp32 => "f32",
    };
    match config.gelu_fusion {
        GeluFusion::None => format!("{inputs}, GELU unfused"),
        GeluFusion::Forward => format!("{inputs}, GELU fused in the forward pass"),
        GeluFusion::Both => format!("{inputs}, GELU fused in both passes"),
    }
}

fn fp8_matmuls(TrainOptions { fp8, hardware, lora, lora_flags, .. }: &TrainOptions) -> String {
    let scaling = match fp8.fp8_recipe.unwrap_or_default() {
        Fp8Recipe::Current => "current",
        Fp8Recipe::Delayed => "delayed",
    };
    let accumulation = match fp8.fp8_accumulation.unwrap_or_default() {
        Fp8Accumulation::Fast => "fast",
        Fp8Accumulation::Exact => "exact",
        Fp8Accumulation::ExactGradients => "exact backward",
    };
    let emulated = if hardware.device == Device::Cpu { "emulated " } else { "" };
    let adapters = lora.is_some() || lora_flags.adapters().is_some();
    let layers = if fp8.fp8_head == Some(true) && !adapters { "layers and the head" } else { "layers" };
    format!("{emulated}fp8 in the {layers}, {scaling} scaling, {accumulation} accumulation")
}

fn recomputation(recompute: Recompute) -> &'static str {
    match recompute {
        Recompute::Nothing => "none",
        Recompute::Activation => "activation",
        Recompute::ActivationAndNorms => "activation and norms",
        Recompute::Layers => "whole layers",
    }
}

/// Describes data, or the pattern of files that a plan without data does not open.
fn describe_patterns(patterns: &[&str]) -> String {
    if patterns.is_empty() { "none".to_owned() } else { format!("{}, not opened", patterns.join(", ")) }
}

fn describe_data(shards: &[&Tokens]) -> String {
    let tokens: usize = shards.iter().map(|shard| shard.len()).sum();
    match shards {
        [only] => format!("{}, {tokens} tokens", only.name()),
        [first, .., last] => {
            format!("{} … {}, {} shards, {tokens} tokens", first.name(), last.name(), shards.len())
        }
        [] => String::new(),
    }
}

/// Returns the last lines of a run: its final losses, its speed, and where its files are.
///
/// `wall` is the time since the program started.
pub fn summary(outcome: &Outcome, train_loss: Option<f64>, config: &Config, wall: Duration) -> String {
    let mut rows = Vec::new();
    let train_loss = train_loss.map(|loss| format!("train loss {loss:.4}"));
    let val_loss =
        outcome.val.map(|(before, after)| format!("validation loss {after:.4} ({before:.4} before training)"));
    let losses: Vec<String> = train_loss.into_iter().chain(val_loss).collect();
    if !losses.is_empty() {
        rows.push(format!("final {}", losses.join(", ")));
    }
    if let Some(step) = outcome.step {
        let rate = config.total_batch as f64 / step.as_secs_f64();
        rows.push(format!("{:.2} ms per step, {rate:.0} tok/s", 1e3 * step.as_secs_f64()));
    }
    if outcome.skips != Skips::default() {
        rows.push(format!("updates skipped: {}", outcome.skips));
    }
    let seconds = |time: Duration| format!("{:.1} s", time.as_secs_f64());
    let (training, wall) = (seconds(outcome.training), seconds(wall));
    rows.push(match outcome.resumed {
        None => format!("{} tokens in {training} of training, {wall} in total", outcome.tokens),
        Some((step, since)) => format!(
            "{} tokens in {training} of training; since it was resumed after step {step}: {} of training, {wall} in total",
            outcome.tokens,
            seconds(since)
        ),
    });
    if let Some(out) = &config.flags.out {
        rows.push(format!("log: {0}/main.log, {0}/main.jsonl", out.display()));
    }
    rows.push(match &outcome.model_file {
        Some(file) => format!("model: {}", file.display()),
        None => "model: not saved".to_owned(),
    });
    rows.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_described_in_words() {
        let intervals = [Some(0), None, Some(10), Some(3)].map(|every| interval(every, 10));
        assert_eq!(intervals, ["never", "at the end", "at the end", "every 3 steps"]);
    }
}
