//! Guards: a step with a skipped update must not change the model, on the CPU engine and on the emulated CUDA engine.
//! The CUDA kernels decide on the device whether to skip an update.

use checkpoint::directory::{DirectoryLock, Retention, done_name, done_steps, model_name, sidecar_name, state_name};
use checkpoint::resume::find_newest;
use checkpoint::sidecar::Identity;
use checkpoint::writer::CheckpointWriter;
use checkpoint::{RunState, fingerprint};
use data::{Batches, Geometry, Loader, Prefetch, Tokens, tokens};
use distributed::Ranks;
use engine::Engine;
use engine::cpu::Cpu;
use engine::cuda::{EmulatedGpu, Precision, emulated};
use host::console::Console;
use host::log::Log;
use host::signals::Stop;
use host::train::{HardwareChecks, OptimizerSettings, Outcome, Run, Settings, Validation};
use model::guards::Limits;
use model::schedule::{Schedule, ScheduleKind};
use model::{Decoder, Descriptor, Param, PlanOptions};
use rng::Mt19937;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

const VOCAB: usize = 60;
const CHANNELS: usize = 64;
const SEQ: usize = 16;
/// A token that makes the loss infinite where it is a target, and affects no other loss or gradient.
const FATAL: u32 = 59;

const OFF: Limits = Limits { loss_z: None, norm_z: None, bad_steps: 10 };

/// The engine, its precision, and whether the model has master weights.
#[derive(Clone, Copy, Debug)]
enum Target {
    Cpu,
    Bf16 { masters: bool },
    Fp32,
}

const TARGETS: [Target; 4] =
    [Target::Cpu, Target::Bf16 { masters: true }, Target::Bf16 { masters: false }, Target::Fp32];

#[derive(Clone)]
struct Trial {
    target: Target,
    data: Vec<u32>,
    steps: usize,
    grad_accum: usize,
    checkpoint_every: usize,
    learning_rate: f32,
    limits: Limits,
}

impl Trial {
    /// Creates a run on random tokens, with `FATAL` in the given steps of 2 sequences.
    fn with_fatal(target: Target, steps: usize, fatal: &[usize]) -> Self {
        let mut rng = Mt19937::new(3);
        let mut data: Vec<u32> = (0..=40 * 2 * SEQ).map(|_| rng.below(FATAL)).collect();
        for step in fatal {
            data[step * 2 * SEQ + SEQ + 5] = FATAL;
        }
        Self { target, data, steps, grad_accum: 2, checkpoint_every: 1, learning_rate: 1e-2, limits: OFF }
    }

    /// Trains to the end in `out`, resuming from the newest checkpoint there.
    fn train(&self, out: &Path) -> anyhow::Result<Outcome> {
        let mut engine: Box<dyn Engine> = match self.target {
            Target::Cpu => Box::new(Cpu::new()),
            Target::Bf16 { .. } => emulated(EmulatedGpu::new(false), Precision::Bf16, None, false),
            Target::Fp32 => emulated(EmulatedGpu::new(false), Precision::Fp32, None, false),
        };
        let engine = &mut *engine;
        let descriptor = Descriptor::gpt2(1, 1, CHANNELS, SEQ, VOCAB).unwrap();
        let master_weights = !matches!(self.target, Target::Bf16 { masters: false });
        let options = PlanOptions { master_weights: master_weights.into(), ..PlanOptions::training(1, SEQ) };
        let (model, plan) = Decoder::plan(descriptor, options, engine);
        engine.allocate(&plan).unwrap();
        let shards = vec![Tokens::in_memory("tokens", self.data.clone())];
        let mut loader = Batches::from(Loader::new(shards, Geometry::single(1, SEQ), VOCAB, None).unwrap());
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
            checkpoint.load(&model, engine, &mut loader, 32, false, &mut Vec::new()).unwrap()
        } else {
            model.initialize(engine, 42).unwrap();
            make_fatal(&model, engine);
            RunState::fresh(loader.position())
        };
        let log = match resumed {
            Some(step) => Log::resume(out, step, true).unwrap(),
            None => Log::create(Some(out)).unwrap(),
        };
        let (kind, peak) = (ScheduleKind::Constant, self.learning_rate);
        let settings = Settings {
            steps: self.steps,
            grad_accum: self.grad_accum,
            schedule: Schedule { kind, peak, warmup: 0, steps: self.steps, final_fraction: 1.0, warmdown: 0.0 },
            optimizer: OptimizerSettings::default(),
            weight_decay: 0.0,
            clip: 1.0,
            limits: self.limits,
            val_every: None,
            core_every: None,
            sample_every: None,
            sample_tokens: 0,
            checkpoint_every: Some(self.checkpoint_every),
            fp8_stats_every: None,
            checkpoint_after: None,
            check_ranks_every: None,
            hardware: HardwareChecks::default(),
        };
        let mut run = Run {
            settings: &settings,
            model: &model,
            tokenizer: None,
            train: Prefetch::start(loader, engine).unwrap(),
            val: Validation::default(),
            hellaswag: None,
            core: None,
            engine,
            console: Console::new(self.steps, None),
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
        run.train()
    }

