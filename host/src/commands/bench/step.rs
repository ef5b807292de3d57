//! `bench step`: the time of a training step, by kernel and by rank.

use super::table::{Column, Json, Spread, Table};
use super::trace::{self, RankTrace};
use crate::commands::resources::{Fp8Flags, Hardware, LoraFlags, MuonAdditionFlags, StructureFlags};
use crate::commands::train::{Launch, load_source, multi_rank};
use crate::gpu_info::GpuInfo;
use crate::values::{count, level};
use anyhow::{Context, ensure};
use checkpoint::preflight::{self, RankInfo};
use distributed::Ranks;
use engine::open::Precision;
use engine::ops::{AdamW, MuonAdditions};
use engine::plan::Plan;
use engine::{BatchLayout, Engine, Interval, Result};
use interchange::ModelSource;
use model::descriptor::Overrides;
use model::fit::{self, RunLimits};
use model::{
    Decoder, Descriptor, Fp8Options, MasterWeights, Moments, Muon, Offload, Optimizer, Param, ParamKind, PlanOptions,
    Recompute, TrainStep, Update,
};
use planner::quantity::bytes;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use system::progress::{self, Unit};

/// Time a training step. On a GPU, list each kernel, each GEMM and the gaps between them. With several ranks, started like
/// `train`, measure the cost of communication
#[derive(Clone, Debug, clap::Args)]
pub struct Step {
    /// Model size, for example d12, d24 or gpt3:c768; or a model file (.bin) or directory, as in `train`
    #[arg(short = 'e', long, value_name = "NAME|FILE|DIR", default_value = "d12")]
    model: String,
    /// Number of layers, instead of that of a --model name
    #[arg(long, value_name = "N", value_parser = count)]
    layers: Option<usize>,
    /// Sequences in a micro-batch
    #[arg(short, long, default_value = "64", value_parser = count)]
    batch: usize,
    /// Tokens in a sequence
    #[arg(short = 't', long, default_value = "1024", value_parser = count)]
    seq: usize,
    /// Micro-batches per step
    #[arg(short = 'a', long, default_value = "8", value_parser = count)]
    grad_accum: usize,
    /// Recomputation level, as in `train`
    #[arg(short, long, value_name = "0|1|2|3", default_value = "0", value_parser = level::<Recompute>)]
    recompute: Recompute,
    /// Optimizer of the layers' matrices, as in `train`
    #[arg(long, value_enum, default_value = "adamw")]
    optimizer: Optimizer,
    #[command(flatten)]
    muon_additions: MuonAdditionFlags,
    /// Storage of f32 master weights, as in `train`
    #[arg(short = 'w', long, value_name = "0|1|2", default_value = "1")]
    master_weights: MasterWeights,
    /// Type of the optimizer's moments, as in `train`
    #[arg(long, value_name = "TYPE", value_enum, default_value = "f32")]
    moments: Moments,
    /// Tensors in the host's memory, as in `train`
    #[arg(long, value_name = "LIST", default_value = "none")]
    offload: Offload,
    /// Memory of the GPU that the model may take, as in `train`
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    memory_limit: Option<usize>,
    /// ZeRO stage, as in `train`
    #[arg(short = 'z', long, value_name = "0|1|2|3", default_value = "0", value_parser = clap::value_parser!(u8).range(0..=3))]
    zero_stage: u8,
    /// Number of ranks that shard together, as in `train` [default: all]
    #[arg(long, value_name = "N", value_parser = count)]
    shard_size: Option<usize>,
    /// The ranks of a shard group share the experts, as in `train`
    #[arg(long)]
    expert_parallel: bool,
    /// Timed steps, after three warm-up steps
    #[arg(short = 'x', long, default_value = "10", value_parser = count)]
    steps: usize,

    /// Write a trace of one step on all ranks to this file, for ui.perfetto.dev or chrome://tracing
    #[arg(long, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,

    #[command(flatten)]
    launch: Launch,

    #[command(flatten)]
    structure: StructureFlags,

    #[command(flatten)]
    lora: LoraFlags,

    #[command(flatten)]
    fp8: Fp8Flags,

    #[command(flatten)]
    hardware: Hardware,

    #[command(flatten)]
    pub(super) json: Json,
}

