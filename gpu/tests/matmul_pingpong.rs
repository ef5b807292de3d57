//! The sm_90a matrix products with epilogues against sums in f64.

mod common;

use common::{Tolerance, assert_close, entries, for_all, integers, noise, rounded, wide};
use cuda_std::emulate::Memory;
use cuda_std::hopper::TensorMap;
use cuda_std::{Element, GlobalMut};
use cuda_std::{Global, bf16};
use gpu::gelu::{self, gelu_forward};
use gpu::matmul::launch::{self, Map, Operand, Product, Shape, Size, Tiling, tilings};
use proptest::arbitrary::any;
use proptest::sample::{Index, select};
use proptest::strategy::Strategy;

tests! {
    kernels of "matmul/pingpong.rs", "matmul/split.rs";
    once: one_packet, around_a_tile, fewer_and_more_blocks_than_tiles, more_rows_than_a_group, many_steps, any_shape,
        rows_of_a_stay_apart, spoilt_elements, gelu_far_out, gelu_beside_its_backward, shapes_refused, parts_of_k,
        tilings_offered;
}

const PRODUCTS: [Product; 10] = [
    Product::ABt,
    Product::ABtBias,
    Product::ABtBiasResidual,
    Product::ABtBiasGelu,
    Product::AB,
    Product::ABGeluBackward,
    Product::ABGeluBackwardAndGelu,
    Product::AtBAccumulate,
    Product::AtBAccumulateSums,
    Product::AtBAccumulateF32,
];

/// Whether it is a weight's gradient.
fn accumulates(product: Product) -> bool {
    matches!(product, Product::AtBAccumulate | Product::AtBAccumulateSums | Product::AtBAccumulateF32)
}

/// Blocks of the grid, and what to compute.
#[derive(Clone, Copy, Debug)]
struct Case {
    product: Product,
    m: usize,
    n: usize,
    k: usize,
    tiling: Tiling,
    blocks: usize,
}

impl Case {
    fn shape(self) -> Shape {
        Shape { m: self.m, n: self.n, k: self.k }
    }

    /// Where element (`i`, `l`) of a (M, K) lies.
    fn place_in_a(self, i: usize, l: usize) -> usize {
        if accumulates(self.product) { l * self.m + i } else { i * self.k + l }
    }

    /// Where element (`l`, `j`) of b (K, N) lies.
    fn place_in_b(self, l: usize, j: usize) -> usize {
        match self.product {
            product if accumulates(product) => l * self.n + j,
            Product::AB | Product::ABGeluBackward | Product::ABGeluBackwardAndGelu => l * self.n + j,
            _ => j * self.k + l,
        }
    }

    fn reads_aux(self) -> bool {
        matches!(self.product, Product::ABtBiasResidual | Product::ABGeluBackward | Product::ABGeluBackwardAndGelu)
    }

    fn has_second(self) -> bool {
        matches!(self.product, Product::ABtBiasGelu | Product::ABGeluBackwardAndGelu)
    }

    fn has_bias(self) -> bool {
        matches!(self.product, Product::ABtBias | Product::ABtBiasResidual | Product::ABtBiasGelu)
    }

    /// Of a bias, or of the gradient of one.
    fn bias_len(self) -> usize {
        if self.product == Product::AtBAccumulateSums { self.m } else { self.n }
    }

    /// A value of out, rounded.
    fn nearest(self, value: f64) -> f64 {
        if self.product == Product::AtBAccumulateF32 {
            f64::from(value as f32)
        } else {
            f64::from(bf16::nearest(value as f32))
        }
    }

    fn rounding(self) -> f64 {
        if self.product == Product::AtBAccumulateF32 { f32::ROUNDING } else { bf16::ROUNDING }
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
        Self { a: integers(m * k, 1), b: integers(n * k, 2), bias: integers(case.bias_len(), 3), aux }.rounded()
    }

    fn fractions(case: Case, seed: u32) -> Self {
        let Case { m, n, k, .. } = case;
        // Sums near 1, where GELU bends.
        let b = noise(n * k, seed ^ 1).iter().map(|x| x * 3.0 / (k as f64).sqrt()).collect();
        let aux = noise(m * n, seed ^ 3).iter().map(|x| 4.0 * x).collect();
        Self { a: noise(m * k, seed), b, bias: noise(case.bias_len(), seed ^ 2), aux }.rounded()
    }

