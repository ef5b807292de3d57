//! Gradient of attention, version 3: one kernel for queries, one for keys.
//!
//! Problem: see the module. d (B, NH, T) f32 is scratch.
//! Idea: a thread of the first kernel computes D and dQ of a query, in a loop over the keys before it. A thread of the second computes
//! dK and dV of a key, in a loop over the queries after it. Each sum belongs to one thread: no atomics, and the same result in
//! every run. The price is that both kernels recompute the probabilities.
//! Limit: each thread loads all rows itself, and the arithmetic units for f32. Two sums of 64 f32 and two rows exceed 255 registers: ptxas
//! 13.5 spills 396 bytes in the second kernel and 96 in the first. The kernels in `gpu/` divide the work in the same way,
//! with tiles in shared memory and tensor cores.

use crate::attention::{HS, Head, Sizes};
use cuda_std::{Global, GlobalMut, Packet, bf16, kernel, thread};

/// Stores a row of HS elements.
#[inline(always)]
fn store(to: GlobalMut<bf16>, first: usize, row: &[f32; HS]) {
    for p in 0..HS / 8 {
        to.set_packet(first + 8 * p, Packet::from_fn(|i| row[8 * p + i]));
    }
}

/// Computes d and the gradient of Q. Grid: (T / 128 rounded up, B NH).
#[kernel(threads = 128)]
pub fn attention_backward_queries(
    dqkv: GlobalMut<bf16>,
    d: GlobalMut<f32>,
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
    let (of_query, lse) = (super::dot(&dout, out, head.out(query)), lse.at(head.statistics(query)));
    let mut dq = [0.0; HS];
    for key in 0..=query {
        let (product, dp) = (super::dot(&q, qkv, head.qkv(1, key)), super::dot(&dout, qkv, head.qkv(2, key)));
        let [_, ds] = super::probability_and_gradient(product, dp, lse, of_query);
        super::add(&mut dq, ds, qkv, head.qkv(1, key));
    }
    d.set(head.statistics(query), of_query);
    store(dqkv, head.qkv(0, query), &dq);
}

/// Computes the gradients of K and V. Grid: (T / 128 rounded up, B NH).
#[kernel(threads = 128)]
pub fn attention_backward_keys(
    dqkv: GlobalMut<bf16>,
    d: Global<f32>,
    dout: Global<bf16>,
    qkv: Global<bf16>,
    lse: Global<f32>,
    sizes: Sizes,
) {
    let (head, key) = (Head::new(thread::block_idx_y() as usize, sizes), thread::index_1d());
    if key >= head.t {
        return;
    }
    let (k, v) = (super::row(qkv, head.qkv(1, key)), super::row(qkv, head.qkv(2, key)));
    let (mut dk, mut dv) = ([0.0; HS], [0.0; HS]);
    for query in key..head.t {
        let (product, dp) = (super::dot(&k, qkv, head.qkv(0, query)), super::dot(&v, dout, head.out(query)));
        let of_query = head.statistics(query);
        let [p, ds] = super::probability_and_gradient(product, dp, lse.at(of_query), d.at(of_query));
        super::add(&mut dk, ds, qkv, head.qkv(0, query));
        super::add(&mut dv, p, dout, head.out(query));
    }
    store(dqkv, head.qkv(1, key), &dk);
    store(dqkv, head.qkv(2, key), &dv);
}
