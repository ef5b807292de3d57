//! Activations between the two linear layers of an MLP, fused into the matmuls.

use super::CHUNK;
use crate::ops::Activation;
use rayon::prelude::*;

const SCALE: f32 = 0.797_884_6; // sqrt(2 / pi)
const CUBIC: f32 = 0.044_715;

/// The tanh approximation of GELU (Hendrycks and Gimpel, 2016), as in GPT-2.
pub(super) fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + (SCALE * (x + CUBIC * x * x * x)).tanh())
}

pub(super) fn gelu_derivative(x: f32) -> f32 {
    let tanh = (SCALE * (x + CUBIC * x * x * x)).tanh();
    let inner = SCALE * (1.0 + 3.0 * CUBIC * x * x);
    0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner
}

/// Returns max(x, 0), and NaN for NaN. `f32::max` would return 0 for NaN.
fn relu(x: f32) -> f32 {
    if x <= 0.0 { 0.0 } else { x }
}

fn relu_squared(x: f32) -> f32 {
    relu(x) * relu(x)
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Computes out = activation(preactivation). out has rows of `columns` elements.
pub(super) fn forward(activation: Activation, out: &mut [f32], preactivation: &[f32], columns: usize) {
    match activation {
        Activation::Gelu => elementwise(gelu, out, preactivation),
        Activation::ReluSquared => elementwise(relu_squared, out, preactivation),
        Activation::SwiGlu => {
            let rows = out.par_chunks_mut(columns).zip(preactivation.par_chunks(2 * columns));
            rows.with_min_len(4).for_each(|(out, x)| {
                let (up, gate) = x.split_at(columns);
                for ((out, up), gate) in out.iter_mut().zip(up).zip(gate) {
                    *out = up * (gate * sigmoid(*gate));
                }
            });
        }
    }
}

/// Computes out = f(x) of each element.
fn elementwise(f: impl Fn(f32) -> f32 + Sync, out: &mut [f32], x: &[f32]) {
    out.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)).for_each(|(out, x)| {
        for (out, &x) in out.iter_mut().zip(x) {
            *out = f(x);
        }
    });
}

/// Computes grad = grad · activation'(preactivation) for activations of one input.
pub(super) fn backward_in_place(derivative: impl Fn(f32) -> f32 + Sync, grad: &mut [f32], preactivation: &[f32]) {
    grad.par_chunks_mut(CHUNK).zip(preactivation.par_chunks(CHUNK)).for_each(|(grad, x)| {
        for (grad, &x) in grad.iter_mut().zip(x) {
            *grad *= derivative(x);
        }
    });
}

pub(super) fn relu_squared_derivative(x: f32) -> f32 {
    2.0 * relu(x)
}

/// Computes dinp (rows, 2 columns), the gradient of up and gate, from dout (rows, columns).
pub(super) fn swiglu_backward(dinp: &mut [f32], dout: &[f32], preactivation: &[f32], columns: usize) {
    let rows =
        dinp.par_chunks_mut(2 * columns).zip(dout.par_chunks(columns).zip(preactivation.par_chunks(2 * columns)));
    rows.with_min_len(4).for_each(|(dinp, (dout, x))| {
        let ((dup, dgate), (up, gate)) = (dinp.split_at_mut(columns), x.split_at(columns));
        for (i, &dout) in dout.iter().enumerate() {
            let sigmoid = sigmoid(gate[i]);
            let silu = gate[i] * sigmoid;
            dup[i] = dout * silu;
            dgate[i] = dout * up[i] * (sigmoid + silu * (1.0 - sigmoid));
        }
    });
}
