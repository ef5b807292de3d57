//! Causal attention.

use super::executor::Executor;
use super::tensor_maps::Extents;
use super::{Cuda, Float, quantize};
use crate::ops::{AttentionBackward, AttentionForward, AttentionMask, AttentionShape};
use crate::tensor::{DType, Tensor};
use crate::{Result, Workload};
use anyhow::{Context, ensure};
use cuda_std::hopper::TensorMap;
use cuda_std::{Global, GlobalMut, bf16};
use gpu::attention::launch::{self, AttentionSizes, Documents, HEAD_SIZES, Mask};
use gpu::attention_wgmma;
use gpu::attention_wgmma::launch::{BackwardOperands, FusedScratch};

/// Returns whether the backward pass of a shape is the fused one, which takes sums of dQ and counters.
fn is_fused<T: Float>(executor: &dyn Executor, shape: AttentionShape) -> bool {
    executor.emulation().hopper && T::DTYPE == DType::Bf16 && attention_wgmma::launch::is_fused(shape.head_size)
}

/// Returns the elements of D = rowsum(dout ∘ out), padded so that what follows is aligned.
fn d_elements(shape: AttentionShape) -> usize {
    (shape.b * shape.t * shape.heads).next_multiple_of(64)
}

/// Returns the f32 elements of scratch memory: D, one per row of each head, and the sums of dQ.
pub(super) fn scratch<T: Float>(workload: &Workload, executor: &dyn Executor) -> usize {
    scratch_elements::<T>(workload.attention, executor)
}

fn scratch_elements<T: Float>(shape: AttentionShape, executor: &dyn Executor) -> usize {
    let fused = is_fused::<T>(executor, shape);
    d_elements(shape) + if fused { attention_wgmma::launch::fused_dq_elements(shape_of(shape)) } else { 0 }
}

/// Returns the number of counters, which are zero between operations.
pub(super) fn counters<T: Float>(workload: &Workload, executor: &dyn Executor) -> usize {
    let fused = workload.training && is_fused::<T>(executor, workload.attention);
    if fused { attention_wgmma::launch::fused_counters(shape_of(workload.attention)) } else { 0 }
}

fn shape_of(shape: AttentionShape) -> AttentionSizes {
    AttentionSizes { b: shape.b, t: shape.t, nh: shape.heads, kv: shape.kv_heads, hs: shape.head_size }
}

/// Returns the kernels' mask.
fn mask_of<T: Float>(cuda: &Cuda<T>, mask: AttentionMask, shape: AttentionShape) -> Result<Mask> {
    let AttentionMask { documents, window } = mask;
    let tiles = shape.b * shape.t.div_ceil(attention_wgmma::TILE as usize);
    let input = |name, tensor, len| -> Result<Global<u32>> {
        // Positions and indices of tiles are not negative.
        Ok(Global::new(cuda.input::<i32>(name, tensor, len)?.pointer().cast()))
    };
    let documents = documents.map(|documents| {
        Ok::<_, anyhow::Error>(Documents {
            first_keys: input("first keys", documents.first_keys, shape.b * shape.t)?,
            last_queries: input("last queries", documents.last_queries, shape.b * shape.t)?,
            query_tiles: input("order of queries", documents.query_tiles, tiles)?,
            key_tiles: input("order of keys", documents.key_tiles, tiles)?,
        })
    });
    Ok(Mask { documents: documents.transpose()?, window: window.map(|window| window as u32) })
}

/// Returns the elements of qkv.
fn packed(shape: AttentionShape) -> usize {
    shape.b * shape.t * shape.packed_heads() * shape.head_size
}

/// Checks that kernels exist for the head size.
pub(super) fn check<T: Float>(workload: &Workload) -> Result<()> {
    let shape = workload.attention;
    ensure!(HEAD_SIZES.contains(&shape.head_size), no_instance(shape, T::DTYPE));
    Ok(())
}

