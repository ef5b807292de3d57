//! Scaled vector addition.
//!
//! **Problem.** y = a x + y for vectors of any length. Each element is read and written once, so the kernel is memory-bound.
//!
//! **Idea.** One thread for each element. Neighboring threads access neighboring elements, so the accesses of a warp are coalesced.
//! The last block has threads without an element.
//!
//! **Tests.** Lengths around multiples of the block size. An x that is shorter than y is an out-of-bounds access.

use cuda_std::{GlobalSlice, GlobalSliceMut, kernel, thread};

/// Threads per block.
pub const THREADS: usize = 256;

/// Returns the grid for `n` elements.
pub const fn grid(n: usize) -> [u32; 3] {
    [n.div_ceil(THREADS) as u32, 1, 1]
}

/// Computes y (n) = a x (n) + y (n).
#[kernel(threads = 256, checked)]
pub fn saxpy(y: GlobalSliceMut<f32>, x: GlobalSlice<f32>, a: f32) {
    let i = thread::index_1d();
    if i < y.len() {
        y.set(i, a * x.at(i) + y.at(i));
    }
}
