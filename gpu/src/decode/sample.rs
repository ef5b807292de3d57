//! The choice of each slot's next token.
//!
//! The blocks of a slot share its tokens. A warp has groups of 128 neighbouring ones. A result over all tokens, such as a sum, is
//! computed for each group, exchanged through memory, and then combined in the order of the groups. So it does not depend on the number of
//! blocks, and neither does the choice.
//!
//! The first pass over the logits (B, Vp) computes scores: after softcap, repetition penalty and temperature. Without top-k, top-p and
//! min-p it also finds the token. Otherwise it writes the scores to scratch (B, Vp) f32. Top-k and top-p keep scores from a threshold on,
//! which bisection of the score's bits finds in 32 passes; a thread reads only scores that it wrote. Min-p is a threshold without a search.
//!
//! The token is argmax(score + Gumbel noise) over the kept scores, a sample from their softmax (Gumbel, 1954). The noise is a hash of
//! seed, position and token, so that neither the batch nor the order of threads affects the choice. Of equal scores, the
//! lowest token wins.

use super::{MIN_P, PENALTY, POSITION, SEED, TEMPERATURE, TOKEN, TOP_K, TOP_P, WORDS};
use crate::noise;
use crate::softcap::Softcap;
use cuda_std::shared::Layout;
use cuda_std::warp::Shuffle;
use cuda_std::{Element, Global, GlobalMut, SharedArray, block, device, kernel, math, thread, warp};

/// Threads of a block.
const THREADS: usize = 512;
const WARPS: usize = THREADS / 32;
/// Tokens of a group: a vector of four for each lane of a warp.
const GROUP: usize = 128;
/// Vectors that a thread loads before it uses them, because few warps must hide the latency of memory.
const BATCH: usize = 4;

/// Lays out the shared memory: partial results of reductions in a block.
pub fn shared(layout: &mut Layout) -> (SharedArray<f32>, SharedArray<u64>) {
    (layout.array(block::SCRATCH), layout.array(block::SCRATCH))
}

/// Returns the number of groups of 128 tokens of a padded vocabulary.
pub fn groups(padded_vocab: usize) -> usize {
    padded_vocab.div_ceil(GROUP)
}

/// Returns Gumbel noise -ln(-ln(1 - u)) of a token, where u in (0, 1) is a hash of `seed` and the token.
#[inline(always)]
pub fn gumbel(token: u32, seed: u32) -> f32 {
    const UNIT: f32 = 1.0 / 4_294_967_296.0;
    let u = (noise::squirrel5(token, seed) as f32 + 0.5) * UNIT;
    // The largest noise belongs to the smallest u, where ln(1 - u) would cancel.
    let series = u * math::fma(u, math::fma(u, math::fma(u, 0.25, 1.0 / 3.0), 0.5), 1.0);
    let exponential = if u < 1.0 / 64.0 { series } else { -math::ln(1.0 - u) };
    -math::ln(exponential)
}

/// Maps scores to integers of the same order.
#[inline(always)]
fn key(score: f32) -> u32 {
    let bits = score.to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// Returns the score of a [`key`].
#[inline(always)]
fn score_of(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key & !(1 << 31) } else { !key })
}

/// The scalars of [`sample_tokens`]. Passed by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Sizes {
    /// V.
    pub vocab: u32,
    /// Vp, a multiple of 4.
    pub padded_vocab: u32,
    /// Positions of the cache.
    pub capacity: u32,
    /// Bound of the logits; 0 for none.
    pub softcap: f32,
}

/// The tokens of a slot, and what its blocks exchange.
#[derive(Clone, Copy)]
struct Tokens {
    scores: GlobalMut<f32>,
    padded_vocab: usize,
    /// Two results per group: those of even and of odd rounds.
    results: GlobalMut<u64>,
    /// The number of times that a block has finished a round.
    arrived: GlobalMut<u32>,
    /// The number of rounds that are complete.
    rounds: u32,
    shared: (SharedArray<f32>, SharedArray<u64>),
}

