//! Rotary position embedding (RoPE; Su et al., 2021, arXiv:2104.09864) of queries and keys, after an optional RMSNorm of
//! each head (QK-norm).
//!
//! Shapes: qkv (B, T, H, HS) and its gradient, where H = NH + 2 KV heads hold NH queries, KV keys and KV values; saved
//! (B, T, NH + KV, HS); table (T, HS/2, 2) f32, the cosine and sine of each angle; weights (HS). HS is a multiple of 16
//! up to 256. Queries and keys are replaced in place; values are not accessed. B * T is below 2^31.
//!
//! The pair (x, y) becomes (x cos - y sin, y cos + x sin). Pair i of a head consists of channels i and i + HS/2, or of
//! channels 2i and 2i + 1 if INTERLEAVED. The opposite sine rotates back.
//!
//! A lane holds two packets of a head, which contain PACKET complete pairs: packets p of both halves, or packets 2p and
//! 2p + 1 if INTERLEAVED. So HS / (2 PACKET) lanes hold a head. They are padded to a power of two, so that a warp
//! consists of slots of equal size, one head each (`Slots`). A warp processes a batch of heads of the same token in
//! each slot, and loads the angles of the token once. All loads of a batch precede its first store.
//!
//! Memory traffic in elements per element of queries and keys: 2 for the rotation alone, 3 with the norm, forward
//! and backward. The table stays in L2.

use crate::column_sum;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, SharedArray, device, kernel, math, thread, warp};

/// Warps of a block of the forward kernels. More small blocks than large ones fit in an SM's registers.
const FORWARD_WARPS: u32 = 128 / warp::LANES;
/// Threads of a block of [`rotary_norm_backward`].
const THREADS: u32 = 256;
const WARPS: u32 = THREADS / warp::LANES;
/// Heads that a slot processes at a time in [`rotary`].
const BATCH: usize = 4;
/// Heads that a slot processes at a time in the kernels with a norm, which need more registers for each.
const NORM_BATCH: usize = 2;

/// Returns whether the kernels support heads of `head_size` channels.
pub const fn supports(head_size: usize) -> bool {
    head_size > 0 && head_size.is_multiple_of(16) && head_size <= 256
}

/// The sizes of qkv. Passed to the kernels by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Sizes {
    /// B * T.
    pub rows: u32,
    /// T.
    pub sequence: u32,
    /// NH.
    pub heads: u32,
    /// KV.
    pub kv_heads: u32,
    /// HS.
    pub head_size: u32,
}

impl Sizes {
    /// Returns the slots for queries and keys together.
    const fn rotated<T: Element>(self, batch: usize) -> Slots {
        Slots::new::<T>(self, 0, self.heads + self.kv_heads, batch as u32)
    }

    /// Returns the grid size of [`rotary`], one warp per unit.
    pub const fn grid<T: Element>(self) -> u32 {
        self.rotated::<T>(BATCH).units(self.rows).div_ceil(FORWARD_WARPS)
    }

    /// Returns the grid size of [`rotary_norm_forward`], one warp per unit.
    pub const fn norm_grid<T: Element>(self) -> u32 {
        self.rotated::<T>(NORM_BATCH).units(self.rows).div_ceil(FORWARD_WARPS)
    }

    /// Returns the slots of [`rotary_norm_backward`] for queries or keys.
    const fn backward_slots<T: Element>(self, keys: bool) -> Slots {
        let (first, heads) = if keys { (self.heads, self.kv_heads) } else { (0, self.heads) };
        Slots::new::<T>(self, first, heads, NORM_BATCH as u32)
    }
}

/// The distribution of a range of heads over a warp.
#[derive(Clone, Copy)]
struct Slots {
    /// First head.
    first: u32,
    /// Number of heads.
    heads: u32,
    /// log2 of the lanes of a slot.
    lane_shift: u32,
    /// log2 of the slots that hold heads of the same row.
    head_shift: u32,
    /// Units of a row: a warp processes one unit at a time, which is a batch of heads of each slot.
    chunks: u32,
}

