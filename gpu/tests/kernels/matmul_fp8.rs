//! The `sm_90a` GEMM kernels with FP8 operands, compared with an f64 reference.

use crate::common::{Tolerance, assert_close, entries, for_all, matrix_rows, noise, product, rounded, wide};
use bytemuck::Pod;
use cuda_std::emulate::Memory;
use cuda_std::fp8::Fp8Format;
use cuda_std::hopper::TensorMap;
use cuda_std::{E4m3, E5m2, Element, Fp8, Global, GlobalMut, bf16};
use gpu::launch::Extents;
use gpu::matmul::fp8_launch::{Fp8Epilogue, Fp8Gemm, Fp8Operands};
use gpu::matmul::launch::{GemmShape, Map, TileConfig, TileShape};
use proptest::arbitrary::any;
use proptest::sample::{Index, select};
use proptest::strategy::Strategy;

tests! {
    kernels of "matmul/fp8.rs";
    once: smallest_shape_matches_reference, shapes_around_a_tile_match_reference, long_k_matches_reference,
        random_shapes_match_reference, scales_multiply_the_sums, fp8_outputs_have_the_bits_of_separate_quantization,
        infinite_results_become_nan, unsupported_shapes_are_rejected, candidate_configs_are_supported;
    slow: any_grid_size_matches_reference, split_k_matches_reference, non_finite_elements_do_not_spread;
}

const EPILOGUES: [Fp8Epilogue; 9] = [
    Fp8Epilogue::Plain,
    Fp8Epilogue::Bias,
    Fp8Epilogue::BiasResidual,
    Fp8Epilogue::Residual,
    Fp8Epilogue::BiasGelu,
    Fp8Epilogue::GeluBackward,
    Fp8Epilogue::BiasGeluFp8,
    Fp8Epilogue::GeluBackwardFp8,
    Fp8Epilogue::AccumulateF32,
];

/// A GEMM, its tile configuration, and the number of thread blocks.
#[derive(Clone, Copy, Debug)]
struct Case {
    gemm: Fp8Gemm,
    shape: GemmShape,
    config: TileConfig,
    blocks: usize,
}

impl Case {
    fn reads_aux(self) -> bool {
        use Fp8Epilogue::{AccumulateF32, BiasResidual, GeluBackward, GeluBackwardFp8, Residual};
        matches!(self.gemm.epilogue, BiasResidual | Residual | GeluBackward | GeluBackwardFp8 | AccumulateF32)
    }

    fn has_bias(self) -> bool {
        use Fp8Epilogue::{Bias, BiasGelu, BiasGeluFp8, BiasResidual};
        matches!(self.gemm.epilogue, Bias | BiasGelu | BiasGeluFp8 | BiasResidual)
    }

    fn has_second(self) -> bool {
        matches!(self.gemm.epilogue, Fp8Epilogue::BiasGelu | Fp8Epilogue::BiasGeluFp8)
    }
}

/// Operands with values that are exact in FP8 (a and b) or bf16.
#[derive(Clone)]
struct Inputs {
    a: Vec<f64>,
    b: Vec<f64>,
    scales: [f32; 2],
    bias: Vec<f64>,
    aux: Vec<f64>,
}

/// Pseudo-random integers from -7 to 7, which both formats represent.
fn integers(len: usize, seed: u32) -> Vec<f64> {
    noise(len, seed).iter().map(|x| (7.5 * x).trunc()).collect()
}

impl Inputs {
    /// Sums of integers are exact in f32, and the scales are powers of two.
    fn integers(GemmShape { m, n, k }: GemmShape) -> Self {
        let aux = wide(&rounded::<bf16>(&noise(m * n, 4).iter().map(|x| 4.0 * x).collect::<Vec<_>>()));
        Self { a: integers(m * k, 1), b: integers(n * k, 2), scales: [0.5, 0.25], bias: integers(n, 3), aux }
    }

