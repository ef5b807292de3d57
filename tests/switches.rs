//! The effect of each flag of `train` on a run, on the CPU and on the emulated GPU.

use data::tokens;
use distributed::Ranks;
use engine::cpu::Cpu;
use engine::cuda::{EmulatedGpu, Precision, emulated};
use engine::ops::{AdamW, Master};
use engine::plan::Plan;
use engine::tensor::DType;
use engine::{BatchLayout, Engine, GeluFusion};
use model::{Decoder, Descriptor, PlanOptions, Recompute, TrainStep};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};
use tempfile::TempDir;

const LAYOUT: BatchLayout = BatchLayout::new(2, 16);
const LAYERS: usize = 3;
const CHANNELS: usize = 64;

fn planned(engine: &mut dyn Engine, recompute: Recompute, master_weights: bool) -> (Decoder, Plan) {
    let descriptor = Descriptor::gpt2(LAYERS, 1, CHANNELS, LAYOUT.t, 100).unwrap();
    // The logits take three chunks.
    let options = PlanOptions {
        master_weights: master_weights.into(),
        recompute,
        logit_rows: 13,
        ..PlanOptions::training(LAYOUT.b, LAYOUT.t)
    };
    Decoder::plan(descriptor, options, engine)
}

/// The state after two steps.
#[derive(Debug, PartialEq)]
struct Trained {
    grads: Vec<f32>,
    params: Vec<f32>,
    /// Master weights, if the run has them.
    master: Option<Vec<f32>>,
}

fn trained(engine: &mut dyn Engine, recompute: Recompute, master_weights: bool, learning_rate: f32) -> Trained {
    let (model, plan) = planned(engine, recompute, master_weights);
    engine.allocate(&plan).unwrap();
    model.initialize(engine, 42).unwrap();
    let training = model.training.unwrap();
    let (mut train_step, ranks) = (TrainStep::new(&model, LAYOUT, 1), &mut Ranks::default());
    for step in 1..=2 {
        let mut load = |engine: &mut dyn Engine| {
            let mut words = engine.host_buffer(LAYOUT.words())?;
            for (i, word) in words[..LAYOUT.targets().end].iter_mut().enumerate() {
                *word = (i * i % 97) as i32;
            }
            LAYOUT.sort(&mut words);
            LAYOUT.set_seed(&mut words, step);
            engine.load_batch(model.batch, LAYOUT, words)?;
            Ok(LAYOUT.targets().len())
        };
        let settings = AdamW {
            learning_rate,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            step,
            clip: 1.0,
            seed: 100 * step,
        };
        train_step.run(engine, ranks, &mut load, &mut |_, _| Ok(Some(settings.into()))).unwrap();
    }
    Trained {
        grads: engine.read(training.grads).unwrap(),
        params: engine.read(model.params).unwrap(),
        master: training.master.tensor().map(|master| engine.read(master).unwrap()),
    }
}

fn gpu(precision: Precision, gelu_fusion: Option<GeluFusion>) -> Box<dyn Engine> {
    emulated(EmulatedGpu::default(), precision, gelu_fusion, false)
}

/// Asserts bitwise equality, NaN included.
fn assert_same(got: &Trained, expected: &Trained, what: &str) {
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert!(expected.grads.iter().any(|grad| *grad != 0.0));
    assert_eq!(bits(&got.grads), bits(&expected.grads), "gradients, {what}");
    assert_eq!(bits(&got.params), bits(&expected.params), "parameters, {what}");
}

/// Asserts that activation checkpointing does not change a bit of the gradients and the parameters.
fn assert_recomputation_is_exact(mut engine: impl FnMut() -> Box<dyn Engine>, what: &str) {
    let mut train = |recompute| trained(&mut *engine(), recompute, true, 1e-2);
    let stored = train(Recompute::Nothing);
    for recompute in [Recompute::Activation, Recompute::ActivationAndNorms] {
        assert_same(&train(recompute), &stored, &format!("{what}, {recompute:?}"));
    }
}

#[test]
fn recomputation_is_exact_on_the_cpu() {
    assert_recomputation_is_exact(|| Box::new(Cpu::new()), "CPU");
}

