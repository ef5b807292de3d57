//! mpirun, the scripts, SLURM; runs that go on after they have lost ranks.

use crate::threads::PATIENCE;
use crate::world::{LONG, LOST, UNFIT, World, free_place, program, said, script};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// Where Open MPI is installed, as scripts/setup does it: the launcher itself.
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
    let (printed, errors) = said(&output);
    assert!(output.status.success(), "{printed}{errors}");
    assert!(printed.contains("2 ranks, connected by TCP") && printed.contains("step    8/8 | loss"), "{printed}");
    assert!(world.path("out/rank-1.log").exists() && world.path("out/DONE_00000008").exists());
}

#[test]
fn the_script_starts_ranks_and_hands_on_their_exit_code() {
    let world = World::new();
    let place = free_place();
    let run = |out: &str, more: &[&str]| {
        let more = [&["--rendezvous", &place][..], more].concat();
        let mut command = Command::new(script("several_gpus"));
        command.current_dir(world.dir.path()).arg("2").arg(program()).args(World::arguments(out, &more));
        command.output().unwrap()
    };
    let output = run("out", &[]);
    assert!(output.status.success(), "{:?}", said(&output));
    assert!(said(&output).0.contains("2 ranks, connected by TCP") && world.path("out/DONE_00000008").exists());
    let output = run("none", &["--lr", "-1"]);
    assert_eq!(output.status.code(), Some(2), "{:?}", said(&output));
    assert!(said(&output).1.contains("rank 1 (process "), "{:?}", said(&output));
}

/// A rank is killed, and one is stopped; the end is that of a run that was left alone.
#[test]
fn a_run_goes_on_after_it_has_lost_ranks() {
    let world = World::new();
    let run = |first: &[&str], out| world.script("several_gpus", first, out, &LONG).env("GRACE", "2").spawn().unwrap();
    let whole = run(&["2"], "whole").wait_with_output().unwrap();
    assert!(whole.status.success(), "{:?}", said(&whole));
    let hurt = run(&["--restarts", "2", "2"], "hurt");
    world.wait_for("hurt", 50);
    world.signal("hurt", 1, "KILL");
    world.wait_for("hurt", 200);
    world.signal("hurt", 1, "STOP");
    let output = hurt.wait_with_output().unwrap();
    let (printed, errors) = said(&output);
    assert!(output.status.success(), "{printed}{errors}");
    world.assert_same_end("whole", "hurt");
    for expected in [
        "has ended, or the connection to it; step ",
        ") was ended by SIGKILL\n",
        ": restart 1 of 2, from the checkpoint of step ",
        "nothing came from rank 1 (",
        ") does not end: killed\n",
        "exit code 4: restart 2 of 2, from the checkpoint of step ",
    ] {
        assert!(errors.contains(expected), "{expected:?} is not in {errors}");
    }
}

#[test]
fn a_run_of_mpirun_goes_on_after_it_has_lost_a_rank() {
    if Command::new("mpirun").arg("--version").output().is_err() {
        println!("no mpirun: run scripts/setup");
        return;
    }
    let world = World::new();
    let mpirun = ["mpirun", "-np", "2", "--oversubscribe"];
    let run =
        |restarts, out| world.script("restarts", &[&[restarts], &mpirun[..]].concat(), out, &LONG).spawn().unwrap();
    let whole = run("0", "whole").wait_with_output().unwrap();
    assert!(whole.status.success(), "{:?}", said(&whole));
    let hurt = run("1", "hurt");
    world.wait_for("hurt", 50);
    world.signal("hurt", 0, "KILL");
    let output = hurt.wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}", said(&output));
    world.assert_same_end("whole", "hurt");
    assert!(said(&output).1.contains(": restart 1 of 1, from the checkpoint of step "), "{:?}", said(&output));
}

/// Two hosts of two ranks, which meet by a file, and by a host's name and a port.
#[test]
fn a_slurm_job_on_two_hosts_goes_on_after_it_has_lost_a_rank() {
    let world = World::new();
    let here = world.dir.path();
    std::os::unix::fs::symlink(script(""), here.join("scripts")).unwrap();
    let stand_in = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/stand_in");
    let path = format!("{}:{}", stand_in.display(), std::env::var("PATH").unwrap());
    let job = |mut command: Command, id: &str| {
        command.env("PATH", &path).env("TMPDIR", here).env("SLURM_JOB_ID", id).env("SLURM_SUBMIT_DIR", here);
        command.spawn().unwrap()
    };
    let quick = [&LONG[..], &["--total-batch", "128"]].concat();
    let by_file = |out, id| job(world.script("slurm.sbatch", &[], out, &quick), id);
    let whole = by_file("whole", "7").wait_with_output().unwrap();
    assert!(whole.status.success() && said(&whole).0.contains("4 ranks, connected by TCP"), "{:?}", said(&whole));
    let hurt = by_file("hurt", "8");
    world.wait_for("hurt", 50);
    world.signal("hurt", 3, "KILL");
    let output = hurt.wait_with_output().unwrap();
    let (printed, errors) = said(&output);
    assert!(output.status.success(), "{printed}{errors}");
    world.assert_same_end("whole", "hurt");
    assert!(errors.contains("restarts: exit code 137: restart 1 of 3, from the checkpoint of step "), "{errors}");
    let apart = Command::new("unshare").args("--user --map-root-user --net --uts --mount true".split(' ')).status();
    let apart = apart.is_ok_and(|status| status.success());
    if apart {
        assert!(errors.contains("rank 3 (node1, process "), "{errors}");
    } else {
        println!("no namespaces: all ranks were on one host");
    }
    assert!(!fs::read_dir(here).unwrap().any(|e| e.unwrap().file_name().to_string_lossy().starts_with("rendezvous-")));
    let mut by_name = world.bare(&stand_in.join("srun"));
    by_name.arg("--wait=60").arg(program());
    let place = if apart { "tcp://node0:29417" } else { "tcp://127.0.0.1:29417" };
    by_name.args(World::arguments("name", &["--rendezvous", place]));
    let output = job(by_name, "9").wait_with_output().unwrap();
    assert!(output.status.success() && said(&output).0.contains("step    8/8 | loss"), "{:?}", said(&output));
}

