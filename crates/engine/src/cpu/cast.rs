use super::arena::Arena;
use crate::Result;
use crate::tensor::{DType, Tensor};
use anyhow::ensure;

/// Copies: f32 is the only storage type on the CPU.
pub(super) fn cast(arena: &mut Arena, to: Tensor, from: Tensor) -> Result<()> {
    for (name, tensor) in [("to", to), ("from", from)] {
        ensure!(tensor.dtype == DType::F32, "cast: tensor {name}: expected f32, found {}", tensor.dtype.name());
    }
    arena.copy(to, from)
}
