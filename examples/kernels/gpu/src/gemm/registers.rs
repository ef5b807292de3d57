//! GEMM, version 4: eight results for each thread.
//!
//! Problem: as in version 1.
//! Idea: a thread computes 8 elements of one column. An element of b is loaded from shared memory once and used 8 times from a
//! register: 9 loads for 8 multiply-adds instead of 16. A block computes 64 x 64 elements with 512 threads.
//! Limit: shared memory. The elements of a are still loaded for each use, although all lanes of a warp read the same one.

use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedArray, bf16, kernel, math, thread};

/// Rows and columns of the block's part of out.
pub const TILE: usize = 64;
/// Columns of K that are in shared memory at a time.
const DEPTH: usize = 8;
/// Rows that a thread computes.
const ROWS: usize = 8;

/// Lays out the shared memory: the tiles of a (64, 8) and b (8, 64).
pub fn shared(layout: &mut Layout) -> (SharedArray<f32>, SharedArray<f32>) {
    (layout.array(TILE * DEPTH).named("a_tile"), layout.array(DEPTH * TILE).named("b_tile"))
}

/// Computes out. Grid: (N / 64, M / 64), rounded up.
#[kernel(threads = 512)]
pub fn gemm_registers(out: GlobalMut<bf16>, a: Global<bf16>, b: Global<bf16>, m: u32, n: u32, k: u32) {
    let (a_tile, b_tile) = shared(&mut Layout::new());
    let (m, n, k, t) = (m as usize, n as usize, k as usize, thread::thread_idx_x() as usize);
    let (first_row, first_column) = (thread::block_idx_y() as usize * TILE, thread::block_idx_x() as usize * TILE);
    // Each thread copies one element of each tile, and computes rows 8 y to 8 y + 7 of column x.
    let (x, y) = (t % TILE, t / TILE);
    let mut sums = [0.0; ROWS];
    for first in (0..k).step_by(DEPTH) {
        let (row, l) = (first_row + t / DEPTH, first + t % DEPTH);
        a_tile.set(t, if row < m && l < k { a.at(row * k + l).to_f32() } else { 0.0 });
        let (l, column) = (first + y, first_column + x);
        b_tile.set(t, if l < k && column < n { b.at(l * n + column).to_f32() } else { 0.0 });
        thread::sync_threads();
        for l in 0..DEPTH {
            let of_b = b_tile.at(l * TILE + x);
            for r in 0..ROWS {
                sums[r] = math::fma(a_tile.at((y * ROWS + r) * DEPTH + l), of_b, sums[r]);
            }
        }
        thread::sync_threads();
    }
    for r in 0..ROWS {
        let (row, column) = (first_row + y * ROWS + r, first_column + x);
        if row < m && column < n {
            out.set(row * n + column, bf16::from_f32(sums[r]));
        }
    }
}
