//! What `train` prints before its first step and after its last.

use crate::gpu_info::GpuInfo;
use crate::train::Outcome;
use anyhow::Result;
use checkpoint::config::Config;
use data::{Loader, MultipleChoice};
use engine::open::Precision;
use engine::plan::{Group, Plan};
use engine::{Engine, GeluFusion};
use model::guards::{Limits, Skips};
use model::{Descriptor, Gpt2, PlanOptions, Recompute, Shard, Zero};
use std::path::Path;
use std::time::Duration;

/// Everything that was settled about a run.
pub struct Setup<'a> {
    pub config: &'a Config,
    /// Processes that train together.
    pub ranks: usize,
    pub descriptor: Descriptor,
    pub train: &'a Loader,
    pub val: Option<&'a Loader>,
    pub hellaswag: Option<&'a MultipleChoice>,
    pub engine: &'a dyn Engine,
    /// Why it is not another engine.
    pub note: Option<&'a str>,
    /// If it was asked for; why it cannot be had, if so.
    pub gpu_info: Option<&'a Result<GpuInfo>>,
}

impl Setup<'_> {
    /// A table of two columns.
    pub fn table(&self) -> String {
        let Self { config, descriptor, engine, .. } = self;
        let Config { batch, seq, total_batch, steps, .. } = config;
        let learning_rate = format!(
            "{}, peak {:.2e}, warmup {} steps, final {:.2e}",
            format!("{:?}", config.schedule).to_lowercase(),
            config.lr,
            config.warmup,
            config.lr * config.final_fraction
        );
        let every = |n: usize| match n {
            0 => "never".to_owned(),
            n if n >= *steps => "at the end".to_owned(),
            n => format!("every {n} steps"),
        };
        let with = |n: usize, what: String| if n == 0 { every(n) } else { format!("{}, {what}", every(n)) };
        let mut rows = vec![("device", engine.describe() + &self.by_ranks())];
        rows.extend(self.note.map(|note| ("", note.to_owned())));
        rows.extend([
            ("model", format!("{}: {descriptor}", config.model.as_deref().unwrap_or("a free shape"))),
            ("parameters", format!("{}, {}", descriptor.parameters(), stored(config))),
            ("products", products(config)),
            ("recomputed", recomputed(config.recompute).to_owned()),
        ]);
        rows.extend(self.training_data());
        rows.extend([
            ("validation data", self.val.map_or("none".to_owned(), data)),
            (
                "batch",
                format!(
                    "{batch} x {seq} tokens x {}{} = {total_batch} a step",
                    config.grad_accum(self.ranks),
                    self.by_ranks()
                ),
            ),
            ("learning rate", learning_rate),
            ("weight decay, clip", format!("{}, {}", config.weight_decay, Config::CLIP)),
            ("skipped updates", skipped(config)),
            ("seed", config.seed.to_string()),
        ]);
        if self.val.is_some() {
            rows.push(("validation", with(config.val_every, format!("{} batches", config.val_batches))));
        }
        if let Some(set) = self.hellaswag {
            let examples = format!("{}, {} examples", set.name(), set.examples().len());
            rows.push(("HellaSwag", with(config.val_every, examples)));
        }
        rows.push(("samples", with(config.sample_every, format!("{} tokens", config.sample_length))));
        if let Some(info) = self.gpu_info {
            let info = match info {
                Ok(_) => format!("every {} steps", config.gpu_info_every),
                Err(why) => format!("none: {why:#}"),
            };
            rows.push(("GPU information", info));
        }
        if let Some(out) = &config.out {
            rows.push(("output", format!("{}, checkpoints {}", out.display(), every(config.checkpoint_every))));
        }
        rows.iter().map(|(name, value)| format!("{name:<20} {value}")).collect::<Vec<_>>().join("\n")
    }

    fn by_ranks(&self) -> String {
        if self.ranks > 1 { format!(" x {} ranks", self.ranks) } else { String::new() }
    }

    /// Rows on what is read, and how often.
    fn training_data(&self) -> Vec<(&'static str, String)> {
        let Config { batch, seq, total_batch, steps, overfit_one_batch, .. } = *self.config;
        if overfit_one_batch {
            let one = format!("one batch, over and over, of {}", data(self.train));
            return vec![("training data", one), ("steps", steps.to_string())];
        }
        let batches = self.train.batches_per_epoch();
        let order = if self.train.shuffles() { "shuffled" } else { "in order" };
        let tokens = batches * batch * seq * self.ranks;
        let epochs = (steps * total_batch) as f64 / tokens as f64;
        vec![
            ("training data", data(self.train)),
            (
                "an epoch",
                format!(
                    "{tokens} tokens in {batches} batches, {} steps, {order}",
                    batches / self.config.grad_accum(self.ranks)
                ),
            ),
            ("steps", format!("{steps}, {epochs:.2} epochs")),
        ]
    }
}