#[test]
fn recomputation_is_exact_in_f32() {
    assert_recomputation_is_exact(|| gpu(Precision::Fp32, None), "f32");
}

#[test]
fn recomputation_is_exact_in_bf16() {
    for fusion in GeluFusion::ALL {
        assert_recomputation_is_exact(|| gpu(Precision::Bf16, Some(fusion)), &format!("bf16, {fusion:?}"));
    }
}

/// Uses the Rust GEMM kernels for sm_90a, whose GELU backward epilogue also recomputes the GELU.
#[test]
fn recomputation_is_exact_with_rust_gemm_kernels() {
    let emulation = EmulatedGpu { hopper: true, ..EmulatedGpu::default() };
    let gpu = || emulated(emulation, Precision::Bf16, Some(GeluFusion::Both), false);
    assert_recomputation_is_exact(gpu, "kernels");
}

#[test]
fn recomputation_saves_the_expected_memory() {
    for mut engine in [Box::new(Cpu::new()) as Box<dyn Engine>, gpu(Precision::Bf16, None)] {
        let float = engine.dtype().bytes();
        let mut bytes = |recompute| planned(&mut *engine, recompute, true).1.bytes();
        let [nothing, gelu, norms, layers] = Recompute::ALL.map(&mut bytes);
        let btc = LAYOUT.b * LAYOUT.t * CHANNELS * float;
        // One GELU output (B, T, 4C) for all layers instead of one per layer; no outputs of ln1 and ln2.
        assert_eq!(nothing - gelu, (LAYERS - 1) * 4 * btc);
        assert_eq!(gelu - norms, 2 * LAYERS * btc);
        // Of all layers but one, only the output: neither qkv, attention, residual2 and fc nor the statistics of two norms and one
        // head. Each of the nine buffers is rounded up to 1024 bytes.
        let saved = (LAYERS - 1) * (9 * btc + 5 * LAYOUT.b * LAYOUT.t * size_of::<f32>());
        assert!((norms - layers).abs_diff(saved) < 9 * 1024, "{norms} - {layers}, expected {saved}");
    }
}

/// Attention stores no tensor of T x T elements.
#[test]
fn memory_grows_linearly_with_the_sequence_length() {
    let bytes = |b, t| {
        let descriptor = Descriptor::gpt2(LAYERS, 1, CHANNELS, 4096, 100).unwrap();
        let options = PlanOptions::training(b, t);
        Decoder::plan(descriptor, options, &mut *gpu(Precision::Bf16, None)).1.bytes()
    };
    let (short, long) = (bytes(64, 64), bytes(1, 4096));
    assert!(long.abs_diff(short) < short / 100, "{long} bytes, expected {short}");
}

#[test]
fn each_fused_gelu_saves_one_rounding() {
    let of = |fusion| trained(&mut *gpu(Precision::Bf16, Some(fusion)), Recompute::Nothing, true, 0.0).grads;
    let [none, forward, both] = GeluFusion::ALL.map(of);
    assert!(none != forward && forward != both && none != both);
    let distance = |a: &[f32], b: &[f32]| {
        let (sum, squares) = a
            .iter()
            .zip(b)
            .fold((0.0, 0.0), |(d, s), (a, b)| (d + f64::from(a - b).powi(2), s + f64::from(*b).powi(2)));
        (sum / squares).sqrt()
    };
    assert!(distance(&none, &both) < 2e-2 && distance(&forward, &both) < 2e-2);
    // The default is the fastest level on Hopper. The levels have llm.c's numbers.
    assert_eq!(gpu(Precision::Bf16, None).gelu_fusion(), GeluFusion::Both);
    assert_eq!(gpu(Precision::Fp32, None).gelu_fusion(), GeluFusion::None);
    assert_eq!(GeluFusion::ALL.map(u8::from), [0, 1, 2]);
    // In f32 the unfused GELU loses no precision.
    let of = |fusion| trained(&mut *gpu(Precision::Fp32, Some(fusion)), Recompute::Nothing, true, 0.0).grads;
    assert!(distance(&of(GeluFusion::None), &of(GeluFusion::Both)) < 1e-5);
}

