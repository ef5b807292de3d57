//! Softmax, cross-entropy and the gradient of the logits, and the most likely tokens.

use super::quantize::{check, transpose_quantized};
use super::{Cuda, Float, shared_bytes};
use crate::Result;
use crate::ops::{Classifier, Fp8Format, Fp8Logits, Fp8Scale, MostLikely, Quantize, Scaling};
use crate::tensor::DType;
use anyhow::{Context, ensure};
use cuda_std::bf16;
use gpu::classifier::{self, Scalars, wide};
use gpu::most_likely as kernel;

/// Blocks of the kernel per SM (its `blocks_per_sm`).
const RESIDENT_BLOCKS: usize = 2;

pub(super) fn classifier<T: Float>(cuda: &mut Cuda<T>, op: Classifier) -> Result<()> {
    let Classifier { logits, losses, targets, v, vp, dloss, softcap, fp8 } = op;
    let rows = losses.len;
    ensure!(
        v <= vp && vp.is_multiple_of(T::PACKET),
        "classifier: expected at least {v} columns and a multiple of {}, found {vp}",
        T::PACKET
    );
    ensure!(
        softcap.is_none_or(|softcap| softcap > 0.0 && softcap.is_finite()),
        "classifier: expected a positive softcap, found {}",
        softcap.unwrap_or_default()
    );
    if let Some(fp8) = fp8 {
        return classifier_fp8(cuda, op, fp8);
    }
    let staged = classifier::staged::<T>(vp, cuda.executor.shared_memory(RESIDENT_BLOCKS));
    let losses = cuda.output("losses", losses, rows)?;
    let targets = cuda.input("targets", targets, rows)?;
    // Without gradients, a row is read once anyway.
    if T::DTYPE == DType::Bf16
        && let Some(dloss) = dloss
        && let Some(staged) = wide_staged(cuda, &op)
    {
        let scalars = Scalars { dloss, vocabulary: v as u32, padded: vp as u32, staged };
        let logits = cuda.output("logits", logits, rows * vp)?;
        let launch = wide::classifier_wide(logits, losses, targets, scalars, rows as u32);
        let grid = rows.min(cuda.executor.sm_count()) as u32;
        return cuda.launch(launch, [grid, 1, 1], shared_bytes(|layout| wide::shared(layout, staged)));
    }
    let gradients = u32::from(dloss.is_some());
    let dloss = dloss.unwrap_or(0.0);
    let scalars = Scalars { dloss, vocabulary: v as u32, padded: vp as u32, staged: staged as u32 };
    let logits = cuda.output("logits", logits, rows * vp)?;
    let launch = match softcap {
        None => classifier::classifier::<false, T>(logits, losses, targets, scalars, gradients, 0.0),
        Some(softcap) => classifier::classifier::<true, T>(logits, losses, targets, scalars, gradients, softcap),
    };
    cuda.launch(launch, [rows as u32, 1, 1], shared_bytes(|layout| classifier::shared::<T>(layout, staged)))
}

/// Returns the packets that each thread of the kernel for wide rows stages, if that kernel computes the gradient.
fn wide_staged<T: Float>(cuda: &Cuda<T>, op: &Classifier) -> Option<u32> {
    let staged = classifier::staged::<bf16>(op.vp, cuda.executor.shared_memory(RESIDENT_BLOCKS));
    if op.softcap.is_some() || 2 * staged >= op.vp {
        return None;
    }
    wide::staged(op.vp, cuda.executor.shared_memory(1))
}

/// Computes losses, and the gradient in FP8 in both layouts.
fn classifier_fp8<T: Float>(cuda: &mut Cuda<T>, op: Classifier, fp8: Fp8Logits) -> Result<()> {
    let Classifier { v, vp, softcap, .. } = op;
    let rows = op.losses.len;
    let dloss = op.dloss.context("classifier in FP8: expected a gradient of the losses, found none")?;
    // The kernel that transposes does not use the magnitude.
    let scale = Fp8Scale { scale: fp8.scale, amax: fp8.scale, counts: None };
    let quantized = Quantize {
        out: Some(fp8.out),
        transposed: Some(fp8.transposed),
        ..Quantize::new(op.logits, [rows, vp], Fp8Format::E5m2, scale, Scaling::Given)
    };
    check(cuda, &quantized)?;
    let (out, scale) = (cuda.fp8("gradient", fp8.out, rows * vp)?, cuda.output("scale", fp8.scale, 1)?);
    let (logits, losses) =
        (cuda.input::<bf16>("logits", op.logits, rows * vp)?, cuda.output("losses", op.losses, rows)?);
    let targets = cuda.input("targets", op.targets, rows)?;
    let scalars = |staged| Scalars { dloss, vocabulary: v as u32, padded: vp as u32, staged };
    if let Some(staged) = wide_staged(cuda, &op) {
        let launch = wide::classifier_wide_fp8(out, scale, logits, losses, targets, scalars(staged), rows as u32);
        let grid = rows.min(cuda.executor.sm_count()) as u32;
        cuda.launch(launch, [grid, 1, 1], shared_bytes(|layout| wide::shared(layout, staged)))?;
    } else {
        let staged = classifier::staged::<bf16>(vp, cuda.executor.shared_memory(RESIDENT_BLOCKS));
        let (scalars, cap) = (scalars(staged as u32), softcap.unwrap_or_default());
        let launch = match softcap {
            None => classifier::classifier_fp8::<false>(out, scale, logits, losses, targets, scalars, cap),
            Some(_) => classifier::classifier_fp8::<true>(out, scale, logits, losses, targets, scalars, cap),
        };
        let shared = shared_bytes(|layout| classifier::shared::<bf16>(layout, staged));
        cuda.launch(launch, [rows as u32, 1, 1], shared)?;
    }
    transpose_quantized(cuda, &quantized)
}

pub(super) fn most_likely<T: Float>(cuda: &mut Cuda<T>, op: MostLikely) -> Result<()> {
    let MostLikely { hits, logits, targets, v, vp } = op;
    let rows = hits.len;
    ensure!(
        0 < v && v <= vp && vp.is_multiple_of(T::PACKET),
        "most likely: expected at least {v} columns and a multiple of {}, found {vp}",
        T::PACKET
    );
    let launch = kernel::most_likely::<T>(
        cuda.output("hits", hits, rows)?,
        cuda.input("logits", logits, rows * vp)?,
        cuda.input("targets", targets, rows)?,
        v as u32,
        vp as u32,
    );
    cuda.launch(launch, [rows as u32, 1, 1], shared_bytes(kernel::shared))
}
