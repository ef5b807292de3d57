//! Muon as flags of `train`: training, resume, `config.toml` and errors. `crates/model/tests/steps/muon.rs` tests the optimizer itself.

use crate::common::{fail, succeed, text};
use std::fs;

const SMALL: [&str; 21] = [
    "train",
    "--device",
    "cpu",
    "--layers",
    "2",
    "--heads",
    "2",
    "--channels",
    "32",
    "--batch",
    "4",
    "--seq",
    "32",
    "--warmup",
    "0",
    "--sample-every",
    "0",
    "--val-every",
    "0",
    "--lr",
    "0.003",
];

/// Returns the losses of a run on the built-in text.
fn losses(dir: &std::path::Path) -> Vec<f64> {
    let log = fs::read_to_string(dir.join("main.jsonl")).unwrap();
    let value = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64();
    log.lines().filter_map(value).collect()
}

#[test]
fn training_lowers_the_loss_and_a_resumed_run_is_identical() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, again) = (dir.path().join("whole"), dir.path().join("again"));
    let muon = [
        "--optimizer",
        "muon",
        "--steps",
        "60",
        "--checkpoint-every",
        "30",
        "--muon-momentum-warmup",
        "40",
        "--schedule",
        "trapezoidal",
        "--warmdown",
        "0.3",
        "--muon-momentum-final",
        "0.9",
        "--weight-decay",
        "0.1",
        "--weight-decay-schedule",
        "cosine",
    ];
    let run =
        |out: &std::path::Path, more: &[&str]| succeed(&[&SMALL[..], &muon, &["--out", text(out)], more].concat());
    let additions = ["--muon-equilibrate", "--muon-renormalize", "--muon-variance", "--muon-cautious-decay"];
    let printed = run(&whole, &[&["--embedding-lr", "0.01"], &additions[..]].concat());
    assert!(printed.contains("Muon for the layers' matrices, peak 2.00e-2, momentum 0.95; AdamW, embeddings peak"));
    let losses = losses(&whole);
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    assert!(losses.len() == 60 && mean(&losses[50..]) < 0.75 * losses[0], "{losses:?}");
    let config = fs::read_to_string(whole.join("config.toml")).unwrap();
    for line in [
        "optimizer = \"muon\"",
        "muon-lr = 0.02",
        "muon-momentum = 0.95",
        "muon-momentum-warmup = 40",
        "muon-momentum-final = 0.9",
        "weight-decay-schedule = \"cosine\"",
        "muon-coefficients = \"polar-express\"",
        "muon-equilibrate = true",
        "muon-renormalize = true",
        "muon-variance = true",
        "muon-cautious-decay = true",
        "embedding-lr = 0.01",
    ] {
        assert!(config.lines().any(|found| found == line), "{line}: {config}");
    }
    fs::create_dir(&again).unwrap();
    for entry in fs::read_dir(&whole).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_file() && !name.contains("00000060") {
            fs::copy(&path, again.join(&name)).unwrap();
        }
    }
    // The configuration file states the whole optimizer.
    let config = whole.join("config.toml");
    let printed = succeed(&["train", "--config", text(&config), "--out", text(&again), "--resume"]);
    assert!(printed.contains("resumed after 30 of 60 steps"), "{printed}");
    for name in ["model_00000060.bin", "state_00000060_00000.bin", "main.log"] {
        let [whole, again] = [&whole, &again].map(|dir| fs::read(dir.join(name)).unwrap());
        assert!(whole == again, "{name} differs");
    }
}

#[test]
fn flags_that_do_not_apply_are_errors() {
    let fails = |more: &[&str], parts: &[&str]| fail(&[&SMALL[..], &["--steps", "1"], more].concat(), parts);
    for flags in [
        ["--muon-lr", "0.1"],
        ["--muon-momentum", "0.9"],
        ["--muon-momentum-warmup", "1"],
        ["--muon-momentum-final", "0.9"],
        ["--weight-decay-schedule", "cosine"],
        ["--muon-coefficients", "classic"],
        ["--muon-equilibrate", "1"],
        ["--muon-renormalize", "0"],
        ["--muon-variance", "1"],
        ["--muon-cautious-decay", "1"],
    ] {
        fails(&flags, &[flags[0], "expected --optimizer muon, found adamw"]);
    }
    fails(&["--warmdown", "0.5"], &["--warmdown: expected --schedule trapezoidal"]);
    fails(&["--head-lr", "0.5"], &["--head-lr: expected a model with an untied head", "use --embedding-lr"]);
    fails(&["--optimizer", "muon", "--muon-momentum", "1"], &["--muon-momentum", "below 1"]);
    for flags in [["--moments", "bf16"], ["--master-weights", "2"]] {
        fails(&flags, &[flags[0], "expected bf16 parameters, found f32"]);
    }
    fails(&["--optimizer", "sgd"], &["--optimizer", "adamw", "muon"]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config.toml");
    fs::write(&file, "optimizer = \"muon\"\nmuon-lr = -1.0\n").unwrap();
    fails(&["--config", text(&file)], &["line 2: muon-lr = -1.0", "expected a finite number of at least 0"]);
}
