//! Token and position embedding: out[b, t] = wte[token[b, t]] + wpe[t].
//!
//! Shapes: tokens (B, T) i32 in 0..V, wte (V, C), wpe (at least T, C), out and dout (B, T, C); C a multiple of the packet,
//! B * T below 2^31.
//!
//! The gradient of wte sums rows of dout whose token is the same. It needs no float atomics and is the same on every run:
//! the host gives `order`, the positions 0..B*T stably sorted by token, and `sorted`, their tokens. Both are cut into
//! chunks of [`encoder_backward_chunk`] positions whatever the tokens are, so a token that fills half of the batch costs
//! no more than any other. A run (the positions of one token) inside a chunk is added to dwte at once; the parts of a run
//! that crosses chunks go to `partials` and a second kernel adds them up. `partials` (chunks, 2, C) f32: row 0 is the
//! chunk's leading part of a run begun earlier, row 1 its trailing part of a run that goes on; other rows are neither
//! written nor read.
//!
//! Gradients are summed in f32 and added to the stored gradient with stochastic rounding ([`crate::noise`]): small
//! gradients of rare tokens would vanish against a rounded sum otherwise. Its seed (1) is read from memory, so that the same
//! launches, recorded, round by another seed each time.

use crate::noise;
use cuda_std::shared::Layout;
use cuda_std::{CachePolicy, Element, Global, GlobalMut, Packet, SharedArray, kernel, thread, warp};

const THREADS: u32 = 256;
const WARPS: usize = (THREADS / warp::LANES) as usize;
const LANES: usize = warp::LANES as usize;

/// Of [`encoder_backward_wte`] on a multiprocessor.
const BLOCKS_PER_SM: usize = 4;

/// Of dout, what L2 is to keep from [`encoder_backward_wte`] to [`encoder_backward_rest`].
const KEPT: f32 = 0.2;

/// Rows of a batch of loads.
const BATCH: usize = 4;

/// Blocks of [`encoder_forward`].
pub const fn encoder_forward_grid(positions: usize) -> u32 {
    positions.div_ceil(WARPS) as u32
}

/// out (B, T, C) = wte[tokens] + wpe. One warp per position; `positions` is B * T.
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn encoder_forward<T: Element>(
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
        let (a, b) = (token.packet(column), place.packet(column));
        out.set_packet(column, Packet::from_fn(|k| a.get(k) + b.get(k)));
        column += LANES * T::PACKET;
    }
}

/// Positions of `order` that one warp sums: as many as leave the fewest multiprocessors idle at the end of
/// [`encoder_backward_wte`], fewer than a lane's place each.
pub fn encoder_backward_chunk<T: Element>(positions: usize, channels: usize, multiprocessors: usize) -> usize {
    let at_once = (multiprocessors * BLOCKS_PER_SM) as u32;
    let use_of = |chunk: usize| {
        let blocks = encoder_backward_wte_grid::<T>(positions, channels, chunk);
        blocks as f32 / blocks.next_multiple_of(at_once) as f32
    };
    let mut best = 2 * BATCH;
    for chunk in (3 * BATCH..LANES).step_by(BATCH) {
        // Long ones have fewer runs that cross them, and less to find out before they load.
        if use_of(chunk) > use_of(best) - 0.02 {
            best = chunk;
        }
    }
    best
}

/// f32 elements of `partials` for chunks of `chunk` positions.
pub const fn encoder_backward_partials(positions: usize, channels: usize, chunk: usize) -> usize {
    positions.div_ceil(chunk) * 2 * channels
}

const fn groups<T: Element>(channels: usize) -> usize {
    channels.div_ceil(LANES * T::PACKET)
}

/// Blocks of [`encoder_backward_wte`].
pub const fn encoder_backward_wte_grid<T: Element>(positions: usize, channels: usize, chunk: usize) -> u32 {
    (positions.div_ceil(chunk) * groups::<T>(channels)).div_ceil(WARPS) as u32
}

