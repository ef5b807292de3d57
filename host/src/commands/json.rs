//! Results in JSON.

use anyhow::Result;
use serde::Serialize;
use std::io::{Write, stdout};
use std::path::Path;

/// Prints a value to standard output.
pub fn print(value: &impl Serialize) -> Result<()> {
    Ok(writeln!(stdout(), "{}", serde_json::to_string_pretty(value)?)?)
}

/// Writes a value to a file atomically, with a newline at the end.
pub fn write(path: &Path, value: &impl Serialize) -> Result<()> {
    atomic_file::write(path, |file| {
        serde_json::to_writer_pretty(&mut *file, value)?;
        Ok(writeln!(file)?)
    })
}
