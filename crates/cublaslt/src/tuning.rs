//! Which of the library's algorithms is the fastest for a product: its own guess is often a few percent off.

use crate::matmul::{Operands, Problem};
use crate::plans::{Key, Matmuls, Plan, candidates};
use crate::result::Result;
use crate::sys::MatmulAlgo;
use cuda_driver::{Stopwatch, Stream};
use serde::{Deserialize, Serialize};

/// Algorithms to try. The library orders them by what it expects of them.
const CANDIDATES: usize = 24;
/// Runs of the first round, which finds the finalists, and of the second.
const FIRST_RUNS: u32 = 2;
pub const FINAL_RUNS: u32 = 8;
const FINALISTS: usize = 4;
/// Another algorithm must be this much faster than the library's first choice: less is noise.
pub const MARGIN: f32 = 0.99;

/// The algorithm decided on for a product. Valid for one GPU model and version of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    pub problem: Problem,
    /// What the addresses of A, B, D (and C), bias and auxiliary matrix are multiples of; 0 for none.
    pub alignments: [u32; 5],
    pub algo: MatmulAlgo,
}

/// What a tuning found, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    pub problem: Problem,
    pub candidates: usize,
    /// The library's first choice.
    pub first: f32,
    /// The one taken.
    pub best: f32,
}

impl Matmuls {
    /// Whether an algorithm is decided on, by [`tune`](Self::tune) or [`adopt`](Self::adopt).
    pub fn is_decided(&self, problem: &Problem, operands: &Operands) -> bool {
        self.chosen.contains_key(&(*problem, operands.alignments()))
    }

    /// Products take these algorithms from now on, if the library still has them.
    pub fn adopt(&mut self, choices: &[Choice]) {
        for choice in choices {
            self.decide((choice.problem, choice.alignments), choice.algo);
        }
    }

    /// Returns the algorithm selected for a problem by [`tune`](Self::tune) or [`adopt`](Self::adopt).
    pub fn algorithm(&self, problem: &Problem, alignments: [u32; 5]) -> Option<MatmulAlgo> {
        self.chosen.get(&(*problem, alignments)).copied()
    }

    /// Everything decided on.
    pub fn choices(&self) -> Vec<Choice> {
        let choice = |(&(problem, alignments), &algo): (&Key, &MatmulAlgo)| Choice { problem, alignments, algo };
        self.chosen.iter().map(choice).collect()
    }

    /// Runs the product with each candidate, times them, and decides on the fastest. Waits for the stream.
    ///
    /// # Safety
    /// As [`run`](Self::run). What the product writes is left undefined.
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
            timed.push((time(algo, FIRST_RUNS)?, algo));
        }
        timed.sort_by(|a, b| a.0.total_cmp(&b.0));
        let first = time(algos[0], FINAL_RUNS)?;
        let mut best = (first, algos[0]);
        for &(_, algo) in timed.iter().take(FINALISTS).filter(|(_, algo)| *algo != algos[0]) {
            let milliseconds = time(algo, FINAL_RUNS)?;
            if milliseconds < best.0.min(first * MARGIN) {
                best = (milliseconds, algo);
            }
        }
        self.decide((*problem, operands.alignments()), best.1);
        Ok(Timing { problem: *problem, candidates: algos.len(), first, best: best.0 })
    }

    fn decide(&mut self, key: Key, algo: MatmulAlgo) {
        self.chosen.insert(key, algo);
        self.plans.remove(&key);
    }
}