const COLUMNS: &[Column] = &[
    Column::text("name", "kernel or GEMM", 72),
    Column::number("times", "times", 6, 0),
    Column::number("us_each", "us each", 9, 1),
    Column::number("ms", "ms", 9, 2),
    Column::number("percent", "%", 6, 2),
];

/// Runs the command.
pub fn run(options: &Step) -> Result<()> {
    let (mut ranks, local_rank) = multi_rank::connect(&options.launch)?;
    // An error on this rank must end the other ranks.
    bench(options, &mut ranks, local_rank).map_err(|error| {
        let cause = ranks.failure_cause(error, "bench step");
        ranks.abort_collectives();
        ranks.abort(cause)
    })
}

fn bench(options: &Step, ranks: &mut Ranks, local_rank: usize) -> Result<()> {
    let gpu = multi_rank::gpu_of(local_rank, ranks.world_size() == 1, options.hardware.device)?;
    let mut engine = options.hardware.open_quietly_on(gpu)?;
    let engine = &mut *engine;
    let layout = BatchLayout::new(options.batch, options.seq);
    let (model, plan) = options.prepare(engine, ranks, gpu)?;
    let on_gpu = engine.device_tensor(model.params)?.is_some();
    let mut bench = StepBench {
        engine,
        model: &model,
        muon: (options.optimizer == Optimizer::Muon).then(|| options.muon_additions.additions()),
        step: 0,
        with_graphs: TrainStep::new(&model, layout, options.grad_accum).capture_graphs(),
        individually: TrainStep::new(&model, layout, options.grad_accum),
    };
    let progress = progress::start("timing steps", Unit::Count, 3 + options.steps as u64);
    for _ in 0..3 {
        bench.timed_step(ranks, Mode::AsTrain)?;
        progress.add(1);
    }
    let gpu_info = if on_gpu { GpuInfo::open(gpu).ok() } else { None };
    let joules = || gpu_info.as_ref().and_then(GpuInfo::joules);
    let (mut times, mut individually) = (Vec::new(), Vec::new());
    let (start, joules_before) = (Instant::now(), joules());
    for _ in 0..options.steps {
        // Alternates, so that both find the GPU at the same temperature.
        times.push(bench.timed_step(ranks, Mode::AsTrain)?);
        if on_gpu {
            individually.push(bench.timed_step(ranks, Mode::Individually)?);
        }
        progress.add(1);
    }
    // Both ways to launch a step do the same work.
    let tokens = options.tokens() * (times.len() + individually.len());
    let energy = joules_before.zip(joules()).map(|(before, after)| Energy {
        joules: after - before,
        seconds: start.elapsed().as_secs_f64(),
        tokens,
    });
    let memory_used = gpu_info.as_ref().and_then(GpuInfo::memory_used);
    let update = (0..options.steps).map(|_| bench.timed_update(ranks)).collect::<Result<_>>()?;
    let communication = bench.communication(ranks, options.steps)?;
    let profile = bench.profile(ranks, options.trace.is_some())?;
    let backend = ranks.describe();
    let (first, world_size) = (ranks.is_first(), ranks.world_size());
    ranks.close()?;
    if !first {
        return Ok(());
    }
    if let Some(path) = &options.trace {
        let settings = json!({
            "program": concat!("llm-rs ", env!("CARGO_PKG_VERSION")),
            "model": options.model,
            "batch": [options.batch, options.seq, options.grad_accum],
            "zero_stage": options.zero_stage,
            "shard_size": options.shard_size,
            "expert_parallel": options.expert_parallel,
        });
        trace::write(path, &profile.ranks, &settings)?;
    }
    let results = Results {
        descriptor: model.descriptor,
        world_size,
        memory_bytes: plan.bytes(),
        memory_used,
        energy,
        step: Spread::of(times),
        individually: on_gpu.then(|| Spread::of(individually)),
        update: Spread::of(update),
        communication: communication.zip(backend),
        profile: on_gpu.then_some(profile.own),
    };
    results.print(options, engine)
}

impl Step {
    /// Returns the tokens of a rank in a step.
    fn tokens(&self) -> usize {
        self.batch * self.seq * self.grad_accum
    }

