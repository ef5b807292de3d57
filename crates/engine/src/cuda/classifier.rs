//! Softmax, cross-entropy and the gradient of the logits, and the most likely tokens.

use super::{Cuda, Float, shared_bytes};
use crate::Result;
use crate::ops::{Classifier, MostLikely};
use crate::tensor::DType;
use anyhow::ensure;
use gpu::classifier::{self, Scalars, wide};
use gpu::most_likely as kernel;

/// Blocks of the kernel per SM (its `blocks_per_sm`).
const RESIDENT_BLOCKS: usize = 2;

pub(super) fn classifier<T: Float>(cuda: &mut Cuda<T>, op: Classifier) -> Result<()> {
    let Classifier { logits, losses, targets, v, vp, dloss, softcap } = op;
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
    let staged = classifier::staged::<T>(vp, cuda.executor.shared_memory(RESIDENT_BLOCKS));
    let losses = cuda.output("losses", losses, rows)?;
    let targets = cuda.input("targets", targets, rows)?;
    // Without gradients, a row is read once anyway.
    if T::DTYPE == DType::Bf16
        && let Some(dloss) = dloss
        && softcap.is_none()
        && 2 * staged < vp
        && let Some(staged) = wide::staged(vp, cuda.executor.shared_memory(1))
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