/// dwte (V, C) += rows of dout (B, T, C), for runs inside one chunk; the others' parts go to `partials`
/// ([`encoder_backward_partials`] elements, any content) for [`encoder_backward_rest`]. One warp per chunk of `length` positions, up to
/// 32, and 32 packets of channels; `positions` is B * T.
#[kernel(threads = 256, blocks_per_sm = 4, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn encoder_backward_wte<T: Element>(
    dwte: GlobalMut<T>,
    partials: GlobalMut<f32>,
    dout: Global<T>,
    order: Global<i32>,
    sorted: Global<i32>,
    seed: Global<i32>,
    positions: u32,
    channels: u32,
    length: u32,
) {
    let (positions, channels, lane) = (positions as usize, channels as usize, warp::lane() as usize);
    let groups = (groups::<T>(channels) as u32).max(1);
    let unit = thread::block_idx_x() * WARPS as u32 + warp::index();
    let (chunk, group) = ((unit / groups) as usize, (unit % groups) as usize);
    let begin = chunk * length as usize;
    if begin >= positions {
        return;
    }
    let seed = seed.at(0) as u32;
    let (kept, once) = (CachePolicy::evict_last(KEPT), CachePolicy::evict_first());
    let count = (positions - begin).min(length as usize);
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
        // What a sum will be added to is loaded with the rows, not when they have been summed.
        let mut rows = [Packet::zero(); BATCH];
        for k in 0..BATCH {
            let row = warp::shuffle(position, (first + k) as u32) as usize;
            if active && first + k < count {
                rows[k] = dout.packet_streaming_with(row * channels + column, kept);
            }
        }
        let mut old = [Packet::zero(); BATCH];
        let mut ends = [End::NotHere; BATCH];
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
                End::NotHere => continue,
                End::Partial(row) if active => sum.store(partials, row as usize * channels + column),
                End::Token(token) if active => sum.add_to(&old[k], dwte, token as usize * channels + column, seed),
                _ => {}
            }
            sum = Sum::zero();
        }
        first += BATCH;
    }
}

/// Chunks that a block of [`encoder_backward_rest`] follows the runs of.
const SET: usize = LANES;

/// Blocks of [`encoder_backward_rest`].
pub const fn encoder_backward_rest_grid<T: Element>(
    batch: usize,
    sequence: usize,
    channels: usize,
    chunk: usize,
) -> u32 {
    (runs_blocks::<T>(batch * sequence, channels, chunk) + places_blocks::<T>(sequence, channels)) as u32
}

/// Blocks that follow runs: one for [`SET`] chunks and 32 packets of channels.
const fn runs_blocks<T: Element>(positions: usize, channels: usize, chunk: usize) -> usize {
    groups::<T>(channels) * positions.div_ceil(chunk).div_ceil(SET)
}

/// Blocks that add up dwpe: a thread for each packet.
const fn places_blocks<T: Element>(sequence: usize, channels: usize) -> usize {
    (sequence * channels / T::PACKET).div_ceil(THREADS as usize)
}

/// Shared memory of [`encoder_backward_rest`].
#[derive(Clone, Copy)]
pub struct Shared {
    /// Each warp's sums.
    sums: SharedArray<f32>,
    /// The tokens that [`LOOKED_AT`] chunks begin with.
    firsts: SharedArray<u32>,
    /// The token before each of these.
    befores: SharedArray<u32>,
    /// Of each chunk of a set: the chunks that a run that begins in it goes on for, if they are more than [`WARPS`], else 0.
    long: SharedArray<u32>,
}

/// Chunks of a set, and those after it that a short run may reach.
const LOOKED_AT: usize = SET + WARPS + 1;
/// In place of a token: there is none.
const NONE: u32 = u32::MAX;

pub fn encoder_backward_rest_shared<T: Element>(layout: &mut Layout) -> Shared {
    Shared {
        sums: layout.array(THREADS as usize * T::PACKET),
        firsts: layout.array(LOOKED_AT),
        befores: layout.array(LOOKED_AT),
        long: layout.array(SET),
    }
}

/// What [`encoder_backward_wte`] leaves: dwte (V, C) += the parts of the runs that cross chunks, which are in `partials`; and
/// dwpe (T, C) += sum over b of dout (B, T, C). There is little to load for the runs, but one load after the other, and much for
/// dwpe: blocks of the two kinds follow by turns, so that each hides the other.
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn encoder_backward_rest<T: Element>(
    dwte: GlobalMut<T>,
    dwpe: GlobalMut<T>,
    partials: Global<f32>,
    dout: Global<T>,
    sorted: Global<i32>,
    seed: Global<i32>,
    batch: u32,
    sequence: u32,
    channels: u32,
    length: u32,
) {
    let seed = seed.at(0) as u32;
    let (batch, sequence, channels, length) = (batch as usize, sequence as usize, channels as usize, length as usize);
    let runs = runs_blocks::<T>(batch * sequence, channels, length.max(1));
    let places = places_blocks::<T>(sequence, channels);
    let (block, of_each) = (thread::block_idx_x() as usize, runs.min(places));
    let (is_of_runs, index) =
        if block < 2 * of_each { (block.is_multiple_of(2), block / 2) } else { (runs > places, block - of_each) };
    if is_of_runs {
        add_runs::<T>(index, dwte, partials, sorted, batch * sequence, channels, length, seed);
    } else {
        // Elements of equal index in the two tables must not be rounded alike.
        add_positions::<T>(index, dwpe, dout, batch, sequence, channels, !seed);
    }
}

