//! A temporary directory with data and a model, and runs of processes in it.

use crate::threads::TIMEOUT;
use data::tokens;
use rng::Mt19937;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A temporary directory with data and a model.
pub struct World {
    pub dir: TempDir,
}

impl World {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut rng = Mt19937::new(7);
        let mut ids = |n: usize| (0..n).map(|_| rng.below(97).min(rng.below(97)) as u16).collect::<Vec<u16>>();
        for (i, n) in [3000, 4005].into_iter().enumerate() {
            tokens::write(&dir.path().join(format!("train_{i}.bin")), &ids(n), tokens::Width::U16).unwrap();
        }
        tokens::write(&dir.path().join("val_0.bin"), &ids(600), tokens::Width::U16).unwrap();
        fs::write(dir.path().join("tiny.bin"), include_bytes!("../data/tiny.bin")).unwrap();
        Self { dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn arguments(out: &str, more: &[&str]) -> Vec<String> {
        let settings = [
            ("--device", "cpu"),
            ("--train", "train_*.bin"),
            ("--val", "val_*.bin"),
            ("--model", "tiny.bin"),
            ("--batch", "2"),
            ("--seq", "16"),
            ("--total-batch", "128"),
            ("--steps", "8"),
            ("--lr", "0.003"),
            ("--val-every", "4"),
            ("--val-batches", "2"),
            ("--sample-every", "0"),
            ("--check-ranks", "1"),
            ("--checkpoint-every", "4"),
            ("--out", out),
        ];
        let mut arguments = vec!["train".to_owned()];
        for (flag, value) in settings.into_iter().filter(|(flag, _)| !more.contains(flag)) {
            arguments.extend([flag.to_owned(), value.to_owned()]);
        }
        // The last value of a flag in `more` replaces the others.
        let flags: Vec<&[&str]> = more.chunk_by(|_, next| !next.starts_with("--")).collect();
        for (i, flag) in flags.iter().enumerate() {
            if !flags[i + 1..].iter().any(|later| later[0] == flag[0]) {
                arguments.extend(flag.iter().map(|&word| word.to_owned()));
            }
        }
        arguments
    }

    pub fn command(&self, program: &Path, out: &str, more: &[&str]) -> Command {
        let mut command = self.bare(program);
        command.args(Self::arguments(out, more));
        command
    }

    /// Returns a command without any launcher variables in its environment.
    pub fn bare(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.dir.path());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        // In a model of this size, more threads only wait for each other.
        command.env("RAYON_NUM_THREADS", "1");
        for (name, _) in std::env::vars() {
            let launchers = ["OMPI_", "PMI", "PMIX_", "SLURM_", "MPI_", "RANK", "WORLD_SIZE", "LOCAL_"];
            if launchers.iter().any(|launcher| name.starts_with(launcher)) {
                command.env_remove(name);
            }
        }
        command
    }

    /// Starts one rank with the environment of torchrun.
    pub fn rank(&self, rank: usize, ranks: usize, job: &str, out: &str, more: &[&str]) -> Child {
        let mut command = self.command(program(), out, more);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
        command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", ranks.to_string());
        // Other tests may have jobs of the same name at the same time.
        command.env("TORCHELASTIC_RUN_ID", format!("{job} {}", self.dir.path().display()));
        command.spawn().unwrap()
    }

    pub fn ranks(&self, ranks: usize, job: &str, out: &str, more: &[&str]) -> Vec<Output> {
        let children: Vec<_> = (0..ranks).map(|rank| self.rank(rank, ranks, job, out, more)).collect();
        wait_for_all(children)
    }
}

/// Waits for all processes and returns their outputs.
pub fn wait_for_all(children: impl IntoIterator<Item = Child>) -> Vec<Output> {
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

pub fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_llm-rs"))
}

