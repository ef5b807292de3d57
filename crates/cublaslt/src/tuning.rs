//! Selects the fastest cuBLASLt algorithm of a matmul by timing. The first choice of the heuristic is often a few percent
//! slower.

use crate::matmul::{GemmKey, GemmOperands};
use crate::plans::{MatmulPlan, Matmuls, candidates};
use crate::result::{Error, Result};
use crate::sys::MatmulAlgo;
use cuda_driver::{Stopwatch, Stream};
use gpu::matmul::gemm::Gemm;

/// The number of algorithms that the heuristic is asked for. It orders them by expected time.
const CANDIDATES: usize = 24;
/// Timed runs of each candidate when the finalists are selected.
pub const SCREENING_RUNS: u32 = 3;
/// The number of finalists of one library.
pub const FINALISTS: usize = 3;
/// Rounds of a race.
const ROUNDS: usize = 7;
/// Duration of one turn of a race, in milliseconds. Shorter turns have larger errors, because each begins after a pause.
const TURN: f32 = 1.0;
/// A candidate replaces another only if its time is below this fraction of the other's. A smaller difference is noise.
pub const MARGIN: f32 = 0.995;

/// The algorithms of a matmul that are worth a race.
#[derive(Clone, Debug)]
pub struct Finalists {
    /// The number of algorithms that were timed.
    pub candidates: usize,
    /// The heuristic's first choice, then the fastest others.
    pub algos: Vec<MatmulAlgo>,
}

/// Times candidates alternately over several rounds, without pauses, and returns the milliseconds of each.
///
/// A GPU under load changes its clock with power and temperature, so one timing of each candidate compares different clocks.
/// Therefore a time is relative to the mean of its round, and of these ratios the median counts. `time(i, runs)` returns the mean
/// milliseconds of `runs` runs of candidate `i`.
pub fn race<E>(candidates: usize, mut time: impl FnMut(usize, u32) -> Result<f32, E>) -> Result<Vec<f32>, E> {
    let mut runs = Vec::new();
    for i in 0..candidates {
        runs.push((TURN / time(i, 1)?).ceil().clamp(1.0, 64.0) as u32);
    }
    let mut ratios = vec![Vec::new(); candidates];
    let mut means = Vec::new();
    for round in 0..ROUNDS {
        let mut times = vec![0.0; candidates];
        // Each round begins with another candidate.
        for i in (0..candidates).map(|i| (i + round) % candidates) {
            times[i] = time(i, runs[i])?;
        }
        let mean = times.iter().sum::<f32>() / candidates as f32;
        means.push(mean);
        for (ratios, time) in ratios.iter_mut().zip(times) {
            ratios.push(time / mean);
        }
    }
    let mean = median(means);
    Ok(ratios.into_iter().map(|ratios| mean * median(ratios)).collect())
}

fn median(mut values: Vec<f32>) -> f32 {
    values.sort_by(f32::total_cmp);
    values[values.len() / 2]
}

/// Returns the index of the least time, or `None` if there is none. The first one wins unless another is faster by more than noise.
pub fn fastest(times: &[f32]) -> Option<usize> {
    let least = (0..times.len()).min_by(|a, b| times[*a].total_cmp(&times[*b]))?;
    Some(if times[least] < times[0] * MARGIN { least } else { 0 })
}

impl Matmuls {
    /// Returns the algorithm selected for a GEMM by [`tune`](Self::tune) or [`select`](Self::select).
    pub fn algorithm(&self, key: &GemmKey) -> Option<MatmulAlgo> {
        self.chosen.get(key).copied()
    }

    /// Selects the fastest algorithm for the matmul. Waits for the stream. Without any algorithm that cuBLASLt runs, the error is
    /// [`Error::NoAlgorithm`].
    ///
    /// # Safety
    /// See [`run`](Self::run). The outputs of the matmul are undefined afterwards.
    pub unsafe fn tune(&mut self, stream: &Stream, gemm: &Gemm, operands: &GemmOperands) -> Result<()> {
        // SAFETY: the caller's promise.
        let Finalists { algos, .. } = unsafe { self.finalists(stream, gemm, operands) }?;
        // SAFETY: the caller's promise.
        let times = race(algos.len(), |i, runs| unsafe { self.time(stream, gemm, operands, algos[i], runs) })?;
        let best = fastest(&times).expect("there is a finalist");
        self.select((*gemm, operands.alignments()), algos[best]);
        Ok(())
    }

