//! Launchers on clusters: mpirun on two hosts, which are network namespaces, and SLURM with one node.

use crate::elastic::{ELASTIC, assert_same_files, resume, resumed_after};
use crate::threads::TIMEOUT;
use crate::world::{LONG, World, output_text, program, script, two_free_ports};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// Silence after which a rank counts as lost, and time to report it.
const END_LIMIT: Duration = Duration::from_secs(30);

fn tool(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/clusters").join(name)
}

/// Returns whether programs are installed; prints what is missing.
fn installed(programs: &[&str], package: &str) -> bool {
    let missing: Vec<_> =
        programs.iter().filter(|program| Command::new(program).arg("--version").output().is_err()).collect();
    if !missing.is_empty() {
        println!("skipped: {missing:?} not found (Debian: {package}); run scripts/setup --clusters");
    }
    missing.is_empty()
}

/// Returns whether mpirun can run on two hosts; prints the reason if not.
fn has_two_hosts() -> bool {
    if !installed(&["mpirun"], "openmpi-bin") || !installed(&["ip"], "iproute2") {
        return false;
    }
    let status = Command::new(tool("two_hosts")).arg("true").status().unwrap();
    if status.code() == Some(77) {
        println!("skipped: this system allows no network namespaces");
    } else {
        assert!(status.success(), "{status}");
    }
    status.success()
}

/// Returns the command that starts mpirun on node0, with ranks on both hosts.
fn mpirun(world: &World, ranks: usize) -> Command {
    let mut command = world.bare(&tool("two_hosts"));
    let hosts = format!("10.77.0.1:{},10.77.0.2:{}", ranks / 2, ranks / 2);
    command.args(["mpirun", "-np", &ranks.to_string(), "-H", &hosts, "--mca", "oob_tcp_if_include", "10.77.0.0/24"]);
    command.args(["--mca", "plm_rsh_agent"]).arg(tool("rsh")).arg(program());
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command
}

#[test]
fn mpirun_connects_two_hosts() {
    if !has_two_hosts() {
        return;
    }
    let world = World::new();
    let by_file = format!("file://{}", world.dir.path().display());
    // The name of rank 0's host is an address of both hosts, and the default route leads nowhere.
    for (out, endpoint, wrong_addresses) in
        [("port", "tcp://node0:29417", false), ("file", &by_file, false), ("wrong", &by_file, true)]
    {
        let mut command = mpirun(&world, 4);
        command.args(World::arguments(out, &["--rendezvous", endpoint]));
        if wrong_addresses {
            command.env("WRONG_ADDRESSES", "yes");
        }
        let output = command.output().unwrap();
        let (printed, errors) = output_text(&output);
        assert!(output.status.success(), "{out}: {printed}{errors}");
        assert!(printed.contains("4 ranks, connected by TCP") && printed.contains("step    8/8 | loss"), "{printed}");
    }
    let read = |out: &str| fs::read(world.path(out).join("model_00000008.bin")).unwrap();
    assert!(read("port") == read("file") && read("port") == read("wrong"));
}

#[test]
#[ignore = "slow: scripts/nightly runs it"]
fn ranks_end_soon_after_the_link_between_hosts_is_cut() {
    if !has_two_hosts() {
        return;
    }
    let world = World::new();
    let mut command = world.bare(&tool("two_hosts"));
    // mpirun itself does not end without the other host.
    let script = r#""$@" & until [ -e cut ]; do sleep 0.05; done; ip link set eth0 down; touch is_cut; wait"#;
    command.args(["bash", "-c", script, "bash"]);
    command.args(mpirun(&world, 2).get_args());
    command.args(World::arguments("out", &[&LONG[..], &["--steps", "1000000", "--keep", "1"]].concat()));
    command.args(["--rendezvous", "tcp://10.77.0.1:29417"]);
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    let errors = world.path("errors");
    let mut job = command.stderr(fs::File::create(&errors).unwrap()).process_group(0).spawn().unwrap();
    world.wait_for("out", 20);
    let ranks = [0, 1].map(|rank| Path::new("/proc").join(world.process("out", rank)));
    fs::write(world.path("cut"), "").unwrap();
    wait_until("the link is cut", || world.path("is_cut").exists());
    let start = Instant::now();
    while ranks.iter().any(|rank| is_running(rank)) {
        assert!(start.elapsed() < END_LIMIT, "ranks still run {END_LIMIT:?} after the link was cut");
        thread::sleep(Duration::from_millis(50));
    }
    kill_all_in(world.dir.path());
    job.wait().unwrap();
    let errors = fs::read_to_string(errors).unwrap();
    assert!(
        errors.contains("error: rank 1 (node1, process ") && errors.contains(") timed out: no message for "),
        "{errors}"
    );
}

/// SLURM with one node, until dropped.
struct Slurm {
    dir: tempfile::TempDir,
}

impl Slurm {
    /// Starts SLURM, or prints why it cannot.
    fn start() -> Option<Self> {
        if !installed(&["srun", "slurmctld", "munged"], "slurm-wlm munge") {
            return None;
        }
        if fs::metadata("/proc/self").unwrap().uid() != 0 {
            println!("skipped: only root can start slurmd");
            return None;
        }
        let slurm = Self { dir: tempfile::tempdir().unwrap() };
        let port = two_free_ports().to_string();
        let start = Command::new(tool("slurm")).arg("start").arg(slurm.dir.path()).arg(port).output().unwrap();
        assert!(start.status.success(), "{:?}", output_text(&start));
        Some(slurm)
    }

