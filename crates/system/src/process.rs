//! The end of a process, and what it prints.

use crate::simulation;
use std::io::{self, IsTerminal, Write, stderr, stdout};

/// Exits without running destructors or exit handlers, because they may block.
pub fn exit(code: u8) -> ! {
    if let Some(task) = simulation::current() {
        task.exit(code);
    }
    signal_hook::low_level::exit(code.into())
}

/// Writes a line to standard output.
pub fn print(line: &str) -> io::Result<()> {
    match simulation::current() {
        Some(task) => {
            task.print(line, false);
            Ok(())
        }
        None => writeln!(stdout(), "{line}"),
    }
}

/// Returns whether standard output and standard error are terminals.
pub fn prints_to_terminal() -> bool {
    simulation::current().is_none() && stdout().is_terminal() && stderr().is_terminal()
}

/// Writes a line to standard error, which may be closed. In one piece, so that lines of several ranks do not mix.
pub fn print_error(line: &str) {
    match simulation::current() {
        Some(task) => task.print(line, true),
        None => {
            let _ = stderr().write_all(format!("{line}\n").as_bytes());
        }
    }
}