    fn rounded(self) -> Self {
        let exact = |values: Vec<f64>| wide(&rounded::<bf16>(&values));
        Self { a: exact(self.a), b: exact(self.b), bias: exact(self.bias), aux: exact(self.aux) }
    }
}

/// The three as they are afterwards, or should be. `second` is empty where there is none.
struct Outcome {
    out: Vec<f64>,
    second: Vec<f64>,
    bias: Vec<f64>,
}

fn run(case: Case, inputs: &Inputs) -> Outcome {
    if case.product == Product::AtBAccumulateF32 { run_to::<f32>(case, inputs) } else { run_to::<bf16>(case, inputs) }
}

/// With an output of `O`.
fn run_to<O: Tolerance>(case: Case, inputs: &Inputs) -> Outcome {
    let mut memory = Memory::new();
    let mut input = |name: &str, values: &[f64]| memory.input(name, &rounded::<bf16>(values));
    let (a, b) = (input("a", &inputs.a), input("b", &inputs.b));
    let bias = memory.buffer("bias", &rounded::<bf16>(&inputs.bias));
    let len = case.m * case.n;
    // What is added to is the output.
    let out = if accumulates(case.product) {
        memory.buffer("out", &rounded::<O>(&inputs.aux))
    } else {
        memory.output("out", len)
    };
    let as_bf16 = GlobalMut::<bf16>::new(out.pointer().cast());
    let aux = if case.reads_aux() { memory.input("aux", &rounded::<bf16>(&inputs.aux)) } else { as_bf16.reader() };
    let second = if case.has_second() { memory.output("second", len) } else { as_bf16 };
    let room = case.tiling.room(case.product, case.shape());
    let parts = if room > 0 { memory.output("parts", room) } else { GlobalMut::from_address(0) };
    let [a_map, b_map, out_map] = launch::maps(case.product, case.shape(), case.tiling.size);
    let mut map = |name: &str, base: Global<bf16>, Map { extents: [rows, columns], tile }: Map| {
        memory.input(name, &[TensorMap::emulated(base, rows, columns, 2 * columns, tile.0, tile.1)])
    };
    let operands = Operand {
        a: map("map of a", a, a_map),
        b: map("map of b", b, b_map),
        out: map("map of out", as_bf16.reader(), out_map),
        aux: map("map of aux", aux, out_map),
        second: map("map of second", second.reader(), out_map),
        bias,
        sums: out.pointer().addr() as u64,
        parts,
        room,
    };
    for kernel in launch::prepare(case.product, case.shape(), case.tiling, operands, case.blocks) {
        entries::launched(&kernel.launch);
        if let Err(report) = kernel.launch.emulate_checked(&mut memory, kernel.grid, kernel.shared_bytes) {
            panic!("{case:?}: {report}");
        }
    }
    let out = wide(&memory.read(out));
    let second = if case.has_second() { wide(&memory.read(second)) } else { Vec::new() };
    Outcome { out, second, bias: wide(&memory.read(bias)) }
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

/// Unrounded; out of a product that ends in GELU is [`gelu`] of its second output as it was stored.
fn reference(case: Case, inputs: &Inputs, stored: &[f64]) -> Outcome {
    let Case { m, n, k, .. } = case;
    let sum = |i: usize, j: usize| {
        let bias = if case.has_bias() { inputs.bias[j] } else { 0.0 };
        (0..k).map(|l| inputs.a[case.place_in_a(i, l)] * inputs.b[case.place_in_b(l, j)]).sum::<f64>() + bias
    };
    let sums: Vec<f64> = (0..m * n).map(|i| sum(i / n, i % n)).collect();
    let mut bias = inputs.bias.clone();
    if case.product == Product::AtBAccumulateSums {
        let column_sum = |i: usize| (0..k).map(|l| inputs.a[case.place_in_a(i, l)]).sum::<f64>();
        bias.iter_mut().enumerate().for_each(|(i, bias)| *bias += column_sum(i));
    }
    let with_aux = |f: fn(f64, f64) -> f64| sums.iter().zip(&inputs.aux).map(|(&sum, &aux)| f(sum, aux)).collect();
    let backward = |sum, aux| sum * gelu_slope(aux);
    let (out, second) = match case.product {
        Product::ABtBiasGelu => (stored.iter().map(|&x| gelu(x)).collect(), sums),
        Product::ABGeluBackward => (with_aux(backward), Vec::new()),
        Product::ABGeluBackwardAndGelu => (with_aux(backward), with_aux(|_, aux| gelu(aux))),
        product if accumulates(product) || product == Product::ABtBiasResidual => {
            (with_aux(|sum, aux| sum + aux), Vec::new())
        }
        _ => (sums, Vec::new()),
    };
    Outcome { out, second, bias }
}

/// Of integers, whose sums f32 has: without a GELU every bit of the result is known.
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
    match case.product {
        Product::ABtBiasGelu => {
            closely("out", &got.out, &want.out);
            exactly("second", &got.second, &want.second);
        }
        Product::ABGeluBackward | Product::ABGeluBackwardAndGelu => {
            closely("out", &got.out, &want.out);
            closely("second", &got.second, &want.second);
        }
        _ => exactly("out", &got.out, &want.out),
    }
}

