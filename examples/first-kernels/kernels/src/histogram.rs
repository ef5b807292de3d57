//! Histogram of bytes.
//!
//! **Problem.** The number of occurrences of each byte value. Atomic additions to the 256 global counters would all meet in L2.
//!
//! **Idea.** Each block counts in shared memory, whose atomics are faster, and then adds its 256 counters to the global ones. A
//! block processes many elements (a grid-stride loop), so that there are few global additions. Additions of integers give the same
//! result in any order.
//!
//! **Tests.** Any length, including 0. Two launches add up. A counts buffer with fewer than 256 elements is an out-of-bounds access.

use cuda_std::shared::Layout;
use cuda_std::{GlobalSlice, GlobalSliceMut, SharedArray, kernel, thread};

/// Threads per block, one for each byte value.
pub const THREADS: usize = 256;

/// Returns the grid for `n` elements: at least 16 elements for each thread, and at most `blocks` blocks.
pub const fn grid(n: usize, blocks: u32) -> [u32; 3] {
    let needed = n.div_ceil(16 * THREADS) as u32;
    [
        if needed == 0 {
            1
        } else if needed < blocks {
            needed
        } else {
            blocks
        },
        1,
        1,
    ]
}

/// Defines the shared memory: the counters of the block.
pub fn shared(layout: &mut Layout) -> SharedArray<u32> {
    layout.array(THREADS).named("block counts")
}

/// Adds the number of occurrences of each byte value in x (n) to counts (256).
#[kernel(threads = 256, shared = shared, checked)]
pub fn histogram(counts: GlobalSliceMut<u32>, x: GlobalSlice<u8>) {
    let block_counts = shared(&mut Layout::new());
    let t = thread::thread_idx_x() as usize;
    block_counts.set(t, 0);
    thread::sync_threads();
    let mut i = thread::index_1d();
    while i < x.len() {
        block_counts.fetch_add(x.at(i) as usize, 1);
        i += thread::count_1d();
    }
    thread::sync_threads();
    let count = block_counts.at(t);
    if count > 0 {
        counts.fetch_add(t, count);
    }
}
