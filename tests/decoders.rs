//! The program with Llama, Qwen and nanochat's shape, small and on a CPU: training, resuming, export to transformers and to llm.c.

mod common;

use common::{fail, succeed, text};
use std::fs;
use std::path::{Path, PathBuf};

/// A small model of each family.
const MODELS: [&[&str]; 4] = [
    &["--model", "llama3:1b", "--layers", "2", "--channels", "32", "--heads", "4", "--kv-heads", "2", "--ffn", "56"],
    &["--model", "qwen2.5:0.5b", "--layers", "2", "--channels", "32", "--heads", "4", "--kv-heads", "2", "--ffn", "56"],
    &[
        "--model",
        "qwen3:0.6b",
        "--layers",
        "2",
        "--channels",
        "32",
        "--heads",
        "4",
        "--kv-heads",
        "2",
        "--head-size",
        "16",
    ],
    &["--model", "modern:d2", "--channels", "32", "--heads", "2"],
];

/// Trains on the built-in text, with batches of 2 x 16 tokens.
fn train(model: &[&str], out: &Path, steps: &str, more: &[&str]) -> String {
    let batch = ["--batch", "2", "--seq", "16", "--device", "cpu", "--val-every", "0", "--sample-every", "0"];
    let run =
        ["--steps", steps, "--checkpoint-every", "2", "--out", text(out), "--schedule", "constant", "--lr", "0.01"];
    succeed(&[&["train"], model, &batch, &run, more].concat())
}

fn model_file(run: &Path, step: usize) -> PathBuf {
    run.join(checkpoint::directory::decoder_name(step))
}

/// Returns the validation loss that `eval` prints.
fn loss(model: &Path, tokens: &Path) -> f64 {
    let args = ["eval", "--model", text(model), "--val", text(tokens), "-m", "4", "--batch", "2", "--seq", "16"];
    let printed = succeed(&[&args[..], &["--device", "cpu"]].concat());
    printed.split(' ').nth(2).unwrap().parse().unwrap()
}

fn write_tokens(path: &Path) {
    let ids: Vec<u16> = (0..600).map(|i| b"to be, or not to be; "[i % 21].into()).collect();
    data::tokens::write(path, &ids, data::tokens::Width::U16).unwrap();
}

#[test]
fn runs_resume_with_the_same_bits_and_sample() {
    for model in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let (whole, resumed) = (dir.path().join("whole"), dir.path().join("resumed"));
        train(model, &whole, "4", &[]);
        fs::create_dir(&resumed).unwrap();
        for entry in fs::read_dir(&whole).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if !name.contains("00000004") {
                fs::copy(whole.join(&name), resumed.join(&name)).unwrap();
            }
        }
        train(model, &resumed, "4", &["--resume"]);
        let bytes = |run: &Path, step| fs::read(model_file(run, step)).unwrap();
        assert_ne!(bytes(&whole, 2), bytes(&whole, 4), "{model:?}");
        assert_eq!(bytes(&whole, 4), bytes(&resumed, 4), "{model:?}");
        let state = |run: &Path| fs::read(run.join(checkpoint::directory::state_name(4, 0))).unwrap();
        assert_eq!(state(&whole), state(&resumed), "{model:?}");
        // The tensors are readable by any program for safetensors.
        let file = bytes(&whole, 4);
        let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
        assert_eq!(tensors.tensor("attprojw").unwrap().shape()[0], 2, "{model:?}");
        // Resuming with other layers is an error that names both shapes.
        let other = ["train", "--resume", "--out", text(&whole), "--layers", "3", "--heads", "2", "--channels", "32"];
        fail(&[&other[..], &["--device", "cpu", "--seq", "16"]].concat(), &["expected a model with 3 layers, 2 heads"]);
        let args = ["sample", "--model", text(&whole), "--prompt", "to be", "-g", "8", "--temperature", "0"];
        succeed(&[&args[..], &["--device", "cpu"]].concat());
    }
}

#[test]
fn every_recompute_level_gives_the_same_bits() {
    for model in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let files = ["0", "1", "2", "3"].map(|level| {
            let run = dir.path().join(level);
            train(model, &run, "2", &["--recompute", level]);
            fs::read(model_file(&run, 2)).unwrap()
        });
        assert!(files.iter().all(|file| *file == files[0]), "{model:?}");
    }
}

#[test]
fn hugging_face_directories_keep_every_bit() {
    for model in &MODELS[..3] {
        let dir = tempfile::tempdir().unwrap();
        let (run, hf, again) = (dir.path().join("run"), dir.path().join("hf"), dir.path().join("again"));
        let tokens = dir.path().join("tokens.bin");
        write_tokens(&tokens);
        train(model, &run, "2", &[]);
        succeed(&["export", "--format", "hf", text(&run), text(&hf)]);
        succeed(&["export", "--format", "hf", text(&hf), text(&again)]);
        let weights = |directory: &Path| fs::read(directory.join("model.safetensors")).unwrap();
        assert_eq!(weights(&hf), weights(&again), "{model:?}");
        assert_eq!(loss(&run, &tokens).to_bits(), loss(&hf, &tokens).to_bits(), "{model:?}");
    }
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    train(MODELS[3], &run, "2", &[]);
    let out = dir.path().join("hf");
    fail(&["export", "--format", "hf", text(&run), text(&out)], &["transformers has no class for it"]);
    assert!(!out.exists());
}

#[test]
fn llm_c_reads_and_writes_llama() {
    let dir = tempfile::tempdir().unwrap();
    let [run, file, hf, again] = ["run", "llama.bin", "hf", "again.bin"].map(|name| dir.path().join(name));
    let tokens = dir.path().join("tokens.bin");
    write_tokens(&tokens);
    // The 8B model has the scaling that llm.c applies.
    let model = ["--model", "llama3:8b", "--layers", "2", "--channels", "32", "--heads", "4", "--kv-heads", "2"];
    train(&model, &run, "2", &[]);
    succeed(&["export", "--format", "llmc", text(&run), text(&file)]);
    succeed(&["export", "--format", "hf", text(&file), text(&hf)]);
    succeed(&["export", "--format", "llmc", text(&hf), text(&again)]);
    let bytes = fs::read(&file).unwrap();
    assert_eq!(bytes, fs::read(&again).unwrap());
    let words: Vec<i32> = bytes[..48].as_chunks().0.iter().map(|&word| i32::from_le_bytes(word)).collect();
    assert_eq!(words[..8], [20240803, 3, 131_072, 256, 2, 4, 2, 32]);
    assert_eq!(words[9..], [1, 3, 1]);
    // Interleaved pairs change the order of sums, but not the model.
    let (exported, interleaved) = (loss(&hf, &tokens), loss(&file, &tokens));
    assert!((exported - interleaved).abs() < 1e-5, "{exported} {interleaved}");
    assert_eq!(loss(&run, &tokens).to_bits(), exported.to_bits());
}

#[test]
fn impossible_shapes_are_errors() {
    for (args, parts) in [
        (&["--model", "llama3:1b", "--kv-heads", "3"][..], &["3 key-value heads do not divide 32 heads"][..]),
        (&["--model", "llama3:1b", "--heads", "3"], &["3 heads do not divide 2048 channels"]),
        (&["--model", "llama3:2b"], &["unknown model 'llama3:2b'", "llama3:N (1b, 3b, 8b)"]),
        (&["--model", "modern:d1"], &["unknown model 'modern:d1'"]),
        (&["--layers", "2", "--kv-heads", "1"], &["expected all three without --model"]),
    ] {
        fail(&[&["train", "--device", "cpu"][..], args].concat(), parts);
    }
}