    /// Plans and initializes the model on all ranks and loads a batch of random tokens.
    fn prepare(&self, engine: &mut dyn Engine, ranks: &mut Ranks, gpu: usize) -> Result<(Decoder, Plan)> {
        let (descriptor, source) = match self.model.parse::<Descriptor>() {
            Ok(descriptor) => (descriptor, None),
            Err(unknown) if !Path::new(&self.model).exists() => return Err(unknown).context("--model"),
            Err(_) => {
                ensure!(
                    self.layers.is_none(),
                    "--layers: expected a name such as d12 as --model, found {}",
                    self.model
                );
                let source = ModelSource::open(Path::new(&self.model)).context("--model")?;
                (source.descriptor(), Some(source))
            }
        };
        let layers = Overrides { layers: self.layers, ..Overrides::default() };
        let descriptor = self.lora.apply(self.structure.apply(descriptor.with(layers).context("--layers")?)?)?;
        let layout = BatchLayout::new(self.batch, self.seq);
        let Self { recompute, optimizer, master_weights, moments, offload, .. } = *self;
        let shard = multi_rank::shard(ranks, self.shard_size)?;
        let zero = multi_rank::zero(self.zero_stage, shard, ranks.world_size(), self.expert_parallel)?;
        let fp8 = self.fp8.resolve(self.hardware.precision.unwrap_or(Precision::Bf16))?;
        let fp8 = fp8.map(|settings| Fp8Options::new(settings, &descriptor, [layout.b, layout.t], engine));
        let plan_options = PlanOptions {
            recompute,
            zero,
            optimizer,
            master_weights,
            moments,
            offload,
            fp8: fp8.transpose()?,
            ..PlanOptions::training(layout.b, layout.t)
        };
        let limits = RunLimits {
            ranks: ranks.world_size(),
            shard,
            total_batch: None,
            local_ranks: multi_rank::local_ranks(ranks),
            memory: self.memory_limit,
        };
        let (model, plan) = fit::plan_run(descriptor, plan_options, limits, engine)?;
        engine.allocate(&plan)?;
        self.check_ranks(ranks, engine.device_tensor(model.params)?.is_some().then_some(gpu))?;
        ranks.init_communicator(engine, model.params, zero.shard().ranks)?;
        let tuned = multi_rank::tune(ranks, &model, engine, layout)?;
        if let Some(text) = tuned.filter(|_| ranks.is_first()) {
            writeln!(stdout(), "{text}")?;
        }
        let starts_fresh = source.is_none();
        match source {
            Some(source) if descriptor.adapters.is_some() => load_source(source, &model, engine)?,
            Some(source) => source.load(&model, engine)?,
            None => model.load_frozen(engine, |param, layer| Ok(random_weights(&descriptor, param, layer)))?,
        }
        if descriptor.adapters.is_some() || starts_fresh {
            model.initialize(engine, 42)?;
        }
        let mut words = engine.host_buffer(layout.words())?;
        for (i, word) in words[..layout.targets().end].iter_mut().enumerate() {
            *word = (gpu::noise::squirrel5(i as u32, 0) % descriptor.vocab as u32) as i32;
        }
        layout.sort(&mut words);
        engine.load_batch(model.batch, layout, words)?;
        ranks.end_startup();
        Ok((model, plan))
    }

    /// Checks that all ranks have the same settings and that each has its own GPU.
    fn check_ranks(&self, ranks: &mut Ranks, gpu: Option<usize>) -> Result<()> {
        let Some(group) = ranks.tcp_group() else { return Ok(()) };
        let settings = json!({
            "model": self.model,
            "batch": self.batch,
            "seq": self.seq,
            "grad-accum": self.grad_accum,
            "recompute": self.recompute,
            "optimizer": self.optimizer,
            "master-weights": self.master_weights,
            "moments": self.moments,
            "offload": self.offload,
            "precision": self.hardware.precision,
            "fp8-recipe": self.fp8.fp8_recipe,
            "fp8-accumulation": self.fp8.fp8_accumulation,
            "fp8-head": self.fp8.fp8_head,
            "zero-stage": self.zero_stage,
            "shard-size": self.shard_size,
            "expert-parallel": self.expert_parallel,
            "lora": self.lora,
            "steps": self.steps,
        });
        let Value::Object(settings) = settings else { unreachable!("written as an object above") };
        let gpu = gpu.map(cuda_driver::device_uuid).transpose()?;
        preflight::check_ranks(group, &RankInfo::without_data(settings, gpu)?)
    }
}

