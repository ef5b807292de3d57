//! GELU as a kernel of its own, where no GEMM epilogue applies it.

use super::{Cuda, Float};
use crate::Result;
use crate::tensor::Tensor;
use gpu::gelu;
use gpu::launch::KernelLaunch;

/// out (n) = gelu(inp (n))
pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, out: Tensor, inp: Tensor, n: usize) -> Result<()> {
    let kernel = forward_kernel(cuda, out, inp, n)?;
    cuda.launch(&kernel.launch, kernel.grid, kernel.shared_bytes)
}

/// Returns the kernel of [`forward`].
pub(super) fn forward_kernel<T: Float>(cuda: &Cuda<T>, out: Tensor, inp: Tensor, n: usize) -> Result<KernelLaunch> {
    let launch = gelu::gelu_forward::<T>(cuda.output("out", out, n)?, cuda.input("pre_gelu", inp, n)?, n as u64);
    Ok(KernelLaunch { launch, grid: [gelu::grid::<T>(n), 1, 1], shared_bytes: 0 })
}

/// grad (n) *= gelu'(inp (n))
pub(super) fn backward<T: Float>(cuda: &mut Cuda<T>, grad: Tensor, inp: Tensor, n: usize) -> Result<()> {
    let launch = gelu::gelu_backward::<T>(cuda.output("dinp", grad, n)?, cuda.input("pre_gelu", inp, n)?, n as u64);
    cuda.launch(&launch, [gelu::grid::<T>(n), 1, 1], 0)
}
