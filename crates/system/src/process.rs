//! The end of a process, and its error messages.

use crate::simulation;
use std::io::{Write, stderr};

/// Exits without running destructors or exit handlers, any of which may block.
pub fn exit(code: u8) -> ! {
    if let Some(task) = simulation::current() {
        task.exit(code);
    }
    signal_hook::low_level::exit(code.into())
}

/// Writes a line to standard error, which may be closed. In one piece, so that lines of several ranks do not mix.
pub fn print_error(line: &str) {
    match simulation::current() {
        Some(task) => task.print_error(line),
        None => {
            let _ = stderr().write_all(format!("{line}\n").as_bytes());
        }
    }
}
