//! Activation functions in f64, and their elementwise kernels.

use super::{Tolerance, read, run};
use cuda_std::emulate::Memory;
use cuda_std::{Global, GlobalMut};
use gpu::activation::{Activation, activation_backward_select, activation_forward_select, grid};
use std::f64::consts::PI;

/// Returns the value of an activation function, and its derivative with respect to each input. The inputs are x, or up and gate.
pub fn value_and_slopes(activation: Activation, [x, gate]: [f64; 2]) -> (f64, [f64; 2]) {
    match activation {
        Activation::Gelu => {
            // The logistic function stays accurate where (1 + tanh) / 2 cancels.
            let scale = (2.0 / PI).sqrt();
            let s = 1.0 / (1.0 + (-2.0 * scale * (x + 0.044715 * x.powi(3))).exp());
            (x * s, [s + 2.0 * x * s * (1.0 - s) * scale * (1.0 + 3.0 * 0.044715 * x * x), 0.0])
        }
        Activation::ReluSquared => {
            let positive = if x <= 0.0 { 0.0 } else { x };
            (positive * positive, [2.0 * positive, 0.0])
        }
        Activation::SwiGlu => {
            let silu = gate / (1.0 + (-gate).exp());
            // The quotient rule: e^x keeps its digits where x is small, and 1 is lost where it is large.
            let e = gate.exp();
            let slope = if gate > 40.0 { 1.0 } else { e * (1.0 + e + gate) / (1.0 + e).powi(2) };
            (x * silu, [silu, x * slope])
        }
        Activation::GeGlu => {
            let (gelu, [slope, _]) = value_and_slopes(Activation::Gelu, [gate, 0.0]);
            (x * gelu, [gelu, x * slope])
        }
    }
}

/// Returns the inputs of each element of the output (rows, `columns`).
fn inputs(activation: Activation, preactivation: &[f64], columns: usize) -> impl Iterator<Item = [f64; 2]> {
    preactivation.chunks(columns * activation.inputs()).flat_map(move |row| {
        let (x, gate) = row.split_at(columns);
        (0..columns).map(move |j| [x[j], gate.get(j).copied().unwrap_or(0.0)])
    })
}

/// Returns the activation (rows, `columns`).
pub fn forward(activation: Activation, preactivation: &[f64], columns: usize) -> Vec<f64> {
    inputs(activation, preactivation, columns).map(|inputs| value_and_slopes(activation, inputs).0).collect()
}

/// Returns the gradient of the preactivation, given that of the activation (rows, `columns`).
pub fn backward(activation: Activation, dout: &[f64], preactivation: &[f64], columns: usize) -> Vec<f64> {
    let slopes: Vec<_> =
        inputs(activation, preactivation, columns).map(|x| value_and_slopes(activation, x).1).collect();
    let rows = dout.chunks(columns).zip(slopes.chunks(columns));
    let of_input = |input| move |(dout, slopes): (&f64, &[f64; 2])| dout * slopes[input];
    rows.flat_map(|(dout, slopes)| {
        (0..activation.inputs()).flat_map(move |input| dout.iter().zip(slopes).map(of_input(input)))
    })
    .collect()
}

/// Runs the forward kernel.
#[track_caller]
pub fn run_forward<T: Tolerance>(activation: Activation, preactivation: &[T], columns: usize) -> Vec<f64> {
    let (mut memory, n) = (Memory::new(), preactivation.len() / activation.inputs());
    let (out, inp) = (memory.output::<T>("out", n), memory.input("inp", preactivation));
    let launch = activation_forward_select::<T>((activation,), out, inp, n as u64, columns as u32).unwrap();
    run(&mut memory, &launch, grid::<T>(n), 0);
    read(&memory, out)
}

/// Runs the backward kernel.
#[track_caller]
pub fn run_backward<T: Tolerance>(activation: Activation, dout: &[T], preactivation: &[T], columns: usize) -> Vec<f64> {
    let (mut memory, n) = (Memory::new(), dout.len());
    let inp = memory.input("inp", preactivation);
    let (dinp, dout): (GlobalMut<T>, _) = if activation.is_gated() {
        (memory.output("dinp", preactivation.len()), memory.input("dout", dout))
    } else {
        (memory.buffer("dinp", dout), Global::null())
    };
    let launch = activation_backward_select::<T>((activation,), dinp, dout, inp, n as u64, columns as u32).unwrap();
    run(&mut memory, &launch, grid::<T>(n), 0);
    read(&memory, dinp)
}
