//! The elementwise parts of Muon, momentum orthogonalized by Newton-Schulz iterations (Jordan et al., 2024,
//! <https://kellerjordan.github.io/posts/muon/>).
//!
//! For a matrix with the clipped gradient g:
//!
//! ```text
//! m = momentum * m + (1 - momentum) * g            muon_momentum
//! update = momentum * m + (1 - momentum) * g
//! x = update / (norm(update) * factor + epsilon)   muon_squared_sums, muon_scale
//!     or with equal norms of the rows              muon_row_sums, muon_scale_rows
//! x = five Newton-Schulz steps of x                (GEMMs; small does all for small matrices)
//! x = x with about equal norms of its rows or columns over time (optional: variance)
//! param -= learning_rate * (scale * x + weight_decay * param)   muon_apply
//! ```
//!
//! All kernels work on n elements; any n is allowed. Arrays of 16-bit elements are aligned to 8 bytes, arrays of f32 to
//! 16 bytes; those of `muon_squared_sums` to 16 bytes. `muon_squared_sums` and `muon_scale` work on a batch of matrices of
//! n elements each. The result for a matrix depends on nothing else in its batch. The weights and m have the forms that AdamW supports ([`crate::weights`], [`crate::adamw`]). bf16 m is
//! rounded stochastically, and the update is computed from m before it is rounded.
//!
//! Like AdamW, the kernels multiply gradients by a factor and clip them by the global norm in `stats`, and change neither m nor the parameters
//! unless loss and norm are finite. Then the update is not written either, so the matrices between the two kernels are
//! meaningless. Every operation is correctly rounded, so every device computes the same bits.
//!
//! The kernels are memory-bound. Bytes per bf16 element, read and written: momentum 12, or 8 with bf16 m; squared sums 2; scale 4; apply
//! 6, 14 with f32 master weights, or 10 with remainders.

pub mod small;
pub mod variance;

use crate::adamw::{grad_scale, lerp};
use crate::float4::Float4Tile;
pub use crate::float4::grid;
use crate::global_norm::block_squared_sum;
pub use crate::global_norm::shared;
use crate::noise::{self, Stream};
use crate::weights::{self, Master};
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, block, kernel, math, thread, warp};

/// Updates m (n) and computes update (n) from grads (n). `stats` (2) holds the sum of the losses and the norm of all
/// gradients. Element i of bf16 m draws random number i of `seed`. Grid: [`grid`].
#[kernel(
    threads = 256,
    instances(bf16 = <cuda_std::bf16, f32>, f32 = <f32, f32>, bf16_moments = <cuda_std::bf16, cuda_std::bf16>)
)]
pub fn muon_momentum<T: Element, M: Element>(
    update: GlobalMut<T>,
    m: GlobalMut<M>,
    grads: Global<T>,
    stats: Global<f32>,
    momentum: f32,
    grad_factor: f32,
    clip: f32,
    seed: u32,
    n: u64,
) {
    let Some(grad_scale) = grad_scale(stats.at(0), stats.at(1), grad_factor, clip) else { return };
    let step = |grad: f32, m: f32| {
        let grad = grad * grad_scale;
        let m = lerp(grad, m, momentum);
        [m, lerp(grad, m, momentum)]
    };
    let update_four = |i, [grads, old_m]: [[f32; 4]; 2]| {
        let mut new = [[0.0; 4]; 2];
        for k in 0..4 {
            let [m, update] = step(grads[k], old_m[k]);
            (new[0][k], new[1][k]) = (m, update);
        }
        m.set_four(i, noise::round_four::<M>(Stream::M, new[0], i, seed));
        update.set_four(i, new[1]);
    };
    let update_one = |i| {
        let [new_m, new_update] = step(grads.at(i).to_f32(), m.at(i).to_f32());
        m.set(i, noise::round(Stream::M, new_m, i, seed));
        update.set(i, T::from_f32(new_update));
    };
    Float4Tile::<T>::of_thread().process(n as usize, |i| [grads.four(i), m.four(i)], update_four, update_one);
}

/// Partial sums of a matrix: the blocks of [`muon_squared_sums`] for each matrix.
pub const PARTIALS: u32 = 128;

