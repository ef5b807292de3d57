//! Warp-wide operations: shuffles, votes and reductions. All 32 lanes of the warp must execute them together.

use crate::backend;

/// Number of lanes in a warp.
pub const LANES: u32 = 32;

/// Returns the lane of this thread, in 0..32.
#[inline(always)]
pub fn lane() -> u32 {
    crate::thread::thread_idx_x() % LANES
}

/// Returns the index of this thread's warp in its block. A shuffle lets the compiler prove that it is uniform in the
/// warp.
#[inline(always)]
#[track_caller]
pub fn index() -> u32 {
    shuffle(crate::thread::thread_idx_x() / LANES, 0)
}

/// A 32-bit type that can be shuffled.
pub trait Shuffle: Copy {
    /// Returns the bits of the value.
    fn to_word(self) -> u32;
    /// Creates a value from its bits.
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

/// Returns `value` of lane `from` (`shfl.sync.idx.b32`).
#[inline(always)]
#[track_caller]
pub fn shuffle<S: Shuffle>(value: S, from: u32) -> S {
    S::from_word(backend::shuffle_idx(value.to_word(), from))
}

/// Returns `value` of lane `lane() ^ mask` (`shfl.sync.bfly.b32`).
#[inline(always)]
#[track_caller]
pub fn shuffle_xor<S: Shuffle>(value: S, mask: u32) -> S {
    S::from_word(backend::shuffle_xor(value.to_word(), mask))
}

/// Returns `value` of lane `lane() + delta`, or the lane's own value past the last lane (`shfl.sync.down.b32`).
#[inline(always)]
#[track_caller]
pub fn shuffle_down<S: Shuffle>(value: S, delta: u32) -> S {
    S::from_word(backend::shuffle_down(value.to_word(), delta))
}

/// Returns a mask of the lanes whose `predicate` is true (`vote.sync.ballot.b32`).
#[inline(always)]
#[track_caller]
pub fn ballot(predicate: bool) -> u32 {
    backend::ballot(predicate)
}

/// Returns whether `predicate` is true in any lane.
#[inline(always)]
#[track_caller]
pub fn any(predicate: bool) -> bool {
    ballot(predicate) != 0
}

/// Returns whether `predicate` is true in every lane.
#[inline(always)]
#[track_caller]
pub fn all(predicate: bool) -> bool {
    ballot(predicate) == u32::MAX
}

/// Synchronizes the lanes of the warp and orders their memory accesses (`bar.warp.sync`).
#[inline(always)]
#[track_caller]
pub fn sync() {
    backend::sync_warp();
}

/// Reduces `value` over all lanes with a commutative `op` in a fixed order. Every lane receives the result.
#[inline(always)]
#[track_caller]
pub fn reduce(mut value: f32, op: impl Fn(f32, f32) -> f32) -> f32 {
    value = op(value, shuffle_xor(value, 16));
    value = op(value, shuffle_xor(value, 8));
    value = op(value, shuffle_xor(value, 4));
    value = op(value, shuffle_xor(value, 2));
    op(value, shuffle_xor(value, 1))
}

/// Returns the sum of `value` over all lanes.
#[inline(always)]
#[track_caller]
pub fn sum(value: f32) -> f32 {
    reduce(value, |a, b| a + b)
}

/// Returns the maximum of `value` over all lanes.
#[inline(always)]
#[track_caller]
pub fn max(value: f32) -> f32 {
    reduce(value, |a, b| crate::math::max(a, b))
}