    fn fractions(case: Case, seed: u32) -> Self {
        let GemmShape { m, n, k } = case.shape;
        let quantized = |values: Vec<f64>, format| match format {
            Fp8Format::E4m3 => wide(&rounded::<E4m3>(&values)),
            Fp8Format::E5m2 => wide(&rounded::<E5m2>(&values)),
        };
        let stored = |values: Vec<f64>| wide(&rounded::<bf16>(&values));
        Self {
            a: quantized(noise(m * k, seed).iter().map(|x| 100.0 * x).collect(), case.gemm.a),
            b: quantized(noise(n * k, seed ^ 1).iter().map(|x| 50.0 * x).collect(), Fp8Format::E4m3),
            // Results are near 1, where GELU is most curved.
            scales: [0.01, 0.06 / (k as f32).sqrt()],
            bias: stored(noise(n, seed ^ 2)),
            aux: stored(noise(m * n, seed ^ 3).iter().map(|x| 4.0 * x).collect()),
        }
    }
}

/// The factor that restores an FP8 output.
const OUT_SCALE: f32 = 0.75;

/// The outputs of a kernel or of the reference. `second` is empty if the GEMM has no second output. An FP8 out has the
/// values of its numbers, not multiplied by the scale. `amax` is 0 for other outputs.
struct Outputs {
    out: Vec<f64>,
    second: Vec<f64>,
    amax: f64,
}

fn run(case: Case, inputs: &Inputs) -> Outputs {
    let Fp8Gemm { a, epilogue, .. } = case.gemm;
    match (a, epilogue) {
        (Fp8Format::E4m3, Fp8Epilogue::AccumulateF32) => run_to::<E4m3, f32>(case, inputs),
        (Fp8Format::E5m2, Fp8Epilogue::AccumulateF32) => run_to::<E5m2, f32>(case, inputs),
        (Fp8Format::E4m3, _) if epilogue.is_fp8() => run_to::<E4m3, E4m3>(case, inputs),
        (Fp8Format::E5m2, _) if epilogue.is_fp8() => run_to::<E5m2, E5m2>(case, inputs),
        (Fp8Format::E4m3, _) => run_to::<E4m3, bf16>(case, inputs),
        (Fp8Format::E5m2, _) => run_to::<E5m2, bf16>(case, inputs),
    }
}

/// Adds a tensor map of `base` to `memory`.
fn map<T: Element>(memory: &mut Memory, name: &str, base: Global<T>, Map { extents, tile }: Map) -> Global<TensorMap> {
    let Extents::Matrix([rows, columns]) = extents else { panic!("expected a matrix, found {extents:?}") };
    memory.input(name, &[TensorMap::emulated(base, rows, columns, size_of::<T>() * columns, tile.0, tile.1)])
}

/// Runs the kernels in the emulator, from a of element type `A` to out of element type `O`.
fn run_to<A: Fp8 + Pod, O: Element + Pod>(case: Case, inputs: &Inputs) -> Outputs {
    let Case { gemm, shape, config, blocks } = case;
    let mut memory = Memory::new();
    let (a, b) = (memory.input("a", &rounded::<A>(&inputs.a)), memory.input("b", &rounded::<E4m3>(&inputs.b)));
    let [scale_a, scale_b] = inputs.scales;
    let (scale_a, scale_b) = (memory.input("scale_a", &[scale_a]), memory.input("scale_b", &[scale_b]));
    let bias = memory.input("bias", &rounded::<bf16>(&inputs.bias));
    let len = shape.m * shape.n;
    // A split sum and one in f32 are added to out.
    let accumulates = gemm.epilogue == Fp8Epilogue::AccumulateF32 || config.split_k > 1;
    let out = if accumulates { memory.buffer("out", &rounded::<O>(&inputs.aux)) } else { memory.output("out", len) };
    let as_bf16 = GlobalMut::<bf16>::new(out.pointer().cast());
    let reads_aux = case.reads_aux() && !accumulates;
    let aux = if reads_aux { memory.input("aux", &rounded::<bf16>(&inputs.aux)) } else { as_bf16.reader() };
    let second = if case.has_second() { memory.output("second", len) } else { as_bf16 };
    let scratch_len = gemm.scratch_len(shape, config);
    let scratch = if scratch_len > 0 { memory.output("scratch", scratch_len) } else { GlobalMut::from_address(0) };
    let maps = gemm.maps(shape, config.tile);
    let amax = memory.zeroed("amax", 1);
    let operands = Fp8Operands {
        a: map(&mut memory, "map of a", a, maps.a),
        b: map(&mut memory, "map of b", b, maps.b),
        out: if gemm.epilogue.is_fp8() {
            map(&mut memory, "map of out", out.reader(), maps.out)
        } else {
            map(&mut memory, "map of out", as_bf16.reader(), maps.out)
        },
        aux: map(&mut memory, "map of aux", aux, maps.aux),
        second: map(&mut memory, "map of second", second.reader(), maps.second),
        bias,
        scale_a,
        scale_b,
        scale_out: memory.input("scale_out", &[OUT_SCALE]),
        amax,
        out_address: out.pointer().addr() as u64,
        scratch,
    };
    for kernel in gemm.launches(shape, config, operands, blocks) {
        entries::launched(&kernel.launch);
        if let Err(report) = kernel.launch.emulate_checked(&mut memory, kernel.grid, kernel.shared_bytes) {
            panic!("{case:?}: {report}");
        }
    }
    let second = if case.has_second() { wide(&memory.read(second)) } else { Vec::new() };
    let amax = f64::from(f32::from_bits(memory.read(amax)[0]));
    Outputs { out: wide(&memory.read(out)), second, amax }
}

