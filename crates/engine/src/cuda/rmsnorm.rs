//! RMS normalization.

use super::{Cuda, Float, quantize};
use crate::ops::{Quantize, RmsNormBackward, RmsNormForward};
use crate::{Result, Workload};
use anyhow::{Context, bail};
use gpu::norm_rows::Shape;
use gpu::rmsnorm::launch::{self, BackwardOperands, ForwardOperands, Fp8ForwardOperands, Size, Weight};

/// Returns the f32 elements of scratch memory; 0 for channels that no kernel supports, which the first operation reports.
pub(super) fn scratch<T: Float>(workload: &Workload, sm_count: usize) -> usize {
    let size = Size { rows: workload.rows(), channels: workload.channels, sm_count };
    launch::backward_partials::<T>(size).unwrap_or(0)
}

/// Returns the message for channels that no kernel supports.
fn unsupported<T: Float>(channels: usize) -> String {
    let (dtype, packet) = (T::DTYPE.name(), T::PACKET);
    format!(
        "RMSNorm in {dtype}: expected a multiple of {packet} channels up to {}, found {channels}",
        Shape::max_channels::<T>()
    )
}

/// Runs the kernel that quantizes its output in place of writing it. Returns false and does nothing if there is none.
fn forward_quantizing<T: Float>(cuda: &mut Cuda<T>, op: &RmsNormForward, next: &Quantize) -> Result<bool> {
    let Some(quantized) = cuda.fused_operands(next)? else { return Ok(false) };
    let (rows, n) = (op.rstd.len, op.rstd.len * op.c);
    let operands = Fp8ForwardOperands {
        quantized,
        rstd: cuda.output("rstd", op.rstd, rows)?,
        inp: cuda.input("inp", op.inp, n)?,
        weight: op.weight.map(|weight| cuda.input("weight", weight, op.c)).transpose()?,
        eps: op.eps,
    };
    let size = Size { rows, channels: op.c, sm_count: cuda.executor.sm_count() };
    let kernel = launch::forward_fp8(operands, size).with_context(|| unsupported::<T>(op.c))?;
    cuda.launch(&kernel.launch, kernel.grid, kernel.shared_bytes)?;
    quantize::transpose_quantized(cuda, next)?;
    Ok(true)
}

pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, op: &RmsNormForward) -> Result<()> {
    if let Some(next) = &op.quantized
        && forward_quantizing(cuda, op, next)?
    {
        return Ok(());
    }
    let (rows, n) = (op.rstd.len, op.rstd.len * op.c);
    let operands = ForwardOperands {
        out: cuda.output("out", op.out, n)?,
        rstd: cuda.output("rstd", op.rstd, rows)?,
        inp: cuda.input("inp", op.inp, n)?,
        weight: op.weight.map(|weight| cuda.input("weight", weight, op.c)).transpose()?,
        eps: op.eps,
    };
    let size = Size { rows, channels: op.c, sm_count: cuda.executor.sm_count() };
    let kernel = launch::forward::<T>(operands, size).with_context(|| unsupported::<T>(op.c))?;
    cuda.launch(&kernel.launch, kernel.grid, kernel.shared_bytes)?;
    op.quantized.map_or(Ok(()), |next| quantize::quantize(cuda, next))
}

pub(super) fn backward<T: Float>(cuda: &mut Cuda<T>, op: RmsNormBackward) -> Result<()> {
    let (rows, n) = (op.rstd.len, op.rstd.len * op.c);
    let size = Size { rows, channels: op.c, sm_count: cuda.executor.sm_count() };
    let partials = launch::backward_partials::<T>(size).with_context(|| unsupported::<T>(op.c))?;
    let weight = match (op.weight, op.dweight) {
        (Some(weight), Some(dweight)) => Some(Weight {
            weight: cuda.input("weight", weight, op.c)?,
            dweight: cuda.output("dweight", dweight, op.c)?,
            partials: cuda.output("scratch", cuda.scratch(partials)?, partials)?,
        }),
        (None, None) => None,
        _ => bail!("rmsnorm_backward: expected both weight and dweight or neither, found one"),
    };
    let operands = BackwardOperands {
        dinp: cuda.output("dinp", op.dinp, n)?,
        dout: cuda.input("dout", op.dout, n)?,
        inp: cuda.input("inp", op.inp, n)?,
        rstd: cuda.input("rstd", op.rstd, rows)?,
        weight,
    };
    let kernels = launch::backward::<T>(operands, size).with_context(|| unsupported::<T>(op.c))?;
    cuda.launch_all(&kernels)
}
