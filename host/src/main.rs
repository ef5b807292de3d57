//! The `llm-rs` program: parses the command line, runs the command, and prints one line if it fails.

use distributed::fault::Fault;
use host::allocator::Reporting;
use host::cli::{self, Cli};
use host::panics;
use host::signals::{self, Stopped};
use host::style::{Tone, is_colored, paint};
use host::train::Diverged;
use std::env;
use std::io::{self, Write, stderr};
use std::panic;
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: Reporting = Reporting;

/// Calls a function before Rust's runtime starts.
// SAFETY: the C runtime calls each entry of this section once, with one thread. The function makes one system call and stores an atomic.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = system::process::note_closed_stdout;

/// Exit code after the reader of standard output has closed it: 128 plus the number of SIGPIPE, as shells report it.
const CLOSED_OUTPUT: u8 = 141;

fn main() -> ExitCode {
    signals::report_file_size_limit();
    panics::report_to(|error| {
        let label = paint("error:", Tone::Bad, is_colored(&stderr()));
        let _ = writeln!(stderr(), "{label} {error}");
    });
    panic::catch_unwind(run).unwrap_or(ExitCode::FAILURE)
}

fn run() -> ExitCode {
    let run_command = || Cli::from_arguments(env::args_os()).and_then(|cli| cli.run());
    match cli::run_helper().unwrap_or_else(run_command) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of the output has closed the pipe, as `head` does.
        Err(error) if is_broken_pipe(&error) => ExitCode::from(CLOSED_OUTPUT),
        Err(error) => match error.downcast::<clap::Error>() {
            // Invalid flags, but also `--help` and `--version`, which exit with 0.
            Ok(error) => error.exit(),
            Err(error) => {
                if let Some(stopped) = error.downcast_ref::<Stopped>() {
                    return ExitCode::from(stopped.exit_code());
                }
                let diverged = error.downcast_ref::<Diverged>();
                let fault = error.downcast_ref::<Fault>();
                let code = match (diverged, fault) {
                    (Some(_), _) => ExitCode::from(Diverged::EXIT_CODE),
                    (_, Some(fault)) => ExitCode::from(fault.exit_code()),
                    _ => ExitCode::FAILURE,
                };
                if matches!(fault, Some(Fault::ReportedByRank0 { .. })) || diverged.is_some_and(|end| end.0.is_empty())
                {
                    return code;
                }
                // Standard error may be closed; there is no other place to report to.
                let label = paint("error:", Tone::Bad, is_colored(&stderr()));
                let _ = writeln!(stderr(), "{label} {}", on_one_line(&format!("{error:#}")));
                code
            }
        },
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
        || error.root_cause().downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

/// Joins the lines of an error with semicolons.
fn on_one_line(text: &str) -> String {
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    text.lines().map(words).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}
