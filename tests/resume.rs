//! Resuming: killed and stopped runs, full disks, and damaged checkpoints.

use crate::common::runs::{Results, World, entries, lines, receiving_signals, signal, wait_until};
use checkpoint::resume::find_newest;
use checkpoint::sidecar::Sidecar;
use data::tokens;
use rng::XorShift;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

#[test]
fn resumed_killed_runs_match_an_uninterrupted_run() {
    let world = World::new();
    let began = Instant::now();
    world.succeed("reference", &[]);
    let length = began.elapsed();
    let reference = Results::read(&world.path("reference"), 40);
    assert_eq!(reference.main_log.lines().filter(|line| line.contains("trl:")).count(), 40);
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let mut rng = XorShift { state: seed };
    let mut resumed_at = Vec::new();
    for i in 0..20 {
        let out = format!("killed{i}");
        let mut resume = &["--resume"][..0];
        // Kills the first run, and sometimes the second, at a random time.
        for _ in 0..=rng.next_u32() % 2 {
            let mut child = world.start(&out, resume);
            sleep(length.mul_f32(0.05 + rng.next_f32()));
            child.kill().unwrap();
            child.wait().unwrap();
            resume = &["--resume=auto"];
        }
        let printed = world.succeed(&out, &["--resume=auto"]);
        let step = printed.lines().find_map(|line| line.strip_prefix("resumed after "));
        resumed_at.push(step.map_or(0, |rest| rest.split(' ').next().unwrap().parse::<usize>().unwrap()));
        Results::read(&world.path(&out), 40)
            .assert_equals(&reference, &format!("seed {seed}, run {i}, after {resumed_at:?}"));
    }
    println!("seed {seed}: resumed after steps {resumed_at:?}");
    assert!(
        resumed_at.iter().any(|&step| step > 0 && step < 40),
        "no run was killed between its first and last checkpoint"
    );
}