/// Every way to divide K into up to three parts.
fn divisions(product: Product, shape: Shape) -> Vec<Tiling> {
    let tilings = Size::ALL.into_iter().flat_map(|size| (1..=3).map(move |splits| Tiling { size, splits }));
    tilings.filter(|tiling| tiling.is_possible(product, shape)).collect()
}

fn check_all(products: &[Product], m: usize, n: usize, k: usize, blocks: usize) {
    for &product in products {
        // Rows of a (K, M) are multiples of 16 bytes.
        let m = if accumulates(product) { m.next_multiple_of(8) } else { m };
        for tiling in divisions(product, Shape { m, n, k }) {
            check(Case { product, m, n, k, tiling, blocks });
        }
    }
}

fn one_packet() {
    check_all(&PRODUCTS, 1, 8, 8, 1);
}

fn around_a_tile() {
    let sizes = [(1, 200, 64), (63, 8, 72), (65, 64, 8), (127, 136, 56), (128, 192, 128), (129, 128, 200)];
    for (m, n, k) in sizes {
        check_all(&PRODUCTS, m, n, k, 1);
    }
}

/// 2 x 2 to 3 x 4 tiles; an odd and an even number of them for a block; a consumer without any; a ring that goes on from tile
/// to tile.
fn fewer_and_more_blocks_than_tiles() {
    for blocks in [1, 4, 17] {
        let products = [
            Product::ABtBiasResidual,
            Product::ABGeluBackward,
            Product::ABGeluBackwardAndGelu,
            Product::AtBAccumulateSums,
        ];
        check_all(&products, 264, 392, 200, blocks);
    }
}

/// Groups of 16 tiles, then one of fewer or none, and of two columns.
fn more_rows_than_a_group() {
    for (product, m) in [(Product::ABtBias, 2200), (Product::AB, 2048), (Product::AtBAccumulate, 2200)] {
        check(Case { product, m, n: 264, k: 8, tiling: Tiling { size: Size::T128x128, splits: 1 }, blocks: 5 });
    }
}

/// A ring of four or five stages goes round more than once within a tile.
fn many_steps() {
    check_all(&[Product::ABt, Product::ABtBiasGelu, Product::AtBAccumulateSums], 65, 400, 712, 1);
}

fn cases() -> impl Strategy<Value = Case> {
    let rows = (1..=400usize, select(vec![1, 63, 64, 65, 127, 128, 129]), 0..2);
    let rows = rows.prop_map(|(any, edge, which)| if which == 0 { any } else { edge });
    let columns = |most: usize| (1..=most / 8).prop_map(|packets| 8 * packets);
    let kinds = select(PRODUCTS.to_vec());
    let sizes = (rows, columns(600), columns(300), kinds, 1..9usize, any::<Index>());
    sizes.prop_map(|(m, n, k, product, blocks, which)| {
        let m = if accumulates(product) { m.next_multiple_of(8) } else { m };
        let tiling = *which.get(&divisions(product, Shape { m, n, k }));
        Case { product, m, n, k, tiling, blocks }
    })
}

