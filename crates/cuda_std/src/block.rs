//! Block-wide reductions, scans and sorts.
//!
//! All threads of the block must call these functions together. The block must consist of whole warps. It may have one, two or three
//! dimensions, except for [`sums`] and [`sums_of_group`]: threads are in the order of [`thread::linear_index`].
//!
//! [`reduce`], [`scan`] and the functions that call them contain two barriers. The first one precedes the first access to `scratch`,
//! so `scratch` may be in use before the call. The second one precedes the last reads of `scratch`. The next call of one of these functions
//! can therefore use the same `scratch` at once, and any other use needs a barrier first.

mod sort;

use crate::shared::SharedArray;
use crate::warp::Shuffle;
use crate::{thread, warp};
use core::ops::Add;

pub use sort::{sort, sort_pairs, sort_pairs_scratch, sort_scratch};

/// Number of elements of `scratch` of a reduction or a scan: one for each warp of the largest block.
pub const SCRATCH: usize = 32;

/// Returns the number of warps of the block.
#[inline(always)]
fn warps() -> u32 {
    (thread::block_dim_x() * thread::block_dim_y() * thread::block_dim_z()).div_ceil(warp::LANES)
}

/// Reduces `value` over all threads of the block with a commutative `op` in a fixed order. Every thread receives the result.
///
/// `scratch` holds [`SCRATCH`] elements. See the [module](self) for its reuse.
#[inline(always)]
#[track_caller]
pub fn reduce<S: Shuffle>(value: S, identity: S, scratch: SharedArray<S>, op: impl Fn(S, S) -> S + Copy) -> S {
    let (lane, index) = (thread::linear_index() % warp::LANES, warp::linear_index());
    let value = warp::reduce(value, op);
    thread::sync_threads();
    if lane == 0 {
        scratch.set(index as usize, value);
    }
    thread::sync_threads();
    let partial = if lane < warps() { scratch.at(lane as usize) } else { identity };
    warp::reduce(partial, op)
}

/// Returns the sum of `value` over all threads of the block. See [`reduce`].
#[inline(always)]
#[track_caller]
pub fn sum<S: Shuffle + Default + Add<Output = S>>(value: S, scratch: SharedArray<S>) -> S {
    reduce(value, S::default(), scratch, |a, b| a + b)
}

/// The results of a [`scan`].
#[derive(Clone, Copy)]
pub struct Scan<S> {
    /// The reduction of the values of this thread and all threads before it.
    pub inclusive: S,
    /// The reduction of the values of all threads before this one; the identity in the first thread.
    pub exclusive: S,
    /// The reduction of the values of all threads.
    pub total: S,
}

/// Computes the prefix reductions of `value` in the order of the threads, with an associative `op` that need not be commutative.
///
/// `scratch` holds [`SCRATCH`] elements. See the [module](self) for its reuse. Sums of floating-point numbers are added in a fixed order,
/// which is not that of a loop over the threads.
#[inline(always)]
#[track_caller]
pub fn scan<S: Shuffle>(value: S, identity: S, scratch: SharedArray<S>, op: impl Fn(S, S) -> S + Copy) -> Scan<S> {
    thread::sync_threads();
    scan_with_free_scratch(value, identity, scratch, op)
}

/// Same as [`scan`], without the barrier before the first access to `scratch`.
#[inline(always)]
#[track_caller]
fn scan_with_free_scratch<S: Shuffle>(
    value: S,
    identity: S,
    scratch: SharedArray<S>,
    op: impl Fn(S, S) -> S + Copy,
) -> Scan<S> {
    let (lane, index, warps) = (thread::linear_index() % warp::LANES, warp::linear_index(), warps());
    let within = scan_of_warp(value, lane, op);
    if lane == warp::LANES - 1 {
        scratch.set(index as usize, within);
    }
    thread::sync_threads();
    let of_warp = if lane < warps { scratch.at(lane as usize) } else { identity };
    let of_warps = scan_of_warp(of_warp, lane, op);
    let total = warp::shuffle(of_warps, warps - 1);
    let before = warp::shuffle(of_warps, (index + warp::LANES - 1) % warp::LANES);
    let before = if index == 0 { identity } else { before };
    let inclusive = op(before, within);
    let previous = warp::shuffle_up(inclusive, 1);
    Scan { inclusive, exclusive: if lane == 0 { before } else { previous }, total }
}

/// Returns the reduction of `value` over the lanes up to this one.
#[inline(always)]
#[track_caller]
fn scan_of_warp<S: Shuffle>(mut value: S, lane: u32, op: impl Fn(S, S) -> S) -> S {
    let mut distance = 1;
    while distance < warp::LANES {
        let before = warp::shuffle_up(value, distance);
        if lane >= distance {
            value = op(before, value);
        }
        distance *= 2;
    }
    value
}

