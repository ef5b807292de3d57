//! The `sm_90a` GEMM kernels with a SwiGLU epilogue compared with an f64 reference.

use crate::common::{
    Tolerance, assert_close, entries, for_all, integers, matrix_rows, multiples_of_8, noise, product, rounded, wide,
};
use cuda_std::emulate::Memory;
use cuda_std::hopper::TensorMap;
use cuda_std::{Element, Global, GlobalMut, bf16};
use gpu::launch::Extents;
use gpu::matmul::launch::{self, Batch, GemmOp, GemmShape, KernelOperands, Map, Scale, TileConfig, TileShape};
use gpu::swiglu::{self, swiglu_forward};
use proptest::arbitrary::any;
use proptest::sample::{Index, select};
use proptest::strategy::Strategy;

tests! {
    kernels of "matmul/swiglu.rs";
    once: shapes_around_a_tile_match_reference, any_grid_size_matches_reference, long_k_matches_reference,
        several_tile_groups_match_reference, random_shapes_match_reference, rows_of_a_are_independent,
        non_finite_elements_do_not_spread, swiglu_is_accurate_over_its_whole_range,
        recomputed_activations_have_the_same_bits, only_pingpong_tiles_are_supported;
}

const FORWARD: GemmOp = GemmOp::ABtSwiGlu;
const BACKWARD: GemmOp = GemmOp::ABSwiGluBackward;
const RECOMPUTE: GemmOp = GemmOp::ABSwiGluBackwardAndSwiGlu;

/// A GEMM, its tile configuration, and the number of thread blocks. The activation is (m, f).
#[derive(Clone, Copy, Debug)]
struct Case {
    op: GemmOp,
    m: usize,
    f: usize,
    k: usize,
    tile: TileShape,
    blocks: usize,
}

impl Case {
    fn shape(self) -> GemmShape {
        let columns = if self.op == FORWARD { 2 * self.f } else { self.f };
        GemmShape { m: self.m, n: columns, k: self.k }
    }

    fn config(self) -> TileConfig {
        TileConfig { tile: self.tile, split_k: 1 }
    }
}

/// Operands, exact in bf16. b is (2 f, k) in the forward pass and (k, f) in the backward pass.
#[derive(Clone)]
struct Inputs {
    a: Vec<f64>,
    b: Vec<f64>,
    /// (m, 2 f): columns of up, then of gate. Unused in the forward pass.
    aux: Vec<f64>,
}

impl Inputs {
    fn integers(case: Case) -> Self {
        let shape = case.shape();
        let small = |len, seed| integers(len, seed).iter().map(|x| x / 4.0).collect();
        Self { a: small(case.m * case.k, 1), b: small(shape.n * case.k, 2), aux: Self::aux(case, 3) }
    }

    fn fractions(case: Case, seed: u32) -> Self {
        let shape = case.shape();
        let scale = 6.0 / (case.k as f64).sqrt();
        let b: Vec<_> = noise(shape.n * case.k, seed ^ 1).iter().map(|x| x * scale).collect();
        let exact = |values: &[f64]| wide(&rounded::<bf16>(values));
        Self { a: exact(&noise(case.m * case.k, seed)), b: exact(&b), aux: Self::aux(case, seed ^ 2) }
    }

    fn aux(case: Case, seed: u32) -> Vec<f64> {
        let values: Vec<_> = noise(case.m * 2 * case.f, seed).iter().map(|x| 6.0 * x).collect();
        wide(&rounded::<bf16>(&values))
    }
}

/// `second` is the preactivation in the forward pass, and the recomputed activation in the backward pass.
struct Outputs {
    out: Vec<f64>,
    second: Vec<f64>,
}

