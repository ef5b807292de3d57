//! Runs that lose ranks for good and continue with the others (`--min-ranks`). Each rank has a supervisor of its own.

use crate::expert_parallel::create_model;
use crate::threads::TIMEOUT;
use crate::world::{
    LONG, PERMANENT, World, copy_checkpoint, free_endpoint, output_text, program, script, wait_for_all,
};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Output};
use std::thread;
use std::time::{Duration, Instant};

/// 12 micro-batches in a step, so that 4, 3 and 2 ranks are possible.
pub const ELASTIC: [&str; 6] = ["--total-batch", "384", "--min-ranks", "2", "--rendezvous-timeout", "4"];

/// The step of the log line and of the checkpoint at which runs end.
const LAST: usize = 160;

/// The ranks of a run, each under a supervisor of its own.
struct Ranks<'a> {
    world: &'a World,
    out: &'static str,
    more: Vec<&'a str>,
    supervisors: Vec<Option<Child>>,
}

impl<'a> Ranks<'a> {
    /// Starts some of four ranks.
    fn start(world: &'a World, out: &'static str, started: &[usize], more: &[&'a str]) -> Self {
        let more = [&LONG[..], &ELASTIC[..], more].concat();
        let mut ranks = Self { world, out, more, supervisors: (0..4).map(|_| None).collect() };
        for &rank in started {
            ranks.start_rank(rank);
        }
        ranks
    }

    /// Starts the supervisor of a rank, with the same command as the others.
    fn start_rank(&mut self, rank: usize) {
        let mut command = self.world.script("restarts", &["5"], self.out, &self.more);
        let text = rank.to_string();
        command.args(["--rank", &text, "--world-size", "4", "--local-rank", &text]);
        self.supervisors[rank] = Some(command.process_group(0).spawn().unwrap());
    }

    /// Kills a rank and its supervisor.
    fn remove(&mut self, rank: usize) {
        let mut supervisor = self.supervisors[rank].take().unwrap();
        supervisor.kill().unwrap();
        self.world.signal(self.out, rank, "KILL");
        supervisor.wait().unwrap();
    }

    /// Kills a rank, which its supervisor starts again.
    fn kill(&self, rank: usize) {
        self.world.signal(self.out, rank, "KILL");
    }

    /// Waits until all ranks have ended. Returns the output of each.
    fn outputs(&mut self) -> Vec<Option<Output>> {
        self.supervisors.iter_mut().map(|child| child.take().map(|child| child.wait_with_output().unwrap())).collect()
    }

    /// As [`outputs`](Self::outputs), and checks that all ranks have completed the run. Returns what all of them have printed.
    fn complete(&mut self) -> String {
        let outputs = self.outputs();
        assert!(outputs.iter().flatten().all(|output| output.status.success()), "{outputs:?}");
        let texts = outputs.iter().flatten().map(output_text);
        texts.map(|(printed, errors)| printed + &errors).collect()
    }
}

/// Returns the steps at which a run of these ranks resumed, in order.
pub fn resumed_after(text: &str) -> Vec<usize> {
    let lines = text.lines().filter_map(|line| line.strip_prefix("resumed after "));
    let mut steps: Vec<usize> = lines.map(|rest| rest.split(' ').next().unwrap().parse().unwrap()).collect();
    steps.sort_unstable();
    steps
}

/// Runs `ranks` ranks from the checkpoint of a step of another run to the end.
pub fn resume(world: &World, from: &str, step: usize, ranks: usize, out: &str, more: &[&str]) {
    copy_checkpoint(world, from, step, out);
    let more = [&LONG[..], &ELASTIC[..2], &["--resume"], more].concat();
    let outputs = world.ranks(ranks, out, out, &more);
    assert!(outputs.iter().all(|output| output.status.success()), "{outputs:?}");
}

pub fn assert_same_files(world: &World, one: &str, other: &str, states: usize) {
    let states = (0..states).map(|rank| format!("state_{LAST:08}_{rank:05}.bin"));
    for name in [format!("model_{LAST:08}.bin"), "main.log".to_owned()].into_iter().chain(states) {
        let read = |out: &str| fs::read(world.path(out).join(&name)).unwrap();
        assert!(read(one) == read(other), "{name} of {one} and {other} differ");
    }
}

fn wait_for_text(file: &Path, text: &str) {
    let deadline = Instant::now() + TIMEOUT;
    while !fs::read_to_string(file).is_ok_and(|found| found.contains(text)) {
        assert!(Instant::now() < deadline, "{text:?} is not in {}", file.display());
        thread::sleep(Duration::from_millis(20));
    }
}

/// The main acceptance: the first rank is removed.
#[test]
fn a_run_without_its_first_rank_has_the_bits_of_a_run_of_that_size() {
    assert_continues_without(0, "first", &World::new(), &[]);
}

/// Twelve experts divide among four ranks and among three.
#[test]
fn a_run_whose_ranks_share_experts_continues_without_a_rank() {
    let world = World::new();
    create_model(&world);
    let shared = ["--model", "experts", "--expert-parallel", "--zero-stage", "1"];
    let mut ranks = Ranks::start(&world, "shared", &[0, 1, 2, 3], &shared);
    world.wait_for("shared", 20);
    ranks.remove(1);
    let text = ranks.complete();
    let steps = resumed_after(&text);
    assert!(steps.len() == 1 && steps[0] >= 20, "{steps:?}: {text}");
    resume(&world, "shared", steps[0], 3, "reference", &shared);
    let states = (0..3).map(|rank| format!("state_{LAST:08}_{rank:05}.bin"));
    for name in [format!("model_{LAST:08}.safetensors"), "main.log".to_owned()].into_iter().chain(states) {
        let [found, expected] = ["shared", "reference"].map(|out| fs::read(world.path(out).join(&name)).unwrap());
        assert!(found == expected, "{name} differs");
    }
}

/// The other kinds of rendezvous, another rank, and parameters in shards.
#[test]
#[ignore = "slow: scripts/nightly runs it"]
fn every_rendezvous_continues_without_a_rank() {
    assert_continues_without(2, "other", &World::new(), &["--rendezvous", &free_endpoint()]);
    let world = World::new();
    let file = format!("file://{}", world.dir.path().display());
    assert_continues_without(0, "sharded", &world, &["--zero-stage", "2", "--shard-size", "2", "--rendezvous", &file]);
}

fn assert_continues_without(removed: usize, out: &'static str, world: &World, more: &[&str]) {
    let mut ranks = Ranks::start(world, out, &[0, 1, 2, 3], more);
    world.wait_for(out, 40);
    ranks.remove(removed);
    let text = ranks.complete();
    let steps = resumed_after(&text);
    assert!(steps.len() == 1 && steps[0] >= 40, "{steps:?}: {text}");
    let remaining: Vec<_> = (0..4).filter(|&rank| rank != removed).map(|rank| rank.to_string()).collect();
    let expected = format!(
        "note: 3 of 4 ranks take part: ranks {}, now numbered from 0 to 2; rank {removed} is missing; others join at the next \
         restart; each rank computes 4 micro-batches in a step\n",
        remaining.join(", ")
    );
    assert!(text.contains(&expected), "{expected}: {text}");
    assert!(text.contains("note: the world size was 4 and is now 3: "), "{text}");
    let (sharded, more) = (out == "sharded", &more[..more.len().min(2)]);
    let more = if sharded { [more, &["--shard-size", "3"]].concat() } else { Vec::new() };
    assert_eq!(sharded, text.contains("note: --shard-size is 3 instead of 2: 2 does not divide 3 ranks\n"), "{text}");
    let reference = format!("reference-{out}");
    resume(world, out, steps[0], 3, &reference, &more);
    assert_same_files(world, out, &reference, if sharded { 3 } else { 1 });
}

/// Three ranks do not divide 8 micro-batches, so that one of them is spare until another one is lost.
#[test]
#[ignore = "slow: scripts/nightly runs it"]
fn a_spare_rank_waits_and_replaces_the_next_lost_one() {
    let world = World::new();
    let mut ranks = Ranks::start(&world, "out", &[0, 1, 2, 3], &["--total-batch", "256"]);
    world.wait_for("out", 20);
    ranks.remove(1);
    wait_for_text(&world.path("out/run.lock"), r#""ranks":[0,2],"spare":[3]"#);
    world.wait_for("out", 60);
    ranks.remove(0);
    let text = ranks.complete();
    let steps = resumed_after(&text);
    assert!(steps.last().is_some_and(|&step| step >= 60), "{steps:?}: {text}");
    assert!(
        text.contains("note: 2 of 4 ranks take part: ranks 2, 3, now numbered from 0 to 1; ranks 0, 1 are missing; "),
        "{text}"
    );
    resume(&world, "out", steps[steps.len() - 1], 2, "reference", &["--total-batch", "256"]);
    assert_same_files(&world, "out", "reference", 1);
}

#[test]
fn a_new_rank_joins_at_the_next_restart() {
    let world = World::new();
    let mut ranks = Ranks::start(&world, "out", &[0, 1, 2, 3], &[]);
    world.wait_for("out", 20);
    ranks.remove(3);
    wait_for_text(&world.path("out/run.lock"), r#""ranks":[0,1,2]"#);
    // The same command again. The run in progress is not interrupted.
    ranks.start_rank(3);
    world.wait_for("out", 60);
    assert!(fs::read_to_string(world.path("out/run.lock")).unwrap().contains(r#""ranks":[0,1,2]"#));
    ranks.kill(1);
    let text = ranks.complete();
    let steps = resumed_after(&text);
    let grown = *steps.last().unwrap();
    assert!(grown >= 60 && text.contains("note: the world size was 3 and is now 4: "), "{steps:?}: {text}");
    resume(&world, "out", grown, 4, "reference", &[]);
    assert_same_files(&world, "out", "reference", 1);
    // A rank that comes after the end has nothing to do, and changes nothing.
    ranks.start_rank(2);
    let text = ranks.complete();
    assert!(
        text.contains("note: rank 2: the run in out has completed all its steps; there is nothing left to do\n"),
        "{text}"
    );
    assert_same_files(&world, "out", "reference", 1);
}

#[test]
fn a_rank_that_waits_for_a_run_says_so() {
    let world = World::new();
    let more = ["--steps", "1000000", "--keep", "1"];
    let mut ranks = Ranks::start(&world, "out", &[0, 1, 2], &more);
    world.wait_for("out", 20);
    ranks.start_rank(3);
    thread::sleep(Duration::from_secs(8));
    let all = ranks.supervisors.iter().flatten().map(|child| format!("-{}", child.id()));
    // As a launcher does: to all ranks, also to the one that waits.
    Command::new("kill").args(["-TERM", "--"]).args(all).status().unwrap();
    let outputs = ranks.outputs();
    let texts: Vec<_> = outputs.iter().flatten().map(output_text).collect();
    assert!(outputs.iter().flatten().all(|output| output.status.code() == Some(143)), "{outputs:?}");
    assert!(texts[0].0.contains("stopped after "), "{texts:?}");
    let note = "note: rank 3 waits: the run in out is at step ";
    let rest = " of 1000000 with 3 of 4 ranks (ranks 0, 1, 2); this process joins at the next restart\n";
    assert!(texts[3].1.contains(note) && texts[3].1.contains(rest), "{texts:?}");
}

#[test]
fn too_few_ranks_end_the_run() {
    let world = World::new();
    let mut ranks = Ranks::start(&world, "out", &[0, 1, 2], &["--min-ranks", "3"]);
    world.wait_for("out", 20);
    ranks.remove(1);
    let outputs = ranks.outputs();
    let texts: Vec<_> = outputs.iter().flatten().map(output_text).collect();
    assert!(outputs.iter().flatten().all(|output| output.status.code() == Some(PERMANENT)), "{outputs:?}");
    let expected = "error: rendezvous: expected at least 3 ranks (--min-ranks) within 4 s, found 2 (ranks 0, 2); start ranks 1, 3 \
                    again with the same command, or continue with a smaller --min-ranks\n";
    assert_eq!(texts.iter().filter(|(_, errors)| errors.contains(expected)).count(), 1, "{texts:?}");
    // The run can still be continued.
    let mut ranks = Ranks::start(&world, "out", &[0, 2], &["--min-ranks", "2"]);
    let steps = resumed_after(&ranks.complete());
    assert!(steps.len() == 1 && steps[0] >= 20, "{steps:?}");
}

/// A rank that was stopped for a while is replaced. It changes nothing when it runs again, and waits for its part.
#[test]
#[ignore = "slow: scripts/nightly runs it"]
fn a_rank_that_comes_back_late_changes_nothing() {
    let world = World::new();
    let mut ranks = Ranks::start(&world, "out", &[0, 1, 2, 3], &["--zero-stage", "1"]);
    world.wait_for("out", 20);
    let stopped = world.process("out", 2);
    let signal = |name: &str| Command::new("kill").args(["-s", name, &stopped]).status().unwrap();
    signal("STOP");
    wait_for_text(&world.path("out/run.lock"), r#""ranks":[0,1,3]"#);
    signal("CONT");
    let text = ranks.complete();
    let steps = resumed_after(&text);
    assert!(steps.len() == 1 && steps[0] >= 20, "{steps:?}: {text}");
    assert!(text.contains("note: rank 2: the run in out has completed all its steps; "), "{text}");
    resume(&world, "out", steps[0], 3, "reference", &["--zero-stage", "1"]);
    assert_same_files(&world, "out", "reference", 3);
}

/// Without `--min-ranks`, ranks that are restarted one by one wait for all others, and fail without one of them.
#[test]
fn without_min_ranks_a_missing_rank_ends_the_run() {
    let world = World::new();
    let endpoint = free_endpoint();
    let more = [&LONG[..], &["--rendezvous", &endpoint, "--rendezvous-timeout", "4"]].concat();
    let start = |rank: &str| {
        let mut command = world.script("restarts", &["5"], "out", &more);
        command.args(["--rank", rank, "--world-size", "2"]).spawn().unwrap()
    };
    let [first, mut removed] = ["0", "1"].map(start);
    world.wait_for("out", 20);
    removed.kill().unwrap();
    world.signal("out", 1, "KILL");
    removed.wait().unwrap();
    let output = first.wait_with_output().unwrap();
    let (printed, errors) = output_text(&output);
    assert_eq!(output.status.code(), Some(PERMANENT), "{printed}{errors}");
    assert!(errors.contains("rendezvous: expected 2 ranks within 4 s, found 1 (rank 0), missing rank 1; "), "{errors}");
    assert!(!world.path("out/run.lock").exists());
}

#[test]
fn settings_that_depend_on_the_number_of_ranks_are_required() {
    let world = World::new();
    let train = ["train", "--device", "cpu", "--min-ranks", "1", "--rank", "0", "--world-size", "2"];
    let output = world.bare(program()).args(train).output().unwrap();
    let (_, errors) = output_text(&output);
    assert_eq!(output.status.code(), Some(2), "{errors}");
    for flag in ["--out", "--batch", "--seq", "--total-batch", "--steps"] {
        assert!(errors.contains(flag), "{flag}: {errors}");
    }
    let run = |more: &[&str]| {
        let output = world.command(program(), "out", more).args(["--rank", "0", "--world-size", "2"]).output().unwrap();
        (output.status.code(), output_text(&output).1)
    };
    let (code, errors) = run(&["--min-ranks", "1", "--steps", "-1"]);
    assert!(code == Some(1) && errors.contains("--min-ranks: expected a number of --steps, found none"), "{errors}");
    let start = Instant::now();
    let (code, errors) = run(&["--min-ranks", "1", "--total-batch", "100"]);
    // It does not wait for the other rank.
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    let text = "error: --total-batch 100: expected a multiple of batch x seq = 2 x 16 = 32";
    assert!(code == Some(1) && errors.contains(text), "{errors}");
    let (code, errors) = run(&["--min-ranks", "2", "--total-batch", "96"]);
    let text = "--min-ranks 2: expected a number of ranks from 2 to 2 that divides the 3 micro-batches of a step";
    assert!(code == Some(PERMANENT) && errors.contains(text), "{errors}");
}

/// A rank may become rank 0 at the next restart, so each must find the checkpoint. Here a mount namespace gives rank 1 another directory
/// at the same path, as on a host with a disk of its own.
#[test]
fn a_directory_that_ranks_do_not_share_is_an_error() {
    let world = World::new();
    let unshare = || world.bare(Path::new("unshare"));
    if !unshare().args(["--mount", "true"]).status().is_ok_and(|status| status.success()) {
        println!("skipped: this system allows no mount namespaces");
        return;
    }
    assert!(world.ranks(2, "job", "whole", &[]).iter().all(|output| output.status.success()));
    copy_checkpoint(&world, "whole", 4, "out");
    fs::create_dir(world.path("other")).unwrap();
    let endpoint = free_endpoint();
    let start = |rank: &str| {
        let more =
            ["--min-ranks", "1", "--rendezvous", &endpoint, "--rank", rank, "--world-size", "2", "--local-rank", rank];
        let arguments = World::arguments("out", &more);
        if rank == "0" {
            return world.bare(program()).args(arguments).spawn().unwrap();
        }
        let script = r#"mount --bind other out && exec "$@""#;
        unshare().args(["--mount", "bash", "-c", script, "bash"]).arg(program()).args(arguments).spawn().unwrap()
    };
    let outputs = wait_for_all(["0", "1"].map(start));
    let texts: Vec<_> = outputs.iter().map(output_text).collect();
    let expected = "--out: expected a directory that all hosts share, since each rank reads the checkpoint";
    assert!(outputs.iter().all(|output| !output.status.success()), "{texts:?}");
    assert!(texts.iter().any(|(_, errors)| errors.contains(expected)), "{texts:?}");
}

/// All ranks under one script. It ends when the run has ended, also if some ranks have not.
#[test]
#[ignore = "slow: scripts/nightly runs it"]
fn several_gpus_continues_without_a_lost_rank() {
    let world = World::new();
    let more = [&LONG[..], &ELASTIC[..]].concat();
    let run = world.script("several_gpus", &["--restarts", "3", "4"], "out", &more).spawn().unwrap();
    world.wait_for("out", 20);
    world.remove_with_supervisor("out", 3);
    let output = run.wait_with_output().unwrap();
    let (printed, errors) = output_text(&output);
    assert!(output.status.success(), "{printed}{errors}");
    assert!(printed.contains("note: 3 of 4 ranks take part: ranks 0, 1, 2; rank 3 is missing; "), "{printed}");
    assert!(
        errors.contains("several_gpus: rank 3 (process ") && errors.contains(") was ended by SIGKILL\n"),
        "{errors}"
    );
    let step = resumed_after(&printed)[0];
    resume(&world, "out", step, 3, "reference", &[]);
    assert_same_files(&world, "out", "reference", 1);
}

/// mpirun does not end the other processes with `--enable-recovery`. Skipped if Open MPI is not installed.
#[test]
#[ignore = "slow: scripts/nightly runs it"]
fn mpirun_continues_without_a_lost_rank() {
    if Command::new("mpirun").arg("--version").output().is_err() {
        println!("skipped: no mpirun: run scripts/setup");
        return;
    }
    let world = World::new();
    let mut command = world.bare(Path::new("mpirun"));
    command.args(["-np", "4", "--oversubscribe", "--enable-recovery"]).arg(script("restarts")).arg("3").arg(program());
    command.args(World::arguments("out", &[&LONG[..], &ELASTIC[..]].concat()));
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    let run = command.spawn().unwrap();
    world.wait_for("out", 20);
    world.remove_with_supervisor("out", 0);
    let output = run.wait_with_output().unwrap();
    let (printed, errors) = output_text(&output);
    assert!(world.path("out").join(format!("DONE_{LAST:08}")).exists(), "{printed}{errors}");
    assert!(printed.contains("note: 3 of 4 ranks take part: ranks 1, 2, 3, now numbered from 0 to 2; "), "{printed}");
    let step = resumed_after(&printed)[0];
    resume(&world, "out", step, 3, "reference", &[]);
    assert_same_files(&world, "out", "reference", 1);
}
