//! The program of the example. See the README.

use clap::Parser;
use cuda_std::emulate::Report;
use std::io::{self, Write};
use std::process::ExitCode;

/// Exit code if the emulator reports a fault.
const FAULT: u8 = 3;

fn main() -> ExitCode {
    let Err(error) = kernels::run::Cli::parse().run(&mut io::stdout().lock()) else { return ExitCode::SUCCESS };
    let is_closed_pipe = |error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe;
    if error.downcast_ref::<io::Error>().is_some_and(is_closed_pipe) {
        return ExitCode::SUCCESS;
    }
    // Standard error may be closed; there is no other place to report to.
    let _ = writeln!(io::stderr(), "error: {error:#}");
    let is_fault = error.downcast_ref::<Report>().is_some();
    if is_fault { ExitCode::from(FAULT) } else { ExitCode::FAILURE }
}
