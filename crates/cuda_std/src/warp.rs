//! Warp-wide operations: shuffles, votes, matches and reductions. All 32 lanes of the warp must execute them together.

use crate::backend;

/// Number of lanes in a warp.
pub const LANES: u32 = 32;

/// Returns the lane of this thread of a one-dimensional block, in 0..32.
#[inline(always)]
#[track_caller]
pub fn lane() -> u32 {
    backend::thread_idx_1d() % LANES
}

/// Returns the lane of this thread of a block of any dimension, in 0..32 (`%laneid`).
#[inline(always)]
pub fn lane_id() -> u32 {
    backend::lane_id()
}

/// Returns the index of this thread's warp in its one-dimensional block. A shuffle lets the compiler prove that it is uniform in
/// the warp.
#[inline(always)]
#[track_caller]
pub fn index() -> u32 {
    shuffle(backend::thread_idx_1d() / LANES, 0)
}

/// Returns the index of this thread's warp in its block of any dimension: [`thread::linear_index`](crate::thread::linear_index) / 32. In
/// a one-dimensional block, [`index`] takes fewer instructions.
#[inline(always)]
#[track_caller]
pub fn linear_index() -> u32 {
    shuffle(crate::thread::linear_index() / LANES, 0)
}

/// A 32-bit or 64-bit type that can be shuffled: f32, f64, u32, i32, u64 or i64. A 64-bit value takes two instructions.
pub trait Shuffle: Copy {
    /// Whether the value has 64 bits.
    #[doc(hidden)]
    const WIDE: bool;
    /// Returns the lower half of the bits.
    #[doc(hidden)]
    fn to_word(self) -> u32;
    /// Creates a value of 32 bits.
    #[doc(hidden)]
    fn from_word(word: u32) -> Self;
    /// Returns the lower and the upper half of the bits.
    #[doc(hidden)]
    #[inline(always)]
    fn to_halves(self) -> [u32; 2] {
        [self.to_word(), 0]
    }
    /// Creates a value from its halves.
    #[doc(hidden)]
    #[inline(always)]
    fn from_halves([low, _]: [u32; 2]) -> Self {
        Self::from_word(low)
    }
}

macro_rules! shuffle_32 {
    ($($type:ty: $to:expr, $from:expr;)*) => {$(
        impl Shuffle for $type {
            const WIDE: bool = false;
            #[inline(always)]
            fn to_word(self) -> u32 {
                $to(self)
            }
            #[inline(always)]
            fn from_word(word: u32) -> Self {
                $from(word)
            }
        }
    )*};
}

macro_rules! shuffle_64 {
    ($($type:ty: $to:expr, $from:expr;)*) => {$(
        impl Shuffle for $type {
            const WIDE: bool = true;
            #[inline(always)]
            fn to_word(self) -> u32 {
                self.to_halves()[0]
            }
            #[inline(always)]
            fn from_word(word: u32) -> Self {
                Self::from_halves([word, 0])
            }
            #[inline(always)]
            fn to_halves(self) -> [u32; 2] {
                let bits: u64 = $to(self);
                [bits as u32, (bits >> 32) as u32]
            }
            #[inline(always)]
            fn from_halves([low, high]: [u32; 2]) -> Self {
                $from(u64::from(low) | u64::from(high) << 32)
            }
        }
    )*};
}

shuffle_32! {
    u32: core::convert::identity, core::convert::identity;
    i32: i32::cast_unsigned, u32::cast_signed;
    f32: f32::to_bits, f32::from_bits;
}

shuffle_64! {
    u64: core::convert::identity, core::convert::identity;
    i64: i64::cast_unsigned, u64::cast_signed;
    f64: f64::to_bits, f64::from_bits;
}

