//! Softmax, version 1: one thread for each row.
//!
//! Problem: out (rows, n) = softmax of each row of inp (rows, n).
//! Idea: three passes: the maximum, the sum of e^(x - max), and the output. Without the maximum, e^x would overflow for x > 88.
//! Limit: uncoalesced accesses, and only as many threads as rows.

use cuda_std::{Element, Global, GlobalMut, bf16, kernel, math, thread};

/// Computes the softmax of each row. Grid: rows / 32, rounded up.
#[kernel(threads = 32)]
pub fn softmax_naive(out: GlobalMut<bf16>, inp: Global<bf16>, rows: u32, n: u32) {
    let (row, n) = (thread::index_1d(), n as usize);
    if row >= rows as usize {
        return;
    }
    let (inp, out) = (inp.skip(row * n), out.skip(row * n));
    let mut max = f32::NEG_INFINITY;
    for i in 0..n {
        max = math::max(max, inp.at(i).to_f32());
    }
    let mut sum = 0.0;
    for i in 0..n {
        sum += math::exp(inp.at(i).to_f32() - max);
    }
    for i in 0..n {
        out.set(i, bf16::from_f32(math::exp(inp.at(i).to_f32() - max) / sum));
    }
}
