//! Linear layers of few rows: out (R, OC) = epilogue(norm(inp (R, C)) · weight (OC, C)ᵀ + bias (OC)), R up to 16 in f32 and up to 8 in
//! bf16. [`matvec_mma`](super::matvec_mma) computes more rows in bf16.
//!
//! The time is that of reading the weights once. A warp computes COLUMNS adjacent columns of out for all rows. Each of its lanes
//! reads packets of the columns' weights, 512 contiguous bytes per warp and row of weight. If the columns are too few to fill the
//! GPU, `split` warps of a block share the channels of the same columns and add their sums in a fixed order.
//!
//! With a norm, every warp normalizes the rows of inp itself: inp is small and stays in L1. The first weights are loaded before
//! the statistics, which they do not depend on. Normalized values and the inputs of an activation are rounded to T, as kernels
//! of their own would store them.
//!
//! C is a multiple of the packet. With a gated activation, weight has rows of up, then of gate (OC = 2 F), and out is (R, F): sums 2 f
//! and 2 f + 1 belong to up and gate of column f, so that one warp has both.

use crate::activation::{is_gated, value_of};
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, SharedArray, device, kernel, math, thread, warp};

/// Threads of a block.
pub const THREADS: u32 = 256;
const WARPS: usize = (THREADS / warp::LANES) as usize;
const LANES: usize = warp::LANES as usize;

/// No norm.
pub const PLAIN: u32 = 0;
/// LayerNorm with weight and bias, eps 1e-5.
pub const LAYERNORM: u32 = 1;
/// RMSNorm. The weight may be null.
pub const RMSNORM: u32 = 2;

/// Eps of LayerNorm.
pub const LAYERNORM_EPS: f32 = 1e-5;

/// The scalars of [`matvec`]. Passed by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Sizes {
    /// R, at most the kernel's ROWS.
    pub rows: u32,
    /// C.
    pub channels: u32,
    /// OC, rows of weight.
    pub outputs: u32,
    /// Warps that share the channels of their columns: 1, 2, 4 or 8.
    pub split: u32,
    /// [`Activation::code`](crate::activation::Activation::code), or 0 without one.
    pub activation: u32,
    /// Eps of RMSNorm.
    pub eps: f32,
}

impl Sizes {
    /// Returns the grid size.
    pub const fn grid(self, columns: usize) -> u32 {
        self.outputs.div_ceil((WARPS / self.split as usize * columns) as u32)
    }
}

/// The columns that a warp computes.
#[derive(Clone, Copy)]
pub(super) struct Columns {
    /// The first one: with a gated activation, an index of the sums of up and gate, which alternate.
    pub(super) first: usize,
    /// Warps that share the channels, and the index of this one.
    pub(super) split: usize,
    pub(super) part: usize,
    gated: bool,
    outputs: usize,
}

#[device]
impl Columns {
    /// Returns the `columns` columns of this warp.
    pub(super) fn new(sizes: Sizes, columns: usize) -> Self {
        let (warp, split) = (warp::index() as usize, sizes.split as usize);
        let (group, part) = (warp / split.max(1), warp % split.max(1));
        let first = (thread::block_idx_x() as usize * (WARPS / split.max(1)) + group) * columns;
        Self { first, split, part, gated: is_gated(sizes.activation), outputs: sizes.outputs as usize }
    }

    /// Returns the row of weight of a sum. Sums past the last repeat it and are not stored.
    pub(super) fn weight_row(self, sum: usize) -> usize {
        let sum = sum.min(self.outputs - 1);
        if self.gated { sum / 2 + sum % 2 * (self.outputs / 2) } else { sum }
    }
}

/// Lays out the shared memory: the sums of each warp.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(WARPS * LANES)
}

/// The rows of inp and how they are normalized.
#[derive(Clone, Copy)]
pub(super) struct Input<T, const ROWS: usize, const NORM: u32> {
    pub(super) inp: Global<T>,
    pub(super) weight: Global<T>,
    pub(super) bias: Global<T>,
    pub(super) channels: usize,
    pub(super) rows: usize,
}