/// Returns the sum of `value` over this thread and all threads before it. See [`scan`].
#[inline(always)]
#[track_caller]
pub fn inclusive_sum<S: Shuffle + Default + Add<Output = S>>(value: S, scratch: SharedArray<S>) -> S {
    scan(value, S::default(), scratch, |a, b| a + b).inclusive
}

/// Returns the sum of `value` over all threads before this one, 0 in the first thread. See [`scan`].
#[inline(always)]
#[track_caller]
pub fn exclusive_sum<S: Shuffle + Default + Add<Output = S>>(value: S, scratch: SharedArray<S>) -> S {
    scan(value, S::default(), scratch, |a, b| a + b).exclusive
}

/// Returns the sum of each of the `M` x `N` values over all threads of a one-dimensional block of `WARPS` warps.
///
/// The cost is little more than that of one sum. `M` x `N` must be 1, 2 or 4, and `WARPS` 4, 8 or 16. `scratch` holds
/// `M` x `N` x `WARPS` floats that no thread is still reading. The function contains one barrier, so two scratch arrays
/// can be used alternately (double-buffered) without further barriers.
#[inline(always)]
#[track_caller]
pub fn sums<const WARPS: usize, const N: usize, const M: usize>(
    values: [[f32; N]; M],
    scratch: SharedArray<f32>,
) -> [[f32; N]; M] {
    sums_at::<WARPS, N, M>(values, scratch, thread::sync_threads)
}

/// Returns the sum of each value over the threads of a group of `WARPS` consecutive warps. See [`sums`].
///
/// The first warp of the group has an index divisible by `WARPS`. `WARPS` may also be 1, which needs no scratch.
/// `group` is the index of the group. A group of several warps uses named barrier `1 + group` and its own scratch.
#[inline(always)]
#[track_caller]
pub fn sums_of_group<const WARPS: usize, const N: usize, const M: usize>(
    values: [[f32; N]; M],
    scratch: SharedArray<f32>,
    group: u32,
) -> [[f32; N]; M] {
    sums_at::<WARPS, N, M>(values, scratch, || thread::sync_named(1 + group, WARPS as u32 * warp::LANES))
}

#[inline(always)]
#[track_caller]
fn sums_at<const WARPS: usize, const N: usize, const M: usize>(
    values: [[f32; N]; M],
    scratch: SharedArray<f32>,
    barrier: impl FnOnce(),
) -> [[f32; N]; M] {
    if WARPS == 1 {
        return values.map(|some| some.map(warp::sum));
    }
    let (count, packets) = (const { N * M }, const { WARPS.div_ceil(4) });
    const { assert!(matches!(N * M, 1 | 2 | 4) && matches!(WARPS, 1 | 4 | 8 | 16)) }
    let lane = warp::lane();
    let mut kept = [0.0; 4];
    for i in 0..M {
        for j in 0..N {
            kept[i * N + j] = values[i][j];
        }
    }
    // Each lane keeps half of its values: it adds the partner's values of this half and passes on its own of the other.
    let halve = |kept: &mut [f32; 4], left: usize, offset: u32| {
        let upper = lane & offset != 0;
        for i in 0..left {
            let (own, given) = if upper { (kept[left + i], kept[i]) } else { (kept[i], kept[left + i]) };
            kept[i] = own + warp::shuffle_xor(given, offset);
        }
    };
    if count == 4 {
        halve(&mut kept, 2, 16);
        halve(&mut kept, 1, 8);
    } else if count == 2 {
        halve(&mut kept, 1, 16);
    }
    let lanes = warp::LANES / count as u32;
    let mut sum = kept[0];
    let mut offset = lanes / 2;
    while offset > 0 {
        sum += warp::shuffle_xor(sum, offset);
        offset /= 2;
    }
    if lane.is_multiple_of(lanes) {
        scratch.set((lane / lanes) as usize * WARPS + (thread::thread_idx_x() / warp::LANES) as usize % WARPS, sum);
    }
    barrier();

    let four = scratch.packet(lane as usize % (count * packets) * 4);
    let mut sum = (four.get(0) + four.get(1)) + (four.get(2) + four.get(3));
    if packets > 1 {
        sum += warp::shuffle_xor(sum, 1);
    }
    if packets > 2 {
        sum += warp::shuffle_xor(sum, 2);
    }
    let mut all = [[sum; N]; M];
    if count > 1 {
        for i in 0..M {
            for j in 0..N {
                all[i][j] = warp::shuffle(sum, ((i * N + j) * packets) as u32);
            }
        }
    }
    all
}

/// Returns the maximum of `value` over all threads of the block. See [`reduce`].
#[inline(always)]
#[track_caller]
pub fn max(value: f32, scratch: SharedArray<f32>) -> f32 {
    reduce(value, f32::NEG_INFINITY, scratch, crate::math::max)
}
