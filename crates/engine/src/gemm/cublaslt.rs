//! Translation of a row-major [`Gemm`] to cuBLASLt's column-major terms. Only this file uses them.
//!
//! A row-major (rows, columns) matrix is its own transpose in column-major order. So the row-major out = op(a) · op(b) is the
//! column-major outᵀ = op(b)ᵀ · op(a)ᵀ: cuBLASLt's A is our b, its B is our a, its m is our n, and its n is our m.

use super::{Gemm, GemmEpilogue, GemmLayout, GemmOperands, GemmPrecision};
use cublaslt::{Batch, Element, Epilogue, Fp8, Operands, Problem};
use cuda_std::fp8::Fp8Format;

/// Returns cuBLASLt's problem for a GEMM that is its own [library part](Gemm::library_part).
pub fn problem(gemm: &Gemm) -> Problem {
    let (transpose_a, transpose_b) = match gemm.layout {
        GemmLayout::Nt => (true, false),
        GemmLayout::Nn => (false, false),
        GemmLayout::Tn => (false, true),
    };
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
        epilogue: match gemm.library_part().epilogue {
            GemmEpilogue::Bias | GemmEpilogue::BiasResidual => Epilogue::Bias,
            GemmEpilogue::BiasGelu => Epilogue::GeluAuxBias,
            GemmEpilogue::GeluBackward => Epilogue::DGelu,
            _ => Epilogue::None,
        },
        accumulate: gemm.epilogue.accumulates(),
        output: gemm.f32_output.then_some(Element::F32),
        batched: gemm.epilogue.is_batched(),
    }
}

/// Returns cuBLASLt's problem and operands for a [library part](Gemm::library_part) and its addresses.
pub fn call(gemm: &Gemm, operands: &GemmOperands) -> (Problem, Operands) {
    let GemmOperands { a, b, out, residual, bias, preactivation, scale, batch, fp8_scales, .. } = *operands;
    let batch = batch.map(|batch| Batch { a: batch.b, b: batch.a, ..batch });
    let fp8_scales = fp8_scales.map(|[a, b]| [b, a]);
    let (a, b, c, aux) = (b, a, residual, preactivation);
    (problem(gemm), Operands { a, b, d: out, c, bias, aux, gelu: None, scale, batch, fp8_scales })
}

/// Returns the GEMM of cuBLASLt's problem, or `None` for one that no operation of the model computes.
pub fn gemm(problem: &Problem) -> Option<Gemm> {
    let layout = match (problem.transpose_a, problem.transpose_b) {
        (true, false) => GemmLayout::Nt,
        (false, false) => GemmLayout::Nn,
        (false, true) => GemmLayout::Tn,
        (true, true) => return None,
    };
    let epilogue = match (layout, problem.epilogue, problem.accumulate) {
        (GemmLayout::Nt | GemmLayout::Tn, Epilogue::None, false) if problem.batched => GemmEpilogue::Symmetric,
        (GemmLayout::Nt, Epilogue::None, true) if problem.batched => GemmEpilogue::SymmetricResidual,
        (GemmLayout::Nn, Epilogue::None, true) if problem.batched => GemmEpilogue::BatchedResidual,
        _ if problem.batched => return None,
        (_, Epilogue::None, false) => GemmEpilogue::None,
        (GemmLayout::Nt, Epilogue::Bias, false) => GemmEpilogue::Bias,
        (GemmLayout::Nt | GemmLayout::Nn, Epilogue::None, true) => GemmEpilogue::Residual,
        (GemmLayout::Nt, Epilogue::Bias, true) => GemmEpilogue::BiasResidual,
        (GemmLayout::Nt, Epilogue::GeluAuxBias, false) => GemmEpilogue::BiasGelu,
        // The layout of all FP8 operands is NT.
        (GemmLayout::Nn | GemmLayout::Nt, Epilogue::DGelu, false) => GemmEpilogue::GeluBackward,
        (GemmLayout::Nn, Epilogue::DGeluAndGelu, false) => GemmEpilogue::GeluBackwardRecompute,
        (GemmLayout::Nt, Epilogue::ReluSquaredAux, false) => GemmEpilogue::ReluSquared,
        (GemmLayout::Nn, Epilogue::DReluSquared, false) => GemmEpilogue::ReluSquaredBackward,
        (GemmLayout::Nn, Epilogue::DReluSquaredAndReluSquared, false) => GemmEpilogue::ReluSquaredBackwardRecompute,
        (GemmLayout::Nt, Epilogue::GeluAuxBiasFp8, false) => GemmEpilogue::BiasGeluFp8,
        (GemmLayout::Nt, Epilogue::DGeluFp8, false) => GemmEpilogue::GeluBackwardFp8,
        (GemmLayout::Nt, Epilogue::SwiGluAux, false) => GemmEpilogue::SwiGlu,
        (GemmLayout::Nn, Epilogue::DSwiGlu, false) => GemmEpilogue::SwiGluBackward,
        (GemmLayout::Nn, Epilogue::DSwiGluAndSwiGlu, false) => GemmEpilogue::SwiGluBackwardRecompute,
        (GemmLayout::Tn, Epilogue::None, true) => GemmEpilogue::Accumulate,
        (GemmLayout::Tn, Epilogue::BiasGradB, true) => GemmEpilogue::AccumulateBiasGrad,
        _ => return None,
    };
    let precision = match problem.element {
        Element::Bf16 => GemmPrecision::Bf16,
        Element::F32 => GemmPrecision::F32,
        Element::Tf32 => GemmPrecision::Tf32,
        Element::Fp8(Fp8 { a_e5m2: true, .. }) => return None,
        Element::Fp8(Fp8 { b_e5m2, fast_accumulation, .. }) => {
            let a = if b_e5m2 { Fp8Format::E5m2 } else { Fp8Format::E4m3 };
            GemmPrecision::Fp8 { a, exact: !fast_accumulation }
        }
    };
    let Problem { m, n, k, .. } = *problem;
    let f32_output = problem.output.is_some();
    Some(Gemm { m: n, n: m, k, layout, precision, epilogue, f32_output })
}

