//! Softmax, version 3: maximum and sum in one pass (online softmax).
//!
//! Problem: as in version 1.
//! Idea: a lane keeps the maximum m of the elements so far, and the sum of e^(x - m). If a larger element arrives, the sum is
//! multiplied by e^(old m - new m). At the end, the lanes' sums are rescaled to the common maximum. Two passes remain of three.
//! Limit: one warp for each row, with loads of 2 bytes.

use cuda_std::{Element, Global, GlobalMut, bf16, kernel, math, thread, warp};

/// Computes the softmax of each row. Grid: rows / 4, rounded up: one warp for each row.
#[kernel(threads = 128)]
pub fn softmax_online(out: GlobalMut<bf16>, inp: Global<bf16>, rows: u32, n: u32) {
    let row = thread::block_idx_x() as usize * 4 + warp::index() as usize;
    let (lane, n) = (warp::lane() as usize, n as usize);
    if row >= rows as usize {
        return;
    }
    let (inp, out) = (inp.skip(row * n), out.skip(row * n));
    // Finite: the difference of two infinities would be NaN in a lane without elements.
    let (mut max, mut sum) = (f32::MIN, 0.0);
    for i in (lane..n).step_by(32) {
        let x = inp.at(i).to_f32();
        if x > max {
            sum *= math::exp(max - x);
            max = x;
        }
        sum += math::exp(x - max);
    }
    let row_max = warp::max(max);
    let scale = 1.0 / warp::sum(sum * math::exp(max - row_max));
    super::store_row(out, inp, n, row_max, scale);
}
