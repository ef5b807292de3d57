//! Softmax, version 6: the row stays in registers.
//!
//! Problem: as in version 5. n is at most 57344.
//! Idea: the 1024 threads of a block have registers for a whole row: up to 7 packets each. The row is read once, and its loads are
//! all in flight together. The exponentials are computed twice, which costs less than keeping them in f32.
//! Limit: memory bandwidth, and the barriers of the two reductions, during which the SM is idle: 1024 threads with 64 registers
//! each leave no room for a second block. ptxas 13.5 spills 12 bytes.

use super::block::shared;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, bf16, block, kernel, math, thread};

/// Packets of each thread.
const PACKETS: usize = 7;
/// Elements that a block accesses with one instruction.
const STEP: usize = 1024 * bf16::PACKET;

/// Computes the softmax of each row. Grid: rows.
#[kernel(threads = 1024)]
pub fn softmax_registers(out: GlobalMut<bf16>, inp: Global<bf16>, n: u32) {
    let scratch = shared(&mut Layout::new());
    let (row, n) = (thread::block_idx_x() as usize, n as usize);
    let first = thread::thread_idx_x() as usize * bf16::PACKET;
    let (inp, out) = (inp.skip(row * n), out.skip(row * n));
    let mut x = [Packet::zero(); PACKETS];
    let mut max = f32::MIN;
    for p in 0..PACKETS {
        if first + p * STEP < n {
            x[p] = inp.packet_streaming(first + p * STEP);
        }
    }
    for p in 0..PACKETS {
        if first + p * STEP < n {
            for k in 0..bf16::PACKET {
                max = math::max(max, x[p].get(k));
            }
        }
    }
    let row_max = block::max(max, scratch);
    let mut sum = 0.0;
    for p in 0..PACKETS {
        if first + p * STEP < n {
            for k in 0..bf16::PACKET {
                sum += math::exp(x[p].get(k) - row_max);
            }
        }
    }
    let scale = 1.0 / block::sum(sum, scratch);
    for p in 0..PACKETS {
        if first + p * STEP < n {
            let packet = Packet::from_fn(|k| math::exp(x[p].get(k) - row_max) * scale);
            out.set_packet_streaming(first + p * STEP, packet);
        }
    }
}
