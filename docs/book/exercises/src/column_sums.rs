//! Exercise: column sums without atomics.
//!
//! Two kernels add up the columns of inp (rows, C), as the bias gradient needs it. Block b of the first kernel adds up the rows b,
//! b + grid, b + 2 grid, and so on, in this order, and writes its C sums to row b of partials (grid, C). The second kernel adds up
//! the rows of partials, from the first to the last. No two threads write to the same element, and the order of all additions is
//! fixed.

use cuda_std::{Global, GlobalMut, kernel};

/// Writes the sums of the block's rows to its row of partials (grid, C). Grid: any.
#[kernel(threads = 128)]
pub fn partial_sums(partials: GlobalMut<f32>, inp: Global<f32>, rows: u32, channels: u32) {
    unimplemented!("exercise column_sums")
}

/// Writes the sums over the `blocks` rows of partials to out (C). Grid: C / 128, rounded up.
#[kernel(threads = 128)]
pub fn add_partial_sums(out: GlobalMut<f32>, partials: Global<f32>, blocks: u32, channels: u32) {
    unimplemented!("exercise column_sums")
}