#[device]
impl<T: Element, const ROWS: usize, const NORM: u32> Input<T, ROWS, NORM> {
    /// Reads a packet of row `r`. Rows past the last repeat it.
    pub(super) fn packet(self, r: usize, channel: usize) -> Packet<T> {
        let row = if ROWS == 1 { 0 } else { r.min(self.rows - 1) };
        self.inp.packet(row * self.channels + channel)
    }

    /// Returns the mean and the reciprocal standard deviation of each row.
    pub(super) fn statistics(self, eps: f32) -> [[f32; 2]; ROWS] {
        let mut statistics = [[0.0, 1.0]; ROWS];
        if NORM == PLAIN {
            return statistics;
        }
        for r in 0..ROWS {
            if NORM == LAYERNORM {
                let mean = self.mean(r, |x| x);
                let variance = self.mean(r, |x| (x - mean) * (x - mean));
                statistics[r] = [mean, math::rsqrt(variance + LAYERNORM_EPS)];
            } else {
                statistics[r] = [0.0, math::rsqrt(self.mean(r, |x| x * x) + eps)];
            }
        }
        statistics
    }

    /// Returns the mean of `f(x)` over row `r`, in every lane.
    fn mean(self, r: usize, f: impl Fn(f32) -> f32) -> f32 {
        let (mut sum, mut channel) = (0.0, warp::lane() as usize * T::PACKET);
        while channel < self.channels {
            let x = self.packet(r, channel);
            for i in 0..T::PACKET {
                sum += f(x.get(i));
            }
            channel += LANES * T::PACKET;
        }
        // Scales before the reduction, because the unscaled sum of squares may overflow although their mean does not.
        warp::sum(sum * math::recip(self.channels as f32))
    }

    /// Returns normalized packets of all rows.
    fn normalized(self, channel: usize, statistics: &[[f32; 2]; ROWS]) -> [Packet<T>; ROWS] {
        let mut x = [Packet::zero(); ROWS];
        for r in 0..ROWS {
            x[r] = self.packet(r, channel);
        }
        if NORM == PLAIN {
            return x;
        }
        let params = self.params(channel);
        for r in 0..ROWS {
            x[r] = normalize(x[r], statistics[r], params);
        }
        x
    }

    /// Returns a packet of weight and bias.
    pub(super) fn params(self, channel: usize) -> [Packet<T>; 2] {
        let ones = NORM == RMSNORM && self.weight.is_null();
        let weight = if ones { Packet::from_fn(|_| 1.0) } else { self.weight.packet(channel) };
        [weight, if NORM == LAYERNORM { self.bias.packet(channel) } else { Packet::zero() }]
    }
}

/// Normalizes a packet, given the mean and the reciprocal standard deviation of its row.
#[inline(always)]
pub(super) fn normalize<T: Element>(x: Packet<T>, [mean, rstd]: [f32; 2], [weight, bias]: [Packet<T>; 2]) -> Packet<T> {
    Packet::from_fn(|i| math::fma((x.get(i) - mean) * rstd, weight.get(i), bias.get(i)))
}

