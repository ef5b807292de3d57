//! The `sm_90a` GEMM kernels with operands in bf16 compared with an f64 reference.

use crate::common::gemm::{
    AROUND_A_TILE, BIAS_RESIDUAL, Case, Inputs, Outputs, all, any_case, cases, check, check_bits_of_fused_activations,
    check_fractions, check_independence_of_rows, check_non_finite_elements, in_bf16, run, shared_out, sized,
    split_k_cases,
};
use crate::common::{Tolerance, activation, assert_close, for_all, rounded, wide};
use cuda_std::{Element, bf16};
use gpu::activation::Activation::{Gelu, ReluSquared, SwiGlu};
use gpu::matmul::gemm::GemmLayout::{Nn, Nt, Tn};
use gpu::matmul::gemm::Pass::{Backward, BackwardAndValue, Forward};
use gpu::matmul::gemm::{Batching, Gemm, GemmEpilogue, GemmPrecision};
use gpu::matmul::launch::{TileConfig, TileShape, candidate_configs, is_supported};

tests! {
    kernels of "matmul/kernel.rs", "matmul/split_k.rs" where |entry| {
        !["e4m3", "e5m2", "batched", "symmetric", "glu", "grouped"].iter().any(|other| entry.contains(other))
    };
    once: smallest_shape_matches_reference, shapes_around_a_tile_match_reference, any_grid_size_matches_reference,
        several_tile_groups_match_reference, long_k_matches_reference, random_shapes_match_reference,
        rows_of_a_are_independent, non_finite_elements_do_not_spread, gelu_is_accurate_over_its_whole_range,
        relu_squared_is_exact_over_its_whole_range, fused_activations_have_the_bits_of_separate_kernels,
        unsupported_shapes_are_rejected, split_k_matches_reference, candidate_configs_are_supported_and_fill_the_gpu;
}

const GELU: Gemm = in_bf16(Nt, GemmEpilogue::BIAS.with(Gelu, Forward));
const GELU_BACKWARD: Gemm = in_bf16(Nn, GemmEpilogue::NONE.with(Gelu, Backward));
const GELU_BACKWARD_AND_VALUE: Gemm = in_bf16(Nn, GemmEpilogue::NONE.with(Gelu, BackwardAndValue));
const RELU_SQUARED: Gemm = in_bf16(Nt, GemmEpilogue::NONE.with(ReluSquared, Forward));
const RELU_SQUARED_BACKWARD: Gemm = in_bf16(Nn, GemmEpilogue::NONE.with(ReluSquared, Backward));
const RELU_SQUARED_BACKWARD_AND_VALUE: Gemm = in_bf16(Nn, GemmEpilogue::NONE.with(ReluSquared, BackwardAndValue));
const WEIGHT_GRADIENT: Gemm = in_bf16(Tn, GemmEpilogue::RESIDUAL);
const WEIGHT_AND_BIAS_GRADIENT: Gemm = in_bf16(Tn, GemmEpilogue::BIAS_GRADIENT);

/// Returns all GEMMs but those with a gated activation, which `matmul_gated.rs` tests.
fn gemms() -> Vec<Gemm> {
    let mut gemms = all(GemmPrecision::Bf16, Batching::One);
    gemms.retain(|gemm| !gemm.epilogue.is_gated());
    assert_eq!(gemms.len(), 14);
    gemms
}

fn smallest_shape_matches_reference() {
    cases(&gemms(), &[[1, 8, 8]], 1).into_iter().for_each(check);
}

fn shapes_around_a_tile_match_reference() {
    shared_out(&gemms(), &AROUND_A_TILE).into_iter().for_each(check);
}

/// Covers outputs of 2 x 2 to 3 x 4 tiles. Blocks have odd and even numbers of tiles, some consumers have none, and the
/// pipeline continues from tile to tile.
fn any_grid_size_matches_reference() {
    let gemms = [
        in_bf16(Nt, BIAS_RESIDUAL),
        RELU_SQUARED,
        RELU_SQUARED_BACKWARD,
        GELU_BACKWARD,
        GELU_BACKWARD_AND_VALUE,
        WEIGHT_AND_BIAS_GRADIENT,
    ];
    for (gemms, blocks) in gemms.chunks(2).zip([1, 4, 17]) {
        cases(gemms, &[[264, 392, 72]], blocks).into_iter().for_each(check);
    }
}

