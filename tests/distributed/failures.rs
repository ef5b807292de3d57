//! Ranks that do not fit together, fail, hang, are killed or asked to stop.

use crate::threads::PATIENCE;
use crate::world::{LOST, UNFIT, World, ended, free_place, one_message, program, said};
use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

#[test]
fn other_flags_are_named_by_rank_0() {
    let world = World::new();
    let place = free_place();
    let with = ["--rendezvous", &place];
    let children = vec![
        world.rank(0, 2, "flags", "out", &with),
        world.rank(1, 2, "flags", "out", &[&with[..], &["--lr", "0.1"]].concat()),
    ];
    let outputs = ended(children);
    let message = one_message(&outputs, UNFIT);
    assert!(
        message.contains("rank 1 (") && message.contains("has --lr 0.1, rank 0 has 0.003: start all ranks"),
        "{message}"
    );
}

#[test]
fn another_build_is_named_by_rank_0() {
    let world = World::new();
    let other = world.path("other");
    let mut bytes = fs::read(program()).unwrap();
    bytes.extend(b"another build");
    fs::write(&other, bytes).unwrap();
    Command::new("chmod").arg("+x").arg(&other).status().unwrap();
    let place = free_place();
    let start = |program: &Path, rank: &str| {
        world.command(program, "out", &["--rank", rank, "--world-size", "2", "--rendezvous", &place]).spawn().unwrap()
    };
    let children = [start(program(), "0"), start(&other, "1")];
    let message = one_message(&ended(children), UNFIT);
    assert!(message.contains("rank 1 (") && message.contains("runs another build of the program"), "{message}");
}

#[test]
fn what_a_rank_cannot_do_rank_0_tells() {
    let world = World::new();
    // Rank 1 works elsewhere, where there is no model.
    let elsewhere = tempfile::tempdir().unwrap();
    let place = free_place();
    let start = |rank: &str| {
        let more = ["--rank", rank, "--world-size", "3", "--rendezvous", &place, "--total-batch", "96"];
        let mut command = world.command(program(), "out", &more);
        if rank == "1" {
            command.current_dir(elsewhere.path());
        }
        command.spawn().unwrap()
    };
    let children = ["0", "1", "2"].map(start);
    let message = one_message(&ended(children), UNFIT);
    assert!(message.contains("rank 1 (") && message.contains("failed: cannot open model file tiny.bin"), "{message}");
}