fn no_instance(shape: AttentionShape, dtype: DType) -> String {
    let sizes = HEAD_SIZES.map(|size| size.to_string()).join(", ");
    format!(
        "attention in {}: expected a head size of {sizes}, found {}; change --head-size, --heads or --channels, or use --device cpu",
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

pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, op: &AttentionForward) -> Result<()> {
    let AttentionForward { out, lse, qkv, shape, first_query: _, mask, quantized } = *op;
    shape.check()?;
    let mask = mask_of(cuda, mask, shape)?;
    let rows = shape.b * shape.t * shape.heads;
    let n = rows * shape.head_size;
    let map = map_of(cuda, "qkv", qkv, shape.packed_heads(), shape)?;
    let fused = match &quantized {
        Some(next) if map.is_some() && next.transposed.is_none() => cuda.fused_operands(next)?,
        _ => None,
    };
    let prepared = if let Some(map) = map {
        let (out, lse) = (cuda.output("out", out, n)?, cuda.output("lse", lse, rows)?);
        let (shape, sm_count) = (shape_of(shape), cuda.executor.sm_count());
        attention_wgmma::launch::forward(out, fused, lse, map, shape, mask, sm_count)
    } else {
        let (out, lse) = (cuda.output("out", out, n)?, cuda.output("lse", lse, rows)?);
        let prepared = launch::forward::<T>(out, lse, cuda.input("qkv", qkv, packed(shape))?, shape_of(shape), mask);
        prepared.with_context(|| no_instance(shape, T::DTYPE))?
    };
    cuda.launch_kernel(&prepared)?;
    quantized.filter(|_| fused.is_none()).map_or(Ok(()), |next| quantize::quantize(cuda, next))
}

pub(super) fn backward<T: Float>(cuda: &mut Cuda<T>, op: &AttentionBackward) -> Result<()> {
    let AttentionBackward { dqkv, dout, qkv, out, lse, shape, mask } = *op;
    shape.check()?;
    let mask = mask_of(cuda, mask, shape)?;
    let rows = shape.b * shape.t * shape.heads;
    let n = rows * shape.head_size;
    let needed = scratch_elements::<T>(shape, &*cuda.executor);
    let scratch = cuda.output("scratch", cuda.scratch(needed)?, needed)?;
    let lse = cuda.input("lse", lse, rows)?;
    let maps =
        (map_of(cuda, "qkv", qkv, shape.packed_heads(), shape)?, map_of(cuda, "dout", dout, shape.heads, shape)?);
    let kernels = if let (Some(qkv_map), Some(dout_map)) = maps {
        let dqkv = cuda.output("dqkv", dqkv, packed(shape))?;
        let (dout, out) = (cuda.input("dout", dout, n)?, cuda.input("out", out, n)?);
        let operands = BackwardOperands { dqkv, d: scratch, dout, out, lse, qkv_map, dout_map };
        let (d, shape, sm_count) = (d_elements(shape), shape_of(shape), cuda.executor.sm_count());
        let mut fused = None;
        if attention_wgmma::launch::is_fused(shape.hs) {
            let len = attention_wgmma::launch::fused_counters(shape);
            let counters = cuda.attention_counters.context("attention counters: expected a plan for this shape")?;
            let counters = cuda.output::<i32>("attention counters", counters, len)?;
            let counters = GlobalMut::new(counters.pointer().cast());
            fused = Some(FusedScratch { dq: scratch.skip(d), counters });
        }
        attention_wgmma::launch::backward(operands, fused, shape, mask, sm_count)
    } else {
        let dqkv = cuda.output("dqkv", dqkv, packed(shape))?;
        let (dout, out) = (cuda.input("dout", dout, n)?, cuda.input("out", out, n)?);
        let qkv = cuda.input("qkv", qkv, packed(shape))?;
        let kernels = launch::backward::<T>(dqkv, scratch, dout, qkv, out, lse, (shape_of(shape), mask));
        kernels.with_context(|| no_instance(shape, T::DTYPE))?
    };
    cuda.launch_all(&kernels)
}
