//! Local copies of the files of a data set.

use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};

/// Returns the files with an extension at a path: the file itself, or those in a directory, sorted by name.
pub fn find(from: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    if !fs::metadata(from).with_context(|| format!("--from: cannot read {}", from.display()))?.is_dir() {
        return Ok(vec![from.to_owned()]);
    }
    let files = with_suffix(from, &format!(".{extension}"))?;
    ensure!(!files.is_empty(), "{}: expected files that end in .{extension}, found none", from.display());
    Ok(files)
}

/// Returns the files in a directory that end in `suffix`, sorted by name. Hidden files are left out.
pub fn with_suffix(directory: &Path, suffix: &str) -> Result<Vec<PathBuf>> {
    let cannot_read = || format!("cannot read directory {}", directory.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).with_context(cannot_read)? {
        let path = entry.with_context(cannot_read)?.path();
        let ends = path.file_name().is_some_and(|name| name.as_encoded_bytes().ends_with(suffix.as_bytes()));
        if ends && !is_hidden(&path) && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Reports whether a file is hidden. Archives made on a Mac contain a hidden file with metadata, `._NAME`, for each file.
pub fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}
