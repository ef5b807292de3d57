//! Causal attention.

use super::tensor_maps::Extents;
use super::{Cuda, Float};
use crate::tensor::{DType, Tensor};
use crate::{Heads, Result, Scope};
use anyhow::Context;
use cuda_std::Global;
use cuda_std::bf16;
use cuda_std::hopper::TensorMap;
use gpu::attention::launch::{self, HEAD_SIZES, Shape};
use gpu::attention_wgmma::{self, launch::Maps};

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

/// The TMA map over a tensor (B, T, parts NH HS), where the kernels for sm_90a take this shape and run here.
fn map_of<T: Float>(
    cuda: &mut Cuda<T>,
    name: &str,
    tensor: Tensor,
    parts: usize,
    heads: Heads,
) -> Result<Option<Global<TensorMap>>> {
    if T::DTYPE != DType::Bf16 || !attention_wgmma::launch::takes(heads.head_size) {
        return Ok(None);
    }
    let extents = [heads.b, heads.t, parts * heads.heads * heads.head_size];
    let tensor = cuda.input::<bf16>(name, tensor, extents.iter().product())?;
    cuda.executor.tensor_map(tensor, Extents::Matrices(extents), attention_wgmma::BOX)
}

pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, out: Tensor, lse: Tensor, qkv: Tensor, heads: Heads) -> Result<()> {
    let rows = heads.b * heads.t * heads.heads;
    let n = rows * heads.head_size;
    let prepared = if let Some(map) = map_of(cuda, "qkv", qkv, 3, heads)? {
        let (out, lse) = (cuda.output("out", out, n)?, cuda.output("lse", lse, rows)?);
        attention_wgmma::launch::forward(out, lse, map, shape_of(heads), cuda.executor.multiprocessors())
    } else {
        let (out, lse) = (cuda.output("out", out, n)?, cuda.output("lse", lse, rows)?);
        let prepared = launch::forward::<T>(out, lse, cuda.input("qkv", qkv, 3 * n)?, shape_of(heads));
        prepared.with_context(|| no_instance(heads, T::DTYPE))?
    };
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
    let scratch = cuda.output("scratch", cuda.scratch(rows)?, rows)?;
    let lse = cuda.input("lse", lse, rows)?;
    let maps = (map_of(cuda, "qkv", qkv, 3, heads)?, map_of(cuda, "dout", dout, 1, heads)?);
    let kernels = if let (Some(qkv), Some(dout_map)) = maps {
        let dqkv = cuda.output("dqkv", dqkv, 3 * n)?;
        let (dout, out) = (cuda.input("dout", dout, n)?, cuda.input("out", out, n)?);
        let (maps, multiprocessors) = (Maps { qkv, dout: dout_map }, cuda.executor.multiprocessors());
        attention_wgmma::launch::backward(dqkv, scratch, dout, out, lse, maps, shape_of(heads), multiprocessors)
    } else {
        let dqkv = cuda.output("dqkv", dqkv, 3 * n)?;
        let (dout, out) = (cuda.input("dout", dout, n)?, cuda.input("out", out, n)?);
        let qkv = cuda.input("qkv", qkv, 3 * n)?;
        let kernels = launch::backward::<T>(dqkv, scratch, dout, qkv, out, lse, shape_of(heads));
        kernels.with_context(|| no_instance(heads, T::DTYPE))?
    };
    for kernel in kernels {
        cuda.launch(&kernel.launch, kernel.grid, kernel.shared_bytes)?;
    }
    Ok(())
}
