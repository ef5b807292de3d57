//! Writes evaluation files of the `data` commands.

use crate::hints::Invocation;
use crate::output::{self, Kind, Mark};
use crate::terminal::{self, counted};
use anyhow::Result;
use data::multiple_choice::{self, Example};
use std::io::{Write, stdout};
use std::path::Path;

/// The magic number of evaluation files.
const EXAMPLES: Kind = Kind { name: "an evaluation file", mark: Mark::Start(&[&multiple_choice::MAGIC.to_le_bytes()]) };

/// Fails if `out` exists and is not an evaluation file. Commands call it before they download.
pub fn check(out: &Path) -> Result<()> {
    output::check_existing(out, EXAMPLES)
}

/// Writes an evaluation file for `flag` of `eval`, and prints the next command.
pub fn write(flag: &str, out: &Path, examples: &[Example]) -> Result<()> {
    if let Some(directory) = out.parent() {
        atomic_file::create_directory(directory)?;
    }
    multiple_choice::write(out, examples)?;
    let file = out.to_string_lossy();
    writeln!(stdout(), "wrote {} to {file}", counted(examples.len(), "example"))?;
    if !terminal::is_quiet() {
        let next = Invocation::current().command(["eval", "--model", "FILE", flag, &file]);
        writeln!(stdout(), "\nnext: {next}")?;
    }
    Ok(())
}