#[device]
impl Tokens {
    /// Combines `f(token, load(token))` with `op` over all vectors of four tokens, in a fixed order. `none` is the identity of `op`.
    /// Every thread of every block receives the result.
    fn reduce<S: Shuffle>(
        &mut self,
        scratch: SharedArray<S>,
        (none, op): (S, impl Fn(S, S) -> S + Copy),
        load: impl Fn(usize) -> [f32; 4],
        mut f: impl FnMut(usize, [f32; 4]) -> S,
    ) -> S {
        let (thread, blocks) = (thread::thread_idx_x() as usize, thread::grid_dim_x() as usize);
        let (warp, lane) = (warp::index() as usize, thread % 32);
        let groups = self.padded_vocab.div_ceil(GROUP);
        let results = self.results.skip(self.rounds as usize % 2 * groups);
        let mut first = thread::block_idx_x() as usize * WARPS + warp;
        while first < groups {
            let mut batch = [[0.0; 4]; BATCH];
            for k in 0..BATCH {
                // Loads past the end repeat the first vector: with a condition per load, ptxas would interleave loads and their uses.
                let token = (first + k * blocks * WARPS) * GROUP + lane * 4;
                batch[k] = load(if token < self.padded_vocab { token } else { 0 });
            }
            for k in 0..BATCH {
                let group = first + k * blocks * WARPS;
                let token = group * GROUP + lane * 4;
                if group < groups {
                    let value = if token < self.padded_vocab { f(token, batch[k]) } else { none };
                    let [low, high] = warp::reduce(value, op).to_halves();
                    if lane == 0 {
                        results.set(group, u64::from(low) | u64::from(high) << 32);
                    }
                }
            }
            first += BATCH * blocks * WARPS;
        }
        self.rounds += 1;
        thread::sync_threads();
        if blocks > 1 {
            if thread == 0 {
                let all = blocks as u32 * self.rounds;
                self.arrived.release_add(0, 1);
                // A block that is faster may have arrived in the next round.
                self.arrived.acquire_wait_until(0, |count| count >= all);
            }
            thread::sync_threads();
        }
        let (mut all, mut group) = (none, thread);
        while group < groups {
            let bits = results.at(group);
            all = op(all, S::from_halves([bits as u32, (bits >> 32) as u32]));
            group += THREADS;
        }
        block::reduce(all, none, scratch, op)
    }

    /// Ends the last round: the counter is 0 for the next launch.
    fn finish(self) {
        let blocks = thread::grid_dim_x();
        if blocks > 1 && thread::thread_idx_x() == 0 && self.arrived.fetch_add(0, 1) == blocks * (self.rounds + 1) - 1 {
            self.arrived.store_relaxed(0, 0);
        }
    }

    /// Returns the sum of `f(score)` over scores with a key of at least `least`.
    fn sum(&mut self, least: u32, f: impl Fn(f32) -> f32) -> f32 {
        let (scores, scratch) = (self.scores, self.shared.0);
        self.reduce(
            scratch,
            (0.0, |a, b| a + b),
            |token| scores.four(token),
            |_, four| {
                let mut sum = 0.0;
                for i in 0..4 {
                    if key(four[i]) >= least {
                        sum += f(four[i]);
                    }
                }
                sum
            },
        )
    }

    /// Returns the largest key, at least `from`, for which [`sum`](Self::sum) reaches `target`, or `from`.
    fn threshold(&mut self, from: u32, target: f32, f: impl Fn(f32) -> f32 + Copy) -> u32 {
        let (mut found, mut bit) = (0, 1 << 31);
        while bit > 0 {
            let candidate = found | bit;
            if self.sum(candidate.max(from), f) >= target {
                found = candidate;
            }
            bit >>= 1;
        }
        found.max(from)
    }

    /// Returns the token with the largest score, the first of several, and this score. `score` returns those of four tokens.
    fn best(
        &mut self,
        load: impl Fn(usize) -> [f32; 4],
        mut score: impl FnMut(usize, [f32; 4]) -> [f32; 4],
    ) -> (u32, f32) {
        let scratch = self.shared.1;
        let best = self.reduce(scratch, (0, |a: u64, b: u64| a.max(b)), load, |token, four| {
            let (four, mut best) = (score(token, four), 0);
            for i in 0..4 {
                best = best.max(u64::from(key(four[i])) << 32 | u64::from(!((token + i) as u32)));
            }
            best
        });
        (!(best as u32), score_of((best >> 32) as u32))
    }
}

