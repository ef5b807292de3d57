//! The number of a process, its end, and what it prints.

use crate::simulation;
use std::io::{self, IsTerminal, Write, stderr, stdout};
use std::sync::atomic::{AtomicU64, Ordering};

/// Returns the number of this process.
pub fn id() -> u32 {
    // With as many digits for each rank.
    simulation::current().map_or_else(std::process::id, |task| 1000 + task.process() as u32)
}

/// Returns a number that this process has not got before.
pub fn next_number() -> u64 {
    static NUMBERS: AtomicU64 = AtomicU64::new(0);
    simulation::current().map_or_else(|| NUMBERS.fetch_add(1, Ordering::Relaxed), |task| task.next_number())
}

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
