//! The `sm_90a` GEMM kernels with FP8 operands, compared with an f64 reference.

use crate::common::gemm::{
    ACTIVATION_SCALE, AROUND_A_TILE, BIAS_RESIDUAL, Case, Inputs, OUT_SCALE, Outputs, all, any_case, cases, check,
    check_fractions, check_non_finite_elements, in_bf16, run, shared_out, sized, split_k_cases, transpose,
};
use crate::common::{assert_close, assert_same, for_all, quantized, rounded, shared_bytes};
use cuda_std::emulate::Memory;
use cuda_std::fp8::Fp8Format;
use cuda_std::{E4m3, E5m2, Element, Fp8, Global, GlobalMut, bf16};
use gpu::activation::Activation::{self, Gelu, ReluSquared};
use gpu::activation::{ActivationFunction, Visitor};
use gpu::matmul::gemm::GemmLayout::Nt;
use gpu::matmul::gemm::{Batching, EXACT_COLUMNS, Gemm, GemmEpilogue, GemmOutput, GemmPrecision, Pass};
use gpu::matmul::launch::{TileConfig, TileShape, candidate_configs, is_supported};
use gpu::quantize::{tile_and_maxima, transpose_grid};
use gpu::quantize_activation::quantize_activation_select;

tests! {
    kernels of "matmul/kernel.rs" where |entry| {
        !entry.contains("grouped") && (entry.contains("e4m3") || entry.contains("e5m2"))
    };
    once: smallest_shape_matches_reference, shapes_around_a_tile_match_reference, long_k_matches_reference,
        exact_sums_of_long_k_match_reference, random_shapes_match_reference, scales_multiply_the_sums, fp8_outputs_have_the_bits_of_separate_quantization,
        infinite_results_become_nan, unsupported_shapes_are_rejected, candidate_configs_are_supported;
    slow: any_grid_size_matches_reference, split_k_matches_reference, non_finite_elements_do_not_spread;
}

const BIAS_GELU: GemmEpilogue = GemmEpilogue::BIAS.with(Gelu, Pass::Forward);
const GELU_BACKWARD: GemmEpilogue = GemmEpilogue::NONE.with(Gelu, Pass::Backward);
const ACCUMULATE_F32: GemmEpilogue = GemmEpilogue { output: GemmOutput::F32, ..GemmEpilogue::RESIDUAL };

/// Returns the GEMM whose a has this format.
const fn in_fp8(a: Fp8Format, columns: Option<u32>, epilogue: GemmEpilogue) -> Gemm {
    Gemm { precision: GemmPrecision::Fp8 { a, columns }, ..in_bf16(Nt, epilogue) }
}

fn is_e4m3(gemm: Gemm) -> bool {
    matches!(gemm.precision, GemmPrecision::Fp8 { a: Fp8Format::E4m3, .. })
}

/// Returns the GEMMs of both formats and both modes. The exact ones add sums over 128 columns, the fewest.
fn gemms() -> Vec<Gemm> {
    let of = |a| {
        let fast = all(GemmPrecision::Fp8 { a, columns: None }, Batching::One);
        let exact = all(GemmPrecision::Fp8 { a, columns: Some(EXACT_COLUMNS) }, Batching::One);
        let exact = exact.into_iter().map(|gemm| in_fp8(a, Some(128), gemm.epilogue));
        fast.into_iter().chain(exact).collect::<Vec<_>>()
    };
    let [e4m3, e5m2] = [Fp8Format::E4m3, Fp8Format::E5m2].map(of);
    assert_eq!([e4m3.len(), e5m2.len()], [16, 16]);
    [e4m3, e5m2].concat()
}

/// Returns the GEMMs with an FP8 output.
fn gemms_to_fp8() -> Vec<Gemm> {
    gemms().into_iter().filter(|gemm| gemm.epilogue.output == GemmOutput::Fp8).collect()
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
    let mut gemms = gemms();
    gemms.retain(|gemm| [BIAS_RESIDUAL, GELU_BACKWARD, ACCUMULATE_F32].contains(&gemm.epilogue));
    for blocks in [1, 4, 17] {
        cases(&gemms, &[[264, 392, 72]], blocks).into_iter().for_each(check);
    }
}

/// A pipeline of four or five stages wraps around more than once within a tile.
fn long_k_matches_reference() {
    let mut gemms = gemms();
    gemms.retain(|gemm| [GemmEpilogue::NONE, BIAS_GELU].contains(&gemm.epilogue));
    cases(&gemms, &[[65, 400, 712]], 1).into_iter().for_each(check);
}

/// Sums of two whole groups of columns and of a shorter one are added.
fn exact_sums_of_long_k_match_reference() {
    for columns in [128, 256, 384] {
        let gemms = [Fp8Format::E4m3, Fp8Format::E5m2].map(|a| in_fp8(a, Some(columns), GemmEpilogue::NONE));
        cases(&gemms, &[[65, 136, 2 * columns as usize + 72]], 1).into_iter().for_each(check);
    }
}

fn random_shapes_match_reference() {
    for_all(24, (any_case(gemms(), 600, 300), 0..u32::MAX), |(case, seed)| check_fractions(case, seed));
}