#[device]
impl Slots {
    const fn new<T: Element>(sizes: Sizes, first: u32, heads: u32, batch: u32) -> Self {
        let lane_shift = (sizes.head_size / (2 * T::PACKET as u32)).next_power_of_two().trailing_zeros();
        // With few heads, the slots of a warp hold several rows.
        let (slot_shift, needed) = (5 - lane_shift, heads.next_power_of_two().trailing_zeros());
        let head_shift = if needed < slot_shift { needed } else { slot_shift };
        // A shift, because a division checks for 0.
        let chunks = ((heads + (1 << head_shift) - 1) >> head_shift).div_ceil(batch);
        Self { first, heads, lane_shift, head_shift, chunks }
    }

    /// Returns log2 of the rows of a unit.
    const fn row_shift(self) -> u32 {
        5 - self.lane_shift - self.head_shift
    }

    /// Returns the number of units of `rows` rows.
    const fn units(self, rows: u32) -> u32 {
        rows.div_ceil(1 << self.row_shift()) * self.chunks
    }
}

/// The heads that the calling lane's slot processes in a unit, and the lane's part of them.
#[derive(Clone, Copy)]
struct Unit<T, const INTERLEAVED: bool> {
    row: usize,
    /// First head of the batch.
    head: u32,
    /// Distance of the heads of the batch.
    stride: u32,
    /// Number of heads of the batch that exist; 0 for lanes past the end of a head and slots past the last row.
    count: u32,
    /// Index of the lane's part of a head.
    part: usize,
    head_size: usize,
    lane_shift: u32,
    element: core::marker::PhantomData<T>,
}

/// A lane's part of a head.
type Part<T> = [Packet<T>; 2];

#[device]
impl<T: Element, const INTERLEAVED: bool> Unit<T, INTERLEAVED> {
    fn new(unit: u32, slots: Slots, sizes: Sizes) -> Self {
        let lane = warp::lane();
        let (slot, part) = (lane >> slots.lane_shift, lane & ((1 << slots.lane_shift) - 1));
        let (block, chunk) = (unit / slots.chunks.max(1), unit % slots.chunks.max(1));
        let row = (block << slots.row_shift()) + (slot >> slots.head_shift);
        let first = (chunk << slots.head_shift) + (slot & ((1 << slots.head_shift) - 1));
        let stride = slots.chunks << slots.head_shift;
        let exists = row < sizes.rows && part * (2 * T::PACKET as u32) < sizes.head_size && first < slots.heads;
        Self {
            row: row as usize,
            head: slots.first + first,
            stride,
            count: if exists { (slots.heads - first).div_ceil(stride.max(1)) } else { 0 },
            part: part as usize,
            head_size: sizes.head_size as usize,
            lane_shift: slots.lane_shift,
            element: core::marker::PhantomData,
        }
    }

    /// Returns the distance of the lane's packets in a head.
    fn distance(self) -> usize {
        if INTERLEAVED { T::PACKET } else { self.head_size / 2 }
    }

    /// Returns the first channel of the lane's first packet.
    fn channel(self) -> usize {
        self.part * T::PACKET * if INTERLEAVED { 2 } else { 1 }
    }

    /// Returns the index of the lane's first packet in head `k` of the batch, in a tensor with rows of `heads` heads.
    fn index(self, heads: u32, k: usize) -> usize {
        let head = (self.head + k as u32 * self.stride) as usize;
        (self.row * heads as usize + head) * self.head_size + self.channel()
    }

    /// Loads the lane's part of each head of the batch from a tensor with rows of `heads` heads; zeros where there is
    /// none. `packet` loads from an index.
    fn load<const BATCH: usize>(self, heads: u32, packet: impl Fn(usize) -> Packet<T>) -> [Part<T>; BATCH] {
        let mut parts = [[Packet::zero(); 2]; BATCH];
        let load = |k: usize| [packet(self.index(heads, k)), packet(self.index(heads, k) + self.distance())];
        // With a condition per load, ptxas would interleave loads and their uses.
        if self.count as usize >= BATCH {
            for k in 0..BATCH {
                parts[k] = load(k);
            }
        } else {
            for k in 0..BATCH {
                if k < self.count as usize {
                    parts[k] = load(k);
                }
            }
        }
        parts
    }

