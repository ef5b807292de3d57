//! Causal attention.

use super::{Cuda, Float};
use crate::engine::{Heads, Result, Scope};
use crate::tensor::{DType, Tensor};
use anyhow::Context;
use gpu::attention::launch::{self, HEAD_SIZES, Shape};

/// f32 elements of scratch: one per row of each head.
pub(super) fn scratch(scope: &Scope) -> usize {
    scope.b * scope.heads * scope.t
}

fn shape_of(heads: Heads) -> Shape {
    Shape { b: heads.b, t: heads.t, nh: heads.heads, hs: heads.head_size }
}

fn no_instance(heads: Heads, dtype: DType) -> String {
    let sizes = HEAD_SIZES.map(|size| size.to_string()).join(", ");
    format!(
        "attention with heads of {} channels in {}: the kernels take {sizes}; choose --heads and --channels so",
        heads.head_size,
        dtype.name()
    )
}

pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, out: Tensor, lse: Tensor, qkv: Tensor, heads: Heads) -> Result<()> {
    let rows = heads.b * heads.t * heads.heads;
    let prepared = launch::forward::<T>(
        cuda.output("out", out, rows * heads.head_size)?,
        cuda.output("lse", lse, rows)?,
        cuda.input("qkv", qkv, 3 * rows * heads.head_size)?,
        shape_of(heads),
    );
    let prepared = prepared.with_context(|| no_instance(heads, T::DTYPE))?;
    cuda.launch(&prepared.launch, prepared.grid, prepared.shared_bytes)
}

pub(super) fn backward<T: Float>(
    cuda: &mut Cuda<T>,
    dqkv: Tensor,
    dout: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    heads: Heads,
) -> Result<()> {
    let rows = heads.b * heads.t * heads.heads;
    let n = rows * heads.head_size;
    let scratch = cuda.scratch(rows)?;
    let prepared = launch::backward::<T>(
        cuda.output("dqkv", dqkv, 3 * n)?,
        cuda.output("scratch", scratch, rows)?,
        cuda.input("dout", dout, n)?,
        cuda.input("qkv", qkv, 3 * n)?,
        cuda.input("out", out, n)?,
        cuda.input("lse", lse, rows)?,
        shape_of(heads),
    );
    for kernel in prepared.with_context(|| no_instance(heads, T::DTYPE))? {
        cuda.launch(&kernel.launch, kernel.grid, kernel.shared_bytes)?;
    }
    Ok(())
}
