//! Sweeps: every combination of flag values, failures, and sweeps that were interrupted.

use crate::common::{fail, succeed, text};
use data::tokens;
use std::fs;
use std::path::{Path, PathBuf};

/// Returns the arguments of a sweep over a small model, and the directories of the sweep and the data.
fn sweep(dir: &Path) -> (Vec<String>, PathBuf) {
    let ids = |n: usize| (0..n).map(|i| b"to be, or not to be; "[i % 21].into()).collect::<Vec<u16>>();
    let (train, val, out) = (dir.join("train.bin"), dir.join("val.bin"), dir.join("sweep"));
    tokens::write(&train, &ids(2000), tokens::Width::U16).unwrap();
    tokens::write(&val, &ids(500), tokens::Width::U16).unwrap();
    let common =
        ["--device", "cpu", "--train", text(&train), "--val", text(&val), "--steps", "4", "--sample-every", "0"];
    let shape = ["--layers", "1", "--heads", "2", "--channels", "16", "--batch", "2", "--seq", "16"];
    let arguments = [&["sweep", "--out", text(&out), "--"], &common[..], &shape].concat();
    (arguments.into_iter().map(str::to_owned).collect(), out)
}

/// Inserts flags of the sweep before `--`.
fn with_flags<'a>(arguments: &'a [String], flags: &[&'a str]) -> Vec<&'a str> {
    let (first, rest) = arguments.split_at(3);
    first.iter().map(String::as_str).chain(flags.iter().copied()).chain(rest.iter().map(String::as_str)).collect()
}

#[test]
fn a_sweep_trains_all_combinations_once_and_lists_failures() {
    let dir = tempfile::tempdir().unwrap();
    let (arguments, out) = sweep(dir.path());
    // The batch of 3 sequences does not divide --total-batch 64.
    let flags = ["--flag", "lr=0,0.01", "--flag", "batch=2,3"];
    let mut run = with_flags(&arguments, &flags);
    let batch = run.iter().position(|argument| *argument == "--batch").unwrap();
    run.drain(batch..batch + 2);
    run.extend(["--total-batch", "64"]);
    let printed = succeed(&run);
    assert!(printed.contains("run 1 of 4: lr=0, batch=2 | val loss "), "{printed}");
    assert!(printed.contains("run 2 of 4: lr=0, batch=3 | failed: --total-batch 64: expected a multiple"), "{printed}");
    let table = fs::read_to_string(out.join("sweep.csv")).unwrap();
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(rows[0][..4], ["lr", "batch", "val loss", "train loss"]);
    let first_columns: Vec<&[&str]> = rows[1..].iter().map(|row| &row[..2]).collect();
    assert_eq!(first_columns, [["0.01", "2"], ["0", "2"], ["0", "3"], ["0.01", "3"]]);
    let loss = |row: usize| rows[row][2].parse::<f64>().unwrap();
    assert!(loss(1) < loss(2) - 0.05 && rows[3][2].is_empty() && rows[3][6].starts_with("failed: "), "{table}");
    // The table has the loss that the run logged last.
    let log = fs::read_to_string(out.join("lr=0.01,batch=2/main.log")).unwrap();
    assert!(log.ends_with(&format!("s:4 tel:{}\n", rows[1][2])), "{log}");
    let markdown = fs::read_to_string(out.join("sweep.md")).unwrap();
    assert!(printed.contains(&markdown) && markdown.lines().count() == 6, "{markdown}");

    // Finished runs are not repeated, failed ones are.
    let output_of = |run: &str| fs::read_to_string(out.join(run).join("output.txt")).unwrap();
    let finished = output_of("lr=0.01,batch=2");
    assert!(finished.contains("step    4/4 | loss "), "{finished}");
    assert_eq!(printed, succeed(&run));
    assert_eq!(output_of("lr=0.01,batch=2"), finished);
    assert_eq!(fs::read_to_string(out.join("sweep.csv")).unwrap(), table);
    let output = output_of("lr=0,batch=3");
    assert_eq!(output.matches("error: ").count(), 2, "{output}");

    // Another sweep in the same directory must not mix with this one.
    let mut other = run.clone();
    other.extend(["--seed", "7"]);
    fail(&other, &["lr=0,batch=2: expected the flags of the finished run", "found others", "use another --out"]);
}

#[test]
fn a_stopped_run_of_a_sweep_is_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let (arguments, out) = sweep(dir.path());
    let run = with_flags(&arguments, &["--flag", "lr=0.01"]);
    let printed = succeed(&run);
    let directory = out.join("lr=0.01");
    let table = fs::read_to_string(out.join("sweep.csv")).unwrap();
    // As if the sweep had been killed before the last two steps: only an earlier checkpoint exists.
    fs::remove_dir_all(&directory).unwrap();
    let (first, rest) = run.split_at(run.iter().position(|argument| *argument == "--").unwrap() + 1);
    let train = [&["train"], rest, &["--lr=0.01", "--out", text(&directory), "--checkpoint-every", "2"]].concat();
    succeed(&train);
    for file in ["DONE_00000004", "model_00000004.bin", "state_00000004_00000.bin", "run_00000004.json"] {
        fs::remove_file(directory.join(file)).unwrap();
    }
    let again = [first, rest].concat();
    let resumed = succeed(&again);
    let loss = |text: &str| text.lines().next().unwrap().to_owned();
    assert_eq!(loss(&resumed), loss(&printed));
    let output = fs::read_to_string(directory.join("output.txt")).unwrap();
    assert!(output.contains("resumed after 2 of 4 steps"), "{output}");
    let losses = |table: &str| table.lines().nth(1).unwrap().split(',').take(3).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(losses(&fs::read_to_string(out.join("sweep.csv")).unwrap()), losses(&table));
}

#[test]
fn sweeps_reject_invalid_flags_before_the_first_run() {
    let dir = tempfile::tempdir().unwrap();
    let (arguments, out) = sweep(dir.path());
    let reject = |flags: &[&str], parts: &[&str]| fail(&with_flags(&arguments, flags), parts);
    reject(&["--flag", "lr"], &["--flag <NAME=VALUE,VALUE>", "such as lr=1e-4,3e-4"]);
    reject(&["--flag", "lr=1e-3,fast"], &["'fast'", "--lr"]);
    reject(&["--flag", "rate=1,2"], &["'--rate'"]);
    reject(&["--flag", "out=a,b"], &["expected a flag other than out"]);
    reject(&["--flag", "lr=1", "--flag", "lr=2"], &["--flag lr: expected each flag once"]);
    reject(&["--flag", "lr=1,1"], &["expected different values for each run"]);
    reject(&["--flag", "batch=1,2"], &["--batch <B>: expected this flag once, found it several times"]);
    reject(&["--flag", "lr=1", "--launcher", "'"], &["--launcher: expected a command as for a shell"]);
    let mut after = with_flags(&arguments, &["--flag", "lr=1"]);
    after.push("-ox");
    fail(&after, &["--out: expected before --, found after it"]);
    fail(&with_flags(&arguments, &[]), &["--flag <NAME=VALUE,VALUE>"]);
    assert!(!out.exists());
    // If no run finishes, the exit code says so.
    reject(&["--flag", "total-batch=33"], &["expected at least one finished run, found none; see output.txt"]);
    succeed(&with_flags(&arguments, &["--flag", "lr=0.5", "--launcher", "env LLM_RS_X=1"]));
    let missing = with_flags(&arguments, &["--flag", "lr=0.25", "--launcher", "/nowhere/launcher"]);
    fail(&missing, &["cannot start /nowhere/launcher"]);
}