#[test]
fn changed_settings_are_refused_and_named() {
    let world = World::new();
    let short = ["--steps", "6"];
    world.succeed("run", &short);
    let before = entries(&world.path("run"));
    let with = |more: &[&'static str]| [&short[..], more].concat();
    world.fail("run", &short, &["run has a checkpoint of step 6", "--resume", "--out"]);
    let resume = |more: &[&'static str]| with(&[&["--resume"], more].concat());
    let refuse = |more: &[&'static str], parts: &[&str]| {
        let parts = [parts, &["checkpoint of step 6", "--force-resume"]].concat();
        world.fail("run", &resume(more), &parts);
    };
    refuse(&["--lr", "0.001"], &["--lr was 0.003, is now 0.001;"]);
    refuse(
        &["--weight-decay", "0", "--seed", "1", "--schedule", "wsd"],
        &["--weight-decay was 0.1, is now 0.0", "--seed was 42, is now 1", "--schedule was cosine, is now wsd"],
    );
    world.fail("run", &["--resume", "--steps", "7"], &["--steps was 6, is now 7"]);
    refuse(&["--shuffle", "0"], &["--shuffle was true, is now false"]);
    refuse(&["--train", "train_[01].bin"], &["training data was 3 files with", "is now 2 files with"]);
    refuse(&["--val", "train_1.bin"], &["validation data was val_0.bin", "is now train_1.bin"]);
    world.fail("run", &resume(&["--model", "d6"]), &["2 layers", "6 layers", "step 6"]);
    assert_eq!(entries(&world.path("run")), before);

    // Settings that do not affect the results may change, with a note.
    let printed = world.succeed("run", &resume(&["--checkpoint-every", "5", "--val-every", "2"]));
    for part in
        ["--checkpoint-every was 3, is now 5", "--val-every was 7, is now 2", "resumed after 6 of 6 steps", "next: "]
    {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    // The last step was evaluated before its checkpoint.
    let before = fs::read_to_string(world.path("run/main.jsonl")).unwrap();
    let printed = world.succeed("run", &resume(&[]));
    assert!(printed.contains("resumed after 6 of 6 steps") && !printed.contains("val loss"), "{printed}");
    assert_eq!(fs::read_to_string(world.path("run/main.jsonl")).unwrap(), before);
    // Renamed data files with the same contents are accepted.
    fs::rename(world.path("train_0.bin"), world.path("train_00.bin")).unwrap();
    world.succeed("run", &resume(&["--train", "./train_*.bin"]));

    let more = ["--resume", "--force-resume", "--steps", "9", "--lr", "0.001"];
    let printed = world.succeed("run", &more);
    assert!(printed.contains("--lr was 0.003, is now 0.001") && printed.contains("step    9/9"), "{printed}");
    fs::remove_file(world.path("train_00.bin")).unwrap();
    let printed = world.succeed("run", &["--resume", "--force-resume", "--steps", "12", "--lr", "0.001"]);
    assert!(
        printed.contains("the training data starts from the beginning") && printed.contains("step   12/12"),
        "{printed}"
    );
}

/// An epoch takes 14 steps. No shard is a whole number of steps.
#[test]
fn a_run_without_shuffling_resumes_in_order() {
    let world = World::new();
    let in_order = ["--shuffle", "0", "--keep", "0"];
    world.succeed("run", &in_order);
    let out = world.path("run");
    let reference = Results::read(&out, 40);
    let resume = |more: &[&'static str]| [&in_order[..], &["--resume"], more].concat();
    let forget_from = |step: usize| {
        for name in entries(&out) {
            let of = name.split(['_', '.']).find_map(|part| part.parse::<usize>().ok());
            if of.is_some_and(|of| of >= step) {
                fs::remove_file(out.join(name)).unwrap();
            }
        }
    };
    for step in [39, 30, 18, 12, 3] {
        forget_from(step + 1);
        let printed = world.succeed("run", &resume(&[]));
        assert!(printed.contains(&format!("resumed after {step} of 40 steps")), "{printed}");
        Results::read(&out, 40).assert_equals(&reference, &format!("after step {step}"));
    }
    // With another batch size it reads the same tokens, and losses agree up to rounding.
    forget_from(31);
    world.succeed("run", &resume(&["--batch", "4", "--force-resume"]));
    let losses = |kept: &Results| kept.records.iter().filter_map(|record| record["loss"].as_f64()).collect::<Vec<_>>();
    let (got, expected) = (losses(&Results::read(&out, 40)), losses(&reference));
    assert!(got.len() == 40 && got.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-4), "{got:?} {expected:?}");
}

#[test]
fn a_resumed_run_does_not_repeat_evaluations() {
    let world = World::new();
    let more = ["--steps", "6", "--keep", "0", "--val-every", "3"];
    let printed = world.succeed("run", &more);
    assert!(printed.contains("step    3/6 | val loss"), "{printed}");
    let out = world.path("run");
    let reference = Results::read(&out, 6);
    for name in entries(&out).iter().filter(|name| name.contains("00000006")) {
        fs::remove_file(out.join(name)).unwrap();
    }
    // The checkpoint of step 3 was written after the validation that was due at step 3.
    let printed = world.succeed("run", &[&more[..], &["--resume"]].concat());
    assert!(printed.contains("resumed after 3 of 6 steps"), "{printed}");
    assert!(!printed.contains("step    3/6 | val loss") && printed.contains("step    6/6 | val loss"), "{printed}");
    Results::read(&out, 6).assert_equals(&reference, "after a checkpoint with its evaluation");
}

#[test]
fn checkpoints_without_a_shuffle_setting_are_shuffled() {
    let world = World::new();
    world.succeed("run", &["--steps", "3"]);
    let path = world.path("run/run_00000003.json");
    let text = fs::read_to_string(&path).unwrap();
    let run: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut sidecar: Sidecar = serde_json::from_value(run["run"].clone()).unwrap();
    assert_eq!(sidecar.identity.config.remove("shuffle"), Some(true.into()));
    let mut bytes = Vec::new();
    sidecar.write(&mut bytes).unwrap();
    fs::write(&path, bytes).unwrap();
    let printed = world.succeed("run", &["--resume", "--steps", "3"]);
    assert!(printed.contains("resumed after 3 of 3 steps") && !printed.contains("--shuffle"), "{printed}");
    let in_order = ["--resume", "--steps", "3", "--shuffle", "0"];
    world.fail("run", &in_order, &["--shuffle was true, is now false", "--force-resume"]);
    // Checkpoints of llm.c have no sidecar.
    fs::remove_file(&path).unwrap();
    world.fail("run", &in_order, &["expected data shuffled, as in the checkpoint, found data in order", "--shuffle"]);
    let forced = ["--resume", "--steps", "6", "--shuffle", "0", "--force-resume", "--lr", "0"];
    world.succeed("run", &forced);
    // The data resumes after the tokens trained on.
    let losses = |out: &str| {
        let text = fs::read_to_string(world.path(out).join("main.jsonl")).unwrap();
        let records = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        records.filter_map(|record| record["loss"].as_f64()).collect::<Vec<_>>()
    };
    fs::rename(world.path("run/model_00000003.bin"), world.path("three.bin")).unwrap();
    world.succeed("order", &["--model", "three.bin", "--shuffle", "0", "--steps", "6", "--lr", "0"]);
    assert_eq!(losses("run")[3..], losses("order")[3..]);
}

/// A run with complete checkpoints of steps 39 and 40, and the files of the latter.
struct Damaged {
    world: World,
    out: PathBuf,
    files: [PathBuf; 3],
}

impl Damaged {
    fn new() -> Self {
        let world = World::new();
        world.succeed("run", &[]);
        let out = world.path("run");
        let files = ["model_00000040.bin", "state_00000040_00000.bin", "run_00000040.json"].map(|name| out.join(name));
        Self { world, out, files }
    }

    /// Searches for the newest checkpoint while a file has other contents.
    fn found(&self, file: &Path, bytes: &[u8]) -> (Option<usize>, Vec<String>) {
        let good = fs::read(file).unwrap();
        fs::write(file, bytes).unwrap();
        let found = find_newest(&self.out).unwrap();
        fs::write(file, good).unwrap();
        (found.checkpoint.map(|checkpoint| checkpoint.step), found.notes)
    }

    fn assert_detected(&self, file: &Path, bytes: &[u8], what: &str) {
        let name = file.file_name().unwrap().to_str().unwrap();
        let (step, notes) = self.found(file, bytes);
        assert_eq!(step, Some(39), "{what} of {name}: {notes:?}");
        assert!(notes.len() == 1 && notes[0].contains("step 40") && notes[0].contains(name), "{what}: {notes:?}");
    }
}

#[test]
fn flipped_bits_and_truncation_are_detected() {
    let damaged = Damaged::new();
    assert_eq!(find_newest(&damaged.out).unwrap().checkpoint.unwrap().step, 40);
    let mut tried = 0;
    for file in &damaged.files {
        let good = fs::read(file).unwrap();
        let near = 64.min(good.len());
        let spread = (0..200).map(|i| good.len() * i / 200);
        for at in (0..near).chain(spread).chain(good.len() - near..good.len()) {
            let mut bytes = good.clone();
            bytes[at] ^= 1 << (at % 8);
            damaged.assert_detected(file, &bytes, &format!("a bit flipped at {at}"));
            tried += 1;
        }
        for len in (0..40).map(|i| good.len() * i / 40).chain([1, 1023, 1024, 1025, good.len() - 2]) {
            damaged.assert_detected(file, &good[..len.min(good.len() - 2)], &format!("all but the first {len} bytes"));
            tried += 1;
        }
        damaged.assert_detected(file, &[&good[..], b"x"].concat(), "a byte after the end");
    }
    println!("{tried} damaged files");
}

#[test]
fn a_run_resumes_from_the_checkpoint_before_a_damaged_one() {
    let Damaged { world, out, files: [model, state, sidecar] } = Damaged::new();
    let reference = Results::read(&out, 40);
    let mut bytes = fs::read(&state).unwrap();
    bytes[5000] ^= 4;
    fs::write(&state, bytes).unwrap();
    let printed = world.succeed("run", &["--resume"]);
    for part in [
        "checkpoint of step 40 is damaged and ignored",
        "state_00000040_00000.bin is damaged: expected checksum",
        "after 39 of 40",
    ] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    Results::read(&out, 40).assert_equals(&reference, "after damaging a file");

    // A link to a sidecar that does not exist is damage.
    fs::rename(&sidecar, out.join("moved")).unwrap();
    std::os::unix::fs::symlink("nowhere", &sidecar).unwrap();
    let printed = world.succeed("run", &["--resume"]);
    assert!(
        printed.contains("checkpoint of step 40 is damaged and ignored: cannot read run/run_00000040.json"),
        "{printed}"
    );
    fs::remove_file(out.join("moved")).unwrap();

    // A checkpoint without a sidecar is treated like one of llm.c.
    fs::remove_file(&sidecar).unwrap();
    let printed = world.succeed("run", &["--resume"]);
    assert!(printed.contains("has no run_00000040.json (llm.c writes none)"), "{printed}");
    fs::remove_file(&model).unwrap();
    let printed = world.succeed("run", &["--resume"]);
    assert!(printed.contains("cannot open model file run/model_00000040.bin"), "{printed}");
    Results::read(&out, 40).assert_equals(&reference, "after removing a file");

    // If all checkpoints are damaged, the run fails and changes nothing.
    let before = entries(&out);
    for step in [39, 40] {
        fs::write(out.join(format!("model_{step:08}.bin")), "").unwrap();
    }
    world.fail(
        "run",
        &["--resume"],
        &["run: expected a complete checkpoint, found only damaged ones", "model_00000039.bin", "model_00000040.bin"],
    );
    assert_eq!(entries(&out), before);
}

#[test]
fn a_resumed_stopped_run_matches_an_uninterrupted_run() {
    let world = World::new();
    let long = ["--steps", "1000", "--checkpoint-every", "1000", "--keep", "1", "--val-every", "1"];
    world.succeed("reference", &long);
    let resume = [&long[..], &["-y", "auto"]].concat();
    let log = world.path("run").join("main.log");
    let signals =
        [("TERM", 143), ("INT", 130), ("HUP", 129), ("QUIT", 143), ("USR1", 143), ("USR2", 143), ("XCPU", 143)];
    for (name, code) in signals {
        let mut child = receiving_signals(&world.command("run", &resume));
        let child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let before = lines(&log);
        wait_until("the run has logged some steps", || lines(&log) > before + 10);
        signal(&child, name);
        let output = child.wait_with_output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(code), "{out}{err}");
        assert!(err.contains(&format!("SIG{name}: stopping after this step")), "{err}");
        let (_, stopped) = out.rsplit_once("\nstopped after ").unwrap();
        let step: usize = stopped.split(' ').next().unwrap().parse().unwrap();
        assert!((5..1000).contains(&step) && stopped.contains("--resume"), "{stopped}");
        assert!(out.contains(&format!("checkpoint of step {step}: run/model_{step:08}.bin")), "{out}");
        let trained = fs::read_to_string(&log).unwrap().lines().filter(|line| line.contains("trl:")).count();
        assert_eq!(trained, step);
    }
    world.succeed("run", &resume);
    Results::read(&world.path("run"), 1000)
        .assert_equals(&Results::read(&world.path("reference"), 1000), "after stops");
}

/// The kernel sends SIGXCPU after the limit, and again after each further second.
#[test]
fn a_limit_of_processor_time_stops_a_run_with_a_checkpoint() {
    let world = World::new();
    let command = world.command("run", &["--steps", "1000000", "--checkpoint-every", "0", "--val-every", "0"]);
    let mut limited = Command::new("sh");
    limited.current_dir(world.dir.path()).args(["-c", "ulimit -S -t 2; exec \"$@\"", "sh"]);
    let output = limited.arg(command.get_program()).args(command.get_args()).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(143), "{err}");
    assert!(
        err.contains("SIGXCPU: stopping after this step or batch") && out.contains("\nstopped after "),
        "{out}{err}"
    );
    assert!(entries(&world.path("run")).iter().any(|name| name.starts_with("DONE_")), "{out}{err}");
}

/// Returns whether a process has installed a handler for a signal.
fn catches(child: &Child, signal: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0");
    u64::from_str_radix(mask.trim(), 16).unwrap() >> (signal - 1) & 1 == 1
}

/// Waits until `log` has this number of lines and an evaluation has begun, and sends SIGTERM. Returns what the run prints.
fn stop_evaluation(mut command: Command, log: &Path, logged: usize) -> String {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    wait_until("the evaluation begins", || catches(&child, 15) && lines(log) == logged);
    sleep(Duration::from_millis(300));
    assert_eq!(child.try_wait().unwrap(), None, "the evaluation takes a minute");
    let began = Instant::now();
    signal(&child, "TERM");
    let output = child.wait_with_output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(143), "{out}");
    assert!(began.elapsed() < Duration::from_secs(10), "{out}");
    assert_eq!(lines(log), logged, "an incomplete evaluation is no result: {out}");
    out
}

