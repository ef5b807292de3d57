//! Classifier, version 2: one kernel.
//!
//! Problem: see the module.
//! Idea: loss and gradient need only the maximum and the sum of a row. So one kernel computes both, recomputes each probability
//! where it is needed, and overwrites the logits with their gradient. The probabilities never exist in memory.
//! Limit: the issue of instructions: three passes over the row, with accesses of 2 bytes.

use super::unfused::shared;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, bf16, block, kernel, math, thread};

/// Computes losses and gradients. Grid: rows.
#[kernel(threads = 1024)]
pub fn classifier_fused(
    logits: GlobalMut<bf16>,
    losses: GlobalMut<f32>,
    targets: Global<i32>,
    dloss: f32,
    vocabulary: u32,
    padded: u32,
) {
    let scratch = shared(&mut Layout::new());
    let (row, t, v) = (thread::block_idx_x() as usize, thread::thread_idx_x() as usize, vocabulary as usize);
    let (logits, target) = (logits.skip(row * padded as usize), targets.at(row) as usize);
    let mut max = f32::NEG_INFINITY;
    for i in (t..v).step_by(1024) {
        max = math::max(max, logits.at(i).to_f32());
    }
    let max = block::max(max, scratch);
    let mut sum = 0.0;
    for i in (t..v).step_by(1024) {
        sum += math::exp(logits.at(i).to_f32() - max);
    }
    let sum = block::sum(sum, scratch);
    // Before another thread overwrites the logit of the target: the barrier below separates them.
    if t == 0 {
        losses.set(row, losses.at(row) + math::ln(sum) - (logits.at(target).to_f32() - max));
    }
    thread::sync_threads();
    for i in (t..padded as usize).step_by(1024) {
        let onehot = if i == target { 1.0 } else { 0.0 };
        let probability = math::exp(logits.at(i).to_f32() - max) / sum;
        let gradient = if i < v { (probability - onehot) * dloss } else { 0.0 };
        logits.set(i, bf16::from_f32(gradient));
    }
}
