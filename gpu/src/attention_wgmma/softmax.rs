//! The online softmax of the forward pass, and the probabilities that the backward pass recomputes from lse.

use super::Head;
use super::panel::ScorePair;
use core::marker::PhantomData;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::{Global, device, math, warp};

/// Returns the softmax scale times log2(e): exponentials are computed as exp(x) = 2^(x log2 e).
#[inline(always)]
fn scale_log2<H: Head>() -> f32 {
    H::SCALE * core::f32::consts::LOG2_E
}

/// Returns the accumulators of half `HALF` of the columns.
#[inline(always)]
fn half_of<const HALF: usize>() -> core::ops::Range<usize> {
    let half = ScorePair::COLUMNS as usize / 4;
    HALF * half..(HALF + 1) * half
}

/// The online softmax of the two rows that a thread shares with three others.
pub struct Softmax<H> {
    /// Running maximum of the unscaled scores.
    max: [f32; 2],
    /// This thread's part of the running sum, relative to the maximum.
    sum: [f32; 2],
    /// Factor that rescales sums and outputs of previous tiles to the new maximum.
    pub factor: [f32; 2],
    head: PhantomData<H>,
}

#[device]
impl<H: Head> Softmax<H> {
    /// Creates the state for rows whose first scores are the first `columns` columns of `s`.
    pub fn new(s: &ScorePair, columns: u32) -> Self {
        let empty = Self { max: [f32::NEG_INFINITY; 2], sum: [0.0; 2], factor: [1.0; 2], head: PhantomData };
        Self { max: empty.maximum_over(s, columns), ..empty }
    }

    /// Returns the running maximum including the scores `s`.
    pub fn maximum_with(&self, s: &ScorePair) -> [f32; 2] {
        self.maximum_over(s, ScorePair::COLUMNS)
    }

    fn maximum_over(&self, s: &ScorePair, columns: u32) -> [f32; 2] {
        [0, 1].map(|row| {
            let mut max = self.max[row];
            for j in 0..columns as usize / 8 {
                max = math::max(max, math::max(s[4 * j + 2 * row], s[4 * j + 2 * row + 1]));
            }
            warp::reduce_row(max, math::max)
        })
    }

    /// Rescales the state to the new running maximum `max`.
    pub fn raise(&mut self, max: [f32; 2]) {
        for row in 0..2 {
            let shift = max[row] * scale_log2::<H>();
            self.factor[row] = math::exp2(math::fma(self.max[row], scale_log2::<H>(), -shift));
            self.sum[row] *= self.factor[row];
            self.max[row] = max[row];
        }
    }

    /// Replaces half `HALF` of the scores by exp(scale (s - max)) and adds them to the sums.
    pub fn exponentiate<const HALF: usize>(&mut self, s: &mut ScorePair) {
        let shift = [self.max[0] * scale_log2::<H>(), self.max[1] * scale_log2::<H>()];
        for i in half_of::<HALF>() {
            let row = i / 2 % 2;
            s[i] = math::exp2(math::fma(s[i], scale_log2::<H>(), -shift[row]));
            self.sum[row] += s[i];
        }
    }

    /// Same as [`exponentiate`](Self::exponentiate) for scores that are all masked.
    pub fn zero_masked<const HALF: usize>(s: &mut ScorePair) {
        for i in half_of::<HALF>() {
            s[i] = 0.0;
        }
    }

    /// Returns the sum over all threads of a row.
    pub fn row_sum(&self, row: usize) -> f32 {
        warp::reduce_row(self.sum[row], |a, b| a + b)
    }

    /// Returns the natural log-sum-exp of a row's scaled scores, given its row sum.
    pub fn log_sum_exp(&self, row: usize, sum: f32) -> f32 {
        self.max[row] * H::SCALE + math::ln(sum)
    }
}

/// Returns lse in base 2, or infinity past the end of a sequence, where all probabilities become 0.
#[inline(always)]
pub fn lse_log2(lse: Global<f32>, at: usize, inside: bool) -> f32 {
    if inside { lse.at(at) * core::f32::consts::LOG2_E } else { f32::INFINITY }
}

/// Recomputes a probability from an unscaled score and its row's lse in base 2.
#[inline(always)]
pub fn probability<H: Head>(score: f32, lse_log2: f32) -> f32 {
    math::exp2(math::fma(score, scale_log2::<H>(), -lse_log2))
}
