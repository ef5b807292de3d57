//! GEMM, version 10: the tensor memory accelerator (TMA).
//!
//! Problem: as in version 6.
//! Idea: one thread starts the copy of a whole tile with one instruction. The TMA unit computes the addresses from a tensor map that
//! the host has prepared, swizzles the data, and writes zeros outside of the matrix. An mbarrier counts the bytes that have arrived;
//! the phase that completes alternates its parity, for which the threads wait. All other threads have nothing to do with the copy.
//! Limit: one pair of tiles. The copy is asynchronous, but everyone waits for it.

use super::wgmma::{DEPTH, ROWS, TILE_M, TILE_N, Tiles, start_product, store};
use cuda_std::hopper::mbarrier::MBarriers;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{MBarrier, SwizzledTile, TensorMap, wgmma};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, bf16, kernel, thread};

/// Lays out the shared memory: a pair of tiles, and an mbarrier.
pub fn shared(layout: &mut Layout) -> (SwizzledTile<ROWS>, MBarriers) {
    (layout.swizzled(), layout.mbarriers(1))
}

/// Starts the copies of a pair of tiles: of a from row `row`, of b from column `column`, both from column `first` of K on.
///
/// The boxes of the tensor maps are 64 x 64 elements. The mbarrier expects the bytes of all six.
#[inline(always)]
pub fn start_copy(
    tiles: Tiles,
    full: MBarrier,
    [a, b]: [Global<TensorMap>; 2],
    [row, column]: [usize; 2],
    first: usize,
) {
    full.arrive_expect_tx((ROWS * DEPTH * size_of::<bf16>()) as u32);
    for part in 0..2 {
        tiles.a.rows::<64>(64 * part).load(a, first as u32, row as u32 + 64 * part, full);
    }
    for part in 0..4 {
        tiles.b.rows::<64>(64 * part).load(b, column as u32 + 64 * part, first as u32, full);
    }
}

/// Computes out. `a` and `b` are tensor maps. Grid: (N / 256, M / 128), rounded up.
#[kernel(threads = 256, requires = "wgmma")]
pub fn gemm_tma(out: GlobalMut<bf16>, a: Global<TensorMap>, b: Global<TensorMap>, m: u32, n: u32, k: u32) {
    let (pool, barriers) = shared(&mut Layout::new());
    let (tiles, full) = (Tiles::of_stage(pool, 0), barriers.at(0));
    let (m, n, k) = (m as usize, n as usize, k as usize);
    let (row, column) = (thread::block_idx_y() as usize * TILE_M, thread::block_idx_x() as usize * TILE_N);
    let warpgroup = thread::thread_idx_x() / 128;
    if thread::thread_idx_x() == 0 {
        full.init(1);
        MBarrier::fence_init();
    }
    thread::sync_threads();
    let mut sums = [0.0; 128];
    let (mut first, mut parity) = (0, 0);
    loop {
        if thread::thread_idx_x() == 0 {
            start_copy(tiles, full, [a, b], [row, column], first);
        }
        full.wait(parity);
        start_product(&mut sums, tiles, warpgroup, first > 0);
        wgmma::wait::<0>();
        thread::sync_threads();
        parity ^= 1;
        first += DEPTH;
        if first >= k {
            break;
        }
    }
    sums.fence_accumulators();
    store(&sums, out, [row + 64 * warpgroup as usize, column], [m, n]);
}