/// What each ZeRO stage takes of a GPU's memory, and how much less that is than stage 0: of the buffers that stages change.
pub fn stages(
    descriptor: Descriptor,
    options: PlanOptions,
    chosen: u8,
    ranks: usize,
    engine: &mut dyn Engine,
) -> String {
    let mut planned = |stage| {
        let zero = Zero::new(stage, Shard { rank: 0, ranks });
        let (_, plan) = Gpt2::plan(descriptor, PlanOptions { zero, ..options }, engine);
        let groups = [Group::Parameters, Group::Gradients, Group::Optimizer].map(|group| plan.group_bytes(group));
        (groups, plan.bytes())
    };
    let (_, undivided) = planned(0);
    let mib = |bytes: i128| bytes as f64 / f64::from(1 << 20);
    let head = format!(
        "{:<22} {:>10} {:>10} {:>10} {:>10} {:>10}\n",
        format!("ZeRO, {ranks} ranks"),
        "parameters",
        "gradients",
        "optimizer",
        "a GPU, MiB",
        "saved"
    );
    let rows = (0..=3).map(|stage| {
        let (groups, all) = planned(stage);
        let [params, grads, state] = groups.map(|bytes| mib(bytes as i128));
        let name = format!("  stage {stage}{}", if stage == chosen { ", this run" } else { "" });
        let (total, saved) = (mib(all as i128), mib(undivided as i128 - all as i128));
        format!("{name:<22} {params:>10.1} {grads:>10.1} {state:>10.1} {total:>10.1} {saved:>10.1}\n")
    });
    head + &rows.collect::<String>()
}

/// What a run would take, for one that is only planned; `free` where that is known.
pub fn planned(plan: &Plan, free: Option<usize>) -> String {
    let gib = |bytes: usize| format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64);
    let of = free.map_or("what is free is not known".to_owned(), |free| format!("{} is free", gib(free)));
    format!(
        "planned: {} ({of}); nothing was computed or written\n\nnext: the same without --dry-run",
        gib(plan.bytes())
    )
}

fn skipped(config: &Config) -> String {
    let Limits { loss_z, norm_z, bad_steps } = config.limits();
    let above =
        |what, limit: Option<f64>| limit.map_or(String::new(), |z| format!(", z-score of the {what} above {z}"));
    format!("not finite ({bad_steps} in a row end the run){}{}", above("loss", loss_z), above("gradient norm", norm_z))
}

fn stored(config: &Config) -> &'static str {
    match (config.precision, config.master_weights) {
        (Precision::Fp32, _) => "f32",
        (Precision::Bf16, true) => "bf16, master weights in f32",
        (Precision::Bf16, false) => "bf16, updated with stochastic rounding",
    }
}

fn products(config: &Config) -> String {
    let factors = match config.precision {
        Precision::Bf16 => "bf16",
        Precision::Fp32 if config.tf32 => "tf32",
        Precision::Fp32 => "f32",
    };
    match config.gelu_fusion {
        GeluFusion::None => format!("{factors}, GELU on its own"),
        GeluFusion::Forward => format!("{factors}, with the forward's GELU"),
        GeluFusion::Both => format!("{factors}, with GELU"),
    }
}

fn recomputed(recompute: Recompute) -> &'static str {
    match recompute {
        Recompute::Nothing => "nothing",
        Recompute::Gelu => "GELU",
        Recompute::GeluAndNorms => "GELU and LayerNorms",
    }
}

fn data(loader: &Loader) -> String {
    let tokens = loader.tokens();
    match loader.shards() {
        [only] => format!("{}, {tokens} tokens", only.name()),
        [first, .., last] => {
            format!("{} … {}, {} shards, {tokens} tokens", first.name(), last.name(), loader.shards().len())
        }
        [] => String::new(),
    }
}

/// Totals of a run that took `wall` from its start.
pub fn summary(outcome: &Outcome, total_batch: usize, wall: Duration, out: Option<&Path>) -> String {
    let mut rows = Vec::new();
    if let Some((before, after)) = outcome.val {
        rows.push(format!("validation loss {before:.4} before, {after:.4} after"));
    }
    if let Some(step) = outcome.step {
        let rate = total_batch as f64 / step.as_secs_f64();
        rows.push(format!("{:.2} ms a step, {rate:.0} tok/s", 1e3 * step.as_secs_f64()));
    }
    if outcome.skips != Skips::default() {
        rows.push(format!("updates skipped: {}", outcome.skips));
    }
    rows.push(format!(
        "{} tokens in {:.1} s of training, {:.1} s in all",
        outcome.tokens,
        outcome.training.as_secs_f64(),
        wall.as_secs_f64()
    ));
    if let Some(out) = out {
        rows.push(format!("log: {0}/main.log, {0}/main.jsonl", out.display()));
    }
    rows.join("\n")
}
