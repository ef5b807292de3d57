//! Ranks as threads, on the CPU engine and on the emulated GPU.

use checkpoint::RunState;
use data::{Geometry, Loader, Prefetch, Tokens};
use distributed::communicator::Communicator;
use distributed::fault::Fault;
use distributed::tcp_group::{Reduction, TcpGroup};
use distributed::{Ranks, Scope, ShardGroups, Transfer};
use engine::cpu::Cpu;
use engine::cuda::{EmulatedGpu, Precision, emulated};
use engine::ops::MuonAdditions;
use engine::tensor::{DType, Sharded, Tensor};
use engine::{BatchLayout, Engine, Interval};
use host::console::Console;
use host::log::Log;
use host::signals::Stop;
use host::train::{HardwareChecks, MuonSettings, OptimizerSettings, Run, Settings, Validation, ValidationSource};
use model::descriptor::{Additions, Experts, Overrides};
use model::guards::Limits;
use model::schedule::{Schedule, ScheduleKind};
use model::{
    Decoder, Descriptor, MasterWeights, Moments, Optimizer, Param, Params, PlanOptions, Shard, Store, Unit, Zero,
};
use rng::Mt19937;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

/// Timeout of the group, and of waiting for processes.
pub const TIMEOUT: Duration = Duration::from_mins(1);
const VOCAB: usize = 60;

/// The engine of a run.
#[derive(Clone, Copy, PartialEq)]
enum EngineKind {
    /// CPU, f32.
    Cpu,
    /// Emulated GPU, bf16 without master weights.
    Emulated,
    /// Emulated GPU, bf16 with master weights.
    EmulatedWithMasters,
    /// Emulated GPU, bf16 with remainders and bf16 moments.
    EmulatedCompact,
}

/// A training run with one thread per rank.
#[derive(Clone, Copy)]
struct Threads {
    ranks: usize,
    /// ZeRO stage.
    stage: u8,
    /// Number of ranks that shard together; `None`: all.
    shard_size: Option<usize>,
    engine: EngineKind,
    descriptor: (usize, usize, usize),
    b: usize,
    accum: usize,
    steps: usize,
    clip: f32,
    shuffle: Option<u32>,
    /// Changes a value of a rank before the run starts.
    corrupt: Option<(usize, Corrupted)>,
    /// Updates the layers' matrices with Muon.
    muon: bool,
    /// Additions to the model. With any of them, Muon has all of its own.
    additions: Additions,
    /// Delays collectives until the engine waits for them.
    delayed: bool,
    /// Whether validation follows the last step.
    validates: bool,
    /// Whether the model has experts, and whether ranks share them.
    experts: Option<bool>,
}

/// A value that a rank keeps.
#[derive(Clone, Copy, PartialEq)]
enum Corrupted {
    Embedding,
    LayerWeight,
    /// The learning rate is 0, so that no parameter differs.
    Moment,
}

/// The final state of a rank.
#[derive(Debug, PartialEq)]
struct RankResult {
    params: Vec<StoredTensor>,
    m: Vec<StoredTensor>,
    masters: Vec<StoredTensor>,
    losses: Vec<f64>,
    norms: Vec<f64>,
    vals: Vec<f64>,
    error: Option<String>,
}

/// The part of a tensor that a rank stores: the index of its first element, and its values.
#[derive(Debug, PartialEq)]
struct StoredTensor {
    param: Param,
    layer: usize,
    first: usize,
    values: Vec<f32>,
}

/// Reads all tensors of a store.
fn read_store(engine: &mut dyn Engine, layout: &Params, store: Store) -> Vec<StoredTensor> {
    let mut all = Vec::new();
    for (param, layer) in layout.file_order() {
        if let Some((range, tensor)) = store.held(param, layer) {
            let values = if tensor.dtype == DType::U16 {
                let mut bytes = vec![0; tensor.bytes()];
                engine.read_bytes(tensor, &mut bytes).unwrap();
                bytes.as_chunks().0.iter().map(|&b| f32::from(u16::from_le_bytes(b))).collect()
            } else {
                engine.read(tensor).unwrap()
            };
            all.push(StoredTensor { param, layer, first: range.start, values });
        }
    }
    all
}

/// Assembles whole tensors from the parts of all ranks. Checks that replicated parts are bitwise identical.
fn assemble(
    results: &[RankResult],
    tensors: impl Fn(&RankResult) -> &Vec<StoredTensor>,
    descriptor: Descriptor,
) -> Vec<f32> {
    let mut all = Vec::new();
    for (param, layer) in Params::new(descriptor).file_order() {
        let mut values = vec![None; param.len(&descriptor)];
        for part in results.iter().flat_map(&tensors).filter(|part| (part.param, part.layer) == (param, layer)) {
            for (slot, value) in values[part.first..].iter_mut().zip(&part.values) {
                assert!(slot.is_none_or(|slot: f32| slot.to_bits() == value.to_bits()), "{}", param.name());
                *slot = Some(*value);
            }
        }
        all.extend(values.into_iter().map(|value| value.expect("a rank stores each value")));
    }
    all
}

