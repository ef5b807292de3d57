//! The second stage of two-stage column sums: reduces f32 partial sums (rows, columns) to one sum per column.
//!
//! Used for gradients of biases, of scales, and of the parameters of normalizations and gates. The order of additions depends only
//! on the shape, so the result is deterministic.

use cuda_std::shared::Layout;
use cuda_std::{Global, SharedArray, thread, warp};

/// Threads of a block of a kernel that calls [`column_sum`].
pub const THREADS: u32 = 256;
const WARPS: usize = (THREADS / warp::LANES) as usize;
const LANES: usize = warp::LANES as usize;
/// Loads that a thread keeps in flight.
const BATCH: usize = 8;

/// Returns the grid size: one block per 32 columns.
pub const fn grid(columns: usize) -> u32 {
    columns.div_ceil(LANES) as u32
}

/// Lays out the shared memory: one sum per thread.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(THREADS as usize)
}

/// Sums 32 columns of `partials` (rows, columns) per block.
///
/// Returns a column index and its sum in each lane of the first warp that has a column, and `None` in other threads.
#[inline(always)]
pub fn column_sum(partials: Global<f32>, rows: usize, columns: usize) -> Option<(usize, f32)> {
    sum_rows(rows, columns, |column| move |row: usize| partials.at(row * columns + column))
}

/// Sums 32 columns of a matrix (rows, columns) per block, like [`column_sum`]. `values` returns, for a column, the function from a row
/// to the element.
#[inline(always)]
pub fn sum_rows<F: Fn(usize) -> f32>(rows: usize, columns: usize, values: impl Fn(usize) -> F) -> Option<(usize, f32)> {
    let scratch = shared(&mut Layout::new());
    let (lane, warp) = (warp::lane() as usize, warp::index() as usize);
    let column = thread::block_idx_x() as usize * LANES + lane;
    let mut sum = 0.0;
    if column < columns {
        let value = values(column);
        let mut row = warp;
        while row < rows {
            let mut batch = [0.0; BATCH];
            for k in 0..BATCH {
                if row + k * WARPS < rows {
                    batch[k] = value(row + k * WARPS);
                }
            }
            for k in 0..BATCH {
                sum += batch[k];
            }
            row += BATCH * WARPS;
        }
    }
    scratch.set(warp * LANES + lane, sum);
    thread::sync_threads();
    if warp > 0 || column >= columns {
        return None;
    }
    for w in 1..WARPS {
        sum += scratch.at(w * LANES + lane);
    }
    Some((column, sum))
}
