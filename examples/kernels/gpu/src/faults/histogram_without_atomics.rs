//! Planted fault 5: a histogram with ordinary additions.
//!
//! Problem: counts (16) u32 = how often each value 0..16 occurs in inp (n), counted in shared memory.
//! Fault: two threads with the same value read the same old count, and one increment is lost. `fetch_add` would be correct.
//! Report: a data race of the additions, at the first value that two warps share.

use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, kernel, thread};

/// Lays out the shared memory: the counts of the block.
pub fn shared(layout: &mut Layout) -> SharedArray<u32> {
    layout.array(16).named("counts")
}

/// Adds to counts. Grid: n / 128, rounded up.
#[kernel(threads = 128)]
pub fn fault_histogram_without_atomics(counts: GlobalMut<u32>, inp: Global<u32>, n: u64) {
    let (of_block, t, i) = (shared(&mut Layout::new()), thread::thread_idx_x() as usize, thread::index_1d());
    if t < 16 {
        of_block.set(t, 0);
    }
    thread::sync_threads();
    if i < n as usize {
        let value = inp.at(i) as usize;
        of_block.set(value, of_block.at(value) + 1); // fault: of_block.fetch_add(value, 1) would be atomic
    }
    thread::sync_threads();
    if t < 16 {
        counts.fetch_add(t, of_block.at(t));
    }
}
