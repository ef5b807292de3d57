//! The `sm_90a` GEMM kernels compared with an f64 reference.

use crate::common::{
    Tolerance, assert_close, entries, for_all, integers, matrix_rows, multiples_of_8, noise, product, rounded, wide,
};
use cuda_std::emulate::Memory;
use cuda_std::hopper::TensorMap;
use cuda_std::{Element, GlobalMut};
use cuda_std::{Global, bf16};
use gpu::gelu::{self, gelu_forward};
use gpu::launch::Extents;
use gpu::matmul::launch::{
    self, Batch, GemmOp, GemmShape, KernelOperands, Map, Scale, TileConfig, TileShape, candidate_configs,
};
use proptest::arbitrary::any;
use proptest::sample::{Index, select};
use proptest::strategy::Strategy;

tests! {
    kernels of "matmul/kernel.rs", "matmul/split_k.rs";
    once: smallest_shape_matches_reference, shapes_around_a_tile_match_reference, any_grid_size_matches_reference,
        several_tile_groups_match_reference, long_k_matches_reference, random_shapes_match_reference,
        rows_of_a_are_independent, non_finite_elements_do_not_spread, gelu_is_accurate_over_its_whole_range,
        relu_squared_is_exact_over_its_whole_range, gelu_beside_its_backward_has_the_same_bits, unsupported_shapes_are_rejected, split_k_matches_reference,
        candidate_configs_are_supported_and_fill_the_gpu;
}

/// All operations but those of SwiGLU, which `matmul_swiglu.rs` tests.
const OPS: [GemmOp; 14] = [
    GemmOp::ABt,
    GemmOp::ABtBias,
    GemmOp::ABtBiasResidual,
    GemmOp::ABtBiasGelu,
    GemmOp::ABtResidual,
    GemmOp::ABtReluSquared,
    GemmOp::AB,
    GemmOp::ABGeluBackward,
    GemmOp::ABGeluBackwardAndGelu,
    GemmOp::ABReluSquaredBackward,
    GemmOp::ABReluSquaredBackwardAndReluSquared,
    GemmOp::AtBAccumulate,
    GemmOp::AtBAccumulateColumnSums,
    GemmOp::AtBAccumulateF32,
];

const BACKWARD: [GemmOp; 4] = [
    GemmOp::ABGeluBackward,
    GemmOp::ABGeluBackwardAndGelu,
    GemmOp::ABReluSquaredBackward,
    GemmOp::ABReluSquaredBackwardAndReluSquared,
];

/// Returns true for a weight gradient.
fn accumulates(op: GemmOp) -> bool {
    matches!(op, GemmOp::AtBAccumulate | GemmOp::AtBAccumulateColumnSums | GemmOp::AtBAccumulateF32)
}

/// A GEMM, its tile configuration, and the number of thread blocks.
#[derive(Clone, Copy, Debug)]
struct Case {
    op: GemmOp,
    m: usize,
    n: usize,
    k: usize,
    config: TileConfig,
    blocks: usize,
}

impl Case {
    fn shape(self) -> GemmShape {
        GemmShape { m: self.m, n: self.n, k: self.k }
    }

    /// Returns the offset of element (`i`, `l`) of a (M, K).
    fn offset_in_a(self, i: usize, l: usize) -> usize {
        if accumulates(self.op) { l * self.m + i } else { i * self.k + l }
    }

    /// Returns the offset of element (`l`, `j`) of b (K, N).
    fn offset_in_b(self, l: usize, j: usize) -> usize {
        match self.op {
            op if accumulates(op) => l * self.n + j,
            op if op == GemmOp::AB || BACKWARD.contains(&op) => l * self.n + j,
            _ => j * self.k + l,
        }
    }

    fn reads_aux(self) -> bool {
        matches!(self.op, GemmOp::ABtBiasResidual | GemmOp::ABtResidual) || BACKWARD.contains(&self.op)
    }

    fn has_second(self) -> bool {
        matches!(
            self.op,
            GemmOp::ABtBiasGelu
                | GemmOp::ABGeluBackwardAndGelu
                | GemmOp::ABtReluSquared
                | GemmOp::ABReluSquaredBackwardAndReluSquared
        )
    }

