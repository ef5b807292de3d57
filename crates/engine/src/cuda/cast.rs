//! Conversions between the storage type and f32.

use super::{Cuda, Float};
use crate::Result;
use crate::tensor::{DType, Tensor};
use anyhow::{bail, ensure};
use gpu::cast;

pub(super) fn cast<T: Float>(cuda: &mut Cuda<T>, to: Tensor, from: Tensor) -> Result<()> {
    let n = to.len;
    ensure!(from.len == n, "cast: expected {n} values, found {}", from.len);
    let launch = if to.dtype == DType::F32 && from.dtype == T::DTYPE {
        cast::cast_to_f32::<T>(cuda.output("to", to, n)?, cuda.input("from", from, n)?, n as u64)
    } else if to.dtype == T::DTYPE && from.dtype == DType::F32 {
        cast::cast_from_f32::<T>(cuda.output("to", to, n)?, cuda.input("from", from, n)?, n as u64)
    } else {
        bail!("cast: expected {} or f32, found {} to {}", T::DTYPE.name(), from.dtype.name(), to.dtype.name());
    };
    cuda.launch(launch, [cast::grid::<T>(n), 1, 1], 0)
}