/// The energy that a GPU used for some steps.
struct Energy {
    joules: f64,
    seconds: f64,
    /// Tokens of this GPU in these steps.
    tokens: usize,
}

impl Energy {
    fn millijoules_per_token(&self) -> f64 {
        1e3 * self.joules / self.tokens as f64
    }
}

/// The measurements of rank 0. Times are in seconds.
struct Results {
    descriptor: Descriptor,
    world_size: usize,
    memory_bytes: usize,
    /// Bytes of the GPU's memory that are in use, if NVML reports them.
    memory_used: Option<u64>,
    /// Energy of this rank's GPU, if NVML reports it.
    energy: Option<Energy>,
    step: Spread,
    individually: Option<Spread>,
    /// The update alone: launches do not overlap with the passes.
    update: Spread,
    /// With the name of the communication backend.
    communication: Option<(Communication, String)>,
    profile: Option<Vec<Interval>>,
}

impl Results {
    fn print(&self, options: &Step, engine: &dyn Engine) -> Result<()> {
        let Self { step, individually, .. } = self;
        let tokens = (options.tokens() * self.world_size) as f64;
        let milliseconds = |spread: &Spread| [spread.median, spread.least, spread.most].map(|seconds| 1e3 * seconds);
        let mut table = Table::new("step", COLUMNS, engine, &options.json);
        table.note("model", &options.model);
        table.note("descriptor", self.descriptor);
        table.note("parameters", self.descriptor.parameters());
        table.note("flops_per_token", self.descriptor.flops_per_token(options.seq));
        table.note("fp8", options.hardware.precision == Some(Precision::Fp8));
        table.note("batch", [options.batch, options.seq, options.grad_accum]);
        table.note("recompute", options.recompute);
        table.note("optimizer", options.optimizer);
        table.note("master_weights", options.master_weights);
        table.note("moments", options.moments);
        table.note("offload", options.offload);
        table.note("memory_bytes", self.memory_bytes);
        if let Some(bytes) = self.memory_used {
            table.note("memory_used_bytes", bytes);
        }
        if let Some(energy) = &self.energy {
            table.note("millijoules_per_token", energy.millijoules_per_token());
            table.note("watts", energy.joules / energy.seconds);
        }
        table.note("step_ms", milliseconds(step));
        table.note("tokens_per_second", tokens / step.median);
        table.note("update_ms", milliseconds(&self.update));
        if let Some(individually) = individually {
            table.note("step_without_graphs_ms", milliseconds(individually));
        }
        table.note("ranks", self.world_size);
        table.note("zero_stage", options.zero_stage);
        if let Some(size) = options.shard_size {
            table.note("shard_size", size);
        }
        if options.expert_parallel {
            table.note("expert_parallel", true);
        }
        if let Some((communication, _)) = &self.communication {
            communication.note(&mut table);
        }
        if let Some(profile) = &self.profile {
            print_profile(profile, step.median, &mut table)?;
        }
        table.finish()?;
        let [median, least, most] = milliseconds(step);
        let (steps, rate) = (options.steps, tokens / step.median);
        writeln!(stdout(), "step: {median:.2} ms, median of {steps} ({least:.2} to {most:.2}), {rate:.0} tokens/s")?;
        if let Some(energy) = &self.energy {
            let (per_token, watts) = (energy.millijoules_per_token(), energy.joules / energy.seconds);
            writeln!(stdout(), "energy: {per_token:.3} mJ per token, {watts:.0} W")?;
        }
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        let planned = mib(self.memory_bytes as f64);
        let used =
            self.memory_used.map_or(String::new(), |bytes| format!(", {:.0} MiB in use on the GPU", mib(bytes as f64)));
        writeln!(stdout(), "memory: {planned:.0} MiB planned{used}")?;
        let [median, least, most] = milliseconds(&self.update);
        writeln!(stdout(), "update alone: {median:.2} ms ({least:.2} to {most:.2})")?;
        if let Some(individually) = individually {
            let [median, least, most] = milliseconds(individually);
            writeln!(stdout(), "without CUDA graphs: {median:.2} ms ({least:.2} to {most:.2})")?;
        }
        if let Some((communication, backend)) = &self.communication {
            writeln!(stdout(), "{}", communication.describe(self.world_size, backend))?;
        }
        Ok(())
    }
}

