//! Copies of rows from the order of tokens to that of experts, and their sums in the other direction.
//!
//! Both kernels are memory-bound. Rows have C elements, a multiple of the packet. One warp per row.

use cuda_std::{Element, Global, GlobalMut, Packet, kernel, math, thread, warp};

const WARPS: usize = 256 / LANES;
const LANES: usize = warp::LANES as usize;

/// Returns the grid size of the kernels for this number of output rows.
pub const fn grid(rows: usize) -> u32 {
    rows.div_ceil(WARPS) as u32
}

/// Computes out (P, C) from inp (rows, C): row i is that of the token of entry `sources[i]`, times the weight of the entry unless weights (rows,
/// K) is null. Rows with a negative source are zeros. Rows from `end[0]` on are not written. Grid: [`grid`] of P.
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn dispatch<T: Element>(
    out: GlobalMut<T>,
    inp: Global<T>,
    sources: Global<i32>,
    weights: Global<f32>,
    end: Global<u32>,
    channels: u32,
    active: u32,
) {
    let row = thread::block_idx_x() as usize * WARPS + warp::index() as usize;
    if row >= end.at(0) as usize {
        return;
    }
    let (source, channels) = (sources.at(row), channels as usize);
    let out = out.skip(row * channels);
    let mut column = warp::lane() as usize * T::PACKET;
    if source < 0 {
        while column < channels {
            out.set_packet(column, Packet::zero());
            column += LANES * T::PACKET;
        }
        return;
    }
    let inp = inp.skip((source as u32 / active) as usize * channels);
    let weight = if weights.is_null() { 1.0 } else { weights.at(source as usize) };
    while column < channels {
        let packet = inp.packet(column);
        let scaled = if weights.is_null() { packet } else { Packet::from_fn(|i| weight * packet.get(i)) };
        out.set_packet(column, scaled);
        column += LANES * T::PACKET;
    }
}

/// Computes out (rows, C) = residual (rows, C) + the sum of rows `positions[token, choice]` of inp (P, C) over the choices, each times its weight
/// unless weights (rows, K) is null. A choice with a negative position has no row. The residual may be null or out. Grid: [`grid`] of rows.
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn combine<T: Element>(
    out: GlobalMut<T>,
    residual: GlobalMut<T>,
    inp: Global<T>,
    weights: Global<f32>,
    positions: Global<i32>,
    rows: u32,
    channels: u32,
    active: u32,
) {
    let row = thread::block_idx_x() as usize * WARPS + warp::index() as usize;
    if row >= rows as usize {
        return;
    }
    let (channels, active, lane) = (channels as usize, active as usize, warp::lane() as usize);
    // Each lane holds a choice.
    let (mut position, mut weight) = (0, 1.0);
    if lane < active {
        position = positions.at(row * active + lane) as u32;
        if !weights.is_null() {
            weight = weights.at(row * active + lane);
        }
    }
    let mut first = 0;
    while first < channels {
        let column = first + lane * T::PACKET;
        let mut sums = [0.0; 8];
        for choice in 0..active as u32 {
            let (position, weight) = (warp::shuffle(position, choice), warp::shuffle(weight, choice));
            if column < channels && position as i32 >= 0 {
                let packet = inp.packet(position as usize * channels + column);
                for i in 0..T::PACKET {
                    sums[i] = math::fma(weight, packet.get(i), sums[i]);
                }
            }
        }
        if column < channels {
            let at = row * channels + column;
            let before = if residual.is_null() { Packet::zero() } else { residual.packet(at) };
            out.set_packet(at, Packet::from_fn(|i| before.get(i) + sums[i]));
        }
        first += LANES * T::PACKET;
    }
}