fn non_finite_elements_do_not_spread() {
    cases(&gemms(), &[[144, 272, 72]], 3).into_iter().for_each(check_non_finite_elements);
}

/// Covers slices of K of which the last is shorter, with more and with fewer work tiles than blocks.
fn split_k_matches_reference() {
    let mut gemms = gemms();
    gemms.retain(|gemm| !is_e4m3(*gemm) && [GemmEpilogue::RESIDUAL, ACCUMULATE_F32].contains(&gemm.epilogue));
    for gemm in gemms {
        split_k_cases(gemm, [136, 200, 1288], 7, 7).into_iter().for_each(check);
        split_k_cases(gemm, [264, 200, 520], 5, 3).into_iter().for_each(check);
    }
}

/// The products of FP8 numbers are multiplied by both scales, also where the scales are far apart.
fn scales_multiply_the_sums() {
    let gemm = in_fp8(Fp8Format::E4m3, None, GemmEpilogue::NONE);
    let case = Case::with_tile(sized(gemm, [8, 8, 8]), TileShape::T128x128, 1);
    let out = |scales| run(case, &Inputs { scales, ..Inputs::integers(case) }).out;
    let unscaled = out([1.0, 1.0]);
    for exponents in [[-20, 3], [60, -40], [-3, -1]] {
        let scales = exponents.map(|exponent| 2f32.powi(exponent));
        let factor = f64::from(scales[0]) * f64::from(scales[1]);
        let want: Vec<_> = unscaled.iter().map(|x| factor * x).collect();
        assert_close("scaled", &out(scales), &want, 0.0, 0.0);
    }
}

/// An FP8 output has the bits that quantization gives the output in bf16 of the same GEMM, and an activation that it recomputes those of the
/// kernel that computes only the activation.
fn fp8_outputs_have_the_bits_of_separate_quantization() {
    cases(&gemms_to_fp8(), &[[144, 208, 72]], 2).into_iter().for_each(check_bits_of_quantization);
    let recomputing = gemms_to_fp8().into_iter().filter(recomputes).collect::<Vec<_>>();
    // Subtiles without rows or columns, and a consumer with several tiles.
    cases(&recomputing, &[[16, 16, 8], [336, 400, 40]], 1).into_iter().for_each(check_bits_of_quantization);
}

/// Returns true if the GEMM recomputes an activation.
fn recomputes(gemm: &Gemm) -> bool {
    matches!(gemm.epilogue.activation, Some((_, Pass::BackwardAndValue)))
}

pub fn check_bits_of_quantization(case: Case) {
    let (gemm, inputs) = (case.gemm, Inputs::fractions(case, 5));
    let with = |epilogue| Case { gemm: Gemm { epilogue, ..gemm }, ..case };
    let got = run(case, &inputs);
    let plain = match gemm.epilogue.activation {
        Some((activation, pass)) if case.mma || activation == ReluSquared => {
            let epilogue = GemmEpilogue { bias: gemm.epilogue.bias, ..GemmEpilogue::NONE };
            separate(run(with(epilogue), &inputs), activation, pass, &inputs)
        }
        Some((activation, _)) if activation.is_gated() => {
            gated(run(with(GemmEpilogue::NONE), &inputs), activation, case)
        }
        Some((activation, Pass::BackwardAndValue)) => {
            run(with(GemmEpilogue::NONE.with(activation, Pass::Backward)), &inputs)
        }
        _ => run(with(GemmEpilogue { output: GemmOutput::Storage, ..gemm.epilogue }), &inputs),
    };
    let second = match gemm.epilogue.activation {
        Some((activation, Pass::BackwardAndValue)) => {
            quantized_activation(activation, &inputs.aux, gemm.output_shape())
        }
        _ => plain.second,
    };
    let bits = if is_e4m3(gemm) {
        quantized::reference::<E4m3>(&plain.out, OUT_SCALE)
    } else {
        quantized::reference::<E5m2>(&plain.out, OUT_SCALE)
    };
    let out = if is_e4m3(gemm) { numbers::<E4m3>(bits) } else { numbers::<E5m2>(bits) };
    assert_same(&format!("{case:?}, out"), &got.out, &out);
    assert_same(&format!("{case:?}, second"), &got.second, &second);
    assert_same(&format!("{case:?}, transpose"), &got.transposed, &transpose(&got.out, gemm.output_shape()));
    assert_eq!((got.amax as f32).to_bits(), quantized::largest(&plain.out, 0.0), "{case:?}");
}

fn numbers<T: Fp8>(bits: Vec<u8>) -> Vec<f64> {
    bits.into_iter().map(|bits| f64::from(T::from_bits(bits).to_f32())).collect()
}

