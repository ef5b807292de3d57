//! `data core`: downloads and checks the evaluation bundle of CORE.

use super::download::downloaded;
use crate::hints::Invocation;
use crate::output::{self, Kind, Mark};
use crate::terminal::{self, counted};
use anyhow::{Context, Result};
use data::core_tasks::{self, Bundle};
use std::io::{Write, stdout};
use std::path::PathBuf;

/// Download and check the tasks of CORE for `eval core` and `train --core`: 22 tasks with few-shot prompts
#[derive(Debug, clap::Args)]
pub struct Core {
    /// Read eval_bundle.zip, or a directory with its contents, instead of downloading it
    #[arg(long, value_name = "DIR|FILE")]
    from: Option<PathBuf>,

    /// Directory to write
    #[arg(short, long, value_name = "DIR", default_value = "data/core")]
    out: PathBuf,
}

/// The list of tasks, which is written last.
const TASKS: Kind = Kind { name: "a list of tasks", mark: Mark::Contains("icl_tasks") };

/// Writes the files of the bundle.
pub fn run(args: &Core) -> Result<()> {
    let Core { from, out } = args;
    output::check_existing(&out.join("core.yaml"), TASKS)?;
    let from = match from {
        Some(path) => path.clone(),
        None => downloaded(&core_tasks::remote(), out, "FILE or --from DIR")?,
    };
    let extracted = tempfile::tempdir().context("cannot create a temporary directory for the files of the archive")?;
    let bundle = Bundle::open(&core_tasks::open_source(&from, extracted.path())?, None)?;
    let questions = bundle.check()?;
    if !output::is_same(&bundle.directory, out) {
        bundle.install(out)?;
    }
    let directory = out.to_string_lossy();
    let [tasks, questions] = [(bundle.tasks.len(), "task"), (questions, "question")].map(|(n, noun)| counted(n, noun));
    writeln!(stdout(), "wrote {tasks} with {questions} to {directory}")?;
    if !terminal::is_quiet() {
        let next = Invocation::current().command(["eval", "core", "MODEL", "--bundle", &directory]);
        writeln!(stdout(), "\nnext: {next}")?;
    }
    Ok(())
}
