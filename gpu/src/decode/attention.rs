//! Attention of one query per slot over a KV cache.
//!
//! Shapes: qkv (B, NH + 2 KV, HS), keys and values (B, KV, T, HS), out (B, NH, HS). The positions of a head are contiguous in the
//! cache, so each lane reads packets of a stream. HS is a multiple of 16 up to 128. The cache is a ring of the last T positions:
//! position p is at p mod T, where the new position replaces the one that left the window.
//!
//! Block (s, g, b) computes up to eight query heads of one key-value head over split s of the slot's positions, so that keys and values are
//! read once for these heads. First it normalizes and rotates the queries and the new key. Blocks do not read the new key and value
//! from the cache, to which only the last split of the first group writes them. The split's length derives from the slot's position,
//! in device memory: blocks past it do nothing.
//!
//! A warp adds 16 positions at a time, and keeps a running maximum and sum of each head (online softmax). It computes scores and weighted
//! values with `mma.m16n8k16`: query heads are the rows of the scores and the columns of the weighted values. The instruction may take the
//! channels in any order, so each lane loads whole packets of keys and values, and only maxima move between lanes. In bf16, weights are rounded
//! before they multiply values, as in training.
//! Partial results of warps and splits are combined in a fixed order, so the result is deterministic. It depends on the number of splits, and so
//! on the batch size.

use super::{POSITION, WORDS};
use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, SharedArray, device, kernel, math, thread, warp};

/// Threads of a block.
const THREADS: usize = 128;
const WARPS: usize = THREADS / warp::LANES as usize;
/// Positions that a warp adds at a time: K of an instruction.
const POSITIONS: u32 = 16;
/// Positions that a block adds at a time.
const STEP: u32 = WARPS as u32 * POSITIONS;
/// Query heads of a block: the columns of an instruction.
pub const GROUP: u32 = 8;

/// Channels do not move in pairs.
pub const NO_ROTATION: u32 = 0;
/// Channels i and i + HS/2 form a pair.
pub const HALF_SPLIT: u32 = 1;
/// Channels 2i and 2i + 1 form a pair.
pub const INTERLEAVED: u32 = 2;

/// Returns whether the kernels support heads of `head_size` channels.
pub const fn supports(head_size: usize) -> bool {
    head_size > 0 && head_size.is_multiple_of(16) && head_size <= 128
}

/// The scalars of the kernels. Passed by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Sizes {
    /// NH.
    pub heads: u32,
    /// KV.
    pub kv_heads: u32,
    /// HS.
    pub head_size: u32,
    /// T, positions of the ring. It is at least 1.
    pub capacity: u32,
    /// Splits of a slot's positions.
    pub splits: u32,
    /// One of the codes of a rotation.
    pub rotation: u32,
    /// Whether queries and keys are normalized before the rotation.
    pub qk_norm: u32,
    /// Added to the mean square in the norm.
    pub eps: f32,
    /// Factor of normalized queries and keys.
    pub gain: f32,
}

#[device]
impl Sizes {
    /// Returns the positions of a split of `len` positions: a multiple of those that a block adds at a time.
    const fn split_len(self, len: u32) -> u32 {
        // The number of splits is at least 1. A division by a variable would check for 0.
        let splits = if self.splits > 1 { self.splits } else { 1 };
        len.div_ceil(splits).next_multiple_of(STEP)
    }

    /// Returns how many positions a query at `position` attends to.
    const fn visible(self, position: u32) -> u32 {
        if position < self.capacity { position + 1 } else { self.capacity }
    }

    /// Returns query heads per key-value head.
    pub(super) const fn group(self) -> u32 {
        self.heads / if self.kv_heads > 1 { self.kv_heads } else { 1 }
    }

    /// Returns the query heads of a block: the last one of a key-value head may have fewer.
    pub(super) const fn block_heads(self) -> u32 {
        if self.group() < GROUP { self.group() } else { GROUP }
    }

    /// Returns the grid of [`decode_attention`].
    pub const fn grid(self, slots: usize) -> [u32; 3] {
        [self.splits, self.kv_heads * self.group().div_ceil(GROUP), slots as u32]
    }

    /// Returns the grid of [`decode_attention_combine`].
    pub const fn combine_grid(self, slots: usize) -> [u32; 3] {
        [self.heads, slots as u32, 1]
    }
}

