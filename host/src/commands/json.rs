//! Results in JSON.

use anyhow::{Result, ensure};
use serde::Serialize;
use std::io::{Write, stdout};
use std::path::Path;

/// Fails if `path` cannot become a file. A command calls it before it computes for a long time.
pub fn check(path: &Path) -> Result<()> {
    let directory = atomic_file::parent(path);
    let (file, at) = (path.display(), directory.display());
    ensure!(directory.is_dir(), "cannot write {file}: expected the directory {at}, found none; create it");
    ensure!(!path.is_dir(), "cannot write {file}: expected the name of a file, found a directory");
    Ok(())
}

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