    /// Returns the cosines and sines of the lane's pairs, the sines multiplied by `sign`.
    fn angles(self, table: Global<f32>, sequence: u32, sign: f32) -> Angles {
        let mut angles = Angles { cos: [1.0; 8], sin: [0.0; 8] };
        if self.count > 0 {
            let position = (self.row as u32 % sequence.max(1)) as usize;
            let first = position * self.head_size + self.part * 2 * T::PACKET;
            for packet in 0..T::PACKET / 2 {
                let four = table.packet(first + packet * f32::PACKET);
                for i in 0..2 {
                    angles.cos[packet * 2 + i] = four.get(2 * i);
                    angles.sin[packet * 2 + i] = four.get(2 * i + 1) * sign;
                }
            }
        }
        angles
    }

    /// Loads the lane's part of a weight.
    fn weights(self, weight: Global<T>) -> Part<T> {
        // Lanes past the end of a head load the first part. They do not use its values.
        let at = if self.count > 0 { self.channel() } else { 0 };
        [weight.packet(at), weight.packet(at + self.distance())]
    }

    /// Converts a part to f32: the lane's channels in ascending order.
    fn widen(part: &Part<T>) -> [f32; 16] {
        let mut values = [0.0; 16];
        for i in 0..T::PACKET {
            values[i] = part[0].get(i);
            values[T::PACKET + i] = part[1].get(i);
        }
        values
    }

    /// Stores `values` as the lane's part at `index`.
    fn store(self, to: GlobalMut<T>, index: usize, values: &[f32; 16]) {
        to.set_packet(index, Packet::from_fn(|i| values[i]));
        to.set_packet(index + self.distance(), Packet::from_fn(|i| values[T::PACKET + i]));
    }

    /// Rotates the lane's pairs.
    fn rotate(x: &[f32; 16], angles: &Angles) -> [f32; 16] {
        let mut rotated = [0.0; 16];
        for i in 0..T::PACKET {
            let (a, b) = if INTERLEAVED { (2 * i, 2 * i + 1) } else { (i, T::PACKET + i) };
            let (cos, sin) = (angles.cos[i], angles.sin[i]);
            rotated[a] = math::fma(x[a], cos, -(x[b] * sin));
            rotated[b] = math::fma(x[b], cos, x[a] * sin);
        }
        rotated
    }

    /// Returns the sums of values over the lanes of each slot.
    fn sums<const N: usize>(self, mut values: [f32; N]) -> [f32; N] {
        let mut offset = (1 << self.lane_shift) / 2;
        while offset > 0 {
            for value in &mut values {
                *value += warp::shuffle_xor(*value, offset);
            }
            offset /= 2;
        }
        values
    }
}

/// The cosines and sines of a lane's pairs.
struct Angles {
    cos: [f32; 8],
    sin: [f32; 8],
}

/// Returns the sum of products of a lane's channels.
#[inline(always)]
fn dot(x: &[f32; 16], y: &[f32; 16]) -> f32 {
    let mut sum = 0.0;
    for i in 0..16 {
        sum = math::fma(x[i], y[i], sum);
    }
    sum
}

/// Rotates the queries and keys of qkv (B, T, H, HS) by the angles of `table` (T, HS/2, 2), in place.
///
/// `sign` is 1, or -1 to rotate back. Grid: [`Sizes::grid`].
#[kernel(
    threads = 128,
    instances([bf16 = cuda_std::bf16, f32 = f32] * [_ = false, interleaved = true])
)]
pub fn rotary<T: Element, const INTERLEAVED: bool>(qkv: GlobalMut<T>, table: Global<f32>, sizes: Sizes, sign: f32) {
    let slots = sizes.rotated::<T>(BATCH);
    let unit = Unit::<T, INTERLEAVED>::new(thread::block_idx_x() * FORWARD_WARPS + warp::index(), slots, sizes);
    let packed = sizes.heads + 2 * sizes.kv_heads;
    let parts: [_; BATCH] = unit.load(packed, |i| qkv.packet(i));
    let angles = unit.angles(table, sizes.sequence, sign);
    for k in 0..BATCH {
        if k < unit.count as usize {
            let rotated = Unit::<T, INTERLEAVED>::rotate(&Unit::<T, INTERLEAVED>::widen(&parts[k]), &angles);
            unit.store(qkv, unit.index(packed, k), &rotated);
        }
    }
}

