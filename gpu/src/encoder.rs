//! Token and position embedding: out[b, t] = wte[token[b, t]] + wpe[t].
//!
//! Shapes: tokens (B, T) i32 in 0..V, wte (V, C), wpe (at least T, C), out and dout (B, T, C); C a multiple of the packet,
//! B * T below 2^31.
//!
//! The gradient of wte sums rows of dout whose token is the same. It needs no float atomics and is the same on every run:
//! the host gives `order`, the positions 0..B*T stably sorted by token, which is cut into chunks of [`CHUNK`] positions
//! whatever the tokens are, so a token that fills half of the batch costs no more than any other. A run (the positions
//! of one token) inside a chunk is added to dwte at once; the parts of a run that crosses chunks go to `partials` and a
//! second kernel adds them up. `partials` (chunks, 2, C) f32: row 0 is the chunk's leading part of a run begun earlier,
//! row 1 its trailing part of a run that goes on; other rows are neither written nor read.
//!
//! Gradients are summed in f32 and added to the stored gradient with stochastic rounding ([`crate::noise`]): small
//! gradients of rare tokens would vanish against a rounded sum otherwise.

use crate::noise;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, SharedArray, kernel, thread, warp};

const THREADS: u32 = 256;
const WARPS: usize = (THREADS / warp::LANES) as usize;
const LANES: usize = warp::LANES as usize;

/// Positions of `order` that one warp sums: at most one for each lane. So few that there are several warps for each place on
/// a GPU, and the last ones have little to do alone.
const CHUNK: usize = LANES / 2;

/// Rows of a batch of loads.
const BATCH: usize = 4;
/// Of those that are added element by element at the same place.
const WPE_BATCH: usize = 8;

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

/// f32 elements of `partials` for [`encoder_backward_wte`].
pub const fn encoder_backward_partials(positions: usize, channels: usize) -> usize {
    positions.div_ceil(CHUNK) * 2 * channels
}

const fn groups<T: Element>(channels: usize) -> usize {
    channels.div_ceil(LANES * T::PACKET)
}

/// Blocks of [`encoder_backward_wte`].
pub const fn encoder_backward_wte_grid<T: Element>(positions: usize, channels: usize) -> u32 {
    (positions.div_ceil(CHUNK) * groups::<T>(channels)).div_ceil(WARPS) as u32
}