    fn has_bias(self) -> bool {
        matches!(self.op, GemmOp::ABtBias | GemmOp::ABtBiasResidual | GemmOp::ABtBiasGelu)
    }

    /// Returns the elements of the bias, or of its gradient.
    fn bias_len(self) -> usize {
        if self.op == GemmOp::AtBAccumulateColumnSums { self.m } else { self.n }
    }

    /// Rounds `value` to the element type of out.
    fn nearest(self, value: f64) -> f64 {
        if self.op == GemmOp::AtBAccumulateF32 {
            f64::from(value as f32)
        } else {
            f64::from(bf16::nearest(value as f32))
        }
    }

    /// Returns the relative error allowed in out.
    fn rounding(self) -> f64 {
        if self.op == GemmOp::AtBAccumulateF32 { f32::ROUNDING } else { bf16::ROUNDING }
    }
}

/// Operands, laid out as the [`GemmOp`] requires. All values are exact in bf16.
#[derive(Clone)]
struct Inputs {
    a: Vec<f64>,
    b: Vec<f64>,
    bias: Vec<f64>,
    aux: Vec<f64>,
}

impl Inputs {
    fn integers(case: Case) -> Self {
        let Case { m, n, k, .. } = case;
        let aux = noise(m * n, 4).iter().map(|x| 4.0 * x).collect();
        Self { a: integers(m * k, 1), b: integers(n * k, 2), bias: integers(case.bias_len(), 3), aux }.rounded()
    }

    fn fractions(case: Case, seed: u32) -> Self {
        let Case { m, n, k, .. } = case;
        // Results are near 1, where GELU is most curved.
        let b = noise(n * k, seed ^ 1).iter().map(|x| x * 3.0 / (k as f64).sqrt()).collect();
        let aux = noise(m * n, seed ^ 3).iter().map(|x| 4.0 * x).collect();
        Self { a: noise(m * k, seed), b, bias: noise(case.bias_len(), seed ^ 2), aux }.rounded()
    }

    fn rounded(self) -> Self {
        let exact = |values: Vec<f64>| wide(&rounded::<bf16>(&values));
        Self { a: exact(self.a), b: exact(self.b), bias: exact(self.bias), aux: exact(self.aux) }
    }
}

/// The outputs of a kernel or of the reference. `second` is empty if the GEMM has no second output.
struct Outputs {
    out: Vec<f64>,
    second: Vec<f64>,
    bias: Vec<f64>,
}

fn run(case: Case, inputs: &Inputs) -> Outputs {
    if case.op == GemmOp::AtBAccumulateF32 { run_to::<f32>(case, inputs) } else { run_to::<bf16>(case, inputs) }
}

/// Runs the kernels in the emulator with an output of element type `O`.
fn run_to<O: Tolerance>(case: Case, inputs: &Inputs) -> Outputs {
    let mut memory = Memory::new();
    let mut input = |name: &str, values: &[f64]| memory.input(name, &rounded::<bf16>(values));
    let (a, b) = (input("a", &inputs.a), input("b", &inputs.b));
    let bias = memory.buffer("bias", &rounded::<bf16>(&inputs.bias));
    let len = case.m * case.n;
    // A weight gradient accumulates into aux.
    let out =
        if accumulates(case.op) { memory.buffer("out", &rounded::<O>(&inputs.aux)) } else { memory.output("out", len) };
    let as_bf16 = GlobalMut::<bf16>::new(out.pointer().cast());
    let aux = if case.reads_aux() { memory.input("aux", &rounded::<bf16>(&inputs.aux)) } else { as_bf16.reader() };
    let second = if case.has_second() { memory.output("second", len) } else { as_bf16 };
    let scratch_len = case.config.scratch_len(case.op, case.shape());
    let scratch = if scratch_len > 0 { memory.output("scratch", scratch_len) } else { GlobalMut::from_address(0) };
    let maps = launch::maps(case.op, case.shape(), Batch::ONE, case.config.tile);
    let mut map = |name: &str, base: Global<bf16>, Map { extents, tile }: Map| {
        let Extents::Matrix([rows, columns]) = extents else { panic!("expected a matrix, found {extents:?}") };
        memory.input(name, &[TensorMap::emulated(base, rows, columns, 2 * columns, tile.0, tile.1)])
    };
    let operands = KernelOperands {
        a: map("map of a", a, maps.a),
        b: map("map of b", b, maps.b),
        out: map("map of out", as_bf16.reader(), maps.out),
        aux: map("map of aux", aux, maps.aux),
        second: map("map of second", second.reader(), maps.second),
        bias,
        out_address: out.pointer().addr() as u64,
        scratch,
        scratch_len,
        scale: Scale::ONE,
        count: 1,
    };
    for kernel in launch::launches(case.op, case.shape(), case.config, operands, case.blocks) {
        entries::launched(&kernel.launch);
        if let Err(report) = kernel.launch.emulate_checked(&mut memory, kernel.grid, kernel.shared_bytes) {
            panic!("{case:?}: {report}");
        }
    }
    let out = wide(&memory.read(out));
    let second = if case.has_second() { wide(&memory.read(second)) } else { Vec::new() };
    Outputs { out, second, bias: wide(&memory.read(bias)) }
}

