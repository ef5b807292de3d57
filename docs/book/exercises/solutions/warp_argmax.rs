//! Exercise: the largest element of a row and its index, by shuffles.
//!
//! Greedy sampling needs the token with the largest logit. One warp reads a row of n elements, coalesced, and each lane keeps its best
//! candidate. Five shuffles then find the best of the warp. Of several equal elements, the one with the smallest index counts, so
//! that the result does not depend on how the row is distributed over lanes.

#![expect(clippy::float_cmp, reason = "equal elements are a tie")]

use cuda_std::{Global, GlobalMut, kernel, thread, warp};

/// Writes the index of the largest element of each row of values (rows, n) to out (rows). No element is NaN, and n is at least 1.
/// Grid: rows, one warp for each.
#[kernel(threads = 32)]
pub fn warp_argmax(out: GlobalMut<u32>, values: Global<f32>, n: u32) {
    let row = thread::block_idx_x() as usize;
    let values = values.skip(row * n as usize);
    // A lane without elements has an index that loses against every element, also against -infinity.
    let (mut best, mut index) = (f32::NEG_INFINITY, u32::MAX);
    for i in (warp::lane()..n).step_by(32) {
        let value = values.at(i as usize);
        if value > best || value == best && i < index {
            (best, index) = (value, i);
        }
    }
    let mut mask = 16;
    while mask > 0 {
        // Both shuffles are outside of the condition: all lanes must execute them.
        let (value, i) = (warp::shuffle_xor(best, mask), warp::shuffle_xor(index, mask));
        if value > best || value == best && i < index {
            (best, index) = (value, i);
        }
        mask /= 2;
    }
    if warp::lane() == 0 {
        out.set(row, index);
    }
}
