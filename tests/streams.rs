//! Standard output that is closed at the start, or whose reader stops reading.

use crate::common::runs::{Results, World, lines, signal, wait_until};
use std::fs;
use std::process::{Command, Output, Stdio};

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
    command.args("train --device cpu --layers 1 --heads 1 --channels 16 --batch 2 --seq 16 --steps 2".split(' '));
    let output = redirected(&command, ">&-");
    let err = String::from_utf8_lossy(&output.stderr);
    let expected = "error: standard output: expected an open file or pipe, found a closed one (Bad file descriptor";
    assert!(output.status.code() == Some(1) && err.contains(expected), "{err}");
}

/// Both streams go to one pipe that nobody reads, as with `2>&1 | less`.
#[test]
fn a_reader_that_stops_reading_does_not_stop_the_run() {
    let world = World::new();
    let command = world.command("run", &["--steps", "100000", "--checkpoint-every", "100000", "--keep", "0"]);
    let mut shell = Command::new("sh");
    shell.current_dir(world.dir.path()).args(["-c", "exec \"$@\" 2>&1", "sh"]);
    shell.arg(command.get_program()).args(command.get_args()).stdout(Stdio::piped());
    let mut child = shell.spawn().unwrap();
    let console = world.path("run/console.log");
    wait_until("the output continues in a file", || lines(&console) > 10);
    signal(&child, "TERM");
    assert_eq!(child.wait().unwrap().code(), Some(143));
    let steps = fs::read_to_string(world.path("run/main.log")).unwrap();
    let steps = steps.lines().filter(|line| line.contains("trl:")).count();
    assert!(world.path("run").join(format!("DONE_{steps:08}")).exists(), "{steps}");
    let printed = fs::read_to_string(&console).unwrap();
    let warning =
        "warning: standard output stalls (no data was read from it for 10 s): output continues in run/console.log\n";
    assert!(printed.starts_with(warning) && printed.contains("\nnext: "), "{printed}");
}