/// The scalars of the norm. Passed to the kernels by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NormScalars {
    /// Added to the mean square.
    pub eps: f32,
    /// Factor of the normalized queries and keys.
    pub gain: f32,
}

impl NormScalars {
    /// Returns the reciprocal root mean square of a head with this sum of squares.
    #[inline(always)]
    fn reciprocal_rms(self, squares: f32, head_size: u32) -> f32 {
        math::rsqrt(math::fma(squares, math::recip(head_size as f32), self.eps))
    }
}

/// Normalizes the queries and keys of qkv (B, T, H, HS), then rotates them, in place.
///
/// A head x becomes x / rms(x) * gain * weight. The weights of queries and keys may be null, which means ones. Copies
/// the queries and keys before the norm to saved (B, T, NH + KV, HS). Grid: [`Sizes::norm_grid`].
#[kernel(
    threads = 128,
    blocks_per_sm = 5,
    instances([bf16 = cuda_std::bf16, f32 = f32] * [_ = false, interleaved = true])
)]
pub fn rotary_norm_forward<T: Element, const INTERLEAVED: bool>(
    qkv: GlobalMut<T>,
    saved: GlobalMut<T>,
    table: Global<f32>,
    q_weight: Global<T>,
    k_weight: Global<T>,
    sizes: Sizes,
    norm: NormScalars,
) {
    let slots = sizes.rotated::<T>(NORM_BATCH);
    let unit = Unit::<T, INTERLEAVED>::new(thread::block_idx_x() * FORWARD_WARPS + warp::index(), slots, sizes);
    let (packed, kept) = (sizes.heads + 2 * sizes.kv_heads, sizes.heads + sizes.kv_heads);
    let parts: [_; NORM_BATCH] = unit.load(packed, |i| qkv.packet(i));
    let angles = unit.angles(table, sizes.sequence, 1.0);
    let mut sums = [0.0; NORM_BATCH];
    for k in 0..NORM_BATCH {
        let x = Unit::<T, INTERLEAVED>::widen(&parts[k]);
        sums[k] = dot(&x, &x);
        if k < unit.count as usize {
            let at = unit.index(kept, k);
            saved.set_packet_streaming(at, parts[k][0]);
            saved.set_packet_streaming(at + unit.distance(), parts[k][1]);
        }
    }
    let sums = unit.sums(sums);
    for k in 0..NORM_BATCH {
        if k < unit.count as usize {
            let is_query = unit.head + k as u32 * unit.stride < sizes.heads;
            let weight = if is_query { q_weight } else { k_weight };
            let mut weights = [1.0; 16];
            if !weight.is_null() {
                weights = Unit::<T, INTERLEAVED>::widen(&unit.weights(weight));
            }
            let scale = norm.reciprocal_rms(sums[k], sizes.head_size) * norm.gain;
            // Converts again instead of keeping the f32 values of the whole batch in registers during the reduction.
            let mut x = Unit::<T, INTERLEAVED>::widen(&parts[k].map(Packet::opaque));
            for i in 0..16 {
                x[i] *= scale * weights[i];
            }
            unit.store(qkv, unit.index(packed, k), &Unit::<T, INTERLEAVED>::rotate(&x, &angles));
        }
    }
}

/// The grid of [`rotary_norm_backward`], a persistent kernel. Passed to it by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Blocks {
    /// Blocks that process queries; the others process keys.
    pub queries: u32,
    /// Blocks that process keys.
    pub keys: u32,
}

