//! Softmax, version 2: one warp for each row.
//!
//! Problem: as in version 1.
//! Idea: coalesced loads, with the maximum and the sum combined by shuffles.
//! Limit: three passes over a row, by one warp. With long rows, few warps run.

use cuda_std::{Element, Global, GlobalMut, bf16, kernel, math, thread, warp};

/// Computes the softmax of each row. Grid: rows / 4, rounded up: one warp for each row.
#[kernel(threads = 128)]
pub fn softmax_warp(out: GlobalMut<bf16>, inp: Global<bf16>, rows: u32, n: u32) {
    let row = thread::block_idx_x() as usize * 4 + warp::index() as usize;
    let (lane, n) = (warp::lane() as usize, n as usize);
    if row >= rows as usize {
        return;
    }
    let (inp, out) = (inp.skip(row * n), out.skip(row * n));
    let mut max = f32::NEG_INFINITY;
    for i in (lane..n).step_by(32) {
        max = math::max(max, inp.at(i).to_f32());
    }
    let max = warp::max(max);
    let mut sum = 0.0;
    for i in (lane..n).step_by(32) {
        sum += math::exp(inp.at(i).to_f32() - max);
    }
    let scale = 1.0 / warp::sum(sum);
    super::store_row(out, inp, n, max, scale);
}
