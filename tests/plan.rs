//! `plan`: memory of `train`, predictions, and invalid input.

use crate::common::{fail, succeed};
use serde_json::Value;

const MEASURED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/internals/bench/plan");
const CLUSTER: &[&str] = &["plan", "--model", "d12", "--gpus", "16", "--intra", "450GB/s", "--inter", "400Gb/s"];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [CLUSTER, more].concat()
}

fn json(more: &[&str]) -> Value {
    serde_json::from_str(&succeed(&[CLUSTER, more, &["--json"]].concat())).unwrap()
}

/// Returns MiB of a row such as `  gradients  237.4 MiB`.
fn mib<'a>(printed: &'a str, name: &str) -> &'a str {
    let is_row = |line: &&str| line.trim_start().to_lowercase().starts_with(name) && line.ends_with(" MiB");
    let row = printed.lines().find(is_row);
    let row = row.unwrap_or_else(|| panic!("no {name}: {printed}"));
    row.split_whitespace().rev().nth(1).unwrap()
}

#[test]
fn memory_is_that_of_the_plan_of_train() {
    let dir = tempfile::tempdir().unwrap();
    let (text, out) = (dir.path().join("text.txt"), dir.path().join("data"));
    std::fs::write(&text, "Tokens of GPT-2, so that the vocabulary is that of the model. ".repeat(2000)).unwrap();
    let [text, out] = [&text, &out].map(|path| path.to_str().unwrap());
    succeed(&["data", "text", text, "--out", out]);
    let train = format!("{out}/train_*.bin");
    let sizes = ["--batch", "8", "--seq", "1024", "--recompute", "1"];
    let run = ["train", "--device", "cuda", "--dry-run", "--model", "d12", "--train", &train];
    let train = succeed(&[&run[..], &sizes].concat());
    let plan = succeed(&[&["plan", "--model", "d12", "--gpus", "1"], &sizes[..]].concat());
    for name in ["parameters", "gradients", "optimizer", "activations", "workspace"] {
        assert_eq!(mib(&plan, name), mib(&train, name), "{name}: {plan}{train}");
    }
}

#[test]
fn tables_fit_a_terminal_and_mark_the_best_setting() {
    let printed = succeed(&with(&["--batch", "8,64"]));
    let best: Vec<&str> = printed.lines().filter(|line| line.starts_with('*')).collect();
    assert_eq!(best.len(), 2, "one row and the legend: {printed}");
    assert!(printed.lines().all(|line| line.len() <= 80), "{printed}");
    assert!(printed.contains("no step measured") && printed.contains("450 GB/s inside a node"), "{printed}");
    let minutes = |steps: &str| {
        let printed = succeed(&with(&["--batch", "8,64", "--steps", steps]));
        let row =
            printed.lines().find_map(|line| line.strip_prefix(&format!("time of {steps} steps"))).unwrap().to_owned();
        row.split_whitespace().next().unwrap().parse::<f64>().unwrap()
    };
    assert!(minutes("2000") > 0.0 && (minutes("2000") - 2.0 * minutes("1000")).abs() <= 0.2);
    assert!(!printed.contains("time of 2000 steps"), "{printed}");
    // Stage 0, and two shard sizes of each other stage.
    let rows =
        |printed: &str| printed.lines().filter(|line| line.contains(" compute") || line.contains(" memory")).count();
    assert!(rows(&succeed(&with(&["--batch", "8,64", "--all"]))) > rows(&printed));
}

#[test]
fn json_has_every_setting() {
    let found = json(&["--batch", "8,64", "--recompute", "0,1", "--shard-size", "4"]);
    let settings = found["settings"].as_array().unwrap();
    assert_eq!(settings.len(), 4 * 2 * 2);
    let best = &settings[found["best"].as_u64().unwrap() as usize];
    assert_eq!(best["fits"], true);
    let fastest = settings.iter().map(|setting| setting["tokens_per_second"].as_f64().unwrap()).fold(0.0, f64::max);
    assert_eq!(best["tokens_per_second"].as_f64(), Some(fastest));
    assert!(!best["timeline"]["collectives"].as_array().unwrap().is_empty());
}

#[test]
fn measurements_replace_assumptions() {
    let step = format!("{MEASURED}/one-d12-a4.json");
    let found = json(&["--batch", "64", "--recompute", "0", "--measured", &step]);
    assert_eq!(found["settings"][0]["source"], "measured");
    let sweep = format!("{MEASURED}/collectives.json");
    let printed = succeed(&["plan", "--gpus", "2", "--collectives", &sweep, "--measured", &step]);
    assert!(printed.contains("collectives.json") && !printed.contains("GB/s inside a node"), "{printed}");
}

#[test]
fn invalid_input_is_explained() {
    let sweep = format!("{MEASURED}/collectives.json");
    fail(
        &["plan", "--gpus", "20", "--intra", "1GB/s", "--inter", "1GB/s"],
        &["multiple of --gpus-per-node 8, found 20"],
    );
    fail(&["plan", "--gpus", "16", "--intra", "1GB/s"], &["--inter: expected a bandwidth, found none"]);
    fail(&["plan", "--gpus", "16", "--intra", "450GBps"], &["--intra", "such as 450GB/s"]);
    fail(&with(&["--hbm", "80"]), &["--hbm", "such as 80GB"]);
    fail(&with(&["--shard-size", "3"]), &["expected a divisor of the world size 16, found 3"]);
    fail(&with(&["--measured", &sweep]), &["expected a file of `bench step --json`"]);
    fail(&with(&["--measured", "/nowhere.json"]), &["/nowhere.json"]);
    fail(&with(&["--collectives", &sweep]), &["--intra: expected either this flag or a sweep, found both"]);
    fail(&with(&["--total-batch", "1000"]), &["--total-batch 1000: expected a multiple"]);
    fail(&with(&["--hbm", "1GB"]), &["--hbm: expected a setting that fits 0.9 GiB, found at least"]);
    fail(&with(&["--optimizer", "muon"]), &["--optimizer muon: expected a measured step"]);
}
