//! Token and position embedding: `out[b, t] = wte[token[b, t]] + wpe[t]`, without the second term if POSITIONS is false.
//!
//! Instances without positions neither read wpe nor write dwpe, which may be null. All others are those of GPT-2.
//!
//! Shapes: tokens (B, T) i32 in 0..V, wte (V, C), wpe (at least T, C), out and dout (B, T, C). C is a multiple of the
//! packet, and B * T is below 2^31.
//!
//! The gradient of wte is a sum of rows of dout per token, a segmented reduction. It is deterministic and needs no
//! float atomics, because the host provides the segments: `order` holds the positions 0..B*T stably sorted by token,
//! and `sorted` their tokens. A run is a maximal sequence of equal tokens in `sorted`.
//!
//! Both arrays are split into chunks of [`encoder_backward_chunk`] positions, independent of the tokens, so a token
//! that fills half of the batch causes no load imbalance. A run inside one chunk is added directly to dwte. A run that
//! crosses a chunk boundary leaves one partial sum per chunk in `partials`, which a second kernel reduces.
//!
//! `partials` has shape (chunks, 2, C) f32. Row 0 is the sum of the chunk's first run if that run began in an earlier
//! chunk. Row 1 is the sum of its last run if that run began here and continues in the next chunk. All other rows are
//! neither written nor read.
//!
//! Gradients are summed in f32 and added to the stored gradient with stochastic rounding ([`crate::noise`]). With
//! round-to-nearest, small gradients of rare tokens would be lost. The seed (1) is read from device memory, so each
//! replay of a CUDA graph can use another seed.

use crate::noise;
use cuda_std::shared::Layout;
use cuda_std::{CachePolicy, Element, Global, GlobalMut, Packet, SharedArray, device, kernel, thread, warp};

const THREADS: u32 = 256;
const WARPS: usize = (THREADS / warp::LANES) as usize;
const LANES: usize = warp::LANES as usize;

/// Resident blocks of [`encoder_backward_wte`] per SM.
const BLOCKS_PER_SM: usize = 4;

/// Fraction of dout that L2 should keep from [`encoder_backward_wte`] until [`encoder_backward_rest`].
const KEPT: f32 = 0.2;

/// Rows that a warp loads before it sums them.
const BATCH: usize = 4;

/// Returns the grid size of [`encoder_forward`] for B * T positions.
pub const fn encoder_forward_grid(positions: usize) -> u32 {
    positions.div_ceil(WARPS) as u32
}

/// Computes out (B, T, C) = `wte[tokens] + wpe`, or `wte[tokens]` without POSITIONS.
///
/// `positions` is B * T. One warp per position. Grid: [`encoder_forward_grid`].
#[kernel(threads = 256, instances([bf16 = cuda_std::bf16, f32 = f32] * [_ = true, tokens_only = false]))]
pub fn encoder_forward<T: Element, const POSITIONS: bool>(
    out: GlobalMut<T>,
    tokens: Global<i32>,
    wte: Global<T>,
    wpe: Global<T>,
    positions: u32,
    sequence: u32,
    channels: u32,
) {
    let position = thread::block_idx_x() as usize * WARPS + warp::index() as usize;
    if position >= positions as usize {
        return;
    }
    let channels = channels as usize;
    let out = out.skip(position * channels);
    let token = wte.skip(tokens.at(position) as usize * channels);
    let place = wpe.skip((position as u32 % sequence.max(1)) as usize * channels);
    let mut column = warp::lane() as usize * T::PACKET;
    while column < channels {
        if POSITIONS {
            let (a, b) = (token.packet(column), place.packet(column));
            out.set_packet(column, Packet::from_fn(|k| a.get(k) + b.get(k)));
        } else {
            out.set_packet(column, token.packet(column));
        }
        column += LANES * T::PACKET;
    }
}

