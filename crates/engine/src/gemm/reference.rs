//! The CPU reference of a GEMM, on the emulator's memory.
//!
//! Inputs are widened to f32 (and rounded to 10 bits of mantissa for TF32). Sums and epilogues are in f32. Outputs are rounded
//! to nearest.

use super::{Bias, Gemm, GemmLayout, GemmOperands, GemmOutput, GemmPrecision, Pass, ScaleFactors, library_part};
use crate::Result;
use crate::cpu::gemm::{Into, Matrix, Parallelism, multiply};
use anyhow::{Context, ensure};
use bytemuck::Pod;
use cuda_std::emulate::Memory;
use cuda_std::fp8::Fp8Format;
use cuda_std::{E4m3, E5m2, GlobalMut, bf16};
use gpu::activation::{ActivationFunction, Gelu};

/// Runs a GEMM that is its own [library part](library_part), for each matrix of its batch. Fails if an operand does not lie
/// in one buffer or if what it reads was never written.
pub fn run(gemm: &Gemm, operands: &GemmOperands, memory: &mut Memory) -> Result<()> {
    let Some(batch) = operands.batch else { return run_one(gemm, operands, memory) };
    let bytes = if gemm.precision == GemmPrecision::Bf16 { size_of::<bf16>() } else { size_of::<f32>() };
    (0..batch.count).try_for_each(|i| {
        let at = |address: u64, stride: usize| address + (i * stride * bytes) as u64;
        let GemmOperands { a, b, out, residual, .. } = *operands;
        let residual = residual.map(|residual| at(residual, batch.out));
        let one = GemmOperands { a: at(a, batch.a), b: at(b, batch.b), out: at(out, batch.out), residual, ..*operands };
        run_one(gemm, &one, memory)
    })
}

fn run_one(gemm: &Gemm, operands: &GemmOperands, memory: &mut Memory) -> Result<()> {
    let run = if gemm.epilogue.output == GemmOutput::F32 { with_output::<f32> } else { with_output::<bf16> };
    run(gemm, operands, memory).with_context(|| format!("GEMM {gemm}"))
}

/// Runs a GEMM that stores its output as `Out`. GEMMs with f32 operands always store f32.
fn with_output<Out: MatrixElement>(gemm: &Gemm, operands: &GemmOperands, memory: &mut Memory) -> Result<()> {
    match gemm.precision {
        GemmPrecision::Bf16 => typed::<bf16, bf16, bf16, Out>(gemm, operands, memory),
        GemmPrecision::F32 | GemmPrecision::Tf32 => typed::<f32, f32, f32, f32>(gemm, operands, memory),
        GemmPrecision::Fp8 { a: Fp8Format::E4m3, .. } => typed::<E4m3, E4m3, bf16, Out>(gemm, operands, memory),
        GemmPrecision::Fp8 { a: Fp8Format::E5m2, .. } => typed::<E5m2, E4m3, bf16, Out>(gemm, operands, memory),
    }
}

/// Reads and writes matrices by device address.
struct Matrices<'a> {
    memory: &'a mut Memory,
}

/// Storage type of a matrix.
trait MatrixElement: cuda_std::Element + Pod {}
impl MatrixElement for f32 {}
impl MatrixElement for bf16 {}
impl MatrixElement for E4m3 {}
impl MatrixElement for E5m2 {}

impl Matrices<'_> {
    /// Returns `len` elements, widened.
    fn read<T: MatrixElement>(&self, name: &'static str, address: u64, len: usize) -> Result<Vec<f32>> {
        let values = self.memory.slice(GlobalMut::<T>::from_address(address).reader(), len).context(name)?;
        Ok(values.iter().map(|value| value.to_f32()).collect())
    }

    fn write<T: MatrixElement>(&mut self, name: &'static str, address: u64, values: &[f32]) -> Result<()> {
        let rounded: Vec<T> = values.iter().map(|&value| T::from_f32(value)).collect();
        self.memory.write(GlobalMut::from_address(address), &rounded).context(name)
    }
}

/// The epilogue's operands are stored as `T`, the output as `Out`.
fn typed<A: MatrixElement, B: MatrixElement, T: MatrixElement, Out: MatrixElement>(
    gemm: &Gemm,
    operands: &GemmOperands,
    memory: &mut Memory,
) -> Result<()> {
    ensure!(library_part(gemm) == *gemm, "expected the library part of a GEMM, found {gemm}");
    let Gemm { m, n, k, epilogue, .. } = *gemm;
    let mut matrices = Matrices { memory };
    let (bias, preactivation) = (operands.bias.unwrap_or_default(), operands.preactivation.unwrap_or_default());
    let mut a = matrices.read::<A>("a", operands.a, m * k)?;
    let mut b = matrices.read::<B>("b", operands.b, k * n)?;
    let mut out = vec![0.0; m * n];
    if epilogue.residual.is_some() {
        out = matrices.read::<Out>("residual", operands.residual.unwrap_or(operands.out), m * n)?;
    }
    let ScaleFactors { mut alpha, beta } = operands.scale.unwrap_or(ScaleFactors { alpha: 1.0, beta: 1.0 });
    for address in operands.fp8_scales.into_iter().flatten() {
        alpha *= matrices.read::<f32>("scale", address, 1)?[0];
    }
    if operands.scale.is_some() {
        for x in &mut out {
            *x *= beta;
        }
    }
    if gemm.precision == GemmPrecision::Tf32 {
        for x in a.iter_mut().chain(&mut b) {
            *x = round_to_tf32(*x);
        }
    }
    multiply_add(gemm, alpha, &a, &b, &mut out);
    if epilogue.bias == Some(Bias::Add) {
        let bias = matrices.read::<T>("bias", bias, n)?;
        out.iter_mut().enumerate().for_each(|(i, x)| *x += bias[i % n]);
    }
    // cuBLASLt's only activation.
    match epilogue.activation {
        Some((_, Pass::Forward)) => {
            matrices.write::<T>("preactivation", preactivation, &out)?;
            for x in &mut out {
                *x = Gelu::reference_value([*x, 0.0]);
            }
        }
        Some(_) => {
            let preactivation = matrices.read::<T>("preactivation", preactivation, m * n)?;
            out.iter_mut().zip(preactivation).for_each(|(x, at)| *x = Gelu::reference_gradients(*x, [at, 0.0])[0]);
        }
        None => {}
    }
    matrices.write::<Out>("out", operands.out, &out)
}

/// Computes out += alpha · op(a) · op(b).
fn multiply_add(gemm: &Gemm, alpha: f32, a: &[f32], b: &[f32], out: &mut [f32]) {
    let Gemm { m, n, k, layout, .. } = *gemm;
    let a = if layout == GemmLayout::Tn { Matrix::row_major(a, k, m).transposed() } else { Matrix::row_major(a, m, k) };
    let b = if layout == GemmLayout::Nt { Matrix::row_major(b, n, k).transposed() } else { Matrix::row_major(b, k, n) };
    multiply(out, Into::Add, alpha, a, b, Parallelism::Rayon(0));
}

/// Rounds to 10 bits of mantissa, ties away from zero.
fn round_to_tf32(x: f32) -> f32 {
    const DROPPED: u32 = 13;
    if x.is_finite() { f32::from_bits((x.to_bits() + (1 << (DROPPED - 1))) & !((1 << DROPPED) - 1)) } else { x }
}