    /// Times the matmul with each candidate algorithm and returns the heuristic's first choice and the fastest others. Candidates
    /// that cuBLASLt refuses to run are omitted; without any other, the error is [`Error::NoAlgorithm`].
    ///
    /// # Safety
    /// See [`run`](Self::run). The outputs of the matmul are undefined afterwards.
    pub unsafe fn finalists(&self, stream: &Stream, gemm: &Gemm, operands: &GemmOperands) -> Result<Finalists> {
        operands.validate(gemm)?;
        let mut timed = Vec::new();
        for algo in candidates(&self.handle, gemm, operands, CANDIDATES)? {
            // SAFETY: the caller's promise.
            match unsafe { self.time(stream, gemm, operands, algo, SCREENING_RUNS) } {
                Err(error) if error.is_unsupported() => {}
                milliseconds => timed.push((milliseconds?, algo)),
            }
        }
        let Some(&(_, first)) = timed.first() else {
            return Err(Error::NoAlgorithm { gemm: *gemm });
        };
        timed.sort_by(|a, b| a.0.total_cmp(&b.0));
        let others = timed.iter().map(|(_, algo)| *algo).filter(|algo| *algo != first);
        let algos = [first].into_iter().chain(others.take(FINALISTS)).collect();
        Ok(Finalists { candidates: timed.len(), algos })
    }

    /// Returns the mean milliseconds of `runs` matmuls with an algorithm, after one that is not timed. Waits for the stream.
    ///
    /// # Safety
    /// See [`run`](Self::run). The outputs of the matmul are undefined afterwards.
    pub unsafe fn time(
        &self,
        stream: &Stream,
        gemm: &Gemm,
        operands: &GemmOperands,
        algo: MatmulAlgo,
        runs: u32,
    ) -> Result<f32> {
        let mut plan = MatmulPlan::with(&self.handle, gemm, operands, algo)?;
        // SAFETY: the caller's promise.
        let mut run = || unsafe { plan.run(&self.handle, &self.workspace, stream, gemm, operands) };
        run()?;
        Stopwatch::new(stream)?.time(stream, runs, run)
    }

    /// Uses an algorithm for a problem with operands of these alignments from now on, if this version of cuBLASLt supports it.
    pub fn select(&mut self, key: GemmKey, algo: MatmulAlgo) {
        self.chosen.insert(key, algo);
        self.plans.retain(|(other, _), _| *other != key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    #[test]
    fn a_race_finds_the_fastest_although_the_clock_falls() {
        // The GPU becomes slower with each run, by a tenth in the whole race; the third candidate is 2 % faster than the others.
        let mut done = 0.0_f32;
        let times = race(5, |i, runs| {
            done += runs as f32;
            let clock = 1.0 + 0.1 * done / (5 * ROUNDS * 10) as f32;
            Ok::<_, Infallible>(clock * if i == 2 { 0.098 } else { 0.1 })
        });
        let times = times.unwrap();
        assert_eq!(fastest(&times), Some(2), "{times:?}");
        let differs = |time: &f32| (time / times[2] - 1.0 / 0.98).abs() > 0.003;
        assert!(times.iter().enumerate().all(|(i, time)| i == 2 || !differs(time)), "{times:?}");
    }

    #[test]
    fn noise_does_not_replace_the_first_candidate() {
        assert_eq!(fastest(&[1.0, 0.997, 1.2]), Some(0));
        assert_eq!(fastest(&[1.0, 0.993, 0.99]), Some(2));
        assert_eq!(fastest(&[]), None);
    }

    #[test]
    fn turns_of_a_race_have_equal_durations() {
        let mut longest = 0.0_f32;
        race(2, |i, runs| {
            let time = [0.02, 3.0][i];
            longest = longest.max(time * runs as f32);
            Ok::<_, Infallible>(time)
        })
        .unwrap();
        assert!(longest < 3.1);
    }
}
