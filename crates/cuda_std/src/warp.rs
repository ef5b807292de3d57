//! A warp: 32 threads in lockstep; shuffles, votes and reductions among them. All lanes of the warp must take part.

use crate::backend;

/// Lanes of a warp.
pub const LANES: u32 = 32;

/// This thread's lane, 0..32, for one-dimensional blocks.
#[inline(always)]
pub fn lane() -> u32 {
    crate::thread::thread_idx_x() % LANES
}

/// This thread's warp in its block, uniform over the warp (a shuffle makes the compiler see that it is).
#[inline(always)]
#[track_caller]
pub fn index() -> u32 {
    shuffle(crate::thread::thread_idx_x() / LANES, 0)
}

/// A 32-bit value that can be shuffled.
pub trait Shuffle: Copy {
    fn to_word(self) -> u32;
    fn from_word(word: u32) -> Self;
}

impl Shuffle for u32 {
    #[inline(always)]
    fn to_word(self) -> u32 {
        self
    }
    #[inline(always)]
    fn from_word(word: u32) -> Self {
        word
    }
}

impl Shuffle for f32 {
    #[inline(always)]
    fn to_word(self) -> u32 {
        self.to_bits()
    }
    #[inline(always)]
    fn from_word(word: u32) -> Self {
        f32::from_bits(word)
    }
}

/// `value` of lane `from` (`shfl.sync.idx.b32`).
#[inline(always)]
#[track_caller]
pub fn shuffle<S: Shuffle>(value: S, from: u32) -> S {
    S::from_word(backend::shuffle_idx(value.to_word(), from))
}

/// `value` of lane `lane() ^ mask` (`shfl.sync.bfly.b32`).
#[inline(always)]
#[track_caller]
pub fn shuffle_xor<S: Shuffle>(value: S, mask: u32) -> S {
    S::from_word(backend::shuffle_xor(value.to_word(), mask))
}

/// `value` of lane `lane() + delta`, own value past the last lane (`shfl.sync.down.b32`).
#[inline(always)]
#[track_caller]
pub fn shuffle_down<S: Shuffle>(value: S, delta: u32) -> S {
    S::from_word(backend::shuffle_down(value.to_word(), delta))
}

/// Bit per lane whose `predicate` holds (`vote.sync.ballot.b32`).
#[inline(always)]
#[track_caller]
pub fn ballot(predicate: bool) -> u32 {
    backend::ballot(predicate)
}

/// Whether `predicate` holds in any lane.
#[inline(always)]
#[track_caller]
pub fn any(predicate: bool) -> bool {
    ballot(predicate) != 0
}

/// Whether `predicate` holds in every lane.
#[inline(always)]
#[track_caller]
pub fn all(predicate: bool) -> bool {
    ballot(predicate) == u32::MAX
}

/// Barrier and memory ordering among the warp's lanes (`bar.warp.sync`).
#[inline(always)]
#[track_caller]
pub fn sync() {
    backend::sync_warp();
}

/// Folds `value` over all lanes with a commutative `op`, in the same order on every run; every lane gets the result.
#[inline(always)]
#[track_caller]
pub fn reduce(mut value: f32, op: impl Fn(f32, f32) -> f32) -> f32 {
    value = op(value, shuffle_xor(value, 16));
    value = op(value, shuffle_xor(value, 8));
    value = op(value, shuffle_xor(value, 4));
    value = op(value, shuffle_xor(value, 2));
    op(value, shuffle_xor(value, 1))
}

#[inline(always)]
#[track_caller]
pub fn sum(value: f32) -> f32 {
    reduce(value, |a, b| a + b)
}

#[inline(always)]
#[track_caller]
pub fn max(value: f32) -> f32 {
    reduce(value, |a, b| crate::math::max(a, b))
}