    /// Trains to the end in a new directory.
    fn trained(&self) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        self.train(dir.path()).unwrap();
        dir
    }
}

/// Changes the parameters so that the logit of `FATAL` is always -inf.
///
/// The last LayerNorm outputs 10 in channel 1 for any input, and the embedding of `FATAL` is -3e38 there. Its softmax
/// probability is 0, so it has no gradient unless it is the target.
fn make_fatal(model: &Decoder, engine: &mut dyn Engine) {
    let mut write = |param, at: usize, value| {
        engine.write(model.layout.of(model.params, param, 0).slice(at, 1), &[value]).unwrap();
    };
    write(Param::Wte, FATAL as usize * CHANNELS + 1, -3e38);
    write(Param::Lnfw, 1, 0.0);
    write(Param::Lnfb, 1, 10.0);
    if let Some(master) = model.training.and_then(|training| training.master.tensor()) {
        engine.cast(master, model.params).unwrap();
    }
}

fn read(dir: &TempDir, name: &str) -> Vec<u8> {
    fs::read(dir.path().join(name)).unwrap()
}

fn records(dir: &TempDir) -> Vec<Value> {
    let text = String::from_utf8(read(dir, "main.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the model file of a checkpoint, and m, v and the master weights from its state file.
fn tensors(dir: &TempDir, target: Target, step: usize) -> (Vec<u8>, Vec<u8>) {
    let (model, mut state) = (read(dir, &model_name(step)), read(dir, &state_name(step, 0)));
    let (size, tensors) = match target {
        Target::Cpu | Target::Fp32 => (4, 3),
        Target::Bf16 { masters } => (2, if masters { 3 } else { 2 }),
    };
    let elements = (model.len() - 1024) / size;
    state.truncate(1024 + 4 * tensors * elements);
    assert_eq!(state.len(), 1024 + 4 * tensors * elements);
    (model, state.split_off(1024))
}

/// Returns everything that must not depend on interruptions: the last checkpoint and the logs, without times.
fn run_results(dir: &TempDir, step: usize) -> (Vec<u8>, Vec<u8>, Vec<u8>, Value, Vec<Value>) {
    let without_times = |mut value: Value| {
        for key in ["ms", "tokens_per_second", "time", "training_seconds", "pace"] {
            value.as_object_mut().unwrap().remove(key);
        }
        value
    };
    let sidecar: Value = serde_json::from_slice(&read(dir, &sidecar_name(step))).unwrap();
    let progress = without_times(sidecar["run"]["progress"].clone());
    assert!(progress["guards"]["loss"].as_array().unwrap().len() > 1, "{progress}");
    (
        read(dir, &model_name(step)),
        read(dir, &state_name(step, 0)),
        read(dir, "main.log"),
        progress,
        records(dir).into_iter().map(without_times).collect(),
    )
}

/// Returns a directory as left by a run that was killed after `step`: the checkpoint of that step and the complete
/// logs.
fn killed_after(from: &TempDir, step: usize) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let names = [model_name(step), state_name(step, 0), sidecar_name(step), done_name(step)];
    for name in names.iter().map(String::as_str).chain(["main.log", "main.jsonl"]) {
        fs::copy(from.path().join(name), dir.path().join(name)).unwrap();
    }
    dir
}

#[test]
fn non_finite_step_changes_no_bit() {
    for target in TARGETS {
        let dir = Trial::with_fatal(target, 4, &[3]).trained();
        // The checkpoint of step 3 precedes the fourth step, which is skipped.
        let [second, third, fourth] = [2, 3, 4].map(|step| tensors(&dir, target, step));
        assert!(second.0 != third.0 && second.1 != third.1, "{target:?}: finite steps must change the tensors");
        assert!(third.0 == fourth.0, "{target:?}: the weights have changed");
        assert!(third.1 == fourth.1, "{target:?}: m, v or master weights have changed");
        let records = records(&dir);
        assert!(records[..3].iter().all(|record| record["loss"].is_f64() && record.get("skipped").is_none()));
        assert_eq!((&records[3]["loss"], &records[3]["skipped"]), (&Value::Null, &"not-finite".into()), "{target:?}");
        let log = String::from_utf8(read(&dir, "main.log")).unwrap();
        assert!(log.lines().last().unwrap().starts_with("s:3 trl:inf lr:0.010000 norm:"), "{log}");
        if matches!(target, Target::Cpu) {
            // Only the loss is not finite, because the CPU engine computes the norm in f64.
            assert!(records[3]["norm"].as_f64().unwrap() > 1e30, "{}", records[3]);
        }
    }
}

#[test]
fn skipped_step_advances_the_bias_correction() {
    let rate = 1e-3;
    let weights = |steps| {
        let dir = Trial { learning_rate: rate, ..Trial::with_fatal(Target::Cpu, steps, &[0]) }.trained();
        let model = read(&dir, &model_name(steps));
        model[1024..].as_chunks::<4>().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect::<Vec<_>>()
    };
    let (before, after) = (weights(1), weights(2));
    let changes = before.iter().zip(&after).map(|(before, after)| (after - before).abs());
    // m = 0.1 g and v = 0.05 g^2, corrected with t = 2. With t = 1, the change would equal the learning rate.
    let expected = f64::from(rate) * (0.1 / (1.0 - 0.9f64.powi(2))) / (0.05 / (1.0 - 0.95f64.powi(2))).sqrt();
    // The change is smaller than the spacing of f32 values near 10, so large weights are excluded.
    let largest =
        changes.zip(&before).filter(|(_, weight)| weight.abs() < 0.5).map(|(change, _)| change).fold(0.0, f64::max);
    assert!((largest / expected - 1.0).abs() < 1e-3, "{largest}, expected {expected}");
}

#[test]
fn resuming_before_between_or_after_bad_steps_gives_the_same_result() {
    for target in TARGETS {
        let whole = Trial::with_fatal(target, 8, &[3, 4]);
        let expected = whole.trained();
        // A skipped step writes no checkpoint, because the weights have not changed.
        assert_eq!(done_steps(expected.path()).unwrap(), [1, 2, 3, 6, 7, 8]);
        let between = Trial { steps: 4, ..whole.clone() }.trained();
        assert_eq!(done_steps(between.path()).unwrap(), [1, 2, 3, 4]);
        // The emulator is slow, and the guards do not depend on the engine.
        let killed = match target {
            Target::Cpu => vec![killed_after(&expected, 2), killed_after(&expected, 6), between],
            _ => vec![between],
        };
        for killed in killed {
            whole.train(killed.path()).unwrap();
            assert!(run_results(&killed, 8) == run_results(&expected, 8), "{target:?}");
        }
    }
}

#[test]
fn consecutive_bad_steps_end_the_run_with_the_last_good_checkpoint_in_the_error() {
    let limits = Limits { bad_steps: 3, ..OFF };
    for target in [Target::Cpu, Target::Bf16 { masters: true }] {
        let trial = Trial { limits, ..Trial::with_fatal(target, 40, &[0, 2, 6, 7, 8]) };
        let error_of = |trial: &Trial, dir: &TempDir| trial.train(dir.path()).unwrap_err().to_string();
        let check = |error: &str, dir: &TempDir, parts: &[String]| {
            for part in parts.iter().map(String::as_str).chain(["the last 3 steps, 7 to 9, had no", "--lr", "--resume"])
            {
                assert!(error.contains(part), "{target:?}: expected '{part}' in: {error}");
            }
            // The log contains the bad steps.
            assert_eq!(records(dir).len(), 9);
        };
        let file = |dir: &TempDir, name: String| dir.path().join(name).display().to_string();

        let dir = tempfile::tempdir().unwrap();
        let error = error_of(&Trial { checkpoint_every: 5, ..trial.clone() }, &dir);
        check(&error, &dir, &[format!("the last good checkpoint is {}; resume", file(&dir, model_name(5)))]);
        assert_eq!(done_steps(dir.path()).unwrap(), [5]);

        // The weights right before the first bad step may be corrupt, so the error names an earlier checkpoint.
        let dir = tempfile::tempdir().unwrap();
        let error = error_of(&trial, &dir);
        let good = format!("the last good checkpoint is {};", file(&dir, model_name(5)));
        check(&error, &dir, &[good.clone(), format!("delete {}", file(&dir, done_name(6)))]);
        assert_eq!(done_steps(dir.path()).unwrap(), [2, 4, 5, 6]);

        // A resumed run keeps the count of consecutive bad steps.
        let dir = Trial { steps: 8, ..trial.clone() }.trained();
        let error = error_of(&trial, &dir);
        check(&error, &dir, &[format!("is {};", file(&dir, model_name(5))), file(&dir, done_name(8))]);
    }
}

/// Creates a run on a repeated sequence of 7 tokens with one outlier sequence.
fn with_outlier(target: Target, steps: usize, limits: Limits) -> Trial {
    let mut rng = Mt19937::new(8);
    let mut data: Vec<u32> = (0..=200 * SEQ).map(|i| (i % 7) as u32).collect();
    data[OUTLIER * SEQ + 1..][..SEQ - 1].iter_mut().for_each(|token| *token = 20 + rng.below(30));
    Trial { target, data, steps, grad_accum: 1, checkpoint_every: 70, learning_rate: 3e-3, limits }
}

/// The step with the outlier.
const OUTLIER: usize = 140;

fn with_loss_limit() -> Limits {
    Limits { loss_z: Some(5.0), ..OFF }
}

#[test]
fn outliers_are_logged_and_skipped_only_above_a_limit() {
    let train_with = |limits| with_outlier(Target::Cpu, OUTLIER + 1, limits).trained();
    let skips = |dir: &TempDir| {
        let skipped = records(dir).into_iter().enumerate().filter_map(|(i, r)| Some((i, r.get("skipped")?.clone())));
        skipped.collect::<Vec<_>>()
    };
    let unchanged = |dir: &TempDir| tensors(dir, Target::Cpu, OUTLIER) == tensors(dir, Target::Cpu, OUTLIER + 1);
    let unlimited = train_with(OFF);
    let found = records(&unlimited);
    let first = |key: &str| found.iter().position(|record| record.get(key).is_some());
    assert_eq!((first("loss_z"), first("norm_z")), (Some(128), Some(128)));
    let z = |step: usize, key: &str| found[step][key].as_f64().unwrap();
    assert!(z(OUTLIER, "loss_z") > 5.0 && z(OUTLIER, "norm_z") > 3.0, "{}", found[OUTLIER]);
    assert!(z(OUTLIER - 1, "loss_z") < 1.0, "{}", found[OUTLIER - 1]);
    assert!(skips(&unlimited).is_empty() && !unchanged(&unlimited));

    for (limits, reason) in [
        (with_loss_limit(), "loss"),
        (Limits { norm_z: Some(3.0), ..OFF }, "norm"),
        (Limits { norm_z: Some(3.0), ..with_loss_limit() }, "loss"),
    ] {
        let guarded = train_with(limits);
        assert_eq!(skips(&guarded), [(OUTLIER, reason.into())]);
        assert!(unchanged(&guarded), "{reason}");
        assert!(
            tensors(&guarded, Target::Cpu, OUTLIER) == tensors(&unlimited, Target::Cpu, OUTLIER),
            "earlier steps differ"
        );
    }
    assert!(skips(&train_with(Limits { loss_z: Some(50.0), ..OFF })).is_empty());
}

/// The resumed run restores half of the z-score window from the checkpoint.
#[test]
fn resuming_within_the_z_score_window_gives_the_same_result() {
    let trial = with_outlier(Target::Cpu, OUTLIER + 2, with_loss_limit());
    let whole = trial.trained();
    let killed = killed_after(&whole, 70);
    trial.train(killed.path()).unwrap();
    let (got, expected) = (run_results(&killed, OUTLIER + 2), run_results(&whole, OUTLIER + 2));
    assert_eq!((&got.3, &got.4), (&expected.3, &expected.4));
    assert!(got == expected);
    assert_eq!(got.3["guards"]["skips"]["outliers"], 1);
}

/// Runs the program in a temporary directory with a model of 97 tokens.
struct Program {
    dir: TempDir,
}

impl Program {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut rng = Mt19937::new(7);
        let ids: Vec<u16> = (0..1500).map(|_| rng.below(97) as u16).collect();
        tokens::write(&dir.path().join("train.bin"), &ids, tokens::Width::U16).unwrap();
        fs::write(dir.path().join("tiny.bin"), include_bytes!("data/tiny.bin")).unwrap();
        Self { dir }
    }

    /// Runs `train` and returns its exit code and output.
    fn train(&self, more: &[&str]) -> (i32, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
        command.current_dir(self.dir.path()).args(["train", "--device", "cpu", "--train", "train.bin"]);
        command.args(["--model", "tiny.bin", "--batch", "2", "--seq", "16", "--schedule", "constant"]);
        command.args(["--sample-every", "0"]).args(more);
        let output = command.output().unwrap();
        let printed = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        (output.status.code().unwrap(), printed)
    }

    fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.dir.path().join(name)).unwrap()
    }
}

