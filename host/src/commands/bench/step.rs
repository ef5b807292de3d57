//! `bench step`: where the time of a training step goes.

use super::table::{Column, Json, Spread, Table};
use crate::cli::{count, level};
use crate::commands::resources::Hardware;
use crate::engine::{AdamW, BatchLayout, Engine, Interval, Result};
use crate::fit;
use crate::model::{Capacity, Descriptor, Gpt2, Recompute};
use crate::train::{initialise, tune};
use anyhow::Context;
use std::collections::HashMap;
use std::time::Duration;

/// Where the time of a training step goes: every kernel and matrix product, and the gaps between them
#[derive(Clone, Debug, clap::Args)]
pub struct Step {
    /// d12, d24, gpt3:c768 …
    #[arg(short = 'e', long, default_value = "d12")]
    model: String,
    #[arg(short, long, default_value = "64", value_parser = count)]
    batch: usize,
    #[arg(short = 't', long, default_value = "1024", value_parser = count)]
    seq: usize,
    /// Micro-batches of a step
    #[arg(short = 'a', long, default_value = "8", value_parser = count)]
    grad_accum: usize,
    /// As of `train`
    #[arg(short, long, value_name = "0|1|2", default_value = "0", value_parser = level::<Recompute>)]
    recompute: Recompute,
    /// Steps that are timed, after three that are not
    #[arg(short = 'x', long, default_value = "10", value_parser = count)]
    steps: usize,

    #[command(flatten)]
    hardware: Hardware,

    #[command(flatten)]
    json: Json,
}

const COLUMNS: &[Column] = &[
    Column::text("name", "kernel or product", 92),
    Column::number("times", "times", 6, 0),
    Column::number("us_each", "us each", 9, 1),
    Column::number("ms", "ms", 9, 2),
    Column::number("percent", "%", 6, 2),
];

pub fn run(options: &Step) -> Result<()> {
    let mut engine = options.hardware.open_quietly()?;
    let engine = &mut *engine;
    let descriptor: Descriptor = options.model.parse()?;
    let layout = BatchLayout { b: options.batch, t: options.seq };
    let recompute = options.recompute;
    let capacity = Capacity { b: layout.b, t: layout.t, training: true, master_weights: true, recompute };
    let (model, plan) = fit::plan(descriptor, capacity, engine)?;
    engine.allocate(&plan)?;
    if let Some(text) = tune(&model, engine, layout)? {
        println!("{text}");
    }
    initialise(&model, engine, 42)?;
    let mut words = engine.host_buffer(layout.words())?;
    for (i, word) in words[..layout.targets().end].iter_mut().enumerate() {
        *word = (gpu::noise::squirrel5(i as u32, 0) % descriptor.vocab as u32) as i32;
    }
    layout.sort(&mut words);
    engine.load_batch(model.batch, layout, words)?;

    let mut bench = StepBench { engine, model: &model, layout, grad_accum: options.grad_accum, step: 0 };
    for _ in 0..3 {
        bench.step()?;
    }
    let times = (0..options.steps).map(|_| bench.timed_step()).collect::<Result<Vec<_>>>()?;
    bench.engine.start_profile()?;
    bench.step()?;
    let profile = bench.engine.profile()?;

    let tokens = (layout.b * layout.t * options.grad_accum) as f64;
    let step = Spread::of(times.iter().map(Duration::as_secs_f64).collect());
    let mut table = Table::new("step", COLUMNS, engine, &options.json);
    table.note("model", &options.model);
    table.note("batch", [layout.b, layout.t, options.grad_accum]);
    table.note("recompute", recompute);
    table.note("memory_bytes", plan.bytes());
    table.note("step_ms", [step.median, step.least, step.most].map(|seconds| 1e3 * seconds));
    table.note("tokens_per_second", tokens / step.median);
    print_profile(&profile, step.median, &mut table)?;
    table.finish()?;
    println!(
        "a step: {:.2} ms in the median of {} ({:.2} to {:.2}), {:.0} tokens/s",
        1e3 * step.median,
        times.len(),
        1e3 * step.least,
        1e3 * step.most,
        tokens / step.median
    );
    Ok(())
}

struct StepBench<'a> {
    engine: &'a mut dyn Engine,
    model: &'a Gpt2,
    layout: BatchLayout,
    grad_accum: usize,
    step: u32,
}

impl StepBench<'_> {
    /// One optimizer step, queued; every micro-batch is the one that was loaded.
    fn step(&mut self) -> Result<()> {
        let Self { engine, model, layout, grad_accum, .. } = self;
        let training = model.training.context("planned for training")?;
        self.step += 1;
        engine.zero(model.losses)?;
        engine.zero(training.grads)?;
        for _ in 0..*grad_accum {
            model.forward(*engine, *layout)?;
            model.loss(*engine, *layout, Some(1.0 / (layout.b * layout.t * *grad_accum) as f32))?;
            model.backward(*engine, *layout, self.step)?;
        }
        let adamw = AdamW {
            learning_rate: 1e-4,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            step: self.step,
            clip: 1.0,
            seed: self.step,
        };
        model.update(*engine, &adamw)
    }

    /// Its time on the engine's clock.
    fn timed_step(&mut self) -> Result<Duration> {
        let start = self.now()?;
        self.step()?;
        Ok(self.now()?.saturating_sub(start))
    }

    fn now(&mut self) -> Result<Duration> {
        let stats = self.model.training.context("planned for training")?.stats;
        let ticket = self.engine.read_later(stats)?;
        Ok(self.engine.wait(ticket)?.at)
    }
}

/// Sums over one name.
#[derive(Default)]
struct Row {
    times: usize,
    seconds: f64,
}

/// `step` in seconds.
fn print_profile(profile: &[Interval], step: f64, table: &mut Table) -> Result<()> {
    let mut rows: HashMap<&str, Row> = HashMap::new();
    let mut gaps = Row::default();
    for (i, interval) in profile.iter().enumerate() {
        let row = rows.entry(&interval.name).or_default();
        row.times += 1;
        row.seconds += interval.end - interval.begin;
        if i > 0 {
            gaps.times += 1;
            gaps.seconds += interval.begin - profile[i - 1].end;
        }
    }
    let mut rows: Vec<_> = rows.into_iter().collect();
    rows.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
    table.print_heading()?;
    let mut print = |name: &str, row: &Row| {
        let each = 1e6 * row.seconds / row.times.max(1) as f64;
        let (ms, percent) = (1e3 * row.seconds, 100.0 * row.seconds / step);
        table.row(&[name.into(), row.times.into(), each.into(), ms.into(), percent.into()])
    };
    for (name, row) in &rows {
        print(name, row)?;
    }
    print("between them, two marks included", &gaps)?;
    let sum = Row {
        times: profile.len(),
        seconds: match profile {
            [first, .., last] => last.end - first.begin,
            _ => 0.0,
        },
    };
    print("all", &sum)
}
