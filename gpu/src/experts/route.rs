//! The choice of the experts of each token, and the order of experts.
//!
//! 1. [`route_choose`]: the experts with the K largest logits, or sums of score and bias, and their weights. Of equal numbers, the lower
//!    expert wins; a NaN is the smallest.
//! 2. [`route_count`]: the number of entries of each expert in each chunk of [`ENTRIES`] entries.
//! 3. [`route_groups`]: their sums over the chunks before, and the groups.
//! 4. [`route_place`]: the row of each entry in the order of experts, -1 if its expert is not local, and the entry of each row.
//!
//! Shapes: logits (rows, E), bias (E), experts and weights (rows, K), counts (chunks, E), positions (rows, K), sources (P), where P is
//! [`Groups::rows`]. E is at most [`MAX_EXPERTS`], K at most 32, and rows · K below 2^31.

use super::{GROUP_BLOCK, Groups, Local, Router};
use crate::activation::sigmoid;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedArray, block, device, kernel, math, thread, warp};

/// Maximum number of experts: the threads of a block.
pub const MAX_EXPERTS: usize = THREADS;
/// Entries of a chunk.
pub const ENTRIES: usize = 2048;

const THREADS: usize = 512;
const LANES: usize = warp::LANES as usize;
/// Warps of a block of [`route_choose`], one for each token.
const WARPS: usize = 8;
/// Rows of a block of a group.
const BLOCK: u32 = GROUP_BLOCK as u32;
/// Numbers that a thread loads before it uses them.
const BATCH: usize = 16;

/// Returns the number of chunks of `entries` entries.
pub const fn chunks(entries: usize) -> usize {
    entries.div_ceil(ENTRIES)
}

/// Returns the grid size of [`route_choose`], one warp per token.
pub const fn route_choose_grid(rows: usize) -> u32 {
    rows.div_ceil(WARPS) as u32
}

/// Lays out the shared memory of [`route_count`] and [`route_place`]: the experts of a chunk; and of [`route_groups`]: partial sums.
pub fn shared(layout: &mut Layout) -> (SharedArray<i32>, SharedArray<u32>) {
    (layout.array(ENTRIES), layout.array(block::SCRATCH))
}

/// Maps a number to an integer of the same order. The smallest is that of NaN.
#[inline(always)]
fn key(number: f32) -> u32 {
    let bits = number.to_bits();
    if number.is_nan() {
        0
    } else if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    }
}

/// Returns the number of a [`key`].
#[inline(always)]
fn number_of(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key & !(1 << 31) } else { !key })
}

/// The logits of a token. Lane l has those of experts l, l + 32, …, of up to 32 `N` experts.
#[derive(Clone, Copy)]
pub(super) struct Logits<const N: usize> {
    values: [f32; N],
    max: f32,
    /// The sum of exp(logit - max).
    sum: f32,
}

#[device]
impl<const N: usize> Logits<N> {
    /// Loads the logits of a token. Those of experts that do not exist are negative infinity.
    pub(super) fn load<T: Element>(logits: Global<T>, experts: u32) -> Self {
        let mut values = [f32::NEG_INFINITY; N];
        for i in 0..N {
            let expert = i * LANES + warp::lane() as usize;
            if expert < experts as usize {
                values[i] = logits.at(expert).to_f32();
            }
        }
        let mut max = f32::NEG_INFINITY;
        for i in 0..N {
            max = math::max(max, values[i]);
        }
        let max = warp::max(max);
        let mut sum = 0.0;
        for i in 0..N {
            sum += math::exp(values[i] - max);
        }
        Self { values, max, sum: warp::sum(sum) }
    }

    /// Returns the logit of expert 32 `i` + lane.
    pub(super) fn logit(&self, i: usize) -> f32 {
        self.values[i]
    }

    /// Returns the logit of any expert, the same in all lanes.
    fn of_expert(&self, expert: u32) -> f32 {
        let mut logit = 0.0;
        for i in 0..N {
            if i as u32 == expert / warp::LANES {
                logit = self.values[i];
            }
        }
        warp::shuffle(logit, expert % warp::LANES)
    }