/// Tokens of a sample that would take hours, and more batches than the data of a validation have.
const HOURS: &str = "100000000";

#[test]
fn a_signal_ends_a_validation_and_the_resumed_run_repeats_it() {
    let world = World::new();
    let long: Vec<u16> = (0..4_000_000).map(|i| (i % 97) as u16).collect();
    tokens::write(&world.path("val_0.bin"), &long, tokens::Width::U16).unwrap();
    let keep = ["--keep", "0"];
    world.succeed("reference", &keep);
    let stop = |out: &str, more: &[&str], logged| {
        let command = world.command(out, &[&keep[..], more, &["--val-batches", HOURS]].concat());
        stop_evaluation(command, &world.path(out).join("main.log"), logged)
    };
    // Before the first step there is nothing to save.
    let out = stop("first", &[], 0);
    assert!(out.contains("stopped after 0 of 40 steps") && !world.path("first/DONE_00000000").exists(), "{out}");
    // The command that is printed then starts the run anew.
    let (_, next) = out.split_once("\nnext: ").unwrap();
    let words = shlex::split(&next.trim().replace(HOURS, "3")).unwrap();
    let words = words.iter().skip_while(|word| *word != "train");
    let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
    let output = command.current_dir(world.dir.path()).args(words).output().unwrap();
    assert!(output.status.success(), "{next}: {}", String::from_utf8_lossy(&output.stderr));
    assert!(world.path("first/DONE_00000040").exists());

    world.succeed("run", &keep);
    for name in entries(&world.path("run")) {
        let step = name.split(['_', '.']).find_map(|part| part.parse::<usize>().ok());
        if step.is_some_and(|step| step > 6) {
            fs::remove_file(world.path("run").join(name)).unwrap();
        }
    }
    // The log has the first validation and the steps. The second run does nothing but validate.
    for _ in 0..2 {
        let out = stop("run", &["--resume"], 8);
        assert!(out.contains("stopped after 7 of 40 steps") && world.path("run/DONE_00000007").exists(), "{out}");
    }
    let out = stop("run", &["--resume", "--val-every", "1000"], 41);
    assert!(out.contains("stopped after 40 of 40 steps") && world.path("run/DONE_00000040").exists(), "{out}");
    world.succeed("run", &[&keep[..], &["--resume"]].concat());
    let (run, reference) = (Results::read(&world.path("run"), 40), Results::read(&world.path("reference"), 40));
    assert_eq!(run.main_log.lines().last(), reference.main_log.lines().last());
    assert!(run.model == reference.model && run.state == reference.state, "the bits of an interrupted run differ");
}

