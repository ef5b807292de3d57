//! Norm, version 2: many blocks, and one atomic addition for each.
//!
//! Problem: as in version 1, in two kernels: the first computes sum (1), which must be 0 before, and `norm_root` its root.
//! Idea: each block adds up 512 elements with the same tree, and adds its result atomically to the sum. Now all SMs work.
//! Limit: each element has its own thread. A warp waits for 64 bytes, and then for shared memory and barriers in the nine steps of
//! the tree. The order of the atomic additions differs between runs, so the result is not reproducible.

use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedArray, bf16, kernel, thread};

const THREADS: usize = 512;

/// Lays out the shared memory: one sum for each thread.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(THREADS).named("sums")
}

/// Adds the sum of squares to sum (1). Grid: n / 512, rounded up.
#[kernel(threads = 512)]
pub fn norm_blocks(sum: GlobalMut<f32>, values: Global<bf16>, n: u64) {
    let (sums, t, i) = (shared(&mut Layout::new()), thread::thread_idx_x() as usize, thread::index_1d());
    let x = if i < n as usize { values.at(i).to_f32() } else { 0.0 };
    sums.set(t, x * x);
    let mut half = THREADS / 2;
    while half > 0 {
        thread::sync_threads();
        if t < half {
            sums.set(t, sums.at(t) + sums.at(t + half));
        }
        half /= 2;
    }
    if t == 0 {
        sum.atomic_add(0, sums.at(0));
    }
}
