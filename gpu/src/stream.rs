//! Additions to the residual stream of a decoder, as in nanochat and modded-nanogpt: scaled sums, and the smear of token embeddings.
//!
//! ```text
//! mix:    out = scale · inp + sign · added_scale · added
//! smear:  out[t] = inp[t] + scale · gate[t] · inp[t - 1],  gate[t] = σ(weight · inp[t, ..G])
//! ```
//!
//! The scales are in device memory. The first token of a sequence or document has none before it.
//!
//! Shapes: inp, added and out (n), where n is a multiple of the packet; for the smear, inp and out (B, T, C), gates (B, T) f32, weight
//! (G), where C is a multiple of the packet and G ≤ C. B * T is below 2^31.
//!
//! All kernels are memory-bound. Memory traffic in elements per element of out: mix 3 forward, and 6 backward with the gradients of both
//! scales; smear 2 and 3, because L2 has the neighboring rows.

use crate::activation::sigmoid;
use crate::column_sum;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, SharedArray, block, kernel, math, thread, warp};

const THREADS: usize = 256;
const WARPS: usize = THREADS / LANES;
const LANES: usize = warp::LANES as usize;
/// Packets of each operand that a thread loads at a time.
const BATCH: usize = 2;
/// Resident blocks of a persistent kernel per SM.
const BLOCKS_PER_SM: usize = 4;

/// The packets that a thread processes at a time. Their distance is `stride` elements, and those at `end` and after it do not exist.
#[derive(Clone, Copy)]
struct Batch {
    first: usize,
    stride: usize,
    end: usize,
}

#[cuda_std::device]
impl Batch {
    /// Loads the packets; zeros where there is none. `packet` loads from an index.
    fn load<T: Element>(self, packet: impl Fn(usize) -> Packet<T>) -> [Packet<T>; BATCH] {
        let mut packets = [Packet::zero(); BATCH];
        // With a condition per load, ptxas would interleave loads and their uses.
        if self.first + (BATCH - 1) * self.stride < self.end {
            for k in 0..BATCH {
                packets[k] = packet(self.first + k * self.stride);
            }
        } else {
            for k in 0..BATCH {
                if self.first + k * self.stride < self.end {
                    packets[k] = packet(self.first + k * self.stride);
                }
            }
        }
        packets
    }

    /// Calls `f` for each packet that exists with its number and its index.
    fn for_each(self, mut f: impl FnMut(usize, usize)) {
        for k in 0..BATCH {
            if self.first + k * self.stride < self.end {
                f(k, self.first + k * self.stride);
            }
        }
    }
}

/// Returns the thread's packets in tile `tile` of n elements. A block processes one tile at a time.
#[inline(always)]
fn tile<T: Element>(tile: usize, n: usize) -> Batch {
    let stride = THREADS * T::PACKET;
    Batch { first: tile * BATCH * stride + thread::thread_idx_x() as usize * T::PACKET, stride, end: n }
}

/// Returns the number of tiles of n elements.
const fn tiles<T: Element>(n: usize) -> usize {
    n.div_ceil(BATCH * THREADS * T::PACKET)
}

/// Returns the grid size of [`mix`] for n elements.
pub const fn mix_grid<T: Element>(n: usize) -> u32 {
    tiles::<T>(n) as u32
}

/// Returns the scale; 1 if it is null.
#[inline(always)]
fn factor<T: Element>(scale: Global<T>) -> f32 {
    if scale.is_null() { 1.0 } else { scale.at(0).to_f32() }
}

/// Computes out (n) = scale (1) · inp (n) + sign · `added_scale` (1) · added (n). scale may be null, which means 1. added may be inp.
///
/// Grid: [`mix_grid`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn mix<T: Element>(
    out: GlobalMut<T>,
    inp: Global<T>,
    added: Global<T>,
    scale: Global<T>,
    added_scale: Global<T>,
    sign: f32,
    n: u64,
) {
    let batch = tile::<T>(thread::block_idx_x() as usize, n as usize);
    let (x, y) = (batch.load(|i| inp.packet(i)), batch.load(|i| added.packet(i)));
    let (scale, added_scale) = (factor(scale), sign * factor(added_scale));
    batch.for_each(|k, i| {
        out.set_packet(i, Packet::from_fn(|j| math::fma(added_scale, y[k].get(j), scale * x[k].get(j))));
    });
}

