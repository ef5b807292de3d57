//! GEMM, version 3: tiles in shared memory.
//!
//! Problem: as in version 1.
//! Idea: a block computes 32 x 32 elements of out. For each 32 columns of K, it copies a tile of a and a tile of b to shared memory,
//! and every element is used 32 times from there. Global memory supplies 32 times fewer bytes. One barrier makes the tiles
//! visible to all threads, a second one keeps the next copies from overwriting them too early.
//! Limit: shared memory. The source has two loads for each multiply-add. The compiler merges loads of adjacent elements of a, and 40
//! loads for 32 multiply-adds remain.

use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedArray, bf16, kernel, math, thread};

/// Rows and columns of a tile.
pub const TILE: usize = 32;

/// Lays out the shared memory: the tiles of a and b.
pub fn shared(layout: &mut Layout) -> (SharedArray<f32>, SharedArray<f32>) {
    (layout.array(TILE * TILE).named("a_tile"), layout.array(TILE * TILE).named("b_tile"))
}

/// Computes out. Grid: (N / 32, M / 32), rounded up.
#[kernel(threads = (32, 32))]
pub fn gemm_shared(out: GlobalMut<bf16>, a: Global<bf16>, b: Global<bf16>, m: u32, n: u32, k: u32) {
    let (a_tile, b_tile) = shared(&mut Layout::new());
    let (m, n, k) = (m as usize, n as usize, k as usize);
    let (x, y) = (thread::thread_idx_x() as usize, thread::thread_idx_y() as usize);
    let (row, column) = (thread::block_idx_y() as usize * TILE + y, thread::block_idx_x() as usize * TILE + x);
    let mut sum = 0.0;
    for first in (0..k).step_by(TILE) {
        let in_a = row < m && first + x < k;
        let in_b = first + y < k && column < n;
        a_tile.set(y * TILE + x, if in_a { a.at(row * k + first + x).to_f32() } else { 0.0 });
        b_tile.set(y * TILE + x, if in_b { b.at((first + y) * n + column).to_f32() } else { 0.0 });
        thread::sync_threads();
        for l in 0..TILE {
            sum = math::fma(a_tile.at(y * TILE + l), b_tile.at(l * TILE + x), sum);
        }
        thread::sync_threads();
    }
    if row < m && column < n {
        out.set(row * n + column, bf16::from_f32(sum));
    }
}