/// Returns the problem under which checkpoints store a GEMM's algorithm: also for epilogues that cuBLASLt lacks.
pub(super) fn stored_problem(gemm: &Gemm) -> Problem {
    let problem = problem(gemm);
    let epilogue = match gemm.epilogue {
        GemmEpilogue::BiasGelu => Epilogue::GeluAuxBias,
        GemmEpilogue::GeluBackward => Epilogue::DGelu,
        GemmEpilogue::GeluBackwardRecompute => Epilogue::DGeluAndGelu,
        GemmEpilogue::ReluSquared => Epilogue::ReluSquaredAux,
        GemmEpilogue::ReluSquaredBackward => Epilogue::DReluSquared,
        GemmEpilogue::ReluSquaredBackwardRecompute => Epilogue::DReluSquaredAndReluSquared,
        GemmEpilogue::SwiGlu => Epilogue::SwiGluAux,
        GemmEpilogue::SwiGluBackward => Epilogue::DSwiGlu,
        GemmEpilogue::SwiGluBackwardRecompute => Epilogue::DSwiGluAndSwiGlu,
        GemmEpilogue::AccumulateBiasGrad => Epilogue::BiasGradB,
        GemmEpilogue::BiasGeluFp8 => Epilogue::GeluAuxBiasFp8,
        GemmEpilogue::GeluBackwardFp8 => Epilogue::DGeluFp8,
        _ => problem.epilogue,
    };
    Problem { epilogue, ..problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gemm_of_the_model_survives_the_round_trip_through_the_stored_problem() {
        use GemmEpilogue::{
            Accumulate, AccumulateBiasGrad, BatchedResidual, Bias, BiasGelu, BiasGeluFp8, BiasResidual, GeluBackward,
            GeluBackwardFp8, GeluBackwardRecompute, None, ReluSquared, ReluSquaredBackward,
            ReluSquaredBackwardRecompute, Residual, SwiGlu, SwiGluBackward, SwiGluBackwardRecompute, Symmetric,
            SymmetricResidual,
        };
        let nt = [None, Bias, Residual, BiasResidual, BiasGelu, ReluSquared, SwiGlu, Symmetric, SymmetricResidual];
        let nt = nt.map(|epilogue| (GemmLayout::Nt, epilogue));
        let nn = [
            None,
            Residual,
            GeluBackward,
            GeluBackwardRecompute,
            ReluSquaredBackward,
            ReluSquaredBackwardRecompute,
            SwiGluBackward,
            SwiGluBackwardRecompute,
            BatchedResidual,
        ];
        let nn = nn.map(|epilogue| (GemmLayout::Nn, epilogue));
        let tn = [None, Accumulate, AccumulateBiasGrad, Symmetric].map(|epilogue| (GemmLayout::Tn, epilogue));
        for (layout, epilogue) in nt.into_iter().chain(nn).chain(tn) {
            for precision in [GemmPrecision::Bf16, GemmPrecision::F32, GemmPrecision::Tf32] {
                for f32_output in [false, true] {
                    let original = Gemm { m: 3, n: 16, k: 5, layout, precision, epilogue, f32_output };
                    assert_eq!(gemm(&stored_problem(&original)), Some(original));
                    assert_eq!(gemm(&problem(&original.library_part())), Some(original.library_part()));
                }
            }
        }
        for epilogue in [None, Bias, Residual, BiasResidual, BiasGelu, GeluBackward] {
            for (a, exact) in [(Fp8Format::E4m3, false), (Fp8Format::E4m3, true), (Fp8Format::E5m2, false)] {
                let precision = GemmPrecision::Fp8 { a, exact };
                let original =
                    Gemm { m: 48, n: 16, k: 32, layout: GemmLayout::Nt, precision, epilogue, f32_output: false };
                assert_eq!(gemm(&stored_problem(&original)), Some(original));
                assert_eq!(gemm(&problem(&original.library_part())), Some(original.library_part()));
                for epilogue in [BiasGeluFp8, GeluBackwardFp8] {
                    let original = Gemm { epilogue, ..original };
                    assert_eq!(gemm(&stored_problem(&original)), Some(original));
                }
            }
        }
    }
}