impl Blocks {
    /// Distributes the resident blocks of `sm_count` SMs over queries and keys.
    pub fn new<T: Element>(sizes: Sizes, sm_count: usize) -> Self {
        let resident = 2 * sm_count as u32;
        let queries = sizes.backward_slots::<T>(false).units(sizes.rows).div_ceil(WARPS);
        let keys = sizes.backward_slots::<T>(true).units(sizes.rows).div_ceil(WARPS);
        if queries + keys <= resident {
            return Self { queries, keys };
        }
        let keys = ((keys as u64 * resident as u64 / (queries + keys) as u64) as u32).max(1);
        Self { queries: resident - keys, keys }
    }

    /// Returns the grid size.
    pub const fn grid(self) -> u32 {
        self.queries + self.keys
    }

    /// Returns the number of f32 elements of `partials`.
    pub const fn partials(self, head_size: usize) -> usize {
        self.grid() as usize * head_size
    }
}

/// Lays out the shared memory of [`rotary_norm_backward`] with WEIGHTED: the sums of each thread's channels.
pub fn rotary_norm_backward_shared<T: Element>(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(THREADS as usize * 2 * T::PACKET)
}

/// Computes the gradient of [`rotary_norm_forward`]: rotates dqkv (B, T, H, HS) back, then propagates it through the norm.
///
/// `saved` is that of the forward pass. With WEIGHTED, also computes partials (blocks, HS) f32 for
/// [`rotary_norm_backward_reduce`]: each block's part of a weight gradient, of the queries' weight in the first
/// [`Blocks::queries`] rows and of the keys' in the others. Otherwise the weights and `partials` may be null. Grid:
/// [`Blocks::grid`]. Shared memory: [`rotary_norm_backward_shared`] with WEIGHTED, otherwise none.
#[kernel(
    threads = 256,
    blocks_per_sm = 2,
    instances([bf16 = cuda_std::bf16, f32 = f32] * [_ = false, interleaved = true] * [_ = false, weighted = true])
)]
pub fn rotary_norm_backward<T: Element, const INTERLEAVED: bool, const WEIGHTED: bool>(
    dqkv: GlobalMut<T>,
    partials: GlobalMut<f32>,
    saved: Global<T>,
    table: Global<f32>,
    q_weight: Global<T>,
    k_weight: Global<T>,
    sizes: Sizes,
    norm: NormScalars,
    blocks: Blocks,
) {
    let keys = thread::block_idx_x() >= blocks.queries;
    let (block, of_kind) = if keys {
        (thread::block_idx_x() - blocks.queries, blocks.keys)
    } else {
        (thread::block_idx_x(), blocks.queries)
    };
    let slots = sizes.backward_slots::<T>(keys);
    let weight = if keys { k_weight } else { q_weight };
    let mut sums = [0.0; 16];
    let units = slots.units(sizes.rows);
    let mut index = block * WARPS + warp::index();
    while index < units {
        let unit = Unit::<T, INTERLEAVED>::new(index, slots, sizes);
        add_unit::<T, INTERLEAVED, WEIGHTED>(unit, dqkv, saved, table, weight, (sizes, norm), &mut sums);
        index += of_kind * WARPS;
    }
    if WEIGHTED {
        store_block_sums::<T, INTERLEAVED>(&sums, partials, slots, sizes.head_size as usize);
    }
}

