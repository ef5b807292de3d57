//! The `sm_90a` GEMM kernels with a gated activation compared with an f64 reference.

use crate::common::gemm::{
    Case, Inputs, all, any_case, cases, check, check_bits_of_fused_activations, check_fractions,
    check_independence_of_rows, check_non_finite_elements, in_bf16, reference, run, sized,
};
use crate::common::{Tolerance, assert_close, for_all, rounded, wide};
use cuda_std::bf16;
use gpu::activation::Activation::{GeGlu, SwiGlu};
use gpu::matmul::gemm::GemmLayout::{Nn, Nt};
use gpu::matmul::gemm::{Batching, Gemm, GemmEpilogue, GemmPrecision, Pass};
use gpu::matmul::launch::TileShape;

tests! {
    kernels of "matmul/kernel.rs" where |entry| {
        entry.contains("glu") && !["e4m3", "grouped"].iter().any(|other| entry.contains(other))
    };
    once: shapes_around_a_tile_match_reference, any_grid_size_matches_reference, long_k_matches_reference,
        several_tile_groups_match_reference, random_shapes_match_reference, rows_of_a_are_independent,
        non_finite_elements_do_not_spread, swiglu_is_accurate_over_its_whole_range,
        fused_activations_have_the_bits_of_separate_kernels, only_pingpong_tiles_are_supported;
}

const FORWARD: Gemm = in_bf16(Nt, GemmEpilogue::NONE.with(SwiGlu, Pass::Forward));
const RECOMPUTE: Gemm = in_bf16(Nn, GemmEpilogue::NONE.with(SwiGlu, Pass::BackwardAndValue));

fn gemms() -> Vec<Gemm> {
    let mut gemms = all(GemmPrecision::Bf16, Batching::One);
    gemms.retain(|gemm| gemm.epilogue.is_gated());
    assert_eq!(gemms.len(), 2 * 3, "three passes of two functions");
    gemms
}

fn shapes_around_a_tile_match_reference() {
    let sizes = [
        [1, 8, 8],
        [63, 64, 72],
        [64, 40, 64],
        [65, 96, 8],
        [127, 136, 56],
        [128, 192, 128],
        [129, 104, 200],
        [130, 256, 64],
    ];
    cases(&gemms(), &sizes, 1).into_iter().for_each(check);
}

/// Blocks have odd and even numbers of tiles, some consumers have none, and slots continue from tile to tile.
fn any_grid_size_matches_reference() {
    for (gemm, blocks) in gemms().into_iter().zip([1, 4, 17].into_iter().cycle()) {
        cases(&[gemm], &[[264, 392, 136]], blocks).into_iter().for_each(check);
    }
}

/// A pipeline of four or five stages wraps around more than once within a tile.
fn long_k_matches_reference() {
    cases(&gemms(), &[[65, 200, 712]], 1).into_iter().for_each(check);
}

/// Covers a full group of 16 rows of tiles followed by a smaller group.
fn several_tile_groups_match_reference() {
    for gemm in [FORWARD, RECOMPUTE] {
        check(Case::with_tile(sized(gemm, [2200, 136, 8]), TileShape::T128x128, 5));
    }
}

fn random_shapes_match_reference() {
    for_all(24, (any_case(gemms(), 400, 300), 0..u32::MAX), |(case, seed)| check_fractions(case, seed));
}

fn rows_of_a_are_independent() {
    for_all(6, (any_case(gemms(), 400, 300), 0..u32::MAX), |(case, seed)| check_independence_of_rows(case, seed));
}

fn non_finite_elements_do_not_spread() {
    cases(&gemms(), &[[144, 136, 72]], 3).into_iter().for_each(check_non_finite_elements);
}

/// Checks gates on -80..80 and at ±3e38, relative to each value: from where SiLU vanishes to where it is the identity.
fn swiglu_is_accurate_over_its_whole_range() {
    let (m, f) = (8, 256);
    let value = |i: usize| {
        let x = (i as f64 - 1024.0) / 12.8;
        if i == 0 || i == m * f - 1 { x.signum() * 3e38 } else { x }
    };
    let points = wide(&rounded::<bf16>(&(0..m * f).map(value).collect::<Vec<_>>()));
    for case in cases(&[RECOMPUTE], &[[m, f, 8]], 1) {
        // Each element of a · b is 1, and so is up.
        let aux: Vec<f64> = points.chunks(f).flat_map(|gates| [vec![1.0; f], gates.to_vec()].concat()).collect();
        let inputs = Inputs { a: vec![0.125; m * 8], b: vec![1.0; f * 8], aux, ..Inputs::integers(case) };
        let (got, want) = (run(case, &inputs), reference(case, &inputs, &[]));
        // Where the derivative crosses zero, its error is relative to 1.
        let near_zero = |x: f64| (x + 1.278).abs() < 0.1;
        for (i, (&got, want)) in got.out.iter().zip(want.out).enumerate() {
            let gate = points[i / (2 * f) * f + i % f];
            let scale = if near_zero(gate) { 1e-2 } else { 1e-30 };
            assert_close(&format!("gradient at {gate}"), &[got], &[want], bf16::ROUNDING, scale);
        }
        assert_close("silu", &got.second, &want.second, bf16::ROUNDING, 1e-30);
    }
}

fn fused_activations_have_the_bits_of_separate_kernels() {
    check_bits_of_fused_activations([FORWARD, RECOMPUTE]);
    let with = |gemm: Gemm, pass| Gemm { epilogue: GemmEpilogue::NONE.with(GeGlu, pass), ..gemm };
    check_bits_of_fused_activations([with(FORWARD, Pass::Forward), with(RECOMPUTE, Pass::BackwardAndValue)]);
}

fn only_pingpong_tiles_are_supported() {
    for gemm in gemms() {
        let tiles: Vec<_> = cases(&[gemm], &[[128, 256, 64]], 1).iter().map(|case| case.config.tile).collect();
        assert_eq!(tiles, [TileShape::T128x128, TileShape::T128x192]);
    }
}