/// Shared memory of [`decode_attention`] for G query heads.
pub struct Shared<T> {
    /// (G + 1, HS): queries and the new key, after the rotation.
    heads: SharedArray<T>,
    /// (G, warps, HS): sums of weighted values.
    sums: SharedArray<f32>,
    /// (G, warps, 2): maximum and sum of weights.
    weights: SharedArray<f32>,
}

/// Lays out the shared memory of [`decode_attention`].
pub fn shared<T: Element>(layout: &mut Layout, sizes: Sizes) -> Shared<T> {
    let (group, hs) = (sizes.block_heads() as usize, sizes.head_size as usize);
    Shared {
        heads: layout.array((group + 1) * hs),
        sums: layout.array(group * WARPS * hs),
        weights: layout.array(group * WARPS * 2),
    }
}

/// The changes that [`prepare`] makes to queries and keys.
#[derive(Clone, Copy)]
pub(super) struct Preparation {
    /// HS.
    pub(super) head_size: u32,
    /// One of the codes of a rotation.
    pub(super) rotation: u32,
    /// Whether there is a norm.
    pub(super) is_normed: bool,
    /// Added to the mean square in the norm.
    pub(super) eps: f32,
    /// Factor of normalized heads.
    pub(super) gain: f32,
}

/// Normalizes and rotates one head, spread over a warp, and passes its channels, rounded to T, to `store`. `head`, `weight` and `angle` return
/// a channel, its factor in the norm, and cosine and sine of a pair of channels.
#[inline(always)]
pub(super) fn prepare<T: Element>(
    store: impl Fn(usize, T),
    preparation: Preparation,
    head: impl Fn(usize) -> f32,
    weight: impl Fn(usize) -> f32,
    angle: impl Fn(usize) -> [f32; 2],
) {
    let (hs, half) = (preparation.head_size as usize, preparation.head_size as usize / 2);
    let pair = |i: usize| if preparation.rotation == INTERLEAVED { (2 * i, 2 * i + 1) } else { (i, i + half) };
    let mut scale = 1.0;
    if preparation.is_normed {
        let (mut squares, mut i) = (0.0, warp::lane() as usize);
        while i < half {
            let (a, b) = pair(i);
            let (x, y) = (head(a), head(b));
            squares = math::fma(x, x, math::fma(y, y, squares));
            i += warp::LANES as usize;
        }
        let mean = warp::sum(squares * math::recip(hs as f32));
        scale = math::rsqrt(mean + preparation.eps) * preparation.gain;
    }
    let weight_at = |i: usize| if preparation.is_normed { weight(i) } else { 1.0 };
    let mut i = warp::lane() as usize;
    while i < half {
        let (a, b) = pair(i);
        let (x, y) = (head(a) * (scale * weight_at(a)), head(b) * (scale * weight_at(b)));
        let [cos, sin] = if preparation.rotation == NO_ROTATION { [1.0, 0.0] } else { angle(i) };
        store(a, T::from_f32(math::fma(x, cos, -(y * sin))));
        store(b, T::from_f32(math::fma(y, cos, x * sin)));
        i += warp::LANES as usize;
    }
}

/// Returns 2^(score - most), and 0 if there is no score yet.
#[inline(always)]
pub(super) fn relative(score: f32, most: f32) -> f32 {
    if score == f32::NEG_INFINITY { 0.0 } else { math::exp2(score - most) }
}

/// Returns the larger score. A NaN must reach the result.
#[inline(always)]
pub(super) fn larger(most: f32, score: f32) -> f32 {
    if score > most || score.is_nan() { score } else { most }
}

/// Blocks of four packets of the largest head: 128 channels of f32.
const MAX_BLOCKS: usize = 8;
/// Blocks of eight packets of the largest head.
const MAX_WIDE_BLOCKS: usize = 4;

/// A lane's part of keys and values of [`POSITIONS`] positions. The lane is 4 g + t.
#[derive(Clone, Copy)]
struct Fragments<T> {
    /// Packets 4 b + t of positions g and g + 8.
    keys: [[Packet<T>; MAX_BLOCKS]; 2],
    /// Packets 8 b + g of positions 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
    values: [[Packet<T>; 4]; MAX_WIDE_BLOCKS],
}

#[device]
impl<T: TensorCore> Fragments<T> {
    /// Returns zeros.
    #[inline(always)]
    fn zero() -> Self {
        Self { keys: [[Packet::zero(); MAX_BLOCKS]; 2], values: [[Packet::zero(); 4]; MAX_WIDE_BLOCKS] }
    }

