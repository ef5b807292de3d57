//! The GEMM kernel with mma.sync and FP8 operands, compared with an f64 reference.

use crate::common::for_all;
use crate::common::gemm::{
    AROUND_A_TILE, BIAS_RESIDUAL, Inputs, all_of, check, check_exact, check_fractions, check_non_finite_elements,
    in_bf16, mma_case, mma_cases, run, sized,
};
use crate::matmul_fp8::check_bits_of_quantization;
use cuda_std::fp8::Fp8Format;
use gpu::activation::Activation::Gelu;
use gpu::matmul::gemm::GemmLayout::Nt;
use gpu::matmul::gemm::{Batching, Gemm, GemmEpilogue, GemmOutput, GemmPrecision, Pass};
use gpu::matmul::launch::KernelOperands;
use gpu::matmul_mma::launch::{Addresses, is_supported, launch};
use proptest::sample::select;

tests! {
    kernels of "matmul_mma/kernel.rs";
    once: smallest_shape_matches_reference, shapes_around_a_tile_match_reference, several_tiles_match_reference,
        long_k_matches_reference, groups_of_columns_are_added_in_f32, random_shapes_match_reference, fp8_outputs_have_the_bits_of_separate_quantization,
        non_finite_elements_do_not_spread, rows_outside_of_out_do_not_count, unsupported_gemms_are_rejected, shared_memory_fits;
}

/// Returns the GEMM whose a has this format.
const fn in_fp8(a: Fp8Format, columns: Option<u32>, epilogue: GemmEpilogue) -> Gemm {
    Gemm { precision: GemmPrecision::Fp8 { a, columns }, ..in_bf16(Nt, epilogue) }
}

/// Returns all GEMMs. Half of them, in turn with the other half, add sums over 128 columns in f32.
fn gemms() -> Vec<Gemm> {
    let of = |a| all_of(GemmPrecision::Fp8 { a, columns: None }, Batching::One, is_supported);
    let all = [Fp8Format::E4m3, Fp8Format::E5m2].map(of);
    assert_eq!(all.each_ref().map(Vec::len), [6, 7]);
    let with_mode = |(i, gemm): (usize, Gemm)| match gemm.precision {
        GemmPrecision::Fp8 { a, .. } if i % 2 == 1 => in_fp8(a, Some(128), gemm.epilogue),
        _ => gemm,
    };
    all.concat().into_iter().enumerate().map(with_mode).collect()
}

fn gemms_to_fp8() -> Vec<Gemm> {
    gemms().into_iter().filter(|gemm| gemm.epilogue.output == GemmOutput::Fp8).collect()
}

fn smallest_shape_matches_reference() {
    mma_cases(&gemms(), &[[1, 8, 8]]).into_iter().for_each(check);
}

fn shapes_around_a_tile_match_reference() {
    for (i, gemm) in gemms().into_iter().enumerate() {
        let shapes: Vec<_> = AROUND_A_TILE.into_iter().skip(i % 3).step_by(3).collect();
        mma_cases(&[gemm], &shapes).into_iter().for_each(check);
    }
}

/// Covers two groups of rows of tiles.
fn several_tiles_match_reference() {
    let gemms = [in_fp8(Fp8Format::E4m3, None, BIAS_RESIDUAL), in_fp8(Fp8Format::E5m2, None, GemmEpilogue::NONE)];
    mma_cases(&gemms[..1], &[[264, 392, 40]]).into_iter().for_each(check);
    mma_cases(&gemms[1..], &[[2056, 136, 8]]).into_iter().for_each(check);
}

/// The pipeline wraps around, also within the columns whose sums are added in f32 and at their end. K is a multiple of them, or not.
fn long_k_matches_reference() {
    for columns in [None, Some(128), Some(384)] {
        for k in [456, 384] {
            let gemms = [Fp8Format::E4m3, Fp8Format::E5m2].map(|a| in_fp8(a, columns, GemmEpilogue::NONE));
            mma_cases(&gemms, &[[65, 136, k]]).into_iter().for_each(check);
        }
    }
}

/// The first product is so large that an accumulator loses all others of its group, but not the sum of the second group.
fn groups_of_columns_are_added_in_f32() {
    let to_f32 = GemmEpilogue { output: GemmOutput::F32, ..GemmEpilogue::RESIDUAL };
    let case = mma_case(sized(in_fp8(Fp8Format::E5m2, Some(128), to_f32), [1, 16, 128]));
    let (mut a, mut b) = (vec![1.0; 256], vec![0.5; 16 * 256]);
    a[0] = 57344.0;
    b.iter_mut().step_by(256).for_each(|b| *b = 448.0);
    let inputs = Inputs { a, b, bias: vec![0.0; 16], aux: vec![0.0; 16], scales: [1.0; 2] };
    assert_eq!(run(case, &inputs).out, [57344.0 * 448.0 + 64.0; 16]);
}

fn random_shapes_match_reference() {
    let sizes = (1..300usize, 1..40usize, 1..20usize, select(gemms()), 0..u32::MAX);
    for_all(16, sizes, |(m, n, k, gemm, seed)| check_fractions(mma_case(sized(gemm, [m, 8 * n, 8 * k])), seed));
}

/// An FP8 output has the bits that separate kernels compute from the output of the GEMM without an activation.
fn fp8_outputs_have_the_bits_of_separate_quantization() {
    mma_cases(&gemms_to_fp8(), &[[144, 208, 72], [16, 16, 8]]).into_iter().for_each(check_bits_of_quantization);
}

fn non_finite_elements_do_not_spread() {
    mma_cases(&gemms(), &[[144, 272, 72]]).into_iter().for_each(check_non_finite_elements);
}

/// The bias alone is larger than its sum with the products.
fn rows_outside_of_out_do_not_count() {
    for case in mma_cases(&gemms_to_fp8(), &[[16, 16, 8], [80, 16, 8]]) {
        let [a, b, out] = [case.gemm.m * 16, 16 * 16, case.gemm.m * 16];
        let inputs =
            Inputs { a: vec![1.0; a], b: vec![-1.0; b], bias: vec![3.0; 16], aux: vec![1.0; out], scales: [0.5, 0.25] };
        check_exact(case, &inputs);
    }
}

fn unsupported_gemms_are_rejected() {
    let gemm = |size: [usize; 3], epilogue| sized(in_fp8(Fp8Format::E4m3, None, epilogue), size);
    assert!(is_supported(&gemm([3, 8, 8], BIAS_RESIDUAL)));
    for size in [[3, 12, 8], [3, 8, 4], [0, 8, 8]] {
        assert!(!is_supported(&gemm(size, BIAS_RESIDUAL)), "{size:?}");
    }
    assert!(!is_supported(&gemm([3, 8, 8], GemmEpilogue::NONE.with(Gelu, Pass::Forward))));
    assert!(!is_supported(&Gemm { precision: GemmPrecision::Bf16, ..gemm([3, 8, 8], BIAS_RESIDUAL) }));
    assert!(!is_supported(&Gemm { batching: Batching::Strided, ..gemm([3, 8, 8], BIAS_RESIDUAL) }));
}

/// A block of sm_89 and sm_120 has up to 99 KiB.
fn shared_memory_fits() {
    let gemm = sized(in_fp8(Fp8Format::E4m3, None, BIAS_RESIDUAL), [8; 3]);
    let launch = launch(&gemm, Addresses::default(), KernelOperands::default());
    assert!(launch.shared_bytes <= 99 << 10, "{}", launch.shared_bytes);
}
