//! `bench step`: where the time of a training step goes.

use super::table::{Column, Json, Spread, Table};
use crate::commands::resources::Hardware;
use crate::commands::train::{Launch, together};
use crate::values::{count, level};
use anyhow::Context;
use checkpoint::preflight::{self, RankInfo};
use distributed::Ranks;
use engine::ops::AdamW;
use engine::{BatchLayout, Engine, Interval, Result};
use model::fit;
use model::{Descriptor, Gpt2, PlanOptions, Recompute, Shard, TrainStep, Zero};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::time::Duration;

/// Where the time of a training step goes: on a GPU every kernel and matrix product, and the gaps between them; with several
/// processes, started as `train` is, what they cost each other
#[derive(Clone, Debug, clap::Args)]
pub struct Step {
    /// d12, d24, gpt3:c768 …
    #[arg(short = 'e', long, default_value = "d12")]
    model: String,
    /// Sequences in a micro-batch
    #[arg(short, long, default_value = "64", value_parser = count)]
    batch: usize,
    /// Tokens in a sequence
    #[arg(short = 't', long, default_value = "1024", value_parser = count)]
    seq: usize,
    /// Micro-batches of a step
    #[arg(short = 'a', long, default_value = "8", value_parser = count)]
    grad_accum: usize,
    /// As of `train`
    #[arg(short, long, value_name = "0|1|2", default_value = "0", value_parser = level::<Recompute>)]
    recompute: Recompute,
    /// As of `train`
    #[arg(short = 'z', long, value_name = "0|1|2|3", default_value = "0", value_parser = clap::value_parser!(u8).range(0..=3))]
    zero_stage: u8,
    /// Steps that are timed, after three that are not
    #[arg(short = 'x', long, default_value = "10", value_parser = count)]
    steps: usize,

    #[command(flatten)]
    launch: Launch,

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
    let (mut ranks, local_rank) = together::meet(&options.launch)?;
    // An error here ends the others, too.
    bench(options, &mut ranks, local_rank).map_err(|error| {
        let cause = ranks.failure_cause(error, "bench step");
        ranks.abort_collectives();
        ranks.abort(cause)
    })
}

