use super::CHUNK;
use super::arena::Arena;
use crate::Result;
use crate::ops::{AdamW, AdamWUpdate, Master, UpdateRange};
use anyhow::ensure;
use rayon::prelude::*;

/// Returns `factor` times the factor that clips the norm of the gradients. Returns `None` if the sum of the losses or the norm is not
/// finite: the update must change nothing then.
pub(super) fn gradient_scale(stats: &[f32], factor: f32, clip: f32) -> Option<f32> {
    let norm = stats[1] * factor;
    let scale = if norm > clip { factor * (clip / norm) } else { factor };
    (stats[0].is_finite() && norm.is_finite()).then_some(scale)
}

pub(super) fn adamw(arena: &mut Arena, op: AdamWUpdate) -> Result<()> {
    op.check_ranges()?;
    let AdamWUpdate { params, grads, m, v, master, ranges, stats, grad_factor, settings } = op;
    let AdamW { learning_rate, beta1, beta2, eps, step, clip, .. } = settings;
    ensure!(step > 0, "adamw: expected a step of at least 1, found 0");
    ensure!(master == Master::None, "adamw: the CPU engine's parameters are f32 and take no master weights");
    let n = params.len;
    let operands = [("params", params, n), ("grads", grads, n), ("m", m, n), ("v", v, n), ("stats", stats, 2)];
    let [params, grads, m, v, stats] = arena.split("adamw", operands)?;
    let Some(grad_scale) = gradient_scale(stats, grad_factor, clip) else { return Ok(()) };
    let unbias = |beta: f32| (1.0 / (1.0 - f64::from(beta).powf(f64::from(step)))) as f32;
    let (unbias1, unbias2) = (unbias(beta1), unbias(beta2));

    for UpdateRange { elements, decayed, .. } in ranges {
        let weight_decay = if *decayed { settings.weight_decay } else { 0.0 };
        let [params, m, v] = [&mut *params, &mut *m, &mut *v].map(|tensor| &mut tensor[elements.clone()]);
        let moments = m.par_chunks_mut(CHUNK).zip(v.par_chunks_mut(CHUNK));
        let chunks = params.par_chunks_mut(CHUNK).zip(grads[elements.clone()].par_chunks(CHUNK)).zip(moments);
        chunks.for_each(|((params, grads), (m, v))| {
            for ((param, grad), (m, v)) in params.iter_mut().zip(grads).zip(m.iter_mut().zip(v)) {
                let grad = grad * grad_scale;
                *m = beta1 * *m + (1.0 - beta1) * grad;
                *v = beta2 * *v + (1.0 - beta2) * grad * grad;
                let update = *m * unbias1 / ((*v * unbias2).sqrt() + eps) + weight_decay * *param;
                *param -= learning_rate * update;
            }
        });
    }
    Ok(())
}
