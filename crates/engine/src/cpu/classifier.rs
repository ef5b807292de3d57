use super::arena::Arena;
use crate::Result;
use crate::ops::Classifier;
use anyhow::ensure;
use rayon::prelude::*;

pub(super) fn classifier(arena: &mut Arena, op: Classifier) -> Result<()> {
    let Classifier { logits, losses, targets, v, vp, dloss } = op;
    let rows = losses.len;
    ensure!(0 < v && v <= vp, "classifier: expected 1 to {vp} tokens in rows of {vp}, found {v}");
    let operands = [("logits", logits, rows * vp), ("losses", losses, rows), ("targets", targets, rows)];
    let [logits, losses, targets] = arena.split("classifier", operands)?;
    let targets: &[i32] = bytemuck::cast_slice(targets);
    if let Some(at) = targets.iter().position(|&token| !(0..v as i64).contains(&i64::from(token))) {
        anyhow::bail!(
            "target at position {at} of the batch: expected an id below {v}, found {}; \
             the data was tokenized for another vocabulary",
            targets[at]
        );
    }
    logits.par_chunks_mut(vp).zip(losses.par_iter_mut().zip(targets)).for_each(|(row, (loss, &target))| {
        let (logits, padding) = row.split_at_mut(v);
        let target = target as usize;
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
            padding.fill(0.0);
        } else {
            sum = logits.iter().map(|logit| f64::from((logit - max).exp())).sum();
        }
        *loss += (sum.ln() - f64::from(chosen)) as f32;
    });
    Ok(())
}
