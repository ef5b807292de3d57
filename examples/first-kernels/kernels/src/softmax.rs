//! Softmax of the rows of a matrix.
//!
//! **Problem.** y = e^x / sum of e^x. e^x overflows from x = 89 on.
//!
//! **Idea.** One block for each row, which it reads three times, twice from the cache: maximum, sum, result. With the maximum
//! subtracted, no exponential exceeds 1, and the sum is at least 1. The two reductions of `cuda_std::block` share one scratch array.
//!
//! **Tests.** Rows shorter and longer than the block, values beyond the range of e^x, -infinity as a mask, and NaN, which makes its
//! row NaN. An x that is shorter than y is an out-of-bounds access.

use cuda_std::shared::Layout;
use cuda_std::{GlobalSlice, GlobalSliceMut, SharedArray, block, kernel, math, thread};

/// Returns the grid for a matrix of `rows` rows.
pub const fn grid(rows: usize) -> [u32; 3] {
    [rows as u32, 1, 1]
}

/// Defines the shared memory: the scratch array of the reductions.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(32).named("scratch")
}

/// Computes the softmax of each row of x (rows, cols) in y (rows, cols).
#[kernel(threads = 256, shared = shared, checked)]
pub fn softmax(y: GlobalSliceMut<f32>, x: GlobalSlice<f32>, cols: u32) {
    let scratch = shared(&mut Layout::new());
    let start = thread::block_idx_x() as usize * cols as usize;
    let columns = || (thread::thread_idx_x() as usize..cols as usize).step_by(thread::block_dim_x() as usize);

    let mut largest = f32::NEG_INFINITY;
    for col in columns() {
        largest = math::max(largest, x.at(start + col));
    }
    let largest = block::max(largest, scratch);

    let mut sum = 0.0;
    for col in columns() {
        sum += math::exp(x.at(start + col) - largest);
    }
    let sum = block::sum(sum, scratch);

    for col in columns() {
        y.set(start + col, math::exp(x.at(start + col) - largest) / sum);
    }
}
