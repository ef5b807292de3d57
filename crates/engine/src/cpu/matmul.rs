use super::activation;
use super::arena::{Arena, optional};
use super::gemm::{Into, Matrix, Parallelism, multiply};
use super::{experts, quantize};
use crate::Result;
use crate::ops::{ActivationInput, Epilogue, MatmulBackward, MatmulForward, MatmulShape};
use crate::tensor::Tensor;
use rayon::prelude::*;

/// Columns of one task.
const COLUMNS: usize = 32;

/// Uses all threads of the current pool.
const ALL: Parallelism = Parallelism::Rayon(0);

pub(super) fn forward(arena: &mut Arena, op: &MatmulForward) -> Result<()> {
    if let Some(groups) = op.groups {
        return experts::matmul_forward(arena, op, groups);
    }
    let MatmulForward { out, inp, weight, bias, epilogue, shape, fp8, .. } = *op;
    let MatmulShape { rows, c, oc } = shape;
    let (inp, weight, scale) = match fp8 {
        Some(fp8) => (fp8.inp, fp8.weight, scales_product(arena, fp8.inp_scale, fp8.weight_scale)?),
        None => (inp, weight, 1.0),
    };
    let (residual, preactivation, inputs) = match epilogue {
        Epilogue::None => (None, None, 1),
        Epilogue::Residual(residual) => (Some(residual).filter(|_| residual != out), None, 1),
        Epilogue::Activation(activation, preactivation) => (None, Some(preactivation), activation.inputs()),
    };
    let operands = [
        ("out", out, rows * (oc / inputs)),
        ("inp", inp, rows * c),
        ("weight", weight, oc * c),
        optional("bias", bias, oc),
        optional("residual", residual, rows * oc),
        optional("preactivation", preactivation, rows * oc),
    ];
    let [out, inp, weight, bias, residual, preactivation] = arena.split("matmul_forward", operands)?;
    let sums = if preactivation.is_empty() { &mut *out } else { &mut *preactivation };
    let (inp, weight) = (Matrix::row_major(inp, rows, c), Matrix::row_major(weight, oc, c));
    let into = if epilogue == Epilogue::Residual(op.out) { Into::Add } else { Into::Overwrite };
    multiply(sums, into, scale, inp, weight.transposed(), ALL);
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
    fp8.and_then(|fp8| fp8.out).map_or(Ok(()), |next| quantize::quantize(arena, next))
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

/// Returns the product of two scales.
pub(super) fn scales_product(arena: &Arena, a: Tensor, b: Tensor) -> Result<f32> {
    Ok(quantize::scalar(arena, "scale", a)? * quantize::scalar(arena, "scale", b)?)
}

pub(super) fn backward(arena: &mut Arena, op: &MatmulBackward) -> Result<()> {
    if let Some(groups) = op.groups {
        return experts::matmul_backward(arena, op, groups);
    }
    let MatmulBackward { dinp, adds_to_dinp, dweight, dbias, dout, inp, weight, activation, shape, fp8, .. } = *op;
    let MatmulShape { rows, c, oc } = shape;
    let (preactivation, inputs) = match activation {
        Some(ActivationInput { activation, preactivation, .. }) => (Some(preactivation), activation.inputs()),
        None => (None, 1),
    };
    // Quantization sums the gradient of the output in FP8.
    let dbias = dbias.filter(|_| fp8.is_none());
    let gated = inputs == 2;
    // An input that has been quantized may share memory with other operands.
    let trained = dweight.is_some();
    let reads_inp = gated || trained && !fp8.is_some_and(|fp8| fp8.inp_is_quantized);
    if let Some(ActivationInput { activation, recompute: Some(_), .. }) = activation {
        // `preactivation` holds the unrounded sums, so only the activation is recomputed.
        let operands = [("inp", inp, rows * c), optional("preactivation", preactivation, rows * c * inputs)];
        let [inp, preactivation] = arena.split("matmul_backward", operands)?;
        activation::forward(activation, inp, preactivation, c);
    }
    let (scale, weight_gradient_scale) = match fp8 {
        Some(fp8) => {
            for next in fp8.quantize_dout(op).into_iter().chain(fp8.quantize_inp(op)) {
                quantize::quantize(arena, next)?;
            }
            let of = |other| scales_product(arena, fp8.dout_scale.scale, other);
            (of(fp8.weight_scale)?, of(fp8.inp_scale.scale)?)
        }
        None => (1.0, 1.0),
    };
    let operands = [
        ("dinp", dinp, rows * c * inputs),
        optional("dweight", dweight, oc * c),
        optional("dbias", dbias, oc),
        optional("dout", fp8.is_none().then_some(dout), rows * oc),
        optional("inp", reads_inp.then_some(inp), rows * c),
        ("weight", weight, oc * c),
        optional("preactivation", preactivation, rows * c * inputs),
        optional("dout in FP8", fp8.map(|fp8| fp8.dout[0]), rows * oc),
        optional("dout in FP8, transposed", fp8.filter(|_| trained).map(|fp8| fp8.dout[1]), rows * oc),
        optional("inp in FP8, transposed", fp8.filter(|_| trained).map(|fp8| fp8.inp_transposed), rows * c),
        optional("weight in FP8, transposed", fp8.map(|fp8| fp8.weight_transposed), oc * c),
    ];
    let [dinp, dweight, dbias, dout, inp, weight, preactivation, dout8, dout8_t, inp8_t, weight8_t] =
        arena.split("matmul_backward", operands)?;
    // The operands of dinp = a · b and of dweight += a · b.
    let input_gradient = match fp8 {
        Some(_) => [Matrix::row_major(dout8, rows, oc), Matrix::row_major(weight8_t, c, oc).transposed()],
        None => [Matrix::row_major(dout, rows, oc), Matrix::row_major(weight, oc, c)],
    };
    if trained {
        let [a, b] = match fp8 {
            Some(_) => [Matrix::row_major(dout8_t, oc, rows), Matrix::row_major(inp8_t, c, rows).transposed()],
            None => [Matrix::row_major(dout, rows, oc).transposed(), Matrix::row_major(inp, rows, c)],
        };
        multiply(dweight, Into::Add, weight_gradient_scale, a, b, ALL);
    }
    add_column_sums(dbias, dout, oc);
    let dinp_of_matmul = if gated { &mut *inp } else { &mut *dinp };
    let [a, b] = input_gradient;
    multiply(dinp_of_matmul, if adds_to_dinp { Into::Add } else { Into::Overwrite }, scale, a, b, ALL);
    if let Some(input) = activation {
        activation::backward(input.activation, dinp, inp, preactivation, c);
    }
    fp8.and_then(|fp8| fp8.dinp).map_or(Ok(()), |next| quantize::quantize(arena, next))
}
