//! Softmax, version 5: 16-byte packets.
//!
//! Problem: as in version 1. n is a multiple of 8.
//! Idea: a thread takes the maximum of a packet first, so it rescales its sum once for 8 elements.
//! Limit: the second pass reads the row again, from L2 if it is still there.

use super::block::shared;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, bf16, block, kernel, math, thread};

/// Elements that a block accesses with one instruction.
const STEP: usize = 1024 * bf16::PACKET;

/// Computes the softmax of each row. Grid: rows.
#[kernel(threads = 1024)]
pub fn softmax_packets(out: GlobalMut<bf16>, inp: Global<bf16>, n: u32) {
    let scratch = shared(&mut Layout::new());
    let (row, n) = (thread::block_idx_x() as usize, n as usize);
    let first = thread::thread_idx_x() as usize * bf16::PACKET;
    let (inp, out) = (inp.skip(row * n), out.skip(row * n));
    let (mut max, mut sum) = (f32::MIN, 0.0);
    for i in (first..n).step_by(STEP) {
        let x = inp.packet(i);
        let mut new = max;
        for k in 0..bf16::PACKET {
            new = math::max(new, x.get(k));
        }
        sum *= math::exp(max - new);
        for k in 0..bf16::PACKET {
            sum += math::exp(x.get(k) - new);
        }
        max = new;
    }
    let row_max = block::max(max, scratch);
    let scale = 1.0 / block::sum(sum * math::exp(max - row_max), scratch);
    for i in (first..n).step_by(STEP) {
        let x = inp.packet(i);
        out.set_packet(i, Packet::from_fn(|k| math::exp(x.get(k) - row_max) * scale));
    }
}
