//! Matrix multiplication on tensor cores.
//!
//! **Problem.** C = A B for bf16 matrices of any size, with f32 accumulators.
//!
//! **Idea.** One warp computes a 16 x 16 tile of C with two `mma.m16n8k16` for each 16 elements of k. It copies a tile of A and one
//! of B to shared memory, with zeros beyond the ends of the matrices, and loads fragments with `ldmatrix`. Fast kernels have larger
//! tiles, more warps and asynchronous copies: see examples/kernels.
//!
//! **Tests.** Sizes that are not multiples of 16, against f64. Without `warp::sync`, `ldmatrix` races with the stores of the tile. None
//! is needed after it: `ldmatrix` completes for all lanes at once, so the warp may overwrite the tile. A matrix with fewer elements
//! than its size is an out-of-bounds access.

use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{GlobalSlice, GlobalSliceMut, SharedTile, bf16, kernel, thread, warp};

/// Rows and columns of a tile.
pub const TILE: usize = 16;

type Tile = SharedTile<bf16, TILE, TILE>;

/// Returns the grid for a matrix C of `m` x `n` elements.
pub const fn grid(m: usize, n: usize) -> [u32; 3] {
    [n.div_ceil(TILE) as u32, m.div_ceil(TILE) as u32, 1]
}

/// Defines the shared memory: a tile of A and one of B.
pub fn shared(layout: &mut Layout) -> (Tile, Tile) {
    (layout.tile().named("A"), layout.tile().named("B"))
}

/// Copies the tile at (`row`, `col`) of x (rows, cols) to shared memory, with zeros where x has no elements.
fn load(tile: Tile, x: GlobalSlice<bf16>, [rows, cols]: [usize; 2], row: usize, col: usize) {
    for i in (warp::lane() as usize..TILE * TILE).step_by(warp::LANES as usize) {
        let (r, c) = (i / TILE, i % TILE);
        let inside = row + r < rows && col + c < cols;
        tile.set(r, c, if inside { x.at((row + r) * cols + col + c) } else { bf16::from_bits(0) });
    }
}

/// Computes c (m, n) = a (m, k) b (k, n).
#[kernel(threads = 32, shared = shared, checked)]
pub fn matmul(c: GlobalSliceMut<f32>, a: GlobalSlice<bf16>, b: GlobalSlice<bf16>, m: u32, n: u32, k: u32) {
    let (a_tile, b_tile) = shared(&mut Layout::new());
    let (m, n, k) = (m as usize, n as usize, k as usize);
    let (row0, col0) = (thread::block_idx_y() as usize * TILE, thread::block_idx_x() as usize * TILE);
    let mut sums = [[0.0; 4]; 2];
    for k0 in (0..k).step_by(TILE) {
        load(a_tile, a, [m, k], row0, k0);
        load(b_tile, b, [k, n], k0, col0);
        warp::sync();
        let (a, b) = (a_tile.a(0, 0), b_tile.b(0, 0));
        bf16::mma(&mut sums[0], a, b[0]);
        bf16::mma(&mut sums[1], a, b[1]);
    }
    // The lane's elements of a 16 x 8 fragment are at (g, 2t), (g, 2t + 1), (g + 8, 2t) and (g + 8, 2t + 1).
    let (g, t) = (warp::lane() as usize / 4, warp::lane() as usize % 4);
    for (half, sums) in sums.iter().enumerate() {
        for (i, sum) in sums.iter().enumerate() {
            let (row, col) = (row0 + g + i / 2 * 8, col0 + 8 * half + 2 * t + i % 2);
            if row < m && col < n {
                c.set(row * n + col, *sum);
            }
        }
    }
}