const T: usize = 16;

impl Threads {
    fn run(self) -> Vec<RankResult> {
        self.run_with_seeds().into_iter().map(|(result, _)| result).collect()
    }

    /// Returns the final state of each rank, and the seed of stochastic rounding in its last batch.
    fn run_with_seeds(self) -> Vec<(RankResult, u32)> {
        let groups = TcpGroup::in_process(self.ranks, TIMEOUT).unwrap();
        thread::scope(|scope| {
            let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || self.run_rank(group))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn run_rank(self, group: TcpGroup) -> (RankResult, u32) {
        let rank = group.rank;
        let mut engine: Box<dyn Engine> = match self.engine {
            EngineKind::Cpu => Box::new(Cpu::new()),
            // Only Hopper GPUs have kernels for experts.
            _ => emulated(EmulatedGpu::new(self.experts.is_some()), Precision::Bf16, None, false),
        };
        let (mut ranks, model) = self.prepare(group, &mut *engine);
        if let Some((_, value)) = self.corrupt.filter(|(corrupt, _)| *corrupt == rank) {
            let m = model.training.unwrap().m;
            let value = match value {
                Corrupted::Embedding => model.params.slice(5, 1),
                Corrupted::LayerWeight => model.params.slice(model.layout.unit(Unit::Embeddings).len() + 5, 1),
                Corrupted::Moment => m.slice(5, 1),
            };
            engine.write(value, &[0.25]).unwrap();
        }
        let (train, val) = self.loaders(rank);
        let settings = self.settings();
        let dir = tempfile::tempdir().unwrap();
        let state = RunState::fresh(train.position());
        let mut run = Run {
            settings: &settings,
            ranks: &mut ranks,
            model: &model,
            tokenizer: None,
            train: Prefetch::start(train, &*engine).unwrap(),
            val: validation(val, &*engine),
            hellaswag: None,
            core: None,
            engine: &mut *engine,
            console: Console::to_file(self.steps, None, false).unwrap(),
            log: Log::create(Some(dir.path())).unwrap(),
            state,
            checkpoints: None,
            stop: Stop::default(),
        };
        let outcome = run.train();
        let error = outcome.err().map(|error| ranks.abort(error));
        let training = model.training.unwrap();
        let numbers = |key| numbers(dir.path(), key);
        let layout = BatchLayout::new(self.b, T);
        let mut batch = vec![0; model.batch.bytes()];
        engine.read_bytes(model.batch, &mut batch).unwrap();
        let words: Vec<i32> = batch.as_chunks().0.iter().map(|&bytes| i32::from_ne_bytes(bytes)).collect();
        let seed = words[layout.seed()][0].cast_unsigned();
        let result = RankResult {
            params: read_store(&mut *engine, &model.layout, model.param_store()),
            m: read_store(&mut *engine, &model.layout, model.state_store(training.m)),
            masters: training
                .master
                .tensor()
                .map_or_else(Vec::new, |master| read_store(&mut *engine, &model.layout, model.state_store(master))),
            losses: numbers("loss"),
            norms: numbers("norm"),
            vals: numbers("val_loss"),
            error: error.map(|error| error.to_string()),
        };
        (result, seed)
    }

    /// Plans, allocates and initializes the model of a rank, and creates its communicator.
    fn prepare(self, group: TcpGroup, engine: &mut dyn Engine) -> (Ranks, Decoder) {
        let Self { ranks: n, b, .. } = self;
        let rank = group.rank;
        let (master_weights, moments) = match self.engine {
            EngineKind::EmulatedCompact => (MasterWeights::Remainder, Moments::Bf16),
            EngineKind::EmulatedWithMasters => (MasterWeights::F32, Moments::F32),
            EngineKind::Cpu | EngineKind::Emulated => (MasterWeights::None, Moments::F32),
        };
        let groups = ShardGroups::new(n, self.shard_size.unwrap_or(n)).unwrap();
        let shard = Shard { rank: groups.index(Scope::ShardGroup, rank), ranks: groups.shard_size() };
        let zero = Zero::new(self.stage, shard).share_experts(self.experts == Some(true));
        let optimizer = if self.muon { Optimizer::Muon } else { Optimizer::AdamW };
        let options = PlanOptions { master_weights, moments, zero, optimizer, ..PlanOptions::training(b, T) };
        let (model, plan) = Decoder::plan(shape(self), options, engine);
        engine.allocate(&plan).unwrap();
        // Without sharding, only rank 0 initializes the model and broadcasts it.
        if rank == 0 || zero.shards_optimizer() {
            model.initialize(engine, 42).unwrap();
        }
        let mut ranks = if n == 1 { Ranks::Single } else { Ranks::Connected(group) };
        ranks.init_communicator(engine, model.params, zero.shard().ranks).unwrap();
        if self.delayed
            && let Ranks::Ready(inner) = ranks
        {
            ranks = Ranks::Ready(Box::new(DelayedCommunicator { inner, pending: Vec::new() }));
        }
        if !zero.shards_optimizer() {
            let tensors = [Some(model.params), model.training.unwrap().master.tensor()];
            ranks.broadcast_tensors(engine, &tensors.into_iter().flatten().collect::<Vec<_>>()).unwrap();
        }
        (ranks, model)
    }

    /// Returns the training and validation data of a rank.
    fn loaders(self, rank: usize) -> (Loader, Loader) {
        let mut rng = Mt19937::new(1);
        let mut ids = |n| (0..n).map(|_| rng.below(60).min(rng.below(60))).collect::<Vec<_>>();
        let geometry = Geometry { b: self.b, t: T, ranks: self.ranks, rank };
        let loader = |name: &str, ids, shuffle| {
            Loader::new(vec![Tokens::in_memory(name.to_owned(), ids)], geometry, VOCAB, shuffle).unwrap()
        };
        let train = loader("train", ids(6000), self.shuffle);
        (train, loader("val", ids(600), None).rewinding_after(2))
    }

    fn settings(self) -> Settings {
        let Self { accum, steps, .. } = self;
        let corrupt = self.corrupt.map(|(_, value)| value);
        let additions = MuonAdditions { equilibrate: true, renormalize: true, variance: true, cautious_decay: true };
        let all_additions = MuonSettings { additions, ..MuonSettings::DEFAULT };
        let peak = if corrupt == Some(Corrupted::Moment) { 0.0 } else { 1e-2 };
        Settings {
            steps,
            grad_accum: accum,
            schedule: Schedule {
                kind: ScheduleKind::Linear,
                peak,
                warmup: 2,
                steps,
                final_fraction: 0.0,
                warmdown: 0.0,
            },
            optimizer: OptimizerSettings {
                muon: self.muon.then_some(if self.additions.is_empty() {
                    MuonSettings::DEFAULT
                } else {
                    all_additions
                }),
                ..OptimizerSettings::default()
            },
            weight_decay: 0.1,
            clip: self.clip,
            limits: Limits { loss_z: None, norm_z: None, bad_steps: 10 },
            val_every: self.validates.then_some(2),
            core_every: None,
            sample_every: None,
            sample_tokens: 0,
            checkpoint_every: None,
            fp8_stats_every: None,
            checkpoint_after: None,
            check_ranks_every: Some(1),
            hardware: HardwareChecks::default(),
        }
    }
}

/// Returns the values of a key in the log of a run.
pub fn numbers(directory: &Path, key: &str) -> Vec<f64> {
    let text = fs::read_to_string(directory.join("main.jsonl")).unwrap();
    text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()[key].as_f64()).collect()
}

/// A communicator that runs collectives only when the engine waits for them, as a GPU may.
struct DelayedCommunicator {
    inner: Box<dyn Communicator>,
    pending: Vec<Collective>,
}

enum Collective {
    AllReduce(Scope, Tensor, Reduction),
    Broadcast(Tensor),
    Exchange(Vec<Transfer>),
    ReduceScatter(Sharded, Reduction),
    AllGather(Sharded),
}

impl Communicator for DelayedCommunicator {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn tcp_group(&mut self) -> &mut TcpGroup {
        self.inner.tcp_group()
    }