#[test]
fn diverged_run_resumes_from_the_checkpoint_named_in_its_error() {
    let program = Program::new();
    let succeed = |more: &[&str]| {
        let (code, printed) = program.train(more);
        assert_eq!(code, 0, "{printed}");
        printed
    };
    succeed(&["--out", "whole", "--steps", "20", "--lr", "0.003"]);
    succeed(&["--out", "run", "--steps", "6", "--lr", "0.003"]);
    let again = ["--out", "run", "--steps", "20", "--resume", "--force-resume"];
    let (code, printed) = program.train(&[&again[..], &["--lr", "1e30", "-n", "8", "--max-bad-steps", "4"]].concat());
    assert_eq!(code, 1, "{printed}");
    for part in [
        "step 8: update skipped: loss NaN, norm NaN; 1 in a row; the run ends after 4\n",
        "step 11: update skipped: loss NaN, norm NaN; 4 in a row; the run ends after 4\n",
        "no checkpoint of step 8: nothing has changed since step 7\n",
        "error: the last 4 steps, 8 to 11, had no finite loss and gradient norm (loss NaN, norm NaN)",
        "the last good checkpoint is run/model_00000006.bin; resume after step 6 with the same command and --resume",
    ] {
        assert!(printed.contains(part), "expected '{part}' in: {printed}");
    }
    let printed = succeed(&[&again[..], &["--lr", "0.003"]].concat());
    assert!(printed.contains("resumed after 6 of 20 steps") && !printed.contains("skipped: 4"), "{printed}");
    for name in ["model_00000020.bin", "main.log"] {
        assert!(program.read(&format!("run/{name}")) == program.read(&format!("whole/{name}")), "{name}");
    }
}

