//! GEMM, version 7: tensor cores.
//!
//! Problem: as in version 6.
//! Idea: `mma.sync` multiplies a 16 x 16 fragment of a with a 16 x 8 fragment of b: 4096 FLOPs in one instruction of a warp. The
//! fragments are distributed over the registers of the 32 lanes; `ldmatrix` loads them from shared memory. The tiles stay in bf16.
//! A block of 8 warps computes 128 x 128 elements, each warp 32 x 64. Rows of the tiles are padded by 16 bytes, so that the 8 rows
//! of an `ldmatrix` are in different banks.
//! Limit: copies and arithmetic alternate. The tensor cores wait while a tile is copied, and the copy passes through registers.

use cuda_std::element::pack_pair;
use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, SharedTile, bf16, kernel, thread, warp};

/// Rows and columns of the block's part of out.
pub const TILE: usize = 128;
/// Columns of K that are in shared memory at a time.
pub const DEPTH: usize = 32;
/// Threads of a block.
pub const THREADS: usize = 256;

/// The tiles of a and b in shared memory.
#[derive(Clone, Copy)]
pub struct Tiles {
    /// The tile of a.
    pub a: SharedTile<bf16, TILE, DEPTH>,
    /// The tile of b.
    pub b: SharedTile<bf16, DEPTH, TILE>,
}

/// Lays out the shared memory.
pub fn shared(layout: &mut Layout) -> Tiles {
    Tiles { a: layout.tile().named("a_tile"), b: layout.tile().named("b_tile") }
}

/// A warp's 32 x 64 elements of out, as fragments of 16 x 8.
#[derive(Clone, Copy)]
pub struct WarpTile {
    /// The accumulators: 2 fragments of rows, 8 of columns.
    sums: [[[f32; 4]; 8]; 2],
    /// First row of the warp in the block's tile.
    row: usize,
    /// First column of the warp in the block's tile.
    column: usize,
}

impl WarpTile {
    /// Returns the calling warp's tile of zeros.
    #[inline(always)]
    pub fn of_warp() -> Self {
        let warp = warp::index() as usize;
        Self { sums: [[[0.0; 4]; 8]; 2], row: warp % 4 * 32, column: warp / 4 * 64 }
    }

    /// Adds the product of the tiles.
    #[inline(always)]
    pub fn add_product(&mut self, tiles: Tiles) {
        for l in 0..DEPTH / 16 {
            let upper = tiles.a.a(self.row, 16 * l);
            let lower = tiles.a.a(self.row + 16, 16 * l);
            for c in 0..4 {
                let [left, right] = tiles.b.b(16 * l, self.column + 16 * c);
                bf16::mma(&mut self.sums[0][2 * c], upper, left);
                bf16::mma(&mut self.sums[0][2 * c + 1], upper, right);
                bf16::mma(&mut self.sums[1][2 * c], lower, left);
                bf16::mma(&mut self.sums[1][2 * c + 1], lower, right);
            }
        }
    }

    /// Stores the tile of the block whose first element is (`row`, `column`). A lane has pairs of adjacent columns.
    #[inline(always)]
    pub fn store(&self, out: GlobalMut<bf16>, row: usize, column: usize, m: usize, n: usize) {
        let (g, t) = (warp::lane() as usize / 4, warp::lane() as usize % 4);
        for r in 0..2 {
            for c in 0..8 {
                let [a, b, below_a, below_b] = self.sums[r][c];
                let (row, column) = (row + self.row + 16 * r + g, column + self.column + 8 * c + 2 * t);
                if column < n && row < m {
                    out.set_pair(row * n + column, pack_pair(a, b));
                }
                if column < n && row + 8 < m {
                    out.set_pair((row + 8) * n + column, pack_pair(below_a, below_b));
                }
            }
        }
    }
}

/// Computes out. Grid: (N / 128, M / 128), rounded up.
#[kernel(threads = 256)]
pub fn gemm_mma(out: GlobalMut<bf16>, a: Global<bf16>, b: Global<bf16>, m: u32, n: u32, k: u32) {
    let tiles = shared(&mut Layout::new());
    let (m, n, k, t) = (m as usize, n as usize, k as usize, thread::thread_idx_x() as usize);
    let (first_row, first_column) = (thread::block_idx_y() as usize * TILE, thread::block_idx_x() as usize * TILE);
    let mut sums = WarpTile::of_warp();
    for first in (0..k).step_by(DEPTH) {
        for i in (t..TILE * DEPTH / bf16::PACKET).step_by(THREADS) {
            let (row, l) = (i / 4, i % 4 * 8);
            let inside = first_row + row < m && first + l < k;
            let packet = if inside { a.packet((first_row + row) * k + first + l) } else { Packet::zero() };
            tiles.a.set_packet(row, l, packet);
            let (l, column) = (i / 16, i % 16 * 8);
            let inside = first + l < k && first_column + column < n;
            let packet = if inside { b.packet((first + l) * n + first_column + column) } else { Packet::zero() };
            tiles.b.set_packet(l, column, packet);
        }
        thread::sync_threads();
        sums.add_product(tiles);
        thread::sync_threads();
    }
    sums.store(out, first_row, first_column, m, n);
}