#[test]
fn a_signal_ends_a_sample() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
    command
        .current_dir(dir.path())
        .args("train --device cpu --layers 1 --heads 1 --channels 16 --batch 2 --seq 16".split(' '));
    command.args("--steps 40 --val-every 0 --sample-every 7 --out run --sample-length".split(' ')).arg(HOURS);
    let out = stop_evaluation(command, &dir.path().join("run/main.log"), 7);
    assert!(out.contains("stopped after 7 of 40 steps") && !out.contains("generating"), "{out}");
    assert!(
        dir.path().join("run/DONE_00000007").exists() && lines(&dir.path().join("run/samples.jsonl")) == 0,
        "{out}"
    );
}

#[test]
fn a_second_signal_ends_the_run_immediately_and_removes_temporary_files() {
    let world = World::new();
    for (first, second, code) in [("INT", "INT", 130), ("INT", "TERM", 143), ("HUP", "HUP", 129)] {
        // A step takes minutes.
        let mut child = world.start(second, &["--total-batch", "32000000"]);
        let log = world.path(second).join("main.log");
        wait_until("the run has started", || lines(&log) == 1);
        signal(&child, first);
        sleep(Duration::from_millis(300));
        assert_eq!(child.try_wait().unwrap(), None, "one signal must not end the run within a step");
        // The staging directory of a checkpoint.
        fs::create_dir(world.path(second).join(".unfinished-checkpoint-1f")).unwrap();
        let began = Instant::now();
        signal(&child, second);
        assert_eq!(child.wait().unwrap().code(), Some(code));
        assert!(began.elapsed() < Duration::from_secs(5));
        assert_eq!(entries(&world.path(second)), [".llm-rs-run", "config.toml", "main.jsonl", "main.log"]);
    }
}

