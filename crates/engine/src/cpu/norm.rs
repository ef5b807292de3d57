//! LayerNorm and RMSNorm.

use super::arena::{Arena, optional};
use super::matmul::add_column_sums;
use super::quantize;
use crate::Result;
use crate::ops::{NormBackward, NormForward};
use anyhow::ensure;
use rayon::prelude::*;

/// Added to LayerNorm's variance.
const LAYER_NORM_EPS: f64 = 1e-5;

/// Minimum rows of one task.
const ROWS: usize = 8;

/// Columns of one task in the sums of the parameter gradients.
const COLUMNS: usize = 32;

/// Returns the mean and the reciprocal standard deviation of a row.
fn mean_and_rstd(row: &[f32]) -> (f32, f32) {
    let c = row.len() as f64;
    let mean = row.iter().map(|&x| f64::from(x)).sum::<f64>() / c;
    let variance = row.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / c;
    (mean as f32, (1.0 / (variance + LAYER_NORM_EPS).sqrt()) as f32)
}

/// Returns the reciprocal root mean square of a row.
pub(super) fn reciprocal_rms(row: &[f32], eps: f32) -> f32 {
    let squares: f64 = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    (1.0 / (squares / row.len() as f64 + f64::from(eps)).sqrt()) as f32
}

/// Returns the weight of column `i`, where no weights means ones.
pub(super) fn weight_at(weight: &[f32], i: usize) -> f32 {
    weight.get(i).copied().unwrap_or(1.0)
}

/// dinp += rstd (d - mean(d) - n mean(d n)) of one row, with n the normalized input and d = dout weight. RMSNorm has no mean
/// and lacks mean(d).
pub(super) fn add_row_gradient(
    dinp: &mut [f32],
    dout: &[f32],
    inp: &[f32],
    weight: &[f32],
    (mean, rstd): (Option<f32>, f32),
) {
    let d = |i: usize| dout[i] * weight_at(weight, i);
    let normalized = |i: usize| (inp[i] - mean.unwrap_or(0.0)) * rstd;
    let mean_of = |sum: f64| (sum / inp.len() as f64) as f32;
    let columns = || 0..inp.len();
    let mean_d = if mean.is_some() { mean_of(columns().map(|i| f64::from(d(i))).sum()) } else { 0.0 };
    let mean_dn = mean_of(columns().map(|i| f64::from(d(i)) * f64::from(normalized(i))).sum());
    for (i, dinp) in dinp.iter_mut().enumerate() {
        *dinp += rstd * (d(i) - mean_d - normalized(i) * mean_dn);
    }
}

pub(super) fn forward(arena: &mut Arena, op: &NormForward) -> Result<()> {
    let NormForward { out, mean, rstd, inp, weight, bias, c, eps, quantized } = *op;
    let rows = rstd.len;
    ensure!(c > 0, "norm: expected at least one channel, found 0");
    let operands = [
        ("out", out, rows * c),
        optional("mean", mean, rows),
        ("rstd", rstd, rows),
        optional("weight", weight, c),
        optional("bias", bias, c),
        ("inp", inp, rows * c),
    ];
    let [out, mean, rstd, weight, bias, inp] = arena.split("norm_forward", operands)?;
    let mut means: Vec<Option<&mut f32>> = mean.iter_mut().map(Some).collect();
    means.resize_with(rows, || None);
    let rows = out.par_chunks_mut(c).zip(inp.par_chunks(c)).zip(means.into_par_iter().zip(rstd));
    rows.with_min_len(ROWS).for_each(|((out, inp), (mean_of_row, rstd))| {
        let mut mean = 0.0;
        if let Some(mean_of_row) = mean_of_row {
            (mean, *rstd) = mean_and_rstd(inp);
            *mean_of_row = mean;
        } else {
            *rstd = reciprocal_rms(inp, eps);
        }
        for (i, (out, x)) in out.iter_mut().zip(inp).enumerate() {
            *out = (x - mean) * *rstd * weight_at(weight, i);
        }
        out.iter_mut().zip(&*bias).for_each(|(out, bias)| *out += bias);
    });
    quantized.map_or(Ok(()), |next| quantize::quantize(arena, next))
}

pub(super) fn backward(arena: &mut Arena, op: NormBackward) -> Result<()> {
    let NormBackward { dinp, dweight, dbias, column_sums, dout, inp, weight, mean, rstd, c } = op;
    let rows = rstd.len;
    ensure!(c > 0, "norm: expected at least one channel, found 0");
    let operands = [
        ("dinp", dinp, rows * c),
        optional("dweight", dweight, c),
        optional("dbias", dbias, c),
        optional("column_sums", column_sums, c),
        ("dout", dout, rows * c),
        ("inp", inp, rows * c),
        optional("mean", mean, rows),
        ("rstd", rstd, rows),
        optional("weight", weight, c),
    ];
    let [dinp, dweight, dbias, column_sums, dout, inp, mean, rstd, weight] = arena.split("norm_backward", operands)?;
    let (dout, inp, mean, rstd, weight) = (&*dout, &*inp, &*mean, &*rstd, &*weight);
    let rows = dinp.par_chunks_mut(c).zip(dout.par_chunks(c).zip(inp.par_chunks(c))).enumerate();
    rows.with_min_len(ROWS).for_each(|(row, (dinp, (dout, inp)))| {
        add_row_gradient(dinp, dout, inp, weight, (mean.get(row).copied(), rstd[row]));
    });
    add_column_sums(column_sums, dinp, c);

    add_sums(dweight, dout, inp, c, |row, d, x| d * (x - mean.get(row).unwrap_or(&0.0)) * rstd[row]);
    add_sums(dbias, dout, inp, c, |_, d, _| d);
    Ok(())
}

/// Adds the sum over all rows of `term`, a function of row, gradient and input, to the gradient of a parameter (C).
fn add_sums(gradient: &mut [f32], dout: &[f32], inp: &[f32], c: usize, term: impl Fn(usize, f32, f32) -> f32 + Sync) {
    gradient.par_chunks_mut(COLUMNS).enumerate().for_each(|(i, gradient)| {
        let mut sums = [0.0f64; COLUMNS];
        let part = i * COLUMNS..i * COLUMNS + gradient.len();
        for (row, (dout, inp)) in dout.chunks(c).zip(inp.chunks(c)).enumerate() {
            for (sum, (d, x)) in sums.iter_mut().zip(dout[part.clone()].iter().zip(&inp[part.clone()])) {
                *sum += f64::from(term(row, *d, *x));
            }
        }
        for (gradient, sum) in gradient.iter_mut().zip(sums) {
            *gradient += sum as f32;
        }
    });
}
