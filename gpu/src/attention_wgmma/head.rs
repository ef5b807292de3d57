//! Types and constants that depend on the head size.

use core::ops::IndexMut;
use cuda_std::hopper::wgmma::Accumulators;

/// A head size, with the register arrays of a consumer thread.
pub trait Head: Copy + 'static {
    /// Channels of a head.
    const HS: u32;
    /// The softmax scale, 1 / sqrt(HS).
    const SCALE: f32;
    /// Accumulators of 64 rows x HS columns: the output, or a gradient.
    type OutputAccumulators: Accumulators;
    /// 64 rows x HS columns as A fragments: HS / 16 steps.
    type RowFragments: Copy + IndexMut<usize, Output = [u32; 4]>;
    /// All zeros.
    const ZERO_ROWS: Self::RowFragments;
}

/// Head size 64.
#[derive(Clone, Copy)]
pub struct Head64;

impl Head for Head64 {
    const HS: u32 = 64;
    const SCALE: f32 = 0.125;
    type OutputAccumulators = [f32; 32];
    type RowFragments = [[u32; 4]; 4];
    const ZERO_ROWS: Self::RowFragments = [[0; 4]; 4];
}

/// Head size 128.
#[derive(Clone, Copy)]
pub struct Head128;

impl Head for Head128 {
    const HS: u32 = 128;
    const SCALE: f32 = core::f32::consts::FRAC_1_SQRT_2 / 8.0;
    type OutputAccumulators = [f32; 64];
    type RowFragments = [[u32; 4]; 8];
    const ZERO_ROWS: Self::RowFragments = [[0; 4]; 8];
}