/// Returns the number of positions per chunk, fewer than the lanes of a warp.
///
/// Chooses the length with the least wave quantization of [`encoder_backward_wte`]: the fewest SMs idle in its last
/// wave.
pub fn encoder_backward_chunk<T: Element>(positions: usize, channels: usize, sm_count: usize) -> usize {
    let resident = (sm_count * BLOCKS_PER_SM) as u32;
    let utilization = |chunk: usize| {
        let blocks = encoder_backward_wte_grid::<T>(positions, channels, chunk);
        blocks as f32 / blocks.next_multiple_of(resident) as f32
    };
    let mut best = 2 * BATCH;
    for chunk in (3 * BATCH..LANES).step_by(BATCH) {
        // Prefers long chunks: fewer runs cross them, and they amortize the setup before the first load.
        if utilization(chunk) > utilization(best) - 0.02 {
            best = chunk;
        }
    }
    best
}

/// Returns the number of f32 elements of `partials` for chunks of `chunk` positions.
pub const fn encoder_backward_partials(positions: usize, channels: usize, chunk: usize) -> usize {
    positions.div_ceil(chunk) * 2 * channels
}

/// Returns the number of channel groups: 32 packets each, one per lane.
const fn groups<T: Element>(channels: usize) -> usize {
    channels.div_ceil(LANES * T::PACKET)
}

/// Returns the grid size of [`encoder_backward_wte`].
pub const fn encoder_backward_wte_grid<T: Element>(positions: usize, channels: usize, chunk: usize) -> u32 {
    (positions.div_ceil(chunk) * groups::<T>(channels)).div_ceil(WARPS) as u32
}

/// The sizes that [`encoder_backward_wte`] takes. Passed to the kernel by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct WteSizes {
    /// B * T.
    pub positions: u32,
    /// C.
    pub channels: u32,
    /// Positions per chunk, from [`encoder_backward_chunk`].
    pub chunk_len: u32,
}

/// Adds rows of dout (B, T, C) to the rows of dwte (V, C) of their tokens, for runs inside one chunk.
///
/// Sums of runs that cross chunks go to `partials` ([`encoder_backward_partials`] elements, which may be uninitialized)
/// for [`encoder_backward_rest`]. One warp per chunk and group of 32 packets of channels. Grid:
/// [`encoder_backward_wte_grid`].
#[kernel(threads = 256, blocks_per_sm = 4, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn encoder_backward_wte<T: Element>(
    dwte: GlobalMut<T>,
    partials: GlobalMut<f32>,
    dout: Global<T>,
    order: Global<i32>,
    sorted: Global<i32>,
    seed: Global<i32>,
    sizes: WteSizes,
) {
    let WteSizes { positions, channels, chunk_len } = sizes;
    let (positions, channels, lane) = (positions as usize, channels as usize, warp::lane() as usize);
    let groups = (groups::<T>(channels) as u32).max(1);
    let unit = thread::block_idx_x() * WARPS as u32 + warp::index();
    let (chunk, group) = ((unit / groups) as usize, (unit % groups) as usize);
    let begin = chunk * chunk_len as usize;
    if begin >= positions {
        return;
    }
    let seed = seed.at(0) as u32;
    let (kept, once) = (CachePolicy::evict_last(KEPT), CachePolicy::evict_first());
    let count = (positions - begin).min(chunk_len as usize);
    let token_at = |i: usize| sorted.at(i) as u32;
    let before = if begin > 0 { token_at(begin - 1) } else { u32::MAX };
    let after = if begin + count < positions { token_at(begin + count) } else { u32::MAX };
    let (mut position, mut token) = (0, 0);
    if lane < count {
        position = order.at(begin + lane) as u32;
        token = token_at(begin + lane);
    }

    let column = (group * LANES + lane) * T::PACKET;
    let active = column < channels;
    let mut sum = Sum::<T>::zero();
    let mut first = 0;
    while first < count {
        // The destination rows are loaded together with the rows of dout, to overlap their latency with the additions.
        let mut rows = [Packet::zero(); BATCH];
        for k in 0..BATCH {
            let row = warp::shuffle(position, (first + k) as u32) as usize;
            if active && first + k < count {
                rows[k] = dout.packet_streaming_with(row * channels + column, kept);
            }
        }
        let mut old = [Packet::zero(); BATCH];
        let mut ends = [End::Continues; BATCH];
        for k in 0..BATCH {
            let i = first + k;
            let this = warp::shuffle(token, i as u32);
            let next = warp::shuffle(token, (i + 1) as u32 % warp::LANES);
            let last = i + 1 == count;
            if i < count && (last || next != this) {
                ends[k] = if this == before {
                    End::Partial(chunk as u32 * 2)
                } else if last && this == after {
                    End::Partial(chunk as u32 * 2 + 1)
                } else {
                    End::Token(this)
                };
            }
            if let End::Token(token) = ends[k]
                && active
            {
                old[k] = dwte.packet_with(token as usize * channels + column, once);
            }
        }
        for k in 0..BATCH {
            sum.add(&rows[k]);
            match ends[k] {
                End::Continues => continue,
                End::Partial(row) if active => sum.store(partials, row as usize * channels + column),
                End::Token(token) if active => sum.add_to(&old[k], dwte, token as usize * channels + column, seed),
                _ => {}
            }
            sum = Sum::zero();
        }
        first += BATCH;
    }
}

