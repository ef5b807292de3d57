//! Muon's orthogonalization of small matrices, such as gates, whose sides are no multiples of 8, as GEMMs need them. One kernel does all
//! steps in f32 in shared memory.

use super::Scaling;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedArray, block, kernel, math, thread};

/// Maximum of the shorter and of the longer side.
pub const MAX_SIDES: [usize; 2] = [32, 64];

/// Returns whether the kernel accepts matrices of this shape.
pub const fn fits(rows: usize, cols: usize) -> bool {
    let [short, long] = if rows < cols { [rows, cols] } else { [cols, rows] };
    short <= MAX_SIDES[0] && long <= MAX_SIDES[1]
}

/// The shared memory of a block.
#[derive(Clone, Copy)]
pub struct Buffers {
    /// x before and after a step.
    x: [SharedArray<f32>; 2],
    /// A and B of a step.
    square: [SharedArray<f32>; 2],
    scratch: SharedArray<f32>,
}

/// Lays out the shared memory.
pub fn shared(layout: &mut Layout) -> Buffers {
    let [short, long] = MAX_SIDES;
    Buffers {
        x: [layout.array(short * long), layout.array(short * long)],
        square: [layout.array(short * short), layout.array(short * short)],
        scratch: super::shared(layout),
    }
}

/// The scalar arguments of [`muon_orthogonalize_small`]. Passed to the kernel by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Iteration {
    /// a, b and c of each step.
    pub coefficients: [[f32; 3]; 5],
    /// The scaling before the steps.
    pub scaling: Scaling,
    /// Smallest norm by which a row or the result is divided.
    pub smallest: f32,
    /// 1: rows are scaled to the root mean square of their norms before the steps.
    pub equilibrate: u32,
    /// 1: the result is scaled to the norm of a semi-orthogonal matrix.
    pub renormalize: u32,
}

/// Calls `f` with 0 to n - 1, divided over the threads of the block.
#[inline(always)]
fn for_each(n: usize, f: impl Fn(usize)) {
    let mut i = thread::thread_idx_x() as usize;
    while i < n {
        f(i);
        i += thread::block_dim_x() as usize;
    }
}

/// Returns the sum of `term` of 0 to n - 1.
#[inline(always)]
fn sum(n: usize, term: impl Fn(usize) -> f32) -> f32 {
    let (mut sum, mut i) = (0.0, 0);
    while i < n {
        sum += term(i);
        i += 1;
    }
    sum
}

/// Returns the Frobenius norm of x (n), computed by the whole block.
#[inline(always)]
fn norm(x: SharedArray<f32>, n: usize, scratch: SharedArray<f32>) -> f32 {
    let (mut sum, mut i) = (0.0, thread::thread_idx_x() as usize);
    while i < n {
        sum = math::fma(x.at(i), x.at(i), sum);
        i += thread::block_dim_x() as usize;
    }
    math::sqrt(block::sum(sum, scratch))
}

/// Orthogonalizes matrices (rows, cols) of `inp` to out, both (matrices, rows, cols): scaling and five Newton-Schulz steps.
///
/// Matrix i begins at element i · `out_stride` of out and i · `inp_stride` of inp. The shape must [fit](fits). Grid: number of matrices.
/// Shared memory: [`shared`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn muon_orthogonalize_small<T: Element>(
    out: GlobalMut<T>,
    inp: Global<T>,
    iteration: Iteration,
    out_stride: u64,
    inp_stride: u64,
    rows: u32,
    cols: u32,
) {
    let Iteration { coefficients, scaling, smallest, equilibrate, renormalize } = iteration;
    let matrix = thread::block_idx_x() as usize;
    let (out, inp) = (out.skip(matrix * out_stride as usize), inp.skip(matrix * inp_stride as usize));
    let (rows, cols) = (rows as usize, cols as usize);
    let (n, side, long) = (rows * cols, rows.min(cols), rows.max(cols));
    // Distances of elements along the shorter and the longer side.
    let (short_stride, long_stride) = if rows <= cols { (cols, 1) } else { (1, cols) };
    let Buffers { x: [mut x, mut next], square: [gram, polynomial], scratch } = shared(&mut Layout::new());
    for_each(n, |i| x.set(i, inp.at(i).to_f32()));
    thread::sync_threads();
    if equilibrate == 1 {
        let row = thread::thread_idx_x() as usize;
        let square = |col| x.at(row * cols + col) * x.at(row * cols + col);
        let row_sum = if row < rows { sum(cols, square) } else { 0.0 };
        let target = math::sqrt(block::sum(row_sum, scratch) / rows as f32);
        if row < rows {
            let scale = math::div_rn(target, math::sqrt(row_sum).max(smallest));
            let mut col = 0;
            while col < cols {
                x.set(row * cols + col, x.at(row * cols + col) * scale);
                col += 1;
            }
        }
        thread::sync_threads();
    }
    let scale = math::div_rn(1.0, math::fma(norm(x, n, scratch), scaling.factor, scaling.epsilon));
    for_each(n, |i| x.set(i, x.at(i) * scale));
    thread::sync_threads();
    for step in 0..coefficients.len() {
        let [a, b, c] = coefficients[step];
        for_each(side * side, |at| {
            let (i, j) = (at / side * short_stride, at % side * short_stride);
            gram.set(at, sum(long, |k| x.at(i + k * long_stride) * x.at(j + k * long_stride)));
        });
        thread::sync_threads();
        for_each(side * side, |at| {
            let (i, j) = (at / side, at % side);
            let square = sum(side, |k| gram.at(i * side + k) * gram.at(k * side + j));
            polynomial.set(at, math::fma(b, gram.at(at), c * square));
        });
        thread::sync_threads();
        for_each(n, |at| {
            let (i, j) = (at / long, at % long * long_stride);
            // B is symmetric, so this is x · B if x has more rows than columns.
            let product = sum(side, |k| polynomial.at(i * side + k) * x.at(k * short_stride + j));
            let at = i * short_stride + j;
            next.set(at, math::fma(a, x.at(at), product));
        });
        thread::sync_threads();
        (x, next) = (next, x);
    }
    let scale =
        if renormalize == 1 { math::div_rn(math::sqrt(side as f32), norm(x, n, scratch).max(smallest)) } else { 1.0 };
    for_each(n, |i| out.set(i, T::from_f32(x.at(i) * scale)));
}
