//! Matrix transpose.
//!
//! **Problem.** Rows of the input are columns of the output. A direct copy has coalesced reads or coalesced writes, not both.
//!
//! **Idea.** A block copies a 32 x 32 tile through shared memory: it reads rows of the input and writes rows of the output. The
//! threads of a warp read a column of the tile. With 32 elements in a row, they would all access the same bank; with 33, they access
//! 32 different banks.
//!
//! **Tests.** Matrices that are not multiples of the tile, single rows and columns. An input with fewer elements than the output is
//! an out-of-bounds access. Bank conflicts are no fault: Nsight Compute shows them.

use cuda_std::shared::Layout;
use cuda_std::{GlobalSlice, GlobalSliceMut, SharedArray, kernel, thread};

/// Rows and columns of a tile.
pub const TILE: usize = 32;

/// Elements between the starts of two rows of the tile in shared memory.
const STRIDE: usize = TILE + 1;

/// Rows of the tile that the block copies at once.
const ROWS: usize = 8;

/// Returns the grid for a matrix of `rows` x `cols` elements.
pub const fn grid(rows: usize, cols: usize) -> [u32; 3] {
    [cols.div_ceil(TILE) as u32, rows.div_ceil(TILE) as u32, 1]
}

/// Defines the shared memory: a tile with padded rows.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(TILE * STRIDE).named("tile")
}

/// Computes the transpose out (cols, rows) of x (rows, cols).
#[kernel(threads = (32, 8), shared = shared, checked)]
pub fn transpose(out: GlobalSliceMut<f32>, x: GlobalSlice<f32>, rows: u32, cols: u32) {
    let tile = shared(&mut Layout::new());
    let (rows, cols) = (rows as usize, cols as usize);
    let (tx, ty) = (thread::thread_idx_x() as usize, thread::thread_idx_y() as usize);
    let (row0, col0) = (thread::block_idx_y() as usize * TILE, thread::block_idx_x() as usize * TILE);
    for r in (ty..TILE).step_by(ROWS) {
        if row0 + r < rows && col0 + tx < cols {
            tile.set(r * STRIDE + tx, x.at((row0 + r) * cols + col0 + tx));
        }
    }
    thread::sync_threads();
    for r in (ty..TILE).step_by(ROWS) {
        if col0 + r < cols && row0 + tx < rows {
            out.set((col0 + r) * rows + row0 + tx, tile.at(tx * STRIDE + r));
        }
    }
}