#[test]
fn a_rank_that_never_comes_is_named_in_time() {
    let world = World::new();
    let begun = Instant::now();
    let more = ["--rendezvous-timeout", "1"];
    let children: Vec<_> = [0, 2].map(|rank| world.rank(rank, 3, "never", "out", &more)).into_iter().collect();
    let outputs = ended(children);
    let message = one_message(&outputs, UNFIT);
    assert!(message.contains("rank 1 of 3 never came: after 1 s only 2 are here (ranks 0, 2)"), "{message}");
    assert!(begun.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_port_that_another_program_has_is_told_by_all_ranks_soon() {
    let world = World::new();
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap();
    thread::spawn(move || {
        other
            .incoming()
            .flatten()
            .for_each(|mut stream| stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap_or(()));
    });
    let begun = Instant::now();
    let place = format!("tcp://{address}");
    let children = [0, 1].map(|rank| world.rank(rank, 2, "port", "out", &["--rendezvous", &place]));
    let outputs = ended(children);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    let expected = [
        format!("error: rank 0 cannot listen at {address}: Address already in use"),
        format!("error: rank 1 of 2 did not find rank 0 at {place} within 5 s (another program listens at {address}"),
    ];
    for (output, expected) in outputs.iter().zip(expected) {
        let (_, message) = said(output);
        assert!(message.starts_with(&expected) && message.contains("--rendezvous tcp://HOST:PORT"), "{message}");
        assert_eq!((output.status.code(), message.lines().count()), (Some(UNFIT), 1), "{message}");
    }
    assert!(!world.path("out").exists());
}

#[test]
fn a_rank_that_is_killed_ends_the_run_on_all() {
    let world = World::new();
    let more = ["--steps", "100000", "--checkpoint-every", "0", "--total-batch", "96"];
    let mut children: Vec<_> = (0..3).map(|rank| world.rank(rank, 3, "killed", "out", &more)).collect();
    let log = world.path("out/main.log");
    let deadline = Instant::now() + PATIENCE;
    while fs::read_to_string(&log).map_or(0, |text| text.lines().count()) < 5 {
        assert!(Instant::now() < deadline, "the run does not begin");
        thread::sleep(Duration::from_millis(20));
    }
    children[2].kill().unwrap();
    let killed = Instant::now();
    let mut outputs = ended(children);
    assert!(killed.elapsed() < Duration::from_secs(30));
    outputs.pop();
    let message = one_message(&outputs, LOST);
    assert!(message.contains("rank 2 (") && message.contains("has ended, or the connection to it; step "), "{message}");
    // The step, how many there are, and the operation.
    assert!(message.contains(" of 100000, "), "{message}");
}

/// A rank that is stopped says nothing and closes nothing.
#[test]
fn a_rank_that_stands_still_ends_the_run_on_all() {
    let worlds = [0, 2].map(|stopped| (stopped, World::new()));
    thread::scope(|scope| {
        for (stopped, world) in &worlds {
            scope.spawn(move || stands_still(world, *stopped));
        }
    });
}

fn stands_still(world: &World, stopped: usize) {
    let more = ["--steps", "100000", "--checkpoint-every", "0", "--total-batch", "96"];
    let job = format!("stopped {stopped}");
    let mut children: Vec<_> = (0..3).map(|rank| world.rank(rank, 3, &job, "out", &more)).collect();
    let log = world.path("out/main.log");
    let deadline = Instant::now() + PATIENCE;
    while fs::read_to_string(&log).map_or(0, |text| text.lines().count()) < 5 {
        assert!(Instant::now() < deadline, "the run does not begin");
        thread::sleep(Duration::from_millis(20));
    }
    let pid = children[stopped].id().to_string();
    Command::new("kill").args(["-STOP", &pid]).status().unwrap();
    let begun = Instant::now();
    let mut still = children.remove(stopped);
    let outputs = ended(children);
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    still.kill().unwrap();
    still.wait().unwrap();
    if stopped > 0 {
        let message = one_message(&outputs, LOST);
        assert!(message.contains("nothing came from rank 2 (") && message.contains(" s; step "), "{message}");
        return;
    }
    // Nobody is left who could tell the others.
    for output in outputs {
        let message = said(&output).1;
        assert!(output.status.code() == Some(LOST) && message.contains("nothing came from rank 0 in 2"), "{message}");
    }
}

#[test]
fn one_rank_asked_to_stop_stops_all_at_one_step() {
    let world = World::new();
    let more = ["--steps", "100000", "--checkpoint-every", "0"];
    let children: Vec<_> = (0..2).map(|rank| world.rank(rank, 2, "stop", "out", &more)).collect();
    let log = world.path("out/main.log");
    let deadline = Instant::now() + PATIENCE;
    while fs::read_to_string(&log).map_or(0, |text| text.lines().count()) < 5 {
        assert!(Instant::now() < deadline, "the run does not begin");
        thread::sleep(Duration::from_millis(20));
    }
    Command::new("kill").args(["-TERM", &children[1].id().to_string()]).status().unwrap();
    let outputs = ended(children);
    assert!(outputs.iter().all(|output| output.status.success()), "{outputs:?}");
    assert!(said(&outputs[0]).0.contains("stopped after "), "{outputs:?}");
    let names: Vec<_> = fs::read_dir(world.path("out")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.iter().any(|name| name.to_string_lossy().starts_with("DONE_")), "{names:?}");
}