    fn all_reduce(
        &mut self,
        _: &mut dyn Engine,
        scope: Scope,
        tensor: Tensor,
        reduction: Reduction,
    ) -> anyhow::Result<()> {
        self.pending.push(Collective::AllReduce(scope, tensor, reduction));
        Ok(())
    }

    fn broadcast(&mut self, _: &mut dyn Engine, tensor: Tensor) -> anyhow::Result<()> {
        self.pending.push(Collective::Broadcast(tensor));
        Ok(())
    }

    fn exchange(&mut self, _: &mut dyn Engine, transfers: &[Transfer]) -> anyhow::Result<()> {
        self.pending.push(Collective::Exchange(transfers.to_vec()));
        Ok(())
    }

    fn reduce_scatter(&mut self, _: &mut dyn Engine, of: Sharded, reduction: Reduction) -> anyhow::Result<()> {
        self.pending.push(Collective::ReduceScatter(of, reduction));
        Ok(())
    }

    fn all_gather(&mut self, _: &mut dyn Engine, of: Sharded) -> anyhow::Result<()> {
        self.pending.push(Collective::AllGather(of));
        Ok(())
    }

    fn wait_on_stream(&mut self, engine: &mut dyn Engine) -> anyhow::Result<()> {
        for collective in self.pending.drain(..) {
            match collective {
                Collective::AllReduce(scope, tensor, reduction) => {
                    self.inner.all_reduce(engine, scope, tensor, reduction)?;
                }
                Collective::Broadcast(tensor) => self.inner.broadcast(engine, tensor)?,
                Collective::Exchange(transfers) => self.inner.exchange(engine, &transfers)?,
                Collective::ReduceScatter(of, reduction) => self.inner.reduce_scatter(engine, of, reduction)?,
                Collective::AllGather(of) => self.inner.all_gather(engine, of)?,
            }
        }
        self.inner.wait_on_stream(engine)
    }

    fn check(&self) -> anyhow::Result<()> {
        self.inner.check()
    }

