//! The choice of each slot's next token.
//!
//! One block per slot. The first pass over the logits (B, Vp) writes scores to scratch (B, Vp) f32: after softcap, repetition
//! penalty and temperature. Top-k and top-p keep scores from a threshold on, which bisection of the score's bits finds in 32 passes;
//! a thread reads only scores that it wrote, and they stay in L2. Min-p is a threshold without a search.
//!
//! The token is argmax(score + Gumbel noise) over the kept scores, a sample from their softmax (Gumbel, 1954). The noise is a hash of
//! seed, position and token, so that neither the batch nor the order of threads affects the choice. Of equal scores, the
//! lowest token wins. All sums have a fixed order.

use super::{MIN_P, PENALTY, POSITION, SEED, TEMPERATURE, TOKEN, TOP_K, TOP_P, WORDS};
pub use crate::global_norm::shared;
use crate::noise;
use crate::softcap::Softcap;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedArray, block, device, kernel, math, thread};

/// Threads of a block.
const THREADS: usize = 1024;
/// Elements between a thread's vectors of four.
const STRIDE: usize = THREADS * 4;
/// Vectors that a thread loads before it uses them, because one block must hide the latency of memory.
const BATCH: usize = 4;

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

/// Calls `f` with the first index of each vector of four elements below `len` that belongs to the thread, and with what `load`
/// returns for it.
#[inline(always)]
fn batches(len: usize, load: impl Fn(usize) -> [f32; 4], mut f: impl FnMut(usize, [f32; 4])) {
    let mut first = thread::thread_idx_x() as usize * 4;
    while first < len {
        let mut batch = [[0.0; 4]; BATCH];
        for k in 0..BATCH {
            // Loads past the end repeat the first vector: with a condition per load, ptxas would interleave loads and their uses.
            let at = first + k * STRIDE;
            batch[k] = load(if at < len { at } else { first });
        }
        for k in 0..BATCH {
            if first + k * STRIDE < len {
                f(first + k * STRIDE, batch[k]);
            }
        }
        first += BATCH * STRIDE;
    }
}

/// The scores of a slot.
#[derive(Clone, Copy)]
struct Scores {
    values: GlobalMut<f32>,
    padded_vocab: usize,
    scratch: SharedArray<f32>,
}

#[device]
impl Scores {
    /// Calls `f` with each token of the thread and its score.
    fn each(self, mut f: impl FnMut(usize, f32)) {
        batches(
            self.padded_vocab,
            |token| self.values.four(token),
            |token, four| {
                for i in 0..4 {
                    f(token + i, four[i]);
                }
            },
        );
    }

    /// Returns the sum of `f(score)` over scores with a key of at least `least`.
    fn sum(self, least: u32, f: impl Fn(f32) -> f32) -> f32 {
        let mut sum = 0.0;
        self.each(|_, score| {
            if key(score) >= least {
                sum += f(score);
            }
        });
        block::sum(sum, self.scratch)
    }

    /// Returns the largest key, at least `from`, for which [`sum`](Self::sum) reaches `target`, or `from`.
    fn threshold(self, from: u32, target: f32, f: impl Fn(f32) -> f32 + Copy) -> u32 {
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

    /// Returns the token with the largest `score`, the first of several, and this score. Every thread receives them.
    fn best(self, mut score: impl FnMut(usize, f32) -> f32) -> (u32, f32) {
        let (mut token, mut most) = (0, f32::NEG_INFINITY);
        self.each(|t, s| {
            let s = score(t, s);
            if s > most {
                (token, most) = (t, s);
            }
        });
        let all = block::max(most, self.scratch);
        // Tokens are below 2^24, so f32 represents them. Without any score above -infinity, the first token wins.
        let candidate = if most >= all { -(token as f32) } else { f32::NEG_INFINITY };
        ((-block::max(candidate, self.scratch)) as u32, all)
    }
}

/// Chooses each slot's next token, writes it to sampled (B), and advances the slot: token and position in slots (B, 8) and its entry
/// in seen (B, Vp). An idle slot does not change, and its token is 0. scratch (B, Vp) may be uninitialized.
///
/// Grid: the number of slots. Shared memory: [`shared`].
#[kernel(threads = 1024, blocks_per_sm = 1, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn sample_tokens<T: Element>(
    sampled: GlobalMut<f32>,
    slots: GlobalMut<i32>,
    seen: GlobalMut<i32>,
    scratch: GlobalMut<f32>,
    logits: Global<T>,
    sizes: Sizes,
) {
    let (slot, vp) = (thread::block_idx_x() as usize, sizes.padded_vocab as usize);
    let word = |i: usize| slots.at(slot * WORDS + i) as u32;
    let float = |i: usize| f32::from_bits(word(i));
    let (position, penalty, temperature) = (word(POSITION), float(PENALTY), float(TEMPERATURE));
    let (top_k, top_p, min_p) = (word(TOP_K), float(TOP_P), float(MIN_P));
    let scores = Scores { values: scratch.skip(slot * vp), padded_vocab: vp, scratch: shared(&mut Layout::new()) };
    let (logits, seen) = (logits.skip(slot * vp), seen.skip(slot * vp));
    let softcap = Softcap::new(if sizes.softcap > 0.0 { sizes.softcap } else { 1.0 });
    let divisor = if temperature > 0.0 { temperature } else { 1.0 };
    if position.cast_signed() < 0 {
        if thread::thread_idx_x() == 0 {
            sampled.set(slot, 0.0);
        }
        return;
    }

    let vocab = sizes.vocab as usize;
    batches(
        vp,
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
                // NaN becomes -infinity, too.
                let score = math::max(x / divisor, f32::NEG_INFINITY);
                four[i] = if token + i < vocab { score } else { f32::NEG_INFINITY };
            }
            scores.values.set_four(token, four);
        },
    );
    let (mut chosen, most) = scores.best(|_, score| score);
    if temperature > 0.0 && most.is_finite() {
        let mut least = 0;
        if top_k > 0 {
            least = scores.threshold(least, top_k as f32, |_| 1.0);
        }
        let weight = |score: f32| math::exp(score - most);
        if top_p < 1.0 {
            let target = top_p * scores.sum(least, weight);
            // The most likely token stays, also if the target is 0.
            least = scores.threshold(least, target, weight).min(key(most));
        }
        if min_p > 0.0 {
            least = least.max(key((most + math::ln(min_p)).min(most)));
        }
        let seed = noise::squirrel5(position, word(SEED));
        let score = |token: usize, score: f32| {
            if key(score) >= least { score + gumbel(token as u32, seed) } else { f32::NEG_INFINITY }
        };
        chosen = scores.best(score).0;
    }
    if thread::thread_idx_x() == 0 {
        sampled.set(slot, chosen as f32);
        slots.set(slot * WORDS + TOKEN, chosen as i32);
        slots.set(slot * WORDS + POSITION, (position + 1).min(sizes.capacity - 1) as i32);
        seen.set(chosen as usize, 1);
    }
}
