use super::activation;
use super::arena::{ABSENT, Arena};
use super::gemm::{Into, Matrix, Parallelism, multiply};
use crate::Result;
use crate::ops::{Activation, ActivationInput, Epilogue, MatmulBackward, MatmulForward, MatmulShape};
use crate::tensor::Tensor;
use rayon::prelude::*;

/// Columns of one task.
const COLUMNS: usize = 32;

/// Uses all threads of the current pool.
const ALL: Parallelism = Parallelism::Rayon(0);

pub(super) fn forward(arena: &mut Arena, op: MatmulForward) -> Result<()> {
    let MatmulForward { out, inp, weight, bias, epilogue, shape } = op;
    let MatmulShape { rows, c, oc } = shape;
    let (residual, preactivation, inputs) = match epilogue {
        Epilogue::None => (ABSENT, ABSENT, 1),
        Epilogue::Residual(residual) => (residual, ABSENT, 1),
        Epilogue::Activation(activation, preactivation) => (ABSENT, preactivation, activation.inputs()),
    };
    let whole = |tensor: Tensor| if tensor.len == 0 { 0 } else { rows * oc };
    let operands = [
        ("out", out, rows * (oc / inputs)),
        ("inp", inp, rows * c),
        ("weight", weight, oc * c),
        ("bias", bias.unwrap_or(ABSENT), bias.map_or(0, |_| oc)),
        ("residual", residual, whole(residual)),
        ("preactivation", preactivation, whole(preactivation)),
    ];
    let [out, inp, weight, bias, residual, preactivation] = arena.split("matmul_forward", operands)?;
    let sums = if preactivation.is_empty() { &mut *out } else { &mut *preactivation };
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
    if let Epilogue::Activation(activation, _) = epilogue {
        activation::forward(activation, out, preactivation, oc / inputs);
    }
    Ok(())
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
    let MatmulBackward { dinp, dweight, dbias, dout, inp, weight, activation, shape } = *op;
    let MatmulShape { rows, c, oc } = shape;
    let (preactivation, inputs) = match activation {
        Some(ActivationInput { activation, preactivation, .. }) => (preactivation, activation.inputs()),
        None => (ABSENT, 1),
    };
    let operands = [
        ("dinp", dinp, rows * c * inputs),
        ("dweight", dweight, oc * c),
        ("dbias", dbias.unwrap_or(ABSENT), dbias.map_or(0, |_| oc)),
        ("dout", dout, rows * oc),
        ("inp", inp, rows * c),
        ("weight", weight, oc * c),
        ("preactivation", preactivation, activation.map_or(0, |_| rows * c * inputs)),
    ];
    let [dinp, dweight, dbias, dout, inp, weight, preactivation] = arena.split("matmul_backward", operands)?;
    if let Some(ActivationInput { activation, recompute: Some(_), .. }) = activation {
        // `preactivation` holds the unrounded sums, so only the activation is recomputed.
        activation::forward(activation, inp, preactivation, c);
    }
    let dout_matrix = Matrix::row_major(dout, rows, oc);
    multiply(dweight, Into::Add, 1.0, dout_matrix.transposed(), Matrix::row_major(inp, rows, c), ALL);
    add_column_sums(dbias, dout, oc);
    let swiglu = activation.is_some_and(|input| input.activation == Activation::SwiGlu);
    let dinp_of_matmul = if swiglu { &mut *inp } else { &mut *dinp };
    multiply(dinp_of_matmul, Into::Overwrite, 1.0, dout_matrix, Matrix::row_major(weight, oc, c), ALL);
    match activation.map(|input| input.activation) {
        Some(Activation::Gelu) => activation::backward_in_place(activation::gelu_derivative, dinp, preactivation),
        Some(Activation::ReluSquared) => {
            activation::backward_in_place(activation::relu_squared_derivative, dinp, preactivation);
        }
        Some(Activation::SwiGlu) => activation::swiglu_backward(dinp, inp, preactivation, c),
        None => {}
    }
    Ok(())
}
