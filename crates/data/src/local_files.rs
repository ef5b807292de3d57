//! Local copies of the files of a data set.

use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};

/// Returns the files with an extension at a path: the file itself, or those in a directory, sorted by name.
pub fn find(from: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let cannot_read = || format!("--from: cannot read {}", from.display());
    if !fs::metadata(from).with_context(cannot_read)?.is_dir() {
        return Ok(vec![from.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(from).with_context(cannot_read)? {
        let path = entry.with_context(cannot_read)?.path();
        if path.extension().is_some_and(|found| found == extension) && path.is_file() {
            files.push(path);
        }
    }
    ensure!(!files.is_empty(), "{}: expected files that end in .{extension}, found none", from.display());
    files.sort();
    Ok(files)
}