/// Returns the activation (rows, columns) in E4M3, of which a kernel writes only the transpose.
fn quantized_activation(activation: Activation, preactivation: &[f64], [rows, columns]: [usize; 2]) -> Vec<f64> {
    let mut memory = Memory::new();
    let inp = memory.input("preactivation", &rounded::<bf16>(preactivation));
    let (transposed, scale) = (memory.output("transposed", rows * columns), memory.input("scale", &[ACTIVATION_SCALE]));
    let (null, amax, key) = (GlobalMut::null(), GlobalMut::null(), (activation, false, true));
    let (r, c) = (rows as u32, columns as u32);
    let launch = quantize_activation_select(key, null, transposed, amax, inp, scale, r, c, Global::null());
    let (grid, shared_bytes) = (transpose_grid(rows, columns), shared_bytes(tile_and_maxima));
    launch.unwrap().emulate_checked(&mut memory, grid, shared_bytes).unwrap();
    numbers::<E4m3>(quantized::transposed(&quantized::bits(&memory.read(transposed)), rows))
}

/// Returns what a separate kernel computes from the output of a GEMM: an activation function with one input, or its gradient.
fn separate(sums: Outputs, activation: Activation, pass: Pass, inputs: &Inputs) -> Outputs {
    /// An input and the gradient of the output.
    struct ValueAndGradient(f32, f32);
    impl Visitor for ValueAndGradient {
        type Output = [f64; 2];
        fn visit<A: ActivationFunction>(self) -> [f64; 2] {
            let Self(x, gradient) = self;
            [A::value([x, 0.0]), A::gradients(gradient, [x, 0.0])[0]].map(|x| f64::from(bf16::from_f32(x).to_f32()))
        }
    }
    let value = |sum: &f64| activation.visit(ValueAndGradient(*sum as f32, 0.0))[0];
    let aux = inputs.aux.iter().map(|x| bf16::from_f32(*x as f32).to_f32());
    let gradient = |(sum, aux): (&f64, f32)| activation.visit(ValueAndGradient(aux, *sum as f32))[1];
    match pass {
        Pass::Forward => {
            let out = sums.out.iter().map(value).collect();
            Outputs { out, second: sums.out, ..sums }
        }
        _ => Outputs { out: sums.out.iter().zip(aux).map(gradient).collect(), ..sums },
    }
}

/// Returns what a separate kernel computes from the output of a GEMM: the value of a gated function.
fn gated(sums: Outputs, activation: Activation, case: Case) -> Outputs {
    struct Value([f32; 2]);
    impl Visitor for Value {
        type Output = f32;
        fn visit<A: ActivationFunction>(self) -> f32 {
            A::value(self.0)
        }
    }
    let columns = case.gemm.n / 2;
    let value = |row: &[f64], i: usize| {
        let value = activation.visit(Value([row[i] as f32, row[columns + i] as f32]));
        f64::from(bf16::from_f32(value).to_f32())
    };
    let rows = sums.out.chunks(2 * columns);
    let out = rows.flat_map(|row| (0..columns).map(move |i| value(row, i))).collect();
    Outputs { out, second: sums.out, ..sums }
}

fn infinite_results_become_nan() {
    for case in gemms_to_fp8().into_iter().map(|gemm| cases(&[gemm], &[[16, 16, 8]], 1)[0]) {
        let Gemm { m, n, k, .. } = case.gemm;
        let [a, b, bias, aux] = [m * k, n * k, n, case.gemm.output_shape().iter().product()].map(|len| vec![1.0; len]);
        let inputs = Inputs { a, b, scales: [2f32.powi(70); 2], bias, aux };
        let got = run(case, &inputs);
        assert!(got.out.iter().all(|x| x.is_nan()) && !got.amax.is_finite(), "{case:?}: {:?}", got.out);
    }
}

fn unsupported_shapes_are_rejected() {
    let bias = |a, columns, [m, n, k]: [usize; 3]| Gemm { m, n, k, ..in_fp8(a, columns, GemmEpilogue::BIAS) };
    let supported = |size| is_supported(&bias(Fp8Format::E4m3, None, size));
    assert!(supported([3, 8, 16]));
    for rejected in [[3, 12, 16], [3, 8, 24], [0, 8, 16], [1 << 31, 8, 16]] {
        assert!(!supported(rejected), "{rejected:?}");
    }
    assert!(!is_supported(&bias(Fp8Format::E5m2, None, [3, 8, 16])));
    let large = TileConfig { tile: TileShape::T128x256, split_k: 1 };
    assert!(large.is_supported(&bias(Fp8Format::E4m3, None, [3, 8, 16])));
    assert!(!large.is_supported(&bias(Fp8Format::E4m3, Some(EXACT_COLUMNS), [3, 8, 16])));
    assert!(!TileConfig { split_k: 2, ..large }.is_supported(&bias(Fp8Format::E4m3, None, [3, 8, 4096])));
}

fn candidate_configs_are_supported() {
    for (m, n, k) in [(2304, 768, 65536), (768, 768, 65536), (65536, 3072, 768), (50304, 768, 128)] {
        for gemm in gemms().into_iter().map(|gemm| Gemm { m, n, k, ..gemm }) {
            for scratch_len in [0, 1 << 24] {
                let candidates = candidate_configs(&gemm, 132, scratch_len);
                assert!(!candidates.is_empty());
                let fits = |config: &TileConfig| config.scratch_len(&gemm) <= scratch_len;
                assert!(candidates.iter().all(|config| config.is_supported(&gemm) && fits(config)));
            }
        }
    }
}