    fn start_profile(&mut self) -> anyhow::Result<()> {
        self.inner.start_profile()
    }

    fn profile(&mut self) -> anyhow::Result<Vec<Interval>> {
        self.inner.profile()
    }

    fn close(self: Box<Self>) -> anyhow::Result<()> {
        assert!(self.pending.is_empty(), "the run waited for all collectives");
        self.inner.close()
    }

    fn abort(self: Box<Self>) -> TcpGroup {
        self.inner.abort()
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}

const ON_CPU: Threads = Threads {
    ranks: 1,
    stage: 0,
    shard_size: None,
    engine: EngineKind::Cpu,
    descriptor: (2, 2, 32),
    b: 4,
    accum: 2,
    steps: 6,
    clip: 1.0,
    shuffle: None,
    corrupt: None,
    muon: false,
    additions: Additions::NONE,
    delayed: false,
    validates: true,
    experts: None,
};

#[test]
fn several_ranks_match_one_rank_and_each_other() {
    let single = ON_CPU.run().remove(0);
    assert_eq!((single.losses.len(), single.vals.len()), (6, 4));
    assert!(single.losses[5] < single.losses[0]);
    for (ranks, b, accum) in [(2, 2, 2), (4, 1, 2), (2, 4, 1)] {
        // Without shuffling, the ranks together read the tokens of a single rank.
        let results = Threads { ranks, b, accum, ..ON_CPU }.run();
        for (rank, result) in results.iter().enumerate() {
            assert_eq!(result, &results[0], "rank {rank}");
            assert_eq!(result.error, None);
        }
        for (got, expected) in [(&results[0].losses, &single.losses), (&results[0].norms, &single.norms)] {
            for (got, expected) in got.iter().zip(expected) {
                assert!((got - expected).abs() < 2e-4 * expected, "{ranks} ranks: {got}, {expected}");
            }
        }
    }
    // With the same tokens per micro-batch, validation reads the same tokens too.
    let results = Threads { ranks: 4, b: 1, ..ON_CPU }.run();
    for (got, expected) in results[0].vals.iter().zip(&single.vals) {
        assert!((got - expected).abs() < 2e-4 * expected, "{got}, {expected}");
    }
}

#[test]
fn each_rank_reads_its_own_data_and_runs_are_deterministic() {
    let two = Threads { ranks: 2, shuffle: Some(42), ..ON_CPU };
    let first = two.run();
    assert_eq!(first, two.run());
    assert_eq!(first[0], first[1]);
    let single = Threads { ranks: 1, ..two }.run();
    assert!(first[0].losses != single[0].losses, "the data of rank 1 changes the gradients");
}

#[test]
fn stochastic_rounding_is_the_same_on_all_ranks() {
    let results =
        Threads { ranks: 2, engine: EngineKind::Emulated, descriptor: (1, 1, 64), b: 1, steps: 3, ..ON_CPU }.run();
    assert_eq!(results[0], results[1]);
    assert_eq!((results[0].losses.len(), results[0].error.as_ref()), (3, None));
}

/// Each rank rounds its own gradients, so that the errors of the ranks cancel in their mean.
#[test]
fn gradients_are_rounded_differently_on_each_rank() {
    let ranks = 4;
    let results = Threads { ranks, b: 1, steps: 2, validates: false, ..ON_CPU }.run_with_seeds();
    let seeds: BTreeSet<u32> = results.iter().map(|(_, seed)| *seed).collect();
    assert_eq!(seeds.len(), ranks, "{seeds:?}");
}

#[test]
fn diverged_replicas_are_detected() {
    let results = Threads { ranks: 3, corrupt: Some((1, Corrupted::Embedding)), ..ON_CPU }.run();
    for result in results {
        let text = result.error.unwrap();
        let expected = "params of step 1 of 6: expected the same values on rank 1 as on rank 0, found other values;";
        assert!(text.starts_with(expected), "{text}");
    }
}

/// Three layers, so that both halves of a double buffer are reused. The tensor sizes do not split evenly among 3 and 4 ranks at
/// the alignment of 64 elements.
const SHARDED: Threads = Threads { descriptor: (3, 2, 24), ..ON_CPU };

fn shape(threads: Threads) -> Descriptor {
    let (layers, heads, channels) = threads.descriptor;
    if threads.experts.is_some() {
        return with_experts(layers, heads, channels);
    }
    Descriptor { additions: threads.additions, ..Descriptor::gpt2(layers, heads, channels, T, VOCAB).unwrap() }
}

/// Returns a model with 4 experts and an MLP beside them.
fn with_experts(layers: usize, heads: usize, channels: usize) -> Descriptor {
    let known: Descriptor = "qwen3:30b-a3b".parse().unwrap();
    let sizes = Overrides {
        layers: Some(layers),
        heads: Some(heads),
        kv_heads: Some(heads),
        channels: Some(channels),
        mlp_channels: Some(channels),
        ..Overrides::default()
    };
    let (shared_channels, aux_loss) = (channels as u32, 0.1);
    let of = |experts| Experts { count: 4, active: 2, shared_channels, aux_loss, ..experts };
    let known = Descriptor { vocab: VOCAB, max_seq_len: T, head_size: channels / heads, ..known };
    Descriptor { experts: known.experts.map(of), ..known }.with(sizes).unwrap()
}

pub fn close(got: &[f64], expected: &[f64], what: &str) {
    assert!(!got.is_empty() && got.len() == expected.len(), "{what}: {got:?}, {expected:?}");
    for (got, expected) in got.iter().zip(expected) {
        assert!((got - expected).abs() < 2e-4 * expected, "{what}: {got}, {expected}");
    }
}

pub fn distance(got: &[f32], expected: &[f32]) -> f64 {
    let of = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = of(&mut got.iter().zip(expected).map(|(a, b)| f64::from(a - b)));
    difference / of(&mut expected.iter().map(|&x| f64::from(x)))
}

#[test]
fn every_zero_stage_matches_one_rank() {
    let single = Threads { b: 12, accum: 2, ..SHARDED }.run();
    let weights = assemble(&single, |result| &result.params, shape(SHARDED));
    for ranks in [2, 3, 4] {
        for stage in 0..=3 {
            let what = format!("{ranks} ranks, stage {stage}");
            let results = Threads { ranks, stage, b: 12 / ranks, ..SHARDED }.run();
            for result in &results {
                assert_eq!(result.error, None, "{what}");
                assert_eq!((&result.losses, &result.norms), (&results[0].losses, &results[0].norms), "{what}");
            }
            close(&results[0].losses, &single[0].losses, &what);
            close(&results[0].norms, &single[0].norms, &what);
            close(&results[0].vals, &single[0].vals, &what);
            let difference = distance(&assemble(&results, |result| &result.params, shape(SHARDED)), &weights);
            assert!(difference < 1e-3, "{what}: the weights differ by {difference}");
        }
    }
}

/// Runs whose shard groups have 2 of 4 ranks, 2 of 6, and 3 of 6.
fn hybrid(base: Threads) -> impl Iterator<Item = Threads> {
    let sizes = [(4, 2), (6, 2), (6, 3)].into_iter();
    sizes.flat_map(move |(ranks, size)| {
        (1..=3).map(move |stage| Threads { ranks, shard_size: Some(size), stage, b: 12 / ranks, ..base })
    })
}

#[test]
fn hybrid_sharding_matches_one_rank() {
    let single = Threads { b: 12, accum: 2, ..SHARDED }.run();
    let weights = assemble(&single, |result| &result.params, shape(SHARDED));
    let moments = assemble(&single, |result| &result.m, shape(SHARDED));
    for run in hybrid(SHARDED) {
        let what = format!("{} ranks in groups of {:?}, stage {}", run.ranks, run.shard_size, run.stage);
        let results = run.run();
        for result in &results {
            assert_eq!(result.error, None, "{what}");
            assert_eq!((&result.losses, &result.norms), (&results[0].losses, &results[0].norms), "{what}");
        }
        close(&results[0].losses, &single[0].losses, &what);
        close(&results[0].norms, &single[0].norms, &what);
        close(&results[0].vals, &single[0].vals, &what);
        // Each rank keeps its shard of its group only, and `assemble` compares the replicas bit for bit.
        let kept = |result: &RankResult| result.m.iter().map(|part| part.values.len()).sum::<usize>();
        let all: usize = results.iter().map(kept).sum();
        assert_eq!(all, moments.len() * run.ranks / run.shard_size.unwrap(), "{what}");
        let got = assemble(&results, |result| &result.params, shape(SHARDED));
        assert!(distance(&got, &weights) < 1e-3, "{what}: the weights differ by {}", distance(&got, &weights));
        let got = assemble(&results, |result| &result.m, shape(SHARDED));
        assert!(distance(&got, &moments) < 1e-2, "{what}: the moments differ by {}", distance(&got, &moments));
        // Collectives of different scopes keep their order when the GPU is behind.
        assert_eq!(Threads { delayed: true, ..run }.run(), results, "delayed, {what}");
    }
}

#[test]
#[ignore = "slow: scripts/nightly runs it"]
fn muon_with_hybrid_sharding_matches_one_rank() {
    let base = Threads { muon: true, ..SHARDED };
    let single = Threads { b: 12, accum: 2, ..base }.run();
    let weights = assemble(&single, |result| &result.params, shape(base));
    for run in hybrid(base) {
        let what = format!("{} ranks in groups of {:?}, stage {}", run.ranks, run.shard_size, run.stage);
        let results = run.run();
        assert_eq!(results[0].error, None, "{what}");
        close(&results[0].losses, &single[0].losses, &what);
        let got = assemble(&results, |result| &result.params, shape(base));
        assert!(distance(&got, &weights) < 1e-3, "{what}: the weights differ by {}", distance(&got, &weights));
    }
}

/// A group of one rank shards nothing, and a group of all ranks is ZeRO without replicas.
#[test]
fn the_smallest_and_the_largest_shard_group_are_plain_layouts() {
    let base = Threads { ranks: 4, stage: 2, b: 1, steps: 3, ..SHARDED };
    assert_eq!(Threads { shard_size: Some(4), ..base }.run(), base.run());
    assert_eq!(Threads { shard_size: Some(1), ..base }.run(), Threads { stage: 0, ..base }.run());
}

#[test]
fn collectives_on_tensors_stay_in_their_scope() {
    let threads = Threads { ranks: 6, shard_size: Some(3), stage: 1, ..SHARDED };
    let run = |group: TcpGroup| {
        let (rank, mut engine) = (group.rank, Cpu::new());
        let (mut ranks, model) = threads.prepare(group, &mut engine);
        let whole = model.params.slice(0, 3);
        let (engine, of) = (&mut engine as &mut dyn Engine, Sharded { whole, shard: whole.part(rank % 3, 3) });
        let mut after = |call: &mut dyn FnMut(&mut dyn Engine) -> anyhow::Result<()>| {
            engine.write(whole, &[0, 1, 2].map(|i| (10 * (rank + 1) + i) as f32)).unwrap();
            call(engine).unwrap();
            engine.read(whole).unwrap()
        };
        let transfers = [(0, 1, 2), (1, 2, 0)].map(|(i, from, to)| Transfer { tensor: whole.slice(i, 1), from, to });
        let exchanged = after(&mut |engine| ranks.exchange(engine, &transfers));
        let gathered = after(&mut |engine| ranks.all_gather(engine, of));
        let reduced = after(&mut |engine| ranks.reduce_scatter(engine, of, Reduction::Sum))[rank % 3];
        let sum = after(&mut |engine| ranks.all_reduce_sum(engine, Scope::ShardGroup, whole));
        let mean = after(&mut |engine| ranks.all_reduce_mean(engine, Scope::Replicas, whole));
        let largest = after(&mut |engine| ranks.all_reduce_max(engine, Scope::World, whole));
        ([exchanged, gathered, sum, mean, largest], reduced)
    };
    let groups = TcpGroup::in_process(threads.ranks, TIMEOUT).unwrap();
    let got: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| run(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (rank, (got, reduced)) in got.into_iter().enumerate() {
        let place = (rank % 3) as f32;
        let [first, sum] = if rank < 3 { [10.0, 60.0] } else { [40.0, 150.0] };
        let expected = [
            // Element 0 goes from the second rank of a group to the third, element 1 from the third to the first.
            [first + [0.0, 10.0, 10.0][rank % 3], first + [21.0, 11.0, 21.0][rank % 3], first + 10.0 * place + 2.0],
            [first, first + 11.0, first + 22.0],
            [sum, sum + 3.0, sum + 6.0],
            [0.0, 1.0, 2.0].map(|i| 25.0 + 10.0 * place + i),
            [60.0, 61.0, 62.0],
        ];
        assert_eq!((got, reduced), (expected.map(Vec::from), sum + 3.0 * place), "rank {rank}");
    }
}

#[test]
fn kernels_keep_replicas_identical() {
    for (stage, muon) in [(1, false), (3, true)] {
        let engine = EngineKind::EmulatedCompact;
        let base = Threads { engine, muon, descriptor: (2, 1, 64), b: 1, accum: 1, steps: 2, ..ON_CPU };
        let results = Threads { ranks: 4, shard_size: Some(2), stage, ..base }.run();
        assert_eq!((results[0].losses.len(), results[0].error.as_ref()), (2, None), "stage {stage}");
        // Ranks 2 and 3 end with the bits of ranks 0 and 1.
        assert_eq!((&results[0], &results[1]), (&results[2], &results[3]), "stage {stage}");
    }
}

#[test]
fn diverged_shards_are_detected() {
    for (stage, (rank, value), tensor, expected) in [
        (3, (3, Corrupted::LayerWeight), "params", 1),
        (3, (2, Corrupted::Embedding), "the embeddings", 0),
        (1, (5, Corrupted::Moment), "m", 1),
        (2, (3, Corrupted::Moment), "m", 1),
        (3, (5, Corrupted::Moment), "m", 1),
    ] {
        let run = Threads { ranks: 6, shard_size: Some(2), stage, b: 2, corrupt: Some((rank, value)), ..SHARDED };
        for result in run.run() {
            let text = result.error.unwrap();
            let expected = format!(
                "{tensor} of step 1 of 6: expected the same values on rank {rank} as on rank {expected}, found other values;"
            );
            assert!(text.starts_with(&expected), "{text}");
        }
    }
}

#[test]
fn digests_compare_replicas_and_do_not_depend_on_the_shard_size() {
    let digests = |threads: Threads| {
        let groups = TcpGroup::in_process(threads.ranks, TIMEOUT).unwrap();
        let rank = |group: TcpGroup| {
            let (rank, mut engine) = (group.rank, Cpu::new());
            let (mut ranks, model) = threads.prepare(group, &mut engine);
            if threads.corrupt.is_some_and(|(corrupt, _)| corrupt == rank) {
                engine.write(model.training.unwrap().m.slice(5, 1), &[0.25]).unwrap();
            }
            model.digests(&mut engine, &mut ranks)
        };
        let ranks: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(|| rank(group))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        ranks
    };
    let hybrid = Threads { ranks: 4, shard_size: Some(2), stage: 3, ..SHARDED };
    let [unsharded, whole, hybrid_digests] =
        [Threads { ranks: 1, stage: 0, ..SHARDED }, Threads { shard_size: None, ..hybrid }, hybrid]
            .map(|threads| digests(threads).into_iter().map(Result::unwrap).collect::<Vec<_>>());
    assert!(hybrid_digests.iter().chain(&whole).all(|digest| *digest == unsharded[0]));
    for result in digests(Threads { corrupt: Some((3, Corrupted::Moment)), ..hybrid }) {
        let error = result.unwrap_err();
        let Some(Fault::ReplicaMismatch { peer, expected, tensor }) = error.downcast_ref() else { panic!("{error}") };
        assert_eq!((peer.as_str(), *expected, tensor.as_str()), ("rank 3", 1, "m"));
    }
}

#[test]
fn zero_stages_are_bitwise_identical_if_the_summation_order_is() {
    // One micro-batch, and a power-of-two number of ranks, so that the division in the mean is exact. The summation order of
    // the norm differs, so gradients are not clipped.
    for base in [
        Threads { ranks: 2, accum: 1, clip: f32::INFINITY, ..SHARDED },
        Threads { ranks: 4, b: 2, accum: 1, clip: f32::INFINITY, descriptor: (2, 1, 40), ..ON_CPU },
    ] {
        let expected = base.run();
        for stage in 1..=3 {
            let results = Threads { stage, ..base }.run();
            assert_eq!(results[0].losses, expected[0].losses, "stage {stage}");
            let tensors = |results: &[RankResult]| {
                let params = assemble(results, |result| &result.params, shape(base));
                (params, assemble(results, |result| &result.m, shape(base)))
            };
            assert!(tensors(&results) == tensors(&expected), "stage {stage}");
            close(&results[0].norms, &expected[0].norms, "norms");
        }
    }
    // With gradient accumulation this holds for stage 1, which accumulates whole gradients.
    let base = Threads { ranks: 2, accum: 3, clip: f32::INFINITY, ..SHARDED };
    assert_eq!(Threads { stage: 1, ..base }.run()[0].losses, base.run()[0].losses);
}

/// The result does not depend on which rank orthogonalizes a matrix, nor on the boundaries of the shards. Three ranks do not
/// divide the matrices evenly. Their mean is not exact, but the same in stages 0 and 1.
/// The losses, norms and weights are those of one rank with the micro-batches of a shard group, also if collectives complete as late as the
/// waits of the engine allow.
#[test]
fn ranks_that_share_experts_match_one_rank() {
    let base = Threads { experts: Some(true), descriptor: (3, 2, 32), ..ON_CPU };
    for (ranks, size, b) in [(2, 2, 6), (4, 4, 3), (4, 2, 3)] {
        let one = Threads { b: b * size, accum: 2 * ranks / size, ..base }.run();
        let weights = assemble(&one, |result| &result.params, shape(base));
        for (stage, muon) in [(1, false), (2, false), (3, false), (1, true), (3, true)] {
            let what = format!("{ranks} ranks in groups of {size}, stage {stage}, Muon: {muon}");
            if muon && ranks / size > 1 {
                continue;
            }
            let shared = Threads { ranks, shard_size: Some(size), stage, b, muon, ..base };
            let results = shared.run();
            assert!(results.iter().all(|result| result.error.is_none()), "{what}: {:?}", results[0].error);
            if !muon {
                close(&results[0].losses, &one[0].losses, &what);
                close(&results[0].norms, &one[0].norms, &what);
                let found = assemble(&results, |result| &result.params, shape(base));
                assert!(distance(&found, &weights) < 1e-4, "{what}: {}", distance(&found, &weights));
            }
            assert_eq!(Threads { delayed: true, ..shared }.run(), results, "{what}");
        }
    }
}

#[test]
fn ranks_share_experts_on_emulated_gpus() {
    let base = Threads {
        experts: Some(true),
        engine: EngineKind::EmulatedWithMasters,
        descriptor: (2, 1, 64),
        steps: 3,
        accum: 1,
        validates: false,
        ..ON_CPU
    };
    let one = Threads { b: 2, ..base }.run();
    for stage in [1, 3] {
        let shared = Threads { ranks: 2, stage, b: 1, ..base };
        let results = shared.run();
        assert!(results.iter().all(|result| result.error.is_none()), "{:?}", results[0].error);
        for (got, expected) in [(&results[0].losses, &one[0].losses), (&results[0].norms, &one[0].norms)] {
            let worst = got.iter().zip(expected).map(|(a, b)| (a - b).abs() / b).fold(0.0, f64::max);
            assert!(got.len() == 3 && worst < 0.02, "stage {stage}: {got:?}, {expected:?}");
        }
        assert_eq!(Threads { delayed: true, ..shared }.run(), results, "stage {stage}");
    }
}

#[test]
fn muon_is_bitwise_identical_in_every_zero_stage() {
    for (base, stages) in [
        (Threads { ranks: 2, b: 2, accum: 1, ..SHARDED }, 1..=3),
        // Three layers are updated in two groups, and two of them have value embeddings.
        (Threads { ranks: 2, b: 2, accum: 1, additions: Additions::ALL, descriptor: (3, 2, 32), ..ON_CPU }, 1..=3),
        (Threads { ranks: 4, b: 1, accum: 1, descriptor: (2, 1, 40), ..ON_CPU }, 1..=3),
        (Threads { ranks: 3, b: 1, accum: 2, ..SHARDED }, 1..=1),
    ] {
        let base = Threads { muon: true, clip: f32::INFINITY, ..base };
        let expected = base.run();
        assert_eq!(expected[0].error, None);
        assert!(expected[0].params != Threads { muon: false, ..base }.run()[0].params);
        for stage in stages {
            let results = Threads { stage, ..base }.run();
            assert_eq!(results[0].losses, expected[0].losses, "stage {stage}");
            let tensors = |results: &[RankResult]| {
                let params = assemble(results, |result| &result.params, shape(base));
                (params, assemble(results, |result| &result.m, shape(base)))
            };
            assert!(tensors(&results) == tensors(&expected), "{} ranks, stage {stage}", base.ranks);
            assert_eq!(Threads { stage, delayed: true, ..base }.run(), results, "delayed, stage {stage}");
        }
    }
}

#[test]
fn tensors_of_pending_collectives_are_not_used() {
    for stage in 0..=3 {
        for layers in [1, 2, 5] {
            let base = Threads { ranks: 2, stage, descriptor: (layers, 1, 16), steps: 3, ..ON_CPU };
            assert_eq!(Threads { delayed: true, ..base }.run(), base.run(), "stage {stage}, {layers} layers");
        }
    }
}

#[test]
fn sharded_runs_are_deterministic() {
    for (ranks, stage) in [(2, 1), (3, 2), (3, 3)] {
        let run = Threads { ranks, stage, shuffle: Some(42), ..SHARDED };
        assert_eq!(run.run(), run.run(), "{ranks} ranks, stage {stage}");
    }
}

#[test]
#[ignore = "slow: scripts/nightly runs it"]
fn kernels_round_shards_like_whole_tensors() {
    for (engine, muon) in [
        (EngineKind::Emulated, false),
        (EngineKind::EmulatedWithMasters, false),
        (EngineKind::EmulatedCompact, false),
        (EngineKind::Emulated, true),
        (EngineKind::EmulatedWithMasters, true),
        (EngineKind::EmulatedCompact, true),
    ] {
        let base = Threads {
            ranks: 2,
            engine,
            muon,
            descriptor: (2, 1, 64),
            b: 1,
            accum: 1,
            steps: 2,
            clip: f32::INFINITY,
            ..ON_CPU
        };
        let expected = base.run();
        let tensors = |results: &[RankResult]| assemble(results, |result| &result.params, shape(base));
        for stage in 1..=3 {
            let results = Threads { stage, ..base }.run();
            assert_eq!((results[0].losses.len(), results[0].error.as_ref()), (2, None));
            assert_eq!(results[0].losses, expected[0].losses, "stage {stage}");
            assert!(tensors(&results) == tensors(&expected), "stage {stage}");
            let tensors = |results: &[RankResult]| assemble(results, |result| &result.m, shape(base));
            assert!(tensors(&results) == tensors(&expected), "stage {stage}");
            if engine != EngineKind::Emulated {
                let tensors = |results: &[RankResult]| assemble(results, |result| &result.masters, shape(base));
                assert!(tensors(&results) == tensors(&expected), "stage {stage}");
            }
        }
    }
}

/// The first micro-batch launches kernels individually, the next is captured as a CUDA graph, the next replays it. The last one
/// communicates and launches kernels individually.
#[test]
fn cuda_graphs_of_several_ranks_match_the_cpu() {
    let base = Threads { ranks: 2, descriptor: (1, 1, 64), b: 1, accum: 3, steps: 3, ..ON_CPU };
    let expected = base.run();
    for stage in [0, 1] {
        let results = Threads { engine: EngineKind::EmulatedWithMasters, stage, ..base }.run();
        assert_eq!((results[0].losses.len(), results[0].error.as_ref()), (3, None));
        let pairs =
            results[0].losses.iter().zip(&expected[0].losses).chain(results[0].norms.iter().zip(&expected[0].norms));
        for (got, want) in pairs {
            assert!((got / want - 1.0).abs() < 0.02, "stage {stage}: {results:?}, on the CPU {expected:?}");
        }
    }
}

/// Returns validation data of two batches.
fn validation(loader: Loader, engine: &dyn Engine) -> Validation {
    let data = Prefetch::start(loader, engine).unwrap();
    let source = ValidationSource { name: "val".to_owned(), data, batches: 2 };
    Validation { sources: vec![source], ..Validation::default() }
}