    /// Returns the logarithm of the sum of the exponentials of all logits.
    pub(super) fn log_sum_exp(&self) -> f32 {
        self.max + math::ln(self.sum)
    }

    /// Returns the softmax of a logit.
    pub(super) fn softmax(&self, logit: f32) -> f32 {
        math::exp(logit - self.max) / self.sum
    }

    /// Returns the score of a logit.
    pub(super) fn score(&self, logit: f32, router: Router) -> f32 {
        if router.sigmoid == 1 { sigmoid(logit) } else { self.softmax(logit) }
    }
}

/// Computes experts and weights (rows, K) from logits (rows, E), with `N` at least E / 32. Unless the bias is null, it is added to the scores for
/// the choice, but not for the weights. Grid: [`route_choose_grid`].
#[kernel(
    threads = 256,
    instances([bf16 = cuda_std::bf16, f32 = f32] * [e32 = 1, e64 = 2, e128 = 4, e256 = 8, e512 = 16])
)]
pub fn route_choose<T: Element, const N: usize>(
    experts: GlobalMut<i32>,
    weights: GlobalMut<f32>,
    logits: Global<T>,
    bias: Global<T>,
    rows: u32,
    router: Router,
) {
    let row = thread::block_idx_x() as usize * WARPS + warp::index() as usize;
    if row >= rows as usize {
        return;
    }
    let (lane, active) = (warp::lane(), router.active as usize);
    let logits = Logits::<N>::load(logits.skip(row * router.experts as usize), router.experts);
    let mut keys = [0; N];
    for i in 0..N {
        let (expert, logit) = (i * LANES + lane as usize, logits.logit(i));
        let is_biased = !bias.is_null() && expert < router.experts as usize;
        keys[i] = key(if is_biased { logits.score(logit, router) + bias.at(expert).to_f32() } else { logit });
    }
    let (mut taken, mut sum) = (0u32, 0.0);
    let (mut my_expert, mut my_score) = (0, 0.0);
    for choice in 0..router.active {
        // The largest key, and the complement of its expert. An expert that does not exist has the key 0.
        let mut best = 0;
        for i in 0..N {
            let expert = i as u32 * warp::LANES + lane;
            let candidate = u64::from(keys[i]) << 32 | u64::from(!expert);
            if expert < router.experts && taken >> i & 1 == 0 && candidate > best {
                best = candidate;
            }
        }
        let best = warp::reduce(best, |a: u64, b: u64| if a > b { a } else { b });
        let expert = !(best as u32);
        let logit = if bias.is_null() { number_of((best >> 32) as u32) } else { logits.of_expert(expert) };
        let score = logits.score(logit, router);
        if expert % warp::LANES == lane {
            taken |= 1 << (expert / warp::LANES);
        }
        if choice == lane {
            (my_expert, my_score) = (expert, score);
        }
        sum += score;
    }
    if (lane as usize) < active {
        let at = row * active + lane as usize;
        experts.set(at, my_expert as i32);
        weights.set(at, if router.normalized == 1 { my_score / sum } else { my_score });
    }
}

/// Copies the experts of this block's chunk to shared memory. Returns them and their number.
#[inline(always)]
fn load_chunk(experts: Global<i32>, entries: u32) -> (SharedArray<i32>, usize) {
    let (chunk, _) = shared(&mut Layout::new());
    let first = thread::block_idx_x() as usize * ENTRIES;
    let len = (entries as usize - first).min(ENTRIES);
    let mut i = thread::thread_idx_x() as usize;
    while i < len {
        chunk.set(i, experts.at(first + i));
        i += THREADS;
    }
    thread::sync_threads();
    (chunk, len)
}

