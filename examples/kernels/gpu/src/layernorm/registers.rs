//! LayerNorm, version 5: the row stays in registers.
//!
//! Problem: as in version 4. C is at most 1024.
//! Idea: a warp holds a whole row: up to four packets in each lane. The row is read from memory once, and all of its loads are
//! issued before the first result is needed. With the row at hand, the exact variance costs only arithmetic, so the shift of
//! version 3 is no longer needed. Arrays stay in registers only if the compiler knows every index: the loops have constant bounds.
//! Limit: memory bandwidth. The version in `gpu/` keeps more loads in flight: it copies the next rows to shared memory while it
//! normalizes the current ones, and splits wide rows among several warps.

use super::EPSILON;
use cuda_std::{Element, Global, GlobalMut, Packet, bf16, kernel, math, thread, warp};

/// Packets of each lane.
const PACKETS: usize = 4;
/// Channels that a warp accesses with one instruction.
const STEP: usize = 32 * bf16::PACKET;

/// Normalizes the rows. Grid: rows / 8, rounded up: one warp for each row.
#[kernel(threads = 256)]
pub fn layernorm_registers(
    out: GlobalMut<bf16>,
    mean: GlobalMut<f32>,
    rstd: GlobalMut<f32>,
    inp: Global<bf16>,
    weight: Global<bf16>,
    bias: Global<bf16>,
    rows: u32,
    channels: u32,
) {
    let row = thread::block_idx_x() as usize * 8 + warp::index() as usize;
    let (first, channels) = (warp::lane() as usize * bf16::PACKET, channels as usize);
    if row >= rows as usize {
        return;
    }
    let (inp, out) = (inp.skip(row * channels), out.skip(row * channels));
    let mut x = [Packet::zero(); PACKETS];
    for p in 0..PACKETS {
        if first + p * STEP < channels {
            x[p] = inp.packet_streaming(first + p * STEP);
        }
    }
    let mut sum = 0.0;
    for p in 0..PACKETS {
        for k in 0..bf16::PACKET {
            sum += x[p].get(k);
        }
    }
    let m = warp::sum(sum) / channels as f32;
    let mut squares = 0.0;
    for p in 0..PACKETS {
        for k in 0..bf16::PACKET {
            let d = if first + p * STEP < channels { x[p].get(k) - m } else { 0.0 };
            squares += d * d;
        }
    }
    let r = math::rsqrt(warp::sum(squares) / channels as f32 + EPSILON);
    for p in 0..PACKETS {
        let c = first + p * STEP;
        if c < channels {
            let (w, b) = (weight.packet(c), bias.packet(c));
            out.set_packet(c, Packet::from_fn(|k| (x[p].get(k) - m) * r * w.get(k) + b.get(k)));
        }
    }
    if first == 0 {
        mean.set(row, m);
        rstd.set(row, r);
    }
}
