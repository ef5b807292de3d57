//! Classifier, version 3: online softmax over packets.
//!
//! Problem: see the module. Vp is a multiple of 8, V need not be.
//! Idea: maximum and sum in one pass, as in version 3 of softmax, with 16-byte accesses. The padding of the last packet counts as
//! -infinity.
//! Limit: the issue of instructions. The second pass reads the row again, from L2 if the rows of all running blocks fit there.

use super::unfused::shared;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, bf16, block, kernel, math, thread};

/// Elements that a block accesses with one instruction.
const STEP: usize = 1024 * bf16::PACKET;

/// Adds a packet of logits to a running maximum and the sum of e^(logit - maximum). `valid` columns are below V.
#[inline(always)]
pub(super) fn add_packet(max: &mut f32, sum: &mut f32, x: &Packet<bf16>, valid: usize) {
    let mut new = *max;
    for k in 0..bf16::PACKET {
        new = if k < valid { math::max(new, x.get(k)) } else { new };
    }
    *sum *= math::exp(*max - new);
    for k in 0..bf16::PACKET {
        *sum += if k < valid { math::exp(x.get(k) - new) } else { 0.0 };
    }
    *max = new;
}

/// Returns the gradient of the logits `x` of columns from `i` on.
#[inline(always)]
pub(super) fn gradient(
    x: &Packet<bf16>,
    i: usize,
    target: usize,
    vocabulary: usize,
    of: impl Fn(f32) -> f32,
    dloss: f32,
) -> Packet<bf16> {
    Packet::from_fn(|k| {
        let onehot = if i + k == target { dloss } else { 0.0 };
        if i + k < vocabulary { of(x.get(k)) - onehot } else { 0.0 }
    })
}

/// Computes losses and gradients. Grid: rows.
#[kernel(threads = 1024)]
pub fn classifier_online(
    logits: GlobalMut<bf16>,
    losses: GlobalMut<f32>,
    targets: Global<i32>,
    dloss: f32,
    vocabulary: u32,
    padded: u32,
) {
    let scratch = shared(&mut Layout::new());
    let (row, v) = (thread::block_idx_x() as usize, vocabulary as usize);
    let first = thread::thread_idx_x() as usize * bf16::PACKET;
    let (logits, target) = (logits.skip(row * padded as usize), targets.at(row) as usize);
    let target_logit = logits.at(target).to_f32();
    let (mut max, mut sum) = (f32::MIN, 0.0);
    for i in (first..v).step_by(STEP) {
        add_packet(&mut max, &mut sum, &logits.packet(i), v - i);
    }
    let row_max = block::max(max, scratch);
    let sum = block::sum(sum * math::exp(max - row_max), scratch);
    if first == 0 {
        losses.set(row, losses.at(row) + math::ln(sum) - (target_logit - row_max));
    }
    let scale = dloss / sum;
    for i in (first..padded as usize).step_by(STEP) {
        let x = logits.packet(i);
        logits.set_packet(i, gradient(&x, i, target, v, |x| math::exp(x - row_max) * scale, dloss));
    }
}
