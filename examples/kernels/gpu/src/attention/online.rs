//! Attention, version 2: one kernel without a matrix of scores (FlashAttention's idea).
//!
//! Problem: see the module.
//! Idea: a thread computes a query. It visits the keys one after the other, with an online softmax: if a score exceeds the maximum so
//! far, the sum and the output so far are rescaled. Scores and probabilities live in registers only, and memory holds only qkv, out
//! and lse.
//! Limit: each thread loads every key and value itself. They come from L1, but each multiply-add needs a load. A thread needs 128
//! registers for its query and its output.

use super::{HS, Head, SCALE, Sizes};
use cuda_std::{Global, GlobalMut, Packet, bf16, kernel, math, thread};

/// The state of a query: its scaled elements, and the softmax and output so far.
#[derive(Clone, Copy)]
pub(super) struct Query {
    q: [f32; HS],
    out: [f32; HS],
    max: f32,
    sum: f32,
}

impl Query {
    /// Loads a query.
    #[inline(always)]
    pub fn load(qkv: Global<bf16>, head: Head, query: usize) -> Self {
        let mut q = [0.0; HS];
        for p in 0..HS / 8 {
            let packet = qkv.packet(head.qkv(0, query) + 8 * p);
            for i in 0..8 {
                q[8 * p + i] = packet.get(i) * SCALE;
            }
        }
        Self { q, out: [0.0; HS], max: f32::NEG_INFINITY, sum: 0.0 }
    }

    /// Adds a key and its value, each given as packets.
    #[inline(always)]
    pub fn add(&mut self, key: impl Fn(usize) -> Packet<bf16>, value: impl Fn(usize) -> Packet<bf16>) {
        let mut score = 0.0;
        for p in 0..HS / 8 {
            let packet = key(p);
            for i in 0..8 {
                score = math::fma(self.q[8 * p + i], packet.get(i), score);
            }
        }
        if score > self.max {
            let factor = math::exp(self.max - score);
            self.max = score;
            self.sum *= factor;
            for i in 0..HS {
                self.out[i] *= factor;
            }
        }
        let weight = math::exp(score - self.max);
        self.sum += weight;
        for p in 0..HS / 8 {
            let packet = value(p);
            for i in 0..8 {
                self.out[8 * p + i] = math::fma(weight, packet.get(i), self.out[8 * p + i]);
            }
        }
    }

    /// Stores out and lse.
    #[inline(always)]
    pub fn store(&self, out: GlobalMut<bf16>, lse: GlobalMut<f32>, head: Head, query: usize) {
        for p in 0..HS / 8 {
            out.set_packet(head.out(query) + 8 * p, Packet::from_fn(|i| self.out[8 * p + i] / self.sum));
        }
        lse.set(head.statistics(query), self.max + math::ln(self.sum));
    }
}

/// Computes out and lse. Grid: (T / 128 rounded up, B NH).
#[kernel(threads = 128)]
pub fn attention_online(out: GlobalMut<bf16>, lse: GlobalMut<f32>, qkv: Global<bf16>, sizes: Sizes) {
    let (head, index) = (Head::new(thread::block_idx_y() as usize, sizes), thread::index_1d());
    if index >= head.t {
        return;
    }
    let mut query = Query::load(qkv, head, index);
    for key in 0..=index {
        let (k, v) = (head.qkv(1, key), head.qkv(2, key));
        query.add(|p| qkv.packet(k + 8 * p), |p| qkv.packet(v + 8 * p));
    }
    query.store(out, lse, head, index);
}
