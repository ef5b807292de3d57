//! Resumed runs on the emulated CUDA engine are bitwise identical, also in bf16 with stochastic rounding.

use checkpoint::directory::{DirectoryLock, Retention, done_name, model_name, sidecar_name, state_name};
use checkpoint::resume::find_newest;
use checkpoint::sidecar::Identity;
use checkpoint::writer::CheckpointWriter;
use checkpoint::{RunState, fingerprint};
use data::{Batches, Geometry, Loader, Prefetch, Tokens};
use distributed::Ranks;
use engine::cuda::{EmulatedGpu, Precision, emulated};
use host::console::Console;
use host::log::Log;
use host::signals::Stop;
use host::train::{HardwareChecks, MuonSettings, OptimizerSettings, Run, Settings, Validation};
use model::guards::Limits;
use model::schedule::{Schedule, ScheduleKind};
use model::{Decoder, Descriptor, MasterWeights, Moments, Optimizer, PlanOptions, Recompute};
use rng::Mt19937;
use std::fs;
use std::path::Path;

const STEPS: usize = 6;
const EVERY: usize = 3;
const GRAD_ACCUM: usize = 2;
const VOCAB: usize = 60;

/// The optimizer, and the storage of parameters and optimizer state.
#[derive(Clone, Copy, Debug)]
struct Storage {
    optimizer: Optimizer,
    precision: Precision,
    master_weights: MasterWeights,
    moments: Moments,
}

const BF16: Storage = Storage {
    optimizer: Optimizer::AdamW,
    precision: Precision::Bf16,
    master_weights: MasterWeights::F32,
    moments: Moments::F32,
};
const FP32: Storage = Storage { precision: Precision::Fp32, ..BF16 };
const COMPACT: Storage = Storage { master_weights: MasterWeights::Remainder, moments: Moments::Bf16, ..BF16 };

/// Trains to the end in `out`, resuming from the newest checkpoint there.
fn train(out: &Path, storage: Storage, recompute: Recompute) {
    let Storage { optimizer, precision, master_weights, moments } = storage;
    let mut engine = emulated(EmulatedGpu::new(false), precision, None, false);
    let descriptor = Descriptor::gpt2(1, 1, 64, 16, VOCAB).unwrap();
    let options = PlanOptions { optimizer, master_weights, moments, recompute, ..PlanOptions::training(1, 16) };
    let (model, plan) = Decoder::plan(descriptor, options, &mut *engine);
    engine.allocate(&plan).unwrap();
    let mut rng = Mt19937::new(3);
    let mut shard = |i| Tokens::in_memory(format!("shard {i}"), (0..85).map(|_| rng.below(60)).collect());
    let shards = (0..3).map(&mut shard).collect();
    let mut loader = Batches::from(Loader::new(shards, Geometry::single(1, 16), VOCAB, Some(42)).unwrap());
    let identity = Identity {
        program: "test".to_owned(),
        engine: engine.describe(),
        config: serde_json::Map::new(),
        train: fingerprint::of_shards(loader.shards()).unwrap(),
        val: None,
        ranks: 1,
    };
    let checkpoint = find_newest(out).unwrap().checkpoint;
    let resumed = checkpoint.as_ref().map(|checkpoint| checkpoint.step);
    let state = if let Some(checkpoint) = checkpoint {
        let mut notes = Vec::new();
        let state = checkpoint.load(&model, &mut *engine, &mut loader, 32, false, &mut notes).unwrap();
        assert!(notes.is_empty(), "{notes:?}");
        state
    } else {
        model.initialize(&mut *engine, 42).unwrap();
        RunState::fresh(loader.position())
    };
    let log = match resumed {
        Some(step) => Log::resume(out, step, true).unwrap(),
        None => Log::create(Some(out)).unwrap(),
    };
    let settings = Settings {
        steps: STEPS,
        grad_accum: GRAD_ACCUM,
        schedule: Schedule {
            kind: ScheduleKind::Constant,
            peak: 1e-2,
            warmup: 0,
            steps: STEPS,
            final_fraction: 1.0,
            warmdown: 0.0,
        },
        optimizer: OptimizerSettings {
            // The momentum changes in each step.
            muon: (optimizer == Optimizer::Muon).then_some(MuonSettings { warmup: STEPS, ..MuonSettings::DEFAULT }),
            ..OptimizerSettings::default()
        },
        weight_decay: 0.1,
        clip: 1.0,
        limits: Limits { loss_z: None, norm_z: None, bad_steps: 10 },
        val_every: None,
        core_every: None,
        sample_every: None,
        sample_tokens: 0,
        checkpoint_every: Some(EVERY),
        fp8_stats_every: None,
        checkpoint_after: None,
        check_ranks_every: None,
        hardware: HardwareChecks::default(),
    };
    let mut run = Run {
        settings: &settings,
        model: &model,
        tokenizer: None,
        train: Prefetch::start(loader, &*engine).unwrap(),
        val: Validation::default(),
        hellaswag: None,
        core: None,
        engine: &mut *engine,
        console: Console::new(STEPS, None),
        log,
        state,
        checkpoints: Some(CheckpointWriter::new(
            DirectoryLock::acquire(out).unwrap(),
            Retention::default(),
            identity,
            resumed,
        )),
        stop: Stop::default(),
        ranks: &mut Ranks::default(),
    };
    let batch = run.train.layout();
    run.train().unwrap();

    // Each micro-batch draws a seed, then the update draws one. The last batch is still in memory.
    let mut rounding = RunState::fresh(run.state.data).rounding;
    let draws = (0..STEPS * (GRAD_ACCUM + 1) - 1).map(|_| rounding.next_u32());
    let mut bytes = [0; 4];
    run.engine.read_bytes(batch.tensor(run.model.batch, batch.seed()), &mut bytes).unwrap();
    assert_eq!(Some(u32::from_le_bytes(bytes)), draws.last());
}

