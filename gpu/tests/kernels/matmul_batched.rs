//! The batched and symmetric `sm_90a` GEMM kernels compared with an f64 reference.

use crate::common::gemm::{Case, Inputs, all, any_case, cases, check, check_fractions, in_bf16, mirrored, run, sized};
use crate::common::{assert_same, for_all};
use gpu::matmul::gemm::GemmLayout::{Nn, Nt, Tn};
use gpu::matmul::gemm::{Batching, Gemm, GemmEpilogue, GemmPrecision, Residual};
use gpu::matmul::launch::{ScaleFactors, TileShape, candidate_configs, is_supported};

tests! {
    kernels of "matmul/kernel.rs" where |entry| entry.contains("batched") || entry.contains("symmetric");
    once: smallest_shape_matches_reference, shapes_around_a_tile_match_reference, any_grid_size_matches_reference,
        several_tile_groups_match_reference, long_k_matches_reference, random_shapes_match_reference,
        symmetric_outputs_are_symmetric, matrices_are_independent, tile_shapes_have_the_same_bits,
        factors_are_applied, unsupported_shapes_are_rejected;
}

const SCALED_EPILOGUE: GemmEpilogue = GemmEpilogue { residual: Some(Residual::Scaled), ..GemmEpilogue::NONE };
const SCALED: Gemm = Gemm { batching: Batching::Strided, ..in_bf16(Nn, SCALED_EPILOGUE) };
const SYMMETRIC: Gemm = Gemm { batching: Batching::Symmetric, ..in_bf16(Nt, GemmEpilogue::NONE) };
const SYMMETRIC_SCALED: Gemm = Gemm { epilogue: SCALED_EPILOGUE, ..SYMMETRIC };
const SYMMETRIC_TN: Gemm = Gemm { layout: Tn, ..SYMMETRIC };

fn symmetric_gemms() -> Vec<Gemm> {
    let gemms = all(GemmPrecision::Bf16, Batching::Symmetric);
    assert_eq!(gemms.len(), 3);
    gemms
}

fn gemms() -> Vec<Gemm> {
    let gemms = [all(GemmPrecision::Bf16, Batching::Strided), symmetric_gemms()].concat();
    assert_eq!(gemms.len(), 4);
    gemms
}

fn smallest_shape_matches_reference() {
    for case in cases(&gemms(), &[[1, 8, 8]], 1) {
        check(Case { count: 1, ..case });
        check(Case { count: 3, ..case });
    }
}

fn shapes_around_a_tile_match_reference() {
    let sizes = [[1, 200, 64], [65, 64, 8], [127, 136, 56], [128, 192, 128], [129, 128, 200], [64, 72, 72]];
    cases(&gemms(), &sizes, 1).into_iter().for_each(check);
}

/// Outputs of 2 x 2 to 4 x 4 tiles. Blocks have odd and even numbers of tiles, some consumers have none, and the pipeline
/// continues from tile to tile and from matrix to matrix.
fn any_grid_size_matches_reference() {
    for (gemm, blocks) in gemms().into_iter().zip([1, 4, 17].into_iter().cycle()) {
        for case in cases(&[gemm], &[[264, 392, 72]], blocks) {
            check(Case { count: 3, ..case });
        }
    }
}

/// A full group of 16 rows of tiles, and a smaller group.
fn several_tile_groups_match_reference() {
    check(Case::with_tile(sized(SCALED, [2200, 136, 8]), TileShape::T128x128, 5));
}

/// A pipeline of four or five stages wraps around more than once within a tile.
fn long_k_matches_reference() {
    cases(&gemms(), &[[65, 200, 712]], 2).into_iter().for_each(check);
}

fn random_shapes_match_reference() {
    for_all(12, (any_case(gemms(), 460, 300), 0..u32::MAX), |(case, seed)| check_fractions(case, seed));
}

