//! The sources of named data sets: local files, or downloads.

use anyhow::Result;
use data::download::{self, Remote};
use std::path::{Path, PathBuf};

/// Directory, in that of the data set, of the downloaded files.
pub const DOWNLOADS: &str = "source";

/// Returns `from`, or downloads the file into a directory next to the data set in `out`.
pub fn local_or_downloaded(
    from: Option<&Path>,
    remote: impl FnOnce() -> Result<Remote>,
    out: &Path,
) -> Result<PathBuf> {
    match from {
        Some(path) => Ok(path.to_owned()),
        None => downloaded(&remote()?, out, "FILE"),
    }
}

/// Downloads a file into a directory next to the data set in `out`. `from` is the value of `--from` in error messages.
pub fn downloaded(remote: &Remote, out: &Path, from: &str) -> Result<PathBuf> {
    let to = out.join(DOWNLOADS).join(remote.name());
    download::file(remote, &to, from)?;
    Ok(to)
}
