//! Sums in a fixed order.

use super::{Cuda, Float, shared_bytes};
use crate::tensor::Tensor;
use crate::{Result, Scope};
use gpu::global_norm;

/// f32 elements of scratch.
pub(super) fn scratch<T: Float>(scope: &Scope, multiprocessors: usize) -> usize {
    scope.parts * global_norm::squared_sum_grid::<T>(scope.parameters, multiprocessors) as usize
}

pub(super) fn sum<T: Float>(cuda: &mut Cuda<T>, out: Tensor, values: Tensor) -> Result<()> {
    let n = values.len;
    let launch = global_norm::sum(cuda.output("out", out, 1)?, cuda.input("values", values, n)?, n as u64);
    cuda.launch(&launch, [1, 1, 1], shared_bytes(global_norm::shared))
}

pub(super) fn global_norm<T: Float>(cuda: &mut Cuda<T>, norm: Tensor, grads: Tensor) -> Result<()> {
    let partials = partials(cuda, &[grads])?;
    root(cuda, norm, partials)
}

pub(super) fn squared_sum<T: Float>(cuda: &mut Cuda<T>, out: Tensor, values: &[Tensor]) -> Result<()> {
    let partials = partials(cuda, values)?;
    sum(cuda, out, partials)
}

/// out (1) = square root of the sum of `values`.
pub(super) fn root<T: Float>(cuda: &mut Cuda<T>, out: Tensor, values: Tensor) -> Result<()> {
    let n = values.len;
    let launch = global_norm::norm(cuda.output("norm", out, 1)?, cuda.input("partials", values, n)?, n as u64);
    cuda.launch(&launch, [1, 1, 1], shared_bytes(global_norm::shared))
}

/// Each block's sum of squares of each of the tensors, in scratch.
fn partials<T: Float>(cuda: &mut Cuda<T>, values: &[Tensor]) -> Result<Tensor> {
    let grid = |n| global_norm::squared_sum_grid::<T>(n, cuda.executor.multiprocessors());
    let grids: Vec<u32> = values.iter().map(|tensor| grid(tensor.len)).collect();
    let all = grids.iter().sum::<u32>() as usize;
    let scratch = cuda.scratch(all)?.slice(0, all);
    let mut first = 0;
    for (values, blocks) in values.iter().zip(grids) {
        let n = values.len;
        let partials = cuda.output("scratch", scratch.slice(first, blocks as usize), blocks as usize)?;
        let launch = global_norm::squared_sum::<T>(partials, cuda.input("grads", *values, n)?, n as u64);
        cuda.launch(&launch, [blocks, 1, 1], shared_bytes(global_norm::shared))?;
        first += blocks as usize;
    }
    Ok(scratch)
}
