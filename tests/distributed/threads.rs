//! Ranks that are threads, on the CPU engine and on the emulated GPU.

use checkpoint::RunState;
use data::{Geometry, Loader, Prefetch, Tokens};
use distributed::Ranks;
use distributed::communicator::Communicator;
use distributed::star::{Reduction, Star};
use engine::Engine;
use engine::cpu::Cpu;
use engine::cuda::{Precision, emulated};
use engine::tensor::{Sharded, Tensor};
use host::console::Console;
use host::log::Log;
use host::signals::Stop;
use host::train::{Run, Settings};
use model::guards::Limits;
use model::schedule::{Kind, Schedule};
use model::{Descriptor, Gpt2, Param, Params, PlanOptions, Recompute, Shard, Store, Zero};
use rng::Mt19937;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

pub const PATIENCE: Duration = Duration::from_mins(1);
const VOCAB: usize = 60;

/// What a run is computed on.
#[derive(Clone, Copy, PartialEq)]
enum On {
    /// In f32.
    Cpu,
    /// In bf16, without master weights.
    Emulated,
    EmulatedWithMasters,
}

/// A run of threads.
#[derive(Clone, Copy)]
struct Threads {
    ranks: usize,
    /// What they divide among them.
    stage: u8,
    on: On,
    descriptor: (usize, usize, usize),
    b: usize,
    accum: usize,
    steps: usize,
    clip: f32,
    shuffle: Option<u32>,
    /// Changes a weight of rank 1 before the run begins.
    spoilt: bool,
    /// What ranks do together is done as late as it may be.
    late: bool,
}

/// What a rank ends with.
#[derive(Debug, PartialEq)]
struct End {
    params: Vec<Held>,
    m: Vec<Held>,
    masters: Vec<Held>,
    losses: Vec<f64>,
    norms: Vec<f64>,
    vals: Vec<f64>,
    error: Option<String>,
}

/// What a rank keeps of a tensor: its first element, and the values from there on.
#[derive(Debug, PartialEq)]
struct Held {
    param: Param,
    layer: usize,
    first: usize,
    values: Vec<f32>,
}

fn held(engine: &mut dyn Engine, layout: &Params, store: Store) -> Vec<Held> {
    let mut all = Vec::new();
    for (param, layer) in layout.file_order() {
        if let Some((range, tensor)) = store.held(param, layer) {
            all.push(Held { param, layer, first: range.start, values: engine.read(tensor).unwrap() });
        }
    }
    all
}

/// The whole of what ranks keep parts of, and those that have the same must agree.
fn whole(ends: &[End], of: impl Fn(&End) -> &Vec<Held>, descriptor: Descriptor) -> Vec<f32> {
    let mut all = Vec::new();
    for (param, layer) in Params::new(descriptor).file_order() {
        let mut values = vec![None; param.len(&descriptor)];
        for held in ends.iter().flat_map(&of).filter(|held| (held.param, held.layer) == (param, layer)) {
            for (slot, value) in values[held.first..].iter_mut().zip(&held.values) {
                assert!(slot.is_none_or(|slot: f32| slot.to_bits() == value.to_bits()), "{}", param.name());
                *slot = Some(*value);
            }
        }
        all.extend(values.into_iter().map(|value| value.expect("some rank keeps it")));
    }
    all
}

const T: usize = 16;