#[test]
fn tf32_rounds_the_inputs_of_gemms() {
    let of = |tf32, precision| {
        let engine = &mut *emulated(EmulatedGpu { tf32, ..EmulatedGpu::default() }, precision, None, false);
        trained(engine, Recompute::Nothing, true, 0.0).grads
    };
    let (exact, rounded) = (of(false, Precision::Fp32), of(true, Precision::Fp32));
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    let error = norm(&mut exact.iter().zip(&rounded).map(|(a, b)| a - b)) / norm(&mut exact.iter().copied());
    // Each input has a relative rounding error of up to 2^-11.
    assert!((1e-5..2e-3).contains(&error), "{error}");
    assert_eq!(of(false, Precision::Bf16), of(true, Precision::Bf16));
}

/// The updates are far below the resolution of bf16. Master weights accumulate them; stochastic rounding applies them on average.
#[test]
fn without_master_weights_updates_are_rounded_stochastically() {
    let learning_rate = 1e-5;
    let with = trained(&mut *gpu(Precision::Bf16, None), Recompute::Nothing, true, learning_rate);
    let without = trained(&mut *gpu(Precision::Bf16, None), Recompute::Nothing, false, learning_rate);
    assert_eq!((with.master.is_some(), without.master), (true, None));
    let start = trained(&mut *gpu(Precision::Bf16, None), Recompute::Nothing, true, 0.0).params;
    let master = with.master.unwrap();
    // Every master weight changes, but only a fraction of the bf16 weights.
    let moved = |values: &[f32], i: usize| values[i].to_bits() != start[i].to_bits();
    let large: Vec<usize> = (0..start.len()).filter(|&i| start[i].abs() > 0.01 && moved(&master, i)).collect();
    let rounded = large.iter().filter(|&&i| moved(&without.params, i)).count();
    assert!(large.len() > 10_000 && rounded > large.len() / 100 && rounded < large.len() / 2, "{rounded}");
    // The mean update equals that of the master weights.
    let mean = |params: &[f32]| {
        let along = large.iter().map(|&i| f64::from(params[i] - start[i]) * f64::from((master[i] - start[i]).signum()));
        along.sum::<f64>() / large.len() as f64
    };
    let (expected, got) = (mean(&master), mean(&without.params));
    assert!((got / expected - 1.0).abs() < 0.15, "{got:e}, expected {expected:e}");
    // With f32 parameters there are no master weights.
    let (model, _) = planned(&mut *gpu(Precision::Fp32, None), Recompute::Nothing, true);
    assert_eq!(model.training.unwrap().master, Master::None);
    assert_eq!(model.params.dtype, DType::F32);
}

/// The output of a finished run of a tiny model on the CPU.
struct Ran {
    printed: String,
    dir: TempDir,
}

const TINY: &[&str] = &["--device", "cpu", "--layers", "2", "--heads", "2", "--channels", "16", "-b", "2", "-t", "16"];

fn llm_rs(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_llm-rs")).args(args).output().unwrap()
}

/// Trains with `args`, on the built-in corpus if they name no data.
fn train(args: &[&str]) -> Ran {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let all = [&["train", "--out", out.to_str().unwrap()], TINY, args].concat();
    let output = llm_rs(&all);
    let (printed, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{args:?}: {printed}{err}");
    Ran { printed: printed.into_owned(), dir }
}

/// Asserts that the program fails with one line that contains all of `parts`.
fn rejects(args: &[&str], parts: &[&str]) {
    let output = llm_rs(args);
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), err.lines().count()), (Some(1), 1), "{args:?}: {err}");
    for part in parts {
        assert!(err.contains(part), "{args:?}: expected '{part}' in: {err}");
    }
}

