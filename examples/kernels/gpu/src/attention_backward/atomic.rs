//! Gradient of attention, version 2: recomputed probabilities and atomic additions.
//!
//! Problem: see the module, with dqkv in f32, which must be 0 before.
//! Idea: P = e^(score - lse), so one number for each query replaces the matrix of probabilities. A thread computes a query: dQ in
//! registers, and atomic additions to dK and dV of each key.
//! Limit: 128 atomic additions for each pair of a query and a key, those of a warp to the same address: slower than version 1.
//! Their order differs between runs: the gradient is not reproducible. dQ, the query and its gradient exceed 255 registers: ptxas
//! 13.5 spills 148 bytes.

use crate::attention::{HS, Head, Sizes};
use cuda_std::{Global, GlobalMut, bf16, kernel, thread};

/// Computes dqkv. Grid: (T / 128 rounded up, B NH).
#[kernel(threads = 128)]
pub fn attention_backward_atomic(
    dqkv: GlobalMut<f32>,
    dout: Global<bf16>,
    qkv: Global<bf16>,
    out: Global<bf16>,
    lse: Global<f32>,
    sizes: Sizes,
) {
    let (head, query) = (Head::new(thread::block_idx_y() as usize, sizes), thread::index_1d());
    if query >= head.t {
        return;
    }
    let (q, dout) = (super::row(qkv, head.qkv(0, query)), super::row(dout, head.out(query)));
    let (d, lse) = (super::dot(&dout, out, head.out(query)), lse.at(head.statistics(query)));
    let mut dq = [0.0; HS];
    for key in 0..=query {
        let (k, v) = (head.qkv(1, key), head.qkv(2, key));
        let (product, dp) = (super::dot(&q, qkv, k), super::dot(&dout, qkv, v));
        let [p, ds] = super::probability_and_gradient(product, dp, lse, d);
        super::add(&mut dq, ds, qkv, k);
        for i in 0..HS {
            dqkv.atomic_add(k + i, ds * q[i / 8].get(i % 8));
            dqkv.atomic_add(v + i, p * dout[i / 8].get(i % 8));
        }
    }
    for i in 0..HS {
        dqkv.set(head.qkv(0, query) + i, dq[i]);
    }
}