/// Chooses each slot's next token, writes it to sampled (B), and advances the slot: token and position in slots (B, 8) and its entry
/// in seen (B, Vp). An idle slot does not change, and its token is 0. scores (B, Vp) and results (B, 2, [`groups`]) may be
/// uninitialized; arrived (B) must be 0, and is 0 afterwards.
///
/// Grid: (blocks of a slot, slots). The blocks of a slot wait for each other, so the GPU must run all of them at a time. Shared memory:
/// [`shared`].
#[kernel(threads = 512, blocks_per_sm = 1, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn sample_tokens<T: Element>(
    sampled: GlobalMut<f32>,
    slots: GlobalMut<i32>,
    seen: GlobalMut<i32>,
    scores: GlobalMut<f32>,
    results: GlobalMut<u64>,
    arrived: GlobalMut<u32>,
    logits: Global<T>,
    sizes: Sizes,
) {
    let (slot, vp) = (thread::block_idx_y() as usize, sizes.padded_vocab as usize);
    let is_first = thread::block_idx_x() == 0 && thread::thread_idx_x() == 0;
    let word = |i: usize| slots.at(slot * WORDS + i) as u32;
    let float = |i: usize| f32::from_bits(word(i));
    let (position, penalty, temperature) = (word(POSITION), float(PENALTY), float(TEMPERATURE));
    let (top_k, top_p, min_p) = (word(TOP_K), float(TOP_P), float(MIN_P));
    if position.cast_signed() < 0 {
        if is_first {
            sampled.set(slot, 0.0);
        }
        return;
    }

    let mut tokens = Tokens {
        scores: scores.skip(slot * vp),
        padded_vocab: vp,
        results: results.skip(slot * 2 * vp.div_ceil(GROUP)),
        arrived: arrived.skip(slot),
        rounds: 0,
        shared: shared(&mut Layout::new()),
    };
    let (logits, seen, scores) = (logits.skip(slot * vp), seen.skip(slot * vp), tokens.scores);
    let softcap = Softcap::new(if sizes.softcap > 0.0 { sizes.softcap } else { 1.0 });
    let divisor = if temperature > 0.0 { temperature } else { 1.0 };
    let is_filtered = temperature > 0.0 && (top_k > 0 || top_p < 1.0 || min_p > 0.0);
    let is_noisy = temperature > 0.0 && !is_filtered;
    let seed = noise::squirrel5(position, word(SEED));
    let vocab = sizes.vocab as usize;
    let (mut chosen, most) = tokens.best(
        |token| logits.four(token),
        |token, mut four| {
            for i in 0..4 {
                let mut x = four[i];
                if sizes.softcap > 0.0 {
                    x = softcap.value(x);
                }
                if penalty.to_bits() != 1f32.to_bits() && token + i < vocab && seen.at(token + i) != 0 {
                    x = if x > 0.0 { x / penalty } else { x * penalty };
                }
                // NaN becomes -infinity, and -0 becomes 0.
                let score = math::max(x / divisor, f32::NEG_INFINITY) + 0.0;
                four[i] = if token + i < vocab { score } else { f32::NEG_INFINITY };
            }
            if is_filtered {
                scores.set_four(token, four);
            }
            if is_noisy {
                for i in 0..4 {
                    four[i] += gumbel((token + i) as u32, seed);
                }
            }
            four
        },
    );
    if is_filtered && most.is_finite() {
        let mut least = 0;
        if top_k > 0 {
            least = tokens.threshold(least, top_k as f32, |_| 1.0);
        }
        let weight = |score: f32| math::exp(score - most);
        if top_p < 1.0 {
            let target = top_p * tokens.sum(least, weight);
            // The most likely token stays, also if the target is 0.
            least = tokens.threshold(least, target, weight).min(key(most));
        }
        if min_p > 0.0 {
            least = least.max(key((most + math::ln(min_p)).min(most)));
        }
        let noisy = |token: usize, mut four: [f32; 4]| {
            for i in 0..4 {
                let is_kept = key(four[i]) >= least;
                four[i] = if is_kept { four[i] + gumbel((token + i) as u32, seed) } else { f32::NEG_INFINITY };
            }
            four
        };
        chosen = tokens.best(|token| scores.four(token), noisy).0;
    }
    tokens.finish();
    if is_first {
        sampled.set(slot, chosen as f32);
        slots.set(slot * WORDS + TOKEN, chosen as i32);
        slots.set(slot * WORDS + POSITION, (position + 1).min(sizes.capacity - 1) as i32);
        seen.set(chosen as usize, 1);
    }
}
