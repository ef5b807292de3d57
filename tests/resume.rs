//! Nothing is ever lost: runs that are killed, stopped or out of room, and checkpoints that are damaged.

use host::data::tokens;
use host::rng::XorShift;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tempfile::TempDir;

/// A data set of three shards, through which a run of 40 steps goes several times, and a small model to begin from.
struct World {
    dir: TempDir,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut rng = host::rng::Mt19937::new(7);
        let mut ids = |n: usize| (0..n).map(|_| rng.below(97).min(rng.below(97)) as u16).collect::<Vec<u16>>();
        for (i, samples) in [9, 14, 6].into_iter().enumerate() {
            tokens::write(&dir.path().join(format!("train_{i}.bin")), &ids(samples * 32 + 5)).unwrap();
        }
        tokens::write(&dir.path().join("val_0.bin"), &ids(200)).unwrap();
        fs::write(dir.path().join("tiny.bin"), include_bytes!("data/tiny.bin")).unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// `train` into the directory `out`, with 40 steps of 4 sequences.
    fn command(&self, out: &str, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_host"));
        command.current_dir(self.dir.path()).args(["train", "--device", "cpu", "--out", out]);
        let settings = [
            ("--train", "train_*.bin"),
            ("--val", "val_*.bin"),
            ("--model", "tiny.bin"),
            ("--batch", "2"),
            ("--seq", "16"),
            ("--total-batch", "64"),
            ("--steps", "40"),
            ("--lr", "0.003"),
            ("--warmup", "5"),
            ("--weight-decay", "0.1"),
            ("--final-fraction", "0.1"),
            ("--val-every", "7"),
            ("--val-batches", "3"),
            ("--sample-every", "0"),
            ("--checkpoint-every", "3"),
            ("--keep", "2"),
        ];
        for (flag, value) in settings {
            if !more.contains(&flag) {
                command.args([flag, value]);
            }
        }
        command.args(more);
        command
    }

    fn output(&self, out: &str, more: &[&str]) -> Output {
        self.command(out, more).output().unwrap()
    }