/// Computes GELU as x · sigmoid(…), which stays accurate where x (1 + tanh …) / 2 cancels.
fn gelu(x: f64) -> f64 {
    x * sigmoid(x)
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-2.0 * scale() * (x + 0.044715 * x * x * x)).exp())
}

fn scale() -> f64 {
    (2.0 / std::f64::consts::PI).sqrt()
}

fn gelu_slope(x: f64) -> f64 {
    let s = sigmoid(x);
    s + 2.0 * x * s * (1.0 - s) * scale() * (1.0 + 3.0 * 0.044715 * x * x)
}

fn relu_squared(x: f64) -> f64 {
    if x > 0.0 { x * x } else { x * 0.0 }
}

/// Computes unrounded outputs. For a GELU or ReLU² epilogue, out is the activation of `stored`, the kernel's rounded second
/// output.
fn reference(case: Case, inputs: &Inputs, stored: &[f64]) -> Outputs {
    let Case { m, n, k, .. } = case;
    let (a, b) = (|i, l| inputs.a[case.offset_in_a(i, l)], |l, j| inputs.b[case.offset_in_b(l, j)]);
    let mut sums = product([m, n, k], a, b);
    if case.has_bias() {
        sums.iter_mut().zip(inputs.bias.iter().cycle()).for_each(|(sum, bias)| *sum += bias);
    }
    let mut bias = inputs.bias.clone();
    if case.op == GemmOp::AtBAccumulateColumnSums {
        let column_sum = |i: usize| (0..k).map(|l| inputs.a[case.offset_in_a(i, l)]).sum::<f64>();
        bias.iter_mut().enumerate().for_each(|(i, bias)| *bias += column_sum(i));
    }
    let with_aux = |f: fn(f64, f64) -> f64| sums.iter().zip(&inputs.aux).map(|(&sum, &aux)| f(sum, aux)).collect();
    let backward = |sum, aux| sum * gelu_slope(aux);
    let relu_backward = |sum, aux: f64| sum * if aux < 0.0 { 0.0 } else { 2.0 * aux };
    let (out, second) = match case.op {
        GemmOp::ABtBiasGelu => (stored.iter().map(|&x| gelu(x)).collect(), sums),
        GemmOp::ABGeluBackward => (with_aux(backward), Vec::new()),
        GemmOp::ABGeluBackwardAndGelu => (with_aux(backward), with_aux(|_, aux| gelu(aux))),
        GemmOp::ABtReluSquared => (stored.iter().map(|&x| relu_squared(x)).collect(), sums),
        GemmOp::ABReluSquaredBackward => (with_aux(relu_backward), Vec::new()),
        GemmOp::ABReluSquaredBackwardAndReluSquared => (with_aux(relu_backward), with_aux(|_, aux| relu_squared(aux))),
        op if accumulates(op) || [GemmOp::ABtBiasResidual, GemmOp::ABtResidual].contains(&op) => {
            (with_aux(|sum, aux| sum + aux), Vec::new())
        }
        _ => (sums, Vec::new()),
    };
    Outputs { out, second, bias }
}

