//! Linear layers of few rows on tensor cores: those of [`matvec`](super::matvec) in bf16, with a weight (OC, C) in bf16, or of E4M3 numbers
//! times a scale.
//!
//! The scale is a power of two, so that the weight is exact in bf16. A warp computes eight adjacent columns of out for all rows: the rows
//! of inp are the left operand of `mma.m16n8k16`, and the rows of weight the right one. A lane reads packets of one row of weight, and the
//! same channels of the rows of inp. `split` warps of a block share the channels of the same columns and add their sums in a fixed order.
//!
//! C is a multiple of the packet of weight, and OC is even. Norm, rounding and gated activations are those of [`matvec`](super::matvec).

use super::matvec::{Columns, Input, PLAIN, Sizes, normalize};
use crate::activation::{is_gated, value_of};
use cuda_std::fp8::Bf16Scale;
use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{E4m3, Element, Global, GlobalMut, Packet, SharedArray, bf16, device, kernel, thread, warp};

/// Columns that a warp computes.
pub const COLUMNS: usize = 8;
/// Threads of a block.
pub const THREADS: u32 = 256;
const WARPS: usize = (THREADS / warp::LANES) as usize;
const LANES: usize = warp::LANES as usize;
/// Packets of each row of weight that the lanes of a warp read at a time.
pub const PACKETS: usize = 4;
/// Packets that a lane loads before it uses the first.
const UNROLL: usize = 4;

/// Lays out the shared memory: four sums of each thread.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(WARPS * LANES * 4)
}

/// The numbers of a weight.
#[device]
pub trait Weight: Element {
    /// The scale, in the form that the conversion to bf16 needs.
    type Conversion: Copy;

    /// Reads the scale. It may be null if the numbers have none.
    fn conversion(scale: Global<f32>) -> Self::Conversion;

    /// Calls `f` with the packets of bf16 in `packet` and the number of channels before them.
    fn each(packet: Packet<Self>, conversion: Self::Conversion, f: impl FnMut(usize, [u32; 4]));
}

#[device]
impl Weight for bf16 {
    type Conversion = ();

    fn conversion(_: Global<f32>) {}

    fn each(packet: Packet<Self>, (): (), mut f: impl FnMut(usize, [u32; 4])) {
        f(0, packet.words());
    }
}

#[device]
impl Weight for E4m3 {
    type Conversion = Bf16Scale;

    fn conversion(scale: Global<f32>) -> Bf16Scale {
        Bf16Scale::new(scale.at(0))
    }

    fn each(packet: Packet<Self>, scale: Bf16Scale, mut f: impl FnMut(usize, [u32; 4])) {
        let halves = packet.to_bf16(scale);
        f(0, halves[0].words());
        f(bf16::PACKET, halves[1].words());
    }
}

/// Computes out (R, OC), or (R, OC / 2) with a gated activation. bias and residual (R, OC) may be null; an activation excludes a residual.
///
/// Grid: [`Sizes::grid`]. Shared memory: [`shared`].
#[kernel(
    threads = 256,
    instances(
        [e4m3_r2 = <bf16, E4m3, 2>] * [_ = 0, layernorm = 1, rmsnorm = 2],
        e4m3_r16 = <bf16, E4m3, 16, 0>,
        bf16_r16 = <bf16, bf16, 16, 0>
    ),
    select(ROWS: usize, NORM: u32)
)]
pub fn matvec_mma<T: TensorCore, W: Weight, const ROWS: usize, const NORM: u32>(
    out: GlobalMut<T>,
    inp: Global<T>,
    weight: Global<W>,
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
    let (channels, outputs, gated) = (sizes.channels as usize, sizes.outputs as usize, is_gated(sizes.activation));
    let tile = Columns::new(sizes, COLUMNS);
    let Columns { first, split, part, .. } = tile;
    let row = weight.skip(tile.weight_row(first + g) * channels);
    // First channel of the warp in step u of the chunk from `base` on.
    let block = |base: usize, u: usize| base + (u * split + part) * PACKETS * W::PACKET;
    // Loads past the end repeat the last packet: with a condition per load, ptxas would interleave loads and their uses.
    let channel = |base: usize, u: usize| (block(base, u) + t * W::PACKET).min(channels - W::PACKET);
    let load = |base: usize| {
        let mut packets = [Packet::<W>::zero(); UNROLL];
        for u in 0..UNROLL {
            packets[u] = row.packet_streaming(channel(base, u));
        }
        packets
    };
    let rows = sizes.rows as usize;
    let input = Input::<T, ROWS, NORM> { inp, weight: norm_weight, bias: norm_bias, channels, rows };
    let mut weights = load(0);
    let conversion = W::conversion(scale);
    let statistics = input.statistics(sizes.eps)[g.min(ROWS - 1)];
    let mut d = [[0.0; 4]; 2];
    let mut base = 0;
    loop {
        for u in 0..UNROLL {
            if block(base, u) < channels {
                let is_past_end = block(base, u) + t * W::PACKET >= channels;
                let weight = if is_past_end { Packet::zero() } else { weights[u] };
                W::each(weight, conversion, |before, words| {
                    let channel = channel(base, u) + before;
                    let mut x = [input.packet(g, channel), Packet::zero()];
                    if NORM != PLAIN {
                        x[0] = normalize(x[0], statistics, input.params(channel));
                    }
                    if ROWS > 8 {
                        x[1] = input.packet(g + 8, channel);
                    }
                    T::mma_packets(&mut d, x, Packet::from_words(words));
                });
            }
        }
        base += UNROLL * split * PACKETS * W::PACKET;
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
                    values[n] += bias.at(tile.weight_row(sum + n)).to_f32();
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