fn run(case: Case, inputs: &Inputs) -> Outputs {
    let Case { op, m, f, .. } = case;
    let mut memory = Memory::new();
    let a = memory.input("a", &rounded::<bf16>(&inputs.a));
    let b = memory.input("b", &rounded::<bf16>(&inputs.b));
    let aux = memory.input("aux", &rounded::<bf16>(&inputs.aux));
    let (out_len, second_len) = if op == FORWARD { (m * f, 2 * m * f) } else { (2 * m * f, m * f) };
    let out = memory.output::<bf16>("out", out_len);
    let second = if op == BACKWARD { out } else { memory.output::<bf16>("second", second_len) };
    let maps = launch::maps(op, case.shape(), Batch::ONE, case.tile);
    let mut map = |name: &str, base: Global<bf16>, Map { extents, tile }: Map| {
        let map = match extents {
            Extents::Matrix([rows, columns]) => TensorMap::emulated(base, rows, columns, 2 * columns, tile.0, tile.1),
            Extents::Matrices(extents) => TensorMap::emulated_3d(base, extents, tile),
            Extents::Batch(..) => panic!("expected matrices, found {extents:?}"),
            Extents::Interleaved(extents) => TensorMap::emulated_interleaved(base, extents, tile),
        };
        memory.input(name, &[map])
    };
    let operands = KernelOperands {
        a: map("map of a", a, maps.a),
        b: map("map of b", b, maps.b),
        out: map("map of out", out.reader(), maps.out),
        aux: map("map of aux", aux, maps.aux),
        second: map("map of second", second.reader(), maps.second),
        bias: GlobalMut::from_address(0),
        out_address: out.pointer().addr() as u64,
        scratch: GlobalMut::from_address(0),
        scratch_len: 0,
        scale: Scale::ONE,
        count: 1,
    };
    for kernel in launch::launches(op, case.shape(), case.config(), operands, case.blocks) {
        entries::launched(&kernel.launch);
        if let Err(report) = kernel.launch.emulate_checked(&mut memory, kernel.grid, kernel.shared_bytes) {
            panic!("{case:?}: {report}");
        }
    }
    let second = if op == BACKWARD { Vec::new() } else { wide(&memory.read(second)) };
    Outputs { out: wide(&memory.read(out)), second }
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Computes the derivative of [`silu`] by the quotient rule.
fn silu_slope(x: f64) -> f64 {
    // e^x keeps its digits where x is small, and 1 is lost where it is large.
    if x > 40.0 {
        return 1.0;
    }
    let e = x.exp();
    e * (1.0 + e + x) / (1.0 + e).powi(2)
}

/// Returns the elements (`i`, `j`) of up and gate in a preactivation.
fn pair(case: Case, preactivation: &[f64], i: usize, j: usize) -> [f64; 2] {
    [0, 1].map(|half| preactivation[(2 * i + half) * case.f + j])
}

fn activations(case: Case, preactivation: &[f64]) -> Vec<f64> {
    let at = |i: usize| pair(case, preactivation, i / case.f, i % case.f);
    (0..case.m * case.f).map(at).map(|[up, gate]| up * silu(gate)).collect()
}

/// Computes unrounded outputs. In the forward pass, out is the activation of `stored`, the kernel's preactivation.
fn reference(case: Case, inputs: &Inputs, stored: &[f64]) -> Outputs {
    let Case { op, m, f, k, .. } = case;
    let columns = case.shape().n;
    let b = |l: usize, j: usize| if op == FORWARD { inputs.b[j * k + l] } else { inputs.b[l * f + j] };
    let sums = product([m, columns, k], |i, l| inputs.a[i * k + l], b);
    if op == FORWARD {
        return Outputs { out: activations(case, stored), second: sums };
    }
    let mut out = vec![0.0; 2 * m * f];
    for (i, &gradient) in sums.iter().enumerate() {
        let (i, j) = (i / f, i % f);
        let [up, gate] = pair(case, &inputs.aux, i, j);
        out[2 * i * f + j] = gradient * silu(gate);
        out[(2 * i + 1) * f + j] = gradient * up * silu_slope(gate);
    }
    Outputs { out, second: if op == RECOMPUTE { activations(case, &inputs.aux) } else { Vec::new() } }
}

/// Checks operands whose sums are exact in f32. The preactivation must match bit for bit.
fn check(case: Case) {
    let inputs = Inputs::integers(case);
    let got = run(case, &inputs);
    let want = reference(case, &inputs, &got.second);
    let bits = bf16::ROUNDING;
    assert_close(&format!("{case:?}, out"), &got.out, &want.out, bits, 1e-3);
    let nearest: Vec<_> = want.second.iter().map(|&x| f64::from(bf16::nearest(x as f32))).collect();
    let bits = if case.op == FORWARD { 0.0 } else { bits };
    assert_close(&format!("{case:?}, second"), &got.second, &nearest, bits, 1e-3);
}

fn tiles(op: GemmOp) -> Vec<TileShape> {
    let supported =
        |tile: &TileShape| TileConfig { tile: *tile, split_k: 1 }.is_supported(op, GemmShape { m: 128, n: 256, k: 64 });
    TileShape::ALL.into_iter().filter(supported).collect()
}

fn check_all(m: usize, f: usize, k: usize, blocks: usize) {
    for op in [FORWARD, BACKWARD, RECOMPUTE] {
        for tile in tiles(op) {
            check(Case { op, m, f, k, tile, blocks });
        }
    }
}

fn shapes_around_a_tile_match_reference() {
    let sizes = [
        (1, 8, 8),
        (63, 64, 72),
        (64, 40, 64),
        (65, 96, 8),
        (127, 136, 56),
        (128, 192, 128),
        (129, 104, 200),
        (130, 256, 64),
    ];
    for (m, f, k) in sizes {
        check_all(m, f, k, 1);
    }
}

/// Blocks have odd and even numbers of tiles, some consumers have none, and slots continue from tile to tile.
fn any_grid_size_matches_reference() {
    for blocks in [1, 4, 17] {
        check_all(264, 392, 136, blocks);
    }
}

/// A pipeline of four or five stages wraps around more than once within a tile.
fn long_k_matches_reference() {
    check_all(65, 200, 712, 1);
}

/// Covers a full group of 16 rows of tiles followed by a smaller group.
fn several_tile_groups_match_reference() {
    for op in [FORWARD, RECOMPUTE] {
        check(Case { op, m: 2200, f: 136, k: 8, tile: TileShape::T128x128, blocks: 5 });
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = (
        matrix_rows(),
        multiples_of_8(400),
        multiples_of_8(300),
        select(vec![FORWARD, BACKWARD, RECOMPUTE]),
        1..9usize,
    );
    (sizes, any::<Index>()).prop_map(|((m, f, k, op, blocks), which)| {
        let tile = *which.get(&tiles(op));
        Case { op, m, f, k, tile, blocks }
    })
}

fn random_shapes_match_reference() {
    for_all(24, (cases(), 0..u32::MAX), |(case, seed)| {
        let inputs = Inputs::fractions(case, seed);
        let got = run(case, &inputs);
        let want = reference(case, &inputs, &got.second);
        assert_close(&format!("{case:?}"), &got.out, &want.out, bf16::ROUNDING, 1e-2);
        assert_close(&format!("{case:?}, second"), &got.second, &want.second, bf16::ROUNDING, 1e-2);
    });
}

/// Reversing the rows of a and of aux reverses the rows of the outputs bit for bit.
fn rows_of_a_are_independent() {
    for_all(6, (cases(), 0..u32::MAX), |(case, seed)| {
        let reversed_rows = |values: &[f64]| {
            let columns = (values.len() / case.m).max(1);
            values.rchunks(columns).flatten().copied().collect::<Vec<_>>()
        };
        let straight = Inputs::fractions(case, seed);
        let reversed = Inputs { a: reversed_rows(&straight.a), aux: reversed_rows(&straight.aux), ..straight.clone() };
        let (want, got) = (run(case, &straight), run(case, &reversed));
        assert_close(&format!("{case:?}"), &got.out, &reversed_rows(&want.out), 0.0, 0.0);
        assert_close(&format!("{case:?}, second"), &got.second, &reversed_rows(&want.second), 0.0, 0.0);
    });
}

/// NaN and infinity affect only the row of a, the column of b, or the element of aux that they are in.
fn non_finite_elements_do_not_spread() {
    let (m, f, k) = (144, 136, 72);
    for tile in tiles(FORWARD) {
        let case = Case { op: FORWARD, m, f, k, tile, blocks: 3 };
        let mut inputs = Inputs::integers(case);
        inputs.a[5 * k + 71] = f64::NAN;
        // Row 135 of up, row 63 of gate.
        inputs.b[135 * k + 64] = f64::NAN;
        inputs.b[(f + 63) * k + 1] = f64::NAN;
        let got = run(case, &inputs);
        for (i, got) in got.second.iter().enumerate() {
            let affected = i / (2 * f) == 5 || [135, f + 63].contains(&(i % (2 * f)));
            assert_eq!(got.is_nan(), affected, "{case:?}, {i}: {got}");
        }
        for (i, got) in got.out.iter().enumerate() {
            assert_eq!(got.is_nan(), i / f == 5 || [135, 63].contains(&(i % f)), "{case:?}, {i}: {got}");
        }
    }
    for tile in tiles(RECOMPUTE) {
        let case = Case { op: RECOMPUTE, m, f, k, tile, blocks: 3 };
        let mut inputs = Inputs::integers(case);
        inputs.a[5 * k + 71] = f64::NAN;
        inputs.b[64 * f + 135] = f64::INFINITY;
        // (7, 9) of up, (7, 130) of gate.
        inputs.aux[14 * f + 9] = f64::NAN;
        inputs.aux[15 * f + 130] = f64::NAN;
        let got = run(case, &inputs);
        for (i, value) in got.out.iter().enumerate() {
            let (row, half, column) = (i / (2 * f), i / f % 2, i % f);
            let in_aux = row == 7 && (column == 130 || (column == 9 && half == 1));
            assert_eq!(!value.is_finite(), row == 5 || column == 135 || in_aux, "{case:?}, {i}: {value}");
        }
        for (i, value) in got.second.iter().enumerate() {
            assert_eq!(value.is_nan(), i / f == 7 && [9, 130].contains(&(i % f)), "{case:?}, {i}: {value}");
        }
    }
}

/// Checks gates on -80..80 and at ±3e38, relative to each value: from where SiLU vanishes to where it is the identity.
fn swiglu_is_accurate_over_its_whole_range() {
    let (m, f) = (8, 256);
    let value = |i: usize| {
        let x = (i as f64 - 1024.0) / 12.8;
        if i == 0 || i == m * f - 1 { x.signum() * 3e38 } else { x }
    };
    let points = wide(&rounded::<bf16>(&(0..m * f).map(value).collect::<Vec<_>>()));
    for tile in tiles(RECOMPUTE) {
        // Each element of a · b is 1, and so is up.
        let case = Case { op: RECOMPUTE, m, f, k: 8, tile, blocks: 1 };
        let mut inputs = Inputs { a: vec![0.125; m * 8], b: vec![1.0; f * 8], aux: vec![1.0; 2 * m * f] };
        for (i, &gate) in points.iter().enumerate() {
            inputs.aux[(2 * (i / f) + 1) * f + i % f] = gate;
        }
        let (got, want) = (run(case, &inputs), reference(case, &inputs, &[]));
        // Where the derivative crosses zero, its error is relative to 1.
        let near_zero = |x: f64| (x + 1.278).abs() < 0.1;
        for (i, (&got, want)) in got.out.iter().zip(want.out).enumerate() {
            let [_, gate] = pair(case, &inputs.aux, i / (2 * f), i % f);
            let scale = if near_zero(gate) { 1e-2 } else { 1e-30 };
            assert_close(&format!("gradient at {gate}"), &[got], &[want], bf16::ROUNDING, scale);
        }
        assert_close("silu", &got.second, &want.second, bf16::ROUNDING, 1e-30);
    }
}

/// The activation has the bits of the elementwise kernel in the forward pass and, for all bf16 values of gate, where it is
/// recomputed. The gradients do not depend on whether it is.
fn recomputed_activations_have_the_same_bits() {
    let elementwise = |case: Case, preactivation: &[f64]| {
        let mut memory = Memory::new();
        let x = memory.input("x", &rounded::<bf16>(preactivation));
        let n = case.m * case.f;
        let y = memory.output("y", n);
        let launch = swiglu_forward(y, x, n as u64, case.f as u32);
        launch.emulate_checked(&mut memory, [swiglu::grid::<bf16>(n), 1, 1], 0).unwrap();
        wide(&memory.read(y))
    };
    let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let (m, f, k) = (128, 512, 72);
    for tile in tiles(FORWARD) {
        let case = Case { op: FORWARD, m, f, k, tile, blocks: 2 };
        let got = run(case, &Inputs::fractions(case, 7));
        assert_eq!(bits(&got.out), bits(&elementwise(case, &got.second)), "{tile:?}");
        let case = Case { op: RECOMPUTE, ..case };
        let mut inputs = Inputs::fractions(case, 7);
        for i in 0..m * f {
            inputs.aux[(2 * (i / f) + 1) * f + i % f] = f64::from(bf16::from_bits(i as u16).to_f32());
        }
        let got = run(case, &inputs);
        assert_eq!(bits(&got.second), bits(&elementwise(case, &inputs.aux)), "{tile:?}");
        let alone = run(Case { op: BACKWARD, ..case }, &inputs);
        assert_eq!(bits(&got.out), bits(&alone.out), "{tile:?}");
    }
}

fn only_pingpong_tiles_are_supported() {
    for op in [FORWARD, BACKWARD, RECOMPUTE] {
        assert_eq!(tiles(op), [TileShape::T128x128, TileShape::T128x192]);
    }
}
