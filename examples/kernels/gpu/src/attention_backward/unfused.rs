//! Gradient of attention, version 1: matrices of probabilities and of gradients of scores.
//!
//! Problem: see the module. probabilities (B, NH, T, T) f32 is from version 1 of the forward pass, dscores (B, NH, T, T) f32 scratch.
//! Idea: this is the formula: the gradients of the scores first, with a warp for each row, then a thread for each element of dqkv.
//! Limit: two loads for each multiply-add, and the capacity of the memory: two matrices of 4 T² bytes for each head, each read
//! several times.

use crate::attention::{HS, Head, Sizes};
use cuda_std::{Element, Global, GlobalMut, bf16, kernel, math, thread, warp};

/// Computes the gradients of the scores. Grid: (T / 4 rounded up, B NH): a warp for each row.
#[kernel(threads = 128)]
pub fn attention_backward_scores(
    dscores: GlobalMut<f32>,
    probabilities: Global<f32>,
    dout: Global<bf16>,
    qkv: Global<bf16>,
    sizes: Sizes,
) {
    let head = Head::new(thread::block_idx_y() as usize, sizes);
    let (query, lane) = (thread::block_idx_x() as usize * 4 + warp::index() as usize, warp::lane() as usize);
    if query >= head.t {
        return;
    }
    let first = head.statistics(query) * head.t;
    let dout = super::row(dout, head.out(query));
    let mut d = 0.0;
    for key in (lane..=query).step_by(32) {
        let dp = super::dot(&dout, qkv, head.qkv(2, key));
        dscores.set(first + key, dp);
        d = math::fma(probabilities.at(first + key), dp, d);
    }
    let d = warp::sum(d);
    for key in (lane..=query).step_by(32) {
        let (p, dp) = (probabilities.at(first + key), dscores.at(first + key));
        dscores.set(first + key, p * (dp - d) * super::SCALE);
    }
}

/// Computes dqkv. Grid: (T / 2 rounded up, B NH): two positions for each block.
#[kernel(threads = 128)]
pub fn attention_backward_inputs(
    dqkv: GlobalMut<bf16>,
    dscores: Global<f32>,
    probabilities: Global<f32>,
    dout: Global<bf16>,
    qkv: Global<bf16>,
    sizes: Sizes,
) {
    let head = Head::new(thread::block_idx_y() as usize, sizes);
    let (position, i) = (thread::index_1d() / HS, thread::index_1d() % HS);
    if position >= head.t {
        return;
    }
    let (mut dq, mut dk, mut dv) = (0.0, 0.0, 0.0);
    for key in 0..=position {
        let ds = dscores.at(head.statistics(position) * head.t + key);
        dq = math::fma(ds, qkv.at(head.qkv(1, key) + i).to_f32(), dq);
    }
    for query in position..head.t {
        let at = head.statistics(query) * head.t + position;
        dk = math::fma(dscores.at(at), qkv.at(head.qkv(0, query) + i).to_f32(), dk);
        dv = math::fma(probabilities.at(at), dout.at(head.out(query) + i).to_f32(), dv);
    }
    for (part, gradient) in [dq, dk, dv].into_iter().enumerate() {
        dqkv.set(head.qkv(part, position) + i, bf16::from_f32(gradient));
    }
}
