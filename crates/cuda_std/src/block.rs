//! Block-wide reductions.

use crate::shared::SharedArray;
use crate::{thread, warp};

/// Reduces `value` over all threads of the block in a fixed order. Every thread receives the result.
///
/// `scratch` holds 32 floats. The next call of `reduce` can use it at once; any other reuse needs a barrier first. The
/// block must consist of whole warps.
#[inline(always)]
#[track_caller]
pub fn reduce(value: f32, identity: f32, scratch: SharedArray<f32>, op: impl Fn(f32, f32) -> f32 + Copy) -> f32 {
    let (lane, index) = (warp::lane(), warp::index());
    let value = warp::reduce(value, op);
    thread::sync_threads();
    if lane == 0 {
        scratch.set(index as usize, value);
    }
    thread::sync_threads();
    let warps = thread::block_dim_x() / warp::LANES;
    let partial = if lane < warps { scratch.at(lane as usize) } else { identity };
    warp::reduce(partial, op)
}

/// Returns the sum of `value` over all threads of the block. See [`reduce`].
#[inline(always)]
#[track_caller]
pub fn sum(value: f32, scratch: SharedArray<f32>) -> f32 {
    reduce(value, 0.0, scratch, |a, b| a + b)
}

/// Returns the sum of each of the `M` x `N` values over all threads of a block of `WARPS` warps.
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