fn scale() -> f64 {
    (2.0 / std::f64::consts::PI).sqrt()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-2.0 * scale() * (x + 0.044715 * x * x * x)).exp())
}

fn gelu(x: f64) -> f64 {
    x * sigmoid(x)
}

fn gelu_slope(x: f64) -> f64 {
    let s = sigmoid(x);
    s + 2.0 * x * s * (1.0 - s) * scale() * (1.0 + 3.0 * 0.044715 * x * x)
}

/// Computes unrounded outputs. `stored` is the kernel's rounded second output.
fn reference(case: Case, inputs: &Inputs, stored: &[f64]) -> Outputs {
    let GemmShape { m, n, k } = case.shape;
    let scale = f64::from(inputs.scales[0]) * f64::from(inputs.scales[1]);
    let mut sums = product([m, n, k], |i, l| inputs.a[i * k + l], |l, j| inputs.b[j * k + l]);
    for (at, sum) in sums.iter_mut().enumerate() {
        *sum = scale * *sum + if case.has_bias() { inputs.bias[at % n] } else { 0.0 };
    }
    let with_aux = |f: fn(f64, f64) -> f64| sums.iter().zip(&inputs.aux).map(|(&sum, &aux)| f(sum, aux)).collect();
    let out: Vec<f64> = match case.gemm.epilogue {
        Fp8Epilogue::Plain | Fp8Epilogue::Bias => sums.clone(),
        Fp8Epilogue::BiasGelu | Fp8Epilogue::BiasGeluFp8 => stored.iter().map(|&x| gelu(x)).collect(),
        Fp8Epilogue::GeluBackward | Fp8Epilogue::GeluBackwardFp8 => with_aux(|sum, aux| sum * gelu_slope(aux)),
        Fp8Epilogue::BiasResidual | Fp8Epilogue::Residual | Fp8Epilogue::AccumulateF32 => {
            with_aux(|sum, aux| aux + sum)
        }
    };
    let second = if case.has_second() { sums } else { Vec::new() };
    let amax = out.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    Outputs { out, second, amax: if case.gemm.epilogue.is_fp8() { amax } else { 0.0 } }
}

/// Checks an FP8 output against the unrounded one: the number is that of a value within `tolerance` of it.
fn assert_quantized(case: Case, got: &Outputs, want: &Outputs, tolerance: f64) {
    let quantized = |value: f64| {
        let value = value as f32 / OUT_SCALE;
        let of = |format: Fp8Format| match format {
            Fp8Format::E4m3 => E4m3::from_f32(value).to_f32(),
            Fp8Format::E5m2 => E5m2::from_f32(value).to_f32(),
        };
        f64::from(of(if case.gemm.epilogue == Fp8Epilogue::BiasGeluFp8 { Fp8Format::E4m3 } else { case.gemm.a }))
    };
    for (i, (&got, &want)) in got.out.iter().zip(&want.out).enumerate() {
        let margin = tolerance * want.abs() + 1e-30;
        let range = quantized(want - margin)..=quantized(want + margin);
        assert!(range.contains(&got), "{case:?}, {i}: expected {range:?} for {want}, found {got}");
    }
    let margin = tolerance * want.amax;
    assert!((got.amax - want.amax).abs() <= margin, "{case:?}: expected amax {}, found {}", want.amax, got.amax);
}