#[test]
fn stopping_without_an_output_directory_says_that_nothing_is_kept() {
    let world = World::new();
    let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
    command.current_dir(world.dir.path()).args([
        "train",
        "--device",
        "cpu",
        "--train",
        "train_*.bin",
        "--steps",
        "100000",
    ]);
    command.args(["--model", "tiny.bin", "--batch", "2", "--seq", "16", "--sample-every", "0", "--out", "none"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut printed = BufReader::new(child.stdout.take().unwrap()).lines();
    printed.find(|line| line.as_ref().unwrap().starts_with("step    1/")).unwrap().unwrap();
    signal(&child, "INT");
    let last = printed.map(Result::unwrap).last().unwrap();
    assert!(last.contains("stopped after") && last.contains("nothing is saved with --out none"), "{last}");
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn two_runs_cannot_use_the_same_directory() {
    let world = World::new();
    let mut child = world.start("run", &["--total-batch", "32000000"]);
    wait_until("the run has started", || lines(&world.path("run").join("main.log")) == 1);
    world.fail("run", &["--resume=auto"], &["run is in use by another run", "--out"]);
    // A supervisor restarts the run before the previous process has ended.
    let command = &mut world.command("run", &["--resume=auto", "--steps", "2"]);
    let mut next = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    sleep(Duration::from_secs(1));
    assert_eq!(next.try_wait().unwrap(), None, "a run waits for the previous process to end");
    child.kill().unwrap();
    child.wait().unwrap();
    let output = next.wait_with_output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && err.starts_with("note: run is in use by another process; waiting up to"),
        "{err}"
    );
}

/// Root may write into every directory, so something else is in the way.
#[test]
fn a_directory_that_cannot_be_used_is_named() {
    let world = World::new();
    fs::write(world.path("file"), "").unwrap();
    let expected = "error: --out file: expected a directory or a new name, found a file; choose another --out";
    world.fail("file", &[], &[expected]);

    let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
    let name = OsStr::from_bytes(b"run\xff");
    let output =
        command.current_dir(world.dir.path()).args(["train", "--device", "cpu", "--out"]).arg(name).output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    let expected = "expected a path in UTF-8, found other bytes; rename the directory";
    assert!(output.status.code() == Some(1) && err.contains(expected), "{err}");
    fs::create_dir_all(world.path("run/config.toml")).unwrap();
    // Otherwise the directory is not that of a run.
    fs::write(world.path("run/.llm-rs-run"), "").unwrap();
    let expected = "error: run: expected a directory that this process can change, found an error: cannot write run/config.toml: Is a \
                    directory (os error 21); change its permissions or contents, or choose another --out";
    world.fail("run", &[], &[expected]);
}

/// Returns a shell command that runs `setup`, then `command`.
fn in_shell(command: &Command, setup: &str) -> Command {
    let mut shell = Command::new("sh");
    shell.current_dir(command.get_current_dir().unwrap());
    shell.args(["-c", &format!("{setup}\nexec \"$@\""), "sh"]).arg(command.get_program()).args(command.get_args());
    shell
}

#[test]
fn a_failed_checkpoint_is_reported_and_the_run_and_older_checkpoints_survive() {
    let world = World::new();
    world.succeed("reference", &["--checkpoint-every", "10"]);
    let reference = Results::read(&world.path("reference"), 40);
    // Limits files to 200 blocks of 512 or 1024 bytes, depending on the shell: logs fit, checkpoints do not.
    let limited = |more: &[&str]| {
        let command = world.command("run", &[&["--checkpoint-every", "10"], more].concat());
        let output = in_shell(&command, "ulimit -f 200").output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(1), "{out}{err}");
        assert!(err.contains("error: the last checkpoint (step 40) could not be written: "), "{err}");
        assert!(err.contains("model_00000040.bin: File too large"), "{err}");
        let resumed = more.contains(&"--resume");
        assert!(resumed || err.contains("; there is no checkpoint yet"), "{err}");
        assert!(
            !resumed || err.contains("; the newest checkpoint is of step ") && err.contains("; continue with "),
            "{err}"
        );
        assert_eq!(fs::read_to_string(world.path("run").join("main.log")).unwrap(), reference.main_log);
        out.into_owned()
    };
    let printed = limited(&[]);
    for step in [10, 20, 30, 40] {
        assert!(
            printed.contains(&format!("warning: no checkpoint of step {step}, there is none yet: cannot write run/"))
        );
    }
    let kept = [".llm-rs-run", "config.toml", "main.jsonl", "main.log", "plots.svg", "report.html"];
    assert_eq!(entries(&world.path("run")), kept);

    let mut child = world.start("run", &["--checkpoint-every", "10"]);
    wait_until("there is a checkpoint", || world.path("run").join("DONE_00000010").exists());
    child.kill().unwrap();
    child.wait().unwrap();
    let newest = find_newest(&world.path("run")).unwrap().checkpoint.unwrap().step;
    if newest < 40 {
        let printed = limited(&["--resume"]);
        assert!(
            printed.contains(&format!("no checkpoint of step 40, the newest one is of step {newest}:")),
            "{printed}"
        );
    }
    world.succeed("run", &["--checkpoint-every", "10", "--resume"]);
    Results::read(&world.path("run"), 40).assert_equals(&reference, "after failed checkpoints");
}

#[test]
fn a_temporarily_missing_directory_loses_only_the_checkpoints_of_that_time() {
    let world = World::new();
    let long = ["--steps", "600", "--checkpoint-every", "10", "--keep", "1"];
    world.succeed("reference", &long);
    let mut child = world.command("run", &long);
    let child = child.stdout(Stdio::piped()).spawn().unwrap();
    let (run, away) = (world.path("run"), world.path("away"));
    wait_until("there is a checkpoint", || run.join("DONE_00000010").exists());
    fs::rename(&run, &away).unwrap();
    sleep(Duration::from_millis(400));
    fs::rename(&away, &run).unwrap();
    let output = child.wait_with_output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}");
    // It continued in the moved directory, and in the original path at the end.
    assert!(printed.contains("warning: run was moved to ") && printed.contains("/away during the run"), "{printed}");
    world.succeed("run", &[&long[..], &["--resume"]].concat());
    Results::read(&run, 600)
        .assert_equals(&Results::read(&world.path("reference"), 600), "after the directory came back");
}

