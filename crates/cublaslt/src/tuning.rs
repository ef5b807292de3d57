//! Selects the fastest cuBLASLt algorithm of a matmul by timing. The first choice of the heuristic is often a few percent
//! slower.

use crate::matmul::{Operands, Problem};
use crate::plans::{Key, Matmuls, Plan, candidates};
use crate::result::{Error, Result};
use crate::sys::MatmulAlgo;
use cuda_driver::{Stopwatch, Stream};
use serde::{Deserialize, Serialize};

/// The number of algorithms to time. The heuristic orders them by expected time.
const CANDIDATES: usize = 24;
/// Timed runs of each algorithm in the first round, which selects the finalists.
const FIRST_RUNS: u32 = 2;
/// Timed runs of each finalist.
pub const FINAL_RUNS: u32 = 8;
/// The number of algorithms that are timed again.
const FINALISTS: usize = 4;
/// An algorithm replaces the first choice of the heuristic only if its time is below this fraction of the first choice's. A
/// smaller difference is noise.
pub const MARGIN: f32 = 0.99;

/// The algorithm selected for a matmul. Valid for one GPU model and one version of cuBLASLt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// The matmul.
    pub problem: Problem,
    /// The alignments of the operands, as returned by [`Operands::alignments`].
    pub alignments: [u32; 5],
    /// The algorithm.
    pub algo: MatmulAlgo,
}

/// The result of tuning a matmul.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// The matmul.
    pub problem: Problem,
    /// The number of algorithms that were timed.
    pub candidates: usize,
    /// The milliseconds of the heuristic's first choice.
    pub first: f32,
    /// The milliseconds of the selected algorithm.
    pub best: f32,
}

impl Matmuls {
    /// Uses these algorithms from now on, if this version of cuBLASLt supports them.
    pub fn adopt(&mut self, choices: &[Choice]) {
        for choice in choices {
            self.select((choice.problem, choice.alignments), choice.algo);
        }
    }

    /// Returns the algorithm selected for a problem by [`tune`](Self::tune) or [`adopt`](Self::adopt).
    pub fn algorithm(&self, problem: &Problem, alignments: [u32; 5]) -> Option<MatmulAlgo> {
        self.chosen.get(&(*problem, alignments)).copied()
    }

    /// Times the matmul with each candidate algorithm and selects the fastest. Waits for the stream. Candidates that cuBLASLt
    /// refuses to run are omitted; without any other, the error is [`Error::NoAlgorithm`].
    ///
    /// # Safety
    /// See [`run`](Self::run). The outputs of the matmul are undefined afterwards.
    pub unsafe fn tune(&mut self, stream: &Stream, problem: &Problem, operands: &Operands) -> Result<Timing> {
        operands.validate(problem)?;
        let algos = candidates(&self.handle, problem, operands, CANDIDATES)?;
        let clock = Stopwatch::new(stream)?;
        let time = |algo: MatmulAlgo, runs: u32| -> Result<f32> {
            let mut plan = Plan::with(&self.handle, problem, operands, algo)?;
            // SAFETY: the caller's promise.
            let mut run = || unsafe { self.run_plan(&mut plan, stream, problem, operands) };
            run()?;
            clock.time(stream, runs, run)
        };
        let mut timed = Vec::new();
        for &algo in &algos {
            match time(algo, FIRST_RUNS) {
                Err(error) if error.is_unsupported() => {}
                milliseconds => timed.push((milliseconds?, algo)),
            }
        }
        let Some(&(_, first_algo)) = timed.first() else {
            return Err(Error::NoAlgorithm { problem: problem.to_string() });
        };
        timed.sort_by(|a, b| a.0.total_cmp(&b.0));
        let first = time(first_algo, FINAL_RUNS)?;
        let mut best = (first, first_algo);
        for &(_, algo) in timed.iter().take(FINALISTS).filter(|(_, algo)| *algo != first_algo) {
            let milliseconds = time(algo, FINAL_RUNS)?;
            if milliseconds < best.0.min(first * MARGIN) {
                best = (milliseconds, algo);
            }
        }
        self.select((*problem, operands.alignments()), best.1);
        Ok(Timing { problem: *problem, candidates: timed.len(), first, best: best.0 })
    }

    fn select(&mut self, key: Key, algo: MatmulAlgo) {
        self.chosen.insert(key, algo);
        self.plans.retain(|(other, _), _| *other != key);
    }
}
