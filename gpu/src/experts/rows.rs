//! Copies of rows from the order of tokens to that of experts, and their sums in the other direction.
//!
//! The kernels are memory-bound. Rows have C elements, a multiple of the packet. [`dispatch`] and [`combine`] take one warp per row.

use crate::quantize::{ColumnSums, Magnitudes, place, quantized, store_block_amax, store_transposed, tile_and_maxima};
use crate::quantize_activation::{PACKETS, TilePart, in_tile};
use cuda_std::shared::Layout;
use cuda_std::{E4m3, E5m2, Element, Fp8, Global, GlobalMut, Packet, bf16, kernel, math, thread, warp};

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

/// Computes what [`dispatch`] does, rounded to bf16 and divided by a scale, in FP8: out (P, C), unless null, and `transposed` (C, P), unless
/// null. `amax` becomes the maximum of itself and the largest magnitude before the division, unless it is null. C is a multiple of 16, and
/// `end[0]` one of 128.
///
/// Grid: [`transpose_grid`](crate::quantize::transpose_grid) of (P, C). Shared memory: [`tile_and_maxima`].
#[kernel(threads = 256, instances(e4m3 = <E4m3>, e5m2 = <E5m2>))]
pub fn dispatch_to_fp8<T: Fp8>(
    out: GlobalMut<T>,
    transposed: GlobalMut<T>,
    amax: GlobalMut<u32>,
    inp: Global<bf16>,
    sources: Global<i32>,
    weights: Global<f32>,
    end: Global<u32>,
    scale: Global<f32>,
    rows: u32,
    channels: u32,
    active: u32,
) {
    let (tile, maxima) = tile_and_maxima(&mut Layout::new());
    let part = TilePart::new(rows, channels);
    if part.first[0] >= end.at(0) as usize {
        return;
    }
    let factor = math::div_rn(1.0, scale.at(0));
    let mut of_rows = [-1; PACKETS];
    for i in 0..PACKETS {
        if let Some([row, _]) = part.in_output(i) {
            of_rows[i] = sources.at(row);
        }
    }
    let mut packets = [Packet::zero(); PACKETS];
    for i in 0..PACKETS {
        let [_, word] = in_tile(i);
        if of_rows[i] >= 0 {
            let token = (of_rows[i] as u32 / active) as usize;
            packets[i] = inp.packet(token * part.columns + part.first[1] + word * 4);
        }
    }
    let mut all = Magnitudes::NONE;
    for i in 0..PACKETS {
        let mut packet = packets[i];
        if !weights.is_null() && of_rows[i] >= 0 {
            let weight = weights.at(of_rows[i] as usize);
            packet = Packet::from_fn(|j| weight * packet.get(j));
        }
        let magnitudes = Magnitudes::of(packet);
        let words = quantized::<T>(packet, magnitudes, factor);
        let [row, word] = in_tile(i);
        tile.set_two(place(row, word), words);
        if !out.is_null()
            && let Some([row, column]) = part.in_output(i)
        {
            out.set_eight(row * part.columns + column, words);
        }
        all = all.and(magnitudes);
    }
    if !amax.is_null() {
        store_block_amax(amax, maxima, all);
    }
    thread::sync_threads();
    if !transposed.is_null() {
        let no_sums = ColumnSums { partials: GlobalMut::null(), columns: 0, scale: 1.0 };
        store_transposed::<T, false>(transposed, tile, part.first, [part.rows, part.columns], no_sums);
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