/// Computes partials (matrices, [`PARTIALS`]), each block's share of the sum of squares of a matrix.
///
/// Matrix i has n elements and begins at element i · stride of `matrices`. stride is a multiple of 8. Grid: ([`PARTIALS`],
/// number of matrices). Shared memory: [`shared`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn muon_squared_sums<T: Element>(partials: GlobalMut<f32>, matrices: Global<T>, stride: u64, n: u64) {
    let (n, matrix) = (n as usize, thread::block_idx_y() as usize);
    let values = matrices.skip(matrix * stride as usize);
    let sum = block_squared_sum(values, n, |i| values.packet(i));
    if thread::thread_idx_x() == 0 {
        partials.set(matrix * PARTIALS as usize + thread::block_idx_x() as usize, sum);
    }
}

/// The scalar arguments of [`muon_scale`]. Passed to the kernel by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scaling {
    /// Factor of the norm.
    pub factor: f32,
    /// Addend of the denominator.
    pub epsilon: f32,
}

/// Computes out (matrices, n) = inp (matrices, n) / (norm · factor + epsilon), where norm is the Frobenius norm of a matrix:
/// the square root of the sum of its partials (matrices, [`PARTIALS`]).
///
/// Matrix i begins at element i · `out_stride` of out and i · `inp_stride` of inp. Grid: ([`grid`] of n, number of
/// matrices). Shared memory: [`shared`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn muon_scale<T: Element>(
    out: GlobalMut<T>,
    inp: Global<T>,
    partials: Global<f32>,
    scaling: Scaling,
    out_stride: u64,
    inp_stride: u64,
    n: u64,
) {
    let matrix = thread::block_idx_y() as usize;
    let (out, inp) = (out.skip(matrix * out_stride as usize), inp.skip(matrix * inp_stride as usize));
    let thread = thread::thread_idx_x();
    let partial = if thread < PARTIALS { partials.at(matrix * PARTIALS as usize + thread as usize) } else { 0.0 };
    let norm = math::sqrt(block::sum(partial, shared(&mut Layout::new())));
    let scale = math::div_rn(1.0, math::fma(norm, scaling.factor, scaling.epsilon));
    let scale_four = |i, [x]: [[f32; 4]; 1]| out.set_four(i, x.map(|x| x * scale));
    let scale_one = |i| out.set(i, T::from_f32(inp.at(i).to_f32() * scale));
    Float4Tile::<T>::of_thread().process(n as usize, |i| [inp.four(i)], scale_four, scale_one);
}

/// Rows that a block of [`muon_row_sums`] or [`muon_scale_rows`] processes, one for each warp.
pub const BLOCK_ROWS: u32 = 8;

/// Returns the blocks of [`muon_row_sums`] and [`muon_scale_rows`] for a matrix.
pub const fn row_grid(rows: usize) -> u32 {
    rows.div_ceil(BLOCK_ROWS as usize) as u32
}

/// Computes row_sums (matrices, rows), the sum of squares of each row.
///
/// Matrix i has (rows, cols) elements and begins at element i · stride of `matrices`. Grid: ([`row_grid`], number of matrices).
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn muon_row_sums<T: Element>(row_sums: GlobalMut<f32>, matrices: Global<T>, stride: u64, rows: u32, cols: u32) {
    let matrix = thread::block_idx_y() as usize;
    let row = (thread::block_idx_x() * BLOCK_ROWS + warp::index()) as usize;
    if row >= rows as usize {
        return;
    }
    let values = matrices.skip(matrix * stride as usize + row * cols as usize);
    let mut sum = 0.0;
    let mut i = warp::lane();
    while i < cols {
        let value = values.at(i as usize).to_f32();
        sum = math::fma(value, value, sum);
        i += warp::LANES;
    }
    let sum = warp::sum(sum);
    if warp::lane() == 0 {
        row_sums.set(matrix * rows as usize + row, sum);
    }
}