/// Checks integer operands, whose sums are exact in f32. Without GELU or a product with aux, the result must match bit for
/// bit.
fn check(case: Case) {
    let inputs = Inputs::integers(case);
    let got = run(case, &inputs);
    let want = reference(case, &inputs, &got.second);
    let exactly = |name: &str, got: &[f64], want: &[f64]| {
        let nearest: Vec<_> = want.iter().map(|&x| case.nearest(x)).collect();
        assert_close(&format!("{case:?}, {name}"), got, &nearest, 0.0, 0.0);
    };
    let closely = |name: &str, got: &[f64], want: &[f64]| {
        assert_close(&format!("{case:?}, {name}"), got, want, bf16::ROUNDING, 1e-30);
    };
    assert_close(&format!("{case:?}, bias"), &got.bias, &wide(&rounded::<bf16>(&want.bias)), 0.0, 0.0);
    match case.op {
        GemmOp::ABtBiasGelu => {
            closely("out", &got.out, &want.out);
            exactly("second", &got.second, &want.second);
        }
        op if BACKWARD.contains(&op) => {
            closely("out", &got.out, &want.out);
            closely("second", &got.second, &want.second);
        }
        _ => {
            exactly("out", &got.out, &want.out);
            exactly("second", &got.second, &want.second);
        }
    }
}

/// Returns all supported configurations with split-K up to 3.
fn configs(op: GemmOp, shape: GemmShape) -> Vec<TileConfig> {
    let all = TileShape::ALL.into_iter().flat_map(|tile| (1..=3).map(move |split_k| TileConfig { tile, split_k }));
    all.filter(|config| config.is_supported(op, shape)).collect()
}

fn check_all(ops: &[GemmOp], m: usize, n: usize, k: usize, blocks: usize) {
    for &op in ops {
        // TMA requires rows of a (K, M) to be multiples of 16 bytes.
        let m = if accumulates(op) { m.next_multiple_of(8) } else { m };
        for config in configs(op, GemmShape { m, n, k }) {
            check(Case { op, m, n, k, config, blocks });
        }
    }
}

fn smallest_shape_matches_reference() {
    check_all(&OPS, 1, 8, 8, 1);
}

fn shapes_around_a_tile_match_reference() {
    let sizes = [(1, 200, 64), (63, 8, 72), (65, 64, 8), (127, 136, 56), (128, 192, 128), (129, 128, 200)];
    for (m, n, k) in sizes {
        check_all(&OPS, m, n, k, 1);
    }
}

/// Covers outputs of 2 x 2 to 3 x 4 tiles. Blocks have odd and even numbers of tiles, some consumers have none, and the
/// pipeline continues from tile to tile.
fn any_grid_size_matches_reference() {
    for blocks in [1, 4, 17] {
        let ops = [
            GemmOp::ABtBiasResidual,
            GemmOp::ABtReluSquared,
            GemmOp::ABReluSquaredBackward,
            GemmOp::ABGeluBackward,
            GemmOp::ABGeluBackwardAndGelu,
            GemmOp::AtBAccumulateColumnSums,
        ];
        check_all(&ops, 264, 392, 72, blocks);
    }
}

/// Covers a full group of 16 rows of tiles followed by a smaller group or none, with more than one column of tiles.
fn several_tile_groups_match_reference() {
    for (op, m) in [(GemmOp::ABtBias, 2200), (GemmOp::AB, 2048), (GemmOp::AtBAccumulate, 2200)] {
        check(Case { op, m, n: 264, k: 8, config: TileConfig { tile: TileShape::T128x128, split_k: 1 }, blocks: 5 });
    }
}

/// A pipeline of four or five stages wraps around more than once within a tile.
fn long_k_matches_reference() {
    check_all(&[GemmOp::ABt, GemmOp::ABtBiasGelu, GemmOp::AtBAccumulateColumnSums], 65, 400, 712, 1);
}

