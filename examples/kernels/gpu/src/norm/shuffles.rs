//! Norm, version 3: warp shuffles instead of the tree.
//!
//! Problem: as in version 2.
//! Idea: the lanes of a warp exchange registers with `shfl.sync`: five steps reduce 32 values without shared memory and without a
//! barrier. Only the 16 sums of the warps pass through shared memory, so one barrier remains of nine.
//! Limit: one element for each thread: a warp has 64 bytes in flight, and 512 elements pay for a reduction and the start of a
//! block.

use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedArray, bf16, kernel, thread, warp};

const WARPS: u32 = 16;

/// Lays out the shared memory: one sum for each warp.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(WARPS as usize).named("sums")
}

/// Adds the sum of squares to sum (1). Grid: n / 512, rounded up.
#[kernel(threads = 512)]
pub fn norm_shuffles(sum: GlobalMut<f32>, values: Global<bf16>, n: u64) {
    let (sums, i) = (shared(&mut Layout::new()), thread::index_1d());
    let x = if i < n as usize { values.at(i).to_f32() } else { 0.0 };
    // All lanes must take part in a shuffle, and `warp::index` is one: outside of conditions.
    let (of_warp, lane, warp) = (warp::sum(x * x), warp::lane(), warp::index());
    if lane == 0 {
        sums.set(warp as usize, of_warp);
    }
    thread::sync_threads();
    if warp == 0 {
        let of_block = warp::sum(if lane < WARPS { sums.at(lane as usize) } else { 0.0 });
        if lane == 0 {
            sum.atomic_add(0, of_block);
        }
    }
}
