//! `bench generate`: tokens per second of text generation.

use super::table::{Cell, Column, Json, Spread, Table};
use crate::commands::resources::Hardware;
use crate::gpu_info::GpuInfo;
use crate::mfu::mfu;
use crate::terminal;
use crate::values::count;
use anyhow::Context;
use engine::open::GPU;
use engine::ops::SlotSampling;
use engine::{Engine, Result};
use interchange::ModelSource;
use model::{Descriptor, Generator};
use std::path::Path;
use std::time::Instant;
use system::progress::{self, Unit};
use verify::selftest::copy;

/// Time prompts and steps of text generation with a KV cache, steps as a percentage of the bandwidth of a copy measured in the same run
#[derive(Clone, Debug, clap::Args)]
pub struct Generate {
    /// Model size, for example d12 or llama3:1b; or a model file (.bin) or directory, as in `train`
    #[arg(short = 'e', long, value_name = "NAME|FILE|DIR", default_value = "d12")]
    model: String,
    /// Numbers of sequences to generate at the same time, separated by commas
    #[arg(short, long, value_name = "B", value_delimiter = ',', default_values_t = [1, 64], value_parser = count)]
    batch: Vec<usize>,
    /// Tokens of each prompt
    #[arg(short = 't', long, value_name = "T", default_value = "128", value_parser = count)]
    prompt: usize,
    /// Tokens to generate in each sequence
    #[arg(short = 'g', long, value_name = "N", default_value = "256", value_parser = count)]
    tokens: usize,
    /// Number of elements in the copy that measures the ceiling
    #[arg(long, value_name = "N", default_value = "134217728", value_parser = count)]
    copy: usize,

    #[command(flatten)]
    hardware: Hardware,

    #[command(flatten)]
    pub(super) json: Json,
}

const COLUMNS: &[Column] = &[
    Column::number("sequences", "sequences", 9, 0),
    Column::number("prompt_tokens_per_second", "prompt/s", 10, 0),
    Column::number("prompt_mfu", "% MFU", 6, 1),
    Column::number("first_token_ms", "1st token ms", 12, 2),
    Column::number("us", "us/token", 10, 1),
    Column::number("us_least", "min", 10, 1),
    Column::number("tokens_per_second", "tokens/s", 10, 1),
    Column::number("mib", "MiB/step", 9, 1),
    Column::number("gbs", "GB/s", 7, 1),
    Column::number("percent_of_copy", "% copy", 7, 1),
    Column::number("gpu_mib", "GPU MiB", 8, 0),
];

/// Number of timings of a prompt.
const PROMPTS: usize = 5;

/// Steps of a sample.
const SAMPLE: usize = 16;

/// Runs the benchmark.
pub fn run(options: &Generate) -> Result<()> {
    let engine = &mut *options.hardware.open_for_inference()?;
    let case = copy(options.copy);
    let seconds = Spread::of(case.time(engine)?.samples).least;
    let ceiling = case.work.bytes(engine.dtype()) as f64 / seconds;
    let mut table = Table::new("generate", COLUMNS, engine, &options.json);
    table.note("copy_gbs", ceiling / 1e9);
    table.note("weights", options.hardware.weight_format(engine));
    terminal::line(&format!("copy: {:.1} GB/s", ceiling / 1e9))?;
    table.print_heading()?;
    let progress = progress::start("timing batch sizes", Unit::Count, options.batch.len() as u64);
    for &slots in &options.batch {
        let row = options.time(engine, slots, ceiling)?;
        progress.add(1);
        table.row(&row)?;
    }
    table.finish()
}

impl Generate {
    /// Plans and loads a generator; random weights for a shape.
    fn generator(&self, engine: &mut dyn Engine, slots: usize) -> Result<Generator> {
        let source = match self.model.parse::<Descriptor>() {
            Ok(_) => None,
            Err(unknown) if !Path::new(&self.model).exists() => return Err(unknown).context("--model"),
            Err(_) => Some(ModelSource::open(Path::new(&self.model)).context("--model")?),
        };
        let descriptor =
            source.as_ref().map_or_else(|| Ok(self.model.parse()?), |s| Ok::<_, anyhow::Error>(s.descriptor()))?;
        let capacity = self.prompt + self.tokens;
        let (generator, plan) = Generator::plan(descriptor, slots, capacity, self.hardware.weights(), engine)?;
        engine.allocate(&plan)?;
        let timings = generator.tune(engine)?.step_seconds;
        let times: Vec<_> =
            timings.iter().map(|(kind, seconds)| format!("{:.1} us {}", seconds * 1e6, kind.describe())).collect();
        if !times.is_empty() {
            terminal::line(&format!("{slots} x 1 token: {}", times.join(", ")))?;
        }
        match source {
            Some(source) => source.load(&generator.decoder, engine)?,
            None => generator.decoder.initialize(engine, 42)?,
        }
        Ok(generator)
    }

