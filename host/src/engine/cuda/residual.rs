//! Residual sums.

use super::{Cuda, Float};
use crate::engine::Result;
use crate::tensor::Tensor;
use anyhow::ensure;
use gpu::residual;

pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, out: Tensor, a: Tensor, b: Tensor) -> Result<()> {
    let n = out.len;
    ensure!(n.is_multiple_of(T::PACKET), "residual: {n} elements are not a multiple of {}", T::PACKET);
    let launch = residual::residual_forward::<T>(
        cuda.output("residual", out, n)?,
        cuda.input("a", a, n)?,
        cuda.input("b", b, n)?,
        n as u64,
    );
    cuda.launch(&launch, [residual::grid::<T>(n), 1, 1], 0)
}