    fn command(&self, world: &World, program: &str) -> Command {
        let mut command = world.bare(Path::new(program));
        command.env("SLURM_CONF", self.dir.path().join("slurm.conf"));
        command
    }

    /// Submits the file for SLURM with `--output OUT.txt`. Returns the number of the job.
    fn sbatch(&self, world: &World, flags: &[&str], out: &str, more: &[&str]) -> String {
        let mut command = self.command(world, "sbatch");
        command.args(["--parsable", "--nodes", "1", "--gpus-per-node", "0", "--cpus-per-task", "1"]).args(flags);
        command.args(["--output", &format!("{out}.txt"), "scripts/slurm.sbatch"]).arg(program());
        let output = command.args(World::arguments(out, &[&LONG[..], more].concat())).output().unwrap();
        assert!(output.status.success(), "{:?}", output_text(&output));
        output_text(&output).0.trim().to_owned()
    }

    fn wait_for_end(&self, world: &World, job: &str) {
        wait_until("the job ends", || {
            let mut command = self.command(world, "squeue");
            let state = command.args(["--noheader", "--format=%T", "--jobs", job]).output().unwrap();
            output_text(&state).0.trim().is_empty()
        });
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        let _ = Command::new(tool("slurm")).arg("stop").arg(self.dir.path()).status();
    }
}

#[test]
fn slurm_starts_restarts_and_stops_runs() {
    let Some(slurm) = Slurm::start() else { return };
    let world = World::new();
    std::os::unix::fs::symlink(script(""), world.path("scripts")).unwrap();
    let mut srun = slurm.command(&world, "srun");
    srun.args(["-n", "2"]).arg(program()).args(World::arguments("srun", &[]));
    let output = srun.output().unwrap();
    let (printed, errors) = output_text(&output);
    assert!(output.status.success() && printed.contains("2 ranks, connected by TCP"), "{printed}{errors}");

    let sbatch = |out: &str, more: &[&str]| slurm.sbatch(&world, &["--ntasks-per-node", "2"], out, more);
    let log = |out: &str| fs::read_to_string(world.path(&format!("{out}.txt"))).unwrap_or_default();
    let reference = sbatch("reference", &[]);
    slurm.wait_for_end(&world, &reference);
    assert!(log("reference").contains("2 ranks, connected by TCP"), "{}", log("reference"));

    let interrupted = sbatch("interrupted", &[]);
    world.wait_for("interrupted", 20);
    world.signal("interrupted", 1, "KILL");
    slurm.wait_for_end(&world, &interrupted);
    let text = log("interrupted");
    assert!(text.contains(": restart 1 of 3, from the checkpoint of step "), "{text}");
    world.assert_same_result("reference", "interrupted");

    // As before a time limit (`#SBATCH --signal`).
    let stopped = sbatch("stopped", &["--steps", "1000000", "--keep", "1"]);
    world.wait_for("stopped", 20);
    let scancel = slurm.command(&world, "scancel").args(["--signal=TERM", &stopped]).status().unwrap();
    assert!(scancel.success());
    slurm.wait_for_end(&world, &stopped);
    let text = log("stopped");
    assert!(text.contains("SIGTERM: stopping after this step") && text.contains("stopped after "), "{text}");
    assert!(!text.contains(": restart "), "{text}");
}

/// The supervisor of the lost rank is killed too, as if its GPU or its host had failed. SLURM keeps the other processes.
#[test]
#[ignore = "slow: scripts/nightly runs it"]
fn slurm_continues_without_a_lost_rank() {
    let Some(slurm) = Slurm::start() else { return };
    let world = World::new();
    std::os::unix::fs::symlink(script(""), world.path("scripts")).unwrap();
    let job = slurm.sbatch(&world, &["--no-kill", "--ntasks-per-node", "3"], "out", &ELASTIC);
    world.wait_for("out", 20);
    world.remove_with_supervisor("out", 2);
    slurm.wait_for_end(&world, &job);
    let text = fs::read_to_string(world.path("out.txt")).unwrap();
    assert!(text.contains("note: 2 of 3 ranks take part: ranks 0, 1; rank 2 is missing; "), "{text}");
    let steps = resumed_after(&text);
    assert!(steps.len() == 1 && steps[0] >= 20, "{steps:?}: {text}");
    resume(&world, "out", steps[0], 2, "reference", &[]);
    assert_same_files(&world, "out", "reference", 1);
}

fn wait_until(event: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + 2 * TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "waited {:?} until {event}", 2 * TIMEOUT);
        thread::sleep(Duration::from_millis(50));
    }
}

/// Returns whether a process runs. One that has ended may wait for its parent.
fn is_running(process: &Path) -> bool {
    let state = fs::read_to_string(process.join("stat")).unwrap_or_default();
    state.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

/// Kills all processes whose working directory is `dir`.
fn kill_all_in(dir: &Path) {
    for process in fs::read_dir("/proc").unwrap().flatten() {
        if fs::read_link(process.path().join("cwd")).ok().as_deref() == Some(dir) {
            let _ = Command::new("kill").arg("-KILL").arg(process.file_name()).status();
        }
    }
}
