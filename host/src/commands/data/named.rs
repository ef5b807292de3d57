//! Functions that the commands of named data sets share.

use crate::hints::Invocation;
use anyhow::Result;
use data::download::{self, Remote};
use data::shard_set::Written;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write, stderr, stdout};
use std::path::{Path, PathBuf};

/// Directory, in that of the data set, of the downloaded files.
const DOWNLOADS: &str = "source";

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
    let name = remote.url.rsplit('/').next().unwrap_or_default();
    let to = out.join(DOWNLOADS).join(name);
    download::file(remote, &to, from)?;
    Ok(to)
}

/// Returns a progress bar, which is hidden unless it is shown on a terminal.
pub fn progress(length: u64, template: &str) -> Result<ProgressBar> {
    let bar = if stderr().is_terminal() { ProgressBar::new(length) } else { ProgressBar::hidden() };
    bar.set_style(ProgressStyle::with_template(template)?);
    Ok(bar)
}

/// Prints the files of a small data set.
pub fn print_files(written: &[Written]) -> Result<()> {
    for Written { path, tokens } in written {
        writeln!(stdout(), "wrote {tokens} tokens to {}", path.display())?;
    }
    Ok(())
}

/// Suggests to train on the data set with these arguments.
pub fn print_next(train: &str, val: &str, settings: &[&str]) -> Result<()> {
    let arguments = ["train", "--train", train, "--val", val].into_iter().chain(settings.iter().copied());
    writeln!(stdout(), "\nnext: {}", Invocation::current().command(arguments))?;
    Ok(())
}
