use super::arena::Arena;
use crate::ops::Classifier;
use crate::{MASKED_TARGET, Result};
use anyhow::ensure;
use rayon::prelude::*;

pub(super) fn classifier(arena: &mut Arena, op: Classifier) -> Result<()> {
    let Classifier { logits, losses, targets, v, vp, dloss, softcap } = op;
    let rows = losses.len;
    ensure!(0 < v && v <= vp, "classifier: expected 1 to {vp} tokens in rows of {vp}, found {v}");
    let operands = [("logits", logits, rows * vp), ("losses", losses, rows), ("targets", targets, rows)];
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