    /// Loads heads of up to HS channels. `row` returns the index of a position's first channel, given its number.
    #[inline(always)]
    fn load<const HS: usize>(
        head_size: u32,
        row: impl Fn(u32) -> usize,
        key: impl Fn(usize) -> Packet<T>,
        value: impl Fn(usize) -> Packet<T>,
    ) -> Self {
        let (g, t, packets) = (warp::lane() / 4, warp::lane() % 4, head_size / T::PACKET as u32);
        let mut loaded = Self::zero();
        for u in 0..2 {
            let first = row(8 * u as u32 + g) + t as usize * T::PACKET;
            for b in 0..HS / (4 * T::PACKET) {
                if 4 * b as u32 + t < packets {
                    loaded.keys[u][b] = key(first + 4 * b * T::PACKET);
                }
            }
        }
        for i in 0..4 {
            let first = row(2 * t + (i as u32) % 2 + 8 * (i as u32 / 2)) + g as usize * T::PACKET;
            for b in 0..HS / (8 * T::PACKET) {
                if 8 * b as u32 + g < packets {
                    loaded.values[b][i] = value(first + 8 * b * T::PACKET);
                }
            }
        }
        loaded
    }
}

/// A warp's sums over positions for up to eight query heads, relative to the largest score. The lane is 4 g + t.
struct Sums<T> {
    /// Packets 4 b + t of query head g: 0 past the last head or packet.
    queries: [Packet<T>; MAX_BLOCKS],
    /// Factor of the scores, which are multiplied by log2 e.
    scale: f32,
    /// The largest score of head g. NEG_INFINITY without positions.
    most: f32,
    /// The sum of the weights of head g over the positions of this lane.
    weight: f32,
    /// The weighted values: channels 2 i of packet 8 b + g of heads 2 t and 2 t + 1, then channels 2 i + 1.
    weighted: [[[f32; 4]; 4]; MAX_WIDE_BLOCKS],
}

#[device]
impl<T: TensorCore> Sums<T> {
    /// Starts without positions, for `count` queries (count, HS).
    #[inline(always)]
    fn new<const HS: usize>(queries: SharedArray<T>, count: u32, head_size: u32) -> Self {
        let (g, t, packets) = (warp::lane() / 4, warp::lane() % 4, head_size / T::PACKET as u32);
        let mut own = [Packet::zero(); MAX_BLOCKS];
        for b in 0..HS / (4 * T::PACKET) {
            let packet = 4 * b as u32 + t;
            if g < count && packet < packets {
                own[b] = queries.packet((g * head_size) as usize + packet as usize * T::PACKET);
            }
        }
        let scale = math::rsqrt(head_size as f32) * core::f32::consts::LOG2_E;
        let weighted = [[[0.0; 4]; 4]; MAX_WIDE_BLOCKS];
        Self { queries: own, scale, most: f32::NEG_INFINITY, weight: 0.0, weighted }
    }

    /// Adds the first `count` of the loaded positions. All lanes of a warp call it.
    #[inline(always)]
    fn add<const HS: usize>(&mut self, loaded: &Fragments<T>, count: u32) {
        let t = warp::lane() % 4;
        // Of head g at positions 8 u + 2 t and 8 u + 2 t + 1.
        let mut scores = [[f32::NEG_INFINITY; 2]; 2];
        for u in 0..2 {
            let mut d = [[0.0; 4]; 2];
            for b in 0..HS / (4 * T::PACKET) {
                T::mma_packets(&mut d, [self.queries[b], Packet::zero()], loaded.keys[u][b]);
            }
            for i in 0..2 {
                if 8 * u as u32 + 2 * t + (i as u32) < count {
                    scores[u][i] = (d[0][i] + d[1][i]) * self.scale;
                }
            }
        }
        let mut most = larger(larger(scores[0][0], scores[0][1]), larger(scores[1][0], scores[1][1]));
        most = larger(most, warp::shuffle_xor(most, 1));
        most = larger(self.most, larger(most, warp::shuffle_xor(most, 2)));
        let correction = relative(self.most, most);
        self.most = most;
        self.weight *= correction;
        for u in 0..2 {
            for i in 0..2 {
                scores[u][i] = relative(scores[u][i], most);
                self.weight += scores[u][i];
            }
        }
        let weights = T::b_from_accumulators(scores[0], scores[1]);
        let corrections = [0, 1].map(|head| warp::shuffle(correction, 4 * (2 * t + head)));
        for b in 0..HS / (8 * T::PACKET) {
            for i in 0..T::PACKET / 2 {
                let d = &mut self.weighted[b][i];
                for k in 0..4 {
                    d[k] *= corrections[k % 2];
                }
                T::mma(d, T::a_from_packets(loaded.values[b], i), weights);
            }
        }
    }