fn cases() -> impl Strategy<Value = Case> {
    let ops = select(OPS.to_vec());
    let sizes = (matrix_rows(), multiples_of_8(600), multiples_of_8(300), ops, 1..9usize, any::<Index>());
    sizes.prop_map(|(m, n, k, op, blocks, which)| {
        let m = if accumulates(op) { m.next_multiple_of(8) } else { m };
        let config = *which.get(&configs(op, GemmShape { m, n, k }));
        Case { op, m, n, k, config, blocks }
    })
}

/// Checks operands that are not integers, within the rounding of the output.
fn random_shapes_match_reference() {
    for_all(24, (cases(), 0..u32::MAX), |(case, seed)| {
        let inputs = Inputs::fractions(case, seed);
        let got = run(case, &inputs);
        let want = reference(case, &inputs, &got.second);
        let scale = if case.rounding() == bf16::ROUNDING { 1e-3 } else { 1.0 };
        assert_close(&format!("{case:?}"), &got.out, &want.out, case.rounding(), scale);
        assert_close(&format!("{case:?}, second"), &got.second, &want.second, case.rounding(), scale);
        assert_close(&format!("{case:?}, bias"), &got.bias, &want.bias, bf16::ROUNDING, 1e-2);
    });
}

/// Reversing the rows of a reverses the rows of out bit for bit.
fn rows_of_a_are_independent() {
    for_all(6, (cases(), 0..u32::MAX), |(case, seed)| {
        let Case { m, n, k, .. } = case;
        let straight = Inputs { aux: vec![0.5; m * n], ..Inputs::fractions(case, seed) };
        let reversed_rows =
            |values: &[f64], columns: usize| values.rchunks(columns).flatten().copied().collect::<Vec<_>>();
        let reversed_a = (0..m * k).map(|i| straight.a[case.offset_in_a(m - 1 - i / k, i % k)]);
        let mut reversed = straight.clone();
        reversed_a.enumerate().for_each(|(i, a)| reversed.a[case.offset_in_a(i / k, i % k)] = a);
        let want = reversed_rows(&run(case, &straight).out, n);
        assert_close(&format!("{case:?}"), &run(case, &reversed).out, &want, 0.0, 0.0);
    });
}

/// NaN and infinity affect only the row of a, the column of b or of bias, or the element of aux that they are in.
fn non_finite_elements_do_not_spread() {
    for op in OPS {
        let shape = GemmShape { m: 144, n: 272, k: 72 };
        for config in configs(op, shape) {
            let case = Case { op, m: shape.m, n: shape.n, k: shape.k, config, blocks: 3 };
            let Case { n, .. } = case;
            let mut inputs = Inputs::integers(case);
            inputs.a[case.offset_in_a(5, 71)] = f64::NAN;
            inputs.a[case.offset_in_a(130, 0)] = f64::INFINITY;
            inputs.b[case.offset_in_b(1, 63)] = f64::NEG_INFINITY;
            inputs.b[case.offset_in_b(64, 271)] = f64::NAN;
            inputs.bias[100] = f64::NAN;
            inputs.aux[7 * n + 9] = f64::NAN;
            let got = run(case, &inputs);
            let want = reference(case, &inputs, &got.second);
            // ReLU² is 0 where its argument is -∞.
            let (got, want) =
                if op == GemmOp::ABtReluSquared { (got.second, want.second) } else { (got.out, want.out) };
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let (row, column) = (i / n, i % n);
                let in_bias = case.has_bias() && column == 100;
                let in_aux = (case.reads_aux() || accumulates(op)) && (row, column) == (7, 9);
                let affected = [5, 130].contains(&row) || [63, 271].contains(&column) || in_bias || in_aux;
                assert_eq!(got.is_finite(), !affected, "{case:?}, {row}, {column}: {got}, want {want}");
                if row == 5 || column == 271 || in_bias || in_aux {
                    assert!(got.is_nan(), "{case:?}, {row}, {column}: {got}");
                }
            }
        }
    }
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
    for config in configs(GemmOp::ABtBiasGelu, GemmShape { m: 1, n, k: 8 }) {
        // a is zero, so that second is the bias.
        let case = Case { op: GemmOp::ABtBiasGelu, m: 1, n, k: 8, config, blocks: 1 };
        let inputs = Inputs { a: vec![0.0; 8], b: vec![0.0; n * 8], bias: points.clone(), aux: vec![0.0; n] };
        let Outputs { out, second, .. } = run(case, &inputs);
        assert_close("second", &second, &points, 0.0, 0.0);
        let want: Vec<_> = points.iter().map(|&x| gelu(x)).collect();
        assert_close("gelu", &out, &want, bf16::ROUNDING, 1e-30);

        // Each element of a · b is 1.
        let case = Case { op: GemmOp::ABGeluBackward, ..case };
        let inputs = Inputs { a: vec![0.125; 8], b: vec![1.0; n * 8], bias: vec![0.0; n], aux: points.clone() };
        let Outputs { out, .. } = run(case, &inputs);
        let want: Vec<_> =
            points.iter().map(|&x| if x.abs() > 1e9 { f64::from(x > 0.0) } else { gelu_slope(x) }).collect();
        assert_close("slope", &out, &want, bf16::ROUNDING, 1e-3);
    }
}

