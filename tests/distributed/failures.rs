//! Mismatching, failing, stalled, killed and stopped ranks.

use crate::threads::TIMEOUT;
use crate::world::{PERMANENT, RECOVERABLE, World, error_of_rank_0, free_endpoint, output_text, program, wait_for_all};
use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

#[test]
fn different_flags_are_reported_by_rank_0() {
    let world = World::new();
    let endpoint = free_endpoint();
    let with = ["--rendezvous", &endpoint];
    let children = vec![
        world.rank(0, 2, "flags", "out", &with),
        world.rank(1, 2, "flags", "out", &[&with[..], &["--lr", "0.1"]].concat()),
    ];
    let outputs = wait_for_all(children);
    let message = error_of_rank_0(&outputs, PERMANENT);
    assert!(
        message.contains("rank 1 (")
            && message.contains("expected --lr 0.003 as on rank 0, found 0.1; start all ranks"),
        "{message}"
    );
}

#[test]
fn a_different_build_is_reported_by_rank_0() {
    let world = World::new();
    let other = world.path("other");
    let mut bytes = fs::read(program()).unwrap();
    bytes.extend(b"another build");
    fs::write(&other, bytes).unwrap();
    Command::new("chmod").arg("+x").arg(&other).status().unwrap();
    let endpoint = free_endpoint();
    let start = |program: &Path, rank: &str| {
        world
            .command(program, "out", &["--rank", rank, "--world-size", "2", "--rendezvous", &endpoint])
            .spawn()
            .unwrap()
    };
    let children = [start(program(), "0"), start(&other, "1")];
    let message = error_of_rank_0(&wait_for_all(children), PERMANENT);
    assert!(message.contains("rank 1 (") && message.contains("expected program build "), "{message}");
}

#[test]
fn an_error_of_another_rank_is_reported_by_rank_0() {
    let world = World::new();
    // The working directory of rank 1 has no model file.
    let empty = tempfile::tempdir().unwrap();
    let endpoint = free_endpoint();
    let start = |rank: &str| {
        let more = ["--rank", rank, "--world-size", "3", "--rendezvous", &endpoint, "--total-batch", "96"];
        let mut command = world.command(program(), "out", &more);
        if rank == "1" {
            command.current_dir(empty.path());
        }
        command.spawn().unwrap()
    };
    let children = ["0", "1", "2"].map(start);
    let message = error_of_rank_0(&wait_for_all(children), PERMANENT);
    assert!(
        message.contains("rank 1 (") && message.contains("failed: --model: cannot open model file tiny.bin"),
        "{message}"
    );
}