/// Computes the gradient of one unit, and adds its weight gradient to the lane's `sums`.
#[inline(always)]
fn add_unit<T: Element, const INTERLEAVED: bool, const WEIGHTED: bool>(
    unit: Unit<T, INTERLEAVED>,
    dqkv: GlobalMut<T>,
    saved: Global<T>,
    table: Global<f32>,
    weight: Global<T>,
    (sizes, norm): (Sizes, NormScalars),
    sums: &mut [f32; 16],
) {
    let (packed, kept) = (sizes.heads + 2 * sizes.kv_heads, sizes.heads + sizes.kv_heads);
    let gradients: [_; NORM_BATCH] = unit.load(packed, |i| dqkv.packet(i));
    let inputs: [_; NORM_BATCH] = unit.load(kept, |i| saved.packet_streaming(i));
    let angles = unit.angles(table, sizes.sequence, -1.0);
    let weights = if WEIGHTED { unit.weights(weight) } else { [Packet::zero(); 2] };
    let weights = || if WEIGHTED { Unit::<T, INTERLEAVED>::widen(&weights.map(Packet::opaque)) } else { [1.0; 16] };
    let mut rotated = [[0.0; 16]; NORM_BATCH];
    let mut reduced = [0.0; 2 * NORM_BATCH];
    for k in 0..NORM_BATCH {
        let x = Unit::<T, INTERLEAVED>::widen(&inputs[k]);
        rotated[k] = Unit::<T, INTERLEAVED>::rotate(&Unit::<T, INTERLEAVED>::widen(&gradients[k]), &angles);
        let (mut weighted, weights) = (rotated[k], weights());
        for i in 0..16 {
            weighted[i] *= weights[i];
        }
        reduced[2 * k] = dot(&x, &x);
        reduced[2 * k + 1] = dot(&weighted, &x);
    }
    let reduced = unit.sums(reduced);
    for k in 0..NORM_BATCH {
        if k < unit.count as usize {
            let x = Unit::<T, INTERLEAVED>::widen(&inputs[k].map(Packet::opaque));
            let weights = weights();
            let rms = norm.reciprocal_rms(reduced[2 * k], sizes.head_size);
            // dx = scale (d - n mean(d n)), with n = x rms and d = rotated * weights.
            let mean = reduced[2 * k + 1] * math::recip(sizes.head_size as f32);
            let (scale, factor) = (rms * norm.gain, -(rms * rms) * mean);
            let mut dx = [0.0; 16];
            for i in 0..16 {
                dx[i] = scale * math::fma(x[i], factor, rotated[k][i] * weights[i]);
                if WEIGHTED {
                    sums[i] = math::fma(rotated[k][i], x[i] * scale, sums[i]);
                }
            }
            unit.store(dqkv, unit.index(packed, k), &dx);
        }
    }
}

/// Adds the sums of all threads of the block and stores them as the block's row of partials (blocks, HS).
#[inline(always)]
fn store_block_sums<T: Element, const INTERLEAVED: bool>(
    sums: &[f32; 16],
    partials: GlobalMut<f32>,
    slots: Slots,
    head_size: usize,
) {
    let scratch = rotary_norm_backward_shared::<T>(&mut Layout::new());
    let thread = thread::thread_idx_x() as usize;
    for i in 0..2 * T::PACKET {
        scratch.set(i * THREADS as usize + thread, sums[i]);
    }
    thread::sync_threads();
    if thread < head_size {
        let (half, in_half) =
            if INTERLEAVED { (0, thread) } else { (thread / (head_size / 2), thread % (head_size / 2)) };
        let per_part = if INTERLEAVED { 2 * T::PACKET } else { T::PACKET };
        let (part, i) = (in_half / per_part, half * T::PACKET + in_half % per_part);
        let mut total = 0.0;
        let mut lane = part;
        while lane < THREADS as usize {
            total += scratch.at(i * THREADS as usize + lane);
            lane += 1 << slots.lane_shift;
        }
        partials.set(thread::block_idx_x() as usize * head_size + thread, total);
    }
}

/// Adds the sums of the rows of `partials` to the gradients of the weights, dq_weight and dk_weight (HS).
///
/// Grid: ([`column_sum::grid`] of HS, 2). Shared memory: [`column_sum::shared`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn rotary_norm_backward_reduce<T: Element>(
    dq_weight: GlobalMut<T>,
    dk_weight: GlobalMut<T>,
    partials: Global<f32>,
    blocks: Blocks,
    head_size: u32,
) {
    let keys = thread::block_idx_y() == 1;
    let columns = head_size as usize;
    let (first, rows) = if keys { (blocks.queries, blocks.keys) } else { (0, blocks.queries) };
    let partials = partials.skip(first as usize * columns);
    if let Some((column, sum)) = column_sum::column_sum(partials, rows as usize, columns) {
        let to = if keys { dk_weight } else { dq_weight };
        to.set(column, T::from_f32(to.at(column).to_f32() + sum));
    }
}
