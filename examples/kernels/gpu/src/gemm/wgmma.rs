//! GEMM, version 9: wgmma, the tensor core instruction of Hopper.
//!
//! Problem: as in version 6.
//! Idea: `wgmma` multiplies 64 x 16 elements of a with 16 x 256 of b: one instruction of a warpgroup (128 threads), which reads both
//! operands directly from shared memory. No thread loads fragments, so registers hold almost only accumulators: 128 for each thread.
//! The instruction requires swizzled tiles: chunk c of row r is stored at chunk c ^ (r % 8), which keeps the chunks of a column in
//! different banks. `stmatrix` stores them so. wgmma reads shared memory through another path (the async proxy) than ordinary stores
//! write it, so a fence is needed besides the barrier.
//! Limit: the copy. The threads load pairs of elements, and the tensor cores wait meanwhile. Version 7, which copies packets, is
//! faster.

use cuda_std::element::pack_pair;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{self, SwizzledTile, wgmma};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, bf16, kernel, thread, warp};

/// Rows of the block's part of out: 64 for each of two warpgroups.
pub const TILE_M: usize = 128;
/// Columns of the block's part of out.
pub const TILE_N: usize = 256;
/// Columns of K that are in shared memory at a time: 128 bytes, the width of a swizzled tile.
pub const DEPTH: usize = 64;

/// Rows of shared memory, of 128 bytes each, for the tiles of a and b.
pub const ROWS: usize = TILE_M + TILE_N;

/// The tiles of a, 128 rows of 64 columns of K, and of b: four tiles of 64 rows of K and 64 columns.
#[derive(Clone, Copy)]
pub struct Tiles {
    /// The tile of a.
    pub a: SwizzledTile<TILE_M>,
    /// The tiles of b.
    pub b: SwizzledTile<TILE_N>,
}

impl Tiles {
    /// Returns the tiles of a stage. The stages follow each other in `pool`.
    #[inline(always)]
    pub fn of_stage<const R: usize>(pool: SwizzledTile<R>, stage: u32) -> Self {
        let row = stage * ROWS as u32;
        Self { a: pool.rows(row), b: pool.rows(row + TILE_M as u32) }
    }
}

/// Lays out the shared memory.
pub fn shared(layout: &mut Layout) -> Tiles {
    Tiles::of_stage(layout.swizzled::<ROWS>(), 0)
}

/// Starts the product of the warpgroup's 64 rows of a with b. The sums are complete after `wgmma::wait`.
#[inline(always)]
pub fn start_product(sums: &mut [f32; 128], tiles: Tiles, warpgroup: u32, accumulate: bool) {
    let (a, b) = (tiles.a.rows::<64>(64 * warpgroup), tiles.b.rows::<64>(0));
    wgmma::fence();
    // Each instruction takes 16 columns of K. b is stored with its columns contiguous, which the descriptor states.
    sums.mma(a.k_major_operand(0), b.mn_major_operand(0), accumulate);
    sums.mma(a.k_major_operand(1), b.mn_major_operand(1), true);
    sums.mma(a.k_major_operand(2), b.mn_major_operand(2), true);
    sums.mma(a.k_major_operand(3), b.mn_major_operand(3), true);
    wgmma::commit();
}

/// Stores the warpgroup's 64 x 256 sums from (`row`, `column`) on. A lane has pairs of adjacent columns of two rows.
#[inline(always)]
pub fn store(sums: &[f32; 128], out: GlobalMut<bf16>, [row, column]: [usize; 2], [m, n]: [usize; 2]) {
    let (lane, warp) = (warp::lane() as usize, thread::thread_idx_x() as usize / 32 % 4);
    let row = row + 16 * warp + lane / 4;
    for j in 0..TILE_N / 8 {
        let column = column + 8 * j + 2 * (lane % 4);
        if column < n && row < m {
            out.set_pair(row * n + column, pack_pair(sums[4 * j], sums[4 * j + 1]));
        }
        if column < n && row + 8 < m {
            out.set_pair((row + 8) * n + column, pack_pair(sums[4 * j + 2], sums[4 * j + 3]));
        }
    }
}

/// Copies 64 x 64 elements of `from` (rows, columns), from (`row`, `column`) on, to a swizzled tile. Each warp of a warpgroup copies
/// 16 rows. Elements outside of the matrix are zeros.
#[inline(always)]
fn copy(tile: SwizzledTile<64>, from: Global<bf16>, [row, column]: [usize; 2], [rows, columns]: [usize; 2]) {
    let (lane, warp) = (warp::lane(), thread::thread_idx_x() / 32 % 4);
    for part in 0..4 {
        // 8 rows of 32 columns: four matrices of 8 x 8. A lane loads a pair of each, and gives the address of one row.
        let (first, chunk) = (16 * warp + part / 2 * 8, part % 2 * 4);
        let words = core::array::from_fn(|matrix| {
            let (r, c) =
                (row + (first + lane / 4) as usize, column + (8 * chunk + 2 * (lane % 4)) as usize + 8 * matrix);
            let [x, y] = if r < rows && c < columns { from.pair(r * columns + c) } else { [0.0; 2] };
            pack_pair(x, y)
        });
        tile.store_matrices(first + lane % 8, chunk + lane / 8, words);
    }
}

/// Computes out. Grid: (N / 256, M / 128), rounded up.
#[kernel(threads = 256, requires = "wgmma")]
pub fn gemm_wgmma(out: GlobalMut<bf16>, a: Global<bf16>, b: Global<bf16>, m: u32, n: u32, k: u32) {
    let tiles = shared(&mut Layout::new());
    let (m, n, k) = (m as usize, n as usize, k as usize);
    let (row, column) = (thread::block_idx_y() as usize * TILE_M, thread::block_idx_x() as usize * TILE_N);
    let warpgroup = thread::thread_idx_x() / 128;
    let mut sums = [0.0; 128];
    let mut first = 0;
    // The condition is tested at the end: a path around the loop would make the assembler wait after each wgmma.
    loop {
        let of_group = 64 * warpgroup as usize;
        copy(tiles.a.rows(64 * warpgroup), a, [row + of_group, first], [m, k]);
        for i in 0..2 {
            let part = 2 * warpgroup + i;
            copy(tiles.b.rows(64 * part), b, [first, column + 64 * part as usize], [k, n]);
        }
        hopper::fence_async_proxy();
        thread::sync_threads();
        start_product(&mut sums, tiles, warpgroup, first > 0);
        wgmma::wait::<0>();
        thread::sync_threads();
        first += DEPTH;
        if first >= k {
            break;
        }
    }
    sums.fence_accumulators();
    store(&sums, out, [row + 64 * warpgroup as usize, column], [m, n]);
}
