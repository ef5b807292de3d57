//! Prints the reports of `train` before its first and after its last step.

use super::Config;
use crate::commands::generation::trial_command;
use crate::commands::report::summary;
use crate::console::Console;
use crate::hints::Invocation;
use crate::plots;
use crate::train::Outcome;
use anyhow::{Result, bail};
use metrics::run::RunLog;
use std::path::Path;
use std::time::Duration;

/// Prints the notes, the memory of a run, and the command that starts it, or why there are no data to start it with.
pub(super) fn report_dry_run(
    console: &Console,
    notes: &[String],
    memory: &str,
    without_data: Option<&str>,
) -> Result<()> {
    notes.iter().try_for_each(|note| console.line(&format!("note: {note}")))?;
    console.line(memory)?;
    match without_data {
        Some(reason) => console.line(&format!("warning: {reason}")),
        None => console.line(&format!("\nnext: {}", Invocation::current().repeated(&["--dry-run"], &[]))),
    }
}

pub(super) fn report_start(console: &Console, notes: &[String], step: usize, steps: usize) -> Result<()> {
    notes.iter().try_for_each(|note| console.line(&format!("note: {note}")))?;
    if step > 0 { console.line(&format!("resumed after {step} of {steps} steps\n")) } else { Ok(()) }
}

/// Returns the log of a run, unless it is empty.
pub(super) fn read_log(directory: &Path) -> Option<Result<RunLog>> {
    let has_log = directory.join("main.jsonl").metadata().is_ok_and(|file| file.len() > 0);
    has_log.then(|| RunLog::read(directory))
}

/// Draws the log of a run into its directory. Returns false if there is nothing to draw.
pub(super) fn draw(directory: Option<&Path>, log: Option<&Result<RunLog>>) -> Result<bool> {
    match directory.zip(log) {
        Some((directory, Ok(run))) => plots::write_into(directory, run).map(|()| true),
        Some((_, Err(error))) => bail!("{error:#}"),
        None => Ok(false),
    }
}

/// `train_loss` is that of the log, which includes the steps before this process resumed the run.
pub(super) fn report_end(
    console: &Console,
    outcome: &Outcome,
    config: &Config,
    wall: Duration,
    train_loss: Option<f64>,
    drawn: Result<bool>,
) -> Result<()> {
    if let Err(error) = &drawn {
        console.line(&format!("warning: no plots: {error:#}"))?;
    }
    let drawn = drawn.is_ok_and(|drawn| drawn);
    console.result(&summary(outcome, train_loss.or_else(|| console.train_loss()), config, wall))?;
    if let Some(out) = config.flags.out.as_deref().filter(|_| drawn) {
        console.line(&format!("plots: {0}/{1}, {0}/{2}", out.display(), plots::FIGURE, plots::REPORT))?;
    }
    match outcome.stopped {
        Some(step) => console.line(&format!("\n{}", stopped(step, config, outcome.model_file.is_some()))),
        None => console.line(&format!("\nnext: {}", next_command(config, outcome))),
    }
}

/// Returns the last lines of a run that was asked to stop.
fn stopped(step: usize, config: &Config, has_checkpoint: bool) -> String {
    let stopped = format!("stopped after {step} of {} steps", config.steps);
    match &config.flags.out {
        Some(out) => format!("{stopped}\n\nnext: {}", Invocation::current().resuming(out, has_checkpoint)),
        None => format!("{stopped}; nothing is saved with --out none"),
    }
}

/// Suggests a command to run after a finished run.
fn next_command(config: &Config, outcome: &Outcome) -> String {
    let invocation = Invocation::current();
    match (&outcome.model_file, &config.flags.out) {
        (Some(file), _) => trial_command(file),
        (None, Some(out)) => invocation.command(["plot", &out.to_string_lossy()]),
        (None, None) if config.flags.reads_files() => {
            invocation.repeated(&["--out", "-o", "none", "--out=none", "-onone"], &[])
        }
        (None, None) => invocation.command(["data", "tinyshakespeare"]),
    }
}