/// Chunks of a set: a block of [`encoder_backward_rest`] reduces the runs that begin in one set.
const SET: usize = LANES;

/// Returns the grid size of [`encoder_backward_rest`].
pub const fn encoder_backward_rest_grid<T: Element, const POSITIONS: bool>(
    batch: usize,
    sequence: usize,
    channels: usize,
    chunk: usize,
) -> u32 {
    let positions = if POSITIONS { position_blocks::<T>(sequence, channels) } else { 0 };
    (run_blocks::<T>(batch * sequence, channels, chunk) + positions) as u32
}

/// Returns the number of blocks that reduce runs: one per [`SET`] chunks and group of 32 packets of channels.
const fn run_blocks<T: Element>(positions: usize, channels: usize, chunk: usize) -> usize {
    groups::<T>(channels) * positions.div_ceil(chunk).div_ceil(SET)
}

/// Returns the number of blocks that compute dwpe: one thread per packet.
const fn position_blocks<T: Element>(sequence: usize, channels: usize) -> usize {
    (sequence * channels / T::PACKET).div_ceil(THREADS as usize)
}

/// Shared memory of [`encoder_backward_rest`].
#[derive(Clone, Copy)]
pub struct Shared {
    /// The sums of each warp.
    sums: SharedArray<f32>,
    /// The first token of each of [`INSPECTED`] chunks.
    firsts: SharedArray<u32>,
    /// The token before each of these, at the end of the previous chunk.
    befores: SharedArray<u32>,
    /// For each chunk of the set: the number of further chunks that its last run covers if that exceeds [`WARPS`], else
    /// 0.
    long: SharedArray<u32>,
}

/// Chunks whose first token a block inspects: its set, and the following chunks that a short run may reach.
const INSPECTED: usize = SET + WARPS + 1;
/// Marks the absence of a token.
const NONE: u32 = u32::MAX;

/// Lays out the shared memory of [`encoder_backward_rest`].
pub fn encoder_backward_rest_shared<T: Element>(layout: &mut Layout) -> Shared {
    Shared {
        sums: layout.array(THREADS as usize * T::PACKET),
        firsts: layout.array(INSPECTED),
        befores: layout.array(INSPECTED),
        long: layout.array(SET),
    }
}

