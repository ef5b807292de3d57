//! Planted fault 7: lanes that exchange data through shared memory without `warp::sync`.
//!
//! Problem: out (n) f32 = inp (n) with neighbors exchanged, through shared memory.
//! Fault: since Volta, the lanes of a warp do not run in lockstep: a lane may read before its neighbor has written. A shuffle would
//! not order the accesses either.
//! Report: a data race between two lanes of one warp.

use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, kernel, thread};

/// Lays out the shared memory: one element for each thread.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(32).named("elements")
}

/// Computes out. Grid: n / 32.
#[kernel(threads = 32)]
pub fn fault_shuffle_without_sync(out: GlobalMut<f32>, inp: Global<f32>) {
    let (elements, t) = (shared(&mut Layout::new()), thread::thread_idx_x() as usize);
    elements.set(t, inp.at(thread::index_1d()));
    let neighbor = elements.at(t ^ 1); // fault: warp::sync() must come before
    out.set(thread::index_1d(), neighbor);
}
