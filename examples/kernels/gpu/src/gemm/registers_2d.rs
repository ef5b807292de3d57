//! GEMM, version 5: 8 x 8 results for each thread.
//!
//! Problem: as in version 1.
//! Idea: a thread loads 8 elements of a and 8 of b, and uses each 8 times: 16 loads for 64 multiply-adds. A block computes 128 x 128
//! elements with 256 threads, so global memory also supplies half as much as in version 4.
//! Limit: each load from shared or global memory moves one element.

use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedArray, bf16, kernel, math, thread};

/// Rows and columns of the block's part of out.
pub const TILE: usize = 128;
/// Columns of K that are in shared memory at a time.
const DEPTH: usize = 8;
/// Rows and columns that a thread computes.
const SIDE: usize = 8;
const THREADS: usize = 256;

/// Lays out the shared memory: the tiles of a (128, 8) and b (8, 128).
pub fn shared(layout: &mut Layout) -> (SharedArray<f32>, SharedArray<f32>) {
    (layout.array(TILE * DEPTH).named("a_tile"), layout.array(DEPTH * TILE).named("b_tile"))
}

/// Computes out. Grid: (N / 128, M / 128), rounded up.
///
/// With at most 128 registers for each thread, an SM runs two blocks: one multiplies while the other copies.
#[kernel(threads = 256, blocks_per_sm = 2)]
pub fn gemm_registers_2d(out: GlobalMut<bf16>, a: Global<bf16>, b: Global<bf16>, m: u32, n: u32, k: u32) {
    let (a_tile, b_tile) = shared(&mut Layout::new());
    let (m, n, k, t) = (m as usize, n as usize, k as usize, thread::thread_idx_x() as usize);
    let (first_row, first_column) = (thread::block_idx_y() as usize * TILE, thread::block_idx_x() as usize * TILE);
    let (x, y) = (t % 16, t / 16);
    let mut sums = [[0.0; SIDE]; SIDE];
    for first in (0..k).step_by(DEPTH) {
        for i in (t..TILE * DEPTH).step_by(THREADS) {
            let (row, l) = (first_row + i / DEPTH, first + i % DEPTH);
            a_tile.set(i, if row < m && l < k { a.at(row * k + l).to_f32() } else { 0.0 });
            let (l, column) = (first + i / TILE, first_column + i % TILE);
            b_tile.set(i, if l < k && column < n { b.at(l * n + column).to_f32() } else { 0.0 });
        }
        thread::sync_threads();
        for l in 0..DEPTH {
            let (mut of_a, mut of_b) = ([0.0; SIDE], [0.0; SIDE]);
            for s in 0..SIDE {
                of_a[s] = a_tile.at((y * SIDE + s) * DEPTH + l);
                // Neighboring threads read neighboring columns, which are in different banks of shared memory.
                of_b[s] = b_tile.at(l * TILE + s * 16 + x);
            }
            for r in 0..SIDE {
                for c in 0..SIDE {
                    sums[r][c] = math::fma(of_a[r], of_b[c], sums[r][c]);
                }
            }
        }
        thread::sync_threads();
    }
    for r in 0..SIDE {
        for c in 0..SIDE {
            let (row, column) = (first_row + y * SIDE + r, first_column + c * 16 + x);
            if row < m && column < n {
                out.set(row * n + column, bf16::from_f32(sums[r][c]));
            }
        }
    }
}