/// Returns the grid size of [`mix_backward`], a persistent kernel.
pub fn mix_backward_grid<T: Element>(n: usize, sm_count: usize) -> u32 {
    tiles::<T>(n).min(sm_count * BLOCKS_PER_SM) as u32
}

/// Returns the number of f32 elements of the partial sums of [`mix_backward`].
pub fn mix_backward_partials<T: Element>(n: usize, sm_count: usize) -> usize {
    2 * mix_backward_grid::<T>(n, sm_count) as usize
}

/// Lays out the shared memory of [`mix_backward`] with SUMS: two sums of each warp.
pub fn mix_backward_shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(2 * WARPS)
}

/// Adds sign · `added_scale` (1) · dout (n) to dadded (n), and multiplies dout by scale (1), unless scale is null. `added_scale` may be
/// null, which means 1.
///
/// With SUMS, also computes partials (blocks, 2), each block's parts of Σ dout · inp and Σ dout · added, for [`mix_backward_reduce`].
/// added may be inp. Otherwise inp, added and partials may be null. Grid: [`mix_backward_grid`]. Shared memory: [`mix_backward_shared`]
/// with SUMS, otherwise none.
#[kernel(threads = 256, blocks_per_sm = 4, instances([bf16 = cuda_std::bf16, f32 = f32] * [_ = false, sums = true]))]
pub fn mix_backward<T: Element, const SUMS: bool>(
    dout: GlobalMut<T>,
    dadded: GlobalMut<T>,
    partials: GlobalMut<f32>,
    inp: Global<T>,
    added: Global<T>,
    scale: Global<T>,
    added_scale: Global<T>,
    sign: f32,
    n: u64,
) {
    let n = n as usize;
    let (is_scaled, scale, added_scale) = (!scale.is_null(), factor(scale), sign * factor(added_scale));
    let mut sums = [0.0; 2];
    let (mut index, tiles) = (thread::block_idx_x() as usize, tiles::<T>(n));
    while index < tiles {
        let batch = tile::<T>(index, n);
        let (d, da) = (batch.load(|i| dout.packet(i)), batch.load(|i| dadded.packet(i)));
        if SUMS {
            let (x, y) = (batch.load(|i| inp.packet(i)), batch.load(|i| added.packet(i)));
            for k in 0..BATCH {
                for j in 0..T::PACKET {
                    sums[0] = math::fma(d[k].get(j), x[k].get(j), sums[0]);
                    sums[1] = math::fma(d[k].get(j), y[k].get(j), sums[1]);
                }
            }
        }
        batch.for_each(|k, i| {
            dadded.set_packet(i, Packet::from_fn(|j| math::fma(added_scale, d[k].get(j), da[k].get(j))));
            if is_scaled {
                dout.set_packet(i, Packet::from_fn(|j| scale * d[k].get(j)));
            }
        });
        index += thread::grid_dim_x() as usize;
    }
    if SUMS {
        let [[of_inp, of_added]] = block::sums::<WARPS, 2, 1>([sums], mix_backward_shared(&mut Layout::new()));
        if thread::thread_idx_x() == 0 {
            let at = 2 * thread::block_idx_x() as usize;
            partials.set(at, of_inp);
            partials.set(at + 1, of_added);
        }
    }
}

