//! Planted fault 2: a tail that is not bounded.
//!
//! Problem: out (n) = 2 inp (n) f32, four elements for each thread.
//! Fault: the condition tests the thread's first element only. If n is not a multiple of 4, the last thread accesses up to three
//! elements past the end: on a GPU, those of whatever lies behind the array.
//! Report: an out-of-bounds access, with the array, its size and the index.

use cuda_std::{Global, GlobalMut, kernel, thread};

/// Computes out. Grid: n / 1024, rounded up.
#[kernel(threads = 256)]
pub fn fault_missing_bound(out: GlobalMut<f32>, inp: Global<f32>, n: u64) {
    let i = 4 * thread::index_1d();
    if i < n as usize {
        out.set_four(i, inp.four(i).map(|x| 2.0 * x)); // fault: i + 4 may exceed n
    }
}
