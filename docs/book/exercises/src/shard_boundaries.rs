//! Exercise: the shard of a rank.
//!
//! A unit of parameters is one contiguous range that holds several tensors, one after another. N ranks shard it: the unit is padded at
//! its end so that all shards have the same length and begin at multiples of 64 elements, relative to the unit's start. A tensor may lie in
//! one shard, in several, or, from the view of one rank, not at all. The chapter "ZeRO" has an example.

use std::ops::Range;

/// Shards begin at multiples of this many elements.
pub const ALIGNMENT: usize = 64;

/// Returns the elements of each of `n` shards of a unit of `elements` elements, padding included. It is as small as possible.
pub fn shard_elements(elements: usize, n: usize) -> usize {
    unimplemented!("exercise shard_boundaries: {elements} {n}")
}

/// Returns the range of the shard of `rank` of `n`, relative to the start of the unit. It may contain padding, or only padding.
pub fn shard(elements: usize, rank: usize, n: usize) -> Range<usize> {
    unimplemented!("exercise shard_boundaries: {elements} {rank} {n}")
}

/// The part of a tensor that a rank has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Elements of the tensor, from its start.
    pub of_tensor: Range<usize>,
    /// The same elements, from the start of the shard.
    pub of_shard: Range<usize>,
}

/// Returns the part of `tensor` that lies in `shard`, or `None` if there is none. Both ranges are relative to the start of the unit.
pub fn held(tensor: &Range<usize>, shard: &Range<usize>) -> Option<Held> {
    unimplemented!("exercise shard_boundaries: {tensor:?} {shard:?}")
}
