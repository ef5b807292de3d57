//! GEMM, version 8: asynchronous copies and a double buffer.
//!
//! Problem: as in version 6.
//! Idea: `cp.async` copies 16 bytes from global to shared memory without passing a register, and returns at once. With two pairs of
//! tiles, the next pair is copied while the tensor cores multiply the current one. Copies are committed in groups, and a thread waits
//! for its oldest group. The barrier after the wait makes the copies of all threads visible; the same barrier shows that all warps
//! have finished with the pair that the next copies overwrite.
//! Limit: shared memory. Each warp loads its own fragments, and waits for them.

use super::mma::{DEPTH, THREADS, TILE, Tiles, WarpTile};
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, async_copy, bf16, kernel, thread};

/// Lays out the shared memory: two pairs of tiles.
pub fn shared(layout: &mut Layout) -> [Tiles; 2] {
    [super::mma::shared(layout), super::mma::shared(layout)]
}

/// Computes out. Grid: (N / 128, M / 128), rounded up.
///
/// With at most 128 registers for each thread, an SM runs two blocks.
#[kernel(threads = 256, blocks_per_sm = 2)]
pub fn gemm_cp_async(out: GlobalMut<bf16>, a: Global<bf16>, b: Global<bf16>, m: u32, n: u32, k: u32) {
    let [mut current, mut next] = shared(&mut Layout::new());
    let (m, n, k, t) = (m as usize, n as usize, k as usize, thread::thread_idx_x() as usize);
    let (first_row, first_column) = (thread::block_idx_y() as usize * TILE, thread::block_idx_x() as usize * TILE);
    // Outside the matrices, the copies write zeros and read nothing.
    let copy = |tiles: Tiles, first: usize| {
        for i in (t..TILE * DEPTH / bf16::PACKET).step_by(THREADS) {
            let (row, l) = (i / 4, i % 4 * 8);
            let inside = first_row + row < m && first + l < k;
            tiles.a.copy_packet_async(row, l, a, (first_row + row) * k + first + l, inside);
            let (l, column) = (i / 16, i % 16 * 8);
            let inside = first + l < k && first_column + column < n;
            tiles.b.copy_packet_async(l, column, b, (first + l) * n + first_column + column, inside);
        }
        async_copy::commit();
    };
    let mut sums = WarpTile::of_warp();
    copy(current, 0);
    for first in (0..k).step_by(DEPTH) {
        async_copy::wait::<0>();
        thread::sync_threads();
        copy(next, first + DEPTH);
        sums.add_product(current);
        (current, next) = (next, current);
    }
    async_copy::wait::<0>();
    sums.store(out, first_row, first_column, m, n);
}
