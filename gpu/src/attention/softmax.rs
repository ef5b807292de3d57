//! The online softmax: probabilities of a row whose scores come tile by tile.
//!
//! With c = scale · log2 e and running maximum m, a tile's weights are 2^(c s - c m): one fused multiply-add and one
//! `ex2`. The scale stays out of Q, which would lose bits in bf16. Sums are of the unrounded weights.

use super::tiles::Accumulators;
use cuda_std::{math, warp};

/// log2 e / sqrt(HS): scores times this are exponents of two.
#[inline(always)]
pub fn exponent_scale<const HS: usize>() -> f32 {
    scale::<HS>() * core::f32::consts::LOG2_E
}

/// 1 / sqrt(HS).
#[inline(always)]
pub fn scale<const HS: usize>() -> f32 {
    math::rsqrt(HS as f32)
}

/// Running maximum (of raw scores) and sum of a lane's two rows of a strip. The sum is of the lane's own columns until
/// [`finish`](Self::finish).
#[derive(Clone, Copy)]
pub struct OnlineSoftmax {
    max: [f32; 2],
    sum: [f32; 2],
}

impl OnlineSoftmax {
    #[inline(always)]
    pub fn new() -> Self {
        Self { max: [f32::NEG_INFINITY; 2], sum: [0.0; 2] }
    }

    /// Turns a strip's scores into weights relative to the new maximum; returns the factor of all earlier weights.
    /// The first tile must hold an unmasked score in each row.
    #[inline(always)]
    #[track_caller]
    pub fn update<const R: usize, const C: usize>(
        &mut self,
        scores: &mut Accumulators<R, C>,
        strip: usize,
        exponent_scale: f32,
    ) -> [f32; 2] {
        let mut max = self.max;
        scores.for_each_in(strip, |row, score| max[row] = math::max(max[row], *score));
        let max = max.map(|max| over_row(max, math::max));
        let shift = max.map(|max| -max * exponent_scale);
        let mut factor = [0.0; 2];
        for row in 0..2 {
            factor[row] = math::exp2(math::fma(self.max[row], exponent_scale, shift[row]));
            self.sum[row] *= factor[row];
        }
        self.max = max;
        let sum = &mut self.sum;
        scores.for_each_in(strip, |row, score| {
            *score = math::exp2(math::fma(*score, exponent_scale, shift[row]));
            sum[row] += *score;
        });
        factor
    }

    /// 1 / sum, and the log-sum-exp of the scaled scores, natural logarithm.
    #[inline(always)]
    #[track_caller]
    pub fn finish(self, scale: f32) -> ([f32; 2], [f32; 2]) {
        let sum = self.sum.map(|sum| over_row(sum, |a, b| a + b));
        (sum.map(math::recip), [0, 1].map(|row| math::fma(self.max[row], scale, math::ln(sum[row]))))
    }
}

/// Folds over the four lanes that share a row.
#[inline(always)]
#[track_caller]
pub fn over_row(value: f32, op: impl Fn(f32, f32) -> f32) -> f32 {
    let value = op(value, warp::shuffle_xor(value, 1));
    op(value, warp::shuffle_xor(value, 2))
}