#[test]
fn what_would_fail_again_and_what_was_asked_to_stop_is_not_started_again() {
    let world = World::new();
    let run = |out, more: &[&str]| {
        world.script("several_gpus", &["--restarts", "3", "2"], out, more).process_group(0).spawn().unwrap()
    };
    let wrong: [(&[&str], i32, &str); 3] = [
        (&["--lr=-1"], 2, "--lr"),
        (&["--train", "nothing_*.bin"], UNFIT, "nothing_*.bin"),
        (&["--total-batch", "100"], UNFIT, "--total-batch"),
    ];
    for (more, code, cause) in wrong {
        let output = run("none", more).wait_with_output().unwrap();
        let errors = said(&output).1;
        // Whichever rank ends first: the one that failed, or one that was told.
        assert!([1, code].contains(&output.status.code().unwrap()), "{errors}");
        assert!(errors.contains("the run would fail again") && !errors.contains(": restart "), "{errors}");
        assert!(errors.contains(cause), "{errors}");
    }
    let asked = run("asked", &["--steps", "100000", "--checkpoint-every", "0"]);
    let (log, deadline) = (world.path("asked/main.log"), Instant::now() + PATIENCE);
    while fs::read_to_string(&log).map_or(0, |text| text.lines().count()) < 5 {
        assert!(Instant::now() < deadline, "the run does not begin");
        thread::sleep(Duration::from_millis(20));
    }
    // As a terminal does it: to all that have not left the group.
    Command::new("kill").args(["-INT", "--", &format!("-{}", asked.id())]).status().unwrap();
    let output = asked.wait_with_output().unwrap();
    let (printed, errors) = said(&output);
    assert!(output.status.success() && printed.contains("stopped after "), "{printed}{errors}");
    assert!(!errors.contains(": restart "), "{errors}");
    // Each rank has heard it once: the second time ends it.
    assert_eq!(errors.matches("SIGINT: stopping after this step").count(), 2, "{errors}");
}

#[test]
fn restarts_end_where_a_run_gets_no_further() {
    let world = World::new();
    let out = world.path("out");
    fs::create_dir(&out).unwrap();
    let run = |restarts: &str, command: &str| {
        let mut run = Command::new(script("restarts"));
        run.current_dir(world.dir.path()).args([restarts, "bash", "-c", command, "run", "--out", "out"]);
        run.output().unwrap()
    };
    let begun = |name: &str| fs::read_to_string(world.path(name)).unwrap().lines().count();
    let output = run("9", "echo >>stands; kill -KILL $$");
    let text =
        "restarts: exit code 137: no restart after 3 failures without progress past the beginning (no checkpoint)\n";
    assert!(said(&output).1.ends_with(text), "{:?}", said(&output));
    assert_eq!((output.status.code(), begun("stands")), (Some(137), 3));
    // Each time it gets further, and each time it is lost; from the second start on, it is asked to resume.
    let further = "n=$(cat DONE 2>/dev/null || echo 0); echo \"$@\" >>goes; echo $((n + 9)) >DONE; \
                   touch out/DONE_0000$(printf %04d $n); exit 4";
    let output = run("4", further);
    let text =
        "exit code 4 after 4 restarts; run the same command with --resume to continue from the checkpoint of step 36\n";
    assert!(said(&output).1.ends_with(text), "{:?}", said(&output));
    let arguments = fs::read_to_string(world.path("goes")).unwrap();
    assert_eq!(arguments, format!("--out out\n{}", "--out out --resume\n".repeat(4)));
    assert_eq!(output.status.code(), Some(LOST));
    // Without a place for checkpoints there is nothing to go on from.
    let output = Command::new(script("restarts")).args(["1", "true"]).output().unwrap();
    assert!(output.status.code() == Some(2) && said(&output).1.contains("no --out DIR"), "{:?}", said(&output));
}
