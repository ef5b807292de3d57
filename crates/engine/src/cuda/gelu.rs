//! GELU as a pass of its own, where the matrix product does not do it.

use super::{Cuda, Float};
use crate::Result;
use crate::tensor::Tensor;
use gpu::gelu;
use gpu::launch::KernelLaunch;

/// out (n) = gelu(inp (n))
pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, out: Tensor, inp: Tensor, n: usize) -> Result<()> {
    let pass = prepare(cuda, out, inp, n)?;
    cuda.launch(&pass.launch, pass.grid, pass.shared_bytes)
}

/// As [`forward`], to be launched.
pub(super) fn prepare<T: Float>(cuda: &Cuda<T>, out: Tensor, inp: Tensor, n: usize) -> Result<KernelLaunch> {
    let launch = gelu::gelu_forward::<T>(cuda.output("out", out, n)?, cuda.input("pre_gelu", inp, n)?, n as u64);
    Ok(KernelLaunch { launch, grid: [gelu::grid::<T>(n), 1, 1], shared_bytes: 0 })
}

/// grad (n) *= gelu'(inp (n))
pub(super) fn backward<T: Float>(cuda: &mut Cuda<T>, grad: Tensor, inp: Tensor, n: usize) -> Result<()> {
    let launch = gelu::gelu_backward::<T>(cuda.output("dinp", grad, n)?, cuda.input("pre_gelu", inp, n)?, n as u64);
    cuda.launch(&launch, [gelu::grid::<T>(n), 1, 1], 0)
}
