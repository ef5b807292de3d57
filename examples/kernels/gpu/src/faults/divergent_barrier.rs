//! Planted fault 6: a barrier that some threads never reach.
//!
//! Problem: out (n) f32 = inp (n) in reverse order within each block of 128 elements, through shared memory.
//! Fault: the barrier is inside of the condition, so threads without an element never reach it, in the middle of a warp. A barrier
//! counts warps: the lanes of a warp must reach it together.
//! Report: a deadlock, with the threads that wait, their line, and the threads that have finished.

use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, kernel, thread};

const THREADS: usize = 128;

/// Lays out the shared memory: one element for each thread.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(THREADS).named("elements")
}

/// Computes out. Grid: n / 128, rounded up.
#[kernel(threads = 128)]
pub fn fault_divergent_barrier(out: GlobalMut<f32>, inp: Global<f32>, n: u64) {
    let (elements, t, i) = (shared(&mut Layout::new()), thread::thread_idx_x() as usize, thread::index_1d());
    if i < n as usize {
        elements.set(t, inp.at(i));
        thread::sync_threads(); // fault: inside of the condition
        let count = THREADS.min(n as usize - thread::block_idx_x() as usize * THREADS);
        out.set(i, elements.at(count - 1 - t));
    }
}
