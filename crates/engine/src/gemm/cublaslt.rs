//! Translation of a row-major [`Gemm`] to cuBLASLt's column-major terms. Only this file uses them.
//!
//! A row-major (rows, columns) matrix is its own transpose in column-major order. So the row-major out = op(a) · op(b) is the
//! column-major outᵀ = op(b)ᵀ · op(a)ᵀ: cuBLASLt's A is our b, its B is our a, its m is our n, and its n is our m.

use super::{Batching, Bias, Gemm, GemmEpilogue, GemmLayout, GemmOperands, GemmOutput, GemmPrecision, library_part};
use cublaslt::{Batch, Element, Epilogue, Fp8, Operands, Problem};
use cuda_std::fp8::Fp8Format;

/// Returns whether cuBLASLt transposes its A and its B.
pub(super) fn transposed(gemm: &Gemm) -> (bool, bool) {
    (gemm.layout == GemmLayout::Nt, gemm.layout == GemmLayout::Tn)
}

/// Returns cuBLASLt's problem for a GEMM that is its own [library part](library_part).
pub fn problem(gemm: &Gemm) -> Problem {
    let (transpose_a, transpose_b) = transposed(gemm);
    let GemmEpilogue { bias, activation, .. } = library_part(gemm).epilogue;
    Problem {
        m: gemm.n,
        n: gemm.m,
        k: gemm.k,
        transpose_a,
        transpose_b,
        element: match gemm.precision {
            GemmPrecision::Bf16 => Element::Bf16,
            GemmPrecision::F32 => Element::F32,
            GemmPrecision::Tf32 => Element::Tf32,
            GemmPrecision::Fp8 { a, exact } => {
                let b_e5m2 = a == Fp8Format::E5m2;
                Element::Fp8(Fp8 { a_e5m2: false, b_e5m2, fast_accumulation: !exact })
            }
        },
        epilogue: match (bias == Some(Bias::Add), activation.is_some()) {
            (false, false) => Epilogue::None,
            (true, false) => Epilogue::Bias,
            (true, true) => Epilogue::GeluAuxBias,
            (false, true) => Epilogue::DGelu,
        },
        accumulate: gemm.epilogue.residual.is_some(),
        output: (gemm.epilogue.output == GemmOutput::F32).then_some(Element::F32),
        batched: gemm.batching != Batching::One,
    }
}

/// Returns cuBLASLt's problem and operands for a [library part](library_part) and its addresses.
pub fn call(gemm: &Gemm, operands: &GemmOperands) -> (Problem, Operands) {
    let GemmOperands { a, b, out, residual, bias, preactivation, scale, batch, fp8_scales, .. } = *operands;
    let batch = batch.map(|batch| Batch { a: batch.b, b: batch.a, ..batch });
    let fp8_scales = fp8_scales.map(|[a, b]| [b, a]);
    let (a, b, c, aux) = (b, a, residual, preactivation);
    (problem(gemm), Operands { a, b, d: out, c, bias, aux, scale, batch, fp8_scales })
}