    fn succeed(&self, out: &str, more: &[&str]) -> String {
        let output = self.output(out, more);
        let (printed, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{more:?}: {printed}{err}");
        printed.into_owned()
    }

    /// Checks that it fails with one line that holds all of `parts`.
    fn fail(&self, out: &str, more: &[&str], parts: &[&str]) -> String {
        let output = self.output(out, more);
        let (printed, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(1), "{more:?}: {printed}{err}");
        let line = err.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
        for part in parts {
            assert!(line.contains(part), "{more:?}: expected '{part}' in: {printed}{err}");
        }
        printed.into_owned()
    }

    fn start(&self, out: &str, more: &[&str]) -> Child {
        let null = Stdio::null;
        self.command(out, more).stdout(null()).stderr(null()).spawn().unwrap()
    }
}

fn entries(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// What must not depend on how often a run was interrupted: its logs but for times, its last weights, optimizer and data.
struct Kept {
    main_log: String,
    records: Vec<serde_json::Value>,
    model: Vec<u8>,
    state: Vec<u8>,
    progress: serde_json::Value,
    names: Vec<String>,
}

impl Kept {
    fn of(dir: &Path, step: usize) -> Self {
        let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap();
        let without_times = |mut value: serde_json::Value| {
            for key in ["ms", "tokens_per_second", "training_seconds", "pace"] {
                value.as_object_mut().unwrap().remove(key);
            }
            value
        };
        let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        Self {
            main_log: read("main.log"),
            records: read("main.jsonl").lines().map(|line| without_times(json(line))).collect(),
            model: fs::read(dir.join(format!("model_{step:08}.bin"))).unwrap(),
            state: fs::read(dir.join(format!("state_{step:08}_00000.bin"))).unwrap(),
            progress: without_times(json(&read(&format!("run_{step:08}.json")))["run"]["progress"].clone()),
            names: entries(dir),
        }
    }

    fn assert_equals(&self, expected: &Self, when: &str) {
        assert_eq!(self.main_log, expected.main_log, "{when}");
        assert_eq!(self.records, expected.records, "{when}");
        assert_eq!(self.progress, expected.progress, "{when}");
        assert_eq!(self.names, expected.names, "{when}");
        let first = |a: &[u8], b: &[u8]| a.iter().zip(b).position(|(a, b)| a != b).unwrap_or(a.len().min(b.len()));
        for (name, got, expected) in [("model", &self.model, &expected.model), ("state", &self.state, &expected.state)]
        {
            assert!(got == expected, "{when}: the {name} differs from byte {} on", first(got, expected));
        }
    }
}

#[test]
fn killed_runs_end_as_if_nothing_had_happened() {
    let world = World::new();
    let began = Instant::now();
    world.succeed("whole", &[]);
    let length = began.elapsed();
    let whole = Kept::of(&world.path("whole"), 40);
    assert_eq!(whole.main_log.lines().filter(|line| line.contains("trl:")).count(), 40);
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let mut rng = XorShift { state: seed };
    let mut taken_up = Vec::new();
    for i in 0..20 {
        let out = format!("killed{i}");
        let mut resume = &["--resume"][..0];
        // The first run and sometimes the second are killed, from before the first step to the last one.
        for _ in 0..=rng.next_u32() % 2 {
            let mut child = world.start(&out, resume);
            sleep(length.mul_f32(0.05 + rng.next_f32()));
            child.kill().unwrap();
            child.wait().unwrap();
            resume = &["--resume"];
        }
        let printed = world.succeed(&out, &["--resume"]);
        let step = printed.lines().find_map(|line| line.strip_prefix("going on after "));
        taken_up.push(step.map_or(0, |rest| rest.split(' ').next().unwrap().parse::<usize>().unwrap()));
        Kept::of(&world.path(&out), 40).assert_equals(&whole, &format!("seed {seed}, run {i}, after {taken_up:?}"));
    }
    println!("seed {seed}: taken up after steps {taken_up:?}");
    assert!(
        taken_up.iter().any(|&step| step > 0 && step < 40),
        "no run was killed between its first and last checkpoint"
    );
}

#[test]
fn a_run_with_other_settings_is_refused_with_what_changed() {
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
    refuse(&["--lr", "0.001"], &["--lr was 0.003, is 0.001;"]);
    refuse(
        &["--weight-decay", "0", "--seed", "1", "--schedule", "wsd"],
        &["--weight-decay was 0.1, is 0.0", "--seed was 42, is 1", "--schedule was cosine, is wsd"],
    );
    world.fail("run", &["--resume", "--steps", "7"], &["--steps was 6, is 7"]);
    refuse(&["--train", "train_[01].bin"], &["training data was 3 files with", "is 2 files with"]);
    refuse(&["--val", "train_1.bin"], &["validation data was val_0.bin", "is train_1.bin"]);
    world.fail("run", &resume(&["--model", "d6"]), &["2 layers", "6 layers", "step 6"]);
    assert_eq!(entries(&world.path("run")), before);

    // What the numbers do not depend on may change, and is told.
    let printed = world.succeed("run", &resume(&["--checkpoint-every", "5", "--val-every", "2"]));
    for part in ["--checkpoint-every was 3, is 5", "--val-every was 7, is 2", "going on after 6 of 6 steps", "next: "] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    // So is what does not change by another name.
    fs::rename(world.path("train_0.bin"), world.path("train_00.bin")).unwrap();
    world.succeed("run", &resume(&["--train", "./train_*.bin"]));

    let more = ["--resume", "--force-resume", "--steps", "9", "--lr", "0.001"];
    let printed = world.succeed("run", &more);
    assert!(printed.contains("--lr was 0.003, is 0.001") && printed.contains("step    9/9"), "{printed}");
    fs::remove_file(world.path("train_00.bin")).unwrap();
    let printed = world.succeed("run", &["--resume", "--force-resume", "--steps", "12", "--lr", "0.001"]);
    assert!(printed.contains("the training data begins anew") && printed.contains("step   12/12"), "{printed}");
}