/// Computes counts (chunks, E), the entries of each expert in each chunk. Grid: [`chunks`]. Shared memory: [`shared`].
#[kernel(threads = 512)]
pub fn route_count(counts: GlobalMut<u32>, experts: Global<i32>, entries: u32, count: u32) {
    let (chunk, len) = load_chunk(experts, entries);
    let expert = thread::thread_idx_x();
    if expert < count {
        let mut sum = 0;
        for i in 0..len {
            sum += u32::from(chunk.at(i) == expert as i32);
        }
        counts.set((thread::block_idx_x() * count + expert) as usize, sum);
    }
}

/// Computes the groups ([`Groups`]) of the local experts and the loads (E), the number of entries of each expert. Replaces counts (chunks,
/// E) by their sums over the chunks before, and sets the sources of rows without an entry to -1. `rows` is that of the groups, and
/// `fewest_blocks` the minimum of a group. Grid: 1. Shared memory: [`shared`].
#[kernel(threads = 512)]
pub fn route_groups(
    groups: GlobalMut<u32>,
    loads: GlobalMut<u32>,
    counts: GlobalMut<u32>,
    sources: GlobalMut<i32>,
    chunks: u32,
    count: u32,
    local: Local,
    rows: u32,
    fewest_blocks: u32,
) {
    let (_, scratch) = shared(&mut Layout::new());
    let expert = thread::thread_idx_x();
    let (exists, count, chunks) = (expert < count, count as usize, chunks as usize);
    let mut size = 0;
    if exists {
        let counts = counts.skip(expert as usize);
        let mut first = 0;
        while first < chunks {
            let mut batch = [0; BATCH];
            for i in 0..BATCH {
                if first + i < chunks {
                    batch[i] = counts.at((first + i) * count);
                }
            }
            for i in 0..BATCH {
                if first + i < chunks {
                    counts.set((first + i) * count, size);
                    size += batch[i];
                }
            }
            first += BATCH;
        }
        loads.set(expert as usize, size);
    }
    let index = local.index(expert);
    let is_local = index < local.count;
    let padded = if is_local { size.div_ceil(BLOCK).max(fewest_blocks) * BLOCK } else { 0 };
    let start = block::exclusive_sum(padded, scratch);
    let layout = Groups { count: local.count as usize, rows: rows as usize };
    let blocks = groups.skip(layout.blocks());
    if is_local {
        groups.set(index as usize, start);
        groups.set(layout.sizes() + index as usize, size);
        for block in start / BLOCK..(start + padded) / BLOCK {
            blocks.set(block as usize, index);
        }
        for row in start + size..start + padded {
            sources.set(row as usize, -1);
        }
    }
    let end = block::sum(padded, scratch);
    if expert == 0 {
        groups.set(layout.count, end);
    }
    let mut block = end / BLOCK + expert;
    while block < rows / BLOCK {
        blocks.set(block as usize, 0);
        block += THREADS as u32;
    }
    let mut row = end + expert;
    while row < rows {
        sources.set(row as usize, -1);
        row += THREADS as u32;
    }
}

/// Computes positions (rows, K) and sources (P) from counts, the sums that [`route_groups`] computed. Grid: [`chunks`]. Shared memory: [`shared`].
#[kernel(threads = 512)]
pub fn route_place(
    positions: GlobalMut<i32>,
    sources: GlobalMut<i32>,
    experts: Global<i32>,
    counts: Global<u32>,
    groups: Global<u32>,
    entries: u32,
    count: u32,
    local: Local,
) {
    let (chunk, len) = load_chunk(experts, entries);
    let (expert, first) = (thread::thread_idx_x(), thread::block_idx_x() as usize * ENTRIES);
    if expert < count {
        let index = local.index(expert);
        let is_local = index < local.count;
        let mut position = 0;
        if is_local {
            let before = counts.at((thread::block_idx_x() * count + expert) as usize);
            position = groups.at(index as usize) + before;
        }
        for i in 0..len {
            if chunk.at(i) != expert as i32 {
                continue;
            }
            if is_local {
                positions.set(first + i, position as i32);
                sources.set(position as usize, (first + i) as i32);
                position += 1;
            } else {
                positions.set(first + i, -1);
            }
        }
    }
}