/// Adds the sums of partials (blocks, 2) from [`mix_backward`] to dscale (1) and `dadded_scale` (1), the latter times `sign`. Either may be
/// null. Grid: one block. Shared memory: [`column_sum::shared`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn mix_backward_reduce<T: Element>(
    dscale: GlobalMut<T>,
    dadded_scale: GlobalMut<T>,
    partials: Global<f32>,
    sign: f32,
    blocks: u32,
) {
    if let Some((column, sum)) = column_sum::column_sum(partials, blocks as usize, 2) {
        let (to, sum) = if column == 0 { (dscale, sum) } else { (dadded_scale, sign * sum) };
        if !to.is_null() {
            to.set(0, T::from_f32(to.at(0).to_f32() + sum));
        }
    }
}

/// The sizes of a smear. Passed to the kernels by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SmearSizes {
    /// B * T.
    pub rows: u32,
    /// T.
    pub sequence: u32,
    /// C.
    pub channels: u32,
    /// G.
    pub gate_channels: u32,
}

#[cuda_std::device]
impl SmearSizes {
    /// Returns whether a row has no token before it in its sequence and document. `first_keys` may be null.
    fn is_first(self, row: u32, first_keys: Global<i32>) -> bool {
        let position = row % self.sequence.max(1);
        position == 0 || !first_keys.is_null() && first_keys.at(row as usize) as u32 == position
    }

    /// Returns the lane's packets of a row from a channel on, which is the same in all lanes.
    fn batch<T: Element>(self, channel: usize) -> Batch {
        let first = channel + warp::lane() as usize * T::PACKET;
        Batch { first, stride: LANES * T::PACKET, end: self.channels as usize }
    }
}

/// Returns the grid size of [`smear`], one warp per row.
pub const fn smear_grid(rows: usize) -> u32 {
    rows.div_ceil(WARPS) as u32
}

/// Computes out (B, T, C) and gates (B, T) from inp (B, T, C), weight (G) and scale (1).
///
/// before (B, C) is the row before the first row of each sequence, or null if there is none. `first_keys` (B, T) is the position of the
/// first token of each token's document, or null if each sequence is one document. Grid: [`smear_grid`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn smear<T: Element>(
    out: GlobalMut<T>,
    gates: GlobalMut<f32>,
    inp: Global<T>,
    before: Global<T>,
    weight: Global<T>,
    scale: Global<T>,
    first_keys: Global<i32>,
    sizes: SmearSizes,
) {
    let row = thread::block_idx_x() * WARPS as u32 + warp::index();
    if row >= sizes.rows {
        return;
    }
    let (lane, channels, sequence) = (warp::lane(), sizes.channels as usize, sizes.sequence.max(1));
    let (out, x) = (out.skip(row as usize * channels), inp.skip(row as usize * channels));
    let mut sum = 0.0;
    let mut channel = lane;
    while channel < sizes.gate_channels {
        sum = math::fma(x.at(channel as usize).to_f32(), weight.at(channel as usize).to_f32(), sum);
        channel += warp::LANES;
    }
    let gate = sigmoid(warp::sum(sum));
    if lane == 0 {
        gates.set(row as usize, gate);
    }
    let starts_sequence = row.is_multiple_of(sequence);
    let exists = if starts_sequence { !before.is_null() } else { !sizes.is_first(row, first_keys) };
    let step = BATCH * LANES * T::PACKET;
    let mut channel = 0;
    if !exists {
        while channel < channels {
            let batch = sizes.batch::<T>(channel);
            let x = batch.load(|i| x.packet(i));
            batch.for_each(|k, i| out.set_packet(i, x[k]));
            channel += step;
        }
        return;
    }
    let previous = if starts_sequence {
        before.skip((row / sequence) as usize * channels)
    } else {
        inp.skip((row as usize - 1) * channels)
    };
    let factor = scale.at(0).to_f32() * gate;
    while channel < channels {
        let batch = sizes.batch::<T>(channel);
        let (x, y) = (batch.load(|i| x.packet(i)), batch.load(|i| previous.packet(i)));
        batch.for_each(|k, i| {
            out.set_packet(i, Packet::from_fn(|j| math::fma(factor, y[k].get(j), x[k].get(j))));
        });
        channel += step;
    }
}

