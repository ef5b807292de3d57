//! Launchers (mpirun, scripts/several_gpus, SLURM) and restarts after lost ranks.

use crate::threads::TIMEOUT;
use crate::world::{LONG, PERMANENT, RECOVERABLE, World, free_endpoint, output_text, program, script};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// Skipped if Open MPI is not installed.
#[test]
fn mpirun_starts_ranks() {
    let version = Command::new("mpirun").arg("--version").output();
    let Ok(version) = version else {
        println!("no mpirun: run scripts/setup");
        return;
    };
    assert!(String::from_utf8_lossy(&version.stdout).contains("Open MPI"), "{version:?}");
    let world = World::new();
    let mut command = Command::new("mpirun");
    command.args(["-np", "2", "--oversubscribe"]).arg(program()).args(World::arguments("out", &[]));
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    let output = command.current_dir(world.dir.path()).output().unwrap();
    let (printed, errors) = output_text(&output);
    assert!(output.status.success(), "{printed}{errors}");
    assert!(printed.contains("2 ranks, connected by TCP") && printed.contains("step    8/8 | loss"), "{printed}");
    assert!(world.path("out/rank-1.log").exists() && world.path("out/DONE_00000008").exists());
}

#[test]
fn several_gpus_starts_ranks_and_returns_their_exit_code() {
    let world = World::new();
    let endpoint = free_endpoint();
    let run = |out: &str, more: &[&str]| {
        let more = [&["--rendezvous", &endpoint][..], more].concat();
        let mut command = Command::new(script("several_gpus"));
        command.current_dir(world.dir.path()).arg("2").arg(program()).args(World::arguments(out, &more));
        command.output().unwrap()
    };
    let output = run("out", &[]);
    assert!(output.status.success(), "{:?}", output_text(&output));
    assert!(output_text(&output).0.contains("2 ranks, connected by TCP") && world.path("out/DONE_00000008").exists());
    let output = run("none", &["--lr", "-1"]);
    assert_eq!(output.status.code(), Some(2), "{:?}", output_text(&output));
    assert!(output_text(&output).1.contains("rank 1 (process "), "{:?}", output_text(&output));
}

#[test]
fn several_gpus_starts_the_ranks_of_one_of_two_hosts() {
    let world = World::new();
    let endpoint = free_endpoint();
    let start = |node: &str| {
        let mut command = world.script("several_gpus", &["2"], "out", &["--rendezvous", &endpoint]);
        command.env("NODES", "2").env("NODE_RANK", node).spawn().unwrap()
    };
    let hosts = ["1", "0"].map(start).map(|host| host.wait_with_output().unwrap());
    assert!(hosts.iter().all(|output| output.status.success()), "{hosts:?}");
    assert!(output_text(&hosts[1]).0.contains("4 ranks, connected by TCP"), "{hosts:?}");
    assert!(output_text(&hosts[0]).0.is_empty() && world.path("out/rank-3.log").exists(), "{hosts:?}");
    let output = start("2").wait_with_output().unwrap();
    assert!(
        output.status.code() == Some(2)
            && output_text(&output).1.contains("expected a number below NODES (2), found 2")
    );
}

/// One rank is killed, later one is stopped. The result equals that of an uninterrupted run.
#[test]
fn a_run_resumes_after_lost_ranks() {
    let world = World::new();
    let run = |first: &[&str], out| world.script("several_gpus", first, out, &LONG).env("GRACE", "2").spawn().unwrap();
    let reference = run(&["2"], "reference").wait_with_output().unwrap();
    assert!(reference.status.success(), "{:?}", output_text(&reference));
    let interrupted = run(&["--restarts", "2", "2"], "interrupted");
    world.wait_for("interrupted", 20);
    world.signal("interrupted", 1, "KILL");
    world.wait_for("interrupted", 80);
    world.signal("interrupted", 1, "STOP");
    let output = interrupted.wait_with_output().unwrap();
    let (printed, errors) = output_text(&output);
    assert!(output.status.success(), "{printed}{errors}");
    world.assert_same_result("reference", "interrupted");
    for expected in [
        " disconnected during step ",
        ") was ended by SIGKILL\n",
        ": restart 1 of 2, from the checkpoint of step ",
        ") timed out: no message for ",
        ") does not end: killed\n",
        "exit code 4: restart 2 of 2, from the checkpoint of step ",
    ] {
        assert!(errors.contains(expected), "{expected:?} is not in {errors}");
    }
}