    /// Stores the sums of the warp for `count` heads in shared memory.
    #[inline(always)]
    fn store<const HS: usize>(&mut self, shared: &Shared<T>, count: u32, head_size: u32) {
        let (g, t, warp) = (warp::lane() / 4, warp::lane() % 4, warp::index());
        self.weight += warp::shuffle_xor(self.weight, 1);
        self.weight += warp::shuffle_xor(self.weight, 2);
        if t == 0 && g < count {
            let at = (g as usize * WARPS + warp as usize) * 2;
            shared.weights.set(at, self.most);
            shared.weights.set(at + 1, self.weight);
        }
        for b in 0..HS / (8 * T::PACKET) {
            let channel = (8 * b + g as usize) * T::PACKET;
            for k in 0..2 {
                let head = 2 * t + k as u32;
                if head < count && channel < head_size as usize {
                    let at = (head as usize * WARPS + warp as usize) * head_size as usize + channel;
                    for i in 0..T::PACKET {
                        shared.sums.set(at + i, self.weighted[b][i / 2][2 * (i % 2) + k]);
                    }
                }
            }
        }
    }
}

/// Computes out (B, NH, HS), or with several splits `partials` (B, NH, splits, HS + 2) f32, and stores the new keys and values.
///
/// A partial result holds the weighted values, the maximum score and the sum of weights. [`decode_attention_combine`] must follow.
/// Without rotation, table is null; weights of the norm may be null. The output of an idle slot is 0. Heads have at most MAX_HS channels.
/// Grid: [`Sizes::grid`]. Shared memory: [`shared`].
#[kernel(
    threads = 128,
    instances([bf16 = cuda_std::bf16, f32 = f32] * [hs_64 = 64, hs_128 = 128]),
    select(MAX_HS: usize)
)]
pub fn decode_attention<T: TensorCore, const MAX_HS: usize>(
    out: GlobalMut<T>,
    partials: GlobalMut<f32>,
    keys: GlobalMut<T>,
    values: GlobalMut<T>,
    qkv: Global<T>,
    slots: Global<i32>,
    table: Global<f32>,
    q_weight: Global<T>,
    k_weight: Global<T>,
    sizes: Sizes,
) {
    let hs = sizes.head_size as usize;
    let shared = shared::<T>(&mut Layout::new(), sizes);
    let (split, slot) = (thread::block_idx_x(), thread::block_idx_z() as usize);
    let group = sizes.group();
    let groups = group.div_ceil(GROUP).max(1);
    let (kv, first) = (thread::block_idx_y() / groups, thread::block_idx_y() % groups * GROUP);
    let count = (group - first).min(GROUP);
    let head = slot * sizes.heads as usize + (kv * group + first) as usize;
    let position = slots.at(slot * WORDS + POSITION);
    let thread = thread::thread_idx_x() as usize;
    if position < 0 {
        // Later operations read the output of an idle slot.
        if split == 0 && thread < hs {
            for g in 0..count as usize {
                out.set((head + g) * hs + thread, T::from_f32(0.0));
            }
        }
        return;
    }
    let position = position as u32;
    let len = sizes.visible(position);
    let per_split = sizes.split_len(len);
    let start = split * per_split;
    if start >= len {
        return;
    }
    let is_last = start + per_split >= len;
    // The new position is not read from the cache.
    let end = if is_last { len - 1 } else { start + per_split };
    let cache = (slot * sizes.kv_heads as usize + kv as usize) * sizes.capacity as usize * hs;
    // The places of the new and of the oldest visible position. A division takes long, and only a full ring needs it.
    let capacity = if sizes.capacity > 1 { sizes.capacity } else { 1 };
    let newest = if position < capacity { position } else { position % capacity };
    let oldest = if position < capacity || newest + 1 == capacity { 0 } else { newest + 1 };
    let [cached_keys, cached_values] = [keys.reader().skip(cache), values.reader().skip(cache)];
    let load = |base: u32| {
        let row = |i: u32| {
            // A position past the end repeats the last one: its weight is 0.
            let place = (base + i).min(end - 1) + oldest;
            let place = if place < capacity { place } else { place - capacity };
            (place * sizes.head_size) as usize
        };
        Fragments::load::<MAX_HS>(sizes.head_size, row, |i| cached_keys.packet(i), |i| cached_values.packet(i))
    };
    let mut base = start + warp::index() * POSITIONS;
    let row = qkv.skip(slot * (sizes.heads + 2 * sizes.kv_heads) as usize * hs);
    let (new_key, new_value) =
        (row.skip((sizes.heads + kv) as usize * hs), row.skip((sizes.heads + sizes.kv_heads + kv) as usize * hs));
    let Sizes { head_size, rotation, eps, gain, .. } = sizes;
    let preparation = Preparation { head_size, rotation, is_normed: sizes.qk_norm != 0, eps, gain };
    let mut h = warp::index();
    while h <= count {
        let query = row.skip((kv * group + first + h) as usize * hs);
        let (head, weight) = if h < count { (query, q_weight) } else { (new_key, k_weight) };
        let to = shared.heads.skip(h as usize * hs);
        prepare::<T>(
            |i, x| to.set(i, x),
            preparation,
            |i| head.at(i).to_f32(),
            |i| if weight.is_null() { 1.0 } else { weight.at(i).to_f32() },
            |i| [0, 1].map(|part| table.at(position as usize * hs + 2 * i + part)),
        );
        h += WARPS as u32;
    }
    thread::sync_threads();
    let rotated_key = shared.heads.skip(count as usize * hs);
    if is_last && first == 0 && thread < hs {
        let at = cache + newest as usize * hs + thread;
        keys.set(at, rotated_key.at(thread));
        values.set(at, new_value.at(thread));
    }

    let mut sums = Sums::new::<MAX_HS>(shared.heads, count, head_size);
    while base < end {
        sums.add::<MAX_HS>(&load(base), end - base);
        base += STEP;
    }
    // No warp has fewer other positions than the last one.
    if is_last && warp::index() + 1 == WARPS as u32 {
        let new = Fragments::load::<MAX_HS>(head_size, |_| 0, |i| rotated_key.packet(i), |i| new_value.packet(i));
        sums.add::<MAX_HS>(&new, 1);
    }
    sums.store::<MAX_HS>(&shared, count, head_size);
    thread::sync_threads();
    if thread >= hs {
        return;
    }
    for g in 0..count as usize {
        let part = |w: usize| {
            let at = g * WARPS + w;
            [shared.weights.at(at * 2), shared.weights.at(at * 2 + 1), shared.sums.at(at * hs + thread)]
        };
        let [most, weight, sum] = combine(WARPS, part);
        if sizes.splits <= 1 {
            out.set((head + g) * hs + thread, T::from_f32(sum * math::recip(weight)));
        } else {
            let to = partials.skip(((head + g) * sizes.splits as usize + split as usize) * (hs + 2));
            to.set(thread, sum);
            if thread == 0 {
                to.set(hs, most);
                to.set(hs + 1, weight);
            }
        }
    }
}

