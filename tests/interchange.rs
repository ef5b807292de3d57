//! The program with models of other programs: every command reads a Hugging Face directory, and `export` writes one.

use crate::common::{succeed, text};
use data::tokens;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

const BATCH: [&str; 6] = ["--batch", "2", "--seq", "16", "--device", "cpu"];

/// Asserts that the program fails with one error that contains `part`.
fn fail(args: &[&str], part: &str) {
    crate::common::fail(args, &[part]);
}

/// Runs the program in a directory.
fn llm_rs_in(directory: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_llm-rs")).current_dir(directory).args(args).output().unwrap()
}

/// A trained model with a vocabulary of bytes, and token files.
struct Trained {
    dir: TempDir,
    run: PathBuf,
    tokens: PathBuf,
}

/// Trains a small model on the built-in corpus.
fn trained() -> Trained {
    let dir = tempfile::tempdir().unwrap();
    let (run, tokens) = (dir.path().join("run"), dir.path().join("val.bin"));
    let ids: Vec<u16> = (0..600).map(|i| b"to be, or not to be; "[i % 21].into()).collect();
    tokens::write(&tokens, &ids, tokens::Width::U16).unwrap();
    let shape = ["train", "--layers", "2", "--heads", "2", "--channels", "16", "--steps", "4", "--val-every", "0"];
    succeed(&[&shape[..], &BATCH, &["--sample-every", "0", "--out", text(&run)]].concat());
    Trained { dir, run, tokens }
}

/// Returns the validation loss that `eval` prints.
fn loss(model: &Path, tokens: &Path) -> String {
    let printed = succeed(&[&["eval", "--model", text(model), "--val", text(tokens), "-m", "4"][..], &BATCH].concat());
    printed.split(' ').nth(2).unwrap().to_owned()
}