fn bench(options: &Step, ranks: &mut Ranks, local_rank: usize) -> Result<()> {
    let gpu = together::gpu_of(local_rank, options.hardware.device)?;
    let mut engine = options.hardware.open_quietly_on(gpu)?;
    let engine = &mut *engine;
    let descriptor: Descriptor = options.model.parse()?;
    let layout = BatchLayout { b: options.batch, t: options.seq };
    let recompute = options.recompute;
    let zero = Zero::new(options.zero_stage, Shard { rank: ranks.rank(), ranks: ranks.world_size() });
    let plan_options = PlanOptions { recompute, zero, ..PlanOptions::training(layout.b, layout.t) };
    let (model, plan) = fit::plan(descriptor, plan_options, engine)?;
    engine.allocate(&plan)?;
    options.agree(ranks, engine.device_tensor(model.params)?.is_some().then_some(gpu))?;
    ranks.init_communicator(engine, model.params)?;
    let tuned = together::tune_together(ranks, &model, engine, layout)?;
    if let Some(text) = tuned.filter(|_| ranks.is_first()) {
        println!("{text}");
    }
    model.initialize(engine, 42)?;
    let mut words = engine.host_buffer(layout.words())?;
    for (i, word) in words[..layout.targets().end].iter_mut().enumerate() {
        *word = (gpu::noise::squirrel5(i as u32, 0) % descriptor.vocab as u32) as i32;
    }
    layout.sort(&mut words);
    engine.load_batch(model.batch, layout, words)?;
    ranks.end_startup();

    let on_gpu = engine.device_tensor(model.params)?.is_some();
    let mut bench = StepBench {
        engine,
        model: &model,
        step: 0,
        with_graphs: TrainStep::new(&model, layout, options.grad_accum).capture_graphs(),
        individually: TrainStep::new(&model, layout, options.grad_accum),
    };
    for _ in 0..3 {
        bench.timed_step(ranks, Queueing::AsTrain)?;
    }
    let (mut times, mut by_piece) = (Vec::new(), Vec::new());
    for _ in 0..options.steps {
        // By turns, so that both find the GPU as warm.
        times.push(bench.timed_step(ranks, Queueing::AsTrain)?);
        if on_gpu {
            by_piece.push(bench.timed_step(ranks, Queueing::ByPiece)?);
        }
    }
    let waiting = bench.waiting(ranks, options.steps)?;
    let profile = bench.profile(ranks)?;
    let by = ranks.describe();
    let (first, count) = (ranks.is_first(), ranks.world_size());
    ranks.close()?;
    if !first {
        return Ok(());
    }

    let tokens = (layout.b * layout.t * options.grad_accum * count) as f64;
    let (step, by_piece) = (Spread::of(times), on_gpu.then(|| Spread::of(by_piece)));
    let mut table = Table::new("step", COLUMNS, engine, &options.json);
    table.note("model", &options.model);
    table.note("batch", [layout.b, layout.t, options.grad_accum]);
    table.note("recompute", recompute);
    table.note("memory_bytes", plan.bytes());
    table.note("step_ms", [step.median, step.least, step.most].map(|seconds| 1e3 * seconds));
    table.note("tokens_per_second", tokens / step.median);
    if let Some(by_piece) = &by_piece {
        table.note("step_by_piece_ms", [by_piece.median, by_piece.least, by_piece.most].map(|seconds| 1e3 * seconds));
    }
    table.note("ranks", count);
    table.note("zero_stage", zero.stage());
    if let Some(waiting) = &waiting {
        table.note("waiting_ms", waiting.each.iter().map(|seconds| 1e3 * seconds).collect::<Vec<_>>());
        table.note("waits", waiting.places);
        table.note("together_step_ms", 1e3 * waiting.together.median);
        table.note("alone_step_ms", 1e3 * waiting.alone.median);
    }
    if let Some(profile) = profile {
        print_profile(&profile, step.median, &mut table)?;
    }
    table.finish()?;
    println!(
        "a step: {:.2} ms in the median of {} ({:.2} to {:.2}), {:.0} tokens/s",
        1e3 * step.median,
        options.steps,
        1e3 * step.least,
        1e3 * step.most,
        tokens / step.median
    );
    if let Some(by_piece) = by_piece {
        println!(
            "with its work queued piece by piece: {:.2} ms ({:.2} to {:.2})",
            1e3 * by_piece.median,
            1e3 * by_piece.least,
            1e3 * by_piece.most
        );
    }
    if let Some((waiting, by)) = waiting.zip(by) {
        println!("{}", waiting.told(count, &by));
    }
    Ok(())
}

impl Step {
    /// Whether the ranks measure the same thing, each on a GPU of its own.
    fn agree(&self, ranks: &mut Ranks, gpu: Option<usize>) -> Result<()> {
        let Some(group) = ranks.tcp_group() else { return Ok(()) };
        let settings = json!({
            "model": self.model,
            "batch": self.batch,
            "seq": self.seq,
            "grad-accum": self.grad_accum,
            "recompute": self.recompute,
            "zero-stage": self.zero_stage,
            "steps": self.steps,
        });
        let Value::Object(settings) = settings else { unreachable!("written as an object above") };
        let gpu = gpu.map(cuda_driver::device_uuid).transpose()?;
        preflight::check_ranks(group, &RankInfo::without_data(settings, gpu)?)
    }
}

/// What the other ranks cost a step. Seconds.
struct Waiting {
    /// That each rank's engine waits in the median of the steps.
    each: Vec<f64>,
    /// How often in a step.
    places: usize,
    /// A step, and one of a rank that exchanges nothing, both queued piece by piece: what is exchanged decides what can be recorded.
    together: Spread,
    alone: Spread,
}

