//! Steps that must not change the model: on the CPU, and on the emulated CUDA engine, whose kernels decide for themselves.

use checkpoint::directory::{Locked, Retention, done_name, done_steps, model_name, sidecar_name, state_name};
use checkpoint::resume::newest;
use checkpoint::sidecar::Identity;
use checkpoint::writer::Checkpoints;
use checkpoint::{RunState, fingerprint};
use data::{Geometry, Loader, Prefetch, Tokens, tokens};
use distributed::Ranks;
use engine::Engine;
use engine::cpu::Cpu;
use engine::cuda::{Precision, emulated};
use host::console::Console;
use host::log::Log;
use host::signals::Stop;
use host::train::{Outcome, Run, Settings};
use model::guards::Limits;
use model::schedule::{Kind, Schedule};
use model::{Capacity, Descriptor, Gpt2, Param, Recompute};
use rng::Mt19937;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

const VOCAB: usize = 60;
const CHANNELS: usize = 64;
const SEQ: usize = 16;
/// A token that makes the loss infinite where it has to be predicted, and does nothing to any other loss or gradient.
const FATAL: u16 = 59;

const OFF: Limits = Limits { loss_z: None, norm_z: None, bad_steps: 10 };

/// What computes, and whether it has master weights.
#[derive(Clone, Copy, Debug)]
enum On {
    Cpu,
    Bf16 { masters: bool },
    Fp32,
}

const ALL: [On; 4] = [On::Cpu, On::Bf16 { masters: true }, On::Bf16 { masters: false }, On::Fp32];

#[derive(Clone)]
struct Trial {
    on: On,
    data: Vec<u16>,
    steps: usize,
    grad_accum: usize,
    checkpoint_every: usize,
    learning_rate: f32,
    limits: Limits,
}

impl Trial {
    /// Random tokens, with `FATAL` in these steps of 2 sequences.
    fn with_fatal(on: On, steps: usize, fatal: &[usize]) -> Self {
        let mut rng = Mt19937::new(3);
        let mut data: Vec<u16> = (0..=40 * 2 * SEQ).map(|_| rng.below(u32::from(FATAL)) as u16).collect();
        for step in fatal {
            data[step * 2 * SEQ + SEQ + 5] = FATAL;
        }
        Self { on, data, steps, grad_accum: 2, checkpoint_every: 1, learning_rate: 1e-2, limits: OFF }
    }

    /// Trains to the end in `out`, from the newest checkpoint there.
    fn train(&self, out: &Path) -> anyhow::Result<Outcome> {
        let mut engine: Box<dyn Engine> = match self.on {
            On::Cpu => Box::new(Cpu::new()),
            On::Bf16 { .. } => emulated(Precision::Bf16, false),
            On::Fp32 => emulated(Precision::Fp32, false),
        };
        let engine = &mut *engine;
        let descriptor = Descriptor::new(1, 1, CHANNELS, SEQ, VOCAB).unwrap();
        let master_weights = !matches!(self.on, On::Bf16 { masters: false });
        let capacity = Capacity { b: 1, t: SEQ, training: true, master_weights, recompute: Recompute::Nothing };
        let (model, plan) = Gpt2::plan(descriptor, capacity, engine);
        engine.allocate(&plan).unwrap();
        let shards = vec![Tokens::in_memory("tokens", self.data.clone())];
        let mut loader = Loader::new(shards, Geometry::single(1, SEQ), VOCAB, None).unwrap();
        let identity = Identity {
            program: "test".to_owned(),
            engine: engine.describe(),
            config: serde_json::Map::new(),
            train: fingerprint::of(&loader).unwrap(),
            val: None,
            ranks: 1,
        };
        let checkpoint = newest(out).unwrap().checkpoint;
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
        let (kind, peak) = (Kind::Constant, self.learning_rate);
        let settings = Settings {
            steps: self.steps,
            grad_accum: self.grad_accum,
            schedule: Schedule { kind, peak, warmup: 0, steps: self.steps, final_fraction: 1.0 },
            weight_decay: 0.0,
            clip: 1.0,
            limits: self.limits,
            val_every: None,
            val_batches: 0,
            sample_every: None,
            sample_tokens: 0,
            checkpoint_every: Some(self.checkpoint_every),
            check_ranks_every: None,
        };
        let mut run = Run {
            settings: &settings,
            model: &model,
            tokenizer: None,
            train: Prefetch::start(loader, engine).unwrap(),
            val: None,
            hellaswag: None,
            engine,
            console: Console::new(self.steps),
            log,
            state,
            checkpoints: Some(Checkpoints::new(Locked::open(out).unwrap(), Retention::default(), identity, resumed)),
            stop: Stop::default(),
            ranks: &mut Ranks::default(),
        };
        run.train()
    }