/// Computes out (matrices, rows, cols) from inp (matrices, rows, cols): scales each row to the root mean square of the rows' norms, and then
/// divides the matrix by norm · factor + epsilon, where norm is its Frobenius norm. A row is divided by at least `smallest`. `row_sums`
/// (matrices, rows) are those of [`muon_row_sums`].
///
/// Matrix i begins at element i · `out_stride` of out and i · `inp_stride` of inp. Grid: ([`row_grid`], number of matrices). Shared memory:
/// [`shared`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn muon_scale_rows<T: Element>(
    out: GlobalMut<T>,
    inp: Global<T>,
    row_sums: Global<f32>,
    scaling: Scaling,
    smallest: f32,
    out_stride: u64,
    inp_stride: u64,
    rows: u32,
    cols: u32,
) {
    let matrix = thread::block_idx_y() as usize;
    let row_sums = row_sums.skip(matrix * rows as usize);
    // The sums of squares before and after the rows have equal norms. Small rows stay below.
    let (mut before, mut after) = (0.0, 0.0);
    let mut i = thread::thread_idx_x();
    while i < rows {
        let sum = row_sums.at(i as usize);
        before += sum;
        let share = math::sqrt(sum).min(smallest) / smallest;
        after += share * share;
        i += thread::block_dim_x();
    }
    let shared = shared(&mut Layout::new());
    let target = math::sqrt(block::sum(before, shared) / rows as f32);
    let norm = target * math::sqrt(block::sum(after, shared));
    let row = (thread::block_idx_x() * BLOCK_ROWS + warp::index()) as usize;
    if row >= rows as usize {
        return;
    }
    let scale = math::div_rn(target, math::sqrt(row_sums.at(row)).max(smallest))
        / math::fma(norm, scaling.factor, scaling.epsilon);
    let first = row * cols as usize;
    let (out, inp) = (out.skip(matrix * out_stride as usize + first), inp.skip(matrix * inp_stride as usize + first));
    let mut i = warp::lane();
    while i < cols {
        out.set(i as usize, T::from_f32(inp.at(i as usize).to_f32() * scale));
        i += warp::LANES;
    }
}

/// The scalar arguments of [`muon_apply`]. Passed to the kernel by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Scalars {
    /// Learning rate of this step.
    pub learning_rate: f32,
    /// Factor of x.
    pub scale: f32,
    /// Weight decay coefficient.
    pub weight_decay: f32,
    /// 1: only parameters with the sign of x decay.
    pub cautious_decay: u32,
    /// The factor of [`muon_momentum`]: both skip the same steps.
    pub grad_factor: f32,
    /// Seed of the stochastic rounding: element i draws number i.
    pub seed: u32,
}

/// Computes params (n) -= learning_rate · (scale · x (n) + weight_decay · params), where params of another sign than x may not decay.
///
/// `masters` (n) is null if there are no master weights. `stats` (2) is that of [`muon_momentum`]. Grid: [`grid`].
#[kernel(
    threads = 256,
    instances(bf16 = <cuda_std::bf16, f32>, f32 = <f32, f32>, bf16_remainder = <cuda_std::bf16, u16>)
)]
pub fn muon_apply<T: Element, W: Master>(
    params: GlobalMut<T>,
    masters: GlobalMut<W>,
    x: Global<T>,
    stats: Global<f32>,
    scalars: Scalars,
    n: u64,
) {
    if grad_scale(stats.at(0), stats.at(1), scalars.grad_factor, f32::INFINITY).is_none() {
        return;
    }
    let Scalars { learning_rate, scale, weight_decay, cautious_decay, seed, .. } = scalars;
    let has_masters = weights::exist(masters);
    let step = |x: f32, old: f32| {
        let decay = if cautious_decay == 1 && x * old < 0.0 { 0.0 } else { weight_decay };
        math::fma(-learning_rate, math::fma(decay, old, scale * x), old)
    };
    let load_four = |i| [x.four(i), if has_masters { W::four(masters, params, i) } else { params.four(i) }];
    let update_four = |i, [x, old]: [[f32; 4]; 2]| {
        let new = core::array::from_fn(|k| step(x[k], old[k]));
        if has_masters {
            W::set_four(masters, i, new);
        }
        params.set_four(i, W::params::<T>(new, i, seed));
    };
    let update_one = |i| {
        let old = if has_masters { W::at(masters, params, i) } else { params.at(i).to_f32() };
        let new = step(x.at(i).to_f32(), old);
        if has_masters {
            W::set(masters, i, new);
        }
        params.set(i, W::param(new, i, seed));
    };
    Float4Tile::<T>::of_thread().process(n as usize, load_four, update_four, update_one);
}
