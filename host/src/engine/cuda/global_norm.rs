//! Sums in a fixed order.

use super::{Cuda, Float, shared_bytes};
use crate::engine::{Result, Scope};
use crate::tensor::Tensor;
use gpu::global_norm;

/// f32 elements of scratch.
pub(super) fn scratch<T: Float>(scope: &Scope, multiprocessors: usize) -> usize {
    global_norm::squared_sum_grid::<T>(scope.parameters, multiprocessors) as usize
}

pub(super) fn sum<T: Float>(cuda: &mut Cuda<T>, out: Tensor, values: Tensor) -> Result<()> {
    let n = values.len;
    let launch = global_norm::sum(cuda.output("out", out, 1)?, cuda.input("values", values, n)?, n as u64);
    cuda.launch(&launch, [1, 1, 1], shared_bytes(global_norm::shared))
}

pub(super) fn global_norm<T: Float>(cuda: &mut Cuda<T>, norm: Tensor, grads: Tensor) -> Result<()> {
    let n = grads.len;
    let blocks = global_norm::squared_sum_grid::<T>(n, cuda.executor.multiprocessors());
    let scratch = cuda.scratch(blocks as usize)?;
    let partials = cuda.output("scratch", scratch, blocks as usize)?;
    let launch = global_norm::squared_sum::<T>(partials, cuda.input("grads", grads, n)?, n as u64);
    cuda.launch(&launch, [blocks, 1, 1], shared_bytes(global_norm::shared))?;
    let partials = cuda.input("scratch", scratch, blocks as usize)?;
    let launch = global_norm::norm(cuda.output("norm", norm, 1)?, partials, u64::from(blocks));
    cuda.launch(&launch, [1, 1, 1], shared_bytes(global_norm::shared))
}
