//! RMSNorm of the queries of all heads of a token together, and of its keys together (QK-norm of OLMoE; Muennighoff et al., 2024,
//! arXiv:2409.02060), in place. [`rotary`](crate::rotary) rotates the result, and normalizes single heads.
//!
//! Shapes: qkv (rows, NH + 2 KV, HS) and its gradient; saved (rows, NH + KV, HS); query weight (NH · HS); key weight (KV · HS). HS is a
//! multiple of the packet. Values are not accessed. Null weights mean ones.
//!
//! A block processes one row at a time. Its threads hold the queries and keys of the row in registers, PACKETS packets each.
//! One reduction computes the sums over the queries and those over the keys.
//!
//! The weight gradients are two-stage reductions without atomics: each block of the backward kernel sums its rows, and
//! [`bias_backward_reduce`](crate::bias::bias_backward_reduce) sums the blocks.
//!
//! All kernels are memory-bound. Memory traffic in elements per element of queries and keys: 3 forward and backward, 2 forward without
//! saved.

use crate::rotary::{NormScalars, Sizes};
use core::marker::PhantomData;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, SharedArray, bf16, block, device, kernel, math, thread, warp};

const THREADS: usize = 256;
const WARPS: usize = THREADS / warp::LANES as usize;
/// Floats of shared memory that a reduction uses.
const SUMS: usize = 4 * WARPS;
/// Blocks of [`all_heads_norm_backward`] per SM.
const BLOCKS_PER_SM: usize = 4;
const MAX_PACKETS: usize = 8;

/// Returns the number of channels of the queries and of the keys of a row.
const fn widths(sizes: Sizes) -> [usize; 2] {
    [sizes.heads as usize * sizes.head_size as usize, sizes.kv_heads as usize * sizes.head_size as usize]
}

/// Returns the maximum number of channels of queries and keys together, (NH + KV) · HS.
pub const fn max_channels<T: Element>() -> usize {
    MAX_PACKETS * THREADS * T::PACKET
}

/// Returns PACKETS of the kernel instances for these sizes. There are instances for up to [`max_channels`] channels.
pub const fn packets<T: Element>(sizes: Sizes) -> usize {
    let [queries, keys] = widths(sizes);
    (queries + keys).div_ceil(THREADS * T::PACKET).next_power_of_two()
}

/// Returns the grid size of [`all_heads_norm_backward`].
pub fn backward_grid(sizes: Sizes, sm_count: usize) -> u32 {
    sizes.rows.min((BLOCKS_PER_SM * sm_count) as u32)
}

/// Returns the numbers of f32 elements of the partial sums of `blocks` blocks: those of the query weight, then those of the key weight.
pub fn partials(sizes: Sizes, blocks: u32) -> [usize; 2] {
    widths(sizes).map(|width| blocks as usize * width)
}

/// Lays out the shared memory of the kernels: the sums of each warp, double-buffered.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(2 * SUMS)
}

/// The calling thread's channels of the queries and keys of a row.
#[derive(Clone, Copy)]
struct Part<T, const PACKETS: usize> {
    /// NH · HS: the first channel of the keys.
    queries: usize,
    /// KV · HS.
    keys: usize,
    element: PhantomData<T>,
}

#[device]
impl<T: Element, const PACKETS: usize> Part<T, PACKETS> {
    fn new(sizes: Sizes) -> Self {
        let [queries, keys] = widths(sizes);
        Self { queries, keys, element: PhantomData }
    }

    /// Returns the number of channels of a row of saved.
    fn saved(self) -> usize {
        self.queries + self.keys
    }

    /// Returns the number of channels of a row of qkv.
    fn packed(self) -> usize {
        self.queries + 2 * self.keys
    }

    /// Returns the first channel of packet `k`, if it exists.
    fn channel(self, k: usize) -> Option<usize> {
        let channel = (k * THREADS + thread::thread_idx_x() as usize) * T::PACKET;
        if channel < self.saved() { Some(channel) } else { None }
    }

    /// Loads the thread's packets; zeros past the end of a row. `packet` loads from a channel.
    fn load(self, packet: impl Fn(usize) -> Packet<T>) -> [Packet<T>; PACKETS] {
        let mut packets = [Packet::zero(); PACKETS];
        for k in 0..PACKETS {
            if let Some(channel) = self.channel(k) {
                packets[k] = packet(channel);
            }
        }
        packets
    }

    /// Loads the weights of a packet of channels.
    fn weights(self, q_weight: Global<T>, k_weight: Global<T>, channel: usize) -> Packet<T> {
        let (weight, channel) =
            if channel < self.queries { (q_weight, channel) } else { (k_weight, channel - self.queries) };
        if weight.is_null() { Packet::from_fn(|_| 1.0) } else { weight.packet(channel) }
    }

    /// Returns the means over the queries and over the keys of N values per channel. `sums` returns their sums over packet `k`, which
    /// starts at a channel.
    ///
    /// Consecutive calls alternate `parity` between 0 and 1.
    fn means<const N: usize>(self, parity: usize, sums: impl Fn(usize, usize) -> [f32; N]) -> [[f32; N]; 2] {
        let (mut of_queries, mut of_keys) = ([0.0; N], [0.0; N]);
        for k in 0..PACKETS {
            if let Some(channel) = self.channel(k) {
                let sums = sums(k, channel);
                for i in 0..N {
                    if channel < self.queries {
                        of_queries[i] += sums[i];
                    } else {
                        of_keys[i] += sums[i];
                    }
                }
            }
        }
        // Scales before the reduction, because the unscaled sum of squares may overflow although the mean does not.
        let scales = [math::recip(self.queries as f32), math::recip(self.keys as f32)];
        let means = [of_queries.map(|sum| sum * scales[0]), of_keys.map(|sum| sum * scales[1])];
        block::sums::<WARPS, N, 2>(means, shared(&mut Layout::new()).skip(parity * SUMS))
    }
}

