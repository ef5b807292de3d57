//! Reductions over the threads of a block.

use crate::shared::SharedArray;
use crate::{thread, warp};

/// Folds `value` over all threads of the block in a fixed order; every thread gets the result. `scratch`: 32 floats,
/// free for reuse when the call returns. The block must be whole warps.
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

#[inline(always)]
#[track_caller]
pub fn sum(value: f32, scratch: SharedArray<f32>) -> f32 {
    reduce(value, 0.0, scratch, |a, b| a + b)
}

/// As [`sum`] of each value, with the barriers of one. `scratch`: 32 floats for each.
#[inline(always)]
#[track_caller]
pub fn sums<const N: usize, const M: usize>(values: [[f32; N]; M], scratch: SharedArray<f32>) -> [[f32; N]; M] {
    let (lane, index) = (warp::lane() as usize, warp::index() as usize);
    let place = |i: usize, j: usize, of_warp: usize| (i * N + j) * warp::LANES as usize + of_warp;
    let values = values.map(|values| values.map(warp::sum));
    thread::sync_threads();
    if lane == 0 {
        for i in 0..M {
            for j in 0..N {
                scratch.set(place(i, j, index), values[i][j]);
            }
        }
    }
    thread::sync_threads();
    let warps = (thread::block_dim_x() / warp::LANES) as usize;
    let mut partial = [[0.0; N]; M];
    for i in 0..M {
        for j in 0..N {
            if lane < warps {
                partial[i][j] = scratch.at(place(i, j, lane));
            }
        }
    }
    partial.map(|values| values.map(warp::sum))
}

#[inline(always)]
#[track_caller]
pub fn max(value: f32, scratch: SharedArray<f32>) -> f32 {
    reduce(value, f32::NEG_INFINITY, scratch, crate::math::max)
}
