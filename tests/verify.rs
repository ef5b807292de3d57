//! The `verify` command on small models with PyTorch's results (`scripts/pytorch_reference.py` and
//! `scripts/llmc_llama_reference.py`): it passes on every engine, and it detects wrong values and invalid files.

use engine::Engine;
use engine::cpu::Cpu;
use engine::cuda::{EmulatedGpu, Precision, emulated};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use verify::llmc::Verification;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/tiny.bin");
const STATE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/tiny_debug_state.bin");
const HEADER: usize = 1024;

fn data(name: &str) -> String {
    format!("{}/../tests/data/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Returns PyTorch's losses with the settings of llm.c's test.
fn expected_losses(model: &str) -> Vec<f32> {
    let text = fs::read_to_string(data(&format!("{model}_losses.json"))).unwrap();
    let runs: serde_json::Value = serde_json::from_str(&text).unwrap();
    runs[0]["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap() as f32).collect()
}

/// A temporary directory with copies of the model file, the debug state and the losses.
struct Files {
    directory: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::copy(MODEL, directory.path().join("model.bin")).unwrap();
        fs::copy(STATE, directory.path().join("state.bin")).unwrap();
        let files = Self { directory };
        files.write_losses(&expected_losses("tiny"));
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn write_losses(&self, losses: &[f32]) {
        let lines: Vec<_> = losses.iter().map(f32::to_string).collect();
        fs::write(self.path("losses.txt"), lines.join("\n")).unwrap();
    }

    /// Runs `verify` and returns whether it succeeds, and its output.
    fn verify(&self) -> (bool, String) {
        let output = Command::new(env!("CARGO_BIN_EXE_llm-rs"))
            .args(["verify", "--device", "cpu", "--losses"])
            .args(["losses.txt", "model.bin", "state.bin"].map(|name| self.path(name)))
            .output()
            .unwrap();
        (output.status.success(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    }

    /// Overwrites bytes of a file.
    fn overwrite(&self, name: &str, at: usize, bytes: &[u8]) {
        let mut all = fs::read(self.path(name)).unwrap();
        all[at..at + bytes.len()].copy_from_slice(bytes);
        fs::write(self.path(name), all).unwrap();
    }

    /// Adds `amount` to the float at offset `at` of a file.
    fn add(&self, name: &str, at: usize, amount: f32) {
        let all = fs::read(self.path(name)).unwrap();
        let old = f32::from_le_bytes(all[at..at + 4].try_into().unwrap());
        self.overwrite(name, at, &(old + amount).to_le_bytes());
    }
}

#[test]
fn verify_command_passes_against_pytorch() {
    let (ok, text) = Files::new().verify();
    assert!(ok, "{text}");
    for tensor in ["logits", "loss", "dwte", "dwpe", "dqkvw", "dlnfb", "step 10: loss"] {
        assert!(text.contains(tensor), "{tensor}: {text}");
    }
    assert!(text.contains("\noverall okay: 1\n") && !text.contains("FAILED"), "{text}");
}

#[test]
fn verify_command_prints_json() {
    let files = Files::new();
    let output = Command::new(env!("CARGO_BIN_EXE_llm-rs"))
        .args(["verify", "--device", "cpu", "--json", "--losses"])
        .args(["losses.txt", "model.bin", "state.bin"].map(|name| files.path(name)))
        .output()
        .unwrap();
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let comparisons = json["comparisons"].as_array().unwrap();
    assert_eq!((comparisons.len(), json["losses"].as_array().unwrap().len()), (2 + 16 + 10, 10), "{json}");
    assert!(json["okay"] == true && comparisons.iter().all(|comparison| comparison["okay"] == true), "{json}");
    assert!(comparisons[0]["name"] == "logits" && comparisons[0]["allowed"]["relative"].is_f64(), "{json}");
}

/// Checks an engine with a model that has a head size of the GPU kernels.
fn assert_matches_pytorch(engine: &mut dyn Engine, tf32: bool) {
    let (model, state) = (data("wide.bin"), data("wide_debug_state.bin"));
    let mut verification = Verification::open(Path::new(&model), Path::new(&state), engine, tf32).unwrap();
    let mut comparisons = verification.gradients().unwrap();
    let losses = verification.steps(10).unwrap();
    comparisons.extend(verification.compare_losses(&losses, &expected_losses("wide")));
    assert_eq!(comparisons.len(), 2 + 16 + 10);
    let failed: Vec<_> = comparisons.iter().filter(|c| !c.ok()).collect();
    assert!(failed.is_empty(), "{failed:#?} of {comparisons:#?}");
}

/// A correct model exceeds the bounds for fp32, so TF32 has its own.
#[test]
fn tf32_matches_pytorch_within_its_own_bounds() {
    let tf32 = || emulated(EmulatedGpu { tf32: true, ..EmulatedGpu::default() }, Precision::Fp32, None, false);
    assert_matches_pytorch(&mut *tf32(), true);
    let (model, state, mut engine) = (data("wide.bin"), data("wide_debug_state.bin"), tf32());
    let mut verification = Verification::open(Path::new(&model), Path::new(&state), &mut *engine, false).unwrap();
    let comparisons = verification.gradients().unwrap();
    assert!(comparisons.iter().filter(|c| !c.ok()).count() > 5, "{comparisons:#?}");
}

#[test]
fn cpu_engine_matches_pytorch() {
    assert_matches_pytorch(&mut Cpu::new(), false);
}

#[test]
fn f32_kernels_match_pytorch() {
    assert_matches_pytorch(&mut *emulated(EmulatedGpu::new(false), Precision::Fp32, None, false), false);
}

#[test]
fn bf16_kernels_match_pytorch() {
    assert_matches_pytorch(&mut *emulated(EmulatedGpu::new(false), Precision::Bf16, None, false), false);
    assert_matches_pytorch(&mut *emulated(EmulatedGpu::new(true), Precision::Bf16, None, false), false);
}

/// The model has V = 97, Vp = 128, C = 48, L = 2 and maxT = 20; the batch has B = 2 and T = 16.
#[test]
fn verify_command_detects_a_single_wrong_value() {
    let fails = |change: &dyn Fn(&Files), tensors: &[&str]| {
        let files = Files::new();
        change(&files);
        let (ok, text) = files.verify();
        assert!(!ok && text.contains("\noverall okay: 0\n"), "{text}");
        for tensor in tensors {
            let line = text.lines().find(|line| line.starts_with(tensor)).unwrap_or_else(|| panic!("{tensor}: {text}"));
            assert!(line.contains("FAILED"), "{tensor}: {text}");
        }
    };
    // The first element of the last LayerNorm's bias, which affects all logits.
    let lnfb = fs::metadata(MODEL).unwrap().len() as usize - 4 * 48;
    fails(&|files| files.add("model.bin", lnfb, 0.1), &["logits", "loss", "dlnfw", "step  1"]);
    let logits = HEADER + 4 * (2 * 2 * 16);
    fails(&|files| files.add("state.bin", logits + 4 * 1000, 0.05), &["logits"]);
    let loss = logits + 4 * 2 * 16 * 97;
    fails(&|files| files.add("state.bin", loss, 1e-4), &["loss"]);
    let dwpe = loss + 4 + 4 * 128 * 48;
    fails(&|files| files.add("state.bin", dwpe + 4 * 48, 0.01), &["dwpe"]);
    fails(&|files| files.overwrite("state.bin", dwpe, &f32::NAN.to_le_bytes()), &["dwpe"]);
    // Padding rows of wte have no gradient.
    fails(&|files| files.add("state.bin", dwpe - 4, 0.5), &["dwte"]);
    let change_ninth_loss = |files: &Files| {
        let mut losses = expected_losses("tiny");
        losses[8] += 1e-4;
        files.write_losses(&losses);
    };
    fails(&change_ninth_loss, &["step  9"]);
}

#[test]
fn verify_command_rejects_invalid_files() {
    let refusal = |change: &dyn Fn(&Files)| {
        let files = Files::new();
        change(&files);
        let (ok, text) = files.verify();
        assert!(!ok, "{text}");
        text
    };
    let word = |i: usize, value: i32| refusal(&|files| files.overwrite("state.bin", 4 * i, &value.to_le_bytes()));
    let text = word(0, 20240326);
    assert!(
        text.contains("state.bin: not a valid debug state: expected magic 20240327 or 20240803, found 20240326"),
        "{text}"
    );
    let text = word(1, 1);
    assert!(text.contains("expected debug state version 2, found 1"), "{text}");
    let text = word(2, -1);
    assert!(text.contains("found B = -1, T = 16"), "{text}");
    let text = word(3, 21);
    assert!(text.contains("expected sequences of at most 20 tokens, the model's limit, found T = 21"), "{text}");
    let text = word(2, i32::MAX);
    assert!(text.contains("truncated") && text.contains("expected"), "{text}");
    let text = word(256 + 3, 97);
    assert!(text.contains("inputs[3]: expected a token below 97, found 97"), "{text}");

    let length = fs::metadata(STATE).unwrap().len();
    let cut = |length: u64| {
        refusal(&|files| {
            let file = fs::File::options().write(true).open(files.path("state.bin")).unwrap();
            file.set_len(length).unwrap();
        })
    };
    assert!(cut(100).contains("expected a header of 1024 bytes, found 100 bytes"));
    assert!(cut(length - 1).contains("truncated"));
    assert!(cut(length + 1).contains("too long"));

    let losses = |text: &str| refusal(&|files| fs::write(files.path("losses.txt"), text).unwrap());
    assert!(losses("1.0\n2.0\n").contains("expected 10 losses, one per line, found 2"));
    assert!(losses("1.0\nabout 2\n").contains("line 2: expected a loss, found 'about 2'"));
    let text = refusal(&|files| fs::remove_file(files.path("state.bin")).unwrap());
    assert!(text.contains("cannot open debug state"), "{text}");
}

/// A temporary directory with the Llama of llm.c's format and its debug state.
fn llama_files() -> Files {
    let directory = tempfile::tempdir().unwrap();
    fs::copy(data("llama.bin"), directory.path().join("model.bin")).unwrap();
    fs::copy(data("llama_debug_state.bin"), directory.path().join("state.bin")).unwrap();
    Files { directory }
}

/// Runs a command of the program on the CPU and returns whether it succeeds, and its output.
fn llm_rs(args: &[&str], paths: &[PathBuf]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_llm-rs")).args(args).args(paths).output().unwrap();
    (output.status.success(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
}

fn verify_llama(files: &Files, model: &str) -> (bool, String) {
    llm_rs(&["verify", "--device", "cpu"], &[files.path(model), files.path("state.bin")])
}

#[test]
fn the_debug_state_of_llm_cs_llama_is_verified() {
    let files = llama_files();
    let (ok, text) = verify_llama(&files, "model.bin");
    assert!(ok, "{text}");
    for tensor in ["logits", "dwte", "dlm_head", "dqkvw", "dfcw", "dlnfw"] {
        assert!(text.lines().any(|line| line.starts_with(tensor) && line.ends_with("ok")), "{tensor}: {text}");
    }
    // The losses in the file are compared without --losses.
    let step = text.lines().find(|line| line.starts_with("step 10: loss")).unwrap();
    assert!(step.contains("difference") && step.ends_with("ok"), "{text}");

    // A Hugging Face directory has half-split pairs and separate tensors of queries, keys, values, up and gate.
    let (exported, text) =
        llm_rs(&["export", "--format", "hf", "--dtype", "fp32"], &[files.path("model.bin"), files.path("hf")]);
    assert!(exported, "{text}");
    let (ok, text) = verify_llama(&files, "hf");
    assert!(ok && text.contains("dlm_head"), "{text}");

    // The head has the values of the embedding. If they are tied, their gradients are one sum, and the steps differ.
    let config = fs::read_to_string(files.path("hf/config.json")).unwrap();
    let tied = config.replace(r#""tie_word_embeddings": false"#, r#""tie_word_embeddings": true"#);
    assert_ne!(config, tied);
    fs::write(files.path("hf/config.json"), tied).unwrap();
    let (ok, text) = verify_llama(&files, "hf");
    assert!(ok && text.contains("dwte") && !text.contains("dlm_head") && !text.contains("difference"), "{text}");
}

/// The model has V = 97, C = 48, L = 2, NH = 4, KV = 2, F = 64 and maxT = 20; the batch has B = 2 and T = 16.
#[test]
fn a_wrong_value_in_the_debug_state_of_a_llama_is_detected() {
    let check = |change: &dyn Fn(&Files)| {
        let files = llama_files();
        change(&files);
        let (ok, text) = verify_llama(&files, "model.bin");
        assert!(!ok, "{text}");
        text
    };
    let gradients = HEADER + 4 * (2 * 2 * 16 + 2 * 16 * 97 + 1);
    let (wte, ln1w) = (97 * 48, 2 * 48);
    let lm_head = gradients + 4 * wte;
    let ln1b = lm_head + 4 * (wte + ln1w);
    let qkvw = ln1b + 4 * ln1w;
    let key = qkvw + 4 * 48 * 48;
    for (at, tensor) in [(gradients, "dwte"), (lm_head, "dlm_head"), (qkvw, "dqkvw"), (key, "dqkvw")] {
        let text = check(&|files| files.add("state.bin", at, 0.5));
        assert!(text.lines().any(|line| line.starts_with(tensor) && line.ends_with("FAILED")), "{tensor}: {text}");
    }
    let text = check(&|files| files.add("state.bin", ln1b + 4, 0.5));
    assert!(text.contains("expected zeros in place of the gradients of biases, found 0.5"), "{text}");
    let length = fs::metadata(data("llama_debug_state.bin")).unwrap().len() as usize;
    let ninth_loss = length - 4 * (10 + 2);
    let text = check(&|files| files.add("state.bin", ninth_loss, 1e-3));
    assert!(text.lines().any(|line| line.starts_with("step  9") && line.ends_with("FAILED")), "{text}");

    let word = |i: usize, value: i32| check(&|files| files.overwrite("state.bin", 4 * i, &value.to_le_bytes()));
    let text = word(0, 20240326);
    assert!(text.contains("expected magic 20240327 or 20240803, found 20240326"), "{text}");
    assert!(word(1, 2).contains("expected debug state version 3, found 2"));
    assert!(word(4, 11).contains("truncated"));
    assert!(word(4, -1).contains("expected a number of steps of at least 0, found -1"));
    let text = check(&|files| _ = fs::copy(MODEL, files.path("model.bin")).unwrap());
    assert!(text.contains("found one of llm.c's Llama, which has no wpe"), "{text}");
    let text = check(&|files| _ = fs::copy(STATE, files.path("state.bin")).unwrap());
    assert!(text.contains("belongs to another model"), "{text}");
}
