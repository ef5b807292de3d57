//! `sweep`: trains with every combination of some flag values, and compares the final losses.
//!
//! Each run is a process of its own, `train` with a directory of its own, so that a failed run does not end the sweep.

mod outcome;
mod runs;
mod table;

use crate::cli::Cli;
use crate::signals::{Stop, Stopped};
use crate::terminal;
use crate::train::Diverged;
use anyhow::{Context, Result, bail, ensure};
use outcome::Outcome;
use runs::{Axis, Run, axis, combinations};
use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io::{Write, stdout};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use system::progress::{self, Unit};

/// The file in a run's directory for the output of the run.
const OUTPUT: &str = "output.txt";

const EXAMPLES: &str = "\
Example:
  Compare three learning rates, each with and without warmup:
    llm-rs sweep --flag lr=1e-4,3e-4,1e-3 --flag warmup=0,100 --out runs/lr -- \\
      --train 'data/train_*.bin' --val 'data/val_*.bin' --steps 1000 \\
      --layers 4 --heads 4 --channels 256

The same command continues an interrupted sweep: finished runs are skipped, others resume from their last checkpoint.";

/// Train once for every combination of flag values, and list the runs by their final validation loss
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Sweep {
    /// Flag of `train` without its dashes, and the values to try, such as lr=1e-4,3e-4. Repeat --flag for several flags
    #[arg(long = "flag", value_name = "NAME=VALUE,VALUE", required = true, value_parser = axis)]
    axes: Vec<Axis>,

    /// Directory for the tables sweep.csv and sweep.md, and for one directory per run
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,

    /// Command that starts each run on several GPUs, such as 'scripts/several_gpus 8' [default: none]
    #[arg(long, value_name = "COMMAND")]
    launcher: Option<String>,

    /// Flags of `train` for all runs, after `--`
    #[arg(last = true, value_name = "TRAIN FLAGS")]
    train: Vec<String>,
}

/// Runs the sweep and prints its table.
pub fn run(args: &Sweep) -> Result<()> {
    let launcher = args.launcher()?;
    let runs = combinations(&args.axes, &args.out, args.train_flags()?)?;
    // Invalid flags end the sweep before the first run.
    for run in &runs {
        Cli::from_arguments(["llm-rs", "train"].into_iter().map(OsString::from).chain(run.arguments()))?;
    }
    for run in &runs {
        run.check_earlier()?;
    }
    table::check(&args.out)?;
    let stop = Stop::on_signals(None)?;
    let mut out = stdout();
    let mut outcomes = Vec::new();
    let progress = progress::start("runs", Unit::Count, runs.len() as u64);
    for (i, run) in runs.iter().enumerate() {
        if stop.requested() {
            break;
        }
        let start = format!("run {} of {}: {} | ", i + 1, runs.len(), run.settings(&args.axes));
        if !terminal::shows_bars() {
            write!(out, "{start}")?;
            out.flush()?;
        }
        let outcome = if run.is_finished() { Outcome::read(run) } else { train(run, &launcher)? };
        progress.add(1);
        if terminal::shows_bars() {
            terminal::line(&format!("{start}{outcome}"))?;
        } else {
            writeln!(out, "{outcome}")?;
        }
        outcomes.push((run, outcome));
        table::save(&args.out, &args.axes, &outcomes)?;
    }
    drop(progress);
    writeln!(out, "\n{}", table::markdown(&args.axes, &outcomes))?;
    let (csv, markdown) = (args.out.join(table::CSV), args.out.join(table::MARKDOWN));
    writeln!(out, "wrote {} and {}", csv.display(), markdown.display())?;
    if stop.requested() {
        writeln!(out, "stopped; repeat the command to continue")?;
        bail!(stop.stopped());
    }
    ensure!(
        outcomes.iter().any(|(_, outcome)| outcome.is_finished()),
        "{}: expected at least one finished run, found none; see {OUTPUT} in the directories of the runs",
        args.out.display()
    );
    Ok(())
}

impl Sweep {
    /// Returns the words of the command that starts each run.
    fn launcher(&self) -> Result<Vec<String>> {
        let Some(launcher) = &self.launcher else { return Ok(Vec::new()) };
        let words = shlex::split(launcher).filter(|words| !words.is_empty());
        words.with_context(|| format!("--launcher: expected a command as for a shell, found '{launcher}'"))
    }

    /// Returns the flags for all runs. The word `train` before them is optional.
    fn train_flags(&self) -> Result<&[String]> {
        let flags = self.train.strip_prefix(&["train".to_owned()][..]).unwrap_or(&self.train);
        let is_out = |flag: &String| flag == "--out" || flag.starts_with("--out=") || flag.starts_with("-o");
        ensure!(
            !flags.iter().any(is_out),
            "--out: expected before --, found after it; the sweep gives each run a directory in its own --out"
        );
        Ok(flags)
    }
}

/// Trains, or continues to train.
fn train(run: &Run, launcher: &[String]) -> Result<Outcome> {
    atomic_file::create_directory(&run.directory)?;
    let output = run.directory.join(OUTPUT);
    let open = || File::options().create(true).append(true).open(&output);
    let (stdout, stderr) = open()
        .and_then(|file| Ok((file.try_clone()?, file)))
        .with_context(|| format!("cannot write {}", output.display()))?;
    let program = env::current_exe().context("cannot find the program file")?;
    let mut words = launcher.iter().map(OsString::from).chain([program.into(), "train".into()]).chain(run.arguments());
    let first = words.next().unwrap_or_default();
    let status = Command::new(&first)
        .args(words)
        .stdin(Stdio::null())
        .stdout(stdout)
        .stderr(stderr)
        .status()
        .with_context(|| format!("cannot start {}", first.display()))?;
    let has_log = |code| Stopped::is_exit_code(code) || code == i32::from(Diverged::EXIT_CODE);
    let ended = status.success() || status.code().is_some_and(has_log);
    let outcome = if ended { Outcome::read(run) } else { Outcome::failed(&output, status) };
    if outcome.is_finished() {
        run.mark_finished()?;
    }
    Ok(outcome)
}
