//! Runs of processes in a directory of their own.

use crate::threads::PATIENCE;
use data::tokens;
use rng::Mt19937;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A directory with data and a model, and runs of processes in it.
pub struct World {
    pub dir: TempDir,
}

impl World {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut rng = Mt19937::new(7);
        let mut ids = |n: usize| (0..n).map(|_| rng.below(97).min(rng.below(97)) as u16).collect::<Vec<u16>>();
        for (i, n) in [3000, 4005].into_iter().enumerate() {
            tokens::write(&dir.path().join(format!("train_{i}.bin")), &ids(n)).unwrap();
        }
        tokens::write(&dir.path().join("val_0.bin"), &ids(600)).unwrap();
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
        arguments.extend(more.iter().map(|&flag| flag.to_owned()));
        arguments
    }

    pub fn command(&self, program: &Path, out: &str, more: &[&str]) -> Command {
        let mut command = self.bare(program);
        command.args(Self::arguments(out, more));
        command
    }

    /// A process, with nothing of a launcher in its environment.
    pub fn bare(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.dir.path());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        for (name, _) in std::env::vars() {
            let launchers = ["OMPI_", "PMI", "PMIX_", "SLURM_", "MPI_", "RANK", "WORLD_SIZE", "LOCAL_"];
            if launchers.iter().any(|launcher| name.starts_with(launcher)) {
                command.env_remove(name);
            }
        }
        command
    }

    /// Rank `rank` of `ranks`, as torchrun starts it.
    pub fn rank(&self, rank: usize, ranks: usize, job: &str, out: &str, more: &[&str]) -> Child {
        let mut command = self.command(program(), out, more);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
        command.env("LOCAL_RANK", rank.to_string()).env("LOCAL_WORLD_SIZE", ranks.to_string());
        command.env("TORCHELASTIC_RUN_ID", format!("{job} {}", std::process::id()));
        command.spawn().unwrap()
    }

    pub fn ranks(&self, ranks: usize, job: &str, out: &str, more: &[&str]) -> Vec<Output> {
        let children: Vec<_> = (0..ranks).map(|rank| self.rank(rank, ranks, job, out, more)).collect();
        ended(children)
    }
}

/// What each of them has said, once it has ended.
pub fn ended(children: impl IntoIterator<Item = Child>) -> Vec<Output> {
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

pub fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_llm-rs"))
}

pub fn said(output: &Output) -> (String, String) {
    (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Copies what there is of the checkpoint of a step into a new directory, from which a run can go on.
pub fn only_step(world: &World, from: &str, step: usize, to: &str) {
    fs::create_dir(world.path(to)).unwrap();
    for entry in fs::read_dir(world.path(from)).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.contains(&format!("_{step:08}")) || name.starts_with("main") {
            fs::copy(world.path(from).join(&name), world.path(to).join(&name)).unwrap();
        }
    }
}

/// Exit codes of ranks that do not fit together, and of those that have lost one.
pub const UNFIT: i32 = 3;
pub const LOST: i32 = 4;

/// The message of rank 0, and that all others end in silence with the same code.
pub fn one_message(outputs: &[Output], code: i32) -> String {
    let (_, message) = said(&outputs[0]);
    assert_eq!(message.lines().count(), 1, "{message}");
    for (rank, output) in outputs.iter().enumerate() {
        assert_eq!(output.status.code(), Some(code), "rank {rank}: {:?}", said(output));
        assert!(rank == 0 || said(output).1.is_empty(), "rank {rank}: {:?}", said(output));
    }
    message
}

pub fn free_place() -> String {
    format!("tcp://{}", TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap())
}

pub fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts").join(name)
}

/// A run long enough to be disturbed.
pub const LONG: [&str; 8] = ["--steps", "400", "--checkpoint-every", "50", "--val-every", "200", "--check-ranks", "50"];

impl World {
    /// A launcher's script with arguments of its own, then the program with its.
    pub fn script(&self, name: &str, first: &[&str], out: &str, more: &[&str]) -> Command {
        // A shell cannot take back that SIGINT was ignored when it began, as by whoever started these tests in the background.
        let mut command = self.bare(Path::new("env"));
        command.arg("--default-signal=INT").arg(script(name));
        command.args(first).arg(program()).args(Self::arguments(out, more));
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        command
    }

    /// Waits for a checkpoint.
    pub fn wait_for(&self, out: &str, step: usize) {
        let (done, deadline) = (self.path(&format!("{out}/DONE_{step:08}")), Instant::now() + PATIENCE);
        while !done.exists() {
            assert!(Instant::now() < deadline, "there is no checkpoint of step {step} in {out}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The process that is rank `rank` of the run in `out`.
    pub fn process(&self, out: &str, rank: usize) -> String {
        let read = |path: PathBuf| fs::read(path).unwrap_or_default();
        let has = |bytes: &[u8], what: &str| bytes.windows(what.len()).any(|window| window == what.as_bytes());
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
        panic!("no process is rank {rank} of {out}");
    }

    pub fn signal(&self, out: &str, rank: usize, signal: &str) {
        Command::new("kill").args(["-s", signal, &self.process(out, rank)]).status().unwrap();
    }

    pub fn assert_same_end(&self, one: &str, other: &str) {
        for name in ["model_00000400.bin", "state_00000400_00000.bin", "main.log"] {
            let read = |out: &str| fs::read(self.path(out).join(name)).unwrap();
            assert!(read(one) == read(other), "{name} of {one} and {other} differ");
        }
    }
}
