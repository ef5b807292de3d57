//! `log`: prints the final values of runs, and exports their logs.

use super::plot::report_damage;
use crate::output::{self, Kind, Mark};
use anyhow::{Context, Result, ensure};
use metrics::report::Summary;
use metrics::run::{SourceLog, read_all};
use metrics::{csv, tensorboard};
use std::io::{Write, stdout};
use std::path::PathBuf;

/// Print the final values of runs, or export their logs as CSV or for TensorBoard
#[derive(Clone, Debug, clap::Args)]
pub struct Log {
    /// Directories of runs, or their main.jsonl or main.log; main.log may be llm.c's. NAME=RUN sets the name
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,

    /// Write all values of each step as CSV, to a file whose name ends in .csv [default: standard output]
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    csv: Option<PathBuf>,

    /// Write TensorBoard event files to DIR, in one directory for each run
    #[arg(long, value_name = "DIR")]
    tensorboard: Option<PathBuf>,
}

/// The file of `--csv`.
const TABLE: Kind = Kind { name: "a table of log", mark: Mark::Start(&[b"run,step,tokens,time,loss,"]) };

/// Runs the command.
pub fn run(args: &Log) -> Result<()> {
    if let Some(path) = args.csv.as_ref().filter(|path| path.as_os_str() != "-") {
        // The argument after --csv may be a log.
        let is_table = path.extension().is_some_and(|extension| extension == "csv");
        ensure!(
            is_table,
            "--csv: expected a name that ends in .csv, found {}; name the runs before --csv",
            path.display()
        );
        output::check(path, TABLE)?;
    }
    let runs = read_all(&args.runs)?;
    report_damage(&runs)?;
    if let Some(directory) = &args.tensorboard {
        let now = system::time::since_epoch().as_secs_f64();
        for run in &runs {
            let name: String = run.name.chars().map(|c| if c == '/' { '_' } else { c }).collect();
            ensure!(!["", ".", ".."].contains(&name.as_str()), "{name}: expected the name of a run; name it NAME=RUN");
            let into = directory.join(name);
            atomic_file::create_directory(&into)?;
            let path = into.join(tensorboard::file_name(now));
            atomic_file::write(&path, |file| tensorboard::write(run, now, file))
                .with_context(|| format!("cannot write {}", path.display()))?;
            writeln!(stdout(), "wrote {}", path.display())?;
        }
    }
    match &args.csv {
        Some(path) if path.as_os_str() == "-" => csv::write(&runs, stdout().lock())?,
        Some(path) => {
            atomic_file::write(path, |file| csv::write(&runs, file))
                .with_context(|| format!("cannot write {}", path.display()))?;
            writeln!(stdout(), "wrote {}", path.display())?;
        }
        None if args.tensorboard.is_some() => {}
        None => {
            for run in &runs {
                writeln!(stdout(), "{}: {}", run.name, run.path.display())?;
                for (name, value) in Summary::new(run).cells() {
                    writeln!(stdout(), "    {name:<24} {value}")?;
                }
                for (name, value) in run.sources.iter().map(SourceLog::cell) {
                    writeln!(stdout(), "    {name:<24} {value}")?;
                }
            }
        }
    }
    Ok(())
}
