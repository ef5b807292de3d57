//! Exercise: the largest element of a row and its index, by shuffles.
//!
//! Greedy sampling needs the token with the largest logit. One warp reads a row of n elements, coalesced, and each lane keeps its best
//! candidate. Five shuffles then find the best of the warp. Of several equal elements, the one with the smallest index counts, so
//! that the result does not depend on how the row is distributed over lanes.

use cuda_std::{Global, GlobalMut, kernel};

/// Writes the index of the largest element of each row of values (rows, n) to out (rows). No element is NaN, and n is at least 1.
/// Grid: rows, one warp for each.
#[kernel(threads = 32)]
pub fn warp_argmax(out: GlobalMut<u32>, values: Global<f32>, n: u32) {
    unimplemented!("exercise warp_argmax")
}