/// Defines a shuffle of values from the instruction for words.
macro_rules! shuffles {
    ($($(#[$doc:meta])* $name:ident($($parameter:ident),*) = $word:ident;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        #[track_caller]
        pub fn $name<S: Shuffle>(value: S, $($parameter: u32),*) -> S {
            if S::WIDE {
                let [low, high] = value.to_halves();
                S::from_halves([backend::$word(low, $($parameter),*), backend::$word(high, $($parameter),*)])
            } else {
                S::from_word(backend::$word(value.to_word(), $($parameter),*))
            }
        }
    )*};
}

shuffles! {
    /// Returns `value` of lane `from` (`shfl.sync.idx.b32`).
    shuffle(from) = shuffle_idx;
    /// Returns `value` of lane `lane() ^ mask` (`shfl.sync.bfly.b32`).
    shuffle_xor(mask) = shuffle_xor;
    /// Returns `value` of lane `lane() + delta`, or the lane's own value past the last lane (`shfl.sync.down.b32`).
    shuffle_down(delta) = shuffle_down;
    /// Returns `value` of lane `lane() - delta`, or the lane's own value before the first lane (`shfl.sync.up.b32`).
    shuffle_up(delta) = shuffle_up;
    /// Returns `value` of lane `from` among the lanes of `mask`, all of which must call it together (`shfl.sync.idx.b32`). This lane and
    /// lane `from` must be in `mask`.
    shuffle_masked(from, mask) = shuffle_masked;
}

/// Returns a mask of the lanes with a true `predicate` (`vote.sync.ballot.b32`).
#[inline(always)]
#[track_caller]
pub fn ballot(predicate: bool) -> u32 {
    backend::ballot(predicate)
}

/// Returns the lanes of `mask` with a true `predicate` (`vote.sync.ballot.b32`). All lanes of `mask` must call it together.
#[inline(always)]
#[track_caller]
pub fn ballot_masked(predicate: bool, mask: u32) -> u32 {
    backend::ballot_masked(predicate, mask)
}

/// Returns a mask of the lanes that execute this together (`activemask.b32`), at least this lane.
///
/// The hardware may run lanes of a branch one after the other. A result must not depend on which lanes are together. Typical use: one
/// of them does the work of all.
#[inline(always)]
#[track_caller]
pub fn active_mask() -> u32 {
    backend::active_mask()
}

/// Returns a mask of the lanes that have the same `value` as this lane, including this lane (`match.any.sync.b32`).
#[inline(always)]
#[track_caller]
pub fn match_any(value: u32) -> u32 {
    backend::match_any(value)
}

/// Returns a mask of the lanes whose lowest `BITS` bits of `value` are the same as this lane's, including this lane, by a vote for each
/// bit (`vote.sync.ballot.b32`). `BITS` is in 1..=32.
/// [`match_any`] compares all bits in one instruction. On an H200, a radix sort by 8 bits is 1.7 times as fast with these votes.
#[inline(always)]
#[track_caller]
pub fn match_low_bits<const BITS: u32>(value: u32) -> u32 {
    const { assert!(BITS >= 1 && BITS <= u32::BITS) };
    backend::match_low_bits::<BITS>(value)
}

/// Returns whether all lanes have the same `value` (`match.all.sync.b32`).
#[inline(always)]
#[track_caller]
pub fn match_all(value: u32) -> bool {
    backend::match_all(value)
}

/// Synchronizes the lanes of `mask` and orders their memory accesses (`bar.warp.sync mask`). This lane must be in `mask`.
#[inline(always)]
#[track_caller]
pub fn sync_masked(mask: u32) {
    backend::sync_masked(mask);
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
pub fn reduce<S: Shuffle>(mut value: S, op: impl Fn(S, S) -> S) -> S {
    value = op(value, shuffle_xor(value, 16));
    value = op(value, shuffle_xor(value, 8));
    value = op(value, shuffle_xor(value, 4));
    value = op(value, shuffle_xor(value, 2));
    op(value, shuffle_xor(value, 1))
}

mod private {
    /// An integer that one instruction reduces over the warp.
    pub trait Integer: Copy {
        fn reduce_add(self) -> Self;
        fn reduce_min(self) -> Self;
        fn reduce_max(self) -> Self;
    }
}

/// A type that [`reduce_add`], [`reduce_min`] and [`reduce_max`] reduce: u32 or i32.
pub trait Integer: private::Integer {}

macro_rules! integers {
    ($($type:ty: $add:ident, $min:ident, $max:ident;)*) => {$(
        impl private::Integer for $type {
            #[inline(always)]
            #[track_caller]
            fn reduce_add(self) -> Self {
                backend::$add(self)
            }
            #[inline(always)]
            #[track_caller]
            fn reduce_min(self) -> Self {
                backend::$min(self)
            }
            #[inline(always)]
            #[track_caller]
            fn reduce_max(self) -> Self {
                backend::$max(self)
            }
        }
        impl Integer for $type {}
    )*};
}

integers! {
    u32: reduce_add_u32, reduce_min_u32, reduce_max_u32;
    i32: reduce_add_i32, reduce_min_i32, reduce_max_i32;
}

/// Returns the sum of `value` over all lanes, modulo 2^32 (`redux.sync.add`).
#[inline(always)]
#[track_caller]
pub fn reduce_add<T: Integer>(value: T) -> T {
    value.reduce_add()
}

/// Returns the minimum of `value` over all lanes (`redux.sync.min`).
#[inline(always)]
#[track_caller]
pub fn reduce_min<T: Integer>(value: T) -> T {
    value.reduce_min()
}

/// Returns the maximum of `value` over all lanes (`redux.sync.max`).
#[inline(always)]
#[track_caller]
pub fn reduce_max<T: Integer>(value: T) -> T {
    value.reduce_max()
}

/// Returns the bitwise and of `value` over all lanes (`redux.sync.and.b32`).
#[inline(always)]
#[track_caller]
pub fn reduce_and(value: u32) -> u32 {
    backend::reduce_and(value)
}

/// Returns the bitwise or of `value` over all lanes (`redux.sync.or.b32`).
#[inline(always)]
#[track_caller]
pub fn reduce_or(value: u32) -> u32 {
    backend::reduce_or(value)
}

/// Returns the bitwise exclusive or of `value` over all lanes (`redux.sync.xor.b32`).
#[inline(always)]
#[track_caller]
pub fn reduce_xor(value: u32) -> u32 {
    backend::reduce_xor(value)
}

/// Reduces `value` over the four lanes that share a row of a tensor core's accumulators. Each of them receives the result.
#[inline(always)]
#[track_caller]
pub fn reduce_row<S: Shuffle>(value: S, op: impl Fn(S, S) -> S) -> S {
    let value = op(value, shuffle_xor(value, 1));
    op(value, shuffle_xor(value, 2))
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
