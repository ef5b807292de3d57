//! Sums in a fixed order.

use super::{Cuda, Float, shared_bytes};
use crate::ops::{GlobalNorm, SquareRoot, SquaredSum, Sum};
use crate::tensor::Tensor;
use crate::{Result, Workload};
use gpu::global_norm;

/// Returns the f32 elements of scratch memory.
pub(super) fn scratch<T: Float>(workload: &Workload, sm_count: usize) -> usize {
    workload.norm_tensors * global_norm::squared_sum_grid::<T>(workload.parameters, sm_count) as usize
}

pub(super) fn sum<T: Float>(cuda: &mut Cuda<T>, Sum { out, values }: Sum) -> Result<()> {
    let n = values.len;
    let launch = global_norm::sum(cuda.output("out", out, 1)?, cuda.input("values", values, n)?, n as u64);
    cuda.launch(launch, [1, 1, 1], shared_bytes(global_norm::shared))
}

pub(super) fn global_norm<T: Float>(cuda: &mut Cuda<T>, GlobalNorm { norm, grads }: GlobalNorm) -> Result<()> {
    let partials = partial_sums(cuda, &[grads])?;
    root_of_sum(cuda, norm, partials)
}

pub(super) fn squared_sum<T: Float>(cuda: &mut Cuda<T>, SquaredSum { out, values }: SquaredSum) -> Result<()> {
    let values = partial_sums(cuda, values)?;
    sum(cuda, Sum { out, values })
}

pub(super) fn square_root<T: Float>(cuda: &mut Cuda<T>, SquareRoot { out, value }: SquareRoot) -> Result<()> {
    root_of_sum(cuda, out, value)
}

/// out (1) = square root of the sum of `values`
fn root_of_sum<T: Float>(cuda: &mut Cuda<T>, out: Tensor, values: Tensor) -> Result<()> {
    let n = values.len;
    let launch = global_norm::norm(cuda.output("norm", out, 1)?, cuda.input("partials", values, n)?, n as u64);
    cuda.launch(launch, [1, 1, 1], shared_bytes(global_norm::shared))
}

/// Computes each block's sum of squares of each tensor, and returns them in scratch memory.
fn partial_sums<T: Float>(cuda: &mut Cuda<T>, values: &[Tensor]) -> Result<Tensor> {
    let grid = |n| global_norm::squared_sum_grid::<T>(n, cuda.executor.sm_count());
    let grids: Vec<u32> = values.iter().map(|tensor| grid(tensor.len)).collect();
    let all = grids.iter().sum::<u32>() as usize;
    let scratch = cuda.scratch(all)?.slice(0, all);
    let mut first = 0;
    for (values, blocks) in values.iter().zip(grids) {
        let n = values.len;
        let partials = cuda.output("scratch", scratch.slice(first, blocks as usize), blocks as usize)?;
        let launch = global_norm::squared_sum::<T>(partials, cuda.input("grads", *values, n)?, n as u64);
        cuda.launch(launch, [blocks, 1, 1], shared_bytes(global_norm::shared))?;
        first += blocks as usize;
    }
    Ok(scratch)
}