/// Covers a full group of 16 rows of tiles followed by a smaller group or none, with more than one column of tiles.
fn several_tile_groups_match_reference() {
    let (bias, plain) = (in_bf16(Nt, GemmEpilogue::BIAS), in_bf16(Nn, GemmEpilogue::NONE));
    for (gemm, m) in [(bias, 2200), (plain, 2048), (WEIGHT_GRADIENT, 2200)] {
        check(Case::with_tile(sized(gemm, [m, 264, 8]), TileShape::T128x128, 5));
    }
}

/// A pipeline of four or five stages wraps around more than once within a tile.
fn long_k_matches_reference() {
    let gemms = [in_bf16(Nt, GemmEpilogue::NONE), GELU, WEIGHT_AND_BIAS_GRADIENT];
    cases(&gemms, &[[65, 400, 712]], 1).into_iter().for_each(check);
}

fn random_shapes_match_reference() {
    for_all(24, (any_case(gemms(), 600, 300), 0..u32::MAX), |(case, seed)| check_fractions(case, seed));
}

fn rows_of_a_are_independent() {
    for_all(6, (any_case(gemms(), 600, 300), 0..u32::MAX), |(case, seed)| check_independence_of_rows(case, seed));
}

fn non_finite_elements_do_not_spread() {
    cases(&gemms(), &[[144, 272, 72]], 3).into_iter().for_each(check_non_finite_elements);
}

/// Checks GELU and its derivative on -16..16 and at ±3e38, relative to each value: from where they vanish to where they
/// are the identity and 1.
fn gelu_is_accurate_over_its_whole_range() {
    let n = 512;
    let value = |i: usize| {
        let x = (i as f64 - 256.0) / 16.0;
        if i == 0 || i == n - 1 { x.signum() * 3e38 } else { x }
    };
    let points = wide(&rounded::<bf16>(&(0..n).map(value).collect::<Vec<_>>()));
    for case in cases(&[GELU], &[[1, n, 8]], 1) {
        // a is zero, so that second is the bias.
        let zero = Inputs { a: vec![0.0; 8], bias: points.clone(), ..Inputs::integers(case) };
        let Outputs { out, second, .. } = run(case, &zero);
        assert_close("second", &second, &points, 0.0, 0.0);
        assert_close("gelu", &out, &activation::forward(Gelu, &points, n), bf16::ROUNDING, 1e-30);

        // Each element of a · b is 1.
        let case = Case { gemm: sized(GELU_BACKWARD, [1, n, 8]), ..case };
        let ones = Inputs { a: vec![0.125; 8], b: vec![1.0; n * 8], aux: points.clone(), ..zero };
        let slopes = activation::backward(Gelu, &vec![1.0; n], &points, n);
        assert_close("slope", &run(case, &ones).out, &slopes, bf16::ROUNDING, 1e-3);
    }
}

/// Checks all bf16 values of a ReLU² argument but NaN and values whose result is not finite.
fn relu_squared_is_exact_over_its_whole_range() {
    let n = 1024;
    let values = (0..=u16::MAX).map(|bits| f64::from(bf16::from_bits(bits).to_f32()));
    let mut points: Vec<f64> = values.filter(|x| x.abs() < 1e19).collect();
    points.resize(points.len().next_multiple_of(n), 0.0);
    let size = [points.len() / n, n, 8];
    for case in cases(&[RELU_SQUARED_BACKWARD_AND_VALUE], &[size], 2) {
        // Each element of a · b is 1.
        let inputs =
            Inputs { a: vec![0.125; size[0] * 8], b: vec![1.0; n * 8], aux: points.clone(), ..Inputs::integers(case) };
        let Outputs { out, second, .. } = run(case, &inputs);
        let nearest =
            |f: fn(f64) -> f64| points.iter().map(|&x| f64::from(bf16::nearest(f(x) as f32))).collect::<Vec<_>>();
        assert_close("slope", &out, &nearest(|x| 2.0 * x.max(0.0)), 0.0, 0.0);
        assert_close("relu squared", &second, &nearest(|x| x.max(0.0) * x.max(0.0)), 0.0, 1e-37);
        let alone = run(Case { gemm: sized(RELU_SQUARED_BACKWARD, size), ..case }, &inputs);
        assert_close("alone", &alone.out, &out, 0.0, 0.0);
    }
}

fn fused_activations_have_the_bits_of_separate_kernels() {
    check_bits_of_fused_activations([GELU, GELU_BACKWARD_AND_VALUE]);
    check_bits_of_fused_activations([RELU_SQUARED, RELU_SQUARED_BACKWARD_AND_VALUE]);
}