#[test]
fn a_missing_rank_is_reported_after_the_rendezvous_timeout() {
    let world = World::new();
    let start = Instant::now();
    let more = ["--rendezvous-timeout", "1"];
    let children: Vec<_> = [0, 2].map(|rank| world.rank(rank, 3, "never", "out", &more)).into_iter().collect();
    let outputs = wait_for_all(children);
    let message = error_of_rank_0(&outputs, PERMANENT);
    assert!(
        message.contains("rendezvous: expected 3 ranks within 1 s, found 2 (ranks 0, 2), missing rank 1;"),
        "{message}"
    );
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_port_in_use_is_reported_by_all_ranks_early() {
    let world = World::new();
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap();
    thread::spawn(move || {
        other
            .incoming()
            .flatten()
            .for_each(|mut stream| stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap_or(()));
    });
    let start = Instant::now();
    let endpoint = format!("tcp://{address}");
    let children = [0, 1].map(|rank| world.rank(rank, 2, "port", "out", &["--rendezvous", &endpoint]));
    let outputs = wait_for_all(children);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let expected = [
        format!("error: rank 0: cannot listen on {address}: Address already in use"),
        format!(
            "error: rank 1 of 2: expected rank 0 at {endpoint} within 5 s, found none (another program listens at {address}"
        ),
    ];
    for (output, expected) in outputs.iter().zip(expected) {
        let (_, message) = output_text(output);
        assert!(message.starts_with(&expected) && message.contains("--rendezvous tcp://HOST:PORT"), "{message}");
        assert_eq!((output.status.code(), message.lines().count()), (Some(PERMANENT), 1), "{message}");
    }
    assert!(!world.path("out").exists());
}

#[test]
fn a_killed_rank_ends_the_run_on_all_ranks() {
    let world = World::new();
    let more = ["--steps", "100000", "--checkpoint-every", "0", "--total-batch", "96"];
    let mut children: Vec<_> = (0..3).map(|rank| world.rank(rank, 3, "killed", "out", &more)).collect();
    let log = world.path("out/main.log");
    let deadline = Instant::now() + TIMEOUT;
    while fs::read_to_string(&log).map_or(0, |text| text.lines().count()) < 5 {
        assert!(Instant::now() < deadline, "the run does not start");
        thread::sleep(Duration::from_millis(20));
    }
    children[2].kill().unwrap();
    let killed = Instant::now();
    let mut outputs = wait_for_all(children);
    assert!(killed.elapsed() < Duration::from_secs(30));
    outputs.pop();
    let message = error_of_rank_0(&outputs, RECOVERABLE);
    assert!(message.contains("rank 2 (") && message.contains(") disconnected during step "), "{message}");
    // The message contains the step, the number of steps, and the operation.
    assert!(message.contains(" of 100000, "), "{message}");
}

/// A stopped process (SIGSTOP) sends nothing and closes no connection.
#[test]
fn a_stopped_rank_ends_the_run_on_all_ranks() {
    let worlds = [0, 2].map(|stopped| (stopped, World::new()));
    thread::scope(|scope| {
        for (stopped, world) in &worlds {
            scope.spawn(move || stop_rank(world, *stopped));
        }
    });
}

fn stop_rank(world: &World, stopped: usize) {
    let more = ["--steps", "100000", "--checkpoint-every", "0", "--total-batch", "96"];
    let job = format!("stopped {stopped}");
    let mut children: Vec<_> = (0..3).map(|rank| world.rank(rank, 3, &job, "out", &more)).collect();
    let log = world.path("out/main.log");
    let deadline = Instant::now() + TIMEOUT;
    while fs::read_to_string(&log).map_or(0, |text| text.lines().count()) < 5 {
        assert!(Instant::now() < deadline, "the run does not start");
        thread::sleep(Duration::from_millis(20));
    }
    let pid = children[stopped].id().to_string();
    Command::new("kill").args(["-STOP", &pid]).status().unwrap();
    let start = Instant::now();
    let mut stopped_rank = children.remove(stopped);
    let outputs = wait_for_all(children);
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    stopped_rank.kill().unwrap();
    stopped_rank.wait().unwrap();
    if stopped > 0 {
        let message = error_of_rank_0(&outputs, RECOVERABLE);
        assert!(message.contains("rank 2 (") && message.contains(" timed out: no message for 2"), "{message}");
        return;
    }
    // Without rank 0 every rank reports the failure itself.
    for output in outputs {
        let message = output_text(&output).1;
        assert!(
            output.status.code() == Some(RECOVERABLE) && message.contains("rank 0 timed out: no message for 2"),
            "{message}"
        );
    }
}

#[test]
fn a_signal_to_one_rank_stops_all_ranks_after_the_same_step() {
    let world = World::new();
    let more = ["--steps", "100000", "--checkpoint-every", "0"];
    let children: Vec<_> = (0..2).map(|rank| world.rank(rank, 2, "stop", "out", &more)).collect();
    let log = world.path("out/main.log");
    let deadline = Instant::now() + TIMEOUT;
    while fs::read_to_string(&log).map_or(0, |text| text.lines().count()) < 5 {
        assert!(Instant::now() < deadline, "the run does not start");
        thread::sleep(Duration::from_millis(20));
    }
    Command::new("kill").args(["-TERM", &children[1].id().to_string()]).status().unwrap();
    let outputs = wait_for_all(children);
    assert!(outputs.iter().all(|output| output.status.code() == Some(143)), "{outputs:?}");
    assert!(output_text(&outputs[0]).0.contains("stopped after "), "{outputs:?}");
    let names: Vec<_> = fs::read_dir(world.path("out")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(names.iter().any(|name| name.to_string_lossy().starts_with("DONE_")), "{names:?}");
}
