//! What cuBLASLt computes, on the emulator's memory. Inputs are widened to f32 (and rounded to 10 bits of mantissa for
//! TF32), sums and epilogues are in f32, and what is stored is rounded to nearest.

use crate::engine::Result;
use anyhow::{Context, bail};
use bytemuck::Pod;
use cublaslt::{Element, Epilogue, Operands, Problem};
use cuda_std::emulate::Memory;
use cuda_std::{GlobalMut, bf16};

const SCALE: f32 = 0.797_884_6; // sqrt(2 / pi)
const CUBIC: f32 = 0.044_715;

/// Runs a product on the buffers that the operands' addresses name. Fails where an operand does not lie in one buffer, or
/// what it reads was never written.
pub fn run(problem: &Problem, operands: &Operands, memory: &mut Memory) -> Result<()> {
    match problem.element {
        Element::Bf16 if problem.output.is_some() => typed::<bf16, f32>(problem, operands, memory),
        Element::Bf16 => typed::<bf16, bf16>(problem, operands, memory),
        Element::F32 | Element::Tf32 => typed::<f32, f32>(problem, operands, memory),
    }
    .with_context(|| format!("matrix product {problem}"))
}

/// Matrices by device address.
struct Matrices<'a> {
    memory: &'a mut Memory,
}

/// What a matrix is stored as.
trait Stored: cuda_std::Element + Pod {}
impl Stored for f32 {}
impl Stored for bf16 {}

impl Matrices<'_> {
    /// Returns the `len` elements at `address` as f32.
    fn fetch<T: Stored>(&self, name: &'static str, address: u64, len: usize) -> Result<Vec<f32>> {
        let values = self.memory.slice(GlobalMut::<T>::from_address(address).reader(), len).context(name)?;
        Ok(values.iter().map(|value| value.to_f32()).collect())
    }

    fn store<T: Stored>(&mut self, name: &'static str, address: u64, values: &[f32]) -> Result<()> {
        let rounded: Vec<T> = values.iter().map(|&value| T::from_f32(value)).collect();
        self.memory.write(GlobalMut::from_address(address), &rounded).context(name)
    }
}

/// A, B and what the epilogue reads and writes are of `T`, D is of `Out`.
fn typed<T: Stored, Out: Stored>(problem: &Problem, operands: &Operands, memory: &mut Memory) -> Result<()> {
    let Problem { m, n, k, epilogue, .. } = *problem;
    let mut matrices = Matrices { memory };
    let (bias, aux) = (operands.bias.unwrap_or_default(), operands.aux.unwrap_or_default());
    let a = matrices.fetch::<T>("A", operands.a, m * k)?;
    let b = matrices.fetch::<T>("B", operands.b, k * n)?;
    let mut d = vec![0.0; m * n];
    if problem.accumulate {
        d = matrices.fetch::<Out>("C", operands.c.unwrap_or(operands.d), m * n)?;
    }
    if problem.element == Element::Tf32 {
        let round = |values: &[f32]| values.iter().copied().map(tf32).collect::<Vec<_>>();
        multiply(problem, &round(&a), &round(&b), &mut d);
    } else {
        multiply(problem, &a, &b, &mut d);
    }
    match epilogue {
        Epilogue::None => {}
        Epilogue::Bias => add_bias(&mut d, &matrices.fetch::<T>("bias", bias, m)?),
        Epilogue::GeluAuxBias => {
            add_bias(&mut d, &matrices.fetch::<T>("bias", bias, m)?);
            matrices.store::<T>("auxiliary matrix", aux, &d)?;
            for x in &mut d {
                *x = gelu(*x);
            }
        }
        Epilogue::DGelu => {
            let aux = matrices.fetch::<T>("auxiliary matrix", aux, m * n)?;
            d.iter_mut().zip(aux).for_each(|(x, aux)| *x *= gelu_slope(aux));
        }
        Epilogue::DGeluAndGelu => bail!("cuBLASLt has no such epilogue"),
        Epilogue::BiasGradB => {
            let (_, _, b_column, b_row) = strides(problem);
            let sum = |column: usize| (0..k).map(|i| b[column * b_column + i * b_row]).sum();
            matrices.store::<T>("bias", bias, &(0..n).map(sum).collect::<Vec<f32>>())?;
        }
    }
    matrices.store::<Out>("D", operands.d, &d)
}

/// Distances between columns and rows of op(A) (m, k), then of op(B) (k, n).
fn strides(problem: &Problem) -> (usize, usize, usize, usize) {
    let Problem { m, n, k, .. } = *problem;
    let (a_column, a_row) = if problem.transpose_a { (1, k) } else { (m, 1) };
    let (b_column, b_row) = if problem.transpose_b { (1, n) } else { (k, 1) };
    (a_column, a_row, b_column, b_row)
}

/// d += op(A) · op(B).
fn multiply(problem: &Problem, a: &[f32], b: &[f32], d: &mut [f32]) {
    let Problem { m, n, k, .. } = *problem;
    let (a_column, a_row, b_column, b_row) = strides(problem);
    assert!(a.len() == m * k && b.len() == k * n && d.len() == m * n);
    // SAFETY: the three slices have the sizes that m, n, k and the distances imply.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            d.as_mut_ptr(),
            m as isize,
            1,
            true,
            a.as_ptr(),
            a_column as isize,
            a_row as isize,
            b.as_ptr(),
            b_column as isize,
            b_row as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::Rayon(0),
        );
    }
}

fn add_bias(d: &mut [f32], bias: &[f32]) {
    d.iter_mut().enumerate().for_each(|(i, x)| *x += bias[i % bias.len()]);
}

/// Rounds to 10 bits of mantissa, ties away from zero.
fn tf32(x: f32) -> f32 {
    const DROPPED: u32 = 13;
    if x.is_finite() { f32::from_bits((x.to_bits() + (1 << (DROPPED - 1))) & !((1 << DROPPED) - 1)) } else { x }
}

fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + (SCALE * (x + CUBIC * x * x * x)).tanh())
}

fn gelu_slope(x: f32) -> f32 {
    let tanh = (SCALE * (x + CUBIC * x * x * x)).tanh();
    0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * SCALE * (1.0 + 3.0 * CUBIC * x * x)
}
