//! Inclusive prefix sum over many blocks.
//!
//! **Problem.** Element i of the result is the sum of elements 0 to i, so the last one depends on all blocks.
//!
//! **Idea.** Three launches: a prefix sum of each block, with the sum of the block stored; a prefix sum of these sums, by one block;
//! and an addition of the sum of all earlier blocks. Within a warp, lane l adds the value of lane l - 1, then of l - 2, 4, 8 and 16.
//! Launches on one stream run in order, so no block waits for another one.
//!
//! **Tests.** Lengths up to more than 512 blocks, so that the second launch needs three rounds. Sums wrap around at 2^32. A sums
//! buffer with fewer elements than blocks is an out-of-bounds access.

use cuda_std::shared::Layout;
use cuda_std::{GlobalSliceMut, SharedArray, kernel, thread, warp};

/// Threads per block.
pub const THREADS: usize = 256;

/// Returns the grid of the first and the third launch for `n` elements. The second one has one block.
pub const fn grid(n: usize) -> [u32; 3] {
    [n.div_ceil(THREADS) as u32, 1, 1]
}

/// Defines the shared memory: one sum for each warp.
pub fn shared(layout: &mut Layout) -> SharedArray<u32> {
    layout.array(THREADS / warp::LANES as usize).named("warp sums")
}

/// Returns the sum of the values of this and all earlier threads of the block, and that of all threads.
fn block_scan(mut value: u32, warp_sums: SharedArray<u32>) -> (u32, u32) {
    let (lane, warp) = (warp::lane(), warp::index() as usize);
    for distance in [1, 2, 4, 8, 16] {
        let earlier = warp::shuffle_up(value, distance);
        value = value.wrapping_add(if lane >= distance { earlier } else { 0 });
    }
    thread::sync_threads(); // the previous round reads warp_sums
    if lane == warp::LANES - 1 {
        warp_sums.set(warp, value);
    }
    thread::sync_threads();
    let sum_of = |warps: usize| (0..warps).fold(0u32, |sum, w| sum.wrapping_add(warp_sums.at(w)));
    (value.wrapping_add(sum_of(warp)), sum_of(THREADS / warp::LANES as usize))
}

/// First launch: replaces x (n) by the prefix sums within each block, and stores the sum of each block in sums (number of blocks).
#[kernel(threads = 256, shared = shared, checked)]
pub fn scan_blocks(x: GlobalSliceMut<u32>, sums: GlobalSliceMut<u32>) {
    let i = thread::index_1d();
    let (prefix, all) = block_scan(if i < x.len() { x.at(i) } else { 0 }, shared(&mut Layout::new()));
    if i < x.len() {
        x.set(i, prefix);
    }
    if thread::thread_idx_x() == 0 {
        sums.set(thread::block_idx_x() as usize, all);
    }
}

/// Second launch, of one block: replaces sums by its prefix sums.
#[kernel(threads = 256, shared = shared, checked)]
pub fn scan_sums(sums: GlobalSliceMut<u32>) {
    let mut carry = 0u32;
    for start in (0..sums.len()).step_by(THREADS) {
        let i = start + thread::thread_idx_x() as usize;
        let (prefix, all) = block_scan(if i < sums.len() { sums.at(i) } else { 0 }, shared(&mut Layout::new()));
        if i < sums.len() {
            sums.set(i, carry.wrapping_add(prefix));
        }
        carry = carry.wrapping_add(all);
    }
}

/// Third launch: adds the sum of all earlier blocks to the elements of each block.
#[kernel(threads = 256, checked)]
pub fn add_sums(x: GlobalSliceMut<u32>, sums: GlobalSliceMut<u32>) {
    let (i, block) = (thread::index_1d(), thread::block_idx_x() as usize);
    if block > 0 && i < x.len() {
        x.set(i, x.at(i).wrapping_add(sums.at(block - 1)));
    }
}