/// The runs that begin in one of [`SET`] chunks and leave it: each warp adds some of the short ones, and of a long one they split the
/// chunks.
#[inline(always)]
fn add_runs<T: Element>(
    block: usize,
    dwte: GlobalMut<T>,
    partials: Global<f32>,
    sorted: Global<i32>,
    positions: usize,
    channels: usize,
    length: usize,
    seed: u32,
) {
    let shared = encoder_backward_rest_shared::<T>(&mut Layout::new());
    let (lane, warp) = (warp::lane() as usize, warp::index() as usize);
    let groups = (groups::<T>(channels) as u32).max(1);
    let (set, group) = ((block as u32 / groups) as usize, (block as u32 % groups) as usize);
    let first_chunk = set * SET;
    let token_at = |i: usize| sorted.at(i) as u32;
    let column = (group * LANES + lane) * T::PACKET;
    let active = column < channels;

    let thread = thread::thread_idx_x() as usize;
    if thread < LOOKED_AT {
        let begin = (first_chunk + thread) * length;
        let there = begin < positions;
        shared.firsts.set(thread, if there { token_at(begin) } else { NONE });
        shared.befores.set(thread, if there && begin > 0 { token_at(begin - 1) } else { NONE });
    }
    if thread < SET {
        shared.long.set(thread, 0);
    }
    thread::sync_threads();

    // Most runs are short: a warp adds every eighth.
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
            let heads = heads_of_run(chunk + 1, token, positions, length, token_at);
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
        add_long_run::<T>(chunk, heads, dwte, partials, at, active, channels, column, shared.sums, seed);
    }
}

/// dwte[`at`..] += the parts of the run that begins in `chunk` and goes on for `heads`, of all warps together.
#[inline(always)]
fn add_long_run<T: Element>(
    chunk: usize,
    heads: usize,
    dwte: GlobalMut<T>,
    partials: Global<f32>,
    at: usize,
    active: bool,
    channels: usize,
    column: usize,
    sums: SharedArray<f32>,
    seed: u32,
) {
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

/// One packet per thread.
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
    // Four rows are loaded while the four before them are added.
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

/// How many chunks from `first` on begin with the run of `token`. The same in all lanes.
#[inline(always)]
fn heads_of_run(first: usize, token: u32, positions: usize, length: usize, token_at: impl Fn(usize) -> u32) -> usize {
    let mut heads = 0;
    loop {
        let begin = (first + heads + warp::lane() as usize) * length;
        let more = warp::ballot(begin < positions && token_at(begin.min(positions - 1)) == token).trailing_ones();
        heads += more as usize;
        if more < warp::LANES {
            return heads;
        }
    }
}

/// Where the sum of a run's part in a chunk goes when the part ends.
#[derive(Clone, Copy)]
enum End {
    /// The part goes on.
    NotHere,
    /// A row of `partials`.
    Partial(u32),
    /// The token's row of dwte.
    Token(u32),
}

/// The f32 sums of one packet of channels.
struct Sum<T> {
    values: [f32; 8],
    element: core::marker::PhantomData<T>,
}

impl<T: Element> Sum<T> {
    #[inline(always)]
    fn zero() -> Self {
        Self { values: [0.0; 8], element: core::marker::PhantomData }
    }

    #[inline(always)]
    fn add(&mut self, packet: &Packet<T>) {
        for k in 0..T::PACKET {
            self.values[k] += packet.get(k);
        }
    }

    #[inline(always)]
    fn add_all(&mut self, packets: &[Packet<T>; BATCH]) {
        for packet in packets {
            self.add(packet);
        }
    }

    #[inline(always)]
    fn store(&self, to: GlobalMut<f32>, index: usize) {
        for part in 0..T::PACKET / f32::PACKET {
            let offset = part * f32::PACKET;
            to.set_packet(index + offset, Packet::from_fn(|k| self.values[offset + k]));
        }
    }

    #[inline(always)]
    fn add_stored(&mut self, stored: &Stored) {
        for k in 0..T::PACKET {
            self.values[k] += stored.0[k / f32::PACKET].get(k % f32::PACKET);
        }
    }

    /// to[index ..] = `old` + the sums, rounded stochastically.
    #[inline(always)]
    fn add_to(&self, old: &Packet<T>, to: GlobalMut<T>, index: usize, seed: u32) {
        let packet = noise::round_packet(index, seed, |k| old.get(k) + self.values[k]);
        to.set_packet_with(index, packet, CachePolicy::evict_first());
    }
}

/// A packet's sums, as they were stored.
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