/// Checks integer operands. Without GELU, the result must match bit for bit.
fn check(case: Case) {
    let inputs = Inputs::integers(case.shape);
    let got = run(case, &inputs);
    let want = reference(case, &inputs, &got.second);
    let is_f32 = case.gemm.epilogue == Fp8Epilogue::AccumulateF32;
    let nearest = |x: f64| if is_f32 { x as f32 } else { bf16::nearest(x as f32) };
    let exactly = |name: &str, got: &[f64], want: &[f64]| {
        let nearest: Vec<_> = want.iter().map(|&x| f64::from(nearest(x))).collect();
        assert_close(&format!("{case:?}, {name}"), got, &nearest, 0.0, 0.0);
    };
    if case.gemm.epilogue.is_fp8() {
        assert_quantized(case, &got, &want, bf16::ROUNDING);
    } else if matches!(case.gemm.epilogue, Fp8Epilogue::BiasGelu | Fp8Epilogue::GeluBackward) {
        assert_close(&format!("{case:?}, out"), &got.out, &want.out, bf16::ROUNDING, 1e-30);
    } else {
        exactly("out", &got.out, &want.out);
    }
    exactly("second", &got.second, &want.second);
}

/// Returns all GEMMs: both formats and both modes of each epilogue.
fn gemms() -> Vec<Fp8Gemm> {
    let shape = GemmShape { m: 16, n: 16, k: 16 };
    let of = |epilogue| {
        [Fp8Format::E4m3, Fp8Format::E5m2]
            .into_iter()
            .flat_map(move |a| [false, true].map(|exact| Fp8Gemm { a, epilogue, exact }))
    };
    EPILOGUES.into_iter().flat_map(of).filter(|gemm| gemm.is_supported(shape)).collect()
}

/// Returns all supported configurations with split-K up to 3.
fn configs(gemm: Fp8Gemm, shape: GemmShape) -> Vec<TileConfig> {
    let all = TileShape::ALL.into_iter().flat_map(|tile| (1..=3).map(move |split_k| TileConfig { tile, split_k }));
    all.filter(|config| gemm.supports(shape, *config)).collect()
}

fn check_all(m: usize, n: usize, k: usize, blocks: usize, select: impl Fn(Fp8Gemm) -> bool) {
    for gemm in gemms().into_iter().filter(|gemm| select(*gemm)) {
        let shape = GemmShape { m, n: if gemm.epilogue.is_fp8() { n.next_multiple_of(16) } else { n }, k };
        for config in configs(gemm, shape) {
            check(Case { gemm, shape, config, blocks });
        }
    }
}

fn smallest_shape_matches_reference() {
    check_all(1, 8, 16, 1, |_| true);
}

fn shapes_around_a_tile_match_reference() {
    let sizes = [(1, 200, 128), (63, 8, 144), (65, 64, 16), (127, 136, 112), (128, 192, 256), (129, 128, 400)];
    for (m, n, k) in sizes {
        check_all(m, n, k, 1, |_| true);
    }
}

/// Covers outputs of 2 x 2 to 3 x 4 tiles. Blocks have odd and even numbers of tiles, some consumers have none, and the
/// pipeline continues from tile to tile.
fn any_grid_size_matches_reference() {
    for blocks in [1, 4, 17] {
        check_all(264, 392, 144, blocks, |gemm| {
            use Fp8Epilogue::{AccumulateF32, BiasResidual, GeluBackward};
            matches!(gemm.epilogue, BiasResidual | GeluBackward | AccumulateF32) && gemm.a == Fp8Format::E4m3
        });
    }
}

