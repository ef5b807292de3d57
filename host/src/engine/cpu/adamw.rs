use super::CHUNK;
use super::arena::Arena;
use crate::engine::{AdamW, Optimized, Result};
use crate::tensor::Tensor;
use anyhow::ensure;
use rayon::prelude::*;

pub(super) fn adamw(arena: &mut Arena, range: Optimized, stats: Tensor, settings: &AdamW) -> Result<()> {
    let AdamW { learning_rate, beta1, beta2, eps, weight_decay, step, clip, .. } = *settings;
    ensure!(step > 0, "adamw: steps count from 1");
    ensure!(range.master.is_none(), "adamw: the CPU engine's parameters are f32 and take no master weights");
    let n = range.params.len;
    let operands = [
        ("params", range.params, n),
        ("grads", range.grads, n),
        ("m", range.m, n),
        ("v", range.v, n),
        ("stats", stats, 2),
    ];
    let [params, grads, m, v, stats] = arena.split("adamw", operands)?;
    let (loss, norm) = (stats[0], stats[1]);
    if !(loss.is_finite() && norm.is_finite()) {
        return Ok(());
    }
    let grad_scale = if norm > clip { clip / norm } else { 1.0 };
    let unbias = |beta: f32| (1.0 / (1.0 - f64::from(beta).powf(f64::from(step)))) as f32;
    let (unbias1, unbias2) = (unbias(beta1), unbias(beta2));

    let moments = m.par_chunks_mut(CHUNK).zip(v.par_chunks_mut(CHUNK));
    let chunks = params.par_chunks_mut(CHUNK).zip(grads.par_chunks(CHUNK)).zip(moments);
    chunks.for_each(|((params, grads), (m, v))| {
        for ((param, grad), (m, v)) in params.iter_mut().zip(grads).zip(m.iter_mut().zip(v)) {
            let grad = grad * grad_scale;
            *m = beta1 * *m + (1.0 - beta1) * grad;
            *v = beta2 * *v + (1.0 - beta2) * grad * grad;
            let update = *m * unbias1 / ((*v * unbias2).sqrt() + eps) + weight_decay * *param;
            *param -= learning_rate * update;
        }
    });
    Ok(())
}