/// Completes the backward pass after [`encoder_backward_wte`].
///
/// Adds the partial sums of the runs that cross chunks to dwte (V, C), and the sum over b of dout (B, T, C) to dwpe (T,
/// C). The runs are latency-bound: a few dependent loads. dwpe is bandwidth-bound. Blocks of the two kinds alternate in
/// the grid, so that they overlap. Without POSITIONS, all blocks reduce runs. `chunk_len` is the number of positions per
/// chunk, as in [`WteSizes`]. Grid: [`encoder_backward_rest_grid`]. Shared memory: [`encoder_backward_rest_shared`].
#[kernel(
    threads = 256,
    instances(
        bf16 = <cuda_std::bf16, true>,
        f32 = <f32, true>,
        bf16_tokens_only = <cuda_std::bf16, false>(blocks_per_sm = 3),
        f32_tokens_only = <f32, false>,
    )
)]
pub fn encoder_backward_rest<T: Element, const POSITIONS: bool>(
    dwte: GlobalMut<T>,
    dwpe: GlobalMut<T>,
    partials: Global<f32>,
    dout: Global<T>,
    sorted: Global<i32>,
    seed: Global<i32>,
    batch: u32,
    sequence: u32,
    channels: u32,
    chunk_len: u32,
) {
    let seed = seed.at(0) as u32;
    let (batch, sequence, channels, chunk_len) =
        (batch as usize, sequence as usize, channels as usize, chunk_len as usize);
    let gradient = WteGradient { dwte, partials, channels, seed };
    if !POSITIONS {
        gradient.add_runs(thread::block_idx_x() as usize, sorted, batch * sequence, chunk_len);
        return;
    }
    let runs = run_blocks::<T>(batch * sequence, channels, chunk_len.max(1));
    let places = position_blocks::<T>(sequence, channels);
    let (block, of_each) = (thread::block_idx_x() as usize, runs.min(places));
    let (reduces_runs, index) =
        if block < 2 * of_each { (block.is_multiple_of(2), block / 2) } else { (runs > places, block - of_each) };
    if reduces_runs {
        gradient.add_runs(index, sorted, batch * sequence, chunk_len);
    } else {
        // The inverted seed keeps elements with the same index in dwte and dwpe from getting the same random bits.
        add_positions::<T>(index, dwpe, dout, batch, sequence, channels, !seed);
    }
}

/// The gradient of wte in [`encoder_backward_rest`], with what is added to it.
#[derive(Clone, Copy)]
struct WteGradient<T> {
    dwte: GlobalMut<T>,
    partials: Global<f32>,
    channels: usize,
    seed: u32,
}