/// The values below the diagonal of aux differ from those above it, which the kernel must not read.
fn symmetric_outputs_are_symmetric() {
    for_all(12, (any_case(symmetric_gemms(), 460, 300), 0..u32::MAX), |(case, seed)| {
        let (mut inputs, n) = (Inputs::fractions(case, seed), case.gemm.n);
        for aux in inputs.aux.chunks_mut(n * n) {
            for i in 0..n {
                aux[i * n..i * n + i].fill(f64::NAN);
            }
        }
        let out = run(case, &inputs).out;
        assert!(out.iter().all(|x| x.is_finite()), "{case:?} reads aux below the diagonal");
        assert_same(&format!("{case:?}"), &out, &mirrored(&out, n));
    });
}

/// Returns matrix `i` of three.
fn matrix(all: &[f64], i: usize) -> &[f64] {
    let len = all.len() / 3;
    &all[i * len..(i + 1) * len]
}

/// A matrix has the same bits alone and in any batch. NaN stays in its matrix.
fn matrices_are_independent() {
    for_all(4, (any_case(gemms(), 460, 300), 0..u32::MAX), |(case, seed)| {
        let case = Case { count: 3, ..case };
        let mut inputs = Inputs::fractions(case, seed);
        let together = run(case, &inputs).out;
        for i in 0..3 {
            let [a, b, aux] = [&inputs.a, &inputs.b, &inputs.aux].map(|all| matrix(all, i).to_vec());
            let alone = run(Case { count: 1, ..case }, &Inputs { a, b, aux, ..inputs.clone() }).out;
            assert_same(&format!("{case:?}, matrix {i}"), &alone, matrix(&together, i));
        }
        let second = inputs.a.len() / 3;
        inputs.a[second] = f64::NAN;
        let got = run(case, &inputs).out;
        for i in [0, 2] {
            assert_same(&format!("{case:?}"), matrix(&got, i), matrix(&together, i));
        }
        assert!(matrix(&got, 1).iter().any(|x| x.is_nan()), "{case:?}");
    });
}

/// So the result for a matrix does not depend on what the autotuner chooses.
fn tile_shapes_have_the_same_bits() {
    for gemm in gemms() {
        let cases = cases(&[gemm], &[[200, 328, 264]], 3);
        assert_eq!(cases.len(), if gemm.batching == Batching::Symmetric { 2 } else { 6 });
        let factors = ScaleFactors { alpha: 0.3, beta: 1.7 };
        let out = |case: &Case| run(Case { factors, ..*case }, &Inputs::fractions(*case, 5)).out;
        for case in &cases[1..] {
            assert_same(&format!("{case:?}"), &out(case), &out(&cases[0]));
        }
    }
}

fn factors_are_applied() {
    for gemm in [SCALED, SYMMETRIC_SCALED] {
        for [alpha, beta] in [[1.0, 1.0], [0.0, 1.0], [-4.0, 0.0]] {
            let case = Case::with_tile(sized(gemm, [72, 136, 72]), TileShape::T128x128, 1);
            check(Case { count: 1, factors: ScaleFactors { alpha, beta }, ..case });
        }
    }
}

fn unsupported_shapes_are_rejected() {
    let supported = |gemm: Gemm, [m, n, k]: [usize; 3]| is_supported(&Gemm { m, n, k, ..gemm });
    for gemm in [SYMMETRIC, SYMMETRIC_SCALED, SYMMETRIC_TN] {
        assert!(supported(gemm, [16, 16, 8]));
        assert!(!supported(gemm, [24, 16, 8]), "{gemm:?}");
        assert!(!supported(gemm, [20, 20, 8]), "{gemm:?}");
        let configs = candidate_configs(&Gemm { m: 16, n: 16, k: 8, ..gemm }, 132, 1 << 20);
        let tiles = [TileShape::T128x128, TileShape::T128x192];
        assert!(configs.iter().all(|config| config.split_k == 1 && tiles.contains(&config.tile)));
    }
    // The rows of a (K, N) are not those of a (N, K).
    assert!(supported(SYMMETRIC_TN, [16, 16, 3]) && !supported(SYMMETRIC, [16, 16, 3]));
    assert!(supported(SCALED, [3, 16, 8]));
}
