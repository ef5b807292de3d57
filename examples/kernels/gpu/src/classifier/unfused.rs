//! Classifier, version 1: softmax, loss and gradient as three kernels.
//!
//! Problem: see the module. probs (rows, V) f32 holds the probabilities.
//! Idea: this is how a framework computes it: each kernel reads what the previous one has written.
//! Limit: memory traffic. The probabilities are written once and read once, in f32, and the softmax reads the logits three times.

use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedArray, bf16, block, kernel, math, thread};

/// Lays out the shared memory of the reductions.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(32)
}

/// Computes probs (rows, V). Grid: rows.
#[kernel(threads = 1024)]
pub fn classifier_softmax(probs: GlobalMut<f32>, logits: Global<bf16>, vocabulary: u32, padded: u32) {
    let scratch = shared(&mut Layout::new());
    let (row, t, v) = (thread::block_idx_x() as usize, thread::thread_idx_x() as usize, vocabulary as usize);
    let (logits, probs) = (logits.skip(row * padded as usize), probs.skip(row * v));
    let mut max = f32::NEG_INFINITY;
    for i in (t..v).step_by(1024) {
        max = math::max(max, logits.at(i).to_f32());
    }
    let max = block::max(max, scratch);
    let mut sum = 0.0;
    for i in (t..v).step_by(1024) {
        sum += math::exp(logits.at(i).to_f32() - max);
    }
    let scale = 1.0 / block::sum(sum, scratch);
    for i in (t..v).step_by(1024) {
        probs.set(i, math::exp(logits.at(i).to_f32() - max) * scale);
    }
}

/// Adds to losses (rows). Grid: rows / 128, rounded up.
#[kernel(threads = 128)]
pub fn classifier_loss(losses: GlobalMut<f32>, probs: Global<f32>, targets: Global<i32>, rows: u32, vocabulary: u32) {
    let row = thread::index_1d();
    if row < rows as usize {
        let probability = probs.at(row * vocabulary as usize + targets.at(row) as usize);
        losses.set(row, losses.at(row) - math::ln(probability));
    }
}

/// Replaces the logits by their gradient. Grid: rows.
#[kernel(threads = 1024)]
pub fn classifier_gradient(
    logits: GlobalMut<bf16>,
    probs: Global<f32>,
    targets: Global<i32>,
    dloss: f32,
    vocabulary: u32,
    padded: u32,
) {
    let (row, t, v) = (thread::block_idx_x() as usize, thread::thread_idx_x() as usize, vocabulary as usize);
    let (logits, probs, target) = (logits.skip(row * padded as usize), probs.skip(row * v), targets.at(row) as usize);
    for i in (t..padded as usize).step_by(1024) {
        let onehot = if i == target { 1.0 } else { 0.0 };
        let gradient = if i < v { (probs.at(i) - onehot) * dloss } else { 0.0 };
        logits.set(i, bf16::from_f32(gradient));
    }
}