fn unsupported_shapes_are_rejected() {
    let (plain, input_gradient) = (in_bf16(Nt, GemmEpilogue::NONE), in_bf16(Nn, GemmEpilogue::NONE));
    let supported = |gemm: Gemm, [m, n, k]: [usize; 3]| is_supported(&Gemm { m, n, k, ..gemm });
    assert!(supported(plain, [3, 16, 8]) && !supported(WEIGHT_GRADIENT, [3, 16, 8]));
    assert!(supported(input_gradient, [3, 16, 8]) && supported(WEIGHT_GRADIENT, [16, 8, 3]));
    for rejected in [[3, 20, 8], [3, 16, 4], [0, 16, 8], [1 << 31, 16, 8]] {
        assert!(!supported(input_gradient, rejected), "{rejected:?}");
    }
    // Half of the columns are a separate tensor.
    let swiglu = in_bf16(Nt, GemmEpilogue::NONE.with(SwiGlu, Forward));
    assert!(supported(swiglu, [3, 16, 8]) && !supported(swiglu, [3, 24, 8]));
    assert!(supported(in_bf16(Nn, GemmEpilogue::NONE.with(SwiGlu, Backward)), [3, 24, 8]));
}

/// Covers slices of K of which the last is shorter, with more and with fewer work tiles than blocks.
fn split_k_matches_reference() {
    for (size, split_k, blocks) in [([136, 200, 1288], 7, 7), ([64, 456, 1352], 22, 8), ([264, 200, 520], 5, 3)] {
        let cases = split_k_cases(WEIGHT_AND_BIAS_GRADIENT, size, split_k, blocks);
        assert_eq!(cases.len(), TileShape::ALL.len());
        cases.into_iter().for_each(check);
    }
}

/// For the GEMMs of transformers, all candidates are supported and fit in the scratch memory. With a long K, the first
/// candidate keeps the SMs more than 80 % busy.
fn candidate_configs_are_supported_and_fill_the_gpu() {
    const SM_COUNT: usize = 132;
    for (m, n) in [(2304, 768), (768, 768), (3072, 768), (768, 3072), (1600, 1600), (50304, 768)] {
        for k in [1, 64, 65, 1024, 16384, 65536] {
            let shaped = |gemm| Gemm { m, n, k, ..gemm };
            for gemm in [WEIGHT_GRADIENT, WEIGHT_AND_BIAS_GRADIENT].map(shaped) {
                for scratch_len in [0, 1 << 22, 1 << 24] {
                    let candidates = candidate_configs(&gemm, SM_COUNT, scratch_len);
                    let fits = |config: &TileConfig| config.split_k == 1 || config.scratch_len(&gemm) <= scratch_len;
                    assert!(candidates.iter().all(|config| config.is_supported(&gemm) && fits(config)));
                    assert!(TileShape::ALL.iter().all(|tile| candidates.iter().any(|config| config.tile == *tile)));
                }
            }
            let best = candidate_configs(&shaped(WEIGHT_GRADIENT), SM_COUNT, 1 << 24)[0];
            let [tile_m, tile_n] = best.tile.dims();
            let work_tiles = m.div_ceil(tile_m as usize) * n.div_ceil(tile_n as usize) * best.split_k;
            let busy = work_tiles as f64 / (work_tiles.next_multiple_of(SM_COUNT)) as f64;
            assert!(k < 16384 || busy > 0.8, "{m} x {n} x {k} {best:?}: {busy}");
            let of_pingpong_tiles = [
                GELU_BACKWARD,
                GELU_BACKWARD_AND_VALUE,
                RELU_SQUARED_BACKWARD_AND_VALUE,
                in_bf16(Nt, GemmEpilogue::NONE.with(SwiGlu, Forward)),
                in_bf16(Nn, GemmEpilogue::NONE.with(SwiGlu, BackwardAndValue)),
            ];
            for gemm in of_pingpong_tiles.map(shaped) {
                let candidates = candidate_configs(&gemm, SM_COUNT, 1 << 24);
                let pingpong = [TileShape::T128x128, TileShape::T128x192];
                let supported = |config: &TileConfig| config.split_k == 1 && pingpong.contains(&config.tile);
                assert!(candidates.iter().all(supported), "{candidates:?}");
            }
        }
    }
}
