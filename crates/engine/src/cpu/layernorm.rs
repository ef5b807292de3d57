use super::arena::{ABSENT, Arena};
use super::matmul::add_column_sums;
use super::quantize;
use crate::Result;
use crate::ops::{LayerNormBackward, LayerNormForward};
use anyhow::ensure;
use rayon::prelude::*;

const EPS: f64 = 1e-5;

/// Minimum rows of one task.
const ROWS: usize = 8;

/// Columns of one task in the sums of the parameter gradients.
const COLUMNS: usize = 32;

/// Normalizes one row and returns its mean and reciprocal standard deviation.
fn normalize(out: &mut [f32], inp: &[f32], weight: &[f32], bias: &[f32]) -> (f32, f32) {
    let c = inp.len() as f64;
    let mean = inp.iter().map(|&x| f64::from(x)).sum::<f64>() / c;
    let variance = inp.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / c;
    let (mean, rstd) = (mean as f32, (1.0 / (variance + EPS).sqrt()) as f32);
    for ((out, x), (w, b)) in out.iter_mut().zip(inp).zip(weight.iter().zip(bias)) {
        *out = (x - mean) * rstd * w + b;
    }
    (mean, rstd)
}

pub(super) fn forward(arena: &mut Arena, op: &LayerNormForward) -> Result<()> {
    let LayerNormForward { out, mean, rstd, inp, weight, bias, c, quantized } = *op;
    let rows = mean.len;
    ensure!(c > 0, "layernorm: expected at least one channel, found 0");
    let operands = [
        ("out", out, rows * c),
        ("mean", mean, rows),
        ("rstd", rstd, rows),
        ("weight", weight, c),
        ("bias", bias, c),
        ("inp", inp, rows * c),
    ];
    let [out, mean, rstd, weight, bias, inp] = arena.split("layernorm_forward", operands)?;
    let rows = out.par_chunks_mut(c).zip(inp.par_chunks(c)).zip(mean.par_iter_mut().zip(rstd));
    rows.with_min_len(ROWS).for_each(|((out, inp), (mean, rstd))| {
        (*mean, *rstd) = normalize(out, inp, weight, bias);
    });
    quantized.map_or(Ok(()), |next| quantize::quantize(arena, next))
}

pub(super) fn backward(arena: &mut Arena, op: LayerNormBackward) -> Result<()> {
    let LayerNormBackward { dinp, dweight, dbias, column_sums, dout, inp, weight, mean, rstd, c } = op;
    let rows = mean.len;
    ensure!(c > 0, "layernorm: expected at least one channel, found 0");
    let operands = [
        ("dinp", dinp, rows * c),
        ("dweight", dweight, c),
        ("dbias", dbias, c),
        ("column_sums", column_sums.unwrap_or(ABSENT), column_sums.map_or(0, |_| c)),
        ("dout", dout, rows * c),
        ("inp", inp, rows * c),
        ("mean", mean, rows),
        ("rstd", rstd, rows),
        ("weight", weight, c),
    ];
    let [dinp, dweight, dbias, column_sums, dout, inp, mean, rstd, weight] =
        arena.split("layernorm_backward", operands)?;
    let (dout, inp, mean, rstd, weight) = (&*dout, &*inp, &*mean, &*rstd, &*weight);
    let statistics = || mean.iter().zip(rstd);

    let rows = dinp.par_chunks_mut(c).zip(dout.par_chunks(c).zip(inp.par_chunks(c))).zip(mean.par_iter().zip(rstd));
    rows.with_min_len(ROWS).for_each(|((dinp, (dout, inp)), (mean, rstd))| {
        // With n the normalized input and d = dout weight: dinp += rstd (d - mean(d) - n mean(d n)).
        let (mut sum_d, mut sum_dn) = (0.0f64, 0.0f64);
        for ((dout, w), x) in dout.iter().zip(weight).zip(inp) {
            let d = f64::from(dout * w);
            sum_d += d;
            sum_dn += d * f64::from((x - mean) * rstd);
        }
        let (mean_d, mean_dn) = ((sum_d / c as f64) as f32, (sum_dn / c as f64) as f32);
        for (((dinp, dout), w), x) in dinp.iter_mut().zip(dout).zip(weight).zip(inp) {
            *dinp += rstd * (dout * w - mean_d - (x - mean) * rstd * mean_dn);
        }
    });
    add_column_sums(column_sums, dinp, c);

    let columns = dweight.par_chunks_mut(COLUMNS).zip(dbias.par_chunks_mut(COLUMNS)).enumerate();
    columns.for_each(|(i, (dweight, dbias))| {
        let (mut dw, mut db) = ([0.0f64; COLUMNS], [0.0f64; COLUMNS]);
        let part = i * COLUMNS..i * COLUMNS + dweight.len();
        for ((dout, inp), (mean, rstd)) in dout.chunks(c).zip(inp.chunks(c)).zip(statistics()) {
            let values = dout[part.clone()].iter().zip(&inp[part.clone()]);
            for ((dw, db), (d, x)) in dw.iter_mut().zip(&mut db).zip(values) {
                *dw += f64::from(d * (x - mean) * rstd);
                *db += f64::from(*d);
            }
        }
        for ((dweight, dbias), (dw, db)) in dweight.iter_mut().zip(dbias).zip(dw.iter().zip(&db)) {
            *dweight += *dw as f32;
            *dbias += *db as f32;
        }
    });
    Ok(())
}
