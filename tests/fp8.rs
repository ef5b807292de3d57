//! `train --precision fp8` on the CPU: checkpoints, statistics and errors.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

const TINY: &[&str] = &[
    "--device",
    "cpu",
    "--layers",
    "2",
    "--heads",
    "2",
    "--channels",
    "32",
    "-b",
    "2",
    "-t",
    "16",
    "-d",
    "64",
    "-v",
    "0",
    "-s",
    "0",
    "-l",
    "0.01",
];

/// Trains with flags that replace those in `TINY`.
fn llm_rs(args: &[&str]) -> Output {
    let kept: Vec<&[&str]> = TINY.chunks(2).filter(|flag| !args.contains(&flag[0])).collect();
    Command::new(env!("CARGO_BIN_EXE_llm-rs"))
        .current_dir(env!("CARGO_TARGET_TMPDIR"))
        .arg("train")
        .args(kept.concat())
        .args(args)
        .output()
        .unwrap()
}

fn train(args: &[&str]) -> String {
    let output = llm_rs(args);
    let (printed, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{args:?}: {printed}{err}");
    printed.into_owned()
}

/// Asserts that the program fails with one line that contains `part`.
fn rejects(args: &[&str], part: &str) {
    let output = llm_rs(args);
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), err.lines().count()), (Some(1), 1), "{args:?}: {err}");
    assert!(err.contains(part), "{args:?}: expected '{part}' in: {err}");
}

/// Returns the statistics of FP8 in a sidecar.
fn statistics(directory: &Path, step: usize) -> serde_json::Value {
    let text = fs::read_to_string(directory.join(format!("run_{step:08}.json"))).unwrap();
    serde_json::from_str::<serde_json::Value>(&text).unwrap()["run"]["progress"]["fp8"].clone()
}

#[test]
fn a_resumed_run_ends_with_the_bits_of_an_undisturbed_one() {
    for recipe in ["current", "delayed"] {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let args = ["--precision", "fp8", "--fp8-recipe", recipe, "-x", "6", "-n", "3", "-o", out.to_str().unwrap()];
        train(&args);
        let files = ["model_00000006.bin", "state_00000006_00000.bin"].map(|name| out.join(name));
        let whole = files.each_ref().map(|file| fs::read(file).unwrap());
        let of_whole = statistics(&out, 6);
        assert_eq!(of_whole.is_null(), recipe == "current");
        assert_ne!(statistics(&out, 3).is_null(), recipe == "delayed");
        // Simulates a run that was killed before its last checkpoint was complete.
        for file in files.iter().chain(&[out.join("DONE_00000006"), out.join("run_00000006.json")]) {
            fs::remove_file(file).unwrap();
        }
        let printed = train(&[&args[..], &["--resume"]].concat());
        assert!(printed.contains("resumed after 3 of 6 steps"), "{printed}");
        assert!(files.each_ref().map(|file| fs::read(file).unwrap()) == whole, "{recipe}");
        assert_eq!(statistics(&out, 6), of_whole);
        // Another recipe, or a run without FP8, may take over.
        for file in [&files[0], &files[1], &out.join("DONE_00000006"), &out.join("run_00000006.json")] {
            fs::remove_file(file).unwrap();
        }
        let other = if recipe == "current" { "delayed" } else { "current" };
        let mut args = args;
        args[3] = other;
        let printed = train(&[&args[..], &["--resume"]].concat());
        assert_eq!(printed.contains("the FP8 scales are reset"), recipe == "delayed", "{printed}");
        assert!(printed.contains(&format!("--fp8-recipe was {recipe}, is now {other}")), "{printed}");
    }
}

#[test]
fn verified_micro_batches_change_no_result() {
    for recipe in ["current", "delayed"] {
        let dir = tempfile::tempdir().unwrap();
        let run = |name: &str, more: &[&str]| {
            let out = dir.path().join(name);
            let common = ["--precision", "fp8", "--fp8-recipe", recipe, "--fp8-stats", "1", "-x", "4", "-o"];
            let printed = train(&[&common[..], &[out.to_str().unwrap()], more].concat());
            let counts: Vec<String> =
                printed.lines().filter(|line| line.starts_with("fp8 step")).map(str::to_owned).collect();
            let files = ["model_00000004.bin", "state_00000004_00000.bin", "main.log"];
            (counts, statistics(&out, 4), files.map(|name| fs::read(out.join(name)).unwrap()))
        };
        let plain = run("plain", &[]);
        assert!(!plain.0.is_empty());
        assert!(run("verified", &["--verify-every", "1"]) == plain, "{recipe}");
    }
}

#[test]
fn statistics_are_printed() {
    let printed = train(&["--precision", "fp8", "--fp8-recipe", "current", "-x", "4", "--fp8-stats", "2"]);
    assert!(
        printed.contains("emulated fp8 in the layers and the head, current scaling, exact backward accumulation"),
        "{printed}"
    );
    let lines: Vec<_> = printed.lines().filter(|line| line.starts_with("fp8 step ")).collect();
    assert_eq!(lines.len(), 2 * 12, "{printed}");
    assert!(lines[0].starts_with("fp8 step 2 | inputs of qkvw") && lines[12].starts_with("fp8 step 4 | "), "{printed}");
    // Two layers of (32, 32) inputs. With current scaling nothing saturates.
    assert!(lines[0].contains(" 2048 values | ") && lines.iter().all(|line| line.contains(" 0.000000 % saturated")));
    // Most gradients are far smaller than the largest one.
    assert!(lines.iter().any(|line| !line.ends_with(" 0.000000 % become 0")), "{printed}");
}

#[test]
fn flags_that_do_not_apply_are_errors() {
    rejects(&["--fp8-recipe", "delayed"], "--fp8-recipe: expected --precision fp8, found another precision");
    rejects(&["--fp8-gradients", "e5m2"], "--fp8-gradients: expected --precision fp8");
    rejects(&["--fp8-accumulation", "exact"], "--fp8-accumulation: expected --precision fp8");
    rejects(&["--fp8-head", "0"], "--fp8-head: expected --precision fp8");
    rejects(&["--fp8-stats", "5"], "--fp8-stats: expected --precision fp8");
    rejects(
        &["--precision", "fp8", "-b", "1", "-t", "10", "-d", "10"],
        "batch x seq: expected a multiple of 16, found 10",
    );
    rejects(&["--precision", "fp8", "--channels", "40"], "channels: expected a multiple of 16, found 40");
    rejects(&["--precision", "fp8", "--device", "auto"], "--precision fp8: expected a GPU, found none");
}
