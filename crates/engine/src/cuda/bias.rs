//! The sum of a matrix and a bias, and the gradient of a bias.

use super::{Cuda, Float, shared_bytes};
use crate::ops::MatmulShape;
use crate::tensor::Tensor;
use crate::{Result, Workload};
use anyhow::ensure;
use cuda_std::bf16;
use gpu::launch::KernelLaunch;
use gpu::{bias, column_sum};

/// Returns the f32 elements of scratch memory for the biases of a transformer layer.
pub(super) fn scratch<T: Float>(workload: &Workload, sm_count: usize) -> usize {
    let partials = |oc| bias::bias_backward_slices::<T>(workload.rows(), oc, sm_count) * oc;
    workload.linear_layers.iter().map(|&(oc, _)| partials(oc)).max().unwrap_or(0)
}

/// Returns the kernels of dbias (OC) += column sums of dout (rows, OC).
pub(super) fn backward_kernels<T: Float>(
    cuda: &Cuda<T>,
    dbias: Tensor,
    dout: Tensor,
    MatmulShape { rows, oc, .. }: MatmulShape,
) -> Result<Vec<KernelLaunch>> {
    ensure!(oc.is_multiple_of(T::PACKET), "bias gradient: expected a multiple of {} columns, found {oc}", T::PACKET);
    let slices = bias::bias_backward_slices::<T>(rows, oc, cuda.executor.sm_count());
    let scratch = cuda.scratch(slices * oc)?;
    let partials = cuda.output("scratch", scratch, slices * oc)?;
    let dout = cuda.input("dout", dout, rows * oc)?;
    let dbias = cuda.output("dbias", dbias, oc)?;
    Ok(vec![
        KernelLaunch {
            launch: bias::bias_backward::<T>(partials, dout, rows as u32, oc as u32),
            grid: bias::bias_backward_grid::<T>(oc, slices),
            shared_bytes: shared_bytes(bias::bias_backward_shared::<T>),
        },
        KernelLaunch {
            launch: bias::bias_backward_reduce::<T>(dbias, partials.reader(), slices as u32, oc as u32),
            grid: [column_sum::grid(oc), 1, 1],
            shared_bytes: shared_bytes(column_sum::shared),
        },
    ])
}

/// Returns the kernel that adds `bias` (OC) to each row of `out` (rows, OC), in bf16. OC is a multiple of 8.
pub(super) fn add_kernel<T: Float>(
    cuda: &Cuda<T>,
    out: Tensor,
    bias: Tensor,
    [rows, oc]: [usize; 2],
) -> Result<KernelLaunch> {
    let n = rows * oc;
    let (out, bias) = (cuda.output::<bf16>("out", out, n)?, cuda.input::<bf16>("bias", bias, oc)?);
    let launch = bias::bias_add(out, bias, n as u64, oc as u32);
    Ok(KernelLaunch { launch, grid: [bias::bias_add_grid(n), 1, 1], shared_bytes: 0 })
}
