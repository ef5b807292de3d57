//! `simulate`: trains small models as ranks of simulated processes, with faults that a seed determines.
//!
//! `scenario.rs` draws the run and its faults from a seed. `trial.rs` performs them and judges how the run ended, `removal.rs` those
//! that lose a rank for good. `tally.rs` counts.

mod removal;
mod scenario;
mod tally;
mod trial;

use crate::commands::json;
use crate::terminal;
use anyhow::{Context, Result, ensure};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use system::process;
use system::progress::{self, Unit};
use tally::Tally;
use trial::{References, Verdict};

const EXAMPLES: &str = "\
Examples:
  Run 1,000 seeds on two cores:
    llm-rs simulate --seeds 1000 --threads 2

  Repeat a seed, and print the output of its ranks:
    llm-rs simulate --first 4711 --seeds 1 --verbose";

/// Maximum number of threads of a seed: four ranks, each with connections to the others.
const SEED_THREADS: usize = 48;

/// Seeds between two lines of progress, where no progress bar is shown.
const PROGRESS: u64 = 1000;

/// Train with simulated faults of processes, network and disk, and check that nothing is lost
///
/// Each seed trains a small model with 1 to 4 ranks on a simulated network, disk and clock. The seed determines the faults. A run must end
/// with bitwise the same result as a run without faults. Alternatively, all ranks must stop in time with an error that names the cause, and
/// the resumed run must end with the same result. The ranks run the code of `train`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Simulate {
    /// Number of seeds
    #[arg(long, value_name = "N", default_value = "200", value_parser = crate::values::count)]
    seeds: usize,

    /// First seed
    #[arg(long, value_name = "SEED", default_value = "0")]
    first: u64,

    /// Number of seeds that run at the same time
    #[arg(long, value_name = "N", default_value = "1", value_parser = crate::values::count)]
    threads: usize,

    /// Run each seed twice, and check that both runs are identical
    #[arg(long)]
    twice: bool,

    /// Print the faults of each seed, and the output of its ranks
    #[arg(long)]
    verbose: bool,

    /// Print JSON instead of a table. Failures go to standard error
    #[arg(long, conflicts_with = "verbose")]
    json: bool,
}

/// Runs all seeds and prints the tally. Fails if a seed failed.
pub fn run(args: &Simulate) -> Result<()> {
    let end = args.first.checked_add(args.seeds as u64).context("--first: expected a smaller seed")?;
    let (next, tally) = (AtomicU64::new(args.first), Mutex::new(Tally::default()));
    let references = References::default();
    let progress = progress::start("seeds", Unit::Count, args.seeds as u64);
    let work = || -> Result<()> {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= end {
                return Ok(());
            }
            let verdict = args.run_seed(seed, &references)?;
            let mut tally = tally.lock().map_err(|_| anyhow::anyhow!("another thread failed"))?;
            tally.add(&verdict);
            progress.add(1);
            if !terminal::shows_bars() && !terminal::is_quiet() && tally.seeds().is_multiple_of(PROGRESS) {
                process::print_error(&format!("{} of {} seeds, {} failed", tally.seeds(), args.seeds, tally.failed()));
            }
        }
    };
    let threads = args.threads.min(args.seeds);
    system::thread::check(threads.saturating_mul(SEED_THREADS))?;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    drop(progress);
    let tally = tally.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    if args.json {
        json::print(&tally.json())?;
    } else {
        terminal::line(&tally.table())?;
    }
    ensure!(
        tally.failed() == 0,
        "{} of {} seeds failed; repeat one with `llm-rs simulate --first SEED --seeds 1 --verbose`",
        tally.failed(),
        args.seeds
    );
    Ok(())
}

impl Simulate {
    fn run_seed(&self, seed: u64, references: &References) -> Result<Verdict> {
        let mut verdict = trial::run(seed, references)?;
        if self.twice {
            let again = trial::run(seed, references)?;
            if again.trace != verdict.trace {
                verdict.failure.get_or_insert("a second run of the seed differed from the first".to_owned());
            }
        }
        if self.verbose {
            for line in &verdict.story {
                terminal::line(line)?;
            }
        }
        if let Some(failure) = &verdict.failure {
            let failure = format!("seed {seed}: {}: {failure}", verdict.kind);
            if self.json {
                terminal::suspend(|| process::print_error(&failure));
            } else {
                terminal::line(&failure)?;
            }
        }
        Ok(verdict)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `scripts/nightly` runs 10,000 seeds.
    #[test]
    fn sixty_seeds_lose_nothing() {
        let threads = thread::available_parallelism().map_or(1, usize::from).min(4);
        run(&Simulate { seeds: 60, first: 0, threads, twice: false, verbose: false, json: false }).unwrap();
    }

    #[test]
    fn a_seed_repeats_exactly() {
        let twice = |first, seeds| Simulate { seeds, first, threads: 1, twice: true, verbose: false, json: false };
        run(&twice(1000, 12)).unwrap();
        // Full sockets split messages: the lengths of all messages must repeat, also of nonces and process numbers.
        run(&twice(5224, 1)).unwrap();
    }
}
