//! The gradient of a bias.

use super::{Cuda, Float, shared_bytes};
use crate::tensor::Tensor;
use crate::{Result, Scope};
use anyhow::ensure;
use gpu::launch::KernelLaunch;
use gpu::{bias, column_sum};

/// f32 elements of scratch: enough for the biases of a transformer layer, which are C, 3C and 4C wide.
pub(super) fn scratch<T: Float>(scope: &Scope, multiprocessors: usize) -> usize {
    let partials = |oc| bias::bias_backward_slices::<T>(scope.b * scope.t, oc, multiprocessors) * oc;
    [1, 3, 4].into_iter().map(|widths| partials(widths * scope.channels)).max().unwrap_or(0)
}

/// dbias (oc) += column sums of dout (rows, oc)
pub(super) fn backward<T: Float>(
    cuda: &Cuda<T>,
    dbias: Tensor,
    dout: Tensor,
    rows: usize,
    oc: usize,
) -> Result<Vec<KernelLaunch>> {
    ensure!(oc.is_multiple_of(T::PACKET), "bias: {oc} columns are not a multiple of {}", T::PACKET);
    let slices = bias::bias_backward_slices::<T>(rows, oc, cuda.executor.multiprocessors());
    let scratch = cuda.scratch(slices * oc)?;
    let partials = cuda.output("scratch", scratch, slices * oc)?;
    let dout = cuda.input("dout", dout, rows * oc)?;
    Ok(vec![
        KernelLaunch {
            launch: bias::bias_backward::<T>(partials, dout, rows as u32, oc as u32),
            grid: bias::bias_backward_grid::<T>(oc, slices),
            shared_bytes: shared_bytes(bias::bias_backward_shared::<T>),
        },
        KernelLaunch {
            launch: bias::bias_backward_reduce::<T>(
                cuda.output("dbias", dbias, oc)?,
                partials.reader(),
                slices as u32,
                oc as u32,
            ),
            grid: [column_sum::grid(oc), 1, 1],
            shared_bytes: shared_bytes(column_sum::shared),
        },
    ])
}