/// dwte (V, C) += rows of dout (B, T, C), for runs inside one chunk; the others' parts go to `partials`
/// ([`encoder_backward_partials`] elements, any content) for [`encoder_backward_rest`]. One warp per chunk and
/// 32 packets of channels; `positions` is B * T.
#[kernel(threads = 256, blocks_per_sm = 4, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn encoder_backward_wte<T: Element>(
    dwte: GlobalMut<T>,
    partials: GlobalMut<f32>,
    dout: Global<T>,
    tokens: Global<i32>,
    order: Global<i32>,
    positions: u32,
    channels: u32,
    seed: u32,
) {
    let (positions, channels, lane) = (positions as usize, channels as usize, warp::lane() as usize);
    let groups = (groups::<T>(channels) as u32).max(1);
    let unit = thread::block_idx_x() * WARPS as u32 + warp::index();
    let (chunk, group) = ((unit / groups) as usize, (unit % groups) as usize);
    let begin = chunk * CHUNK;
    if begin >= positions {
        return;
    }
    let count = (positions - begin).min(CHUNK);
    let token_at = |i: usize| tokens.at(order.at(i) as usize) as u32;
    let before = if begin > 0 { token_at(begin - 1) } else { u32::MAX };
    let after = if begin + count < positions { token_at(begin + count) } else { u32::MAX };
    let (mut position, mut token) = (0, 0);
    if lane < count {
        position = order.at(begin + lane) as u32;
        token = tokens.at(position as usize) as u32;
    }

    let column = (group * LANES + lane) * T::PACKET;
    let active = column < channels;
    let mut sum = Sum::<T>::zero();
    let mut first = 0;
    while first < count {
        // What a sum will be added to is loaded with the rows, not when they have been summed.
        let mut rows = [Packet::zero(); BATCH];
        let mut old = [Packet::zero(); BATCH];
        let mut ends = [End::NotHere; BATCH];
        for k in 0..BATCH {
            let i = first + k;
            let row = warp::shuffle(position, i as u32) as usize;
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
            if active && i < count {
                rows[k] = dout.packet_streaming(row * channels + column);
                if let End::Token(token) = ends[k] {
                    old[k] = dwte.packet(token as usize * channels + column);
                }
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

/// Blocks of [`encoder_backward_rest`].
pub const fn encoder_backward_rest_grid<T: Element>(batch: usize, sequence: usize, channels: usize) -> u32 {
    let of_wpe = (sequence * channels / T::PACKET).div_ceil(THREADS as usize);
    (runs_blocks::<T>(batch * sequence, channels) + of_wpe) as u32
}

/// Blocks that follow runs: one for `WARPS` chunks and 32 packets of channels.
const fn runs_blocks<T: Element>(positions: usize, channels: usize) -> usize {
    groups::<T>(channels) * positions.div_ceil(CHUNK).div_ceil(WARPS)
}

/// Shared memory of [`encoder_backward_rest`]: each warp's sums, and what each has found.
pub fn encoder_backward_rest_shared<T: Element>(layout: &mut Layout) -> (SharedArray<f32>, SharedArray<u32>) {
    (layout.array(THREADS as usize * T::PACKET), layout.array(WARPS))
}

/// What [`encoder_backward_wte`] leaves: dwte (V, C) += the parts of the runs that cross chunks, which are in `partials`; and
/// dwpe (T, C) += sum over b of dout (B, T, C). The runs come first: there is little to do for them, but one load after the
/// other, which the rest hides.
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn encoder_backward_rest<T: Element>(
    dwte: GlobalMut<T>,
    dwpe: GlobalMut<T>,
    partials: Global<f32>,
    dout: Global<T>,
    tokens: Global<i32>,
    order: Global<i32>,
    batch: u32,
    sequence: u32,
    channels: u32,
    seed: u32,
) {
    let (batch, sequence, channels) = (batch as usize, sequence as usize, channels as usize);
    let (block, of_runs) = (thread::block_idx_x() as usize, runs_blocks::<T>(batch * sequence, channels));
    if block < of_runs {
        add_runs::<T>(block, dwte, partials, tokens, order, batch * sequence, channels, seed);
    } else {
        // Elements of equal index in the two tables must not be rounded alike.
        add_positions::<T>(block - of_runs, dwpe, dout, batch, sequence, channels, !seed);
    }
}

/// The runs that begin in one of `WARPS` chunks and leave it: each warp looks at one chunk, adds its run if that is short, and of a
/// long one they split the chunks.
#[inline(always)]
fn add_runs<T: Element>(
    block: usize,
    dwte: GlobalMut<T>,
    partials: Global<f32>,
    tokens: Global<i32>,
    order: Global<i32>,
    positions: usize,
    channels: usize,
    seed: u32,
) {
    let (scratch, found) = encoder_backward_rest_shared::<T>(&mut Layout::new());
    let (lane, warp) = (warp::lane() as usize, warp::index() as usize);
    let groups = (groups::<T>(channels) as u32).max(1);
    let (set, group) = ((block as u32 / groups) as usize, (block as u32 % groups) as usize);
    let first_chunk = set * WARPS;
    let token_at = |i: usize| tokens.at(order.at(i) as usize);
    let column = (group * LANES + lane) * T::PACKET;
    let active = column < channels;

    // Most runs are short: a warp adds its own. The long ones are for all of them.
    let chunk = first_chunk + warp;
    let heads = heads_of_run(chunk, positions, token_at);
    let is_long = heads > WARPS;
    if heads > 0 && !is_long && active {
        let at = token_at((chunk + 1) * CHUNK) as usize * channels + column;
        let old = dwte.packet(at);
        let mut sum = Sum::<T>::zero();
        sum.add_stored(&Stored::load::<T>(partials, (chunk * 2 + 1) * channels + column));
        for head in 0..heads {
            sum.add_stored(&Stored::load::<T>(partials, (chunk + 1 + head) * 2 * channels + column));
        }
        sum.add_to(&old, dwte, at, seed);
    }
    if lane == 0 {
        found.set(warp, if is_long { heads as u32 } else { 0 });
    }
    thread::sync_threads();

    // One at most: it goes on for more chunks than a block looks at.
    let Some(w) = (0..WARPS).find(|&w| found.at(w) > 0) else { return };
    let (chunk, heads) = (first_chunk + w, found.at(w) as usize);
    let mut sum = Sum::<T>::zero();
    if active {
        if warp == 0 {
            sum.add_stored(&Stored::load::<T>(partials, (chunk * 2 + 1) * channels + column));
        }
        let at = |head: usize| (chunk + 1 + head) * 2 * channels + column;
        let mut head = warp;
        while head + (BATCH - 1) * WARPS < heads {
            let batch: [_; BATCH] = core::array::from_fn(|k| Stored::load::<T>(partials, at(head + k * WARPS)));
            for stored in &batch {
                sum.add_stored(stored);
            }
            head += BATCH * WARPS;
        }
        while head < heads {
            sum.add_stored(&Stored::load::<T>(partials, at(head)));
            head += WARPS;
        }
    }
    for k in 0..T::PACKET {
        scratch.set((warp * T::PACKET + k) * LANES + lane, sum.values[k]);
    }
    thread::sync_threads();
    if warp == 0 && active {
        for w in 1..WARPS {
            for k in 0..T::PACKET {
                sum.values[k] += scratch.at((w * T::PACKET + k) * LANES + lane);
            }
        }
        let at = token_at((chunk + 1) * CHUNK) as usize * channels + column;
        sum.add_to(&dwte.packet(at), dwte, at, seed);
    }
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
    let size = sequence * channels;
    let i = (block * THREADS as usize + thread::thread_idx_x() as usize) * T::PACKET;
    if i >= size {
        return;
    }
    let old = dwpe.packet(i);
    let mut sum = Sum::<T>::zero();
    let mut b = 0;
    while b < batch {
        // All loads are under way before the first sum; conditions would make ptxas spread them.
        let mut rows = [Packet::zero(); WPE_BATCH];
        if b + WPE_BATCH <= batch {
            for k in 0..WPE_BATCH {
                rows[k] = dout.packet_streaming((b + k) * size + i);
            }
        } else {
            for k in 0..WPE_BATCH {
                if b + k < batch {
                    rows[k] = dout.packet_streaming((b + k) * size + i);
                }
            }
        }
        for row in &rows {
            sum.add(row);
        }
        b += WPE_BATCH;
    }
    sum.add_to(&old, dwpe, i, seed);
}

/// How many chunks begin with a later part of the run that begins in `chunk`; 0 if none begins there and leaves it. The
/// same in all lanes.
#[inline(always)]
fn heads_of_run(chunk: usize, positions: usize, token_at: impl Fn(usize) -> i32) -> usize {
    let next = (chunk + 1) * CHUNK;
    if next >= positions {
        return 0;
    }
    let token = token_at(next);
    let leaves = token_at(next - 1) == token;
    let began_earlier = chunk > 0 && token_at(chunk * CHUNK - 1) == token;
    if !leaves || began_earlier {
        return 0;
    }
    let mut heads = 0;
    loop {
        let begin = next + (heads + warp::lane() as usize) * CHUNK;
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
        to.set_packet(index, noise::round_packet(index, seed, |k| old.get(k) + self.values[k]));
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
