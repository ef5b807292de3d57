//! Planted fault 1: a tree reduction without its barrier.
//!
//! Problem: out (blocks) f32 = the sum of each block's 256 elements of inp, as in version 2 of the norm.
//! Fault: the barrier between two steps of the tree is missing. A warp may add an element that another warp has not yet written.
//! Report: a data race, with the lines of the write and of the read.

use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, kernel, thread};

const THREADS: usize = 256;

/// Lays out the shared memory: one sum for each thread.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(THREADS).named("sums")
}

/// Computes out. Grid: n / 256.
#[kernel(threads = 256)]
pub fn fault_missing_barrier(out: GlobalMut<f32>, inp: Global<f32>) {
    let (sums, t) = (shared(&mut Layout::new()), thread::thread_idx_x() as usize);
    sums.set(t, inp.at(thread::index_1d()));
    thread::sync_threads();
    let mut half = THREADS / 2;
    while half > 0 {
        if t < half {
            sums.set(t, sums.at(t) + sums.at(t + half)); // fault: thread::sync_threads() must follow this step
        }
        half /= 2;
    }
    if t == 0 {
        out.set(thread::block_idx_x() as usize, sums.at(0));
    }
}
