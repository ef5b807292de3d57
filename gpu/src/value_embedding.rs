//! Value embeddings: each token has a vector that is added to its attention values, times a gate per head (Zhou et al., 2024,
//! arXiv:2410.17897, as in nanochat).
//!
//! ```text
//! v[row, h] += gate[row, h] · table[token[row], h]
//! gate[row, h] = largest · σ(weight[h] · x[row, ..G]),  x = inp · rstd · norm_weight
//! ```
//!
//! Shapes: qkv (rows, NH + 2 KV, HS) and its gradient, whose last KV heads are the values; table (Vp, KV, HS); inp (rows, C); rstd (rows)
//! f32; `norm_weight` (C), or null, which means ones; weight (KV, G). The token of row i is at i · `token_stride` of tokens. HS is a
//! multiple of 16 up to 256, KV at most [`MAX_HEADS`], G at most C, and the number of rows below 2^31.
//!
//! One warp processes a row. Lane h computes the gates of heads h and h + 32. Then HS / (2 PACKET) lanes hold a head, padded to a power of
//! two, in packets p of both halves. So a warp processes several heads at a time.
//!
//! All kernels are memory-bound. Memory traffic in elements per element of the values: 3 forward and backward.

use crate::activation::sigmoid;
use cuda_std::{Element, Global, GlobalMut, Packet, device, kernel, math, thread, warp};

const WARPS: usize = 256 / LANES;
const LANES: usize = warp::LANES as usize;
/// Channels whose weights a lane loads at a time.
const BATCH: usize = 4;

/// Maximum number of key-value heads.
pub const MAX_HEADS: usize = 2 * LANES;

/// The sizes of the operands. Passed to the kernels by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Sizes {
    /// Rows: tokens.
    pub rows: u32,
    /// NH.
    pub heads: u32,
    /// KV.
    pub kv_heads: u32,
    /// HS.
    pub head_size: u32,
    /// C.
    pub channels: u32,
    /// G.
    pub gate_channels: u32,
    /// Words from one token to the next.
    pub token_stride: u32,
    /// The gate of a sigmoid of 1.
    pub largest: f32,
}

/// Returns the grid size of the kernels, one warp per row.
pub const fn grid(rows: usize) -> u32 {
    rows.div_ceil(WARPS) as u32
}

/// The operands of the gates.
#[derive(Clone, Copy)]
struct Gates<T> {
    inp: Global<T>,
    rstd: Global<f32>,
    norm_weight: Global<T>,
    weight: Global<T>,
}

#[device]
impl<T: Element> Gates<T> {
    /// Returns the sigmoids of heads `lane` and `lane` + 32 of a row. Those of heads that do not exist are meaningless.
    fn sigmoids(self, row: usize, sizes: Sizes) -> [f32; 2] {
        let (lane, heads, channels) = (warp::lane() as usize, sizes.kv_heads as usize, sizes.gate_channels as usize);
        let (x, rstd) = (self.inp.skip(row * sizes.channels as usize), self.rstd.at(row));
        let mut sums = [0.0; 2];
        let mut first = 0;
        while first < channels {
            // Each lane holds one channel. Those after the last are 0.
            let mut value = 0.0;
            if first + lane < channels {
                value = x.at(first + lane).to_f32() * rstd;
                if !self.norm_weight.is_null() {
                    value *= self.norm_weight.at(first + lane).to_f32();
                }
            }
            let mut channel = 0;
            while channel < LANES && first + channel < channels {
                let mut weights = [[0.0; BATCH]; 2];
                for i in 0..2 {
                    let head = lane + i * LANES;
                    for k in 0..BATCH {
                        if head < heads && first + channel + k < channels {
                            weights[i][k] = self.weight.at(head * channels + first + channel + k).to_f32();
                        }
                    }
                }
                for k in 0..BATCH {
                    let value = warp::shuffle(value, (channel + k) as u32);
                    for i in 0..2 {
                        sums[i] = math::fma(value, weights[i][k], sums[i]);
                    }
                }
                channel += BATCH;
            }
            first += LANES;
        }
        sums.map(sigmoid)
    }
}

/// The calling lane's part of a head.
#[derive(Clone, Copy)]
struct Part {
    head: u32,
    /// Index of the part in the head.
    index: u32,
    /// log2 of the lanes of a head.
    lane_shift: u32,
    head_size: u32,
    /// Whether the head and the part exist.
    exists: bool,
}

#[device]
impl Part {
    /// Returns the lane's part if `first` is the head of the first lane.
    fn new<T: Element>(first: u32, sizes: Sizes) -> Self {
        let (lane, head_size, packets) = (warp::lane(), sizes.head_size, 2 * T::PACKET as u32);
        let lane_shift = (head_size / packets).next_power_of_two().trailing_zeros();
        let (head, index) = (first + (lane >> lane_shift), lane & ((1 << lane_shift) - 1));
        let exists = head < sizes.kv_heads && index * packets < head_size;
        Self { head, index, lane_shift, head_size, exists }
    }

    /// Returns the number of heads that a warp processes at a time.
    fn heads(self) -> u32 {
        warp::LANES >> self.lane_shift
    }

