//! Results in JSON files.

use anyhow::Result;
use serde::Serialize;
use std::io::Write;
use std::path::Path;

/// Writes a value to a file atomically, with a newline at the end.
pub fn write(path: &Path, value: &impl Serialize) -> Result<()> {
    atomic_file::write(path, |file| {
        serde_json::to_writer_pretty(&mut *file, value)?;
        Ok(writeln!(file)?)
    })
}
