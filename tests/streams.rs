//! Standard output that is closed at the start, or whose reader stops reading.

use crate::common::runs::{Results, World, lines, signal, wait_until};
use rustix::fs::OFlags;
use rustix::pty::OpenptFlags;
use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;

/// Runs a command in a shell that redirects its streams.
fn redirected(command: &Command, redirections: &str) -> Output {
    let mut shell = Command::new("sh");
    shell.current_dir(command.get_current_dir().unwrap());
    let script = format!("exec \"$@\" {redirections}");
    shell.args(["-c", &script, "sh"]).arg(command.get_program()).args(command.get_args()).output().unwrap()
}

/// Rust's runtime opens `/dev/null` in place of closed streams.
#[test]
fn a_run_that_starts_without_standard_output_prints_into_a_file() {
    let world = World::new();
    world.succeed("reference", &[]);
    let reference = Results::read(&world.path("reference"), 40);
    let warning = "warning: standard output is closed (Bad file descriptor (os error 9)): output continues in ";
    for (out, streams) in [("output", ">&-"), ("both", ">&- 2>&-"), ("all", "<&- >&- 2>&-")] {
        let output = redirected(&world.command(out, &[]), streams);
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{streams}: {err}");
        assert_eq!(err.contains(&format!("{warning}{out}/console.log")), out == "output", "{streams}: {err}");
        let printed = fs::read_to_string(world.path(out).join("console.log")).unwrap();
        assert!(printed.starts_with(warning) && printed.contains("\nstep   40/40 | loss "), "{streams}: {printed}");
        let mut results = Results::read(&world.path(out), 40);
        results.names.retain(|name| name != "console.log");
        results.assert_equals(&reference, streams);
    }
    // A device that discards everything is an open one.
    let output = redirected(&world.command("discarded", &[]), "<>/dev/null >&0");
    assert_eq!((output.status.code(), world.path("discarded/console.log").exists()), (Some(0), false));

    let mut command = Command::new(env!("CARGO_BIN_EXE_llm-rs"));
    command.current_dir(world.dir.path());
    command.args(
        "train --device cpu --layers 1 --heads 1 --channels 16 --batch 2 --seq 16 --steps 2 --out none".split(' '),
    );
    let output = redirected(&command, ">&-");
    let err = String::from_utf8_lossy(&output.stderr);
    let expected = "error: standard output: expected an open file or pipe, found a closed one (Bad file descriptor";
    assert!(output.status.code() == Some(1) && err.contains(expected), "{err}");
}

/// Fills the buffer of a pipe or terminal that nobody reads.
fn fill(path: &Path) {
    let mut options = fs::OpenOptions::new();
    let mut stream = options.write(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(path).unwrap();
    for piece in [4096, 1] {
        while stream.write(&vec![b'x'; piece]).is_ok() {}
    }
}

/// Runs with both streams in one place that nobody reads, as after `2>&1 | less`, or standard output only.
#[test]
fn a_reader_that_stops_reading_does_not_stop_the_run() {
    let directory = tempfile::tempdir().unwrap();
    let pipe = directory.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let _reader = fs::OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(&pipe).unwrap();
    let terminal = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    rustix::pty::unlockpt(&terminal).unwrap();
    let shown = PathBuf::from(rustix::pty::ptsname(&terminal, Vec::new()).unwrap().into_string().unwrap());
    for path in [&pipe, &shown] {
        fill(path);
    }
    let runs = [(&pipe, "2>&1", ""), (&pipe, "2>&1", "--json"), (&shown, "2>&1", ""), (&shown, "2>errors", "")];
    thread::scope(|scope| {
        for (stream, errors, flag) in runs {
            scope.spawn(move || ends_without_a_reader(stream, errors, flag));
        }
    });
}

fn ends_without_a_reader(stream: &Path, errors: &str, flag: &str) {
    let case = format!("{flag} >{} {errors}", stream.display());
    let world = World::new();
    let flags = ["--steps", "100000", "--checkpoint-every", "100000", "--keep", "0", flag];
    let command = world.command("run", &flags[..flags.len() - usize::from(flag.is_empty())]);
    let mut shell = Command::new("sh");
    shell.current_dir(world.dir.path()).env("TERM", "xterm");
    shell.args(["-c", &format!("exec \"$@\" >{} {errors}", stream.display()), "sh"]);
    let mut child = shell.arg(command.get_program()).args(command.get_args()).spawn().unwrap();
    let (console, log) = (world.path("run/console.log"), world.path("run/main.log"));
    wait_until(&format!("{case}: the output continues in a file"), || lines(&console) > 0 && lines(&log) > 100);
    signal(&child, "TERM");
    wait_until(&format!("{case}: the run ends"), || child.try_wait().unwrap().is_some());
    assert_eq!(child.wait().unwrap().code(), Some(143), "{case}");
    let steps = fs::read_to_string(log).unwrap();
    let steps = steps.lines().filter(|line| line.contains("trl:")).count();
    assert!(world.path("run").join(format!("DONE_{steps:08}")).exists(), "{case}: {steps}");
    let printed = fs::read_to_string(&console).unwrap();
    let name = if flag == "--json" { "error" } else { "output" };
    let warning = format!(
        "warning: standard {name} stalls (no data was read from it for 10 s): output continues in run/console.log\n"
    );
    assert!(printed.starts_with(&warning), "{case}: {printed}");
}