impl Ran {
    /// Returns the difference between the first validation loss and the first step's loss.
    fn first_distance(&self) -> f64 {
        let line: serde_json::Value = serde_json::from_str(self.text("main.jsonl").lines().next().unwrap()).unwrap();
        (line["val_loss"].as_f64().unwrap() - self.losses()[0]).abs()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join("out").join(name)
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.file(name)).unwrap()
    }

    /// Returns the values of `key:` in main.log.
    fn logged(&self, key: &str) -> Vec<String> {
        let log = self.text("main.log");
        log.lines().filter_map(|line| line.split_once(&format!("{key}:"))).map(|(_, v)| first_word(v)).collect()
    }

    /// Returns the steps whose lines in main.log have `key:`.
    fn steps_with(&self, key: &str) -> Vec<usize> {
        let log = self.text("main.log");
        let with = log.lines().filter(|line| line.contains(&format!(" {key}:")));
        with.map(|line| first_word(line.strip_prefix("s:").unwrap()).parse().unwrap()).collect()
    }

    fn losses(&self) -> Vec<f64> {
        let lines = self.text("main.jsonl");
        let records = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        records.filter_map(|record| record["loss"].as_f64()).collect()
    }

    /// Returns a row of the settings table.
    fn row(&self, name: &str) -> Option<&str> {
        self.printed.lines().find_map(|line| Some(line.strip_prefix(name)?.trim_start()))
    }

    fn weights(&self, step: usize) -> Vec<f32> {
        let bytes = fs::read(self.file(&format!("model_{step:08}.bin"))).unwrap();
        bytes[1024..].as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    fn config(&self) -> toml::Table {
        self.text("config.toml").parse().unwrap()
    }
}

fn first_word(text: &str) -> String {
    text.split(' ').next().unwrap().to_owned()
}