/// Computes out (R, OC), or (R, OC / 2) with a gated activation. bias and residual (R, OC) may be null; an activation excludes a residual.
///
/// ROWS · COLUMNS is at most 32, and COLUMNS is even. Grid: [`Sizes::grid`]. Shared memory: [`shared`].
#[kernel(
    threads = 256,
    axes(
        element = [bf16 = cuda_std::bf16, f32 = f32],
        norm = [_ = 0, layernorm = 1, rmsnorm = 2]
    ),
    instances(
        element * [r1 = <1, 2, 4>, r2 = <2, 2, 4>] * norm,
        element * [r4 = <4, 4, 2, 0>, r8 = <8, 4, 2, 0>],
        f32_r16 = <f32, 16, 2, 2, 0>(blocks_per_sm = 1)
    ),
    select(ROWS: usize, NORM: u32 => COLUMNS: usize)
)]
pub fn matvec<T: Element, const ROWS: usize, const COLUMNS: usize, const UNROLL: usize, const NORM: u32>(
    out: GlobalMut<T>,
    inp: Global<T>,
    weight: Global<T>,
    bias: Global<T>,
    residual: Global<T>,
    norm_weight: Global<T>,
    norm_bias: Global<T>,
    sizes: Sizes,
) {
    let scratch = shared(&mut Layout::new());
    let (lane, warp) = (warp::lane() as usize, warp::index() as usize);
    let (channels, outputs, gated) = (sizes.channels as usize, sizes.outputs as usize, is_gated(sizes.activation));
    let tile = Columns::new(sizes, COLUMNS);
    let Columns { first, split, part, .. } = tile;
    let mut rows = [Global::null(); COLUMNS];
    for n in 0..COLUMNS {
        rows[n] = weight.skip(tile.weight_row(first + n) * channels);
    }
    // Channel of packet u of the lane in the chunk from `base` on. Loads past the end repeat the last packet: with a condition
    // per load, ptxas would interleave loads and their uses.
    let channel = |base: usize, u: usize| base + ((u * split + part) * LANES + lane) * T::PACKET;
    let load = |base: usize| {
        let mut packets = [[Packet::<T>::zero(); UNROLL]; COLUMNS];
        for u in 0..UNROLL {
            let channel = channel(base, u).min(channels - T::PACKET);
            for n in 0..COLUMNS {
                packets[n][u] = rows[n].packet_streaming(channel);
            }
        }
        packets
    };
    let input =
        Input::<T, ROWS, NORM> { inp, weight: norm_weight, bias: norm_bias, channels, rows: sizes.rows as usize };
    let mut weights = load(0);
    let statistics = input.statistics(sizes.eps);
    let mut sums = [[0.0; COLUMNS]; ROWS];
    let mut base = 0;
    loop {
        for u in 0..UNROLL {
            let channel = channel(base, u);
            if channel < channels {
                let x = input.normalized(channel, &statistics);
                for i in 0..T::PACKET {
                    for n in 0..COLUMNS {
                        let w = weights[n][u].get(i);
                        for r in 0..ROWS {
                            sums[r][n] = math::fma(x[r].get(i), w, sums[r][n]);
                        }
                    }
                }
            }
        }
        base += UNROLL * split * LANES * T::PACKET;
        if base >= channels {
            break;
        }
        weights = load(base);
    }
    // Lane r · COLUMNS + n keeps the sum of row r and column n.
    let mut value = 0.0;
    for r in 0..ROWS {
        for n in 0..COLUMNS {
            let sum = warp::sum(sums[r][n]);
            if lane == r * COLUMNS + n {
                value = sum;
            }
        }
    }
    if split > 1 {
        scratch.set(warp * LANES + lane, value);
        thread::sync_threads();
        value = 0.0;
        if part == 0 {
            for other in 0..split {
                value += scratch.at((warp + other) * LANES + lane);
            }
        }
    }
    let (row, sum) = (lane / COLUMNS, first + lane % COLUMNS);
    let stored = part == 0 && lane < ROWS * COLUMNS && row < sizes.rows as usize && sum < outputs;
    if stored && !bias.is_null() {
        value += bias.at(tile.weight_row(sum)).to_f32();
    }
    let rounded = T::from_f32(value).to_f32();
    let gate = warp::shuffle_down(rounded, 1);
    if !stored {
        return;
    }
    if sizes.activation == 0 {
        let at = row * outputs + sum;
        let added = if residual.is_null() { 0.0 } else { residual.at(at).to_f32() };
        out.set(at, T::from_f32(value + added));
    } else if !gated {
        out.set(row * outputs + sum, T::from_f32(value_of(sizes.activation, [rounded, 0.0])));
    } else if sum % 2 == 0 {
        out.set(row * (outputs / 2) + sum / 2, T::from_f32(value_of(sizes.activation, [rounded, gate])));
    }
}
