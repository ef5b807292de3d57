//! Linear layers of few rows whose weight is in FP8: those of [`matvec`](super::matvec) with a weight (OC, C) of E4M3 numbers, times a scale.
//!
//! The scale is a power of two, so that the weight is exact in bf16. A warp computes eight adjacent columns of out for all rows: the rows of
//! inp are the left operand of `mma.m16n8k16`, and the rows of weight the right one. A lane reads packets of one row of weight, and the same
//! channels of the rows of inp. `split` warps of a block share the channels of the same columns and add their sums in a fixed order.
//!
//! C is a multiple of the packet, 16, and OC is even. Norm, rounding and gated activations are those of [`matvec`](super::matvec).

use super::matvec::{Input, PLAIN, Sizes, normalize};
use crate::activation::{is_gated, value_of};
use cuda_std::fp8::Bf16Scale;
use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{E4m3, Element, Global, GlobalMut, Packet, SharedArray, kernel, thread, warp};

/// Columns that a warp computes.
pub const COLUMNS: usize = 8;
/// Threads of a block.
pub const THREADS: u32 = 256;
const WARPS: usize = (THREADS / warp::LANES) as usize;
const LANES: usize = warp::LANES as usize;
/// Channels that the lanes of a warp read at a time: four packets of each row of weight.
pub const BLOCK: usize = 4 * E4m3::PACKET;
/// Packets that a lane loads before it uses the first.
const UNROLL: usize = 4;

/// Lays out the shared memory: four sums of each thread.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(WARPS * LANES * 4)
}

/// Computes out (R, OC), or (R, OC / 2) with a gated activation. bias and residual (R, OC) may be null; an activation excludes a residual.
///
/// Grid: [`Sizes::grid`]. Shared memory: [`shared`].
#[kernel(
    threads = 256,
    instances([r2 = <cuda_std::bf16, 2>] * [_ = 0, layernorm = 1, rmsnorm = 2], r16 = <cuda_std::bf16, 16, 0>),
    select(ROWS: usize, NORM: u32)
)]
pub fn matvec_fp8<T: TensorCore, const ROWS: usize, const NORM: u32>(
    out: GlobalMut<T>,
    inp: Global<T>,
    weight: Global<E4m3>,
    scale: Global<f32>,
    bias: Global<T>,
    residual: Global<T>,
    norm_weight: Global<T>,
    norm_bias: Global<T>,
    sizes: Sizes,
) {
    let scratch = shared(&mut Layout::new());
    let (lane, warp) = (warp::lane() as usize, warp::index() as usize);
    let (g, t) = (lane / 4, lane % 4);
    let (split, gated) = (sizes.split as usize, is_gated(sizes.activation));
    let (channels, outputs) = (sizes.channels as usize, sizes.outputs as usize);
    let (group, part) = (warp / split.max(1), warp % split.max(1));
    let first = (thread::block_idx_x() as usize * (WARPS / split.max(1)) + group) * COLUMNS;
    // The row of weight of a sum. Sums past the last repeat it and are not stored.
    let weight_row = |sum: usize| {
        let sum = sum.min(outputs - 1);
        if gated { sum / 2 + sum % 2 * (outputs / 2) } else { sum }
    };
    let row = weight.skip(weight_row(first + g) * channels);
    // First channel of the warp in step u of the chunk from `base` on.
    let block = |base: usize, u: usize| base + (u * split + part) * BLOCK;
    // Loads past the end repeat the last packet: with a condition per load, ptxas would interleave loads and their uses.
    let channel = |base: usize, u: usize| (block(base, u) + t * E4m3::PACKET).min(channels - E4m3::PACKET);
    let load = |base: usize| {
        let mut packets = [Packet::<E4m3>::zero(); UNROLL];
        for u in 0..UNROLL {
            packets[u] = row.packet_streaming(channel(base, u));
        }
        packets
    };
    let rows = sizes.rows as usize;
    let input = Input::<T, ROWS, NORM> { inp, weight: norm_weight, bias: norm_bias, channels, rows };
    let mut weights = load(0);
    let scale = Bf16Scale::new(scale.at(0));
    let statistics = input.statistics(sizes.eps)[g.min(ROWS - 1)];
    let mut d = [[0.0; 4]; 2];
    let mut base = 0;
    loop {
        for u in 0..UNROLL {
            if block(base, u) < channels {
                let is_past_end = block(base, u) + t * E4m3::PACKET >= channels;
                let weight = if is_past_end { Packet::zero() } else { weights[u] };
                let halves = weight.to_bf16(scale).map(|half| Packet::<T>::from_words(half.words()));
                for half in 0..2 {
                    let channel = channel(base, u) + half * T::PACKET;
                    let mut x = [input.packet(g, channel), Packet::zero()];
                    if NORM != PLAIN {
                        x[0] = normalize(x[0], statistics, input.params(channel));
                    }
                    if ROWS > 8 {
                        x[1] = input.packet(g + 8, channel);
                    }
                    T::mma_packets(&mut d, x, halves[half]);
                }
            }
        }
        base += UNROLL * split * BLOCK;
        if base >= channels {
            break;
        }
        weights = load(base);
    }
    // Sums 2 i and 2 i + 1 belong to row g + 8 i, and to columns 2 t and 2 t + 1.
    let mut sums = [0.0; 4];
    for i in 0..4 {
        sums[i] = d[0][i] + d[1][i];
    }
    if split > 1 {
        let place = |warp: usize, i: usize| (warp * 4 + i) * LANES + lane;
        for i in 0..4 {
            scratch.set(place(warp, i), sums[i]);
        }
        thread::sync_threads();
        if part > 0 {
            return;
        }
        for other in 1..split {
            for i in 0..4 {
                sums[i] += scratch.at(place(warp + other, i));
            }
        }
    }
    let sum = first + 2 * t;
    for i in 0..ROWS.div_ceil(8) {
        let row = g + 8 * i;
        if row < rows && sum < outputs {
            let mut values = [sums[2 * i], sums[2 * i + 1]];
            for n in 0..2 {
                if !bias.is_null() {
                    values[n] += bias.at(weight_row(sum + n)).to_f32();
                }
            }
            let rounded = values.map(|value| T::from_f32(value).to_f32());
            if gated {
                out.set(row * (outputs / 2) + sum / 2, T::from_f32(value_of(sizes.activation, rounded)));
            } else {
                for n in 0..2 {
                    let at = row * outputs + sum + n;
                    let value = if sizes.activation != 0 {
                        value_of(sizes.activation, [rounded[n], 0.0])
                    } else if residual.is_null() {
                        values[n]
                    } else {
                        values[n] + residual.at(at).to_f32()
                    };
                    out.set(at, T::from_f32(value));
                }
            }
        }
    }
}
