use super::arena::Arena;
use crate::Result;
use crate::tensor::{DType, Tensor};
use anyhow::ensure;

/// f32 is the only type here, so a copy.
pub(super) fn cast(arena: &mut Arena, to: Tensor, from: Tensor) -> Result<()> {
    for (name, tensor) in [("to", to), ("from", from)] {
        ensure!(tensor.dtype == DType::F32, "cast: tensor '{name}' is {}, expected f32", tensor.dtype.name());
    }
    arena.copy(to, from)
}