#[test]
fn guard_flags_accept_llm_c_names_and_reject_invalid_values() {
    let program = Program::new();
    let (code, printed) = program.train(&["--steps", "2", "-sl", "7", "-sg", "6.5"]);
    assert_eq!(code, 0, "{printed}");
    let table = "not finite (the run ends after 10 in a row), z-score of the loss above 7, z-score of the gradient norm above 6.5\n";
    // Z-scores are printed only after their window is full.
    assert!(printed.contains(table) && !printed.contains("z)| "), "{printed}");
    let refuse = |more: &[&str], parts: &[&str]| {
        let (code, printed) = program.train(more);
        assert_ne!(code, 0, "{more:?}: {printed}");
        assert!(parts.iter().all(|part| printed.contains(part)), "{more:?}: {printed}");
    };
    refuse(&["--skip-loss-z=-1"], &["--skip-loss-z", "a finite number of at least 0"]);
    refuse(&["-sg", "nan"], &["--skip-norm-z", "a finite number of at least 0"]);
    refuse(&["--max-bad-steps", "0"], &["--max-bad-steps", "a whole number from 1 to"]);

    // A limit changes the results, so resuming with another one requires --force-resume; --max-bad-steps does not.
    let run = ["--out", "run", "--steps", "2"];
    assert_eq!(program.train(&run).0, 0);
    let resume = |more: &[&'static str]| [&run[..], &["--resume"], more].concat();
    refuse(&resume(&["-sl", "5"]), &["--skip-loss-z was 0.0, is now 5.0", "--force-resume"]);
    let (code, printed) = program.train(&resume(&["--max-bad-steps", "20"]));
    assert!(code == 0 && printed.contains("--max-bad-steps was 10, is now 20"), "{printed}");
}