    fn trained(&self) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        self.train(dir.path()).unwrap();
        dir
    }
}

/// The last LayerNorm gives 10 in channel 1, whatever came in, and `FATAL`'s embedding has -3e38 there: its logit is -inf, so it
/// has no share in the softmax, and no gradient where it is not the target.
fn make_fatal(model: &Gpt2, engine: &mut dyn Engine) {
    let mut write = |param, at: usize, value| {
        engine.write(model.layout.of(model.params, param, 0).slice(at, 1), &[value]).unwrap();
    };
    write(Param::Wte, usize::from(FATAL) * CHANNELS + 1, -3e38);
    write(Param::Lnfw, 1, 0.0);
    write(Param::Lnfb, 1, 10.0);
    if let Some(master) = model.training.and_then(|training| training.master) {
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

/// Of a checkpoint: the model file, and m, v and master weights of the state file.
fn tensors(dir: &TempDir, on: On, step: usize) -> (Vec<u8>, Vec<u8>) {
    let (model, mut state) = (read(dir, &model_name(step)), read(dir, &state_name(step, 0)));
    let (size, tensors) = match on {
        On::Cpu | On::Fp32 => (4, 3),
        On::Bf16 { masters } => (2, if masters { 3 } else { 2 }),
    };
    let elements = (model.len() - 1024) / size;
    state.truncate(1024 + 4 * tensors * elements);
    assert_eq!(state.len(), 1024 + 4 * tensors * elements);
    (model, state.split_off(1024))
}

/// All that must not depend on interruptions: the last checkpoint, but for times, and the logs.
fn kept(dir: &TempDir, step: usize) -> (Vec<u8>, Vec<u8>, Vec<u8>, Value, Vec<Value>) {
    let timeless = |mut value: Value| {
        for key in ["ms", "tokens_per_second", "training_seconds", "pace"] {
            value.as_object_mut().unwrap().remove(key);
        }
        value
    };
    let sidecar: Value = serde_json::from_slice(&read(dir, &sidecar_name(step))).unwrap();
    let progress = timeless(sidecar["run"]["progress"].clone());
    assert!(progress["guards"]["loss"].as_array().unwrap().len() > 1, "{progress}");
    (
        read(dir, &model_name(step)),
        read(dir, &state_name(step, 0)),
        read(dir, "main.log"),
        progress,
        records(dir).into_iter().map(timeless).collect(),
    )
}

/// A directory with what `from` had when its checkpoint of `step` was the newest, and the lines logged after that.
fn as_left_by_a_kill(from: &TempDir, step: usize) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let names = [model_name(step), state_name(step, 0), sidecar_name(step), done_name(step)];
    for name in names.iter().map(String::as_str).chain(["main.log", "main.jsonl"]) {
        fs::copy(from.path().join(name), dir.path().join(name)).unwrap();
    }
    dir
}

#[test]
fn a_step_that_is_not_finite_changes_no_bit() {
    for on in ALL {
        let dir = Trial::with_fatal(on, 4, &[3]).trained();
        // The checkpoint of step 3 is from before the fourth step.
        let [second, third, fourth] = [2, 3, 4].map(|step| tensors(&dir, on, step));
        assert!(second.0 != third.0 && second.1 != third.1, "{on:?}: good steps change nothing either");
        assert!(third.0 == fourth.0, "{on:?}: weights have changed");
        assert!(third.1 == fourth.1, "{on:?}: m, v or master weights have changed");
        let records = records(&dir);
        assert!(records[..3].iter().all(|record| record["loss"].is_f64() && record.get("skipped").is_none()));
        assert_eq!((&records[3]["loss"], &records[3]["skipped"]), (&Value::Null, &"not-finite".into()), "{on:?}");
        let log = String::from_utf8(read(&dir, "main.log")).unwrap();
        assert!(log.lines().last().unwrap().starts_with("s:3 trl:inf lr:0.010000 norm:"), "{log}");
        if matches!(on, On::Cpu) {
            // Only the loss tells that it is a bad step: the CPU's norm is computed in f64.
            assert!(records[3]["norm"].as_f64().unwrap() > 1e30, "{}", records[3]);
        }
    }
}

#[test]
fn a_skipped_step_counts_in_the_bias_correction() {
    let rate = 1e-3;
    let weights = |steps| {
        let dir = Trial { learning_rate: rate, ..Trial::with_fatal(On::Cpu, steps, &[0]) }.trained();
        let model = read(&dir, &model_name(steps));
        model[1024..].as_chunks::<4>().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect::<Vec<_>>()
    };
    let (before, after) = (weights(1), weights(2));
    let moves = before.iter().zip(&after).map(|(before, after)| (after - before).abs());
    // m = 0.1 g and v = 0.05 g^2, corrected for t = 2. With t = 1 it would be the rate itself.
    let expected = f64::from(rate) * (0.1 / (1.0 - 0.9f64.powi(2))) / (0.05 / (1.0 - 0.95f64.powi(2))).sqrt();
    // Weights near 10 do not move in steps that fine.
    let largest = moves.zip(&before).filter(|(_, weight)| weight.abs() < 0.5).map(|(by, _)| by).fold(0.0, f64::max);
    assert!((largest / expected - 1.0).abs() < 1e-3, "{largest}, expected {expected}");
}

#[test]
fn a_run_taken_up_before_between_or_after_bad_steps_ends_the_same() {
    for on in ALL {
        let whole = Trial::with_fatal(on, 8, &[3, 4]);
        let expected = whole.trained();
        // While nothing changes no checkpoint is due; the one before the first bad step could not know.
        assert_eq!(done_steps(expected.path()).unwrap(), [1, 2, 3, 6, 7, 8]);
        let between = Trial { steps: 4, ..whole.clone() }.trained();
        assert_eq!(done_steps(between.path()).unwrap(), [1, 2, 3, 4]);
        for killed in [as_left_by_a_kill(&expected, 2), as_left_by_a_kill(&expected, 6), between] {
            whole.train(killed.path()).unwrap();
            assert!(kept(&killed, 8) == kept(&expected, 8), "{on:?}");
        }
    }
}

#[test]
fn bad_steps_in_a_row_end_the_run_and_its_error_names_the_last_good_checkpoint() {
    let limits = Limits { bad_steps: 3, ..OFF };
    for on in [On::Cpu, On::Bf16 { masters: true }] {
        let trial = Trial { limits, ..Trial::with_fatal(on, 40, &[0, 2, 6, 7, 8]) };
        let error_of = |trial: &Trial, dir: &TempDir| trial.train(dir.path()).unwrap_err().to_string();
        let check = |error: &str, dir: &TempDir, parts: &[String]| {
            for part in parts.iter().map(String::as_str).chain(["the last 3 steps, 7 to 9, had no", "--lr", "--resume"])
            {
                assert!(error.contains(part), "{on:?}: expected '{part}' in: {error}");
            }
            // What the error is about is in the log.
            assert_eq!(records(dir).len(), 9);
        };
        let file = |dir: &TempDir, name: String| dir.path().join(name).display().to_string();

        let dir = tempfile::tempdir().unwrap();
        let error = error_of(&Trial { checkpoint_every: 5, ..trial.clone() }, &dir);
        check(&error, &dir, &[format!("the last good checkpoint is {}; go on", file(&dir, model_name(5)))]);
        assert_eq!(done_steps(dir.path()).unwrap(), [5]);

        // Whether the weights right before the first bad step are good nobody knows.
        let dir = tempfile::tempdir().unwrap();
        let error = error_of(&trial, &dir);
        let good = format!("the last good checkpoint is {};", file(&dir, model_name(5)));
        check(&error, &dir, &[good.clone(), format!("delete {}", file(&dir, done_name(6)))]);
        assert_eq!(done_steps(dir.path()).unwrap(), [2, 4, 5, 6]);

        // The count goes on where a run was interrupted between bad steps.
        let dir = Trial { steps: 8, ..trial.clone() }.trained();
        let error = error_of(&trial, &dir);
        check(&error, &dir, &[format!("is {};", file(&dir, model_name(5))), file(&dir, done_name(8))]);
    }
}

/// 7 tokens over and over, but for one strange sequence.
fn with_an_outlier(on: On, steps: usize, limits: Limits) -> Trial {
    let mut rng = Mt19937::new(8);
    let mut data: Vec<u16> = (0..=200 * SEQ).map(|i| (i % 7) as u16).collect();
    data[OUTLIER * SEQ + 1..][..SEQ - 1].iter_mut().for_each(|token| *token = 20 + rng.below(30) as u16);
    Trial { on, data, steps, grad_accum: 1, checkpoint_every: 70, learning_rate: 3e-3, limits }
}

const OUTLIER: usize = 140;

fn with_loss_limit() -> Limits {
    Limits { loss_z: Some(5.0), ..OFF }
}

#[test]
fn outliers_are_noticed_and_skipped_only_if_asked_for() {
    let of = |limits| with_an_outlier(On::Cpu, OUTLIER + 1, limits).trained();
    let skips = |dir: &TempDir| {
        let skipped = records(dir).into_iter().enumerate().filter_map(|(i, r)| Some((i, r.get("skipped")?.clone())));
        skipped.collect::<Vec<_>>()
    };
    let unchanged = |dir: &TempDir| tensors(dir, On::Cpu, OUTLIER) == tensors(dir, On::Cpu, OUTLIER + 1);
    let watched = of(OFF);
    let found = records(&watched);
    let first = |key: &str| found.iter().position(|record| record.get(key).is_some());
    assert_eq!((first("loss_z"), first("norm_z")), (Some(128), Some(128)));
    let z = |step: usize, key: &str| found[step][key].as_f64().unwrap();
    assert!(z(OUTLIER, "loss_z") > 5.0 && z(OUTLIER, "norm_z") > 3.0, "{}", found[OUTLIER]);
    assert!(z(OUTLIER - 1, "loss_z") < 1.0, "{}", found[OUTLIER - 1]);
    assert!(skips(&watched).is_empty() && !unchanged(&watched));

    for (limits, why) in [
        (with_loss_limit(), "loss"),
        (Limits { norm_z: Some(3.0), ..OFF }, "norm"),
        (Limits { norm_z: Some(3.0), ..with_loss_limit() }, "loss"),
    ] {
        let guarded = of(limits);
        assert_eq!(skips(&guarded), [(OUTLIER, why.into())]);
        assert!(unchanged(&guarded), "{why}");
        assert!(tensors(&guarded, On::Cpu, OUTLIER) == tensors(&watched, On::Cpu, OUTLIER), "up to there the same");
    }
    assert!(skips(&of(Limits { loss_z: Some(50.0), ..OFF })).is_empty());
}

/// Half of the window is from before.
#[test]
fn a_run_taken_up_within_a_window_ends_the_same() {
    for on in [On::Cpu, On::Bf16 { masters: true }] {
        let trial = with_an_outlier(on, OUTLIER + 2, with_loss_limit());
        let whole = trial.trained();
        let killed = as_left_by_a_kill(&whole, 70);
        trial.train(killed.path()).unwrap();
        let (got, expected) = (kept(&killed, OUTLIER + 2), kept(&whole, OUTLIER + 2));
        assert_eq!((&got.3, &got.4), (&expected.3, &expected.4), "{on:?}");
        assert!(got == expected, "{on:?}");
        assert_eq!(got.3["guards"]["skips"]["outliers"], 1);
    }
}

/// The program, with a model of 97 tokens in its directory.
struct Program {
    dir: TempDir,
}

impl Program {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut rng = Mt19937::new(7);
        let ids: Vec<u16> = (0..1500).map(|_| rng.below(97) as u16).collect();
        tokens::write(&dir.path().join("train.bin"), &ids).unwrap();
        fs::write(dir.path().join("tiny.bin"), include_bytes!("data/tiny.bin")).unwrap();
        Self { dir }
    }

    /// Exit code, and what was printed.
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
fn a_run_that_exploded_goes_on_from_the_checkpoint_it_names() {
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
        "step 8: update skipped: loss NaN, norm NaN; 1 in a row, 4 end the run\n",
        "step 11: update skipped: loss NaN, norm NaN; 4 in a row, 4 end the run\n",
        "no checkpoint of step 8: nothing has changed since step 7\n",
        "error: the last 4 steps, 8 to 11, had no finite loss and gradient norm (loss NaN, norm NaN)",
        "the last good checkpoint is run/model_00000006.bin; go on after step 6 with the same command and --resume",
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
fn the_flags_are_llm_cs_and_say_what_they_do() {
    let program = Program::new();
    let (code, printed) = program.train(&["--steps", "2", "-sl", "7", "-sg", "6.5"]);
    assert_eq!(code, 0, "{printed}");
    let table =
        "not finite (10 in a row end the run), z-score of the loss above 7, z-score of the gradient norm above 6.5\n";
    assert!(printed.contains(table) && printed.contains("z)| norm "), "{printed}");
    let refuse = |more: &[&str], parts: &[&str]| {
        let (code, printed) = program.train(more);
        assert_ne!(code, 0, "{more:?}: {printed}");
        assert!(parts.iter().all(|part| printed.contains(part)), "{more:?}: {printed}");
    };
    refuse(&["--skip-loss-z=-1"], &["--skip-loss-z", "a number of at least 0"]);
    refuse(&["-sg", "nan"], &["--skip-norm-z", "a number of at least 0"]);
    refuse(&["--max-bad-steps", "0"], &["--max-bad-steps", "a whole number of 1 to"]);

    // What is skipped changes the numbers; when it is given up does not.
    let run = ["--out", "run", "--steps", "2"];
    assert_eq!(program.train(&run).0, 0);
    let resume = |more: &[&'static str]| [&run[..], &["--resume"], more].concat();
    refuse(&resume(&["-sl", "5"]), &["--skip-loss-z was 0.0, is 5.0", "--force-resume"]);
    let (code, printed) = program.train(&resume(&["--max-bad-steps", "20"]));
    assert!(code == 0 && printed.contains("--max-bad-steps was 10, is 20"), "{printed}");
}
