//! The sm_90a matrix products with epilogues against sums in f64.

mod common;

use common::{Tolerance, assert_close, entries, for_all, integers, noise, rounded, wide};
use cuda_std::emulate::Memory;
use cuda_std::hopper::TensorMap;
use cuda_std::{Global, bf16};
use gpu::matmul::launch::{self, Map, Operand, Product, Shape, Width};
use proptest::sample::select;
use proptest::strategy::Strategy;

tests! {
    kernels of "matmul/pingpong.rs";
    once: one_packet, around_a_tile, fewer_and_more_blocks_than_tiles, more_rows_than_a_group, many_steps, any_shape,
        rows_of_a_stay_apart, spoilt_elements, gelu_far_out, shapes_refused;
}

const PRODUCTS: [Product; 5] =
    [Product::ABt, Product::ABtBias, Product::ABtBiasGelu, Product::AB, Product::ABGeluBackward];

/// Blocks of the grid, and what to compute.
#[derive(Clone, Copy, Debug)]
struct Case {
    product: Product,
    m: usize,
    n: usize,
    k: usize,
    width: Width,
    blocks: usize,
}

impl Case {
    fn shape(self) -> Shape {
        Shape { m: self.m, n: self.n, k: self.k }
    }

    fn has_bias(self) -> bool {
        matches!(self.product, Product::ABtBias | Product::ABtBiasGelu)
    }
}

/// b is (N, K) or, for products of b, (K, N). Values must be of bf16.
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
        Self { a: integers(m * k, 1), b: integers(n * k, 2), bias: integers(n, 3), aux }.rounded()
    }

    fn fractions(case: Case, seed: u32) -> Self {
        let Case { m, n, k, .. } = case;
        // Sums near 1, where GELU bends.
        let b = noise(n * k, seed ^ 1).iter().map(|x| x * 3.0 / (k as f64).sqrt()).collect();
        let aux = noise(m * n, seed ^ 3).iter().map(|x| 4.0 * x).collect();
        Self { a: noise(m * k, seed), b, bias: noise(n, seed ^ 2), aux }.rounded()
    }

    fn rounded(self) -> Self {
        let exact = |values: Vec<f64>| wide(&rounded::<bf16>(&values));
        Self { a: exact(self.a), b: exact(self.b), bias: exact(self.bias), aux: exact(self.aux) }
    }
}

/// out, and aux as it is afterwards.
fn run(case: Case, inputs: &Inputs) -> (Vec<f64>, Vec<f64>) {
    let mut memory = Memory::new();
    let mut input = |name: &str, values: &[f64]| memory.input(name, &rounded::<bf16>(values));
    let (a, b, bias) = (input("a", &inputs.a), input("b", &inputs.b), input("bias", &inputs.bias));
    let aux = match case.product {
        Product::ABtBiasGelu => memory.output("aux", case.m * case.n),
        _ => memory.buffer("aux", &rounded::<bf16>(&inputs.aux)),
    };
    let out = memory.output("out", case.m * case.n);
    let [a_map, b_map, out_map] = launch::maps(case.product, case.shape(), case.width);
    let mut map = |name: &str, base: Global<bf16>, Map { extents: [rows, columns], tile }: Map| {
        memory.input(name, &[TensorMap::emulated(base, rows, columns, 2 * columns, tile.0, tile.1)])
    };
    let operands = Operand {
        a: map("map of a", a, a_map),
        b: map("map of b", b, b_map),
        out: map("map of out", out.reader(), out_map),
        aux: map("map of aux", aux.reader(), out_map),
        bias,
    };
    let kernel = launch::prepare(case.product, case.shape(), case.width, operands, case.blocks);
    entries::launched(&kernel.launch);
    if let Err(report) = kernel.launch.emulate_checked(&mut memory, kernel.grid, kernel.shared_bytes) {
        panic!("{case:?}: {report}");
    }
    (wide(&memory.read(out)), wide(&memory.read(aux)))
}

/// x / (1 + e^(-2 …)), which has digits where x (1 + tanh …) / 2 has none.
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

