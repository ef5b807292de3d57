//! Attention of one query per slot over a KV cache.
//!
//! Shapes: qkv (B, NH + 2 KV, HS), keys and values (B, KV, T, HS), out (B, NH, HS). The positions of a head are contiguous in the
//! cache, so each lane reads packets of a stream. HS is a multiple of 16 up to 128. The cache is a ring of the last T positions:
//! position p is at p mod T, where the new position replaces the one that left the window.
//!
//! Block (s, g, b) computes GROUP query heads of one key-value head over split s of the slot's positions, so that keys and values are
//! read once for these heads. First it normalizes and rotates the queries and the new key. Blocks do not read the new key and value
//! from the cache, to which only the last split of the first group writes them. The split's length derives from the slot's position,
//! in device memory: blocks past it do nothing.
//!
//! A warp holds 32 / L positions at a time, where L lanes hold a head (HS / PACKET, padded to a power of two), and keeps a running
//! maximum and sum (online softmax). Partial results of lanes, warps and splits are combined in a fixed order, so the result is
//! deterministic. It depends on the number of splits, and so on the batch size.

use super::{POSITION, WORDS};
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, SharedArray, device, kernel, math, thread, warp};

/// Threads of a block.
const THREADS: usize = 128;
const WARPS: usize = THREADS / warp::LANES as usize;
/// Positions of a slot of lanes whose keys and values are loaded together.
const UNROLL: usize = 4;

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
    /// Returns log2 of the lanes that hold a head.
    const fn lane_shift<T: Element>(self) -> u32 {
        self.head_size.div_ceil(T::PACKET as u32).next_power_of_two().trailing_zeros()
    }

    /// Returns the positions of a split of `len` positions: a multiple of those that a block processes at a time.
    const fn split_len<T: Element>(self, len: u32) -> u32 {
        let step = ((WARPS * UNROLL) as u32) << (5 - self.lane_shift::<T>());
        // The number of splits is at least 1. A division by a variable would check for 0.
        let splits = if self.splits > 1 { self.splits } else { 1 };
        len.div_ceil(splits).next_multiple_of(step)
    }

    /// Returns how many positions a query at `position` attends to.
    const fn visible(self, position: u32) -> u32 {
        if position < self.capacity { position + 1 } else { self.capacity }
    }

    /// Returns query heads per key-value head.
    pub(super) const fn group(self) -> u32 {
        self.heads / if self.kv_heads > 1 { self.kv_heads } else { 1 }
    }

    /// Returns the grid of [`decode_attention`] for blocks of `group` query heads.
    pub const fn grid(self, group: usize, slots: usize) -> [u32; 3] {
        [self.splits, self.kv_heads * self.group().div_ceil(group as u32), slots as u32]
    }

    /// Returns the grid of [`decode_attention_combine`].
    pub const fn combine_grid(self, slots: usize) -> [u32; 3] {
        [self.heads, slots as u32, 1]
    }
}

/// Shared memory of [`decode_attention`].
pub struct Shared {
    /// (GROUP + 1, HS): queries and the new key, after the rotation.
    heads: SharedArray<f32>,
    /// (GROUP, warps, HS): sums of weighted values.
    sums: SharedArray<f32>,
    /// (GROUP, warps, 2): maximum and sum of weights.
    weights: SharedArray<f32>,
}