impl Threads {
    fn run(self) -> Vec<End> {
        let stars = Star::in_process(self.ranks, PATIENCE).unwrap();
        thread::scope(|scope| {
            let threads: Vec<_> = stars.into_iter().map(|star| scope.spawn(move || self.rank(star))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn rank(self, star: Star) -> End {
        let Self { ranks: n, descriptor: (layers, heads, channels), b, accum, steps, .. } = self;
        let rank = star.rank;
        let mut engine: Box<dyn Engine> = match self.on {
            On::Cpu => Box::new(Cpu::new()),
            _ => emulated(Precision::Bf16, false),
        };
        let descriptor = Descriptor::new(layers, heads, channels, T, VOCAB).unwrap();
        let master_weights = self.on == On::EmulatedWithMasters;
        let capacity = PlanOptions { master_weights, ..PlanOptions::training(b, T) };
        let zero = Zero::new(self.stage, Shard { rank, ranks: n });
        let (model, plan) = Gpt2::plan(descriptor, capacity, zero, &mut *engine);
        engine.allocate(&plan).unwrap();
        // Where all have all, only rank 0 knows how the model begins.
        if rank == 0 || zero.shards_optimizer() {
            model.initialize(&mut *engine, 42).unwrap();
        }
        let mut ranks = if n == 1 { Ranks::Alone } else { Ranks::Met(star) };
        ranks.join(&*engine, model.params).unwrap();
        if self.late
            && let Ranks::Joined(now) = ranks
        {
            ranks = Ranks::Joined(Box::new(Late { now, waiting: Vec::new() }));
        }
        if !zero.shards_optimizer() {
            let tensors = [Some(model.params), model.training.unwrap().master];
            ranks.share(&mut *engine, &tensors.into_iter().flatten().collect::<Vec<_>>()).unwrap();
        }
        if self.spoilt && rank == 1 {
            engine.write(model.params.slice(5, 1), &[0.25]).unwrap();
        }
        let mut rng = Mt19937::new(1);
        let mut ids = |n| (0..n).map(|_| rng.below(60).min(rng.below(60)) as u16).collect::<Vec<_>>();
        let geometry = Geometry { b, t: T, ranks: n, rank };
        let loader = |name: &str, ids, shuffle| {
            Loader::new(vec![Tokens::in_memory(name.to_owned(), ids)], geometry, VOCAB, shuffle).unwrap()
        };
        let train = loader("train", ids(6000), self.shuffle);
        let val = loader("val", ids(600), None).rewinding_after(2);
        let settings = Settings {
            steps,
            grad_accum: accum,
            schedule: Schedule { kind: Kind::Linear, peak: 1e-2, warmup: 2, steps, final_fraction: 0.0 },
            weight_decay: 0.1,
            clip: self.clip,
            limits: Limits { loss_z: None, norm_z: None, bad_steps: 10 },
            val_every: Some(2),
            val_batches: 2,
            sample_every: None,
            sample_tokens: 0,
            checkpoint_every: None,
            check_ranks_every: Some(1),
        };
        let dir = tempfile::tempdir().unwrap();
        let state = RunState::fresh(train.position());
        let mut run = Run {
            settings: &settings,
            ranks: &mut ranks,
            model: &model,
            tokenizer: None,
            train: Prefetch::start(train, &*engine).unwrap(),
            val: Some(Prefetch::start(val, &*engine).unwrap()),
            hellaswag: None,
            engine: &mut *engine,
            console: Console::aside(steps, None, false).unwrap(),
            log: Log::create(Some(dir.path())).unwrap(),
            state,
            checkpoints: None,
            stop: Stop::default(),
        };
        let outcome = run.train();
        let error = outcome.err().map(|error| ranks.give_up(error));
        let training = model.training.unwrap();
        let numbers = |key| numbers(dir.path(), key);
        End {
            params: held(&mut *engine, &model.layout, model.param_store()),
            m: held(&mut *engine, &model.layout, model.state_store(training.m)),
            masters: training
                .master
                .map_or_else(Vec::new, |master| held(&mut *engine, &model.layout, model.state_store(master))),
            losses: numbers("loss"),
            norms: numbers("norm"),
            vals: numbers("val_loss"),
            error: error.map(|error| error.to_string()),
        }
    }
}

/// What a run's log says of each step.
pub fn numbers(directory: &Path, key: &str) -> Vec<f64> {
    let text = fs::read_to_string(directory.join("main.jsonl")).unwrap();
    text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()[key].as_f64()).collect()
}

/// Does nothing before the engine waits for it, as a GPU may.
struct Late {
    now: Box<dyn Communicator>,
    waiting: Vec<Operation>,
}

enum Operation {
    Reduce(Tensor, Reduction),
    Broadcast(Tensor),
    Scatter(Sharded, Reduction),
    Gather(Sharded),
}

impl Late {
    fn later(&mut self, operation: Operation) {
        self.waiting.push(operation);
    }
}

impl Communicator for Late {
    fn who(&self) -> (usize, usize) {
        self.now.who()
    }

    fn star(&mut self) -> &mut Star {
        self.now.star()
    }

    fn all_reduce(&mut self, _: &mut dyn Engine, tensor: Tensor, reduction: Reduction) -> anyhow::Result<()> {
        self.later(Operation::Reduce(tensor, reduction));
        Ok(())
    }

    fn broadcast(&mut self, _: &mut dyn Engine, tensor: Tensor) -> anyhow::Result<()> {
        self.later(Operation::Broadcast(tensor));
        Ok(())
    }

    fn reduce_scatter(&mut self, _: &mut dyn Engine, of: Sharded, reduction: Reduction) -> anyhow::Result<()> {
        self.later(Operation::Scatter(of, reduction));
        Ok(())
    }

    fn all_gather(&mut self, _: &mut dyn Engine, of: Sharded) -> anyhow::Result<()> {
        self.later(Operation::Gather(of));
        Ok(())
    }

    fn settle(&mut self, engine: &mut dyn Engine) -> anyhow::Result<()> {
        for operation in self.waiting.drain(..) {
            match operation {
                Operation::Reduce(tensor, reduction) => self.now.all_reduce(engine, tensor, reduction)?,
                Operation::Broadcast(tensor) => self.now.broadcast(engine, tensor)?,
                Operation::Scatter(of, reduction) => self.now.reduce_scatter(engine, of, reduction)?,
                Operation::Gather(of) => self.now.all_gather(engine, of)?,
            }
        }
        self.now.settle(engine)
    }

    fn check(&self) -> anyhow::Result<()> {
        self.now.check()
    }

    fn close(self: Box<Self>) -> anyhow::Result<()> {
        assert!(self.waiting.is_empty(), "nothing is left behind");
        self.now.close()
    }

    fn abandon(self: Box<Self>) -> Star {
        self.now.abandon()
    }

    fn describe(&self) -> String {
        self.now.describe()
    }
}

const ON_CPU: Threads = Threads {
    ranks: 1,
    stage: 0,
    on: On::Cpu,
    descriptor: (2, 2, 32),
    b: 4,
    accum: 2,
    steps: 6,
    clip: 1.0,
    shuffle: None,
    spoilt: false,
    late: false,
};

#[test]
fn several_ranks_train_as_one_and_alike() {
    let alone = ON_CPU.run().remove(0);
    assert_eq!((alone.losses.len(), alone.vals.len()), (6, 4));
    assert!(alone.losses[5] < alone.losses[0]);
    for (ranks, b, accum) in [(2, 2, 2), (4, 1, 2), (2, 4, 1)] {
        // In order, a sample of all ranks is that of the one.
        let ends = Threads { ranks, b, accum, ..ON_CPU }.run();
        for (rank, end) in ends.iter().enumerate() {
            assert_eq!(end, &ends[0], "rank {rank}");
            assert_eq!(end.error, None);
        }
        for (got, expected) in [(&ends[0].losses, &alone.losses), (&ends[0].norms, &alone.norms)] {
            for (got, expected) in got.iter().zip(expected) {
                assert!((got - expected).abs() < 2e-4 * expected, "{ranks} ranks: {got}, {expected}");
            }
        }
    }
    // As large a batch at once: validation reads the same tokens, too.
    let ends = Threads { ranks: 4, b: 1, ..ON_CPU }.run();
    for (got, expected) in ends[0].vals.iter().zip(&alone.vals) {
        assert!((got - expected).abs() < 2e-4 * expected, "{got}, {expected}");
    }
}

#[test]
fn each_rank_reads_its_own_part_and_two_runs_are_the_same() {
    let two = Threads { ranks: 2, shuffle: Some(42), ..ON_CPU };
    let first = two.run();
    assert_eq!(first, two.run());
    assert_eq!(first[0], first[1]);
    let alone = Threads { ranks: 1, ..two }.run();
    assert!(first[0].losses != alone[0].losses, "rank 1's part changes the gradients");
}

#[test]
fn stochastic_rounding_is_the_same_on_all_ranks() {
    let ends = Threads { ranks: 2, on: On::Emulated, descriptor: (1, 1, 64), b: 1, steps: 3, ..ON_CPU }.run();
    assert_eq!(ends[0], ends[1]);
    assert_eq!((ends[0].losses.len(), ends[0].error.as_ref()), (3, None));
}

#[test]
fn ranks_that_drift_apart_are_found() {
    let ends = Threads { ranks: 3, spoilt: true, ..ON_CPU }.run();
    for end in ends {
        let text = end.error.unwrap();
        assert!(text.starts_with("params of step 1 of 6 is not the same on rank 1 as on rank 0"), "{text}");
    }
}

/// Three layers, so that the two buffers of a pass have to be used again; of sizes that 3 and 4 ranks do not divide evenly
/// into the 64 elements that parts begin at.
const DIVIDED: Threads = Threads { descriptor: (3, 2, 24), ..ON_CPU };

fn shape(threads: Threads) -> Descriptor {
    let (layers, heads, channels) = threads.descriptor;
    Descriptor::new(layers, heads, channels, T, VOCAB).unwrap()
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
fn every_stage_trains_as_one_rank_does() {
    let alone = Threads { b: 12, accum: 2, ..DIVIDED }.run();
    let weights = whole(&alone, |end| &end.params, shape(DIVIDED));
    for ranks in [2, 3, 4] {
        for stage in 0..=3 {
            let what = format!("{ranks} ranks, stage {stage}");
            let ends = Threads { ranks, stage, b: 12 / ranks, ..DIVIDED }.run();
            for end in &ends {
                assert_eq!(end.error, None, "{what}");
                assert_eq!((&end.losses, &end.norms), (&ends[0].losses, &ends[0].norms), "{what}");
            }
            close(&ends[0].losses, &alone[0].losses, &what);
            close(&ends[0].norms, &alone[0].norms, &what);
            close(&ends[0].vals, &alone[0].vals, &what);
            let apart = distance(&whole(&ends, |end| &end.params, shape(DIVIDED)), &weights);
            assert!(apart < 1e-3, "{what}: weights are {apart} apart");
        }
    }
}

#[test]
fn stages_differ_in_no_bit_where_sums_have_one_order() {
    // One micro-step, and by a power of two a sum of halves is half a sum. Norms are summed in other orders: nothing is clipped.
    for base in [
        Threads { ranks: 2, accum: 1, clip: f32::INFINITY, ..DIVIDED },
        Threads { ranks: 4, b: 2, accum: 1, clip: f32::INFINITY, descriptor: (2, 1, 40), ..ON_CPU },
    ] {
        let expected = base.run();
        for stage in 1..=3 {
            let ends = Threads { stage, ..base }.run();
            assert_eq!(ends[0].losses, expected[0].losses, "stage {stage}");
            let of = |ends: &[End]| {
                let params = whole(ends, |end| &end.params, shape(base));
                (params, whole(ends, |end| &end.m, shape(base)))
            };
            assert!(of(&ends) == of(&expected), "stage {stage}");
            close(&ends[0].norms, &expected[0].norms, "norms");
        }
    }
    // With more micro-steps, that is so for as long as they add to one gradient.
    let base = Threads { ranks: 2, accum: 3, clip: f32::INFINITY, ..DIVIDED };
    assert_eq!(Threads { stage: 1, ..base }.run()[0].losses, base.run()[0].losses);
}

#[test]
fn what_is_exchanged_is_touched_by_nobody_before_it_has_settled() {
    for stage in 0..=3 {
        for layers in [1, 2, 5] {
            let now = Threads { ranks: 2, stage, descriptor: (layers, 1, 16), steps: 3, ..ON_CPU };
            assert_eq!(Threads { late: true, ..now }.run(), now.run(), "stage {stage}, {layers} layers");
        }
    }
}

#[test]
fn a_divided_run_gives_the_same_bits_again() {
    for (ranks, stage) in [(2, 1), (3, 2), (3, 3)] {
        let run = Threads { ranks, stage, shuffle: Some(42), ..DIVIDED };
        assert_eq!(run.run(), run.run(), "{ranks} ranks, stage {stage}");
    }
}

#[test]
fn kernels_round_a_part_as_the_whole() {
    for on in [On::Emulated, On::EmulatedWithMasters] {
        let base =
            Threads { ranks: 2, on, descriptor: (2, 1, 64), b: 1, accum: 1, steps: 2, clip: f32::INFINITY, ..ON_CPU };
        let expected = base.run();
        let of = |ends: &[End]| whole(ends, |end| &end.params, shape(base));
        for stage in 1..=3 {
            let ends = Threads { stage, ..base }.run();
            assert_eq!((ends[0].losses.len(), ends[0].error.as_ref()), (2, None));
            assert_eq!(ends[0].losses, expected[0].losses, "stage {stage}");
            assert!(of(&ends) == of(&expected), "stage {stage}");
            if on == On::EmulatedWithMasters {
                let of = |ends: &[End]| whole(ends, |end| &end.masters, shape(base));
                assert!(of(&ends) == of(&expected), "stage {stage}");
            }
        }
    }
}

/// The first micro-step of a step is queued, then recorded, then replayed; the last, which exchanges, is queued.
#[test]
fn recorded_micro_steps_of_ranks_learn_as_the_cpu_does() {
    let base = Threads { ranks: 2, descriptor: (1, 1, 64), b: 1, accum: 3, steps: 3, ..ON_CPU };
    let expected = base.run();
    for stage in [0, 1] {
        let ends = Threads { on: On::EmulatedWithMasters, stage, ..base }.run();
        assert_eq!((ends[0].losses.len(), ends[0].error.as_ref()), (3, None));
        let pairs = ends[0].losses.iter().zip(&expected[0].losses).chain(ends[0].norms.iter().zip(&expected[0].norms));
        for (got, want) in pairs {
            assert!((got / want - 1.0).abs() < 0.02, "stage {stage}: {ends:?}, on the CPU {expected:?}");
        }
    }
}
