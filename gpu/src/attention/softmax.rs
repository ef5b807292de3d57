//! Online softmax (Milakov and Gimelshein, 2018, arXiv:1805.02867): the softmax of a row of scores that is computed tile by tile.
//!
//! With c = scale · log2 e and the running maximum m, the weight of a score s is 2^(c s - c m): one fused multiply-add
//! and one `ex2`. The scale is applied here and not to Q, because scaled queries would lose bits in bf16. The sums are
//! of unrounded weights.

use super::tiles::Accumulators;
use core::f32::consts::LOG2_E;
use cuda_std::{device, math, warp};

/// Returns log2 e / sqrt(HS), which converts scores to exponents of two.
#[inline(always)]
pub fn exponent_scale<const HS: usize>() -> f32 {
    scale::<HS>() * LOG2_E
}

/// Returns 1 / sqrt(HS).
#[inline(always)]
pub fn scale<const HS: usize>() -> f32 {
    math::rsqrt(HS as f32)
}

/// Returns the exponent shift of a row in the backward pass: its probabilities are P = 2^(c s + shift).
///
/// A row past the end of the sequence has no `lse`; its shift makes P zero.
#[inline(always)]
pub fn exponent_shift(lse: Option<f32>) -> f32 {
    match lse {
        Some(lse) => -lse * LOG2_E,
        None => f32::NEG_INFINITY,
    }
}

/// The running maximum of unscaled scores and the running sum of weights, for a lane's two rows of a strip.
///
/// The sum covers only the lane's own columns until [`finish`](Self::finish).
#[derive(Clone, Copy)]
pub struct OnlineSoftmax {
    max: [f32; 2],
    sum: [f32; 2],
}

#[device]
impl OnlineSoftmax {
    /// Returns the state before the first tile.
    pub fn new() -> Self {
        Self { max: [f32::NEG_INFINITY; 2], sum: [0.0; 2] }
    }

    /// Replaces the scores of a strip with weights relative to the new maximum.
    ///
    /// Returns the factor that rescales all earlier weights, or `None` if no row of the warp has a new maximum. The first
    /// tile must have an unmasked score in each row.
    #[track_caller]
    pub fn update<const R: usize, const C: usize>(
        &mut self,
        scores: &mut Accumulators<R, C>,
        strip: usize,
        exponent_scale: f32,
    ) -> Option<[f32; 2]> {
        let mut max = self.max;
        scores.for_each_in(strip, |row, score| max[row] = math::max(max[row], *score));
        let max = max.map(|max| warp::reduce_row(max, math::max));
        let shift = max.map(|max| -max * exponent_scale);
        // The maxima of most rows are among their first keys, so this branch is rarely taken later.
        let rescale = warp::any(max[0] > self.max[0] || max[1] > self.max[1]);
        let mut factor = [1.0; 2];
        if rescale {
            for row in 0..2 {
                factor[row] = math::exp2(math::fma(self.max[row], exponent_scale, shift[row]));
                self.sum[row] *= factor[row];
            }
            self.max = max;
        }
        let sum = &mut self.sum;
        scores.for_each_in(strip, |row, score| {
            *score = math::exp2(math::fma(*score, exponent_scale, shift[row]));
            sum[row] += *score;
        });
        rescale.then_some(factor)
    }

    /// Returns 1 / sum and the natural log-sum-exp of the scaled scores, for each of the two rows.
    #[track_caller]
    pub fn finish(self, scale: f32) -> ([f32; 2], [f32; 2]) {
        let sum = self.sum.map(|sum| warp::reduce_row(sum, |a, b| a + b));
        (sum.map(math::recip), [0, 1].map(|row| math::fma(self.max[row], scale, math::ln(sum[row]))))
    }
}
