//! NorMuon's scaling of an orthogonalized matrix x (rows, cols) by a running mean of its squares (Li et al., 2025, arXiv:2510.05491), as in
//! nanochat:
//!
//! ```text
//! sums = sums of squares of the rows of x if rows >= cols, otherwise of its columns   muon_row_sums, muon_column_sums
//! second = beta2 * second + (1 - beta2) * sums / (elements of a sum)                  muon_variance_factors
//! factors = 1 / sqrt(second), times a number that keeps the Frobenius norm of x
//! x = x * factors                                                                     muon_scale_by_factors
//! ```
//!
//! Every operation is correctly rounded, and the order of all sums is fixed.

use super::{BLOCK_ROWS, shared};
use crate::adamw::{grad_scale, lerp};
use crate::column_sum::sum_rows;
use crate::noise::{self, Stream};
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, block, kernel, math, thread, warp};

/// Computes `column_sums` (cols), the sum of squares of each column of x (rows, cols).
///
/// Grid: [`column_sum::grid`](crate::column_sum::grid) of cols. Shared memory: [`column_sum::shared`](crate::column_sum::shared).
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn muon_column_sums<T: Element>(column_sums: GlobalMut<f32>, x: Global<T>, rows: u32, cols: u32) {
    let squares = |column: usize| {
        move |row: usize| {
            let value = x.at(row * cols as usize + column).to_f32();
            value * value
        }
    };
    if let Some((column, sum)) = sum_rows(rows as usize, cols as usize, squares) {
        column_sums.set(column, sum);
    }
}

/// The scalar arguments of [`muon_variance_factors`]. Passed to the kernel by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Variance {
    /// Decay of the running mean.
    pub beta2: f32,
    /// Smallest running mean that divides.
    pub smallest: f32,
    /// The factor of [`muon_momentum`](super::muon_momentum): both skip the same steps.
    pub grad_factor: f32,
    /// Seed of the stochastic rounding: element i draws number i.
    pub seed: u32,
}

/// Updates second (n), the running means of the squares, and replaces `sums` (n), each of `elements` squares, by the factors of the rows
/// or columns.
///
/// `stats` (2) is that of [`muon_momentum`](super::muon_momentum): if the step is skipped, nothing changes. bf16 `second` is rounded
/// stochastically. Grid: one block. Shared memory: [`shared`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn muon_variance_factors<M: Element>(
    second: GlobalMut<M>,
    sums: GlobalMut<f32>,
    stats: Global<f32>,
    scalars: Variance,
    elements: u32,
    n: u32,
) {
    if grad_scale(stats.at(0), stats.at(1), scalars.grad_factor, f32::INFINITY).is_none() {
        return;
    }
    let n = n as usize;
    let mean = |i| lerp(math::div_rn(sums.at(i), elements as f32), second.at(i).to_f32(), scalars.beta2);
    let step = |mean: f32| math::div_rn(1.0, math::sqrt(mean.max(scalars.smallest)));
    // The sums of all squares of x before and after its elements are multiplied by the steps.
    let (mut before, mut after) = (0.0, 0.0);
    let first = thread::thread_idx_x() as usize;
    let mut i = first;
    while i < n {
        let (sum, step) = (sums.at(i), step(mean(i)));
        before += sum;
        after = math::fma(sum * step, step, after);
        i += thread::block_dim_x() as usize;
    }
    let shared = shared(&mut Layout::new());
    let norm = math::sqrt(block::sum(before, shared));
    let scale = math::div_rn(norm, math::sqrt(block::sum(after, shared)).max(scalars.smallest));
    i = first;
    while i < n {
        let mean = mean(i);
        second.set(i, noise::round(Stream::V, mean, i, scalars.seed));
        sums.set(i, step(mean) * scale);
        i += thread::block_dim_x() as usize;
    }
}

/// Multiplies x (rows, cols) by `factors`: (rows) if rows >= cols, otherwise (cols). Grid: [`row_grid`](super::row_grid).
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn muon_scale_by_factors<T: Element>(x: GlobalMut<T>, factors: Global<f32>, rows: u32, cols: u32) {
    let row = thread::block_idx_x() * BLOCK_ROWS + warp::index();
    if row >= rows {
        return;
    }
    let first = row as usize * cols as usize;
    let mut col = warp::lane();
    while col < cols {
        let i = first + col as usize;
        let factor = factors.at(if rows >= cols { row } else { col } as usize);
        x.set(i, T::from_f32(x.at(i).to_f32() * factor));
        col += warp::LANES;
    }
}
