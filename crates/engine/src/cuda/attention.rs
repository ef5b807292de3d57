//! Causal attention.

use super::tensor_maps::Extents;
use super::{Cuda, Float};
use crate::ops::{AttentionBackward, AttentionForward, AttentionShape};
use crate::tensor::{DType, Tensor};
use crate::{Result, Workload};
use anyhow::Context;
use cuda_std::Global;
use cuda_std::bf16;
use cuda_std::hopper::TensorMap;
use gpu::attention::launch::{self, HEAD_SIZES, Shape};
use gpu::attention_wgmma::{self, launch::BackwardOperands};

/// Returns the f32 elements of scratch memory: one per row of each head.
pub(super) fn scratch(workload: &Workload) -> usize {
    workload.rows() * workload.attention.heads
}

fn shape_of(shape: AttentionShape) -> Shape {
    Shape { b: shape.b, t: shape.t, nh: shape.heads, kv: shape.kv_heads, hs: shape.head_size }
}

/// Returns the elements of qkv.
fn packed(shape: AttentionShape) -> usize {
    shape.b * shape.t * shape.packed_heads() * shape.head_size
}

fn no_instance(shape: AttentionShape, dtype: DType) -> String {
    let sizes = HEAD_SIZES.map(|size| size.to_string()).join(", ");
    format!(
        "attention in {}: expected a head size of {sizes}, found {}; change --heads or --channels",
        dtype.name(),
        shape.head_size
    )
}

/// Returns the tensor map of a tensor (B, T, heads · HS), or `None` where the sm_90a kernels do not support the shape or do
/// not run.
fn map_of<T: Float>(
    cuda: &mut Cuda<T>,
    name: &str,
    tensor: Tensor,
    heads: usize,
    shape: AttentionShape,
) -> Result<Option<Global<TensorMap>>> {
    if T::DTYPE != DType::Bf16 || !attention_wgmma::launch::supports(shape.head_size) {
        return Ok(None);
    }
    let extents = [shape.b, shape.t, heads * shape.head_size];
    let tensor = cuda.input::<bf16>(name, tensor, extents.iter().product())?;
    cuda.executor.tensor_map(
        tensor.pointer().addr() as u64,
        DType::Bf16,
        Extents::Matrices(extents),
        attention_wgmma::BOX,
    )
}

pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, op: AttentionForward) -> Result<()> {
    let AttentionForward { out, lse, qkv, shape } = op;
    shape.check()?;
    let rows = shape.b * shape.t * shape.heads;
    let n = rows * shape.head_size;
    let prepared = if let Some(map) = map_of(cuda, "qkv", qkv, shape.packed_heads(), shape)? {
        let (out, lse) = (cuda.output("out", out, n)?, cuda.output("lse", lse, rows)?);
        attention_wgmma::launch::forward(out, lse, map, shape_of(shape), cuda.executor.sm_count())
    } else {
        let (out, lse) = (cuda.output("out", out, n)?, cuda.output("lse", lse, rows)?);
        let prepared = launch::forward::<T>(out, lse, cuda.input("qkv", qkv, packed(shape))?, shape_of(shape));
        prepared.with_context(|| no_instance(shape, T::DTYPE))?
    };
    cuda.launch(&prepared.launch, prepared.grid, prepared.shared_bytes)
}

pub(super) fn backward<T: Float>(cuda: &mut Cuda<T>, op: AttentionBackward) -> Result<()> {
    let AttentionBackward { dqkv, dout, qkv, out, lse, shape } = op;
    shape.check()?;
    let rows = shape.b * shape.t * shape.heads;
    let n = rows * shape.head_size;
    let scratch = cuda.output("scratch", cuda.scratch(rows)?, rows)?;
    let lse = cuda.input("lse", lse, rows)?;
    let maps =
        (map_of(cuda, "qkv", qkv, shape.packed_heads(), shape)?, map_of(cuda, "dout", dout, shape.heads, shape)?);
    let kernels = if let (Some(qkv_map), Some(dout_map)) = maps {
        let dqkv = cuda.output("dqkv", dqkv, packed(shape))?;
        let (dout, out) = (cuda.input("dout", dout, n)?, cuda.input("out", out, n)?);
        let operands = BackwardOperands { dqkv, d: scratch, dout, out, lse, qkv_map, dout_map };
        attention_wgmma::launch::backward(operands, shape_of(shape), cuda.executor.sm_count())
    } else {
        let dqkv = cuda.output("dqkv", dqkv, packed(shape))?;
        let (dout, out) = (cuda.input("dout", dout, n)?, cuda.input("out", out, n)?);
        let qkv = cuda.input("qkv", qkv, packed(shape))?;
        let kernels = launch::backward::<T>(dqkv, scratch, dout, qkv, out, lse, shape_of(shape));
        kernels.with_context(|| no_instance(shape, T::DTYPE))?
    };
    cuda.launch_all(&kernels)
}
