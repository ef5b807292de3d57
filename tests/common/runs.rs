//! Runs of a small model in a temporary directory, and the comparison of their results.

use data::tokens;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A temporary directory with a small model and a data set of three shards. A run of 40 steps reads it several times.
pub struct World {
    pub dir: TempDir,
}

impl World {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut rng = rng::Mt19937::new(7);
        let mut ids = |n: usize| (0..n).map(|_| rng.below(97).min(rng.below(97)) as u16).collect::<Vec<u16>>();
        for (i, samples) in [9, 14, 6].into_iter().enumerate() {
            tokens::write(&dir.path().join(format!("train_{i}.bin")), &ids(samples * 32 + 5), tokens::Width::U16)
                .unwrap();
        }
        tokens::write(&dir.path().join("val_0.bin"), &ids(200), tokens::Width::U16).unwrap();
        fs::write(dir.path().join("tiny.bin"), include_bytes!("../data/tiny.bin")).unwrap();
        Self { dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the `train` command with 40 steps of 4 sequences, and output directory `out`.
    pub fn command(&self, out: &str, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
        command.current_dir(self.dir.path()).args(["train", "--device", "cpu", "--out", out]);
        // In a model of this size, more threads only wait for each other.
        command.env("RAYON_NUM_THREADS", "1");
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

    pub fn output(&self, out: &str, more: &[&str]) -> Output {
        self.command(out, more).output().unwrap()
    }

    pub fn succeed(&self, out: &str, more: &[&str]) -> String {
        let output = self.output(out, more);
        let (printed, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{more:?}: {printed}{err}");
        printed.into_owned()
    }

    /// Checks that the run fails with an error line that contains all of `parts`.
    pub fn fail(&self, out: &str, more: &[&str], parts: &[&str]) -> String {
        let output = self.output(out, more);
        let (printed, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(1), "{more:?}: {printed}{err}");
        let line = err.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
        for part in parts {
            assert!(line.contains(part), "{more:?}: expected '{part}' in: {printed}{err}");
        }
        printed.into_owned()
    }

    pub fn start(&self, out: &str, more: &[&str]) -> Child {
        let null = Stdio::null;
        receiving_signals(&self.command(out, more)).stdout(null()).stderr(null()).spawn().unwrap()
    }
}

/// Returns `command` with the default actions for signals. `nohup` and daemons ignore SIGHUP for all processes that they start,
/// and a shell SIGINT and SIGQUIT for its background jobs.
pub fn receiving_signals(command: &Command) -> Command {
    let mut env = Command::new("env");
    env.arg("--default-signal=HUP,INT,QUIT").arg(command.get_program()).args(command.get_args());
    env.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    if let Some(directory) = command.get_current_dir() {
        env.current_dir(directory);
    }
    env
}

pub fn entries(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The results of a run that must not depend on interruptions: logs without times, and the last checkpoint.
pub struct Results {
    pub main_log: String,
    pub records: Vec<serde_json::Value>,
    pub model: Vec<u8>,
    pub state: Vec<u8>,
    pub progress: serde_json::Value,
    pub names: Vec<String>,
}

impl Results {
    pub fn read(dir: &Path, step: usize) -> Self {
        let text = |name: &str| fs::read_to_string(dir.join(name)).unwrap();
        let without_times = |mut value: serde_json::Value| {
            for key in ["ms", "tokens_per_second", "time", "training_seconds", "pace", "timed", "verified"] {
                value.as_object_mut().unwrap().remove(key);
            }
            value
        };
        let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        Self {
            main_log: text("main.log"),
            records: text("main.jsonl").lines().map(|line| without_times(json(line))).collect(),
            model: fs::read(dir.join(format!("model_{step:08}.bin"))).unwrap(),
            state: fs::read(dir.join(format!("state_{step:08}_00000.bin"))).unwrap(),
            progress: without_times(json(&text(&format!("run_{step:08}.json")))["run"]["progress"].clone()),
            names: entries(dir),
        }
    }

    pub fn assert_equals(&self, expected: &Self, when: &str) {
        assert_eq!(self.main_log, expected.main_log, "{when}");
        assert_eq!(self.records, expected.records, "{when}");
        assert_eq!(self.progress, expected.progress, "{when}");
        assert_eq!(self.names, expected.names, "{when}");
        let first = |a: &[u8], b: &[u8]| a.iter().zip(b).position(|(a, b)| a != b).unwrap_or(a.len().min(b.len()));
        for (name, got, expected) in [("model", &self.model, &expected.model), ("state", &self.state, &expected.state)]
        {
            assert!(got == expected, "{when}: the {name} file differs from byte {}", first(got, expected));
        }
    }
}

/// Waits until `condition` holds, for at most a minute.
pub fn wait_until(description: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_mins(1), "waited too long until {description}");
        sleep(Duration::from_millis(5));
    }
}

pub fn lines(path: &Path) -> usize {
    fs::read_to_string(path).unwrap_or_default().lines().count()
}

pub fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args(["-s", name, &child.id().to_string()]).status().unwrap().success());
}