#[device]
impl<T: Element> WteGradient<T> {
    /// Adds the runs that begin in one of [`SET`] chunks and continue in the next to dwte.
    ///
    /// The warps distribute the short runs among themselves. All warps together reduce each long run.
    fn add_runs(self, block: usize, sorted: Global<i32>, positions: usize, chunk_len: usize) {
        let Self { dwte, partials, channels, seed } = self;
        let shared = encoder_backward_rest_shared::<T>(&mut Layout::new());
        let (lane, warp) = (warp::lane() as usize, warp::index() as usize);
        let groups = (groups::<T>(channels) as u32).max(1);
        let (set, group) = ((block as u32 / groups) as usize, (block as u32 % groups) as usize);
        let first_chunk = set * SET;
        let token_at = |i: usize| sorted.at(i) as u32;
        let column = (group * LANES + lane) * T::PACKET;
        let active = column < channels;

        let thread = thread::thread_idx_x() as usize;
        if thread < INSPECTED {
            let begin = (first_chunk + thread) * chunk_len;
            let exists = begin < positions;
            shared.firsts.set(thread, if exists { token_at(begin) } else { NONE });
            shared.befores.set(thread, if exists && begin > 0 { token_at(begin - 1) } else { NONE });
        }
        if thread < SET {
            shared.long.set(thread, 0);
        }
        thread::sync_threads();

        // Most runs are short. Each warp adds every eighth.
        let token = shared.firsts.at(lane + 1);
        let leaves = token != NONE && shared.befores.at(lane + 1) == token && shared.befores.at(lane) != token;
        let mut left = warp::ballot(leaves);
        let mut seen = 0;
        while left != 0 {
            let of_set = left.trailing_zeros() as usize;
            left &= left - 1;
            seen += 1;
            if seen % WARPS != warp {
                continue;
            }
            let (chunk, token) = (first_chunk + of_set, shared.firsts.at(of_set + 1));
            let mut heads = 1;
            while heads <= WARPS && shared.firsts.at(of_set + 1 + heads) == token {
                heads += 1;
            }
            if heads > WARPS {
                let heads = heads_of_run(chunk + 1, token, positions, chunk_len, token_at);
                if lane == 0 {
                    shared.long.set(of_set, heads as u32);
                }
            } else if active {
                let at = token as usize * channels + column;
                let old = dwte.packet(at);
                let mut sum = Sum::<T>::zero();
                sum.add_stored(&Stored::load::<T>(partials, (chunk * 2 + 1) * channels + column));
                for head in 0..heads {
                    sum.add_stored(&Stored::load::<T>(partials, (chunk + 1 + head) * 2 * channels + column));
                }
                sum.add_to(&old, dwte, at, seed);
            }
        }
        thread::sync_threads();

        let mut left = warp::ballot(shared.long.at(lane) != 0);
        while left != 0 {
            let of_set = left.trailing_zeros() as usize;
            left &= left - 1;
            let (chunk, heads) = (first_chunk + of_set, shared.long.at(of_set) as usize);
            let at = shared.firsts.at(of_set + 1) as usize * channels + column;
            self.add_long_run([chunk, heads, at, column], active, shared.sums);
        }
    }

    /// Adds the partial sums of a long run to dwte. All warps of the block reduce it together.
    ///
    /// The run begins in `chunk`, and `heads` further chunks begin with it. The calling lane computes the packet of the channels from
    /// `column` on, if it is `active`, at index `at` in dwte.
    fn add_long_run(self, [chunk, heads, at, column]: [usize; 4], active: bool, sums: SharedArray<f32>) {
        let Self { dwte, partials, channels, seed } = self;
        let (lane, warp) = (warp::lane() as usize, warp::index() as usize);
        let mut sum = Sum::<T>::zero();
        if active {
            if warp == 0 {
                sum.add_stored(&Stored::load::<T>(partials, (chunk * 2 + 1) * channels + column));
            }
            let part = |head: usize| (chunk + 1 + head) * 2 * channels + column;
            let mut head = warp;
            while head + (BATCH - 1) * WARPS < heads {
                let batch: [_; BATCH] = core::array::from_fn(|k| Stored::load::<T>(partials, part(head + k * WARPS)));
                for stored in &batch {
                    sum.add_stored(stored);
                }
                head += BATCH * WARPS;
            }
            while head < heads {
                sum.add_stored(&Stored::load::<T>(partials, part(head)));
                head += WARPS;
            }
        }
        for k in 0..T::PACKET {
            sums.set((warp * T::PACKET + k) * LANES + lane, sum.values[k]);
        }
        thread::sync_threads();
        if warp == 0 && active {
            for w in 1..WARPS {
                for k in 0..T::PACKET {
                    sum.values[k] += sums.at((w * T::PACKET + k) * LANES + lane);
                }
            }
            sum.add_to(&dwte.packet(at), dwte, at, seed);
        }
        thread::sync_threads();
    }
}

