//! Layer normalization.

use super::{Cuda, Float, bias, quantize, shared_bytes};
use crate::ops::{LayerNormBackward, LayerNormForward, MatmulShape, Quantize};
use crate::{Result, Workload};
use anyhow::Context;
use cuda_std::{E4m3, GlobalMut};
use gpu::column_sum;
use gpu::layernorm::{self, layernorm_backward_select, layernorm_forward_fp8_select, layernorm_forward_select};
use gpu::norm_rows::Shape;
use gpu::quantize::QuantizedOperands;

/// Returns the f32 elements of scratch memory; 0 for channels that no kernel supports, which the first operation reports.
pub(super) fn scratch<T: Float>(workload: &Workload, sm_count: usize) -> usize {
    let partials =
        |shape: Shape| shape.backward_partials(workload.rows(), workload.channels, sm_count, shape.sums_columns::<T>());
    Shape::of::<T>(workload.channels).map_or(0, partials)
}

/// Reports whether the backward kernel also computes the column sums of its output.
pub(super) fn fuses_column_sums<T: Float>(channels: usize) -> bool {
    Shape::of::<T>(channels).is_some_and(Shape::sums_columns::<T>)
}

/// The error for a shape of [`Shape::ALL`] without instances.
const NO_KERNEL: &str = "internal error: a kernel of LayerNorm lacks a shape; please report it";

/// Checks that the kernels of LayerNorm and RMSNorm support the channels.
pub(super) fn check<T: Float>(workload: &Workload) -> Result<()> {
    shape_of::<T>(workload.channels).map(drop)
}

fn shape_of<T: Float>(channels: usize) -> Result<Shape> {
    Shape::of::<T>(channels).with_context(|| {
        format!(
            "normalization in {}: expected a multiple of {} channels up to {}, found {channels}; change --channels, or use \
             --device cpu",
            T::DTYPE.name(),
            T::PACKET,
            Shape::max_channels::<T>()
        )
    })
}

/// Runs the kernel that quantizes its output in place of writing it. Returns false and does nothing if there is none.
fn forward_quantizing<T: Float>(cuda: &mut Cuda<T>, op: &LayerNormForward, next: &Quantize) -> Result<bool> {
    let Some(QuantizedOperands { out, amax, scale }) = cuda.fused_operands::<E4m3>(next)? else { return Ok(false) };
    let (shape, rows, n) = (shape_of::<T>(op.c)?, op.mean.len, op.mean.len * op.c);
    let launch = layernorm_forward_fp8_select::<E4m3>(
        shape.arguments(),
        out,
        cuda.output("mean", op.mean, rows)?,
        cuda.output("rstd", op.rstd, rows)?,
        amax,
        scale,
        cuda.input("inp", op.inp, n)?,
        cuda.input("weight", op.weight, op.c)?,
        cuda.input("bias", op.bias, op.c)?,
        rows as u32,
        op.c as u32,
    )
    .context(NO_KERNEL)?;
    let grid = shape.forward_fp8_grid(rows, cuda.executor.sm_count());
    cuda.launch(&launch, [grid, 1, 1], shape.forward_fp8_shared_bytes())?;
    quantize::transpose_quantized(cuda, next)?;
    Ok(true)
}

pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, op: &LayerNormForward) -> Result<()> {
    if let Some(next) = &op.quantized
        && forward_quantizing(cuda, op, next)?
    {
        return Ok(());
    }
    let (shape, rows, n) = (shape_of::<T>(op.c)?, op.mean.len, op.mean.len * op.c);
    let launch = layernorm_forward_select::<T>(
        shape.arguments(),
        cuda.output("out", op.out, n)?,
        cuda.output("mean", op.mean, rows)?,
        cuda.output("rstd", op.rstd, rows)?,
        cuda.input("inp", op.inp, n)?,
        cuda.input("weight", op.weight, op.c)?,
        cuda.input("bias", op.bias, op.c)?,
        rows as u32,
        op.c as u32,
    )
    .context(NO_KERNEL)?;
    let grid = shape.forward_grid(rows, cuda.executor.sm_count());
    cuda.launch(&launch, [grid, 1, 1], shape.forward_shared_bytes::<T>())?;
    op.quantized.map_or(Ok(()), |next| quantize::quantize(cuda, next))
}

pub(super) fn backward<T: Float>(cuda: &mut Cuda<T>, op: LayerNormBackward) -> Result<()> {
    let LayerNormBackward { dinp, dweight, dbias, column_sums, dout, inp, .. } = op;
    let (shape, rows, n) = (shape_of::<T>(op.c)?, op.mean.len, op.mean.len * op.c);
    let fused_sums = column_sums.filter(|_| shape.sums_columns::<T>());
    let sm_count = cuda.executor.sm_count();
    let blocks = shape.backward_grid(rows, sm_count);
    let len = shape.backward_partials(rows, op.c, sm_count, fused_sums.is_some());
    let scratch = cuda.scratch(len)?;
    let (packets, warps, group_rows) = shape.arguments();
    let launch = layernorm_backward_select::<T>(
        (packets, warps, group_rows, fused_sums.is_some()),
        cuda.output("dinp", dinp, n)?,
        cuda.output("scratch", scratch, len)?,
        cuda.input("dout", dout, n)?,
        cuda.input("inp", inp, n)?,
        cuda.input("weight", op.weight, op.c)?,
        cuda.input("mean", op.mean, rows)?,
        cuda.input("rstd", op.rstd, rows)?,
        rows as u32,
        op.c as u32,
    )
    .context(NO_KERNEL)?;
    cuda.launch(&launch, [blocks, 1, 1], shape.backward_shared_bytes::<T>())?;
    let launch = layernorm::layernorm_backward_reduce::<T>(
        cuda.output("dweight", dweight, op.c)?,
        cuda.output("dbias", dbias, op.c)?,
        match fused_sums {
            Some(sums) => cuda.output("column_sums", sums, op.c)?,
            None => GlobalMut::new(std::ptr::null_mut()),
        },
        cuda.input("scratch", scratch, len)?,
        blocks,
        op.c as u32,
    );
    let grid = layernorm::reduce_grid(op.c, fused_sums.is_some());
    cuda.launch(&launch, [grid, 1, 1], shared_bytes(column_sum::shared))?;
    match column_sums {
        Some(sums) if fused_sums.is_none() => {
            let shape = MatmulShape { rows, c: op.c, oc: op.c };
            let kernels = bias::backward_kernels(cuda, sums, dinp, shape)?;
            cuda.launch_all(&kernels)
        }
        _ => Ok(()),
    }
}