/// Returns the file names of a checkpoint.
fn names(step: usize) -> [String; 4] {
    [model_name(step), state_name(step, 0), sidecar_name(step), done_name(step)]
}

/// Copies the first checkpoint and the complete logs of a run, as a killed process leaves them.
fn killed_after_first_checkpoint(from: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in names(EVERY).iter().map(String::as_str).chain(["main.log", "main.jsonl"]) {
        fs::copy(from.join(name), dir.path().join(name)).unwrap();
    }
    dir
}

fn assert_resumed_run_matches(storage: Storage) {
    let whole = tempfile::tempdir().unwrap();
    train(whole.path(), storage, Recompute::Nothing);
    let killed = killed_after_first_checkpoint(whole.path());
    train(killed.path(), storage, Recompute::Nothing);
    for name in [model_name(STEPS), state_name(STEPS, 0), "main.log".to_owned()] {
        let read = |dir: &Path| fs::read(dir.join(&name)).unwrap();
        assert!(read(whole.path()) == read(killed.path()), "{name} differs");
    }
}

#[test]
fn resumed_bf16_run_with_master_weights_is_identical() {
    assert_resumed_run_matches(BF16);
}

#[test]
fn resumed_bf16_run_without_master_weights_is_identical() {
    assert_resumed_run_matches(Storage { master_weights: MasterWeights::None, ..BF16 });
}

#[test]
fn resumed_run_with_remainders_and_bf16_moments_is_identical() {
    assert_resumed_run_matches(COMPACT);
}

#[test]
fn resumed_run_with_bf16_moments_and_no_master_weights_is_identical() {
    assert_resumed_run_matches(Storage { master_weights: MasterWeights::None, ..COMPACT });
}

#[test]
fn resumed_run_with_8_bit_moments_is_identical() {
    assert_resumed_run_matches(Storage { moments: Moments::EightBit, ..COMPACT });
}

#[test]
fn resumed_muon_run_with_master_weights_is_identical() {
    assert_resumed_run_matches(Storage { optimizer: Optimizer::Muon, ..BF16 });
}

#[test]
fn resumed_muon_run_with_remainders_and_bf16_momentum_is_identical() {
    assert_resumed_run_matches(Storage { optimizer: Optimizer::Muon, ..COMPACT });
}

#[test]
fn resumed_fp32_run_is_identical() {
    assert_resumed_run_matches(FP32);
}

/// The storage does not change the format of the files. Remainders and f32 master weights are the same numbers, which a run
/// continues from with the other storage; only the rounding of bf16 parameters differs.
#[test]
fn storage_may_change_when_resuming() {
    for (was, is) in [(BF16, COMPACT), (COMPACT, BF16)] {
        let whole = tempfile::tempdir().unwrap();
        train(whole.path(), was, Recompute::Nothing);
        let changed = killed_after_first_checkpoint(whole.path());
        train(changed.path(), is, Recompute::Nothing);
        let size = |dir: &Path| fs::metadata(dir.join(state_name(STEPS, 0))).unwrap().len();
        assert_eq!(size(whole.path()), size(changed.path()));
        assert_close_losses(whole.path(), changed.path(), &format!("{was:?} to {is:?}"));
    }
}

/// Returns the losses after the first checkpoint.
fn losses(dir: &Path) -> Vec<f64> {
    let records = fs::read_to_string(dir.join("main.jsonl")).unwrap();
    let records = records.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    records.skip(EVERY).map(|record| record["loss"].as_f64().unwrap()).collect()
}

#[test]
fn precision_and_recompute_may_change_when_resuming() {
    for (was, is) in [(BF16, FP32), (FP32, BF16)] {
        let whole = tempfile::tempdir().unwrap();
        train(whole.path(), was, Recompute::Nothing);
        let changed = killed_after_first_checkpoint(whole.path());
        train(changed.path(), is, Recompute::ActivationAndNorms);
        assert_close_losses(whole.path(), changed.path(), &format!("{was:?} to {is:?}"));
    }
}

/// Asserts that the losses after the first checkpoint differ, but by less than 0.02.
fn assert_close_losses(whole: &Path, changed: &Path, what: &str) {
    let (expected, got) = (losses(whole), losses(changed));
    assert_eq!((got.len(), expected.len()), (STEPS - EVERY, STEPS - EVERY));
    assert!(got != expected, "the change has no effect");
    for (got, expected) in got.iter().zip(expected) {
        assert!((got - expected).abs() < 0.02, "{what}: {got}, {expected}");
    }
}