/// Adds the sum over b of dout (B, T, C) to dwpe (T, C). One packet per thread.
#[inline(always)]
fn add_positions<T: Element>(
    block: usize,
    dwpe: GlobalMut<T>,
    dout: Global<T>,
    batch: usize,
    sequence: usize,
    channels: usize,
    seed: u32,
) {
    let (size, once) = (sequence * channels, CachePolicy::evict_first());
    let i = (block * THREADS as usize + thread::thread_idx_x() as usize) * T::PACKET;
    if i >= size {
        return;
    }
    let old = dwpe.packet(i);
    let mut sum = Sum::<T>::zero();
    let mut b = 0;
    // Software pipelining: loads the next four rows while adding the previous four.
    let four = |b: usize| -> [Packet<T>; BATCH] {
        core::array::from_fn(|k| dout.packet_streaming_with((b + k) * size + i, once))
    };
    if batch >= 2 * BATCH {
        let (mut these, mut next) = (four(0), four(BATCH));
        b = 2 * BATCH;
        while b + 2 * BATCH <= batch {
            sum.add_all(&these);
            these = four(b);
            sum.add_all(&next);
            next = four(b + BATCH);
            b += 2 * BATCH;
        }
        sum.add_all(&these);
        sum.add_all(&next);
    }
    while b < batch {
        sum.add(&dout.packet_streaming_with(b * size + i, once));
        b += 1;
    }
    sum.add_to(&old, dwpe, i, seed);
}

/// Returns the number of consecutive chunks, from `first` on, whose first token is `token`. Uniform across the warp.
#[inline(always)]
fn heads_of_run(
    first: usize,
    token: u32,
    positions: usize,
    chunk_len: usize,
    token_at: impl Fn(usize) -> u32,
) -> usize {
    let mut heads = 0;
    loop {
        let begin = (first + heads + warp::lane() as usize) * chunk_len;
        let more = warp::ballot(begin < positions && token_at(begin.min(positions - 1)) == token).trailing_ones();
        heads += more as usize;
        if more < warp::LANES {
            return heads;
        }
    }
}

/// The destination of a run's sum within a chunk, at one position of the chunk.
#[derive(Clone, Copy)]
enum End {
    /// None: the run continues after this position.
    Continues,
    /// A row of `partials`.
    Partial(u32),
    /// The row of a token in dwte.
    Token(u32),
}

/// f32 accumulators for one packet of channels.
struct Sum<T> {
    values: [f32; 8],
    element: core::marker::PhantomData<T>,
}

#[device]
impl<T: Element> Sum<T> {
    fn zero() -> Self {
        Self { values: [0.0; 8], element: core::marker::PhantomData }
    }

    fn add(&mut self, packet: &Packet<T>) {
        for k in 0..T::PACKET {
            self.values[k] += packet.get(k);
        }
    }

    fn add_all(&mut self, packets: &[Packet<T>; BATCH]) {
        for packet in packets {
            self.add(packet);
        }
    }

    fn store(&self, to: GlobalMut<f32>, index: usize) {
        for part in 0..T::PACKET / f32::PACKET {
            let offset = part * f32::PACKET;
            to.set_packet(index + offset, Packet::from_fn(|k| self.values[offset + k]));
        }
    }

    fn add_stored(&mut self, stored: &Stored) {
        for k in 0..T::PACKET {
            self.values[k] += stored.0[k / f32::PACKET].get(k % f32::PACKET);
        }
    }

    /// Writes `old` plus the sums to `to` from `index` on, rounded stochastically.
    fn add_to(&self, old: &Packet<T>, to: GlobalMut<T>, index: usize, seed: u32) {
        let packet = noise::round_packet(index, seed, |k| old.get(k) + self.values[k]);
        to.set_packet_with(index, packet, CachePolicy::evict_first());
    }
}

/// The sums of one packet, loaded from `partials`.
struct Stored([Packet<f32>; 2]);

impl Stored {
    #[inline(always)]
    fn load<T: Element>(from: Global<f32>, index: usize) -> Self {
        let mut packets = [Packet::zero(); 2];
        for part in 0..T::PACKET / f32::PACKET {
            packets[part] = from.packet(index + part * f32::PACKET);
        }
        Self(packets)
    }
}
