use super::arena::Arena;
use super::quantize::{quantize, set_scalar};
use crate::ops::{Classifier, Fp8Format, Fp8Logits, Fp8Scale, MostLikely, Quantize, Scaling};
use crate::tensor::Tensor;
use crate::{MASKED_TARGET, Result};
use anyhow::{Context, ensure};
use gpu::quantize::scale_of;
use rayon::prelude::*;

pub(super) fn classifier(arena: &mut Arena, op: Classifier) -> Result<()> {
    let Classifier { logits, losses, targets, v, vp, dloss, softcap, fp8 } = op;
    let (row_count, gradient) = (losses.len, logits);
    ensure!(0 < v && v <= vp, "classifier: expected 1 to {vp} tokens in rows of {vp}, found {v}");
    let operands = [("logits", logits, row_count * vp), ("losses", losses, row_count), ("targets", targets, row_count)];
    let [logits, losses, targets] = arena.split("classifier", operands)?;
    let targets: &[i32] = bytemuck::cast_slice(targets);
    let is_valid = |token: i32| token == MASKED_TARGET || (0..v as i64).contains(&i64::from(token));
    if let Some(at) = targets.iter().position(|&token| !is_valid(token)) {
        anyhow::bail!(
            "target at position {at} of the batch: expected an id below {v}, found {}; \
             the data was tokenized for another vocabulary",
            targets[at]
        );
    }
    let rows = logits.par_chunks_mut(vp).zip(losses.par_iter_mut().zip(targets));
    rows.for_each_init(Vec::new, |capped, (row, (loss, &target))| {
        if target == MASKED_TARGET {
            if dloss.is_some() {
                row.fill(0.0);
            }
            return;
        }
        let (logits, padding) = row.split_at_mut(v);
        capped.clear();
        if let Some(cap) = softcap {
            capped.extend(logits.iter().map(|logit| cap * (logit / cap).tanh()));
        }
        let values = if softcap.is_some() { &mut capped[..] } else { &mut *logits };
        *loss += cross_entropy(values, target as usize, dloss);
        if dloss.is_none() {
            return;
        }
        if let Some(cap) = softcap {
            for (logit, gradient) in logits.iter_mut().zip(&*capped) {
                let tanh = (*logit / cap).tanh();
                *logit = gradient * (1.0 - tanh * tanh);
            }
        }
        padding.fill(0.0);
    });
    let Some(fp8) = fp8 else { return Ok(()) };
    let dloss = dloss.context("classifier in FP8: expected a gradient of the losses, found none")?;
    quantize_gradient(arena, gradient, fp8, dloss, [row_count, vp])
}

/// Quantizes the gradient (rows, Vp) of the logits. Its largest possible magnitude is `dloss`, which determines the scale.
fn quantize_gradient(
    arena: &mut Arena,
    gradient: Tensor,
    fp8: Fp8Logits,
    dloss: f32,
    [rows, vp]: [usize; 2],
) -> Result<()> {
    let (Fp8Logits { out, transposed, scale }, format) = (fp8, Fp8Format::E5m2);
    set_scalar(arena, "scale", scale, scale_of(dloss, format.max()))?;
    let quantized = Quantize {
        out: Some(out),
        ..Quantize::new(gradient, [rows, vp], format, Fp8Scale { scale, amax: scale, counts: None }, Scaling::Given)
    };
    quantize(arena, quantized)?;
    // The transpose may overwrite the gradient.
    let [out, transposed] =
        arena.split("classifier", [("out", out, rows * vp), ("transposed", transposed, rows * vp)])?;
    transposed.par_chunks_mut(rows).enumerate().for_each(|(column, transposed)| {
        for (row, transposed) in transposed.iter_mut().enumerate() {
            *transposed = out[row * vp + column];
        }
    });
    Ok(())
}

pub(super) fn most_likely(arena: &mut Arena, op: MostLikely) -> Result<()> {
    let MostLikely { hits, logits, targets, v, vp } = op;
    let rows = hits.len;
    ensure!(0 < v && v <= vp, "most likely: expected 1 to {vp} tokens in rows of {vp}, found {v}");
    let operands = [("hits", hits, rows), ("logits", logits, rows * vp), ("targets", targets, rows)];
    let [hits, logits, targets] = arena.split("most likely", operands)?;
    let targets: &[i32] = bytemuck::cast_slice(targets);
    if let Some(target) = targets.iter().find(|&&target| !(0..v as i64).contains(&i64::from(target))) {
        anyhow::bail!("most likely: expected targets below {v}, found {target}");
    }
    logits.par_chunks(vp).zip(hits).zip(targets).for_each(|((logits, hit), &target)| {
        let (before, from) = logits[..v].split_at(target as usize);
        let is_first = before.iter().all(|&logit| logit < from[0]) && from.iter().all(|&logit| logit <= from[0]);
        *hit = f32::from(u8::from(is_first));
    });
    Ok(())
}

/// Returns the loss of a row. With `dloss`, its logits become their gradient.
fn cross_entropy(logits: &mut [f32], target: usize, dloss: Option<f32>) -> f32 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let chosen = logits[target] - max;
    let mut sum = 0.0f64;
    if let Some(dloss) = dloss {
        for logit in &mut *logits {
            *logit = (*logit - max).exp();
            sum += f64::from(*logit);
        }
        let scale = (f64::from(dloss) / sum) as f32;
        for logit in &mut *logits {
            *logit *= scale;
        }
        logits[target] -= dloss;
    } else {
        sum = logits.iter().map(|logit| f64::from((logit - max).exp())).sum();
    }
    (sum.ln() - f64::from(chosen)) as f32
}