/// out and aux, unrounded.
fn reference(case: Case, inputs: &Inputs) -> (Vec<f64>, Vec<f64>) {
    let Case { n, k, .. } = case;
    let b = |l: usize, j: usize| match case.product {
        Product::AB | Product::ABGeluBackward => inputs.b[l * n + j],
        _ => inputs.b[j * k + l],
    };
    let sum = |row: &[f64], j: usize| {
        let bias = if case.has_bias() { inputs.bias[j] } else { 0.0 };
        row.iter().enumerate().map(|(l, a)| a * b(l, j)).sum::<f64>() + bias
    };
    let sums: Vec<f64> = inputs.a.chunks(k).flat_map(|row| (0..n).map(move |j| sum(row, j))).collect();
    match case.product {
        Product::ABtBiasGelu => (sums.iter().map(|&x| gelu(x)).collect(), sums),
        Product::ABGeluBackward => {
            let slopes = inputs.aux.iter().map(|&x| gelu_slope(x));
            (sums.iter().zip(slopes).map(|(sum, slope)| sum * slope).collect(), inputs.aux.clone())
        }
        _ => (sums, inputs.aux.clone()),
    }
}

/// Of integers, whose sums f32 has: without a GELU every bit of the result is known.
fn check(case: Case) {
    let inputs = Inputs::integers(case);
    let ((out, aux), (want, want_aux)) = (run(case, &inputs), reference(case, &inputs));
    let nearest = |values: &[f64]| values.iter().map(|&x| f64::from(bf16::nearest(x as f32))).collect::<Vec<_>>();
    assert_close(&format!("{case:?}, aux"), &aux, &nearest(&want_aux), 0.0, 0.0);
    match case.product {
        Product::ABtBiasGelu | Product::ABGeluBackward => {
            assert_close(&format!("{case:?}"), &out, &want, bf16::ROUNDING, 1e-30);
        }
        _ => assert_close(&format!("{case:?}"), &out, &nearest(&want), 0.0, 0.0),
    }
}

fn check_all(m: usize, n: usize, k: usize, blocks: usize) {
    for product in PRODUCTS {
        for width in Width::ALL {
            check(Case { product, m, n, k, width, blocks });
        }
    }
}

fn one_packet() {
    check_all(1, 8, 8, 1);
}

fn around_a_tile() {
    let sizes = [(1, 200, 64), (63, 8, 72), (65, 64, 8), (127, 136, 56), (128, 192, 128), (129, 128, 200)];
    for (m, n, k) in sizes {
        check_all(m, n, k, 1);
    }
}

/// 3 x 3 or 3 x 5 tiles; an odd and an even number of them for a block; a consumer without any; a ring that goes on from
/// tile to tile.
fn fewer_and_more_blocks_than_tiles() {
    for blocks in [1, 2, 4, 8, 17] {
        check_all(300, 520, 200, blocks);
    }
}

/// Groups of 16 tiles, then one of fewer, and of two columns.
fn more_rows_than_a_group() {
    for product in [Product::ABtBias, Product::AB] {
        check(Case { product, m: 2200, n: 264, k: 8, width: Width::Narrow, blocks: 5 });
    }
}

/// A ring of four or five stages goes round more than once within a tile.
fn many_steps() {
    check_all(65, 400, 712, 1);
}

fn cases() -> impl Strategy<Value = Case> {
    let rows = (1..=400usize, select(vec![1, 63, 64, 65, 127, 128, 129]), 0..2);
    let rows = rows.prop_map(|(any, edge, which)| if which == 0 { any } else { edge });
    let columns = |most: usize| (1..=most / 8).prop_map(|packets| 8 * packets);
    let kinds = (select(PRODUCTS.to_vec()), select(Width::ALL.to_vec()));
    let sizes = (rows, columns(600), columns(300), kinds, 1..5usize);
    sizes.prop_map(|(m, n, k, (product, width), blocks)| Case { product, m, n, k, width, blocks })
}

/// f32 sums of K fractions, then an epilogue, then a rounding to bf16.
fn any_shape() {
    for_all(24, (cases(), 0..u32::MAX), |(case, seed)| {
        let inputs = Inputs::fractions(case, seed);
        let ((out, aux), (want, want_aux)) = (run(case, &inputs), reference(case, &inputs));
        let scale = 1e-3;
        assert_close(&format!("{case:?}"), &out, &want, bf16::ROUNDING, scale);
        assert_close(&format!("{case:?}, aux"), &aux, &want_aux, bf16::ROUNDING, scale);
    });
}

