//! Attention, version 1: three kernels and a matrix of scores.
//!
//! Problem: see the module. scores (B, NH, T, T) f32 is scratch; the part above the diagonal is never used.
//! Idea: this is the formula: a thread for each score, a warp for the softmax of each row, a thread for each element of out.
//! Limit: two loads for each multiply-add, and the capacity of the memory. The scores take 4 T² bytes for each head. They are
//! written twice and read four times, which would limit faster arithmetic.

use super::{HS, Head, SCALE, Sizes};
use cuda_std::{Element, Global, GlobalMut, bf16, kernel, math, thread, warp};

/// Computes the scaled scores of each query and the keys up to it. Grid: (T / 128 rounded up, T, B NH).
#[kernel(threads = 128)]
pub fn attention_scores(scores: GlobalMut<f32>, qkv: Global<bf16>, sizes: Sizes) {
    let head = Head::new(thread::block_idx_z() as usize, sizes);
    let (query, key) = (thread::block_idx_y() as usize, thread::index_1d());
    if key > query {
        return;
    }
    let (q, k) = (qkv.skip(head.qkv(0, query)), qkv.skip(head.qkv(1, key)));
    let mut sum = 0.0;
    for i in 0..HS {
        sum = math::fma(q.at(i).to_f32(), k.at(i).to_f32(), sum);
    }
    scores.set(head.statistics(query) * head.t + key, sum * SCALE);
}

/// Replaces each row of scores by its softmax, and computes lse. Grid: (T / 4 rounded up, B NH): a warp for each row.
#[kernel(threads = 128)]
pub fn attention_softmax(scores: GlobalMut<f32>, lse: GlobalMut<f32>, sizes: Sizes) {
    let head = Head::new(thread::block_idx_y() as usize, sizes);
    let (query, lane) = (thread::block_idx_x() as usize * 4 + warp::index() as usize, warp::lane() as usize);
    if query >= head.t {
        return;
    }
    let row = scores.skip(head.statistics(query) * head.t);
    let mut max = f32::NEG_INFINITY;
    for key in (lane..=query).step_by(32) {
        max = math::max(max, row.at(key));
    }
    let max = warp::max(max);
    let mut sum = 0.0;
    for key in (lane..=query).step_by(32) {
        sum += math::exp(row.at(key) - max);
    }
    let sum = warp::sum(sum);
    for key in (lane..=query).step_by(32) {
        row.set(key, math::exp(row.at(key) - max) / sum);
    }
    if lane == 0 {
        lse.set(head.statistics(query), max + math::ln(sum));
    }
}

/// Computes out from the probabilities. Grid: (T / 2 rounded up, B NH): two queries for each block.
#[kernel(threads = 128)]
pub fn attention_values(out: GlobalMut<bf16>, probabilities: Global<f32>, qkv: Global<bf16>, sizes: Sizes) {
    let head = Head::new(thread::block_idx_y() as usize, sizes);
    let (query, i) = (thread::index_1d() / HS, thread::index_1d() % HS);
    if query >= head.t {
        return;
    }
    let row = probabilities.skip(head.statistics(query) * head.t);
    let mut sum = 0.0;
    for key in 0..=query {
        sum = math::fma(row.at(key), qkv.at(head.qkv(2, key) + i).to_f32(), sum);
    }
    out.set(head.out(query) + i, bf16::from_f32(sum));
}
