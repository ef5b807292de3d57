//! `completions` and `man`: files for the user's shell and manual, made from the definition of the command line.

use crate::cli;
use crate::output::{self, Kind, Mark};
use anyhow::{Context, Result};
use atomic_file::create_directory;
use clap_complete::Shell;
use std::io::{Write, stdout};
use std::path::PathBuf;
use system::fs;

/// Name of the program in completions and manual pages.
const PROGRAM: &str = "llm-rs";

/// A page of the manual.
const PAGE: Kind = Kind { name: "a manual page of llm-rs", mark: Mark::Contains(".TH llm-rs") };

/// Print a script that completes commands and flags in a shell
///
/// For bash: llm-rs completions bash >~/.local/share/bash-completion/completions/llm-rs
#[derive(Clone, Debug, clap::Args)]
pub struct Completions {
    /// Shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Write a manual page for each command, such as llm-rs-train.1
#[derive(Clone, Debug, clap::Args)]
pub struct Man {
    /// Directory to create. `man` finds pages in ~/.local/share/man/man1
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// Prints a completion script.
pub fn completions(args: &Completions) -> Result<()> {
    // The generator panics if its output is closed, so it writes to memory.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut cli::parser(), PROGRAM, &mut script);
    if args.shell == Shell::Bash {
        // clap_complete 4.6 takes the hyphen of the program's name for the end of a command where it lists the flags of commands.
        let text = String::from_utf8(script).context("the completion script")?;
        script = text.replace("llm__subcmd__rs", "llm__rs").into_bytes();
    }
    Ok(stdout().write_all(&script)?)
}

/// Writes the manual pages.
pub fn man(args: &Man) -> Result<()> {
    create_directory(&args.directory)?;
    let shown = args.directory.display();
    let pages = tempfile::tempdir_in(&args.directory).with_context(|| format!("cannot write to {shown}"))?;
    clap_mangen::generate_to(cli::parser(), pages.path()).with_context(|| format!("cannot write to {shown}"))?;
    let names = fs::names(pages.path())?;
    names.iter().try_for_each(|name| output::check_existing(&args.directory.join(name), PAGE))?;
    for name in names {
        let (from, to) = (pages.path().join(&name), args.directory.join(&name));
        fs::rename(&from, &to).with_context(|| format!("cannot write {}", to.display()))?;
    }
    Ok(writeln!(stdout(), "wrote the manual pages to {shown}; read them with man {shown}/{PROGRAM}.1")?)
}