    /// Returns the index of the lane's packet in each half of the head, in a row of KV heads.
    fn indices<T: Element>(self) -> [usize; 2] {
        let first = (self.head * self.head_size + self.index * T::PACKET as u32) as usize;
        [first, first + self.head_size as usize / 2]
    }

    /// Loads the lane's packets; zeros if there are none. `packet` loads from an index.
    fn load<T: Element>(self, packet: impl Fn(usize) -> Packet<T>) -> [Packet<T>; 2] {
        if self.exists { self.indices::<T>().map(packet) } else { [Packet::zero(); 2] }
    }

    /// Stores the lane's packets, if there are any. `value` returns an element from the number of its packet and its index in the packet.
    fn store<T: Element>(self, to: GlobalMut<T>, value: impl Fn(usize, usize) -> f32) {
        if self.exists {
            let [first, second] = self.indices::<T>();
            to.set_packet(first, Packet::from_fn(|i| value(0, i)));
            to.set_packet(second, Packet::from_fn(|i| value(1, i)));
        }
    }

    /// Returns the sigmoid of the head's gate, given those of the lane's gates.
    fn sigmoid(self, sigmoids: [f32; 2]) -> f32 {
        let [low, high] = sigmoids.map(|sigmoid| warp::shuffle(sigmoid, self.head % warp::LANES));
        if self.head < warp::LANES { low } else { high }
    }

    /// Returns the sum of `value` over the lanes of the head.
    fn sum(self, mut value: f32) -> f32 {
        let mut offset = (1 << self.lane_shift) / 2;
        while offset > 0 {
            value += warp::shuffle_xor(value, offset);
            offset /= 2;
        }
        value
    }
}

/// Adds the gated embeddings to the values of qkv. Grid: [`grid`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn value_embed<T: Element>(
    qkv: GlobalMut<T>,
    table: Global<T>,
    tokens: Global<i32>,
    inp: Global<T>,
    rstd: Global<f32>,
    norm_weight: Global<T>,
    weight: Global<T>,
    sizes: Sizes,
) {
    let row = thread::block_idx_x() as usize * WARPS + warp::index() as usize;
    if row >= sizes.rows as usize {
        return;
    }
    let token = tokens.at(row * sizes.token_stride as usize) as usize;
    let sigmoids = Gates { inp, rstd, norm_weight, weight }.sigmoids(row, sizes);
    let values = qkv.skip(first_value(row, sizes));
    let embedding = table.skip(token * (sizes.kv_heads * sizes.head_size) as usize);
    let mut head = 0;
    while head < sizes.kv_heads {
        let part = Part::new::<T>(head, sizes);
        let (v, e) = (part.load(|i| values.packet(i)), part.load(|i| embedding.packet_streaming(i)));
        let gate = sizes.largest * part.sigmoid(sigmoids);
        part.store(values, |k, i| math::fma(gate, e[k].get(i), v[k].get(i)));
        head += part.heads();
    }
}

/// Returns the index of the first value of a row of qkv.
#[inline(always)]
fn first_value(row: usize, sizes: Sizes) -> usize {
    let (packed, before) = (sizes.heads + 2 * sizes.kv_heads, sizes.heads + sizes.kv_heads);
    (row * packed as usize + before as usize) * sizes.head_size as usize
}

/// Computes gradients of [`value_embed`] from the values in dqkv. Queries and keys are not read.
///
/// drows (rows, KV, HS) are the gradients of the table's rows, and dgates (rows, KV) f32 the gradients of the sums before the sigmoid. From
/// dgates, [`crate::gate`] computes the gradients of the gate's weight and input. Grid: [`grid`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn value_embed_backward<T: Element>(
    drows: GlobalMut<T>,
    dgates: GlobalMut<f32>,
    dqkv: Global<T>,
    table: Global<T>,
    tokens: Global<i32>,
    inp: Global<T>,
    rstd: Global<f32>,
    norm_weight: Global<T>,
    weight: Global<T>,
    sizes: Sizes,
) {
    let row = thread::block_idx_x() as usize * WARPS + warp::index() as usize;
    if row >= sizes.rows as usize {
        return;
    }
    let token = tokens.at(row * sizes.token_stride as usize) as usize;
    let sigmoids = Gates { inp, rstd, norm_weight, weight }.sigmoids(row, sizes);
    let width = (sizes.kv_heads * sizes.head_size) as usize;
    let (dvalues, embedding, drow) =
        (dqkv.skip(first_value(row, sizes)), table.skip(token * width), drows.skip(row * width));
    let mut head = 0;
    while head < sizes.kv_heads {
        let part = Part::new::<T>(head, sizes);
        let (d, e) = (part.load(|i| dvalues.packet_streaming(i)), part.load(|i| embedding.packet_streaming(i)));
        let mut product = 0.0;
        for k in 0..2 {
            for i in 0..T::PACKET {
                product = math::fma(d[k].get(i), e[k].get(i), product);
            }
        }
        let (product, sigmoid) = (part.sum(product), part.sigmoid(sigmoids));
        let gate = sizes.largest * sigmoid;
        part.store(drow, |k, i| gate * d[k].get(i));
        if part.exists && part.index == 0 {
            let slope = math::fma(-sigmoid, sigmoid, sigmoid);
            dgates.set(row * sizes.kv_heads as usize + part.head as usize, product * sizes.largest * slope);
        }
        head += part.heads();
    }
}