/// Returns the sum of `product(i)` over the elements i of a packet.
#[inline(always)]
fn packet_sum<T: Element>(product: impl Fn(usize) -> f32) -> f32 {
    let mut sum = 0.0;
    for i in 0..T::PACKET {
        sum += product(i);
    }
    sum
}

/// Normalizes the queries and keys of qkv (rows, NH + 2 KV, HS) in place, and copies them before to saved (rows, NH + KV, HS).
///
/// The queries x of a row become x / rms(x) * gain * weight, and so do its keys. `saved` may be null. Grid: the number of rows. Shared
/// memory: [`shared`].
#[kernel(
    threads = 256,
    instances([bf16 = bf16, f32 = f32] * [p1 = 1, p2 = 2, p4 = 4, p8 = 8]),
    select(PACKETS: usize)
)]
pub fn all_heads_norm_forward<T: Element, const PACKETS: usize>(
    qkv: GlobalMut<T>,
    saved: GlobalMut<T>,
    q_weight: Global<T>,
    k_weight: Global<T>,
    sizes: Sizes,
    norm: NormScalars,
) {
    let part = Part::<T, PACKETS>::new(sizes);
    let row = thread::block_idx_x() as usize;
    let qkv = qkv.skip(row * part.packed());
    let x = part.load(|channel| qkv.packet(channel));
    let [[of_queries], [of_keys]] = part.means(0, |k, _| [packet_sum::<T>(|i| x[k].get(i) * x[k].get(i))]);
    for k in 0..PACKETS {
        if let Some(channel) = part.channel(k) {
            if !saved.is_null() {
                saved.set_packet_streaming(row * part.saved() + channel, x[k]);
            }
            let mean = if channel < part.queries { of_queries } else { of_keys };
            let scale = math::rsqrt(mean + norm.eps) * norm.gain;
            let weights = part.weights(q_weight, k_weight, channel);
            qkv.set_packet(channel, Packet::from_fn(|i| x[k].get(i) * (scale * weights.get(i))));
        }
    }
}

/// Computes the gradient of [`all_heads_norm_forward`] from dqkv (rows, NH + 2 KV, HS), in place.
///
/// `saved` is that of the forward pass. Also computes `partials`, the parts of the weight gradients of each block: (blocks, NH · HS) f32
/// of the query weight, then (blocks, KV · HS) f32 of the key weight. `partials` may be null. Grid: [`backward_grid`]. Shared memory:
/// [`shared`].
#[kernel(
    threads = 256,
    instances([bf16 = bf16, f32 = f32] * [p1 = 1, p2 = 2, p4 = 4, p8 = 8]),
    select(PACKETS: usize)
)]
pub fn all_heads_norm_backward<T: Element, const PACKETS: usize>(
    dqkv: GlobalMut<T>,
    partials: GlobalMut<f32>,
    saved: Global<T>,
    q_weight: Global<T>,
    k_weight: Global<T>,
    sizes: Sizes,
    norm: NormScalars,
) {
    let part = Part::<T, PACKETS>::new(sizes);
    let (block, blocks) = (thread::block_idx_x() as usize, thread::grid_dim_x() as usize);
    let mut sums = [[0.0; 8]; PACKETS];
    let (mut row, mut parity) = (block, 0);
    while row < sizes.rows as usize {
        let (dqkv, saved) = (dqkv.skip(row * part.packed()), saved.skip(row * part.saved()));
        let d = part.load(|channel| dqkv.packet(channel));
        let x = part.load(|channel| saved.packet_streaming(channel));
        let [of_queries, of_keys] = part.means(parity, |k, channel| {
            let weights = part.weights(q_weight, k_weight, channel);
            let squares = packet_sum::<T>(|i| x[k].get(i) * x[k].get(i));
            [squares, packet_sum::<T>(|i| d[k].get(i) * weights.get(i) * x[k].get(i))]
        });
        for k in 0..PACKETS {
            if let Some(channel) = part.channel(k) {
                // dx = scale (d w - n mean(d w n)), with n = x rms.
                let [square, product] = if channel < part.queries { of_queries } else { of_keys };
                let rms = math::rsqrt(square + norm.eps);
                let (scale, factor) = (rms * norm.gain, -(rms * rms) * product);
                let weights = part.weights(q_weight, k_weight, channel);
                let mut dx = [0.0; 8];
                for i in 0..T::PACKET {
                    let (d, x) = (d[k].get(i), x[k].get(i));
                    dx[i] = scale * math::fma(x, factor, d * weights.get(i));
                    sums[k][i] = math::fma(d, x * scale, sums[k][i]);
                }
                dqkv.set_packet(channel, Packet::from_fn(|i| dx[i]));
            }
        }
        row += blocks;
        parity = 1 - parity;
    }
    if partials.is_null() {
        return;
    }
    for k in 0..PACKETS {
        if let Some(channel) = part.channel(k) {
            let first = if channel < part.queries {
                block * part.queries + channel
            } else {
                blocks * part.queries + block * part.keys + channel - part.queries
            };
            for half in 0..T::PACKET / f32::PACKET {
                let offset = half * f32::PACKET;
                partials.set_packet(first + offset, Packet::from_fn(|i| sums[k][offset + i]));
            }
        }
    }
}