/// Combines `count` partial results of some channels, in order: maximum score, sum of weights, and the sums of weighted values.
#[inline(always)]
pub(super) fn combine<const N: usize>(count: usize, part: impl Fn(usize) -> [f32; N]) -> [f32; N] {
    let mut most = f32::NEG_INFINITY;
    for i in 0..count {
        let score = part(i)[0];
        most = if score > most || score.is_nan() { score } else { most };
    }
    let mut combined = [0.0; N];
    for i in 0..count {
        let part = part(i);
        let factor = relative(part[0], most);
        for k in 1..N {
            combined[k] = math::fma(part[k], factor, combined[k]);
        }
    }
    combined[0] = most;
    combined
}

/// Computes out (B, NH, HS) from `partials` (B, NH, splits, HS + 2).
///
/// One thread per channel. Grid: [`Sizes::combine_grid`].
#[kernel(threads = 128, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn decode_attention_combine<T: Element>(
    out: GlobalMut<T>,
    partials: Global<f32>,
    slots: Global<i32>,
    sizes: Sizes,
) {
    let (hs, channel) = (sizes.head_size as usize, thread::thread_idx_x() as usize);
    if channel >= hs {
        return;
    }
    let (head, slot) = (thread::block_idx_x() as usize, thread::block_idx_y() as usize);
    let position = slots.at(slot * WORDS + POSITION);
    if position < 0 {
        return;
    }
    let len = sizes.visible(position as u32);
    let count = len.div_ceil(sizes.split_len(len).max(1)) as usize;
    let row = slot * sizes.heads as usize + head;
    let partials = partials.skip(row * sizes.splits as usize * (hs + 2));
    let part = |i: usize| {
        let at = i * (hs + 2);
        [partials.at(at + hs), partials.at(at + hs + 1), partials.at(at + channel)]
    };
    let [_, weight, sum] = combine(count, part);
    out.set(row * hs + channel, T::from_f32(sum * math::recip(weight)));
}