#[test]
fn a_run_of_mpirun_resumes_after_a_lost_rank() {
    if Command::new("mpirun").arg("--version").output().is_err() {
        println!("no mpirun: run scripts/setup");
        return;
    }
    let world = World::new();
    let mpirun = ["mpirun", "-np", "2", "--oversubscribe"];
    let run =
        |restarts, out| world.script("restarts", &[&[restarts], &mpirun[..]].concat(), out, &LONG).spawn().unwrap();
    let reference = run("0", "reference").wait_with_output().unwrap();
    assert!(reference.status.success(), "{:?}", output_text(&reference));
    let interrupted = run("1", "interrupted");
    world.wait_for("interrupted", 20);
    world.signal("interrupted", 0, "KILL");
    let output = interrupted.wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}", output_text(&output));
    world.assert_same_result("reference", "interrupted");
    assert!(
        output_text(&output).1.contains(": restart 1 of 1, from the checkpoint of step "),
        "{:?}",
        output_text(&output)
    );
}

/// Two hosts with two ranks each. The rendezvous uses a file, and then a host name and a port.
#[test]
fn a_slurm_job_on_two_hosts_resumes_after_a_lost_rank() {
    let world = World::new();
    let here = world.dir.path();
    std::os::unix::fs::symlink(script(""), here.join("scripts")).unwrap();
    let mock = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/mock");
    let path = format!("{}:{}", mock.display(), std::env::var("PATH").unwrap());
    let job = |mut command: Command, id: &str| {
        command.env("PATH", &path).env("TMPDIR", here).env("SLURM_JOB_ID", id).env("SLURM_SUBMIT_DIR", here);
        command.spawn().unwrap()
    };
    let quick = [&LONG[..], &["--total-batch", "128"]].concat();
    let by_file = |out, id| job(world.script("slurm.sbatch", &[], out, &quick), id);
    let reference = by_file("reference", "7").wait_with_output().unwrap();
    assert!(
        reference.status.success() && output_text(&reference).0.contains("4 ranks, connected by TCP"),
        "{:?}",
        output_text(&reference)
    );
    let interrupted = by_file("interrupted", "8");
    world.wait_for("interrupted", 20);
    world.signal("interrupted", 3, "KILL");
    let output = interrupted.wait_with_output().unwrap();
    let (printed, errors) = output_text(&output);
    assert!(output.status.success(), "{printed}{errors}");
    world.assert_same_result("reference", "interrupted");
    assert!(errors.contains("restarts: exit code 137: restart 1 of 3, from the checkpoint of step "), "{errors}");
    let two_hosts = Command::new("unshare").args("--user --map-root-user --net --uts --mount true".split(' ')).status();
    let two_hosts = two_hosts.is_ok_and(|status| status.success());
    if two_hosts {
        assert!(errors.contains("rank 3 (node1, process "), "{errors}");
    } else {
        println!("skipped two hosts: namespaces are not available");
    }
    assert!(!fs::read_dir(here).unwrap().any(|e| e.unwrap().file_name().to_string_lossy().starts_with("rendezvous-")));
    let mut by_name = world.bare(&mock.join("srun"));
    by_name.arg("--wait=60").arg(program());
    let endpoint = if two_hosts { "tcp://node0:29417" } else { "tcp://127.0.0.1:29417" };
    by_name.args(World::arguments("name", &["--rendezvous", endpoint]));
    let output = job(by_name, "9").wait_with_output().unwrap();
    assert!(
        output.status.success() && output_text(&output).0.contains("step    8/8 | loss"),
        "{:?}",
        output_text(&output)
    );
}

#[test]
fn permanent_failures_and_requested_stops_are_not_restarted() {
    let world = World::new();
    let run = |out, more: &[&str]| {
        world.script("several_gpus", &["--restarts", "3", "2"], out, more).process_group(0).spawn().unwrap()
    };
    let wrong: [(&[&str], i32, &str); 3] = [
        (&["--lr", "-1"], 2, "--lr"),
        (&["--train", "nothing_*.bin"], PERMANENT, "nothing_*.bin"),
        (&["--total-batch", "100"], PERMANENT, "--total-batch"),
    ];
    for (more, code, cause) in wrong {
        let output = run("none", more).wait_with_output().unwrap();
        let errors = output_text(&output).1;
        // The exit code is that of the rank that ends first: the failed rank, or another one.
        assert!([1, code].contains(&output.status.code().unwrap()), "{errors}");
        assert!(errors.contains("the run would fail again") && !errors.contains(": restart "), "{errors}");
        assert!(errors.contains(cause), "{errors}");
    }
    let stopped = run("stopped", &["--steps", "100000", "--checkpoint-every", "0"]);
    let (log, deadline) = (world.path("stopped/main.log"), Instant::now() + TIMEOUT);
    while fs::read_to_string(&log).map_or(0, |text| text.lines().count()) < 5 {
        assert!(Instant::now() < deadline, "the run does not start");
        thread::sleep(Duration::from_millis(20));
    }
    // Signals the process group, as a terminal does.
    Command::new("kill").args(["-INT", "--", &format!("-{}", stopped.id())]).status().unwrap();
    let output = stopped.wait_with_output().unwrap();
    let (printed, errors) = output_text(&output);
    assert!(output.status.code() == Some(130) && printed.contains("stopped after "), "{printed}{errors}");
    assert!(!errors.contains(": restart "), "{errors}");
    // Each rank must receive the signal once, because a second signal would end it immediately.
    assert_eq!(errors.matches("SIGINT: stopping after this step").count(), 2, "{errors}");
}