/// f32 sums of K fractions, then an epilogue, then a rounding to bf16.
fn any_shape() {
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

/// A row of a gives the same bits wherever it lies.
fn rows_of_a_stay_apart() {
    for_all(6, (cases(), 0..u32::MAX), |(case, seed)| {
        let Case { m, n, k, .. } = case;
        let straight = Inputs { aux: vec![0.5; m * n], ..Inputs::fractions(case, seed) };
        let turned = |values: &[f64], columns: usize| values.rchunks(columns).flatten().copied().collect::<Vec<_>>();
        let turned_a = (0..m * k).map(|i| straight.a[case.place_in_a(m - 1 - i / k, i % k)]);
        let mut reversed = straight.clone();
        turned_a.enumerate().for_each(|(i, a)| reversed.a[case.place_in_a(i / k, i % k)] = a);
        let want = turned(&run(case, &straight).out, n);
        assert_close(&format!("{case:?}"), &run(case, &reversed).out, &want, 0.0, 0.0);
    });
}

/// NaN and infinity in a row of a stay in that row, in a column of b, of bias or in aux there.
fn spoilt_elements() {
    for product in PRODUCTS {
        let shape = Shape { m: 144, n: 272, k: 72 };
        for tiling in divisions(product, shape) {
            let case = Case { product, m: shape.m, n: shape.n, k: shape.k, tiling, blocks: 3 };
            let Case { n, .. } = case;
            let mut inputs = Inputs::integers(case);
            inputs.a[case.place_in_a(5, 71)] = f64::NAN;
            inputs.a[case.place_in_a(130, 0)] = f64::INFINITY;
            inputs.b[case.place_in_b(1, 63)] = f64::NEG_INFINITY;
            inputs.b[case.place_in_b(64, 271)] = f64::NAN;
            inputs.bias[100] = f64::NAN;
            inputs.aux[7 * n + 9] = f64::NAN;
            let got = run(case, &inputs);
            let want = reference(case, &inputs, &got.second);
            for (i, (got, want)) in got.out.iter().zip(&want.out).enumerate() {
                let (row, column) = (i / n, i % n);
                let of_bias = case.has_bias() && column == 100;
                let of_aux = (case.reads_aux() || accumulates(product)) && (row, column) == (7, 9);
                let spoilt = [5, 130].contains(&row) || [63, 271].contains(&column) || of_bias || of_aux;
                assert_eq!(got.is_finite(), !spoilt, "{case:?}, {row}, {column}: {got}, want {want}");
                if row == 5 || column == 271 || of_bias || of_aux {
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
    for tiling in divisions(Product::ABtBiasGelu, Shape { m: 1, n, k: 8 }) {
        // The sum is the bias.
        let case = Case { product: Product::ABtBiasGelu, m: 1, n, k: 8, tiling, blocks: 1 };
        let inputs = Inputs { a: vec![0.0; 8], b: vec![0.0; n * 8], bias: points.clone(), aux: vec![0.0; n] };
        let Outcome { out, second, .. } = run(case, &inputs);
        assert_close("second", &second, &points, 0.0, 0.0);
        let want: Vec<_> = points.iter().map(|&x| gelu(x)).collect();
        assert_close("gelu", &out, &want, bf16::ROUNDING, 1e-30);

        // The sum is 1.
        let case = Case { product: Product::ABGeluBackward, ..case };
        let inputs = Inputs { a: vec![0.125; 8], b: vec![1.0; n * 8], bias: vec![0.0; n], aux: points.clone() };
        let Outcome { out, .. } = run(case, &inputs);
        let want: Vec<_> =
            points.iter().map(|&x| if x.abs() > 1e9 { f64::from(x > 0.0) } else { gelu_slope(x) }).collect();
        assert_close("slope", &out, &want, bf16::ROUNDING, 1e-3);
    }
}

/// Of every number of bf16: out has the bits of the product that does not write GELU, GELU those of a pass of its own.
fn gelu_beside_its_backward() {
    let (m, n, k) = (128, 512, 72);
    let every: Vec<f64> = (0..m * n).map(|i| f64::from(bf16::from_bits(i as u16).to_f32())).collect();
    let mut memory = Memory::new();
    let x = memory.input("x", &rounded::<bf16>(&every));
    let y = memory.output("y", m * n);
    gelu_forward(y, x, every.len() as u64).emulate_checked(&mut memory, [gelu::grid::<bf16>(m * n), 1, 1], 0).unwrap();
    let bits = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for tiling in divisions(Product::ABGeluBackward, Shape { m, n, k }) {
        let alone = Case { product: Product::ABGeluBackward, m, n, k, tiling, blocks: 2 };
        let inputs = Inputs { aux: every.clone(), ..Inputs::fractions(alone, 7) };
        let both = run(Case { product: Product::ABGeluBackwardAndGelu, ..alone }, &inputs);
        assert_eq!(bits(&both.out), bits(&run(alone, &inputs).out), "{tiling:?}");
        assert_eq!(bits(&both.second), bits(&wide(&memory.read(y))), "{tiling:?}");
    }
}

fn shapes_refused() {
    let shape = Shape { m: 3, n: 16, k: 8 };
    assert!(shape.is_possible(Product::ABt) && !shape.is_possible(Product::AtBAccumulate));
    assert!(Shape { m: 16, n: 8, k: 3 }.is_possible(Product::AtBAccumulate));
    for refused in
        [Shape { n: 20, ..shape }, Shape { k: 4, ..shape }, Shape { m: 0, ..shape }, Shape { m: 1 << 31, ..shape }]
    {
        assert!(!refused.is_possible(Product::AB), "{refused:?}");
    }
}

/// Parts of K, of which the last is shorter, into more items than blocks and fewer.
fn parts_of_k() {
    for size in Size::ALL {
        for (m, n, k, splits, blocks) in [(136, 200, 8000, 7, 7), (64, 456, 4104, 22, 8), (264, 200, 520, 5, 3)] {
            let case = Case { product: Product::AtBAccumulateSums, m, n, k, tiling: Tiling { size, splits }, blocks };
            assert!(case.tiling.is_possible(case.product, case.shape()), "{case:?}");
            check(case);
        }
    }
}

/// Of a transformer's products: every way is possible and fits, and the first leaves no multiprocessor idle for long.
fn tilings_offered() {
    for (m, n) in [(2304, 768), (768, 768), (3072, 768), (768, 3072), (1600, 1600), (50304, 768)] {
        for k in [1, 64, 65, 1024, 16384, 65536] {
            let shape = Shape { m, n, k };
            for product in [Product::AtBAccumulate, Product::AtBAccumulateSums] {
                for room in [0, 1 << 22, 1 << 24] {
                    let offered = tilings(product, shape, 132, room);
                    let fits = |tiling: &Tiling| tiling.splits == 1 || tiling.room(product, shape) <= room;
                    assert!(offered.iter().all(|tiling| tiling.is_possible(product, shape) && fits(tiling)));
                    assert!(Size::ALL.iter().all(|size| offered.iter().any(|tiling| tiling.size == *size)));
                }
            }
            let best = tilings(Product::AtBAccumulate, shape, 132, 1 << 24)[0];
            let tiles = m.div_ceil(best.size.rows() as usize) * n.div_ceil(best.size.columns() as usize);
            let items = tiles * best.splits;
            let busy = items as f64 / (items.next_multiple_of(132)) as f64;
            assert!(k < 16384 || busy > 0.8, "{shape:?} {best:?}: {busy}");
            for product in [Product::ABGeluBackward, Product::ABGeluBackwardAndGelu] {
                let whole = tilings(product, shape, 132, 1 << 24);
                let in_turns = [Size::T128x128, Size::T128x192];
                assert!(whole.iter().all(|tiling| tiling.splits == 1 && in_turns.contains(&tiling.size)), "{whole:?}");
            }
        }
    }
}
