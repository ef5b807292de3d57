//! What cuBLASLt computes, on host memory: the emulator's matrix products. Inputs are widened to f32, sums and epilogues
//! are in f32, and what is stored is rounded to nearest.

use cublaslt::{Element, Epilogue, Operands, Problem};
use cuda_std::bf16;

const SCALE: f32 = 0.797_884_6; // sqrt(2 / pi)
const CUBIC: f32 = 0.044_715;

/// Runs a product on the memory that the operands' addresses name. `memory` is the allocation they lie in.
///
/// # Safety
/// They lie there, with the sizes that `problem` implies, and nothing else uses them meanwhile.
pub unsafe fn run(problem: &Problem, operands: &Operands, memory: *mut u8) {
    let at = |address: u64| memory.with_addr(address as usize);
    let (bias, aux) = (operands.bias.map(at), operands.aux.map(at));
    // SAFETY: the caller's promise.
    unsafe {
        match problem.element {
            Element::Bf16 => typed::<bf16>(problem, at(operands.a), at(operands.b), at(operands.d), bias, aux),
            Element::F32 | Element::Tf32 => {
                typed::<f32>(problem, at(operands.a), at(operands.b), at(operands.d), bias, aux);
            }
        }
    }
}

/// # Safety
/// As [`run`], for elements of `T`.
unsafe fn typed<T: cuda_std::Element>(
    problem: &Problem,
    a: *mut u8,
    b: *mut u8,
    d: *mut u8,
    bias: Option<*mut u8>,
    aux: Option<*mut u8>,
) {
    let Problem { m, n, k, batch, .. } = *problem;
    for i in 0..batch {
        // SAFETY: the caller's promise; the matrices of a batch follow one another.
        unsafe {
            let a = std::slice::from_raw_parts(a.cast::<T>().add(i * m * k), m * k);
            let b = std::slice::from_raw_parts(b.cast::<T>().add(i * k * n), k * n);
            let d = std::slice::from_raw_parts_mut(d.cast::<T>().add(i * m * n), m * n);
            let bias_len = if problem.epilogue == Epilogue::BiasGradB { n } else { m };
            let bias = bias.map(|bias| std::slice::from_raw_parts_mut(bias.cast::<T>(), bias_len));
            let aux = aux.map(|aux| std::slice::from_raw_parts_mut(aux.cast::<T>().add(i * m * n), m * n));
            product(problem, a, b, d, bias.unwrap_or_default(), aux.unwrap_or_default());
        }
    }
}

fn product<T: cuda_std::Element>(problem: &Problem, a: &[T], b: &[T], d: &mut [T], bias: &mut [T], aux: &mut [T]) {
    let Problem { m, n, k, .. } = *problem;
    let wide = |values: &[T]| values.iter().map(|value| value.to_f32()).collect::<Vec<_>>();
    let (a, b) = (wide(a), wide(b));
    let mut sums = if problem.accumulate { wide(d) } else { vec![0.0; m * n] };
    // Distances between columns and rows of op(A) (m, k) and op(B) (k, n).
    let (a_column, a_row) = if problem.transpose_a { (1, k) } else { (m, 1) };
    let (b_column, b_row) = if problem.transpose_b { (1, n) } else { (k, 1) };
    // SAFETY: the three vectors have the sizes that m, n, k and the distances imply.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            sums.as_mut_ptr(),
            m as isize,
            1,
            problem.accumulate,
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
    match problem.epilogue {
        Epilogue::None => {}
        Epilogue::Bias => sums.iter_mut().enumerate().for_each(|(i, x)| *x += bias[i % m].to_f32()),
        Epilogue::GeluAuxBias => {
            for (i, x) in sums.iter_mut().enumerate() {
                *x += bias[i % m].to_f32();
                aux[i] = T::from_f32(*x);
                *x = gelu(*x);
            }
        }
        Epilogue::DGelu => sums.iter_mut().zip(aux).for_each(|(x, aux)| *x *= gelu_slope(aux.to_f32())),
        Epilogue::DGeluBiasGrad => {
            sums.iter_mut().zip(aux).for_each(|(x, aux)| *x *= gelu_slope(aux.to_f32()));
            for (row, bias) in bias.iter_mut().enumerate() {
                *bias = T::from_f32((0..n).map(|column| sums[column * m + row]).sum());
            }
        }
        Epilogue::BiasGradA => {
            for (row, bias) in bias.iter_mut().enumerate() {
                *bias = T::from_f32((0..k).map(|i| a[i * a_column + row * a_row]).sum());
            }
        }
        Epilogue::BiasGradB => {
            for (column, bias) in bias.iter_mut().enumerate() {
                *bias = T::from_f32((0..k).map(|i| b[column * b_column + i * b_row]).sum());
            }
        }
    }
    for (d, sum) in d.iter_mut().zip(sums) {
        *d = T::from_f32(sum);
    }
}

fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + (SCALE * (x + CUBIC * x * x * x)).tanh())
}

fn gelu_slope(x: f32) -> f32 {
    let tanh = (SCALE * (x + CUBIC * x * x * x)).tanh();
    0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * SCALE * (1.0 + 3.0 * CUBIC * x * x)
}
