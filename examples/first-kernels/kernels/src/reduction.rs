//! Block reduction.
//!
//! **Problem.** The sum of each block's elements. `cuda_std::block::sum` does the same; this file shows how.
//!
//! **Idea.** Five shuffles leave the sum of a warp in all its lanes, without shared memory. The first lane of each warp stores it in
//! shared memory, and after a barrier the first warp adds these sums in the same way. The order of additions is fixed, so the result
//! has the same bits in each run.
//!
//! **Tests.** Lengths that are not multiples of the block or the warp. A missing barrier is a data race between a store and a load
//! of `warp sums`; a sums buffer with fewer elements than blocks is an out-of-bounds access.

use cuda_std::shared::Layout;
use cuda_std::{GlobalSlice, GlobalSliceMut, SharedArray, kernel, thread, warp};

/// Threads per block.
pub const THREADS: usize = 256;

/// Returns the grid for `n` elements.
pub const fn grid(n: usize) -> [u32; 3] {
    [n.div_ceil(THREADS) as u32, 1, 1]
}

/// Defines the shared memory: one sum for each warp.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(THREADS / warp::LANES as usize).named("warp sums")
}

/// Returns the sum of `value` over all lanes of the warp, in every lane.
fn warp_sum(mut value: f32) -> f32 {
    for distance in [16, 8, 4, 2, 1] {
        value += warp::shuffle_xor(value, distance);
    }
    value
}

/// Computes the sum of each block's elements of x (n) in sums (number of blocks).
#[kernel(threads = 256, shared = shared, checked)]
pub fn block_sums(sums: GlobalSliceMut<f32>, x: GlobalSlice<f32>) {
    let warp_sums = shared(&mut Layout::new());
    let (lane, warp) = (warp::lane(), warp::index());
    let sum = warp_sum(x.get(thread::index_1d()).unwrap_or(0.0));
    if lane == 0 {
        warp_sums.set(warp as usize, sum);
    }
    thread::sync_threads();
    if warp == 0 {
        let warps = thread::block_dim_x() / warp::LANES;
        let sum = warp_sum(if lane < warps { warp_sums.at(lane as usize) } else { 0.0 });
        if lane == 0 {
            sums.set(thread::block_idx_x() as usize, sum);
        }
    }
}
