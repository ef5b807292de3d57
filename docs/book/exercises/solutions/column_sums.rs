//! Exercise: column sums without atomics.
//!
//! Two kernels add up the columns of inp (rows, C), as the bias gradient needs it. Block b of the first kernel adds up the rows b,
//! b + grid, b + 2 grid, and so on, in this order, and writes its C sums to row b of partials (grid, C). The second kernel adds up
//! the rows of partials, from the first to the last. No two threads write to the same element, and the order of all additions is
//! fixed.

use cuda_std::{Global, GlobalMut, kernel, thread};

/// Writes the sums of the block's rows to its row of partials (grid, C). Grid: any.
#[kernel(threads = 128)]
pub fn partial_sums(partials: GlobalMut<f32>, inp: Global<f32>, rows: u32, channels: u32) {
    let (block, grid) = (thread::block_idx_x() as usize, thread::grid_dim_x() as usize);
    let (rows, channels) = (rows as usize, channels as usize);
    // Neighboring threads have neighboring columns, so the loads are coalesced.
    for c in (thread::thread_idx_x() as usize..channels).step_by(thread::block_dim_x() as usize) {
        let sum = (block..rows).step_by(grid).fold(0.0, |sum, row| sum + inp.at(row * channels + c));
        partials.set(block * channels + c, sum);
    }
}

/// Writes the sums over the `blocks` rows of partials to out (C). Grid: C / 128, rounded up.
#[kernel(threads = 128)]
pub fn add_partial_sums(out: GlobalMut<f32>, partials: Global<f32>, blocks: u32, channels: u32) {
    let (c, channels) = (thread::index_1d(), channels as usize);
    if c < channels {
        out.set(c, (0..blocks as usize).fold(0.0, |sum, block| sum + partials.at(block * channels + c)));
    }
}
