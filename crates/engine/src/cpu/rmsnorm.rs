use super::arena::{ABSENT, Arena};
use super::quantize;
use crate::Result;
use crate::ops::{RmsNormBackward, RmsNormForward};
use crate::tensor::Tensor;
use anyhow::ensure;
use rayon::prelude::*;

/// Columns of one task of the weight gradient.
const COLUMNS: usize = 32;
/// Least rows of one task.
const ROWS: usize = 16;

/// Returns the reciprocal root mean square of a row.
pub(super) fn reciprocal_rms(row: &[f32], eps: f32) -> f32 {
    let squares: f64 = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    (1.0 / (squares / row.len() as f64 + f64::from(eps)).sqrt()) as f32
}

/// Returns the weight of column `i`, where no weights means ones.
pub(super) fn weight_at(weight: &[f32], i: usize) -> f32 {
    weight.get(i).copied().unwrap_or(1.0)
}

/// dinp += rstd (d - n mean(d n)) of one row, with n the normalized input and d = dout weight.
pub(super) fn add_row_gradient(dinp: &mut [f32], dout: &[f32], inp: &[f32], weight: &[f32], rstd: f32) {
    let d = |i: usize| dout[i] * weight_at(weight, i);
    let sum: f64 = (0..inp.len()).map(|i| f64::from(d(i)) * f64::from(inp[i] * rstd)).sum();
    let mean = (sum / inp.len() as f64) as f32;
    for (i, dinp) in dinp.iter_mut().enumerate() {
        *dinp += rstd * (d(i) - inp[i] * rstd * mean);
    }
}

fn optional(weight: Option<Tensor>, c: usize) -> (Tensor, usize) {
    weight.map_or((ABSENT, 0), |weight| (weight, c))
}

pub(super) fn forward(arena: &mut Arena, op: &RmsNormForward) -> Result<()> {
    let RmsNormForward { out, rstd, inp, weight, c, eps, quantized } = *op;
    let rows = rstd.len;
    ensure!(c > 0, "rmsnorm: expected at least one channel, found 0");
    let (weight, weights) = optional(weight, c);
    let operands = [("out", out, rows * c), ("rstd", rstd, rows), ("weight", weight, weights), ("inp", inp, rows * c)];
    let [out, rstd, weight, inp] = arena.split("rmsnorm_forward", operands)?;
    let rows = out.par_chunks_mut(c).zip(inp.par_chunks(c)).zip(rstd.par_iter_mut());
    rows.with_min_len(ROWS).for_each(|((out, inp), rstd)| {
        *rstd = reciprocal_rms(inp, eps);
        for (i, (out, x)) in out.iter_mut().zip(inp).enumerate() {
            *out = x * *rstd * weight_at(weight, i);
        }
    });
    quantized.map_or(Ok(()), |next| quantize::quantize(arena, next))
}

pub(super) fn backward(arena: &mut Arena, op: RmsNormBackward) -> Result<()> {
    let RmsNormBackward { dinp, dweight, dout, inp, weight, rstd, c } = op;
    let rows = rstd.len;
    ensure!(c > 0, "rmsnorm: expected at least one channel, found 0");
    let ((weight, weights), (dweight, gradients)) = (optional(weight, c), optional(dweight, c));
    let operands = [
        ("dinp", dinp, rows * c),
        ("dweight", dweight, gradients),
        ("dout", dout, rows * c),
        ("inp", inp, rows * c),
        ("rstd", rstd, rows),
        ("weight", weight, weights),
    ];
    let [dinp, dweight, dout, inp, rstd, weight] = arena.split("rmsnorm_backward", operands)?;
    let (dout, inp, rstd, weight) = (&*dout, &*inp, &*rstd, &*weight);
    let rows = dinp.par_chunks_mut(c).zip(dout.par_chunks(c).zip(inp.par_chunks(c))).zip(rstd);
    rows.with_min_len(ROWS).for_each(|((dinp, (dout, inp)), rstd)| add_row_gradient(dinp, dout, inp, weight, *rstd));

    dweight.par_chunks_mut(COLUMNS).enumerate().for_each(|(i, dweight)| {
        let mut sums = [0.0f64; COLUMNS];
        let part = i * COLUMNS..i * COLUMNS + dweight.len();
        for ((dout, inp), rstd) in dout.chunks(c).zip(inp.chunks(c)).zip(rstd) {
            for (sum, (d, x)) in sums.iter_mut().zip(dout[part.clone()].iter().zip(&inp[part.clone()])) {
                *sum += f64::from(d * x * rstd);
            }
        }
        for (dweight, sum) in dweight.iter_mut().zip(sums) {
            *dweight += sum as f32;
        }
    });
    Ok(())
}
