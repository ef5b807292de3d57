//! Several ranks train as one does: threads over both engines, and processes as a launcher starts them.

use host::checkpoint::RunState;
use host::console::Console;
use host::data::{Geometry, Loader, Prefetch, Tokens, tokens};
use host::distributed::Ranks;
use host::distributed::communicator::Communicator;
use host::distributed::star::{Reduction, Star};
use host::engine::Engine;
use host::engine::cpu::Cpu;
use host::engine::cuda::{Precision, emulated};
use host::guards::Limits;
use host::log::Log;
use host::model::{Capacity, Descriptor, Gpt2, Param, Params, Recompute, Share, Store, Zero};
use host::rng::Mt19937;
use host::schedule::{Kind, Schedule};
use host::signals::Stop;
use host::tensor::Tensor;
use host::train::{Run, Settings, initialise};
use std::fs;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_mins(1);
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
        let capacity = Capacity { b, t: T, training: true, master_weights, recompute: Recompute::Nothing };
        let zero = Zero::new(self.stage, Share { rank, ranks: n });
        let (model, plan) = Gpt2::plan_divided(descriptor, capacity, zero, &mut *engine);
        engine.allocate(&plan).unwrap();
        // Where all have all, only rank 0 knows how the model begins.
        if rank == 0 || zero.divides_optimizer() {
            initialise(&model, &mut *engine, 42).unwrap();
        }
        let mut ranks = if n == 1 { Ranks::Alone } else { Ranks::Met(star) };
        ranks.join(&*engine, model.params).unwrap();
        if self.late
            && let Ranks::Joined(now) = ranks
        {
            ranks = Ranks::Joined(Box::new(Late { now, waiting: Vec::new() }));
        }
        if !zero.divides_optimizer() {
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
fn numbers(directory: &Path, key: &str) -> Vec<f64> {
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
    Scatter(Tensor, Tensor, Reduction),
    Gather(Tensor, Tensor),
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

    fn reduce_scatter(
        &mut self,
        _: &mut dyn Engine,
        whole: Tensor,
        part: Tensor,
        reduction: Reduction,
    ) -> anyhow::Result<()> {
        self.later(Operation::Scatter(whole, part, reduction));
        Ok(())
    }

    fn all_gather(&mut self, _: &mut dyn Engine, whole: Tensor, part: Tensor) -> anyhow::Result<()> {
        self.later(Operation::Gather(whole, part));
        Ok(())
    }

    fn settle(&mut self, engine: &mut dyn Engine) -> anyhow::Result<()> {
        for operation in self.waiting.drain(..) {
            match operation {
                Operation::Reduce(tensor, reduction) => self.now.all_reduce(engine, tensor, reduction)?,
                Operation::Broadcast(tensor) => self.now.broadcast(engine, tensor)?,
                Operation::Scatter(whole, part, reduction) => {
                    self.now.reduce_scatter(engine, whole, part, reduction)?;
                }
                Operation::Gather(whole, part) => self.now.all_gather(engine, whole, part)?,
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

fn close(got: &[f64], expected: &[f64], what: &str) {
    assert!(!got.is_empty() && got.len() == expected.len(), "{what}: {got:?}, {expected:?}");
    for (got, expected) in got.iter().zip(expected) {
        assert!((got - expected).abs() < 2e-4 * expected, "{what}: {got}, {expected}");
    }
}

fn distance(got: &[f32], expected: &[f32]) -> f64 {
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

/// A directory with data and a model, and runs of processes in it.
struct World {
    dir: TempDir,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut rng = Mt19937::new(7);
        let mut ids = |n: usize| (0..n).map(|_| rng.below(97).min(rng.below(97)) as u16).collect::<Vec<u16>>();
        for (i, n) in [3000, 4005].into_iter().enumerate() {
            tokens::write(&dir.path().join(format!("train_{i}.bin")), &ids(n)).unwrap();
        }
        tokens::write(&dir.path().join("val_0.bin"), &ids(600)).unwrap();
        fs::write(dir.path().join("tiny.bin"), include_bytes!("data/tiny.bin")).unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn arguments(out: &str, more: &[&str]) -> Vec<String> {
        let settings = [
            ("--device", "cpu"),
            ("--train", "train_*.bin"),
            ("--val", "val_*.bin"),
            ("--model", "tiny.bin"),
            ("--batch", "2"),
            ("--seq", "16"),
            ("--total-batch", "128"),
            ("--steps", "8"),
            ("--lr", "0.003"),
            ("--val-every", "4"),
            ("--val-batches", "2"),
            ("--sample-every", "0"),
            ("--check-ranks", "1"),
            ("--checkpoint-every", "4"),
            ("--out", out),
        ];
        let mut arguments = vec!["train".to_owned()];
        for (flag, value) in settings.into_iter().filter(|(flag, _)| !more.contains(flag)) {
            arguments.extend([flag.to_owned(), value.to_owned()]);
        }
        arguments.extend(more.iter().map(|&flag| flag.to_owned()));
        arguments
    }

    fn command(&self, program: &Path, out: &str, more: &[&str]) -> Command {
        let mut command = self.bare(program);
        command.args(Self::arguments(out, more));
        command
    }

    /// A process, with nothing of a launcher in its environment.
    fn bare(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.dir.path());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        for (name, _) in std::env::vars() {
            let launchers = ["OMPI_", "PMI", "PMIX_", "SLURM_", "MPI_", "RANK", "WORLD_SIZE", "LOCAL_"];
            if launchers.iter().any(|launcher| name.starts_with(launcher)) {
                command.env_remove(name);
            }
        }
        command
    }

    /// Rank `rank` of `ranks`, as torchrun starts it.
    fn rank(&self, rank: usize, ranks: usize, job: &str, out: &str, more: &[&str]) -> Child {
        let mut command = self.command(program(), out, more);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
        command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", ranks.to_string());
        command.env("TORCHELASTIC_RUN_ID", format!("{job} {}", std::process::id()));
        command.spawn().unwrap()
    }

    fn ranks(&self, ranks: usize, job: &str, out: &str, more: &[&str]) -> Vec<Output> {
        let children: Vec<_> = (0..ranks).map(|rank| self.rank(rank, ranks, job, out, more)).collect();
        children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
    }
}

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_host"))
}

fn said(output: &Output) -> (String, String) {
    (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Exit codes of ranks that do not fit together, and of those that have lost one.
const UNFIT: i32 = 3;
const LOST: i32 = 4;

/// The message of rank 0, and that all others end in silence with the same code.
fn one_message(outputs: &[Output], code: i32) -> String {
    let (_, message) = said(&outputs[0]);
    assert_eq!(message.lines().count(), 1, "{message}");
    for (rank, output) in outputs.iter().enumerate() {
        assert_eq!(output.status.code(), Some(code), "rank {rank}: {:?}", said(output));
        assert!(rank == 0 || said(output).1.is_empty(), "rank {rank}: {:?}", said(output));
    }
    message
}

#[test]
fn processes_train_together_and_go_on_from_a_checkpoint() {
    let world = World::new();
    for (ranks, out) in [(2, "two"), (4, "four")] {
        for (rank, output) in world.ranks(ranks, out, out, &[]).iter().enumerate() {
            let (printed, errors) = said(output);
            assert!(output.status.success() && errors.is_empty(), "rank {rank}: {printed}{errors}");
            assert_eq!(printed.is_empty(), rank > 0, "only rank 0 prints: {printed}");
            let log = fs::read_to_string(world.path(out).join(format!("rank-{rank}.log")));
            assert_eq!(log.is_ok(), rank > 0);
            let told = if rank == 0 { printed } else { log.unwrap() };
            assert!(told.contains(&format!("{ranks} ranks, connected by TCP")), "{told}");
            assert!(told.contains("step    8/8 | loss"), "{told}");
        }
    }
    // A run that is taken up again: from the first checkpoint on, all is as it was.
    let whole = world.path("two");
    let resumed = world.path("resumed");
    fs::create_dir(&resumed).unwrap();
    for name in [
        "model_00000004.bin",
        "state_00000004_00000.bin",
        "run_00000004.json",
        "DONE_00000004",
        "main.log",
        "main.jsonl",
    ] {
        fs::copy(whole.join(name), resumed.join(name)).unwrap();
    }
    for output in world.ranks(2, "resumed", "resumed", &["--resume"]) {
        assert!(output.status.success(), "{:?}", said(&output));
    }
    for name in ["model_00000008.bin", "state_00000008_00000.bin", "main.log"] {
        assert!(fs::read(whole.join(name)).unwrap() == fs::read(resumed.join(name)).unwrap(), "{name} differs");
    }
    // On another number of ranks it goes on, too.
    for (ranks, steps) in [(4, "10"), (1, "12")] {
        for output in world.ranks(ranks, "more", "two", &["--resume", "--steps", steps, "--force-resume"]) {
            assert!(output.status.success(), "{:?}", said(&output));
        }
        assert_eq!(numbers(&whole, "loss").len().to_string(), steps);
    }
    // Ranks are compared after each step; that is no time of the step.
    assert!(numbers(&whole, "ms").iter().all(|&ms| ms > 0.01), "{:?}", numbers(&whole, "ms"));
    let losses = numbers(&whole, "loss");
    assert!(losses[11] < losses[0], "{losses:?}");
}

/// llm.c's state file of a rank, read by nothing of the program: (ranks, rank, masters, step), and its f32 after the header.
fn state_file(path: &Path) -> ([i32; 4], Vec<f32>) {
    let bytes = fs::read(path).unwrap();
    let word = |i: usize| i32::from_le_bytes(bytes[4 * i..4 * i + 4].try_into().unwrap());
    assert_eq!((word(0), word(1)), (20240527, 1));
    let floats = bytes[1024..].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    ([word(2), word(3), word(4), word(10)], floats)
}

/// Lengths of llm.c's tensors of a layer in the order of its files, and how many layers have one.
fn llmc_tensors(vp: usize, t: usize, c: usize, l: usize) -> [(usize, usize); 16] {
    let layer = [c, c, 3 * c * c, 3 * c, c * c, c, c, c, 4 * c * c, 4 * c, 4 * c * c, c].map(|n| (n, l));
    let mut all = [(vp * c, 1); 16];
    all[1] = (t * c, 1);
    all[2..14].copy_from_slice(&layer);
    all[14..].fill((c, 1));
    all
}

/// m, v and masters of all ranks, put together as llm.c's ranks divide them: each tensor of each layer into parts one after
/// another, the last ones shorter where they do not divide (which llm.c refuses).
fn joined(out: &Path, step: usize, ranks: usize, tensors: &[(usize, usize)]) -> Vec<f32> {
    let names = (0..ranks).map(|rank| out.join(format!("state_{step:08}_{rank:05}.bin")));
    let files: Vec<_> = names.map(|name| state_file(&name)).collect();
    for (rank, (header, _)) in files.iter().enumerate() {
        assert_eq!(*header, [ranks as i32, rank as i32, 1, step as i32]);
    }
    let (mut at, mut all) = (vec![0; ranks], Vec::new());
    for _ in ["m", "v", "masters"] {
        for (n, layers) in tensors {
            for _ in 0..*layers {
                let part = n.div_ceil(ranks);
                for (rank, (_, values)) in files.iter().enumerate() {
                    let len = (*n).min((rank + 1) * part) - (*n).min(rank * part);
                    all.extend(&values[at[rank]..at[rank] + len]);
                    at[rank] += len;
                }
            }
        }
    }
    all
}

/// Of tests/data/tiny.bin.
fn tiny_tensors() -> Vec<(usize, usize)> {
    let word = |i: usize| i32::from_le_bytes(include_bytes!("data/tiny.bin")[4 * i..4 * i + 4].try_into().unwrap());
    let [t, l, c, vp] = [2, 4, 6, 7].map(|i| word(i) as usize);
    llmc_tensors(vp, t, c, l).to_vec()
}

fn succeed(outputs: &[Output], what: &str) -> String {
    for (rank, output) in outputs.iter().enumerate() {
        assert!(output.status.success(), "{what}, rank {rank}: {:?}", said(output));
    }
    said(&outputs[0]).0
}

#[test]
fn state_files_of_ranks_that_divide_are_llm_cs() {
    let world = World::new();
    // 5 do not divide the tensors.
    for (ranks, total) in [(2, "128"), (3, "96"), (5, "160")] {
        let total = ["--total-batch", total];
        let names: Vec<String> = (0..=3).map(|stage| format!("{ranks}_{stage}")).collect();
        for (stage, out) in names.iter().enumerate() {
            let stage = stage.to_string();
            let more = [&total[..], &["--zero-stage", &stage]].concat();
            let printed = succeed(&world.ranks(ranks, out, out, &more), out);
            // What each stage takes and saves.
            let row = |stage| {
                let row = printed.lines().find(|line| line.starts_with(&format!("  stage {stage}"))).unwrap();
                row.split_whitespace().rev().take(5).map(|cell| cell.parse::<f64>().unwrap()).collect::<Vec<_>>()
            };
            assert!(printed.contains(&format!("  stage {stage}, this run ")), "{printed}");
            assert!(row(1)[2] <= row(0)[2] / ranks as f64 + 0.1 && row(1)[0] > 0.0 && row(0)[0] == 0.0, "{printed}");
        }
        let undivided = joined(&world.path(&names[0]), 8, 1, &tiny_tensors());
        for out in &names[1..] {
            let divided = joined(&world.path(out), 8, ranks, &tiny_tensors());
            assert!(divided.len() == undivided.len() && distance(&divided, &undivided) < 1e-4, "{out}");
            let model = |out: &str| fs::read(world.path(out).join("model_00000008.bin")).unwrap();
            let [got, expected] = [model(out), model(&names[0])].map(|bytes| {
                bytes[1024..].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect::<Vec<_>>()
            });
            assert!(distance(&got, &expected) < 1e-4, "{out}");
            // Weights of f32 are their own masters: those of the state files are the model file's.
            assert!(divided[2 * got.len()..][..got.len()] == got, "{out}");
        }
    }
}

/// Copies what there is of the checkpoint of a step into a new directory, from which a run can go on.
fn only_step(world: &World, from: &str, step: usize, to: &str) {
    fs::create_dir(world.path(to)).unwrap();
    for entry in fs::read_dir(world.path(from)).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.contains(&format!("_{step:08}")) || name.starts_with("main") {
            fs::copy(world.path(from).join(&name), world.path(to).join(&name)).unwrap();
        }
    }
}

#[test]
fn checkpoints_of_any_ranks_and_stage_go_on_with_any_others() {
    let world = World::new();
    // A total batch that 1, 2, 3 and 4 ranks divide.
    let run = |ranks: usize, stage: &str, out: &str, more: &[&str]| {
        let more = [&["--total-batch", "384", "--zero-stage", stage][..], more].concat();
        succeed(&world.ranks(ranks, out, out, &more), out)
    };
    let start = |ranks: usize, stage: &str| {
        let out = format!("from_{ranks}_{stage}");
        run(ranks, stage, &out, &[]);
        out
    };
    for (from, from_stage, to, to_stage) in
        [(4, "1", 2, "1"), (2, "2", 3, "2"), (1, "0", 4, "1"), (2, "1", 2, "3"), (3, "3", 2, "0"), (3, "3", 1, "0")]
    {
        let what = format!("{from} ranks, stage {from_stage} to {to}, stage {to_stage}");
        let first = format!("from_{from}_{from_stage}");
        if !world.path(&first).exists() {
            start(from, from_stage);
        }
        // On to the end, and for comparison as ranks that divide nothing.
        let [end, plain] = [to_stage, "0"].map(|stage| {
            let out = format!("{first}_to_{to}_{stage}");
            if !world.path(&out).exists() {
                only_step(&world, &first, 4, &out);
                let printed = run(to, stage, &out, &["--resume"]);
                assert!(printed.contains("going on after 4 of 8 steps"), "{printed}");
            }
            out
        });
        let ranks_of = |stage: &str| if stage == "0" { 1 } else { to };
        let got = joined(&world.path(&end), 8, ranks_of(to_stage), &tiny_tensors());
        let expected = joined(&world.path(&plain), 8, 1, &tiny_tensors());
        assert!(distance(&got, &expected) < 1e-4, "{what}");
        let losses = [&end, &plain].map(|out| numbers(&world.path(out), "loss"));
        assert_eq!(losses[0].len(), 8, "{what}");
        close(&losses[0], &losses[1], &what);
    }
}

#[test]
fn divided_runs_go_on_bit_for_bit() {
    let world = World::new();
    for (ranks, stage) in [(2, "1"), (3, "3")] {
        let out = format!("whole_{stage}");
        let more = ["--total-batch", if ranks == 2 { "128" } else { "96" }, "--zero-stage", stage];
        succeed(&world.ranks(ranks, &out, &out, &more), &out);
        let resumed = format!("resumed_{stage}");
        only_step(&world, &out, 4, &resumed);
        succeed(&world.ranks(ranks, &resumed, &resumed, &[&more[..], &["--resume"]].concat()), &resumed);
        let states = (0..ranks).map(|rank| format!("state_00000008_{rank:05}.bin"));
        for name in states.chain(["model_00000008.bin".to_owned(), "main.log".to_owned()]) {
            let [whole, again] = [&out, &resumed].map(|out| fs::read(world.path(out).join(&name)).unwrap());
            assert!(whole == again, "{name} of stage {stage} differs");
        }
    }
}

#[test]
fn a_killed_rank_leaves_whole_checkpoints_only() {
    let world = World::new();
    let more = ["--total-batch", "96", "--zero-stage", "2", "--checkpoint-every", "1", "--steps", "12"];
    succeed(&world.ranks(3, "whole", "whole", &more), "whole");
    let mut children: Vec<_> = (0..3).map(|rank| world.rank(rank, 3, "killed in part", "killed", &more)).collect();
    let deadline = Instant::now() + PATIENCE;
    while !world.path("killed/DONE_00000003").exists() {
        assert!(Instant::now() < deadline, "the run does not begin");
        thread::sleep(Duration::from_millis(1));
    }
    children[1].kill().unwrap();
    for child in children {
        assert!(!child.wait_with_output().unwrap().status.success(), "a run of which a rank is gone");
    }
    succeed(&world.ranks(3, "again", "killed", &[&more[..], &["--resume"]].concat()), "again");
    for name in ["model_00000012.bin", "state_00000012_00000.bin", "state_00000012_00002.bin", "main.log"] {
        let [whole, again] = ["whole", "killed"].map(|out| fs::read(world.path(out).join(name)).unwrap());
        assert!(whole == again, "{name} differs");
    }
    // A part of another rank that is damaged makes a checkpoint one that is not whole.
    let part = world.path("killed/state_00000012_00002.bin");
    let mut bytes = fs::read(&part).unwrap();
    bytes[2000] ^= 1;
    fs::write(&part, bytes).unwrap();
    let printed = succeed(&world.ranks(3, "damaged", "killed", &[&more[..], &["--resume"]].concat()), "damaged");
    assert!(printed.contains("state_00000012_00002.bin is damaged") && printed.contains("after 11 of 12"), "{printed}");
}

#[test]
fn a_rank_that_cannot_write_its_part_is_named_and_the_run_goes_on() {
    let world = World::new();
    let elsewhere = tempfile::tempdir().unwrap();
    for name in ["train_0.bin", "train_1.bin", "val_0.bin", "tiny.bin"] {
        fs::copy(world.path(name), elsewhere.path().join(name)).unwrap();
    }
    let place = free_place();
    let start = |rank: &str| {
        let more = ["--rank", rank, "--world-size", "2", "--rendezvous", &place, "--zero-stage", "1"];
        let mut command = world.command(program(), "out", &more);
        if rank == "1" {
            command.current_dir(elsewhere.path());
        }
        command.spawn().unwrap()
    };
    let outputs = ["0", "1"].map(start).map(|child| child.wait_with_output().unwrap());
    let (printed, message) = said(&outputs[0]);
    let why = "rank 1: cannot write out/.unfinished-checkpoint/state_0000000";
    assert!(printed.contains(&format!("warning: no checkpoint of step 4, there is none yet: {why}")), "{printed}");
    assert!(
        printed.contains("step    8/8 | loss") && message.contains("the last checkpoint, of step 8, is not"),
        "{message}"
    );
}

#[test]
fn texts_and_scores_take_all_ranks_where_they_divide_the_parameters() {
    let world = World::new();
    let set = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/hellaswag.bin");
    let small = ["train", "--device", "cpu", "--layers", "3", "--heads", "1", "--channels", "32", "--batch", "1"];
    // Bytes are tokens in the text that comes with the program, so that texts can be written.
    let texts = ["--seq", "32", "--steps", "2", "--sample-every", "1", "--sample-length", "12", "--val-batches", "2"];
    // Ranks have 3, 2 and 2 of the examples.
    let scores = ["--seq", "64", "--steps", "2", "--train", "train_*.bin", "--val", "val_*.bin", "--val-every", "1"];
    let scores = [&scores[..], &["--hellaswag", set.to_str().unwrap(), "--hellaswag-examples", "7"]].concat();
    let run = |ranks: usize, stage: &str, more: &[&str]| {
        let place = free_place();
        let start = |rank: usize| {
            let mut command = Command::new(program());
            command.current_dir(world.dir.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
            command.args(small).args(more).args(["--zero-stage", stage, "--rendezvous", &place]);
            command.args(["--rank", &rank.to_string(), "--world-size", &ranks.to_string()]).spawn().unwrap()
        };
        let children: Vec<_> = (0..ranks).map(start).collect();
        let outputs: Vec<_> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
        succeed(&outputs, stage)
    };
    let [undivided, divided] = ["0", "3"].map(|stage| {
        let printed = run(2, stage, &texts);
        let texts =
            printed.split("generating:\n---\n").skip(1).map(|text| text.split("\n---").next().unwrap().to_owned());
        let texts: Vec<_> = texts.collect();
        assert_eq!(texts.len(), 2, "{printed}");
        let printed = run(3, stage, &scores);
        let scores: Vec<_> =
            printed.lines().filter(|line| line.starts_with("HellaSwag: ")).map(str::to_owned).collect();
        assert_eq!(scores.len(), 2, "{printed}");
        (texts, scores)
    });
    assert_eq!(undivided, divided);
}

#[test]
fn other_flags_are_named_by_rank_0() {
    let world = World::new();
    let place = free_place();
    let with = ["--rendezvous", &place];
    let children = vec![
        world.rank(0, 2, "flags", "out", &with),
        world.rank(1, 2, "flags", "out", &[&with[..], &["--lr", "0.1"]].concat()),
    ];
    let outputs: Vec<_> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    let message = one_message(&outputs, UNFIT);
    assert!(
        message.contains("rank 1 (") && message.contains("has --lr 0.1, rank 0 has 0.003: start all ranks"),
        "{message}"
    );
}

#[test]
fn another_build_is_named_by_rank_0() {
    let world = World::new();
    let other = world.path("other");
    let mut bytes = fs::read(program()).unwrap();
    bytes.extend(b"another build");
    fs::write(&other, bytes).unwrap();
    Command::new("chmod").arg("+x").arg(&other).status().unwrap();
    let place = free_place();
    let start = |program: &Path, rank: &str| {
        world.command(program, "out", &["--rank", rank, "--world-size", "2", "--rendezvous", &place]).spawn().unwrap()
    };
    let children = [start(program(), "0"), start(&other, "1")];
    let message = one_message(&children.map(|child| child.wait_with_output().unwrap()), UNFIT);
    assert!(message.contains("rank 1 (") && message.contains("runs another build of the program"), "{message}");
}

fn free_place() -> String {
    format!("tcp://{}", TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap())
}

#[test]
fn what_a_rank_cannot_do_rank_0_tells() {
    let world = World::new();
    // Rank 1 works elsewhere, where there is no model.
    let elsewhere = tempfile::tempdir().unwrap();
    let place = free_place();
    let start = |rank: &str| {
        let more = ["--rank", rank, "--world-size", "3", "--rendezvous", &place, "--total-batch", "96"];
        let mut command = world.command(program(), "out", &more);
        if rank == "1" {
            command.current_dir(elsewhere.path());
        }
        command.spawn().unwrap()
    };
    let children = ["0", "1", "2"].map(start);
    let message = one_message(&children.map(|child| child.wait_with_output().unwrap()), UNFIT);
    assert!(message.contains("rank 1 (") && message.contains("failed: cannot open model file tiny.bin"), "{message}");
}

#[test]
fn a_rank_that_never_comes_is_named_in_time() {
    let world = World::new();
    let begun = Instant::now();
    let more = ["--rendezvous-timeout", "1"];
    let children: Vec<_> = [0, 2].map(|rank| world.rank(rank, 3, "never", "out", &more)).into_iter().collect();
    let outputs: Vec<_> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    let message = one_message(&outputs, UNFIT);
    assert!(message.contains("rank 1 of 3 never came: after 1 s only 2 are here (ranks 0, 2)"), "{message}");
    assert!(begun.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_rank_that_is_killed_ends_the_run_on_all() {
    let world = World::new();
    let more = ["--steps", "100000", "--checkpoint-every", "0", "--total-batch", "96"];
    let mut children: Vec<_> = (0..3).map(|rank| world.rank(rank, 3, "killed", "out", &more)).collect();
    let log = world.path("out/main.log");
    let deadline = Instant::now() + PATIENCE;
    while fs::read_to_string(&log).map_or(0, |text| text.lines().count()) < 5 {
        assert!(Instant::now() < deadline, "the run does not begin");
        thread::sleep(Duration::from_millis(20));
    }
    children[2].kill().unwrap();
    let killed = Instant::now();
    let mut outputs: Vec<_> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    assert!(killed.elapsed() < Duration::from_secs(30));
    outputs.pop();
    let message = one_message(&outputs, LOST);
    assert!(message.contains("rank 2 (") && message.contains("has ended, or the connection to it; step "), "{message}");
    // The step, how many there are, and the operation.
    assert!(message.contains(" of 100000, "), "{message}");
}

/// A rank that is stopped says nothing and closes nothing.
#[test]
fn a_rank_that_stands_still_ends_the_run_on_all() {
    let worlds = [0, 2].map(|stopped| (stopped, World::new()));
    thread::scope(|scope| {
        for (stopped, world) in &worlds {
            scope.spawn(move || stands_still(world, *stopped));
        }
    });
}

fn stands_still(world: &World, stopped: usize) {
    let more = ["--steps", "100000", "--checkpoint-every", "0", "--total-batch", "96"];
    let job = format!("stopped {stopped}");
    let mut children: Vec<_> = (0..3).map(|rank| world.rank(rank, 3, &job, "out", &more)).collect();
    let log = world.path("out/main.log");
    let deadline = Instant::now() + PATIENCE;
    while fs::read_to_string(&log).map_or(0, |text| text.lines().count()) < 5 {
        assert!(Instant::now() < deadline, "the run does not begin");
        thread::sleep(Duration::from_millis(20));
    }
    let pid = children[stopped].id().to_string();
    Command::new("kill").args(["-STOP", &pid]).status().unwrap();
    let begun = Instant::now();
    let mut still = children.remove(stopped);
    let outputs: Vec<_> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    still.kill().unwrap();
    still.wait().unwrap();
    if stopped > 0 {
        let message = one_message(&outputs, LOST);
        assert!(message.contains("nothing came from rank 2 (") && message.contains(" s; step "), "{message}");
        return;
    }
    // Nobody is left who could tell the others.
    for output in outputs {
        let message = said(&output).1;
        assert!(output.status.code() == Some(LOST) && message.contains("nothing came from rank 0 in 2"), "{message}");
    }
}

#[test]
fn one_rank_asked_to_stop_stops_all_at_one_step() {
    let world = World::new();
    let more = ["--steps", "100000", "--checkpoint-every", "0"];
    let children: Vec<_> = (0..2).map(|rank| world.rank(rank, 2, "stop", "out", &more)).collect();
    let log = world.path("out/main.log");
    let deadline = Instant::now() + PATIENCE;
    while fs::read_to_string(&log).map_or(0, |text| text.lines().count()) < 5 {
        assert!(Instant::now() < deadline, "the run does not begin");
        thread::sleep(Duration::from_millis(20));
    }
    Command::new("kill").args(["-TERM", &children[1].id().to_string()]).status().unwrap();
    let outputs: Vec<_> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    assert!(outputs.iter().all(|output| output.status.success()), "{outputs:?}");
    assert!(said(&outputs[0]).0.contains("stopped after "), "{outputs:?}");
    let names: Vec<_> = fs::read_dir(world.path("out")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.iter().any(|name| name.to_string_lossy().starts_with("DONE_")), "{names:?}");
}

/// Where Open MPI is installed, as scripts/setup does it: the launcher itself.
#[test]
fn mpirun_starts_ranks() {
    let version = Command::new("mpirun").arg("--version").output();
    let Ok(version) = version else {
        println!("no mpirun: run scripts/setup");
        return;
    };
    assert!(String::from_utf8_lossy(&version.stdout).contains("Open MPI"), "{version:?}");
    let world = World::new();
    let mut command = Command::new("mpirun");
    command.args(["-np", "2", "--oversubscribe"]).arg(program()).args(World::arguments("out", &[]));
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    let output = command.current_dir(world.dir.path()).output().unwrap();
    let (printed, errors) = said(&output);
    assert!(output.status.success(), "{printed}{errors}");
    assert!(printed.contains("2 ranks, connected by TCP") && printed.contains("step    8/8 | loss"), "{printed}");
    assert!(world.path("out/rank-1.log").exists() && world.path("out/DONE_00000008").exists());
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts").join(name)
}

#[test]
fn the_script_starts_ranks_and_hands_on_their_exit_code() {
    let world = World::new();
    let place = free_place();
    let run = |out: &str, more: &[&str]| {
        let more = [&["--rendezvous", &place][..], more].concat();
        let mut command = Command::new(script("several_gpus"));
        command.current_dir(world.dir.path()).arg("2").arg(program()).args(World::arguments(out, &more));
        command.output().unwrap()
    };
    let output = run("out", &[]);
    assert!(output.status.success(), "{:?}", said(&output));
    assert!(said(&output).0.contains("2 ranks, connected by TCP") && world.path("out/DONE_00000008").exists());
    let output = run("none", &["--lr", "-1"]);
    assert_eq!(output.status.code(), Some(2), "{:?}", said(&output));
    assert!(said(&output).1.contains("rank 1 (process "), "{:?}", said(&output));
}

/// A run long enough to be disturbed.
const LONG: [&str; 8] = ["--steps", "400", "--checkpoint-every", "50", "--val-every", "200", "--check-ranks", "50"];

impl World {
    /// A launcher's script with arguments of its own, then the program with its.
    fn script(&self, name: &str, first: &[&str], out: &str, more: &[&str]) -> Command {
        let mut command = self.bare(&script(name));
        command.args(first).arg(program()).args(Self::arguments(out, more));
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        command
    }

    /// Waits for a checkpoint.
    fn wait_for(&self, out: &str, step: usize) {
        let (done, deadline) = (self.path(&format!("{out}/DONE_{step:08}")), Instant::now() + PATIENCE);
        while !done.exists() {
            assert!(Instant::now() < deadline, "there is no checkpoint of step {step} in {out}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The process that is rank `rank` of the run in `out`.
    fn process(&self, out: &str, rank: usize) -> String {
        let read = |path: PathBuf| fs::read(path).unwrap_or_default();
        let has = |bytes: &[u8], what: &str| bytes.windows(what.len()).any(|window| window == what.as_bytes());
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let process = entry.path();
            let (exe, here) = (fs::read_link(process.join("exe")), fs::read_link(process.join("cwd")));
            if exe.ok().as_deref() != Some(program()) || here.ok().as_deref() != Some(self.dir.path()) {
                continue;
            }
            let (line, variables) = (read(process.join("cmdline")), read(process.join("environ")));
            let by_flag = has(&line, &format!("--rank\0{rank}\0"));
            let by_variable = has(&variables, &format!("\0OMPI_COMM_WORLD_RANK={rank}\0"))
                || has(&variables, &format!("\0SLURM_PROCID={rank}\0"));
            if has(&line, &format!("--out\0{out}\0")) && (by_flag || by_variable) {
                return entry.file_name().into_string().unwrap();
            }
        }
        panic!("no process is rank {rank} of {out}");
    }

    fn signal(&self, out: &str, rank: usize, signal: &str) {
        Command::new("kill").args(["-s", signal, &self.process(out, rank)]).status().unwrap();
    }

    fn assert_same_end(&self, one: &str, other: &str) {
        for name in ["model_00000400.bin", "state_00000400_00000.bin", "main.log"] {
            let read = |out: &str| fs::read(self.path(out).join(name)).unwrap();
            assert!(read(one) == read(other), "{name} of {one} and {other} differ");
        }
    }
}

/// A rank is killed, and one is stopped; the end is that of a run that was left alone.
#[test]
fn a_run_goes_on_after_it_has_lost_ranks() {
    let world = World::new();
    let run = |first: &[&str], out| world.script("several_gpus", first, out, &LONG).env("GRACE", "2").spawn().unwrap();
    let whole = run(&["2"], "whole").wait_with_output().unwrap();
    assert!(whole.status.success(), "{:?}", said(&whole));
    let hurt = run(&["--restarts", "2", "2"], "hurt");
    world.wait_for("hurt", 50);
    world.signal("hurt", 1, "KILL");
    world.wait_for("hurt", 200);
    world.signal("hurt", 1, "STOP");
    let output = hurt.wait_with_output().unwrap();
    let (printed, errors) = said(&output);
    assert!(output.status.success(), "{printed}{errors}");
    world.assert_same_end("whole", "hurt");
    for expected in [
        "has ended, or the connection to it; step ",
        ") was ended by SIGKILL\n",
        ": restart 1 of 2, from the checkpoint of step ",
        "nothing came from rank 1 (",
        ") does not end: killed\n",
        "exit code 4: restart 2 of 2, from the checkpoint of step ",
    ] {
        assert!(errors.contains(expected), "{expected:?} is not in {errors}");
    }
}

#[test]
fn a_run_of_mpirun_goes_on_after_it_has_lost_a_rank() {
    if Command::new("mpirun").arg("--version").output().is_err() {
        println!("no mpirun: run scripts/setup");
        return;
    }
    let world = World::new();
    let mpirun = ["mpirun", "-np", "2", "--oversubscribe"];
    let run =
        |restarts, out| world.script("restarts", &[&[restarts], &mpirun[..]].concat(), out, &LONG).spawn().unwrap();
    let whole = run("0", "whole").wait_with_output().unwrap();
    assert!(whole.status.success(), "{:?}", said(&whole));
    let hurt = run("1", "hurt");
    world.wait_for("hurt", 50);
    world.signal("hurt", 0, "KILL");
    let output = hurt.wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}", said(&output));
    world.assert_same_end("whole", "hurt");
    assert!(said(&output).1.contains(": restart 1 of 1, from the checkpoint of step "), "{:?}", said(&output));
}

/// Two hosts of two ranks, which meet by a file, and by a host's name and a port.
#[test]
fn a_slurm_job_on_two_hosts_goes_on_after_it_has_lost_a_rank() {
    let world = World::new();
    let here = world.dir.path();
    std::os::unix::fs::symlink(script(""), here.join("scripts")).unwrap();
    let stand_in = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/stand_in");
    let path = format!("{}:{}", stand_in.display(), std::env::var("PATH").unwrap());
    let job = |mut command: Command, id: &str| {
        command.env("PATH", &path).env("TMPDIR", here).env("SLURM_JOB_ID", id).env("SLURM_SUBMIT_DIR", here);
        command.spawn().unwrap()
    };
    let quick = [&LONG[..], &["--total-batch", "128"]].concat();
    let by_file = |out, id| job(world.script("slurm.sbatch", &[], out, &quick), id);
    let whole = by_file("whole", "7").wait_with_output().unwrap();
    assert!(whole.status.success() && said(&whole).0.contains("4 ranks, connected by TCP"), "{:?}", said(&whole));
    let hurt = by_file("hurt", "8");
    world.wait_for("hurt", 50);
    world.signal("hurt", 3, "KILL");
    let output = hurt.wait_with_output().unwrap();
    let (printed, errors) = said(&output);
    assert!(output.status.success(), "{printed}{errors}");
    world.assert_same_end("whole", "hurt");
    assert!(errors.contains("restarts: exit code 137: restart 1 of 3, from the checkpoint of step "), "{errors}");
    let apart = Command::new("unshare").args("--user --map-root-user --net --uts --mount true".split(' ')).status();
    let apart = apart.is_ok_and(|status| status.success());
    if apart {
        assert!(errors.contains("rank 3 (node1, process "), "{errors}");
    } else {
        println!("no namespaces: all ranks were on one host");
    }
    assert!(!fs::read_dir(here).unwrap().any(|e| e.unwrap().file_name().to_string_lossy().starts_with("rendezvous-")));
    let mut by_name = world.bare(&stand_in.join("srun"));
    by_name.arg("--wait=60").arg(program());
    let place = if apart { "tcp://node0:29417" } else { "tcp://127.0.0.1:29417" };
    by_name.args(World::arguments("name", &["--rendezvous", place]));
    let output = job(by_name, "9").wait_with_output().unwrap();
    assert!(output.status.success() && said(&output).0.contains("step    8/8 | loss"), "{:?}", said(&output));
}

#[test]
fn what_would_fail_again_and_what_was_asked_to_stop_is_not_started_again() {
    let world = World::new();
    let run = |out, more: &[&str]| {
        world.script("several_gpus", &["--restarts", "3", "2"], out, more).process_group(0).spawn().unwrap()
    };
    let wrong: [(&[&str], i32, &str); 3] = [
        (&["--lr=-1"], 2, "--lr"),
        (&["--train", "nothing_*.bin"], UNFIT, "nothing_*.bin"),
        (&["--total-batch", "100"], UNFIT, "--total-batch"),
    ];
    for (more, code, cause) in wrong {
        let output = run("none", more).wait_with_output().unwrap();
        let errors = said(&output).1;
        // Whichever rank ends first: the one that failed, or one that was told.
        assert!([1, code].contains(&output.status.code().unwrap()), "{errors}");
        assert!(errors.contains("the run would fail again") && !errors.contains(": restart "), "{errors}");
        assert!(errors.contains(cause), "{errors}");
    }
    let asked = run("asked", &["--steps", "100000", "--checkpoint-every", "0"]);
    let (log, deadline) = (world.path("asked/main.log"), Instant::now() + PATIENCE);
    while fs::read_to_string(&log).map_or(0, |text| text.lines().count()) < 5 {
        assert!(Instant::now() < deadline, "the run does not begin");
        thread::sleep(Duration::from_millis(20));
    }
    // As a terminal does it: to all that have not left the group.
    Command::new("kill").args(["-INT", "--", &format!("-{}", asked.id())]).status().unwrap();
    let output = asked.wait_with_output().unwrap();
    let (printed, errors) = said(&output);
    assert!(output.status.success() && printed.contains("stopped after "), "{printed}{errors}");
    assert!(!errors.contains(": restart "), "{errors}");
    // Each rank has heard it once: the second time ends it.
    assert_eq!(errors.matches("SIGINT: stopping after this step").count(), 2, "{errors}");
}

#[test]
fn restarts_end_where_a_run_gets_no_further() {
    let world = World::new();
    let out = world.path("out");
    fs::create_dir(&out).unwrap();
    let run = |restarts: &str, command: &str| {
        let mut run = Command::new(script("restarts"));
        run.current_dir(world.dir.path()).args([restarts, "bash", "-c", command, "run", "--out", "out"]);
        run.output().unwrap()
    };
    let begun = |name: &str| fs::read_to_string(world.path(name)).unwrap().lines().count();
    let output = run("9", "echo >>stands; kill -KILL $$");
    let text =
        "restarts: exit code 137: 3 times the run has not got further than the beginning: there is no checkpoint\n";
    assert!(said(&output).1.ends_with(text), "{:?}", said(&output));
    assert_eq!((output.status.code(), begun("stands")), (Some(137), 3));
    // Each time it gets further, and each time it is lost; from the second start on, it is asked to resume.
    let further = "n=$(cat DONE 2>/dev/null || echo 0); echo \"$@\" >>goes; echo $((n + 9)) >DONE; \
                   touch out/DONE_0000$(printf %04d $n); exit 4";
    let output = run("4", further);
    let text = "exit code 4 after 4 restarts; the same command with --resume goes on from the checkpoint of step 36\n";
    assert!(said(&output).1.ends_with(text), "{:?}", said(&output));
    let arguments = fs::read_to_string(world.path("goes")).unwrap();
    assert_eq!(arguments, format!("--out out\n{}", "--out out --resume\n".repeat(4)));
    assert_eq!(output.status.code(), Some(LOST));
    // Without a place for checkpoints there is nothing to go on from.
    let output = Command::new(script("restarts")).args(["1", "true"]).output().unwrap();
    assert!(output.status.code() == Some(2) && said(&output).1.contains("no --out DIR"), "{:?}", said(&output));
}

#[test]
fn what_ranks_cost_each_other_is_measured() {
    let world = World::new();
    let json = world.path("step.json");
    let steps = |ranks: &str| {
        let mut bench = world.bare(&script("several_gpus"));
        bench.arg(ranks).arg(program()).args("bench step --device cpu -e d6 -b 1 -t 16 -a 2 -x 3 --json".split(' '));
        let output = bench.arg(&json).output().unwrap();
        let (printed, errors) = said(&output);
        assert!(output.status.success(), "{printed}{errors}");
        let json: serde_json::Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
        (printed, json)
    };
    let (printed, alone) = steps("1");
    assert!(printed.starts_with("a step: ") && printed.lines().count() == 1, "{printed}");
    assert!(alone["waiting_ms"].is_null());
    let (printed, two) = steps("2");
    // Six layers, the embeddings and the loss, each of which the CPU waits for at once; and twice for all so far.
    assert_eq!((&two["ranks"], &two["waits"]), (&2.into(), &10.into()));
    let step = two["step_ms"][0].as_f64().unwrap();
    let waiting = two["waiting_ms"].as_array().unwrap();
    assert_eq!(waiting.len(), 2);
    assert!(waiting.iter().all(|ms| ms.as_f64().unwrap() > 0.05 * step), "{two}");
    assert!(printed.contains("2 ranks, connected by TCP") && printed.contains("in 10 places"), "{printed}");
    let tokens = two["tokens_per_second"].as_f64().unwrap() * step / 1e3;
    assert!((tokens - 64.0).abs() < 1e-6, "{tokens}");
    assert!(two["alone_step_ms"].as_f64().unwrap() > 0.0);
    // What is measured is compared.
    let place = free_place();
    let rank = |rank: &str, t: &str| {
        let mut bench = world.bare(program());
        bench.args("bench step --device cpu -e d6 -b 1 --world-size 2".split(' '));
        bench.args(["-t", t, "--rank", rank, "--rendezvous", &place]).spawn().unwrap()
    };
    let outputs = [rank("0", "16"), rank("1", "32")].map(|child| child.wait_with_output().unwrap());
    let errors = said(&outputs[0]).1;
    assert!(errors.contains("has --seq 32, rank 0 has 16") && outputs[1].status.code() == Some(UNFIT), "{errors}");
}

/// `scripts/scaling`, on the CPU.
#[test]
fn scaling_is_told_in_one_table_within_its_time() {
    if Command::new("python3").arg("--version").output().is_err() {
        println!("no python3");
        return;
    }
    let world = World::new();
    let words = |i: usize| ["the quick brown fox ", "jumps over ", "a lazy dog.\n"][i * i % 7 % 3];
    fs::write(world.path("text.txt"), (0..2000).map(words).collect::<String>()).unwrap();
    let scaling = |more: &str| {
        let mut scaling = world.bare(&script("scaling"));
        scaling.arg(program()).args("--text text.txt --device cpu --gpus 2 --model d6 --batch 2 --seq 8".split(' '));
        scaling.args("--tokens 32 --agree-steps 3 --copies 2 --json scaling.json".split(' ')).args(more.split(' '));
        let output = scaling.env("TMPDIR", world.dir.path()).output().unwrap();
        let json = fs::read(world.path("scaling.json")).unwrap();
        (output.status.code(), said(&output).0, serde_json::from_slice::<serde_json::Value>(&json).unwrap())
    };
    let (code, printed, json) = scaling("--steps 2 weak agree");
    assert_eq!(code, Some(0), "{printed}");
    let [one, two] = [&json["runs"][0], &json["runs"][1]];
    let number = |run: &serde_json::Value, key: &str| run[key].as_f64().unwrap();
    assert_eq!(
        (&one["gpus"], &one["tokens"], &two["gpus"], &two["tokens"]),
        (&1.into(), &32.into(), &2.into(), &64.into())
    );
    let share = number(two, "tokens_per_second") / number(one, "tokens_per_second") / 2.0 * 100.0;
    assert!((number(two, "percent") - share).abs() < 1e-6 && number(two, "start_seconds") > 0.0, "{json}");
    assert!(printed.contains("\n| weak | d6 | 2 | 2 | 64 | "), "{printed}");
    let agree = &json["agree"];
    assert!(
        agree["losses"]["2"].as_array().unwrap().len() == 3 && number(agree, "largest_difference") < 1e-4,
        "{json}"
    );
    // What may not differ at all does.
    let (code, printed, _) = scaling("--agree-within -1 agree");
    assert!(code == Some(1) && printed.contains("WRONG: losses of different world sizes differ by 0.0"), "{printed}");
    let begun = Instant::now();
    let (code, printed, _) = scaling("--steps 100000 --limit 8 strong");
    assert!(code == Some(1) && printed.contains("WRONG: strong did not fit into 8 s"), "{printed}");
    assert!(begun.elapsed() < Duration::from_secs(20));
    // Nobody is left.
    let here =
        |process: fs::DirEntry| fs::read_link(process.path().join("cwd")).is_ok_and(|cwd| cwd == world.dir.path());
    assert!(!fs::read_dir("/proc").unwrap().flatten().any(here));
}
