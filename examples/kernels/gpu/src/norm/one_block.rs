//! Norm, version 1: one block with a tree in shared memory.
//!
//! Problem: norm (1) f32 = sqrt(sum of the squares of values (n) bf16).
//! Idea: each thread adds up every 1024th element, which is coalesced. The 1024 partial sums are then added pairwise in shared
//! memory: half of the threads add the other half's sums to their own, then a quarter, and so on. A barrier separates the steps.
//! Limit: one SM. It cannot have enough loads in flight to use more than a small part of the memory bandwidth.

use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedArray, bf16, kernel, math, thread};

const THREADS: usize = 1024;

/// Lays out the shared memory: one sum for each thread.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(THREADS).named("sums")
}

/// Computes the norm. Grid: 1.
#[kernel(threads = 1024)]
pub fn norm_one_block(norm: GlobalMut<f32>, values: Global<bf16>, n: u64) {
    let (sums, t) = (shared(&mut Layout::new()), thread::thread_idx_x() as usize);
    let (mut sum, mut i) = (0.0, t);
    while i < n as usize {
        let x = values.at(i).to_f32();
        sum += x * x;
        i += THREADS;
    }
    sums.set(t, sum);
    let mut half = THREADS / 2;
    while half > 0 {
        thread::sync_threads();
        if t < half {
            sums.set(t, sums.at(t) + sums.at(t + half));
        }
        half /= 2;
    }
    if t == 0 {
        norm.set(0, math::sqrt(sums.at(0)));
    }
}