/// The scalars of [`cache_fill`] and [`cache_read`]. Passed by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CacheSizes {
    /// Rows of qkv.
    pub tokens: u32,
    /// Position of the first row.
    pub first: u32,
    /// NH.
    pub heads: u32,
    /// KV.
    pub kv_heads: u32,
    /// HS.
    pub head_size: u32,
    /// T, positions of the ring. It is at least 1.
    pub capacity: u32,
}

#[device]
impl CacheSizes {
    /// Returns the grid size of [`cache_fill`].
    pub const fn fill_grid<T: Element>(self) -> u32 {
        (2 * self.kv_heads * self.tokens * self.head_size).div_ceil((THREADS * T::PACKET) as u32)
    }

    /// Returns the grid size of [`cache_read`].
    pub const fn read_grid<T: Element>(self) -> u32 {
        ((self.heads + 2 * self.kv_heads) * self.tokens * self.head_size).div_ceil((THREADS * T::PACKET) as u32)
    }

    /// Returns the row, the head below `heads` and the first channel of the thread's packet. Neighboring threads have the heads of one row.
    fn packet<T: Element>(self, heads: u32) -> (u32, u32, usize) {
        let packets = (self.head_size / T::PACKET as u32).max(1);
        let i = thread::index_1d() as u32;
        let row = i / packets;
        (row / heads.max(1), row % heads.max(1), (i % packets) as usize * T::PACKET)
    }

    /// Returns whether the ring holds a row after the last one.
    const fn holds(self, row: u32) -> bool {
        self.tokens - row <= self.capacity
    }

    /// Returns the index of the first channel of a head in qkv.
    const fn packed(self, row: u32, head: u32) -> usize {
        (row as usize * (self.heads + 2 * self.kv_heads) as usize + head as usize) * self.head_size as usize
    }

    /// Returns the index of the first channel of a row of a key-value head in the cache.
    fn cached(self, row: u32, kv: u32) -> usize {
        let capacity = if self.capacity > 1 { self.capacity } else { 1 };
        let place = (self.first + row) % capacity;
        (kv as usize * capacity as usize + place as usize) * self.head_size as usize
    }
}

/// Copies keys and values of one sequence from qkv (tokens, NH + 2 KV, HS) to keys and values (KV, T, HS): the last T rows, position p to
/// p mod T.
///
/// One packet per thread. Grid: [`CacheSizes::fill_grid`].
#[kernel(threads = 128, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn cache_fill<T: Element>(keys: GlobalMut<T>, values: GlobalMut<T>, qkv: Global<T>, sizes: CacheSizes) {
    let (row, head, channel) = sizes.packet::<T>(2 * sizes.kv_heads);
    if row >= sizes.tokens || !sizes.holds(row) {
        return;
    }
    let data = qkv.packet(sizes.packed(row, sizes.heads + head) + channel);
    let to = sizes.cached(row, head % sizes.kv_heads.max(1)) + channel;
    if head < sizes.kv_heads { keys.set_packet(to, data) } else { values.set_packet(to, data) }
}

/// Copies keys and values (KV, T, HS) of the last T rows of a sequence that begins at position 0 to qkv (tokens, NH + 2 KV, HS), and sets
/// all else in qkv to 0.
///
/// One packet per thread. Grid: [`CacheSizes::read_grid`].
#[kernel(threads = 128, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn cache_read<T: Element>(qkv: GlobalMut<T>, keys: Global<T>, values: Global<T>, sizes: CacheSizes) {
    let (row, head, channel) = sizes.packet::<T>(sizes.heads + 2 * sizes.kv_heads);
    if row >= sizes.tokens {
        return;
    }
    let mut data = Packet::<T>::zero();
    if head >= sizes.heads && sizes.holds(row) {
        let from = sizes.cached(row, (head - sizes.heads) % sizes.kv_heads.max(1)) + channel;
        data = if head < sizes.heads + sizes.kv_heads { keys.packet(from) } else { values.packet(from) };
    }
    qkv.set_packet(sizes.packed(row, head) + channel, data);
}
