//! Progress, summary and next command of the commands that write shards.

use crate::hints::Invocation;
use crate::version;
use anyhow::Result;
use data::dataset::ShardNames;
use data::text::Summary;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write, stderr, stdout};
use std::path::{Path, PathBuf};

/// Returns the name and the version of this program, for the description of a data set.
pub fn program() -> String {
    format!("llm-rs {}", version::short())
}

/// Returns a progress bar over bytes of input, which is hidden unless it is shown on a terminal.
pub fn progress(bytes: Option<u64>) -> Result<ProgressBar> {
    if !stderr().is_terminal() {
        return Ok(ProgressBar::hidden());
    }
    let Some(bytes) = bytes else {
        let style = ProgressStyle::with_template("{spinner} {bytes} | {bytes_per_sec}")?;
        return Ok(ProgressBar::no_length().with_style(style));
    };
    let style = ProgressStyle::with_template("{bar:30} {bytes}/{total_bytes} | {bytes_per_sec} | {eta} left")?;
    Ok(ProgressBar::new(bytes).with_style(style))
}

/// Prints the amounts of data and everything that was left out or changed.
pub fn print_summary(directory: &Path, names: ShardNames, written: &Summary) -> Result<()> {
    let mut out = stdout();
    let input = &written.input;
    writeln!(out, "read {} documents, {} bytes, from {} files", input.documents, input.bytes, input.files)?;
    if written.skipped.total() > 0 {
        writeln!(out, "{}", written.skipped)?;
    }
    if input.empty_documents > 0 {
        // Documents of named data sets are never left out.
        let skipped = if names == ShardNames::TEXT { "skipped " } else { "" };
        writeln!(out, "{skipped}empty documents: {}", input.empty_documents)?;
    }
    if input.invalid_utf8 > 0 {
        let name = |(path, count): &(PathBuf, usize)| format!("{} ({count})", path.display());
        let files: Vec<String> = written.invalid_utf8.iter().take(3).map(name).collect();
        let (count, total) = (input.invalid_utf8, written.invalid_utf8.len());
        let more = if total > files.len() { ", …" } else { "" };
        let files = files.join(", ");
        writeln!(
            out,
            "warning: expected UTF-8, found {count} invalid sequences in {total} files: {files}{more}; each became U+FFFD"
        )?;
    }
    if written.forced_cuts > 0 {
        writeln!(
            out,
            "warning: long documents were cut at {} places where the tokens may differ from those of the whole document",
            written.forced_cuts
        )?;
    }
    for (name, part) in [("train", &written.train), ("val", &written.val)] {
        if part.shards > 0 {
            let shards = if part.shards == 1 { "shard" } else { "shards" };
            let files = directory.join(names.pattern(name));
            writeln!(out, "wrote {} tokens for {name}, {} {shards}: {}", part.tokens, part.shards, files.display())?;
        }
    }
    Ok(())
}

/// Suggests to train on the data set with these settings.
pub fn print_next(directory: &Path, names: ShardNames, written: &Summary, settings: &[&str]) -> Result<()> {
    let mut next = vec!["train".to_owned()];
    for (name, part) in [("train", &written.train), ("val", &written.val)] {
        if part.shards > 0 {
            next.extend([format!("--{name}"), directory.join(names.pattern(name)).to_string_lossy().into_owned()]);
        }
    }
    let next = next.iter().map(String::as_str).chain(settings.iter().copied());
    writeln!(stdout(), "\nnext: {}", Invocation::current().command(next))?;
    Ok(())
}
