//! Classifier, version 4: the row stays in shared memory.
//!
//! Problem: as in version 3. A row of Vp bf16 fits into shared memory.
//! Idea: each thread starts asynchronous copies of all its packets to shared memory (`cp.async`), which pass no register. Both
//! passes then read shared memory, so each logit is read once from memory and written once.
//! Limit: the issue of instructions, as in version 3, whose second read came from L2. The version in `gpu/` compares columns with V
//! and the target in two packets only, and computes when half of the row has arrived.

use super::online::{add_packet, gradient};
use super::unfused;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedArray, async_copy, bf16, block, kernel, math, thread};

/// Elements that a block accesses with one instruction.
const STEP: usize = 1024 * bf16::PACKET;

/// Lays out the shared memory: scratch for the reductions, and a row.
pub fn shared(layout: &mut Layout, padded: usize) -> (SharedArray<f32>, SharedArray<bf16>) {
    (unfused::shared(layout), layout.array(padded).named("row"))
}

/// Computes losses and gradients. Grid: rows.
#[kernel(threads = 1024)]
pub fn classifier_staged(
    logits: GlobalMut<bf16>,
    losses: GlobalMut<f32>,
    targets: Global<i32>,
    dloss: f32,
    vocabulary: u32,
    padded: u32,
) {
    let (scratch, stage) = shared(&mut Layout::new(), padded as usize);
    let (row, v) = (thread::block_idx_x() as usize, vocabulary as usize);
    let first = thread::thread_idx_x() as usize * bf16::PACKET;
    let (logits, target) = (logits.skip(row * padded as usize), targets.at(row) as usize);
    for i in (first..padded as usize).step_by(STEP) {
        stage.copy_packet_async(i, logits.reader(), i, true);
    }
    async_copy::commit();
    let target_logit = logits.at(target).to_f32();
    // No barrier: each thread reads only what it copied itself.
    async_copy::wait::<0>();
    let (mut max, mut sum) = (f32::MIN, 0.0);
    for i in (first..v).step_by(STEP) {
        add_packet(&mut max, &mut sum, &stage.packet(i), v - i);
    }
    let row_max = block::max(max, scratch);
    let sum = block::sum(sum * math::exp(max - row_max), scratch);
    if first == 0 {
        losses.set(row, losses.at(row) + math::ln(sum) - (target_logit - row_max));
    }
    let scale = dloss / sum;
    for i in (first..padded as usize).step_by(STEP) {
        let x = stage.packet(i);
        logits.set_packet_streaming(i, gradient(&x, i, target, v, |x| math::exp(x - row_max) * scale, dloss));
    }
}