    /// Times steps of `slots` sequences. A step is queued before the previous one is complete, as in `sample`.
    fn time(&self, engine: &mut dyn Engine, slots: usize, ceiling: f64) -> Result<Vec<Cell>> {
        let generator = self.generator(engine, slots)?;
        let d = generator.decoder.descriptor;
        generator.clear(engine)?;
        let prompt: Vec<u32> = (0..self.prompt).map(|i| ((i * 7919 + 13) % d.vocab) as u32).collect();
        let sampling = SlotSampling { temperature: 1.0, ..SlotSampling::GREEDY };
        // The first prompt tunes GEMMs and loads kernels.
        generator.begin(engine, 0, 0, &prompt, 0, sampling)?;
        let pending = generator.step(engine)?.tokens;
        engine.wait(pending)?;
        let start = Instant::now();
        generator.begin(engine, 0, 0, &prompt, 0, sampling)?;
        let pending = generator.step(engine)?.tokens;
        engine.wait(pending)?;
        let first_token = start.elapsed().as_secs_f64();
        let prompt_rate = prompt_rate(engine, &generator, &prompt)?;
        // The forward part of the training FLOPs, without the head, which only the newest token needs.
        let flops = (d.flops_per_token(self.prompt) / 3).saturating_sub(2 * d.padded_vocab() * d.channels);
        let utilization = prompt_rate.zip(engine.peak()).map(|(rate, peak)| 100.0 * mfu(flops, rate, &peak));
        generator.begin(engine, 0, 0, &prompt, 0, sampling)?;
        for slot in 1..slots {
            let past = prompt.len() - 1;
            generator.copy_slot(engine, [slot, 0], past)?;
            generator.begin(engine, slot, past, &prompt, slot as u32, sampling)?;
        }
        // The CUDA graph exists after two steps.
        let pending = generator.step(engine)?.tokens;
        engine.wait(pending)?;
        let mut samples = Vec::new();
        let mut left = self.tokens.saturating_sub(6).max(1);
        let mut pending = generator.step(engine)?.tokens;
        while left > 0 {
            let (count, start) = (SAMPLE.min(left), Instant::now());
            for _ in 0..count {
                let next = generator.step(engine)?.tokens;
                engine.wait(std::mem::replace(&mut pending, next))?;
            }
            left -= count;
            samples.push(start.elapsed().as_secs_f64() / count as f64);
        }
        engine.wait(pending)?;
        let on_gpu = engine.device_tensor(generator.decoder.params)?.is_some();
        let memory_used = on_gpu.then(|| GpuInfo::open(GPU).ok()?.memory_used()).flatten();
        let spread = Spread::of(samples);
        let lookup = if d.tied { 0 } else { d.padded_vocab() * d.channels };
        let in_fp8: usize = generator.decoder.weights_in_fp8().iter().map(|(weight, _)| weight.len(&d)).sum();
        let weights = (d.parameters() - lookup - in_fp8 - idle_experts(&d, slots)) * engine.dtype().bytes() + in_fp8;
        let length = self.prompt + self.tokens / 2;
        let cache = 2 * d.layers * d.kv_heads * d.head_size * length * engine.dtype().bytes();
        let bytes = (weights + slots * cache) as f64;
        let rate = bytes / spread.median;
        Ok(vec![
            slots.into(),
            prompt_rate.into(),
            utilization.into(),
            (first_token * 1e3).into(),
            (spread.median * 1e6).into(),
            (spread.least * 1e6).into(),
            (slots as f64 / spread.median).into(),
            (bytes / f64::from(1 << 20)).into(),
            (rate / 1e9).into(),
            (100.0 * rate / ceiling).into(),
            memory_used.map(|bytes| bytes as f64 / f64::from(1 << 20)).into(),
        ])
    }
}

/// Returns the parameters of the experts that a step of `slots` tokens does not read, if all tokens choose different experts.
fn idle_experts(d: &Descriptor, slots: usize) -> usize {
    let Some(router) = d.experts.map(|experts| experts.router()) else { return 0 };
    let idle = router.count.saturating_sub(slots * router.active);
    d.params().filter(|param| param.experts(d) > 1).map(|p| p.len(d) / router.count * idle * p.layers(d).count()).sum()
}

/// Returns the tokens per second of a prompt that is computed as a whole, or `None` if the first step computes all of it.
fn prompt_rate(engine: &mut dyn Engine, generator: &Generator, prompt: &[u32]) -> Result<Option<f64>> {
    let before = &prompt[..prompt.len() - 1];
    if before.is_empty() {
        return Ok(None);
    }
    generator.park(engine, 0)?;
    let mut samples = Vec::new();
    for _ in 0..PROMPTS {
        engine.read(generator.logits().slice(0, 1))?;
        let start = Instant::now();
        generator.extend(engine, 0, 0, before)?;
        // Waits for all work.
        engine.read(generator.logits().slice(0, 1))?;
        samples.push(start.elapsed().as_secs_f64());
    }
    Ok(Some(before.len() as f64 / Spread::of(samples).median))
}