/// The cost of communication in a step, in seconds. CUDA graphs are off, because steps that communicate cannot be captured.
struct Communication {
    /// Median time that each rank's engine waits for others.
    waits: Vec<f64>,
    /// Number of waits in a step.
    wait_count: usize,
    /// A step of all ranks.
    all_ranks: Spread,
    /// A step of one rank that does not communicate.
    single_rank: Spread,
}

impl Communication {
    fn note(&self, table: &mut Table) {
        table.note("waiting_ms", self.waits.iter().map(|seconds| 1e3 * seconds).collect::<Vec<_>>());
        table.note("waits", self.wait_count);
        table.note("all_ranks_step_ms", 1e3 * self.all_ranks.median);
        table.note("single_rank_step_ms", 1e3 * self.single_rank.median);
    }

    fn describe(&self, ranks: usize, backend: &str) -> String {
        let step = self.all_ranks.median;
        let percent = |seconds: f64| 100.0 * seconds / step;
        let longest = self.waits.iter().copied().fold(0.0, f64::max);
        let added = step - self.single_rank.median;
        format!(
            "{ranks} ranks, connected by {backend}: rank 0 waits {:.2} ms per step ({:.2} %) in {} places, the slowest rank \
             {:.2} ms ({:.2} %); a step without communication takes {:.2} ms, communication adds {:.2} ms ({:.2} %)",
            1e3 * self.waits[0],
            percent(self.waits[0]),
            self.wait_count,
            1e3 * longest,
            percent(longest),
            1e3 * self.single_rank.median,
            1e3 * added,
            percent(added)
        )
    }
}

/// Determines how a step is launched.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Uses CUDA graphs where possible, as `train` does.
    AsTrain,
    /// Launches each kernel individually.
    Individually,
}

struct StepBench<'a> {
    engine: &'a mut dyn Engine,
    model: &'a Decoder,
    /// The additions to Muon, if it is the optimizer.
    muon: Option<MuonAdditions>,
    step: u32,
    with_graphs: TrainStep,
    individually: TrainStep,
}