/// A pipeline of four or five stages wraps around more than once within a tile.
fn long_k_matches_reference() {
    check_all(65, 400, 1424, 1, |gemm| matches!(gemm.epilogue, Fp8Epilogue::Plain | Fp8Epilogue::BiasGelu));
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = (matrix_rows(), 1..75usize, 1..38usize, select(gemms()), 1..9usize, any::<Index>());
    sizes.prop_map(|(m, n, k, gemm, blocks, which)| {
        let n = if gemm.epilogue.is_fp8() { 16 * n } else { 8 * n };
        let shape = GemmShape { m, n, k: 16 * k };
        Case { gemm, shape, config: *which.get(&configs(gemm, shape)), blocks }
    })
}

/// Checks operands that are not integers, within the rounding of the output.
fn random_shapes_match_reference() {
    for_all(24, (cases(), 0..u32::MAX), |(case, seed)| {
        let inputs = Inputs::fractions(case, seed);
        let got = run(case, &inputs);
        let want = reference(case, &inputs, &got.second);
        let is_f32 = case.gemm.epilogue == Fp8Epilogue::AccumulateF32;
        let (rounding, scale) = if is_f32 { (f32::ROUNDING, 1.0) } else { (bf16::ROUNDING, 1e-3) };
        if case.gemm.epilogue.is_fp8() {
            assert_quantized(case, &got, &want, 1e-3 + bf16::ROUNDING);
        } else {
            assert_close(&format!("{case:?}"), &got.out, &want.out, rounding, scale);
        }
        assert_close(&format!("{case:?}, second"), &got.second, &want.second, rounding, scale);
    });
}

/// NaN affects only the row of a, the column of b or of bias, or the element of aux that it is in.
fn non_finite_elements_do_not_spread() {
    let shape = GemmShape { m: 144, n: 272, k: 144 };
    let GemmShape { n, k, .. } = shape;
    for gemm in gemms() {
        for config in configs(gemm, shape) {
            let case = Case { gemm, shape, config, blocks: 3 };
            let mut inputs = Inputs::integers(shape);
            inputs.a[5 * k + 143] = f64::NAN;
            inputs.b[271 * k] = f64::NAN;
            inputs.bias[100] = f64::NAN;
            inputs.aux[7 * n + 9] = f64::NAN;
            let got = run(case, &inputs);
            assert_eq!(got.amax.is_nan(), gemm.epilogue.is_fp8(), "{case:?}");
            for (i, got) in got.out.iter().enumerate() {
                let (row, column) = (i / n, i % n);
                let in_bias = case.has_bias() && column == 100;
                let in_aux = case.reads_aux() && (row, column) == (7, 9);
                let affected = row == 5 || column == 271 || in_bias || in_aux;
                assert_eq!(got.is_nan(), affected, "{case:?}, {row}, {column}: {got}");
            }
        }
    }
}

/// Covers slices of K of which the last is shorter, with more and with fewer work tiles than blocks.
fn split_k_matches_reference() {
    for gemm in gemms() {
        for tile in TileShape::ALL {
            for (m, n, k, split_k, blocks) in [(136, 200, 2576, 7, 7), (264, 200, 1040, 5, 3)] {
                let case = Case { gemm, shape: GemmShape { m, n, k }, config: TileConfig { tile, split_k }, blocks };
                if gemm.supports(case.shape, case.config) && (gemm.a == Fp8Format::E4m3 || blocks == 3) {
                    check(case);
                }
            }
        }
    }
}

/// The products of FP8 numbers are multiplied by both scales, also where the scales are far apart.
fn scales_multiply_the_sums() {
    let shape = GemmShape { m: 8, n: 8, k: 16 };
    let gemm = Fp8Gemm { a: Fp8Format::E4m3, epilogue: Fp8Epilogue::Plain, exact: false };
    let case = Case { gemm, shape, config: TileConfig { tile: TileShape::T128x128, split_k: 1 }, blocks: 1 };
    let plain = Inputs::integers(shape);
    let unscaled = run(case, &Inputs { scales: [1.0, 1.0], ..plain.clone() }).out;
    for exponents in [(-20, 3), (60, -40), (-3, -1)] {
        let scales = [exponents.0, exponents.1].map(|exponent| 2f32.powi(exponent));
        let factor = f64::from(scales[0]) * f64::from(scales[1]);
        let want: Vec<_> = unscaled.iter().map(|x| factor * x).collect();
        assert_close("scaled", &run(case, &Inputs { scales, ..plain.clone() }).out, &want, 0.0, 0.0);
    }
}