/// Runs a script in which `full` is a file system of 2.8 MB and `train` runs the program with its settings. Returns `None` if
/// this user may not mount file systems.
fn with_a_small_disk(world: &World, settings: &[&str], script: &str) -> Option<String> {
    let unshared = |script: &str| {
        let mut command = Command::new("unshare");
        command.current_dir(world.dir.path()).args(["-rm", "sh", "-c", script]);
        command.output().ok()
    };
    fs::create_dir(world.path("full")).unwrap();
    let mount = "mount -t tmpfs -o size=2800k tmpfs full";
    if !unshared(mount)?.status.success() {
        return None;
    }
    let command = world.command("full/run", settings);
    let words: Vec<_> = command.get_args().map(|arg| format!("'{}'", arg.to_str().unwrap())).collect();
    let train = format!("train() {{ '{}' {} \"$@\"; }}", env!("CARGO_BIN_EXE_llm-rs"), words.join(" "));
    let output = unshared(&format!("set -e\n{mount}\n{train}\n{script}")).unwrap();
    let printed = [output.stdout, output.stderr].concat();
    let printed = String::from_utf8_lossy(&printed).into_owned();
    assert!(output.status.success(), "{printed}");
    Some(printed)
}

#[test]
fn a_full_disk_is_reported_before_writing_and_the_run_resumes_when_there_is_space() {
    let world = World::new();
    world.succeed("reference", &["--checkpoint-every", "10"]);
    let script = "
        train && exit 9
        ls full/run
        # Now even config.toml cannot be written.
        head -c 9m /dev/zero >full/filler || true
        train --resume && exit 9
        rm full/filler
        train --resume && exit 9
        mount -o remount,size=9m full
        train --resume
        cp -r full/run result";
    let Some(printed) = with_a_small_disk(&world, &["--checkpoint-every", "10"], script) else {
        println!("skipped: user namespaces are not available");
        return;
    };
    let line = |start: &str| printed.lines().find(|line| line.starts_with(start)).unwrap_or_default();
    assert!(printed.contains("checkpoint of step 10: full/run/model_00000010.bin"), "{printed}");
    let warning = line(
        "warning: no checkpoint of step 20, the newest one is of step 10: full/run: expected 2.1 MB of free space for a checkpoint, found ",
    );
    assert!(warning.contains("; free some space, or choose another --out"), "{printed}");
    assert!(printed.contains("DONE_00000010\nconfig.toml\nmain.jsonl\nmain.log\nmodel_00000010.bin\n"), "{printed}");
    assert!(printed.contains("cannot write full/run/config.toml: No space left on device"), "{printed}");
    assert!(printed.contains("error: full/run: expected 2.1 MB of free space"), "{printed}");
    Results::read(&world.path("result"), 40)
        .assert_equals(&Results::read(&world.path("reference"), 40), "after a full disk");
}

#[test]
#[ignore = "slow: scripts/nightly runs it"]
fn log_lines_wait_for_disk_space() {
    let world = World::new();
    let more = ["--steps", "1500", "--checkpoint-every", "1500"];
    world.succeed("reference", &more);
    // The checkpoint also needs space, so it is written after the filler is removed.
    let script = "
        mount -o remount,size=9m full
        train >printed & pid=$!
        until [ -s full/run/main.log ]; do sleep 0.01; done
        head -c 20m /dev/zero >full/filler 2>/dev/null || true
        sleep 0.5
        wc -c <full/run/main.log
        sleep 0.5
        wc -c <full/run/main.log
        rm full/filler
        wait $pid
        cat printed
        cp -r full/run result";
    let Some(printed) = with_a_small_disk(&world, &more, script) else {
        println!("skipped: user namespaces are not available");
        return;
    };
    assert!(
        printed
            .contains("warning: log lines are held in memory until they can be written: cannot write full/run/main."),
        "{printed}"
    );
    Results::read(&world.path("result"), 1500)
        .assert_equals(&Results::read(&world.path("reference"), 1500), "after a full disk");
}