/// Creates train.bin and val.bin with the given numbers of tokens. Returns their directory and paths.
fn token_files(train: usize, val: usize) -> (TempDir, String, String) {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, n: usize| {
        let path = dir.path().join(name);
        let ids: Vec<u16> = (0..n).map(|i| ((i * i + n) % 211) as u16).collect();
        tokens::write(&path, &ids, tokens::Width::U16).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (train, val) = (write("train.bin", train), write("val.bin", val));
    (dir, train, val)
}

#[test]
fn learning_rates_follow_schedule_warmup_and_final_fraction() {
    let rates = |schedule: &str| {
        train(&["-x", "10", "-k", schedule, "-u", "2", "-q", "0.1", "-l", "0.01", "-v", "0", "-s", "0"]).logged("lr")
    };
    let expected = |values: [&str; 10]| values.map(str::to_owned).to_vec();
    // Two steps of warmup, then 0.001 + 0.0045 (1 + cos(pi (s - 2) / 8)).
    let cosine = [
        "0.005000", "0.010000", "0.010000", "0.009657", "0.008682", "0.007222", "0.005500", "0.003778", "0.002318",
        "0.001343",
    ];
    assert_eq!(rates("cosine"), expected(cosine));
    let linear = [
        "0.005000", "0.010000", "0.010000", "0.008875", "0.007750", "0.006625", "0.005500", "0.004375", "0.003250",
        "0.002125",
    ];
    assert_eq!(rates("linear"), expected(linear));
    assert_eq!(rates("constant"), expected(["0.010000"; 10]));
    // The decay starts at step 8: 0.001 + 0.009 (1 - sqrt(1/2)) at step 9.
    let wsd = [
        "0.005000", "0.010000", "0.010000", "0.010000", "0.010000", "0.010000", "0.010000", "0.010000", "0.010000",
        "0.003636",
    ];
    assert_eq!(rates("wsd"), expected(wsd));
}

#[test]
fn validation_samples_and_checkpoints_occur_at_their_intervals() {
    let ran = train(&["-x", "5", "-v", "2", "-s", "3", "-g", "5", "-n", "2", "-m", "1"]);
    assert_eq!(ran.steps_with("tel"), [0, 2, 4, 5]);
    assert_eq!(ran.steps_with("trl"), [0, 1, 2, 3, 4]);
    assert_eq!(ran.printed.matches("generating:").count(), 2);
    let step = |line: &str| ran.printed.find(line).unwrap();
    assert!(step("step    3/5") < step("generating:") && step("generating:") < step("step    4/5"));
    let kept = |ran: &Ran| (0..=5).filter(|n| ran.file(&format!("model_{n:08}.bin")).exists()).collect::<Vec<_>>();
    assert_eq!(kept(&ran), [2, 4, 5]);

    for never in ["0", "-1"] {
        let ran = train(&["-x", "5", "-v", never, "-s", never, "-n", never]);
        assert_eq!(ran.steps_with("tel"), [0; 0]);
        assert_eq!(ran.printed.matches("generating:").count(), 0);
        assert_eq!(kept(&ran), [0; 0]);
    }
    // A generated text may be longer than the model's maximum sequence.
    let long = train(&["-x", "1", "-v", "0", "-s", "1", "-g", "100"]);
    let text = |ran: &Ran| ran.printed.split("---").nth(1).unwrap().chars().count();
    assert!(text(&long) > 60 && text(&ran) <= 5 + 2, "{} {}", text(&long), text(&ran));
}

#[test]
fn minus_one_means_one_epoch_and_the_whole_validation_set() {
    let (_dir, data, val) = token_files(400, 170);
    let base = ["-i", &data, "-j", &val, "-s", "0", "-l", "0"];
    let run = |more: &[&str]| train(&[&base, more].concat());
    // 400 tokens make 6 steps of 64 tokens, with a remainder.
    let whole = run(&["-x", "-1", "-d", "64", "-m", "-1", "-n", "0"]);
    assert_eq!(whole.steps_with("trl"), [0, 1, 2, 3, 4, 5]);
    assert_eq!(run(&["-d", "64"]).steps_with("trl"), [0, 1, 2, 3, 4, 5]);
    assert_eq!(whole.row("epoch"), Some("384 tokens in 12 batches, 6 steps, shuffled"));
    assert_eq!(whole.row("batch"), Some("2 x 16 tokens x 2 = 64 per step"));
    // 170 tokens make 5 batches of 32 tokens. Further batches start over.
    assert_eq!(whole.config()["val-batches"].as_integer(), Some(5));
    let mean = |m: &str| run(&["-x", "1", "-m", m]).logged("tel")[0].clone();
    assert_eq!(mean("5"), whole.logged("tel")[0]);
    assert_eq!(mean("10"), whole.logged("tel")[0]);
    assert_ne!(mean("1"), whole.logged("tel")[0]);
    // The log counts all tokens of a step.
    let last = |ran: &Ran| serde_json::from_str::<serde_json::Value>(ran.text("main.jsonl").lines().nth(1).unwrap());
    assert_eq!(last(&run(&["-x", "1", "-d", "96"])).unwrap()["tokens"], 96);
}

#[test]
fn unshuffled_training_reads_the_batches_of_a_validation() {
    let (_dir, data, _) = token_files(384, 170);
    // The learning rate is 0, so the loss depends on the tokens alone.
    let base = ["-i", &data, "-j", &data, "-s", "0", "-l", "0", "-d", "96", "-m", "3", "-n", "0"];
    let run = |more: &[&str]| train(&[&base, more].concat());
    // The first three batches of the data.
    let distance = Ran::first_distance;
    let ordered = run(&["--shuffle", "0"]);
    assert!(distance(&ordered) < 2e-6, "{}", distance(&ordered));
    assert_eq!(ordered.row("epoch"), Some("288 tokens in 9 batches, 3 steps, in order"));
    assert_eq!(ordered.steps_with("trl"), [0, 1, 2]);
    // Three steps rather than 384 / 96, since the last token needs a target. Then the data starts over.
    let (once, twice) = (ordered.losses(), run(&["--shuffle", "0", "-x", "6"]).losses());
    assert_eq!((&twice[..3], &twice[3..]), (&once[..], &once[..]));
    // Steps of 32 tokens read the same tokens in the same order.
    let of_32 = train(&["-i", &data, "-s", "0", "-l", "0", "-n", "0", "--shuffle", "0", "-d", "32"]).losses();
    for (loss, parts) in once.iter().zip(of_32.chunks(3)) {
        assert!((loss - parts.iter().sum::<f64>() / 3.0).abs() < 1e-5, "{once:?} {of_32:?}");
    }
    for shuffled in [run(&[]), run(&["--shuffle", "1"])] {
        assert!(distance(&shuffled) > 2e-5, "{}", distance(&shuffled));
        assert_eq!(shuffled.config()["shuffle"].as_bool(), Some(true));
        assert_eq!(shuffled.row("epoch"), Some("352 tokens in 11 batches, 3 steps, shuffled"));
    }
    // A file can set it, and the flag overrides the file.
    let file = ordered.file("config.toml");
    let file = ["--config", file.to_str().unwrap()];
    assert_eq!(train(&file).losses(), once);
    assert_ne!(train(&[&file[..], &["--shuffle", "1"]].concat()).losses(), once);
    let args = [&["train"], TINY, &["-i", &data, "--shuffle", "0", "-d", "416"]].concat();
    rejects(&args, &["holds 384 tokens, expected at least 417", "--total-batch", "--shuffle 1"]);
}

#[test]
fn weight_decay_applies_to_matrices_only() {
    let run = |decay| train(&["-x", "3", "-c", decay, "-l", "0.01", "-k", "constant", "-v", "0", "-s", "0"]);
    let (plain, decayed) = (run("0").weights(3), run("5").weights(3));
    let square = |values: &[f32]| values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
    // Each step scales wte (256, 16) by 0.95. lnfw, the second to last 16 values of the file, has no weight decay.
    let share = square(&decayed[..256 * 16]) / square(&plain[..256 * 16]);
    assert!(share < 0.95, "{share}");
    let lnfw = plain.len() - 32..plain.len() - 16;
    let share = square(&decayed[lnfw.clone()]) / square(&plain[lnfw]);
    assert!((share - 1.0).abs() < 0.05, "{share}");
}

/// llm.c instead takes a different batch for each gradient accumulation step.
#[test]
fn overfitting_one_batch_does_not_depend_on_gradient_accumulation() {
    let base = ["-a", "1", "-x", "40", "-l", "0.03", "-k", "constant", "-s", "0", "-m", "1", "-n", "0"];
    let run = |d: &str| train(&[&base, &["-d", d][..]].concat());
    let one = run("32");
    let losses = one.losses();
    assert!(losses[39] < 0.3 * losses[0], "{losses:?}");
    // The gradient is the same up to the order of summation. Such differences grow: after ten steps they exceed 1e-5 on some processors.
    for d in ["64", "128"] {
        for (step, (got, expected)) in run(d).losses().iter().zip(&losses).take(6).enumerate() {
            assert!((got / expected - 1.0).abs() < 1e-6, "step {step}, -d {d}: {got}, expected {expected}");
        }
    }
    // It is the first batch of the validation data.
    assert_eq!(one.logged("tel")[0], one.logged("trl")[0]);
    assert!(one.row("training data").unwrap().contains("one batch, repeated"));
    let other = train(&["-x", "2", "-s", "0", "-m", "1"]);
    assert!(one.first_distance() < 2e-6 && other.first_distance() > 2e-6, "{}", other.first_distance());

    let (_dir, data, val) = token_files(400, 170);
    let first = |more: &[&str]| train(&[&["-x", "1", "-s", "0", "-m", "1", "-a"], more].concat()).losses()[0];
    let of_val = first(&["-i", &data, "-j", &val]).to_bits();
    assert_eq!(of_val, first(&["-i", &val]).to_bits());
    assert_ne!(of_val, first(&["-i", &data]).to_bits());
}

#[test]
fn overfitting_continues_with_the_same_batch_after_a_resume() {
    let args = ["-a", "1", "-x", "4", "-n", "2", "-s", "0", "-d", "64", "-l", "0.01"];
    let ran = train(&args);
    let losses = ran.logged("trl");
    // Simulates a run that was killed before its last checkpoint was complete.
    for name in ["DONE_00000004", "model_00000004.bin", "state_00000004_00000.bin", "run_00000004.json"] {
        fs::remove_file(ran.file(name)).unwrap();
    }
    let config = ran.file("config.toml");
    let output = llm_rs(&["train", "--config", config.to_str().unwrap(), "--resume"]);
    let (printed, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && printed.contains("resumed after 2 of 4 steps"), "{printed}{err}");
    assert_eq!(ran.logged("trl"), losses);
}

#[test]
fn memory_flags_change_the_plan_and_not_the_losses() {
    let run = |more: &[&str]| train(&[&["-x", "3", "-v", "0", "-s", "0", "-n", "0"], more].concat());
    let plain = run(&[]);
    for more in [&["-r", "1"], &["-r", "2"], &["-w", "0"], &["-f", "1"], &["-ge", "2"]] {
        assert_eq!(run(more).losses(), plain.losses(), "{more:?}");
    }
    let of = |level: &str| {
        let ran = run(&["-r", level, "--verbose"]);
        let named = |name: &str| ran.printed.lines().find(|line| line.starts_with(&format!("  {name}  "))).is_some();
        let shape = ran.printed.lines().find(|line| line.starts_with("  activated")).unwrap().to_owned();
        (shape.contains("(2, 2, 16, 64)"), named("ln1"), ran.row("recomputation").unwrap().to_owned())
    };
    assert_eq!(of("0"), (true, true, "none".into()));
    assert_eq!(of("1"), (false, true, "activation".into()));
    assert_eq!(of("2"), (false, false, "activation and norms".into()));
    // The CPU engine has neither fused GELU nor TF32.
    let config = run(&["-ge", "2", "--tf32"]).config();
    assert_eq!((config["gelu-fusion"].as_integer(), config["tf32"].as_bool()), (Some(0), Some(false)));
}

#[test]
fn missing_gpu_information_does_not_stop_a_run() {
    let ran = train(&["-x", "1", "-lg", "1", "-s", "0", "-v", "0"]);
    assert_eq!(ran.row("GPU information"), Some("none: the run uses the CPU"));
    assert_eq!(train(&["-x", "1", "-lg", "-1", "-s", "0", "-v", "0"]).row("GPU information"), None);
}

#[test]
fn flags_override_the_file_and_the_file_overrides_defaults() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.toml");
    let file = path.to_str().unwrap();
    fs::write(
        &path,
        "# numbers of every kind\nsteps = 3\nlr = 2e-2\nschedule = 'linear'\nrecompute = 1\ntf32 = true\n\
                      val-every = 0\nsample-every = -1\nweight-decay = 1\noverfit-one-batch = false\nmodel = \"d6\"\n",
    )
    .unwrap();
    // The sizes in TINY replace those of the model in the file.
    let ran = train(&["--config", file, "-l", "0.01", "-r2"]);
    let config = ran.config();
    let number = |key: &str| config[key].as_integer().unwrap();
    assert_eq!((number("steps"), number("recompute"), number("val-every"), number("seed")), (3, 2, 0, 42));
    assert_eq!((config["lr"].as_float(), config["weight-decay"].as_float()), (Some(0.01), Some(1.0)));
    assert_eq!((config["schedule"].as_str(), config["model"].as_str()), (Some("linear"), Some("d6")));
    assert_eq!(ran.logged("lr"), ["0.010000", "0.007000", "0.004000"]);
    // --model replaces the sizes in the file.
    fs::write(&path, "layers = 3\nheads = 3\nchannels = 48\nsteps = 1\n").unwrap();
    let printed = llm_rs(&["train", "--config", file, "--model", "d6", "--dry-run", "--device", "cpu"]).stdout;
    assert!(String::from_utf8_lossy(&printed).contains("6 layers, 6 heads, 384 channels"));
    // The file may give a flag that another flag requires.
    let (_dir, data, val) = token_files(400, 170);
    fs::write(&path, format!("train = '{data}'\nsteps = 1\n")).unwrap();
    assert_eq!(train(&["--config", file, "-j", &val]).steps_with("tel"), [0, 1]);
}