impl Waiting {
    fn told(&self, ranks: usize, by: &str) -> String {
        let step = self.together.median;
        let percent = |seconds: f64| 100.0 * seconds / step;
        let most = self.each.iter().copied().fold(0.0, f64::max);
        let more = step - self.alone.median;
        format!(
            "{ranks} ranks, connected by {by}: in a step queued piece by piece, rank 0 waits {:.2} ms for the others ({:.2} %), in {} places; the \
             rank that waits most, {:.2} ms ({:.2} %). Without exchange a step takes {:.2} ms: all of it costs {:.2} ms \
             ({:.2} %)",
            1e3 * self.each[0],
            percent(self.each[0]),
            self.places,
            1e3 * most,
            percent(most),
            1e3 * self.alone.median,
            1e3 * more,
            percent(more)
        )
    }
}

/// How a step is given to the engine.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Queueing {
    /// Micro-steps recorded where they can be.
    AsTrain,
    /// Each kernel and product by itself.
    ByPiece,
}

struct StepBench<'a> {
    engine: &'a mut dyn Engine,
    model: &'a Gpt2,
    step: u32,
    /// Launches kernels as `train` does, with CUDA graphs.
    with_graphs: TrainStep,
    /// Launches each kernel individually.
    individually: TrainStep,
}

impl StepBench<'_> {
    /// Launches one optimizer step as `train` does. Every micro-batch is the one that was loaded.
    fn step(&mut self, ranks: &mut Ranks, queueing: Queueing) -> Result<()> {
        self.step += 1;
        let settings = AdamW {
            learning_rate: 1e-4,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            step: self.step,
            clip: 1.0,
            seed: self.step,
        };
        let step = match queueing {
            Queueing::AsTrain => &mut self.with_graphs,
            Queueing::ByPiece => &mut self.individually,
        };
        let decide = &mut |_: &mut dyn Engine, _| Ok(Some(settings));
        if let Some(error) = step.run(self.engine, ranks, &mut |_| Ok(()), decide)? {
            println!("warning: CUDA graph capture failed, kernels are launched individually: {error}");
        }
        Ok(())
    }

    /// Its seconds on the engine's clock. All ranks begin together.
    fn timed_step(&mut self, ranks: &mut Ranks, queueing: Queueing) -> Result<f64> {
        self.now()?;
        ranks.any_rank(false)?;
        let start = self.now()?;
        self.step(ranks, queueing)?;
        Ok(self.now()?.saturating_sub(start).as_secs_f64())
    }

    /// What the other ranks cost, if there are some; of all ranks on rank 0.
    fn waiting(&mut self, ranks: &mut Ranks, steps: usize) -> Result<Option<Waiting>> {
        if ranks.world_size() == 1 {
            return Ok(None);
        }
        let alone = (0..steps).map(|_| self.timed_step(&mut Ranks::Single, Queueing::ByPiece));
        let alone = Spread::of(alone.collect::<Result<_>>()?);
        let waits = ranks.time_communication(self.model.training.context("planned for training")?.stats);
        let (mut together, mut sums, mut places) = (Vec::new(), Vec::new(), 0);
        for _ in 0..steps {
            together.push(self.timed_step(ranks, Queueing::ByPiece)?);
            let waits = waits.take(self.engine)?;
            places = waits.len();
            sums.push(waits.iter().map(Duration::as_secs_f64).sum());
        }
        let own = Spread::of(sums).median;
        let group = ranks.tcp_group().context("there are other ranks")?;
        let each = group
            .gather(&own.to_le_bytes())?
            .into_iter()
            .map(|bytes| Ok(f64::from_le_bytes(bytes.as_slice().try_into()?)));
        Ok(Some(Waiting { each: each.collect::<Result<_>>()?, places, together: Spread::of(together), alone }))
    }

    /// Every kernel of one step, where there are kernels.
    fn profile(&mut self, ranks: &mut Ranks) -> Result<Option<Vec<Interval>>> {
        if self.engine.device_tensor(self.model.params)?.is_none() {
            return Ok(None);
        }
        self.engine.start_profile()?;
        self.step(ranks, Queueing::ByPiece)?;
        Ok(Some(self.engine.profile()?))
    }

    fn now(&mut self) -> Result<Duration> {
        let stats = self.model.training.context("planned for training")?.stats;
        let ticket = self.engine.read_async(stats)?;
        Ok(self.engine.wait(ticket)?.completed_at)
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
