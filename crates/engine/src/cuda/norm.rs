//! LayerNorm and RMSNorm.

use super::{Cuda, Float, StorageType, bias, quantize};
use crate::ops::{MatmulShape, NormBackward, NormForward};
use crate::tensor::Tensor;
use crate::{Result, Workload};
use anyhow::{Context, ensure};
use cuda_std::{E4m3, Element, bf16};
use gpu::norm::launch::{self, BackwardOperands, ForwardOperands, NormKind, RowShape, Size, Weight};

/// Returns the f32 elements of scratch memory; 0 for channels that no kernel supports, which the first operation reports.
pub(super) fn scratch<T: Float>(workload: &Workload, sm_count: usize) -> usize {
    let (rows, channels) = (workload.rows(), workload.channels);
    let size = Size { norm: NormKind::LayerNorm, rows, channels, sm_count };
    let sums = if fuses_column_sums::<T>(channels) { 3 } else { 2 };
    launch::backward_partials::<T>(size, sums).unwrap_or(0)
}

/// Reports whether LayerNorm's backward kernel also computes the column sums of its output.
pub(super) fn fuses_column_sums<T: Float>(channels: usize) -> bool {
    launch::sums_columns::<T>(channels)
}

/// Checks that the kernels support the channels.
pub(super) fn check<T: Float>(workload: &Workload) -> Result<()> {
    RowShape::of::<T>(workload.channels).with_context(|| unsupported::<T>(workload.channels)).map(drop)
}

/// Returns the message for channels that no kernel supports.
fn unsupported<T: Float>(channels: usize) -> String {
    format!(
        "normalization in {}: expected a multiple of {} channels up to {}, found {channels}; change --channels, or use \
         --device cpu",
        T::DTYPE.name(),
        T::PACKET,
        RowShape::max_channels::<T>()
    )
}

/// Returns the sizes of a norm over `channels`, of which LayerNorm has means.
fn size<T: Float>(cuda: &Cuda<T>, mean: Option<Tensor>, rstd: Tensor, channels: usize) -> Size {
    let norm = if mean.is_some() { NormKind::LayerNorm } else { NormKind::RmsNorm };
    Size { norm, rows: rstd.len, channels, sm_count: cuda.executor.sm_count() }
}

/// Returns the operands of a forward pass in a storage type.
fn forward_operands<T: Float, S: Element + StorageType>(
    cuda: &Cuda<T>,
    op: &NormForward,
) -> Result<ForwardOperands<S>> {
    let (rows, n) = (op.rstd.len, op.rstd.len * op.c);
    let parameter = |name, tensor: Option<Tensor>| tensor.map(|tensor| cuda.input(name, tensor, op.c)).transpose();
    ensure!(
        op.mean.is_some() == op.bias.is_some() && (op.mean.is_none() || op.weight.is_some()),
        "norm_forward: expected a mean, a weight and a bias for LayerNorm, found only some of them"
    );
    Ok(ForwardOperands {
        mean: op.mean.map(|mean| cuda.output("mean", mean, rows)).transpose()?.unwrap_or_default(),
        rstd: cuda.output("rstd", op.rstd, rows)?,
        inp: cuda.input("inp", op.inp, n)?,
        weight: parameter("weight", op.weight)?.unwrap_or_default(),
        bias: parameter("bias", op.bias)?.unwrap_or_default(),
        eps: op.eps,
    })
}

pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, op: &NormForward) -> Result<()> {
    let size = size(cuda, op.mean, op.rstd, op.c);
    // The kernel that quantizes its output in place of writing it, if there is one.
    if let Some(next) = &op.quantized
        && let Some(quantized) = cuda.fused_operands::<E4m3>(next)?
    {
        let kernel = launch::forward_fp8(quantized, forward_operands::<T, bf16>(cuda, op)?, size);
        cuda.launch_kernel(&kernel.with_context(|| unsupported::<T>(op.c))?)?;
        return quantize::transpose_quantized(cuda, next);
    }
    let out = cuda.output("out", op.out, size.rows * op.c)?;
    let kernel = launch::forward::<T>(out, forward_operands::<T, T>(cuda, op)?, size, op.quantized.is_some());
    cuda.launch_kernel(&kernel.with_context(|| unsupported::<T>(op.c))?)?;
    op.quantized.map_or(Ok(()), |next| quantize::quantize(cuda, next))
}

pub(super) fn backward<T: Float>(cuda: &mut Cuda<T>, op: NormBackward) -> Result<()> {
    let NormBackward { dinp, dweight, dbias, column_sums, dout, inp, weight, mean, rstd, c } = op;
    let size = size(cuda, mean, rstd, c);
    let (rows, n) = (size.rows, size.rows * c);
    ensure!(
        weight.is_some() == dweight.is_some(),
        "norm_backward: expected both weight and dweight or neither, found one"
    );
    let fused_sums = column_sums.filter(|_| fuses_column_sums::<T>(c));
    let sums = [dweight, dbias, fused_sums].into_iter().flatten().count();
    let partials = launch::backward_partials::<T>(size, sums).with_context(|| unsupported::<T>(c))?;
    let output = |name, tensor: Option<Tensor>| tensor.map(|tensor| cuda.output(name, tensor, c)).transpose();
    let weight = match weight.zip(dweight) {
        Some((weight, dweight)) => Some(Weight {
            weight: cuda.input("weight", weight, c)?,
            dweight: cuda.output("dweight", dweight, c)?,
            dbias: output("dbias", dbias)?,
            column_sums: output("column_sums", fused_sums)?,
            partials: cuda.output("scratch", cuda.scratch(partials)?, partials)?,
        }),
        None => None,
    };
    let operands = BackwardOperands {
        dinp: cuda.output("dinp", dinp, n)?,
        dout: cuda.input("dout", dout, n)?,
        inp: cuda.input("inp", inp, n)?,
        mean: mean.map(|mean| cuda.input("mean", mean, rows)).transpose()?,
        rstd: cuda.input("rstd", rstd, rows)?,
        weight,
    };
    cuda.launch_all(&launch::backward::<T>(operands, size).with_context(|| unsupported::<T>(c))?)?;
    match column_sums {
        Some(sums) if fused_sums.is_none() => {
            let kernels = bias::backward_kernels(cuda, sums, dinp, MatmulShape { rows, c, oc: c })?;
            cuda.launch_all(&kernels)
        }
        _ => Ok(()),
    }
}
