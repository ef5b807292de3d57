//! The norm of an array: the square root of the sum of squares, a reduction to one number.

pub mod blocks;
pub mod one_block;
pub mod shuffles;
pub mod stride;

use cuda_std::{Global, GlobalMut, kernel, math, thread};

/// Computes norm (1) = sqrt(sum (1)), after all blocks have added to the sum. Grid: 1.
#[kernel(threads = 32)]
pub fn norm_root(norm: GlobalMut<f32>, sum: Global<f32>) {
    if thread::thread_idx_x() == 0 {
        norm.set(0, math::sqrt(sum.at(0)));
    }
}