/// Checks all bf16 values of a ReLU² argument but NaN and values whose result is not finite.
fn relu_squared_is_exact_over_its_whole_range() {
    let n = 1024;
    let values = (0..=u16::MAX).map(|bits| f64::from(bf16::from_bits(bits).to_f32()));
    let mut points: Vec<f64> = values.filter(|x| x.abs() < 1e19).collect();
    points.resize(points.len().next_multiple_of(n), 0.0);
    let m = points.len() / n;
    for config in configs(GemmOp::ABtReluSquared, GemmShape { m, n, k: 8 }) {
        // Each row of a · b is zero, and each element of the product with aux is 1.
        let case = Case { op: GemmOp::ABReluSquaredBackwardAndReluSquared, m, n, k: 8, config, blocks: 2 };
        let inputs = Inputs { a: vec![0.125; m * 8], b: vec![1.0; n * 8], bias: vec![0.0; n], aux: points.clone() };
        let Outputs { out, second, .. } = run(case, &inputs);
        let nearest = |f: fn(f64) -> f64| points.iter().map(|&x| case.nearest(f(x))).collect::<Vec<_>>();
        assert_close("slope", &out, &nearest(|x| 2.0 * x.max(0.0)), 0.0, 0.0);
        assert_close("relu squared", &second, &nearest(|x| x.max(0.0) * x.max(0.0)), 0.0, 1e-37);
        let alone = run(Case { op: GemmOp::ABReluSquaredBackward, ..case }, &inputs);
        assert_close("alone", &alone.out, &out, 0.0, 0.0);
    }
}

/// Checks all bf16 values of aux. out has the bits of the GEMM without a second output, and second those of the
/// separate GELU kernel.
fn gelu_beside_its_backward_has_the_same_bits() {
    let (m, n, k) = (128, 512, 72);
    let every: Vec<f64> = (0..m * n).map(|i| f64::from(bf16::from_bits(i as u16).to_f32())).collect();
    let mut memory = Memory::new();
    let x = memory.input("x", &rounded::<bf16>(&every));
    let y = memory.output("y", m * n);
    gelu_forward(y, x, every.len() as u64).emulate_checked(&mut memory, [gelu::grid::<bf16>(m * n), 1, 1], 0).unwrap();
    let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for config in configs(GemmOp::ABGeluBackward, GemmShape { m, n, k }) {
        let alone = Case { op: GemmOp::ABGeluBackward, m, n, k, config, blocks: 2 };
        let inputs = Inputs { aux: every.clone(), ..Inputs::fractions(alone, 7) };
        let both = run(Case { op: GemmOp::ABGeluBackwardAndGelu, ..alone }, &inputs);
        assert_eq!(bits(&both.out), bits(&run(alone, &inputs).out), "{config:?}");
        assert_eq!(bits(&both.second), bits(&wide(&memory.read(y))), "{config:?}");
    }
}