/// A row of a gives the same bits wherever it lies.
fn rows_of_a_stay_apart() {
    for_all(6, (cases(), 0..u32::MAX), |(case, seed)| {
        let Case { m, n, k, .. } = case;
        let straight = Inputs { aux: vec![0.5; m * n], ..Inputs::fractions(case, seed) };
        let turned = |values: &[f64], columns: usize| values.rchunks(columns).flatten().copied().collect::<Vec<_>>();
        let reversed = Inputs { a: turned(&straight.a, k), ..straight.clone() };
        let want = turned(&run(case, &straight).0, n);
        assert_close(&format!("{case:?}"), &run(case, &reversed).0, &want, 0.0, 0.0);
    });
}

/// NaN and infinity in a row of a stay in that row, in a column of b, of bias or in aux there.
fn spoilt_elements() {
    for product in PRODUCTS {
        for width in Width::ALL {
            let case = Case { product, m: 140, n: 272, k: 72, width, blocks: 1 };
            let Case { n, k, .. } = case;
            let mut inputs = Inputs::integers(case);
            let by_rows = matches!(product, Product::AB | Product::ABGeluBackward);
            let b = |l: usize, j: usize| if by_rows { l * n + j } else { j * k + l };
            let (first, last) = (b(1, 63), b(64, 271));
            inputs.a[5 * k + 71] = f64::NAN;
            inputs.a[130 * k] = f64::INFINITY;
            inputs.b[first] = f64::NEG_INFINITY;
            inputs.b[last] = f64::NAN;
            inputs.bias[100] = f64::NAN;
            inputs.aux[7 * n + 9] = f64::NAN;
            let (out, _) = run(case, &inputs);
            let (want, _) = reference(case, &inputs);
            for (i, (got, want)) in out.iter().zip(&want).enumerate() {
                let (row, column) = (i / n, i % n);
                let of_bias = case.has_bias() && column == 100;
                let of_aux = product == Product::ABGeluBackward && (row, column) == (7, 9);
                let spoilt = [5, 130].contains(&row) || [63, 271].contains(&column) || of_bias || of_aux;
                assert_eq!(got.is_finite(), !spoilt, "{case:?}, {row}, {column}: {got}, want {want}");
                if [5].contains(&row) || column == 271 || of_bias || of_aux {
                    assert!(got.is_nan(), "{case:?}, {row}, {column}: {got}");
                }
            }
        }
    }
}

/// GELU and its slope from where they vanish to where they are the identity and 1, also of the largest numbers: to the
/// rounding of bf16, however small they are.
fn gelu_far_out() {
    let n = 512;
    let value = |i: usize| {
        let x = (i as f64 - 256.0) / 16.0;
        if i == 0 || i == n - 1 { x.signum() * 3e38 } else { x }
    };
    let points = wide(&rounded::<bf16>(&(0..n).map(value).collect::<Vec<_>>()));
    for width in Width::ALL {
        // The sum is the bias.
        let case = Case { product: Product::ABtBiasGelu, m: 1, n, k: 8, width, blocks: 1 };
        let inputs = Inputs { a: vec![0.0; 8], b: vec![0.0; n * 8], bias: points.clone(), aux: vec![0.0; n] };
        let (out, aux) = run(case, &inputs);
        assert_close("aux", &aux, &points, 0.0, 0.0);
        let want: Vec<_> = points.iter().map(|&x| gelu(x)).collect();
        assert_close("gelu", &out, &want, bf16::ROUNDING, 1e-30);

        // The sum is 1.
        let case = Case { product: Product::ABGeluBackward, ..case };
        let inputs = Inputs { a: vec![0.125; 8], b: vec![1.0; n * 8], bias: vec![0.0; n], aux: points.clone() };
        let (out, _) = run(case, &inputs);
        let want: Vec<_> =
            points.iter().map(|&x| if x.abs() > 1e9 { f64::from(x > 0.0) } else { gelu_slope(x) }).collect();
        assert_close("slope", &out, &want, bf16::ROUNDING, 1e-3);
    }
}

fn shapes_refused() {
    let shape = Shape { m: 3, n: 16, k: 8 };
    assert!(shape.is_possible());
    for refused in
        [Shape { n: 20, ..shape }, Shape { k: 4, ..shape }, Shape { m: 0, ..shape }, Shape { m: 1 << 31, ..shape }]
    {
        assert!(!refused.is_possible(), "{refused:?}");
    }
}