/// Returns stdout and stderr.
pub fn output_text(output: &Output) -> (String, String) {
    (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Copies the checkpoint of one step and the logs into a new directory.
pub fn copy_checkpoint(world: &World, from: &str, step: usize, to: &str) {
    fs::create_dir(world.path(to)).unwrap();
    for entry in fs::read_dir(world.path(from)).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.contains(&format!("_{step:08}")) || name.starts_with("main") {
            fs::copy(world.path(from).join(&name), world.path(to).join(&name)).unwrap();
        }
    }
}

/// Exit code after a permanent failure.
pub const PERMANENT: i32 = 3;
/// Exit code after the loss of a rank.
pub const RECOVERABLE: i32 = 4;

/// Returns the error message of rank 0. Checks that the other ranks print nothing and that all have the same exit code.
pub fn error_of_rank_0(outputs: &[Output], code: i32) -> String {
    let (_, message) = output_text(&outputs[0]);
    assert_eq!(message.lines().count(), 1, "{message}");
    for (rank, output) in outputs.iter().enumerate() {
        assert_eq!(output.status.code(), Some(code), "rank {rank}: {:?}", output_text(output));
        assert!(rank == 0 || output_text(output).1.is_empty(), "rank {rank}: {:?}", output_text(output));
    }
    message
}

/// Returns a TCP endpoint with a port that no other test gets.
pub fn free_endpoint() -> String {
    format!("tcp://127.0.0.1:{}", two_free_ports())
}

/// Returns a free port that is followed by another one. No other test gets them: they are outside of the range from which Linux takes ports.
pub fn two_free_ports() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 20_000 + (std::process::id() % 5_000) as u16;
    let is_free = |port| TcpListener::bind(("0.0.0.0", port)).is_ok();
    let mut ports = std::iter::repeat_with(|| first + 2 * NEXT.fetch_add(1, Ordering::Relaxed)).take(100);
    ports.find(|&port| is_free(port) && is_free(port + 1)).expect("two free ports")
}

pub fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts").join(name)
}

/// Settings of a run that is long enough to be interrupted.
pub const LONG: [&str; 8] = ["--steps", "160", "--checkpoint-every", "20", "--val-every", "80", "--check-ranks", "20"];

impl World {
    /// Returns a command that runs a launcher script with arguments `first`, then the program with its own arguments.
    pub fn script(&self, name: &str, first: &[&str], out: &str, more: &[&str]) -> Command {
        // Background jobs of a shell ignore SIGINT, and those of `nohup` SIGHUP. A shell script cannot undo that, so `env` does.
        let mut command = self.bare(Path::new("env"));
        command.arg("--default-signal=HUP,INT,QUIT").arg(script(name));
        command.args(first).arg(program()).args(Self::arguments(out, more));
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        command
    }

    /// Waits until the checkpoint of a step is complete.
    pub fn wait_for(&self, out: &str, step: usize) {
        let (done, deadline) = (self.path(&format!("{out}/DONE_{step:08}")), Instant::now() + TIMEOUT);
        while !done.exists() {
            assert!(Instant::now() < deadline, "there is no checkpoint of step {step} in {out}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns the process id of a rank of the run in `out`.
    pub fn process(&self, out: &str, rank: usize) -> String {
        let read = |path: PathBuf| fs::read(path).unwrap_or_default();
        let has = |bytes: &[u8], text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let process = entry.path();
            let (exe, here) = (fs::read_link(process.join("exe")), fs::read_link(process.join("cwd")));
            if exe.ok().as_deref() != Some(program()) || here.ok().as_deref() != Some(self.dir.path()) {
                continue;
            }
            let (line, variables) = (read(process.join("cmdline")), read(process.join("environ")));
            let by_flag = has(&line, &format!("--rank\0{rank}\0"));
            let by_variable = has(&variables, &format!("\0OMPI_COMM_WORLD_RANK={rank}\0"))
                || has(&variables, &format!("\0SLURM_PROCID={rank}\0"));
            if has(&line, &format!("--out\0{out}\0")) && (by_flag || by_variable) {
                return entry.file_name().into_string().unwrap();
            }
        }
        panic!("there is no rank {rank} of {out}");
    }

    pub fn signal(&self, out: &str, rank: usize, signal: &str) {
        Command::new("kill").args(["-s", signal, &self.process(out, rank)]).status().unwrap();
    }

    /// Kills a rank and the script that would start it again, which is its parent.
    pub fn remove_with_supervisor(&self, out: &str, rank: usize) {
        let process = self.process(out, rank);
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
        // After the name in parentheses: the state and the parent.
        let parent = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(1).unwrap().to_owned();
        for process in [parent, process] {
            Command::new("kill").args(["-KILL", &process]).status().unwrap();
        }
    }

    /// Checks that two runs have the same last checkpoint and log.
    pub fn assert_same_result(&self, one: &str, other: &str) {
        for name in ["model_00000160.bin", "state_00000160_00000.bin", "main.log"] {
            let read = |out: &str| fs::read(self.path(out).join(name)).unwrap();
            assert!(read(one) == read(other), "{name} of {one} and {other} differ");
        }
    }
}
