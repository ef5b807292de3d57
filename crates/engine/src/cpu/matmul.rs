use super::arena::{ABSENT, Arena};
use super::gelu::{derivative, gelu};
use super::gemm::{Into, Matrix, Parallelism, multiply};
use crate::Result;
use crate::ops::{Epilogue, GeluInput, MatmulBackward, MatmulForward, MatmulShape};
use crate::tensor::Tensor;
use rayon::prelude::*;

/// Columns of one task.
const COLUMNS: usize = 32;

/// Uses all threads of the current pool.
const ALL: Parallelism = Parallelism::Rayon(0);

pub(super) fn forward(arena: &mut Arena, op: MatmulForward) -> Result<()> {
    let MatmulForward { out, inp, weight, bias, epilogue, shape } = op;
    let MatmulShape { rows, c, oc } = shape;
    let (residual, pre_gelu) = match epilogue {
        Epilogue::None => (ABSENT, ABSENT),
        Epilogue::Residual(residual) => (residual, ABSENT),
        Epilogue::Gelu(pre_gelu) => (ABSENT, pre_gelu),
    };
    let whole = |tensor: Tensor| if tensor.len == 0 { 0 } else { rows * oc };
    let operands = [
        ("out", out, rows * oc),
        ("inp", inp, rows * c),
        ("weight", weight, oc * c),
        ("bias", bias.unwrap_or(ABSENT), bias.map_or(0, |_| oc)),
        ("residual", residual, whole(residual)),
        ("pre_gelu", pre_gelu, whole(pre_gelu)),
    ];
    let [out, inp, weight, bias, residual, pre_gelu] = arena.split("matmul_forward", operands)?;
    let sums = if pre_gelu.is_empty() { &mut *out } else { &mut *pre_gelu };
    let (inp, weight) = (Matrix::row_major(inp, rows, c), Matrix::row_major(weight, oc, c));
    multiply(sums, Into::Overwrite, 1.0, inp, weight.transposed(), ALL);
    if !bias.is_empty() {
        sums.par_chunks_mut(oc).with_min_len(4).for_each(|row| {
            for (value, bias) in row.iter_mut().zip(&*bias) {
                *value += bias;
            }
        });
    }
    if !residual.is_empty() {
        out.par_chunks_mut(super::CHUNK).zip(residual.par_chunks(super::CHUNK)).for_each(|(out, residual)| {
            for (out, residual) in out.iter_mut().zip(residual) {
                *out += residual;
            }
        });
    }
    if !pre_gelu.is_empty() {
        gelu_of(out, pre_gelu);
    }
    Ok(())
}

/// out (n) = gelu(pre_gelu (n))
fn gelu_forward(arena: &mut Arena, out: Tensor, pre_gelu: Tensor, n: usize) -> Result<()> {
    let [out, pre_gelu] = arena.split("gelu_forward", [("out", out, n), ("pre_gelu", pre_gelu, n)])?;
    gelu_of(out, pre_gelu);
    Ok(())
}

fn gelu_of(out: &mut [f32], pre_gelu: &[f32]) {
    out.par_chunks_mut(super::CHUNK).zip(pre_gelu.par_chunks(super::CHUNK)).for_each(|(out, x)| {
        for (out, &x) in out.iter_mut().zip(x) {
            *out = gelu(x);
        }
    });
}

/// to (columns, or empty) += sums over the rows of values (rows, columns)
pub(super) fn add_column_sums(to: &mut [f32], values: &[f32], columns: usize) {
    to.par_chunks_mut(COLUMNS).enumerate().for_each(|(i, to)| {
        let mut sums = [0.0f64; COLUMNS];
        for row in values.chunks(columns) {
            for (sum, value) in sums.iter_mut().zip(&row[i * COLUMNS..][..to.len()]) {
                *sum += f64::from(*value);
            }
        }
        for (to, sum) in to.iter_mut().zip(sums) {
            *to += sum as f32;
        }
    });
}

pub(super) fn backward(arena: &mut Arena, op: &MatmulBackward) -> Result<()> {
    let MatmulBackward { dinp, dweight, dbias, dout, inp, weight, gelu, shape } = *op;
    let MatmulShape { rows, c, oc } = shape;
    let pre_gelu = gelu.map(|gelu| gelu.pre_gelu);
    if let Some(GeluInput { pre_gelu, recompute: Some(_) }) = gelu {
        // `pre_gelu` holds the unrounded sums, so only GELU is recomputed.
        gelu_forward(arena, inp, pre_gelu, rows * c)?;
    }
    let operands = [
        ("dinp", dinp, rows * c),
        ("dweight", dweight, oc * c),
        ("dbias", dbias.unwrap_or(ABSENT), dbias.map_or(0, |_| oc)),
        ("dout", dout, rows * oc),
        ("inp", inp, rows * c),
        ("weight", weight, oc * c),
        ("pre_gelu", pre_gelu.unwrap_or(ABSENT), pre_gelu.map_or(0, |_| rows * c)),
    ];
    let [dinp, dweight, dbias, dout, inp, weight, pre_gelu] = arena.split("matmul_backward", operands)?;
    let dout_matrix = Matrix::row_major(dout, rows, oc);
    multiply(dinp, Into::Overwrite, 1.0, dout_matrix, Matrix::row_major(weight, oc, c), ALL);
    multiply(dweight, Into::Add, 1.0, dout_matrix.transposed(), Matrix::row_major(inp, rows, c), ALL);
    add_column_sums(dbias, dout, oc);
    if !pre_gelu.is_empty() {
        dinp.par_chunks_mut(super::CHUNK).zip(pre_gelu.par_chunks(super::CHUNK)).for_each(|(dinp, x)| {
            for (dinp, &x) in dinp.iter_mut().zip(x) {
                *dinp *= derivative(x);
            }
        });
    }
    Ok(())
}