/// An FP8 output has the bits that quantization gives the output in bf16 of the same GEMM.
fn fp8_outputs_have_the_bits_of_separate_quantization() {
    let shape = GemmShape { m: 130, n: 208, k: 144 };
    for gemm in gemms().into_iter().filter(|gemm| gemm.epilogue.is_fp8()) {
        let in_bf16 = match gemm.epilogue {
            Fp8Epilogue::BiasGeluFp8 => Fp8Epilogue::BiasGelu,
            _ => Fp8Epilogue::GeluBackward,
        };
        let case = Case { gemm, shape, config: configs(gemm, shape)[0], blocks: 2 };
        let inputs = Inputs::fractions(case, 5);
        let (got, plain) =
            (run(case, &inputs), run(Case { gemm: Fp8Gemm { epilogue: in_bf16, ..gemm }, ..case }, &inputs));
        let quantized = |x: &f64| {
            let scaled = gpu::quantize::scaled(*x as f32, 1.0 / OUT_SCALE);
            let e4m3 = gemm.epilogue == Fp8Epilogue::BiasGeluFp8 || gemm.a == Fp8Format::E4m3;
            f64::from(if e4m3 { E4m3::from_f32(scaled).to_f32() } else { E5m2::from_f32(scaled).to_f32() })
        };
        assert_eq!(got.out, plain.out.iter().map(quantized).collect::<Vec<_>>(), "{case:?}");
        assert_eq!(got.second, plain.second, "{case:?}");
        let most = plain.out.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        assert_eq!(got.amax.to_bits(), most.to_bits(), "{case:?}");
    }
}

fn infinite_results_become_nan() {
    let shape = GemmShape { m: 16, n: 16, k: 16 };
    for gemm in gemms().into_iter().filter(|gemm| gemm.epilogue.is_fp8()) {
        let case = Case { gemm, shape, config: configs(gemm, shape)[0], blocks: 1 };
        let ones = |len| vec![1.0; len];
        let inputs = Inputs { a: ones(256), b: ones(256), scales: [2f32.powi(70); 2], bias: ones(16), aux: ones(256) };
        let got = run(case, &inputs);
        assert!(got.out.iter().all(|x| x.is_nan()) && !got.amax.is_finite(), "{case:?}: {:?}", got.out);
    }
}

fn unsupported_shapes_are_rejected() {
    let shape = GemmShape { m: 3, n: 8, k: 16 };
    let gemm = Fp8Gemm { a: Fp8Format::E4m3, epilogue: Fp8Epilogue::Bias, exact: false };
    assert!(gemm.is_supported(shape));
    for rejected in [
        GemmShape { n: 12, ..shape },
        GemmShape { k: 24, ..shape },
        GemmShape { m: 0, ..shape },
        GemmShape { m: 1 << 31, ..shape },
    ] {
        assert!(!gemm.is_supported(rejected), "{rejected:?}");
    }
    assert!(!Fp8Gemm { a: Fp8Format::E5m2, ..gemm }.is_supported(shape));
    let large = TileConfig { tile: TileShape::T128x256, split_k: 1 };
    assert!(gemm.supports(shape, large) && !Fp8Gemm { exact: true, ..gemm }.supports(shape, large));
    assert!(!gemm.supports(GemmShape { k: 4096, ..shape }, TileConfig { split_k: 2, ..large }));
}

fn candidate_configs_are_supported() {
    for (m, n, k) in [(2304, 768, 65536), (768, 768, 65536), (65536, 3072, 768), (50304, 768, 128)] {
        let shape = GemmShape { m, n, k };
        for gemm in gemms() {
            for scratch_len in [0, 1 << 24] {
                let candidates = gemm.candidate_configs(shape, 132, scratch_len);
                assert!(!candidates.is_empty());
                let fits = |config: &TileConfig| gemm.scratch_len(shape, *config) <= scratch_len;
                assert!(candidates.iter().all(|config| gemm.supports(shape, *config) && fits(config)));
            }
        }
    }
}