impl StepBench<'_> {
    /// Returns the hyperparameters of the next step.
    fn next_update(&mut self) -> Update {
        self.step += 1;
        let (learning_rate, beta1, beta2, eps) = (1e-4, 0.9, 0.95, 1e-8);
        let (weight_decay, step, clip, seed) = (0.1, self.step, 1.0, self.step);
        let adamw = AdamW { learning_rate, beta1, beta2, eps, weight_decay, step, clip, seed };
        let muon = |additions| Muon { learning_rate: 1e-3, momentum: 0.95, weight_decay, additions, ..Muon::default() };
        Update { muon: self.muon.map(muon), ..adamw.into() }
    }

    /// Launches one optimizer step. Every micro-batch is the one that was loaded.
    fn step(&mut self, ranks: &mut Ranks, mode: Mode) -> Result<()> {
        let (update, targets) = (self.next_update(), self.model.losses.len);
        let step = match mode {
            Mode::AsTrain => &mut self.with_graphs,
            Mode::Individually => &mut self.individually,
        };
        let decide = &mut |_: &mut dyn Engine, _| Ok(Some(update));
        if let (_, Some(error)) = step.run(self.engine, ranks, &mut |_| Ok(targets), decide)? {
            writeln!(stdout(), "warning: CUDA graph capture failed, kernels are launched individually: {error}")?;
        }
        Ok(())
    }

    /// Returns the duration of a step in seconds, on the engine's clock. All ranks start together.
    fn timed_step(&mut self, ranks: &mut Ranks, mode: Mode) -> Result<f64> {
        self.now()?;
        ranks.any_rank(false)?;
        let start = self.now()?;
        self.step(ranks, mode)?;
        Ok(self.now()?.saturating_sub(start).as_secs_f64())
    }

    /// Returns the duration of an update with the gradients of the last step, in seconds.
    fn timed_update(&mut self, ranks: &mut Ranks) -> Result<f64> {
        let update = self.next_update();
        self.now()?;
        ranks.any_rank(false)?;
        let start = self.now()?;
        self.individually.update(self.engine, ranks, &update)?;
        Ok(self.now()?.saturating_sub(start).as_secs_f64())
    }

    /// Measures the cost of communication if there are several ranks. Rank 0 receives the waits of all ranks.
    fn communication(&mut self, ranks: &mut Ranks, steps: usize) -> Result<Option<Communication>> {
        if ranks.world_size() == 1 {
            return Ok(None);
        }
        let single_rank = (0..steps).map(|_| self.timed_step(&mut Ranks::Single, Mode::Individually));
        let single_rank = Spread::of(single_rank.collect::<Result<_>>()?);
        let timings = ranks.time_communication(self.model.training.context("planned for inference only")?.stats);
        let (mut all_ranks, mut sums, mut wait_count) = (Vec::new(), Vec::new(), 0);
        for _ in 0..steps {
            all_ranks.push(self.timed_step(ranks, Mode::Individually)?);
            let waits = timings.take(self.engine)?;
            wait_count = waits.len();
            sums.push(waits.iter().map(Duration::as_secs_f64).sum());
        }
        let own = Spread::of(sums).median;
        let group = ranks.tcp_group().context("several ranks have a TCP group")?;
        let waits = group.gather(&own.to_le_bytes())?.into_iter();
        let waits = waits.map(|bytes| Ok(f64::from_le_bytes(bytes.as_slice().try_into()?))).collect::<Result<_>>()?;
        Ok(Some(Communication { waits, wait_count, all_ranks: Spread::of(all_ranks), single_rank }))
    }

    /// Returns every kernel of one step; on a CPU, every operation. With `gather`, rank 0 receives the work of all ranks.
    fn profile(&mut self, ranks: &mut Ranks, gather: bool) -> Result<Profile> {
        self.now()?;
        ranks.any_rank(false)?;
        self.engine.start_profile()?;
        ranks.start_profile()?;
        self.step(ranks, Mode::Individually)?;
        let (own, collectives) = (self.engine.profile()?, ranks.profile()?);
        let mut all = Vec::new();
        if gather {
            let mut streams = vec![("compute".to_owned(), own.clone())];
            if ranks.world_size() > 1 {
                streams.push(("communication".to_owned(), collectives));
            }
            let trace = RankTrace { device: self.engine.describe(), streams };
            let gathered = ranks.gather(serde_json::to_vec(&trace)?)?;
            all = gathered.iter().map(|bytes| Ok(serde_json::from_slice(bytes)?)).collect::<Result<_>>()?;
        }
        Ok(Profile { own, ranks: all })
    }

    fn now(&mut self) -> Result<Duration> {
        let stats = self.model.training.context("planned for inference only")?.stats;
        let read = self.engine.read_async(stats)?;
        Ok(self.engine.wait(read)?.completed_at)
    }
}

/// The work of a step.
struct Profile {
    /// Kernels of this rank.
    own: Vec<Interval>,
    /// On rank 0, if requested: the work of all ranks.
    ranks: Vec<RankTrace>,
}

/// Sum of the intervals with one name.
#[derive(Default)]
struct Row {
    times: usize,
    seconds: f64,
}

/// Prints the intervals by name; `step` is the duration of a step in seconds.
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
    print("gaps between them, with two timing events", &gaps)?;
    let sum = Row {
        times: profile.len(),
        seconds: match profile {
            [first, .., last] => last.end - first.begin,
            _ => 0.0,
        },
    };
    print("sum", &sum)
}

/// Returns values of a frozen tensor: normally distributed weights of a large model would take minutes. The values are uniform, and repeat
/// after a prime number of elements, so that all rows differ.
fn random_weights(d: &Descriptor, param: Param, layer: usize) -> Vec<f32> {
    const PERIOD: usize = 65_521;
    let len = param.len(&d.base());
    let constant = match param.kind() {
        ParamKind::NormWeight => Some(1.0),
        ParamKind::Bias => Some(0.0),
        _ => None,
    };
    if let Some(value) = constant {
        return vec![value; len];
    }
    let seed = layer as u32 * 64 + param as u32;
    let value = |i: usize| (gpu::noise::squirrel5(i as u32, seed).cast_signed() as f32) * 2f32.powi(-36);
    let period: Vec<f32> = (0..PERIOD.min(len)).map(value).collect();
    let mut values = Vec::with_capacity(len);
    while values.len() < len {
        values.extend_from_slice(&period[..PERIOD.min(len - values.len())]);
    }
    values
}
