//! A GEMM with a double buffer of tiles in shared memory. Its barriers are missing.
//!
//! The kernel alternates between two pairs of tiles: it copies a pair, and multiplies it. Place `thread::sync_threads()` so that
//! no thread reads an element before it is written, or overwrites one that another thread still reads. One barrier for each step
//! is enough. Run the tests with no barrier first, and read the report.

use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, kernel, math, thread};

/// Rows and columns of a tile.
pub const TILE: usize = 16;

/// Lays out the shared memory: two pairs of tiles of a and b.
pub fn shared(layout: &mut Layout) -> [[SharedArray<f32>; 2]; 2] {
    let mut pair = || [layout.array(TILE * TILE).named("a_tile"), layout.array(TILE * TILE).named("b_tile")];
    [pair(), pair()]
}

/// Computes out (M, N) = a (M, K) · b (K, N). Grid: (N / 16, M / 16), rounded up.
#[kernel(threads = (16, 16))]
pub fn shared_tile_gemm(out: GlobalMut<f32>, a: Global<f32>, b: Global<f32>, m: u32, n: u32, k: u32) {
    let pairs = shared(&mut Layout::new());
    let (m, n, k) = (m as usize, n as usize, k as usize);
    let (x, y) = (thread::thread_idx_x() as usize, thread::thread_idx_y() as usize);
    let (row, column) = (thread::block_idx_y() as usize * TILE + y, thread::block_idx_x() as usize * TILE + x);
    let mut sum = 0.0;
    for step in 0..k.div_ceil(TILE) {
        let first = step * TILE;
        let [a_tile, b_tile] = pairs[step % 2];
        a_tile.set(y * TILE + x, if row < m && first + x < k { a.at(row * k + first + x) } else { 0.0 });
        b_tile.set(y * TILE + x, if first + y < k && column < n { b.at((first + y) * n + column) } else { 0.0 });
        for l in 0..TILE {
            sum = math::fma(a_tile.at(y * TILE + l), b_tile.at(l * TILE + x), sum);
        }
    }
    if row < m && column < n {
        out.set(row * n + column, sum);
    }
}