fn unsupported_shapes_are_rejected() {
    let shape = GemmShape { m: 3, n: 16, k: 8 };
    assert!(shape.is_supported(GemmOp::ABt) && !shape.is_supported(GemmOp::AtBAccumulate));
    assert!(GemmShape { m: 16, n: 8, k: 3 }.is_supported(GemmOp::AtBAccumulate));
    for rejected in [
        GemmShape { n: 20, ..shape },
        GemmShape { k: 4, ..shape },
        GemmShape { m: 0, ..shape },
        GemmShape { m: 1 << 31, ..shape },
    ] {
        assert!(!rejected.is_supported(GemmOp::AB), "{rejected:?}");
    }
    // Half of the columns are a separate tensor.
    assert!(shape.is_supported(GemmOp::ABtSwiGlu) && !GemmShape { n: 24, ..shape }.is_supported(GemmOp::ABtSwiGlu));
    assert!(GemmShape { n: 24, ..shape }.is_supported(GemmOp::ABSwiGluBackward));
}

/// Covers slices of K of which the last is shorter, with more and with fewer work tiles than blocks.
fn split_k_matches_reference() {
    for tile in TileShape::ALL {
        for (m, n, k, split_k, blocks) in [(136, 200, 1288, 7, 7), (64, 456, 1352, 22, 8), (264, 200, 520, 5, 3)] {
            let case =
                Case { op: GemmOp::AtBAccumulateColumnSums, m, n, k, config: TileConfig { tile, split_k }, blocks };
            assert!(case.config.is_supported(case.op, case.shape()), "{case:?}");
            check(case);
        }
    }
}

/// For the GEMMs of transformers, all candidates are supported and fit in the scratch memory. With a long K, the first
/// candidate keeps the SMs more than 80 % busy.
fn candidate_configs_are_supported_and_fill_the_gpu() {
    const SM_COUNT: usize = 132;
    for (m, n) in [(2304, 768), (768, 768), (3072, 768), (768, 3072), (1600, 1600), (50304, 768)] {
        for k in [1, 64, 65, 1024, 16384, 65536] {
            let shape = GemmShape { m, n, k };
            for op in [GemmOp::AtBAccumulate, GemmOp::AtBAccumulateColumnSums] {
                for scratch_len in [0, 1 << 22, 1 << 24] {
                    let candidates = candidate_configs(op, shape, SM_COUNT, scratch_len);
                    let fits =
                        |config: &TileConfig| config.split_k == 1 || config.scratch_len(op, shape) <= scratch_len;
                    assert!(candidates.iter().all(|config| config.is_supported(op, shape) && fits(config)));
                    assert!(TileShape::ALL.iter().all(|tile| candidates.iter().any(|config| config.tile == *tile)));
                }
            }
            let best = candidate_configs(GemmOp::AtBAccumulate, shape, SM_COUNT, 1 << 24)[0];
            let tiles = m.div_ceil(best.tile.tile_m() as usize) * n.div_ceil(best.tile.tile_n() as usize);
            let work_tiles = tiles * best.split_k;
            let busy = work_tiles as f64 / (work_tiles.next_multiple_of(SM_COUNT)) as f64;
            assert!(k < 16384 || busy > 0.8, "{shape:?} {best:?}: {busy}");
            let of_pingpong_tiles = [
                GemmOp::ABGeluBackward,
                GemmOp::ABGeluBackwardAndGelu,
                GemmOp::ABReluSquaredBackwardAndReluSquared,
                GemmOp::ABtSwiGlu,
                GemmOp::ABSwiGluBackwardAndSwiGlu,
            ];
            for op in of_pingpong_tiles {
                let candidates = candidate_configs(op, shape, SM_COUNT, 1 << 24);
                let pingpong = [TileShape::T128x128, TileShape::T128x192];
                let supported = |config: &TileConfig| config.split_k == 1 && pingpong.contains(&config.tile);
                assert!(candidates.iter().all(supported), "{candidates:?}");
            }
        }
    }
}