#[test]
fn every_command_reads_an_exported_directory() {
    let Trained { dir, run, tokens } = trained();
    let file = run.join("model_00000004.bin");
    let out = dir.path().join("exports/hf");
    let printed = succeed(&["export", "--format", "hf", text(&run), text(&out)]);
    assert!(printed.contains("2 layers, 2 heads, 16 channels") && printed.contains("f32, "), "{printed}");
    assert!(printed.contains("byte-level tokenizer") && printed.contains("sample --model "), "{printed}");
    let losses = [&file, &run, &out].map(|model| loss(model, &tokens));
    assert!(losses.iter().all(|loss| *loss == losses[0]), "{losses:?}");

    let sample = |model: &Path| {
        let args = ["sample", "--model", text(model), "--prompt", "to be", "-g", "8", "--temperature", "0"];
        succeed(&[&args[..], &["--device", "cpu"]].concat())
    };
    assert_eq!(sample(&file), sample(&out));

    // Fine-tuning begins with the loss of the model, a fresh schedule and a fresh optimizer.
    let tuned = dir.path().join("tuned");
    let train = |more: &[&str]| {
        let args =
            ["train", "--model", text(&out), "--train", text(&tokens), "--val", text(&tokens), "--val-batches", "4"];
        succeed(&[&args[..], &BATCH, &["--steps", "2", "--lr", "0.01", "--warmup", "1"], more].concat())
    };
    let printed = train(&["--out", text(&tuned)]);
    assert!(printed.contains(&format!("val loss {}\n", losses[0])), "{}: {printed}", losses[0]);
    let log = fs::read_to_string(tuned.join("main.jsonl")).unwrap();
    let records: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let rates: Vec<f64> = records.iter().filter_map(|record| record["lr"].as_f64()).collect();
    assert!(rates.len() == 2 && (rates[0] - 0.01).abs() < 1e-8, "{rates:?}");
    assert!(loss(&tuned, &tokens).parse::<f64>().unwrap() < losses[0].parse().unwrap());
    // A resumed run does not need the directory, and does not read it again.
    let moved = dir.path().join("moved");
    fs::rename(&out, &moved).unwrap();
    let printed = succeed(&["train", "--config", text(&tuned.join("config.toml")), "--resume"]);
    assert!(printed.contains("resumed after 2 of 2 steps"), "{printed}");
    fs::rename(&moved, &out).unwrap();
    // The same for a directory with a name that looks like the name of a model.
    let in_exports = |args: &[&str]| {
        let output = llm_rs_in(out.parent().unwrap(), args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let train = ["train", "--model", "hf", "--train", text(&tokens), "--steps", "1", "--out", "run"];
    in_exports(&[&train[..], &BATCH].concat());
    fs::rename(&out, &moved).unwrap();
    in_exports(&["train", "--config", "run/config.toml", "--resume"]);
    fs::rename(&moved, &out).unwrap();

    let step = ["bench", "step", "--model", text(&out), "-x", "1", "-a", "1"];
    assert!(succeed(&[&step[..], &BATCH].concat()).contains("tokens/s"));
}

#[test]
fn llm_cs_reference_model_survives_the_round_trip() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data");
    let dir = tempfile::tempdir().unwrap();
    let [hf, bin, gguf] = ["hf", "again.bin", "model.gguf"].map(|name| dir.path().join(name));
    let original = data.join("tiny.bin");
    succeed(&["export", "--format", "hf", text(&original), text(&hf)]);
    succeed(&["export", "--format", "llmc", text(&hf), text(&bin)]);
    assert_eq!(fs::read(&bin).unwrap(), fs::read(&original).unwrap());
    // The exported directory has the logits, the loss and the gradients that PyTorch computed for the file.
    let state = data.join("tiny_debug_state.bin");
    let printed = succeed(&["verify", text(&hf), text(&state), "--device", "cpu"]);
    assert!(printed.contains("overall okay: 1"), "{printed}");
    fail(
        &["export", "--format", "gguf", text(&original), text(&gguf)],
        "expected a vocabulary of 50257 (GPT-2) or 256 (bytes) or a tokenizer.json",
    );
    let printed = succeed(&["export", "--format", "hf", "--dtype", "bf16", "--overwrite", text(&original), text(&hf)]);
    assert!(printed.contains("bf16, rounded from fp32, ") && printed.contains("no tokenizer"), "{printed}");
    assert!(printed.contains("note: there is no built-in tokenizer for a vocabulary of "), "{printed}");
}

#[test]
fn a_run_needs_no_flag() {
    let Trained { dir: _dir, run, tokens } = trained();
    let device = ["--device", "cpu"];
    let both = |args: &[&str]| {
        let with_flag = succeed(&[&args[..1], &["--model", text(&run)], &args[1..], &device].concat());
        let without = succeed(&[&args[..1], &[text(&run)], &args[1..], &device].concat());
        assert_eq!(with_flag, without, "{args:?}");
    };
    both(&["sample", "--prompt", "to be", "-g", "8"]);
    both(&["eval", "--val", text(&tokens), "--batch", "2", "--seq", "16"]);
    both(&["chat"]);
    for command in ["sample", "chat"] {
        fail(&[command], "<RUN|MODEL>");
        fail(&[command, text(&run), "--model", text(&run)], "cannot be used with");
    }
}

/// The program does not download models, so it says how to.
#[test]
fn names_of_models_on_the_hub_are_errors_that_say_how_to_download_them() {
    let dir = tempfile::tempdir().unwrap();
    let (tokens, out) = (dir.path().join("tokens.bin"), dir.path().join("out"));
    tokens::write(&tokens, &[1u16; 100], tokens::Width::U16).unwrap();
    let play = dir.path().join("play.txt");
    fs::write(&play, "to be").unwrap();
    let id = "openai-community/gpt2";
    let advice = "run `hf download openai-community/gpt2 --local-dir models/gpt2` and pass models/gpt2";
    for args in [
        &["train", "--model", id, "--train", text(&tokens)][..],
        &["sample", "--model", id],
        &["sample", id],
        &["chat", "--model", id],
        &["eval", "--model", id, "--val", text(&tokens)],
        &["export", "--format", "hf", id, text(&out)],
        &["serve", id],
        &["verify", id, text(&tokens)],
        &["data", "text", text(&play), "--out", text(&out), "--tokenizer", id],
        &["sample", "--model", "Qwen/Qwen2.5-0.5B-Instruct", "--tokenizer", id],
    ] {
        let advice =
            if args.contains(&"--tokenizer") && args[0] == "sample" { "models/Qwen2.5-0.5B-Instruct" } else { advice };
        fail(args, advice);
    }
    // Paths are not names.
    fs::create_dir(dir.path().join("models")).unwrap();
    for path in ["models/gpt2", "./openai-community/gpt2", "a/b/c", "a/b.bin"] {
        let output = llm_rs_in(dir.path(), &["sample", "--model", path]);
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(err.contains("cannot open model file") && !err.contains("hf download"), "{path}: {err}");
    }
}

#[test]
fn invalid_models_are_one_error_line() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let tokens = at("tokens.bin");
    tokens::write(&tokens, &[1u16; 100], tokens::Width::U16).unwrap();
    let needs_weights = "expected a model file (.bin) or a directory, found the name of a shape, which has no weights";
    let out = at("out");
    for name in ["gpt2", "d12"] {
        fail(&["eval", "--model", name, "--val", text(&tokens)], needs_weights);
        fail(&["sample", "--model", name], needs_weights);
        fail(&["export", "--format", "hf", name, text(&out)], needs_weights);
    }
    let empty = "expected config.json (a Hugging Face directory) or a complete checkpoint (the directory of a run), found neither";
    fail(&["export", "--format", "llmc", text(dir.path()), text(&out)], empty);
    fail(&["train", "--model", text(dir.path()), "--train", text(&tokens)], empty);
    fail(
        &["train", "--model", "no/such/directory", "--train", text(&tokens)],
        "--model: cannot open model file no/such/directory",
    );
    fail(&["train", "--model", "d13", "--train", text(&tokens)], "--model: unknown model 'd13'");
    fail(&["bench", "step", "--model", text(dir.path()), "--device", "cpu"], empty);
    // A directory above the one of the model, and a file beside the weights.
    let Trained { dir: above, run, .. } = trained();
    fail(&["sample", text(above.path())], &format!("found neither; pass one of those in it: {}", run.display()));
    for file in ["config.toml", "run_00000004.json"] {
        let advice = format!("found another file of a model; pass the directory {}", run.display());
        fail(&["sample", text(&run.join(file))], &advice);
    }
    fs::write(at("config.json"), r#"{"model_type": "opt"}"#).unwrap();
    let advice = format!("--model: {}/config.json: expected a model file", dir.path().display());
    fail(&["train", "--model", text(&at("config.json")), "--train", text(&tokens)], &advice);
    fail(
        &["sample", "--model", text(dir.path())],
        "config.json: model_type: expected gpt2 or llama or mistral or ministral or qwen2 or qwen3 or qwen3_moe or olmoe or nanochat or nanochat_full, found opt",
    );
    assert!(!out.exists());
}
