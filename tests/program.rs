//! The program as a user meets it: whole runs on small models, and every kind of bad input.

use data::{Tokens, tokens};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

const TINY: &[&str] = &["--layers", "1", "--heads", "2", "--channels", "16", "--batch", "2", "--seq", "16"];

fn host(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_llm-rs")).args(args).output().unwrap()
}

fn succeed(args: &[&str]) -> String {
    let output = host(args);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{args:?}: {out}{err}");
    out.into_owned()
}

/// Checks that the program fails with one line that holds all of `parts`.
fn fail(args: &[&str], parts: &[&str]) {
    let output = host(args);
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {err}");
    let lines: Vec<&str> = err.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!((lines.len(), err.contains("panicked")), (1, false), "{args:?}: {err}");
    for part in parts {
        assert!(lines[0].contains(part), "{args:?}: expected '{part}' in: {err}");
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn write_tokens(dir: &Path, name: &str, ids: &[u16]) -> PathBuf {
    let path = dir.join(name);
    tokens::write(&path, ids).unwrap();
    path
}

fn with<'a>(first: &[&'a str], rest: &[&'a str]) -> Vec<&'a str> {
    [first, rest].concat()
}

/// A directory with train.bin and val.bin of bytes.
fn data() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let ids = |n: usize| (0..n).map(|i| b"to be, or not to be; "[i % 21].into()).collect::<Vec<u16>>();
    write_tokens(dir.path(), "train.bin", &ids(2000));
    write_tokens(dir.path(), "val.bin", &ids(500));
    dir
}

fn entries(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn two_runs_of_the_selftest_are_identical() {
    let printed = succeed(&["selftest", "--determinism", "--steps", "1", "--device", "cpu"]);
    for group in ["losses", "gradients", "gradient norm", "m", "v", "weights"] {
        let row = printed.lines().find(|line| line.starts_with(&format!("{group:<16} ")));
        assert!(row.is_some_and(|row| row.ends_with("  identical")), "{group}: {printed}");
    }
    assert!(printed.contains("CPU, ") && printed.contains("\nidentical\n"), "{printed}");
    let output = host(&["selftest", "--determinism", "--small"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_run_leaves_its_log_and_a_model_that_can_be_measured_sampled_and_trained_on() {
    let dir = data();
    let out = dir.path().join("run");
    let (train, val) = (dir.path().join("train.bin"), dir.path().join("val.bin"));
    let run =
        ["train", "--device", "cpu", "--steps", "6", "--out", text(&out), "--checkpoint-every", "4", "--lr", "0.01"];
    let from = |data: &[&str]| succeed(&with(&with(&run, TINY), data));
    let printed = from(&["--val-every", "3", "--total-batch", "64", "--warmup", "0"]);
    assert!(printed.contains("step    6/6 | loss ") && printed.contains("next: "), "{printed}");
    assert_eq!(
        entries(&out),
        [
            "DONE_00000004",
            "DONE_00000006",
            "config.toml",
            "main.jsonl",
            "main.log",
            "model_00000004.bin",
            "model_00000006.bin",
            "run_00000004.json",
            "run_00000006.json",
            "state_00000004_00000.bin",
            "state_00000006_00000.bin"
        ]
    );
    let log = fs::read_to_string(out.join("main.log")).unwrap();
    let heads: Vec<&str> = log.lines().map(|line| line.rsplit_once(':').unwrap().0).collect();
    let kinds: Vec<String> = heads
        .iter()
        .map(|h| h.split(' ').take(2).map(|w| w.split(':').next().unwrap()).collect::<Vec<_>>().join(" "))
        .collect();
    assert_eq!(kinds, ["s tel", "s trl", "s trl", "s trl", "s tel", "s trl", "s trl", "s trl", "s tel"]);
    let records: Vec<serde_json::Value> = fs::read_to_string(out.join("main.jsonl"))
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(records.iter().filter(|r| r["loss"].is_f64()).count(), 6);
    assert_eq!(records[7]["tokens"], 6 * 64);
    let losses: Vec<f64> = records.iter().filter_map(|r| r["val_loss"].as_f64()).collect();
    assert!(losses[2] < losses[0] - 0.05, "{losses:?}");

    // Going on from the model begins where it stopped, and evaluation agrees with training's own.
    let model = out.join("model_00000006.bin");
    let on = |lr| {
        let args = ["train", "--model", text(&model), "--train", text(&train), "--val", text(&val), "--device", "cpu"];
        succeed(&with(&args, &["--batch", "2", "--seq", "16", "--steps", "1", "--val-batches", "3", "--lr", lr]))
    };
    let resumed = on("0");
    let evaluated =
        succeed(&["eval", "--model", text(&model), "--val", text(&val), "--batch", "2", "--seq", "16", "-m", "3"]);
    let loss = evaluated.split(' ').nth(2).unwrap();
    assert_eq!(resumed.matches(&format!("val loss {loss}\n")).count(), 2, "{loss}: {resumed}");
    assert_eq!(on("0.01").matches(&format!("val loss {loss}\n")).count(), 1);

    let sample = |seed: &str| {
        succeed(&[
            "sample",
            "--model",
            text(&model),
            "--prompt",
            "to be",
            "-g",
            "30",
            "--seed",
            seed,
            "--device",
            "cpu",
        ])
    };
    assert!(sample("1").starts_with("to be"));
    assert_eq!(sample("1"), sample("1"));
    assert_ne!(sample("1"), sample("2"));
}

#[test]
fn hellaswag_is_scored_while_a_model_trains_and_afterwards() {
    let dir = data();
    let out = dir.path().join("run");
    let (train, set) = (dir.path().join("train.bin"), dir.path().join("sets/hellaswag.bin"));
    let jsonl = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/hellaswag.jsonl");
    let printed = succeed(&["data", "hellaswag", "--from", text(&jsonl), "--out", text(&set)]);
    assert!(printed.contains("wrote 4 examples") && printed.contains("next: "), "{printed}");
    assert!(fs::read(&set).unwrap() == include_bytes!("data/hellaswag.bin"));

    let shape = ["--layers", "1", "--heads", "2", "--channels", "16", "--batch", "1", "--seq", "48"];
    let run = ["train", "--device", "cpu", "--train", text(&train), "--hellaswag", text(&set)];
    let settings = ["--out", text(&out), "--steps", "5", "--val-every", "2", "--hellaswag-examples", "3"];
    let printed = succeed(&with(&with(&run, &shape), &settings));
    let scores: Vec<&str> = printed.lines().filter_map(|line| line.strip_prefix("HellaSwag: ")).collect();
    assert!(scores.len() == 3 && scores.iter().all(|s| s.contains("/3 = 0.") || s.contains("3/3 = 1.")), "{printed}");
    let log = fs::read_to_string(out.join("main.log")).unwrap();
    let logged: Vec<(&str, &str)> = log.lines().filter_map(|line| line.split_once(" eval:")).collect();
    assert_eq!(logged.iter().map(|(step, _)| *step).collect::<Vec<_>>(), ["s:2", "s:4", "s:5"]);
    for (score, (_, accuracy)) in scores.iter().zip(&logged) {
        let expected: f64 = score.split_once(" = ").unwrap().1.parse().unwrap();
        assert_eq!(*accuracy, format!("{expected:.4}"));
    }

    let model = out.join("model_00000005.bin");
    let eval = ["eval", "--model", text(&model), "--device", "cpu", "--hellaswag", text(&set)];
    for batch in ["1", "3", "8"] {
        let printed = succeed(&with(&eval, &["--hellaswag-examples", "3", "--batch", batch, "--seq", "48"]));
        assert_eq!(printed, format!("HellaSwag: {}\n", scores[2]));
    }
    let printed = succeed(&with(&eval, &["--val", text(&train)]));
    assert!(printed.contains("val loss ") && printed.contains("HellaSwag: ") && printed.contains("/4 = "), "{printed}");
    fail(&with(&eval, &["--seq", "16"]), &["hellaswag.bin, example 0", "--seq of at least 48"]);
    fail(&with(&run, TINY), &["hellaswag.bin, example 0", "--seq of at least 48"]);
    fail(&["train", "--device", "cpu", "--hellaswag", text(&set)], &["hellaswag.bin, example 0", "below 256"]);
    fail(&["eval", "--model", text(&model), "--hellaswag", text(&train)], &["train.bin", "magic 20240522"]);
    fail(&["data", "hellaswag", "--from", text(&train), "--out", text(&set)], &["train.bin"]);
}

#[test]
fn text_becomes_shards_that_train() {
    let dir = tempfile::tempdir().unwrap();
    let play = dir.path().join("play.txt");
    fs::write(&play, "All the world's a stage,\nAnd all the men and women merely players.\n".repeat(40)).unwrap();
    let out = dir.path().join("shards");
    let printed = succeed(&["data", "text", text(&play), "--out", text(&out), "--val-fraction", "0.2"]);
    assert!(printed.contains("next: "), "{printed}");
    assert_eq!(entries(&out), ["train_000000.bin", "val_000000.bin"]);
    let (train, val) = (out.join("train_*.bin"), out.join("val_*.bin"));
    assert!(Tokens::open_all(text(&train)).unwrap()[0].len() > 400);
    let args = ["train", "--device", "cpu", "--train", text(&train), "--val", text(&val), "--steps", "2", "-m", "-1"];
    let printed = succeed(&with(&args, TINY));
    // Next to uniform over GPT-2's 50257 tokens at first.
    let first = printed.lines().find_map(|line| line.strip_prefix("val loss ")).unwrap();
    assert!((first.parse::<f64>().unwrap() - 50257f64.ln()).abs() < 0.1, "{first}");
    fail(&["data", "text", text(&play), "--out", text(&out)], &["train_000000.bin", "--overwrite"]);
}

#[test]
fn bad_token_files_are_named() {
    let dir = data();
    let run = |path: &Path, parts: &[&str]| {
        let out = dir.path().join("out");
        let args = ["train", "--device", "cpu", "--train", text(path), "--steps", "2", "--out", text(&out)];
        fail(&with(&args, TINY), &with(parts, &[path.file_name().unwrap().to_str().unwrap()]));
        assert!(!out.join("model_00000002.bin").exists());
    };
    run(&dir.path().join("none.bin"), &["no file matches"]);
    let good = fs::read(dir.path().join("train.bin")).unwrap();
    let bad = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    run(&bad("cut.bin", &good[..2000]), &["truncated", "expected 5024 bytes, found 2000"]);
    run(&bad("magic.bin", &[&[1], &good[1..]].concat()), &["magic 20240520"]);
    run(&write_tokens(dir.path(), "short.bin", &[1; 20]), &["20 tokens", "at least 33", "--batch"]);
    run(&write_tokens(dir.path(), "beyond.bin", &[60000; 100]), &["token 60000", "below 50257"]);
}

#[test]
fn bad_models_and_settings_are_named() {
    let dir = data();
    let train = dir.path().join("train.bin");
    let base = ["train", "--device", "cpu", "--train", text(&train)];
    let refuse = |rest: &[&str], parts: &[&str]| fail(&with(&base, rest), parts);
    refuse(&["--model", "d13"], &["--model", "d13", "d12"]);
    refuse(&["--model", "none.bin"], &["none.bin", "No such file"]);
    refuse(&["--model", text(&train)], &["train.bin", "expected magic 20240326, found 20240520"]);
    refuse(&with(TINY, &["--total-batch", "1000"]), &["--total-batch 1000", "2 x 16 = 32"]);
    refuse(&["--model", "d12", "--seq", "2048"], &["--seq 2048", "1024"]);
    refuse(&["--layers", "1", "--heads", "3", "--channels", "16", "-b", "1", "-t", "16"], &["3 heads", "16 channels"]);
    refuse(&with(TINY, &["--precision", "bf16"]), &["--precision bf16", "fp32"]);
    refuse(&with(TINY, &["--val", "/nowhere/*.bin"]), &["--val", "/nowhere/*.bin"]);
    refuse(&with(TINY, &["--out", "/proc/nothing/here"]), &["/proc/nothing/here"]);
    fail(
        &["train", "--device", "cpu", "--model", "gpt3:c12288"],
        &["does not fit", "GiB more than", "not even --batch 1 fits"],
    );
    fail(&["sample", "--model", text(&train)], &["train.bin", "magic"]);
    fail(&["eval", "--model", "none.bin", "--val", text(&train)], &["none.bin"]);
    fail(&["data", "tinyshakespeare", "--from", "none.txt"], &["none.txt"]);
    fail(&["data", "text", "none.txt", "--out", text(dir.path())], &["none.txt"]);
}

#[test]
fn numbers_beyond_any_machine_are_refused() {
    let most = "2147483647";
    let plan = ["train", "--device", "cpu", "--dry-run"];
    let shape = |l, c| ["--layers", l, "--heads", "1", "--channels", c];
    let refuse = |rest: &[&str], parts: &[&str]| fail(&with(&plan, rest), parts);
    refuse(&shape(most, "64"), &["--layers", "at most 8192, found 2147483647"]);
    refuse(&shape("1", most), &["--channels", "beyond what any memory holds"]);
    refuse(&with(&shape("8192", "2048"), &["--batch", "16", "--seq", "64"]), &["does not fit"]);
    refuse(&["--batch", most, "--seq", "64"], &["built-in corpus", "--batch"]);
    refuse(&with(&shape("1", "64"), &["--batch", most, "--seq", most]), &["built-in corpus", "--batch"]);
    refuse(&["--total-batch", most], &["--total-batch 2147483647", "multiple of batch x seq = 8 x 64"]);
    let all =
        ["--total-batch", "2147483136", "--steps", most, "-m", most, "-g", most, "--warmup", "18446744073709551615"];
    succeed(&with(&plan, &all));

    let dir = data();
    let (out, train) = (dir.path().join("run"), dir.path().join("train.bin"));
    succeed(&with(&["train", "--device", "cpu", "--train", text(&train), "--steps", "1", "--out", text(&out)], TINY));
    let model = out.join("model_00000001.bin");
    let eval = ["eval", "--model", text(&model), "--val", text(&train), "--device", "cpu"];
    fail(&with(&eval, &["--batch", most, "--seq", "16"]), &["train.bin holds 2000 tokens", "--batch"]);
}

#[test]
fn wrong_flags_are_refused_by_name() {
    for (args, part) in [
        (&["train", "--batch", "0"][..], "--batch"),
        (&["train", "--batch", "2147483648"], "--batch"),
        (&["train", "--lr=-1"], "--lr"),
        (&["train", "--layers", "2"], "--heads"),
        (&["train", "--checkpoint-every", "2"], "--out"),
        (&["train", "--val", "x.bin"], "--train"),
        (&["eval", "--model", "x.bin"], "--val"),
        (&["train", "--hellaswag-examples", "5"], "--hellaswag"),
        (&["nothing"], "nothing"),
    ] {
        let output = host(args);
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {err}");
        assert!(err.contains(part) && !err.contains("panicked"), "{args:?}: {err}");
    }
}

#[test]
fn a_closed_pipe_is_no_error() {
    use std::process::Stdio;
    let mut child = Command::new(env!("CARGO_BIN_EXE_llm-rs"))
        .args(["train", "--device", "cpu", "--steps", "20"])
        .args(TINY)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &*String::from_utf8_lossy(&output.stderr)), (Some(0), ""));
}

#[test]
fn kernels_are_timed_against_ceilings() {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("kernels.json");
    let args = "bench kernels layernorm --device cpu -e d12,d24 -b 1 -t 32 --copy 100000 --product 64 --json";
    let output = Command::new(env!("CARGO_BIN_EXE_llm-rs")).args(args.split(' ')).arg(&json).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    let json: serde_json::Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let rows = json["rows"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|row| row["operation"].as_str().unwrap()).collect();
    let norms = ["layernorm_forward", "layernorm_backward"];
    assert_eq!(names, [&["copy", "product"][..], &norms, &norms].concat());
    for (row, line) in rows.iter().zip(printed.lines().skip(1)) {
        let number = |key: &str| row[key].as_f64().unwrap();
        assert!(number("us") > 0.0 && number("us_least") <= number("us") && number("us") <= number("us_most"), "{row}");
        assert!(line.contains(&format!("{:.1}", number("us"))), "{row} is not in {line}");
        let (rate, share) =
            if row["operation"] == "product" { ("tflops", "percent_of_product") } else { ("gbs", "percent_of_copy") };
        assert!(number(rate) > 0.0 && number(share) > 0.0, "{row}");
    }
    assert_eq!((&rows[2]["model"], &rows[5]["model"]), (&"d12".into(), &"d24".into()));
    // What moves 4 bytes for each of 2 x 32 x 768 floats, and 8 for each row.
    let row = &rows[2];
    let bytes = row["gbs"].as_f64().unwrap() * row["us"].as_f64().unwrap() * 1e3;
    assert!((bytes - f64::from(2 * 32 * 768 * 4 + 32 * 8)).abs() < 1.0, "{bytes}");
}
