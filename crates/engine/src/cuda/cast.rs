//! Conversions between the storage type and f32.

use super::{Cuda, Float};
use crate::Result;
use crate::tensor::{DType, Tensor};
use anyhow::{bail, ensure};
use gpu::cast;

pub(super) fn cast<T: Float>(cuda: &mut Cuda<T>, to: Tensor, from: Tensor) -> Result<()> {
    let n = to.len;
    ensure!(from.len == n, "cast of {} values to {n}", from.len);
    let launch = if to.dtype == DType::F32 && from.dtype == T::DTYPE {
        cast::cast_to_f32::<T>(cuda.output("to", to, n)?, cuda.input("from", from, n)?, n as u64)
    } else if to.dtype == T::DTYPE && from.dtype == DType::F32 {
        cast::cast_from_f32::<T>(cuda.output("to", to, n)?, cuda.input("from", from, n)?, n as u64)
    } else {
        bail!("cast of {} to {}; this engine has {} and f32", from.dtype.name(), to.dtype.name(), T::DTYPE.name());
    };
    cuda.launch(&launch, [cast::grid::<T>(n), 1, 1], 0)
}