/// Returns the grid size of [`smear_backward`], a persistent kernel. It is also the number of partial sums.
pub fn smear_backward_grid(rows: usize, sm_count: usize) -> u32 {
    rows.div_ceil(WARPS).min(sm_count * BLOCKS_PER_SM) as u32
}

/// Lays out the shared memory of [`smear_backward`]: one sum of each warp.
pub fn smear_backward_shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(LANES)
}

/// Computes dinp (B, T, C) from dout (B, T, C), gates (B, T), inp (B, T, C), weight (G) and scale (1), for a smear without `before`.
///
/// Also computes dsums (B, T) f32, the gradients of the sums before the sigmoid, for
/// [`gate_weight_backward`](crate::gate::gate_weight_backward), and partials (blocks) f32, each block's part of the gradient of scale.
/// `first_keys` is that of [`smear`]. Each warp processes every n-th row, where n is the number of warps. Grid: [`smear_backward_grid`].
/// Shared memory: [`smear_backward_shared`].
#[kernel(threads = 256, blocks_per_sm = 4, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn smear_backward<T: Element>(
    dinp: GlobalMut<T>,
    dsums: GlobalMut<f32>,
    partials: GlobalMut<f32>,
    dout: Global<T>,
    gates: Global<f32>,
    inp: Global<T>,
    weight: Global<T>,
    scale: Global<T>,
    first_keys: Global<i32>,
    sizes: SmearSizes,
) {
    let (lane, channels, gate_channels) = (warp::lane(), sizes.channels as usize, sizes.gate_channels as usize);
    let scale = scale.at(0).to_f32();
    let step = BATCH * LANES * T::PACKET;
    let mut dscale = 0.0;
    let mut row = thread::block_idx_x() * WARPS as u32 + warp::index();
    while row < sizes.rows {
        let at = row as usize * channels;
        let (dinp, d, gate) = (dinp.skip(at), dout.skip(at), gates.at(row as usize));
        let mut dgate = 0.0;
        if !sizes.is_first(row, first_keys) {
            let previous = inp.skip(at - channels);
            let mut channel = 0;
            while channel < channels {
                let batch = sizes.batch::<T>(channel);
                let (d, x) = (batch.load(|i| d.packet(i)), batch.load(|i| previous.packet(i)));
                for k in 0..BATCH {
                    for j in 0..T::PACKET {
                        dgate = math::fma(d[k].get(j), x[k].get(j), dgate);
                    }
                }
                channel += step;
            }
        }
        let dgate = warp::sum(dgate);
        let dsum = dgate * scale * math::fma(-gate, gate, gate);
        dscale = math::fma(dgate, gate, dscale);
        if lane == 0 {
            dsums.set(row as usize, dsum);
        }
        let is_last = sizes.is_first(row + 1, first_keys);
        let (next, factor) = if is_last { (d, 0.0) } else { (d.skip(channels), scale * gates.at(row as usize + 1)) };
        let mut channel = 0;
        while channel < channels {
            let batch = sizes.batch::<T>(channel);
            let d = batch.load(|i| d.packet(i));
            let mut later = [Packet::zero(); BATCH];
            if !is_last {
                later = batch.load(|i| next.packet(i));
            }
            batch.for_each(|k, i| {
                let mut of_gate = [0.0; 8];
                if i < gate_channels {
                    for j in 0..T::PACKET {
                        if i + j < gate_channels {
                            of_gate[j] = dsum * weight.at(i + j).to_f32();
                        }
                    }
                }
                dinp.set_packet(i, Packet::from_fn(|j| math::fma(factor, later[k].get(j), d[k].get(j) + of_gate[j])));
            });
            channel += step;
        }
        row += thread::grid_dim_x() * WARPS as u32;
    }
    let of_lane = if lane == 0 { dscale } else { 0.0 };
    let sum = block::sum(of_lane, smear_backward_shared(&mut Layout::new()));
    if thread::thread_idx_x() == 0 {
        partials.set(thread::block_idx_x() as usize, sum);
    }
}