#[test]
fn the_saved_config_reproduces_a_run() {
    let first = train(&["-x", "4", "-l", "0.0123", "-k", "wsd", "-q", "0.3", "-d", "64", "-a", "-r", "2", "-g", "7"]);
    let dir = tempfile::tempdir().unwrap();
    let again = dir.path().join("again");
    let config = first.file("config.toml");
    let output = llm_rs(&["train", "--config", config.to_str().unwrap(), "--out", again.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(fs::read_to_string(again.join("main.log")).unwrap(), first.text("main.log"));
    let without_out =
        |text: &str| text.lines().filter(|line| !line.starts_with("out = ")).collect::<Vec<_>>().join("\n");
    let copy = fs::read_to_string(again.join("config.toml")).unwrap();
    assert_eq!(without_out(&copy), without_out(&first.text("config.toml")));
    // The settings of a longer run do not have the end of this one.
    let longer = train(&["--config", config.to_str().unwrap(), "-x", "6"]);
    assert!(longer.file("DONE_00000006").exists() && !longer.file("DONE_00000004").exists(), "{}", longer.printed);
    assert_eq!(longer.row("samples"), Some("at the end, 7 tokens"));
}

#[test]
fn errors_in_a_file_name_the_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.toml");
    let refused = |text: &str, parts: &[&str]| {
        fs::write(&path, text).unwrap();
        rejects(&["train", "--config", path.to_str().unwrap(), "--dry-run"], &[&["run.toml"], parts].concat());
    };
    refused("steps = 2\nbatch_size = 3", &["line 2: batch_size: unknown key", "did you mean 'batch'?"]);
    refused("\n\nlearning-rate = 1", &["line 3", "did you mean "]);
    refused("Warmup = 1", &["line 1", "did you mean 'warmup'?"]);
    refused("config = 'x.toml'", &["line 1: config: unknown key"]);
    refused("steps = 2\nlr = -1", &["line 2: lr = -1", "at least 0"]);
    refused("lr = nan", &["lr = nan", "at least 0"]);
    refused("schedule = 'cosin'", &["line 1: schedule", "cosine, linear, constant, wsd"]);
    refused("steps = 2.0", &["steps = 2.0", "a whole number"]);
    refused("batch = true", &["batch = true", "a whole number"]);
    refused("recompute = 4", &["recompute = 4", "expected 0, 1, 2 or 3"]);
    refused("master-weights = 3", &["master-weights = 3", "0 (none), 1 (f32) or 2 (remainder)"]);
    refused("moments = 'f16'", &["line 1: moments", "f32, bf16"]);
    refused("dry-run = 1", &["dry-run = 1", "true or false"]);
    refused("steps = [1]", &["line 1: steps", "found array"]);
    refused("[batch]\nsize = 1", &["line 1: batch", "found table"]);
    refused("steps = 1\nsteps = 2", &["line 2", "duplicate key"]);
    refused("seed = 1\nsteps = \n", &["line 2"]);
    rejects(&["train", "--config", "/nowhere.toml"], &["--config /nowhere.toml", "No such file"]);
    fs::write(&path, [b'a', 0xff]).unwrap();
    rejects(&["train", "--config", path.to_str().unwrap()], &["run.toml", "UTF-8"]);
    // An error on the command line is not attributed to the file.
    fs::write(&path, "lr = 1").unwrap();
    let output = llm_rs(&["train", "--lr", "much", "--config", path.to_str().unwrap()]);
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && err.contains("'much' for '--lr <LR>'"), "{err}");
}

