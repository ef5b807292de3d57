//! What depends on the head size.

use core::ops::IndexMut;
use cuda_std::hopper::wgmma::Accumulators;

/// A head size.
pub trait Head: Copy + 'static {
    /// Channels of a head.
    const HS: u32;
    /// 1 / sqrt(HS).
    const SCALE: f32;
    /// Sums of 64 rows of a head, in a warpgroup's registers.
    type Sums: Accumulators;
    /// Scores of 64 queries and as many keys as a step of the forward takes, and what becomes of them as a left operand.
    type Scores: Accumulators;
    type Probabilities: Copy + IndexMut<usize, Output = [u32; 4]>;
    const NO_PROBABILITIES: Self::Probabilities;
    /// 64 rows of a head as a left operand in a warpgroup's registers: HS / 16 steps.
    type Own: Copy + IndexMut<usize, Output = [u32; 4]>;
    const NO_ROWS: Self::Own;
}

#[derive(Clone, Copy)]
pub struct Head64;

impl Head for Head64 {
    const HS: u32 = 64;
    const SCALE: f32 = 0.125;
    type Sums = [f32; 32];
    type Scores = [f32; 64];
    type Probabilities = [[u32; 4]; 8];
    const NO_PROBABILITIES: Self::Probabilities = [[0; 4]; 8];
    type Own = [[u32; 4]; 4];
    const NO_ROWS: Self::Own = [[0; 4]; 4];
}

#[derive(Clone, Copy)]
pub struct Head128;

impl Head for Head128 {
    const HS: u32 = 128;
    const SCALE: f32 = core::f32::consts::FRAC_1_SQRT_2 / 8.0;
    type Sums = [f32; 64];
    type Scores = [f32; 32];
    type Probabilities = [[u32; 4]; 4];
    const NO_PROBABILITIES: Self::Probabilities = [[0; 4]; 4];
    type Own = [[u32; 4]; 8];
    const NO_ROWS: Self::Own = [[0; 4]; 8];
}