/// Lays out the shared memory of [`decode_attention`].
pub fn shared(layout: &mut Layout, group: usize, head_size: usize) -> Shared {
    Shared {
        heads: layout.array((group + 1) * head_size),
        sums: layout.array(group * WARPS * head_size),
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

/// A lane's running softmax: for each query head, maximum score and sum of weights, and the lane's channels of the weighted values.
/// Scores are multiplied by log2 e.
pub(super) struct Softmax<const GROUP: usize> {
    pub(super) queries: [[f32; 8]; GROUP],
    pub(super) most: [f32; GROUP],
    pub(super) weight: [f32; GROUP],
    pub(super) sums: [[f32; 8]; GROUP],
    /// log2 of the lanes of a head.
    lane_shift: u32,
    /// Whether the lane holds channels.
    holds: bool,
}

/// Returns 2^(score - most), and 0 if there is no score yet.
#[inline(always)]
pub(super) fn relative(score: f32, most: f32) -> f32 {
    if score == f32::NEG_INFINITY { 0.0 } else { math::exp2(score - most) }
}

#[device]
impl<const GROUP: usize> Softmax<GROUP> {
    /// Starts without positions and with queries of 0. A head has 2^`lane_shift` lanes. `holds`: the lane holds channels.
    pub(super) const fn new(lane_shift: u32, holds: bool) -> Self {
        Self {
            queries: [[0.0; 8]; GROUP],
            most: [f32::NEG_INFINITY; GROUP],
            weight: [0.0; GROUP],
            sums: [[0.0; 8]; GROUP],
            lane_shift,
            holds,
        }
    }

    /// Adds N positions with the lane's channels of keys and values. All lanes of a warp call it.
    pub(super) fn add<T: Element, const N: usize>(
        &mut self,
        keys: &[Packet<T>; N],
        values: &[Packet<T>; N],
        valid: [bool; N],
    ) {
        for g in 0..GROUP {
            let mut scores = [0.0; N];
            for u in 0..N {
                if self.holds {
                    for i in 0..T::PACKET {
                        scores[u] = math::fma(self.queries[g][i], keys[u].get(i), scores[u]);
                    }
                }
                let mut offset = (1 << self.lane_shift) / 2;
                while offset > 0 {
                    scores[u] += warp::shuffle_xor(scores[u], offset);
                    offset /= 2;
                }
            }
            let mut most = self.most[g];
            for u in 0..N {
                if valid[u] {
                    // A NaN must reach the result.
                    most = if scores[u] > most || scores[u].is_nan() { scores[u] } else { most };
                }
            }
            let correction = relative(self.most[g], most);
            self.most[g] = most;
            self.weight[g] *= correction;
            for i in 0..T::PACKET {
                self.sums[g][i] *= correction;
            }
            for u in 0..N {
                if valid[u] {
                    let weight = relative(scores[u], most);
                    self.weight[g] += weight;
                    for i in 0..T::PACKET {
                        self.sums[g][i] = math::fma(weight, values[u].get(i), self.sums[g][i]);
                    }
                }
            }
        }
    }

    /// Adds the results of the warp's other positions. The result is in the first lanes, which hold one head.
    pub(super) fn combine_positions<T: Element>(&mut self) {
        let mut offset = 1 << self.lane_shift;
        while offset < warp::LANES {
            for g in 0..GROUP {
                let other = warp::shuffle_xor(self.most[g], offset);
                let most = if other > self.most[g] || other.is_nan() { other } else { self.most[g] };
                let (own, others) = (relative(self.most[g], most), relative(other, most));
                self.most[g] = most;
                self.weight[g] = self.weight[g] * own + warp::shuffle_xor(self.weight[g], offset) * others;
                for i in 0..T::PACKET {
                    self.sums[g][i] = self.sums[g][i] * own + warp::shuffle_xor(self.sums[g][i], offset) * others;
                }
            }
            offset *= 2;
        }
    }
}

/// Computes out (B, NH, HS), or with several splits `partials` (B, NH, splits, HS + 2) f32, and stores the new keys and values.
///
/// A partial result holds the weighted values, the maximum score and the sum of weights. [`decode_attention_combine`] must follow.
/// Without rotation, table is null; weights of the norm may be null. The output of an idle slot is 0. Grid: [`Sizes::grid`]. Shared memory: [`shared`].
#[kernel(
    threads = 128,
    instances([bf16 = cuda_std::bf16, f32 = f32] * [g1 = 1, g2 = 2, g4 = 4, g8 = 8]),
    select(GROUP: usize)
)]
pub fn decode_attention<T: Element, const GROUP: usize>(
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
    let shared = shared(&mut Layout::new(), GROUP, hs);
    let (split, slot) = (thread::block_idx_x(), thread::block_idx_z() as usize);
    let group = sizes.group();
    let groups = group.div_ceil(GROUP as u32).max(1);
    let (kv, first) = (thread::block_idx_y() / groups, thread::block_idx_y() % groups * GROUP as u32);
    let position = slots.at(slot * WORDS + POSITION);
    let thread = thread::thread_idx_x() as usize;
    if position < 0 {
        // Later operations read the output of an idle slot.
        if split == 0 && thread < hs {
            for g in 0..GROUP as u32 {
                if first + g < group {
                    let head = slot * sizes.heads as usize + (kv * group + first + g) as usize;
                    out.set(head * hs + thread, T::from_f32(0.0));
                }
            }
        }
        return;
    }
    let position = position as u32;
    let len = sizes.visible(position);
    let per_split = sizes.split_len::<T>(len);
    let start = split * per_split;
    if start >= len {
        return;
    }
    let is_last = start + per_split >= len;
    // The new position is not read from the cache.
    let end = if is_last { len - 1 } else { start + per_split };
    let row = qkv.skip(slot * (sizes.heads + 2 * sizes.kv_heads) as usize * hs);
    let (new_key, new_value) =
        (row.skip((sizes.heads + kv) as usize * hs), row.skip((sizes.heads + sizes.kv_heads + kv) as usize * hs));
    let head_of = |g: usize| kv * group + (first + g as u32).min(group - 1);

    let Sizes { head_size, rotation, eps, gain, .. } = sizes;
    let preparation = Preparation { head_size, rotation, is_normed: sizes.qk_norm != 0, eps, gain };
    let mut h = warp::index() as usize;
    while h <= GROUP {
        let (head, weight) =
            if h < GROUP { (row.skip(head_of(h) as usize * hs), q_weight) } else { (new_key, k_weight) };
        let to = shared.heads.skip(h * hs);
        prepare::<T>(
            |i, x| to.set(i, x.to_f32()),
            preparation,
            |i| head.at(i).to_f32(),
            |i| if weight.is_null() { 1.0 } else { weight.at(i).to_f32() },
            |i| [0, 1].map(|part| table.at(position as usize * hs + 2 * i + part)),
        );
        h += WARPS;
    }
    thread::sync_threads();
    let cache = (slot * sizes.kv_heads as usize + kv as usize) * sizes.capacity as usize * hs;
    // The places of the new and of the oldest visible position. A division takes long, and only a full ring needs it.
    let capacity = if sizes.capacity > 1 { sizes.capacity } else { 1 };
    let newest = if position < capacity { position } else { position % capacity };
    let oldest = if position < capacity || newest + 1 == capacity { 0 } else { newest + 1 };
    let rotated_key = shared.heads.skip(GROUP * hs);
    if is_last && first == 0 && thread < hs {
        let at = cache + newest as usize * hs + thread;
        keys.set(at, T::from_f32(rotated_key.at(thread)));
        values.set(at, new_value.at(thread));
    }

    let lane_shift = sizes.lane_shift::<T>();
    let (lane, warp) = (warp::lane(), warp::index());
    let channel = (lane & ((1 << lane_shift) - 1)) as usize * T::PACKET;
    let holds = channel < hs;
    let channel = if holds { channel } else { 0 };
    let mut softmax = Softmax::<GROUP>::new(lane_shift, holds);
    let scale = math::rsqrt(hs as f32) * core::f32::consts::LOG2_E;
    for g in 0..GROUP {
        for i in 0..T::PACKET {
            softmax.queries[g][i] = shared.heads.at(g * hs + channel + i) * scale;
        }
    }
    let stride = (WARPS as u32) << (5 - lane_shift);
    let own = (warp << (5 - lane_shift)) + (lane >> lane_shift);
    // The positions after the end of the ring follow in a second pass, with another shift: with a condition for each load instead, the
    // kernel would need more registers, and fewer blocks would fit.
    let (mut base, mut stop, mut shift) = (start, end.min(capacity - oldest), oldest);
    loop {
        while base < stop {
            let (mut k, mut v) = ([Packet::<T>::zero(); UNROLL], [Packet::<T>::zero(); UNROLL]);
            let mut valid = [false; UNROLL];
            for u in 0..UNROLL {
                let at = base + u as u32 * stride + own;
                valid[u] = at < stop;
                // Loads past the end repeat the last position: with a condition per load, ptxas would interleave loads and uses.
                let at = cache + at.min(stop - 1).wrapping_add(shift) as usize * hs + channel;
                (k[u], v[u]) = (keys.packet(at), values.packet(at));
            }
            softmax.add(&k, &v, valid);
            base += UNROLL as u32 * stride;
        }
        if stop == end {
            break;
        }
        (base, stop, shift) = (start.max(stop), end, oldest.wrapping_sub(capacity));
    }
    if is_last && warp == 0 {
        let key = Packet::<T>::from_fn(|i| rotated_key.at(channel + i));
        softmax.add(&[key], &[new_value.packet(channel)], [lane >> lane_shift == 0]);
    }
    softmax.combine_positions::<T>();
    for g in 0..GROUP {
        let at = g * WARPS + warp as usize;
        if lane >> lane_shift == 0 && holds {
            for i in 0..T::PACKET {
                shared.sums.set(at * hs + channel + i, softmax.sums[g][i]);
            }
        }
        if lane == 0 {
            shared.weights.set(at * 2, softmax.most[g]);
            shared.weights.set(at * 2 + 1, softmax.weight[g]);
        }
    }
    thread::sync_threads();
    for g in 0..GROUP {
        if thread < hs && first + (g as u32) < group {
            let part = |w: usize| {
                let at = g * WARPS + w;
                [shared.weights.at(at * 2), shared.weights.at(at * 2 + 1), shared.sums.at(at * hs + thread)]
            };
            let [most, weight, sum] = combine(WARPS, part);
            let row = slot * sizes.heads as usize + head_of(g) as usize;
            if sizes.splits <= 1 {
                out.set(row * hs + thread, T::from_f32(sum * math::recip(weight)));
            } else {
                let to = partials.skip((row * sizes.splits as usize + split as usize) * (hs + 2));
                to.set(thread, sum);
                if thread == 0 {
                    to.set(hs, most);
                    to.set(hs + 1, weight);
                }
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
    let count = len.div_ceil(sizes.split_len::<T>(len).max(1)) as usize;
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
