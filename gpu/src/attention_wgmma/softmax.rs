//! The running softmax of the forward, and the probabilities that the backward makes of its log-sum-exp.

use super::Head;
use core::marker::PhantomData;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::{Global, math, warp};

/// Scores are raised to powers of 2: exp(x) = 2^(x log2 e).
#[inline(always)]
fn scale_log2<H: Head>() -> f32 {
    H::SCALE * core::f32::consts::LOG2_E
}

/// The accumulators of a half of the columns.
#[inline(always)]
fn half_of<H: Head, const HALF: usize>() -> core::ops::Range<usize> {
    let half = H::Scores::COLUMNS as usize / 4;
    HALF * half..(HALF + 1) * half
}

/// State of the two rows a thread shares with three others.
pub struct Softmax<H> {
    /// Running maximum of raw scores.
    max: [f32; 2],
    /// This thread's own part of the running sum, relative to the maximum.
    sum: [f32; 2],
    /// What sums and outputs of the tiles before must be multiplied by.
    factor: [f32; 2],
    head: PhantomData<H>,
}

impl<H: Head> Softmax<H> {
    /// Of rows whose first scores are the first `columns` of `s`.
    #[inline(always)]
    pub fn new(s: &H::Scores, columns: u32) -> Self {
        let none = Self { max: [f32::NEG_INFINITY; 2], sum: [0.0; 2], factor: [1.0; 2], head: PhantomData };
        Self { max: none.maximum_over(s, columns), ..none }
    }

    /// The running maximum after the scores `s`.
    #[inline(always)]
    pub fn maximum_with(&self, s: &H::Scores) -> [f32; 2] {
        self.maximum_over(s, H::Scores::COLUMNS)
    }

    #[inline(always)]
    fn maximum_over(&self, s: &H::Scores, columns: u32) -> [f32; 2] {
        [self.row_maximum_over::<0>(s, columns), self.row_maximum_over::<1>(s, columns)]
    }

    #[inline(always)]
    fn row_maximum_over<const ROW: usize>(&self, s: &H::Scores, columns: u32) -> f32 {
        let mut max = self.max[ROW];
        for j in 0..columns as usize / 8 {
            max = math::max(max, math::max(s[4 * j + 2 * ROW], s[4 * j + 2 * ROW + 1]));
        }
        max = math::max(max, warp::shuffle_xor(max, 1));
        math::max(max, warp::shuffle_xor(max, 2))
    }

    /// Moves on to the next tile, whose scores have made the maximum `max`.
    #[inline(always)]
    pub fn raise(&mut self, max: [f32; 2]) {
        for row in 0..2 {
            let shift = max[row] * scale_log2::<H>();
            self.factor[row] = math::exp2(math::fma(self.max[row], scale_log2::<H>(), -shift));
            self.sum[row] *= self.factor[row];
            self.max[row] = max[row];
        }
    }

    /// s = exp(scale (s - max)) for half `HALF` of the columns, which are added to the sums.
    #[inline(always)]
    pub fn exponentiate<const HALF: usize>(&mut self, s: &mut H::Scores) {
        let shift = [self.max[0] * scale_log2::<H>(), self.max[1] * scale_log2::<H>()];
        for i in half_of::<H, HALF>() {
            let row = i / 2 % 2;
            s[i] = math::exp2(math::fma(s[i], scale_log2::<H>(), -shift[row]));
            self.sum[row] += s[i];
        }
    }

    /// As [`exponentiate`](Self::exponentiate) of scores that are all minus infinity.
    #[inline(always)]
    pub fn hide<const HALF: usize>(s: &mut H::Scores) {
        for i in half_of::<H, HALF>() {
            s[i] = 0.0;
        }
    }

    #[inline(always)]
    pub fn factor(&self, row: usize) -> f32 {
        self.factor[row]
    }

    /// Sum over a whole row.
    #[inline(always)]
    pub fn total(&self, row: usize) -> f32 {
        let sum = self.sum[row];
        let sum = sum + warp::shuffle_xor(sum, 1);
        sum + warp::shuffle_xor(sum, 2)
    }

    /// Natural log-sum-exp of a row's scaled scores, whose sum is `total`.
    #[inline(always)]
    pub fn log_sum_exp(&self, row: usize, total: f32) -> f32 {
        self.max[row] * H::SCALE + math::ln(total)
    }
}

/// What a probability is 2 to the power of minus: lse in base 2. Infinite past the end of a sequence: probability 0.
#[inline(always)]
pub fn shift_of(lse: Global<f32>, at: usize, inside: bool) -> f32 {
    if inside { lse.at(at) * core::f32::consts::LOG2_E } else { f32::INFINITY }
}

#[inline(always)]
pub fn probability<H: Head>(score: f32, shift: f32) -> f32 {
    math::exp2(math::fma(score, scale_log2::<H>(), -shift))
}