/// A closed terminal sends SIGHUP to the launcher, and nothing can be written to it any more. Batch systems send SIGUSR1 or SIGXCPU.
#[test]
fn launchers_forward_every_request_to_stop() {
    let cases: [(&str, &[&str], &str, i32); 6] = [
        ("several_gpus", &["2"], "HUP", 129),
        ("several_gpus", &["2"], "QUIT", 143),
        ("several_gpus", &["2"], "USR1", 143),
        ("several_gpus", &["--restarts", "3", "2"], "HUP", 129),
        ("several_gpus", &["--restarts", "3", "2"], "XCPU", 143),
        ("restarts", &["3"], "HUP", 129),
    ];
    thread::scope(|scope| {
        for case in cases {
            scope.spawn(move || forwards(case));
        }
    });
}

fn forwards((name, first, signal, code): (&str, &[&str], &str, i32)) {
    let case = format!("{name} {first:?} SIG{signal}");
    let world = World::new();
    let endless = ["--steps", "1000000", "--checkpoint-every", "0"];
    let mut launcher = world.script(name, first, "out", &endless).process_group(0).spawn().unwrap();
    let (log, deadline) = (world.path("out/main.log"), Instant::now() + TIMEOUT);
    while fs::read_to_string(&log).map_or(0, |text| text.lines().count()) < 5 {
        assert!(Instant::now() < deadline, "{case}: the run does not start");
        thread::sleep(Duration::from_millis(20));
    }
    drop((launcher.stdout.take(), launcher.stderr.take()));
    Command::new("kill").args(["-s", signal, &launcher.id().to_string()]).status().unwrap();
    assert_eq!(launcher.wait().unwrap().code(), Some(code), "{case}");
    let steps = fs::read_to_string(&log).unwrap().lines().filter(|line| line.contains("trl:")).count();
    assert!(world.path(&format!("out/DONE_{steps:08}")).exists(), "{case}: no checkpoint of step {steps}");
}

#[test]
fn restarts_end_if_a_run_makes_no_progress() {
    let world = World::new();
    let out = world.path("out");
    fs::create_dir(&out).unwrap();
    let run = |restarts: &str, command: &str| {
        let mut run = Command::new(script("restarts"));
        run.current_dir(world.dir.path()).args([restarts, "bash", "-c", command, "run", "--out", "out"]);
        run.output().unwrap()
    };
    let starts = |name: &str| fs::read_to_string(world.path(name)).unwrap().lines().count();
    let output = run("9", "echo >>stands; kill -KILL $$");
    let text =
        "restarts: exit code 137: no restart after 3 failures without progress past the beginning (no checkpoint)\n";
    assert!(output_text(&output).1.ends_with(text), "{:?}", output_text(&output));
    assert_eq!((output.status.code(), starts("stands")), (Some(137), 3));
    // Each start makes progress and fails. All starts but the first get --resume.
    let further = "n=$(cat DONE 2>/dev/null || echo 0); echo \"$@\" >>goes; echo $((n + 9)) >DONE; \
                   touch out/DONE_0000$(printf %04d $n); exit 4";
    let output = run("4", further);
    let text =
        "exit code 4 after 4 restarts; run the same command with --resume to continue from the checkpoint of step 36\n";
    assert!(output_text(&output).1.ends_with(text), "{:?}", output_text(&output));
    let arguments = fs::read_to_string(world.path("goes")).unwrap();
    assert_eq!(arguments, format!("--out out\n{}", "--out out --resume=auto\n".repeat(4)));
    assert_eq!(output.status.code(), Some(RECOVERABLE));
    // Without --out there are no checkpoints to resume from.
    let output = Command::new(script("restarts")).args(["1", "true"]).output().unwrap();
    assert!(
        output.status.code() == Some(2) && output_text(&output).1.contains("no --out DIR"),
        "{:?}",
        output_text(&output)
    );
}