#[test]
fn a_dry_run_prints_the_plan_and_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let (_dir, data, val) = token_files(400, 170);
    let plan = |more: &[&str]| {
        let base = ["train", "--dry-run", "-i", &data, "-j", &val, "-o", out.to_str().unwrap(), "-b", "2", "-t", "16"];
        let output = llm_rs(&[&base, more].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let shown = plan(&["--model", "d6", "--device", "cpu", "-d", "64"]);
    for part in [
        "train.bin, 400 tokens",
        "val.bin, 170 tokens",
        "384 tokens in 12 batches, 6 steps",
        "2 x 16 tokens x 2 = 64 per step",
        "6, 1.00 epochs",
        "Total",
        "planned: 0.",
        " is free); nothing was computed or written",
    ] {
        assert!(shown.contains(part), "expected '{part}' in: {shown}");
    }
    // Planning for a GPU works without one.
    let shown = plan(&["--model", "d6", "--device", "cuda", "-w", "0"]);
    assert!(shown.contains("bf16, updated with stochastic rounding") && !shown.contains("  master "), "{shown}");
    assert!(plan(&["--model", "d6", "--device", "cuda"]).contains("  master "));
    let shown = plan(&["--model", "d6", "--device", "cuda", "-w", "2", "--moments", "bf16", "--verbose"]);
    assert!(shown.contains("bf16, master weights in f32 as 16-bit remainders, moments in bf16"), "{shown}");
    assert!(shown.contains("  master remainder ") && shown.contains(" u16 "), "{shown}");
    assert!(!out.exists());
    // A dry run reports the errors of the real run.
    rejects(&["train", "--dry-run", "-i", "/nowhere.bin"], &["/nowhere.bin"]);
    let huge = ["train", "--dry-run", "--device", "cpu", "--model", "gpt3:c12288"];
    rejects(&huge, &["does not fit", "not even --batch 1 fits"]);
}
