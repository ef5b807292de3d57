//! The batched and symmetric `sm_90a` GEMM kernels compared with an f64 reference.

use crate::common::{
    Tolerance, assert_close, assert_same, entries, for_all, integers, multiples_of_8, noise, product, rounded, wide,
};
use cuda_std::emulate::Memory;
use cuda_std::hopper::TensorMap;
use cuda_std::{Global, GlobalMut, bf16};
use gpu::launch::Extents;
use gpu::matmul::launch::{
    self, Batch, GemmOp, GemmShape, KernelOperands, Map, Scale, TileConfig, TileShape, candidate_configs,
};
use proptest::arbitrary::any;
use proptest::sample::{Index, select};
use proptest::strategy::Strategy;

tests! {
    kernels of "matmul/batched.rs";
    once: smallest_shape_matches_reference, shapes_around_a_tile_match_reference, any_grid_size_matches_reference,
        several_tile_groups_match_reference, long_k_matches_reference, random_shapes_match_reference,
        symmetric_outputs_are_symmetric, matrices_are_independent, tile_shapes_have_the_same_bits,
        every_subtile_on_and_above_the_diagonal_is_computed_once, factors_are_applied, unsupported_shapes_are_rejected;
}

const OPS: [GemmOp; 4] = [GemmOp::ABScaled, GemmOp::ABtSymmetric, GemmOp::ABtSymmetricScaled, GemmOp::AtBSymmetric];
const SYMMETRIC: [GemmOp; 3] = [GemmOp::ABtSymmetric, GemmOp::ABtSymmetricScaled, GemmOp::AtBSymmetric];

/// A batched GEMM, its tile shape, and the number of thread blocks. `m` is that of `ABScaled`; symmetric outputs are (n, n).
#[derive(Clone, Copy, Debug)]
struct Case {
    op: GemmOp,
    m: usize,
    n: usize,
    k: usize,
    count: usize,
    tile: TileShape,
    blocks: usize,
    scale: Scale,
}

/// Elements between the end of a matrix and the start of the next.
const GAP: usize = 8;

impl Case {
    fn shape(self) -> GemmShape {
        GemmShape { m: if self.op.is_symmetric() { self.n } else { self.m }, n: self.n, k: self.k }
    }

    fn config(self) -> TileConfig {
        TileConfig { tile: self.tile, split_k: 1 }
    }

    fn scaled(self) -> bool {
        matches!(self.op, GemmOp::ABScaled | GemmOp::ABtSymmetricScaled)
    }

    /// Returns the elements of a, b and out.
    fn lengths(self) -> [usize; 3] {
        let GemmShape { m, n, k } = self.shape();
        [m * k, k * n, m * n]
    }

    fn batch(self) -> Batch {
        let [a, b, out] = self.lengths().map(|len| len.next_multiple_of(8) + GAP);
        Batch { count: self.count, a, b: if self.op.is_symmetric() { a } else { b }, out }
    }
}

/// The operands of each matrix. All values are exact in bf16. Symmetric operations have no b, and those that are scaled have a
/// symmetric aux.
#[derive(Clone)]
struct Inputs {
    a: Vec<Vec<f64>>,
    b: Vec<Vec<f64>>,
    aux: Vec<Vec<f64>>,
}

impl Inputs {
    fn new(case: Case, values: impl Fn(usize, u32) -> Vec<f64>) -> Self {
        let [a, b, out] = case.lengths();
        let of = |len: usize, seed: u32| {
            let exact = |i: usize| wide(&rounded::<bf16>(&values(len, 8 * i as u32 + seed)));
            (0..case.count).map(exact).collect::<Vec<_>>()
        };
        let (b, mut aux) = (if case.op.is_symmetric() { Vec::new() } else { of(b, 2) }, of(out, 3));
        if case.op.is_symmetric() {
            for aux in &mut aux {
                *aux = mirrored(aux, case.n);
            }
        }
        Self { a: of(a, 1), b, aux }
    }

    fn integers(case: Case) -> Self {
        Self::new(case, integers)
    }

    fn fractions(case: Case, seed: u32) -> Self {
        let scale = 1.0 / (case.k as f64).sqrt();
        Self::new(case, |len, i| noise(len, seed ^ i).iter().map(|x| 2.0 * scale.sqrt() * x).collect())
    }
}

/// Returns the symmetric matrix with the same elements on and above the diagonal.
fn mirrored(matrix: &[f64], n: usize) -> Vec<f64> {
    (0..n * n).map(|at| matrix[(at / n).min(at % n) * n + (at / n).max(at % n)]).collect()
}

/// Runs the kernel in the emulator, and returns each output. The elements between the matrices must not change.
fn run(case: Case, inputs: &Inputs) -> Vec<Vec<f64>> {
    let mut memory = Memory::new();
    let batch = case.batch();
    let mut place = |name: &str, matrices: &[Vec<f64>], stride: usize| {
        // Whatever lies between the matrices must not matter.
        let mut all = vec![f64::NAN; case.count * stride];
        for (at, matrix) in all.chunks_mut(stride).zip(matrices) {
            at[..matrix.len()].copy_from_slice(matrix);
        }
        memory.buffer(name, &rounded::<bf16>(&all))
    };
    let a = place("a", &inputs.a, batch.a);
    let b = if case.op.is_symmetric() { a } else { place("b", &inputs.b, batch.b) };
    let aux = if case.scaled() { place("aux", &inputs.aux, batch.out) } else { a };
    let out = place("out", &[], batch.out);
    let maps = launch::maps(case.op, case.shape(), batch, case.tile);
    let mut map = |name: &str, base: Global<bf16>, Map { extents, tile }: Map| {
        let Extents::Batch(extents, stride) = extents else { panic!("expected a batch, found {extents:?}") };
        memory.input(name, &[TensorMap::emulated_batch(base, extents, stride, tile)])
    };
    let out_map = map("map of out", out.reader(), maps.out);
    let operands = KernelOperands {
        a: map("map of a", a.reader(), maps.a),
        b: map("map of b", b.reader(), maps.b),
        out: out_map,
        aux: if case.scaled() { map("map of aux", aux.reader(), maps.aux) } else { out_map },
        second: out_map,
        bias: GlobalMut::from_address(0),
        out_address: 0,
        scratch: GlobalMut::from_address(0),
        scratch_len: 0,
        scale: case.scale,
        count: case.count,
    };
    for kernel in launch::launches(case.op, case.shape(), case.config(), operands, case.blocks) {
        entries::launched(&kernel.launch);
        if let Err(report) = kernel.launch.emulate_checked(&mut memory, kernel.grid, kernel.shared_bytes) {
            panic!("{case:?}: {report}");
        }
    }
    let all = wide(&memory.read(out));
    let [.., len] = case.lengths();
    let matrices = all.chunks(batch.out).map(|matrix| {
        assert!(matrix[len..].iter().all(|x| x.is_nan()), "{case:?} writes behind a matrix");
        matrix[..len].to_vec()
    });
    matrices.collect()
}

/// Computes the unrounded outputs.
fn reference(case: Case, inputs: &Inputs) -> Vec<Vec<f64>> {
    let GemmShape { m, n, k } = case.shape();
    let of = |matrix: usize| {
        let a = &inputs.a[matrix];
        let left = |i, l| if case.op == GemmOp::AtBSymmetric { a[l * n + i] } else { a[i * k + l] };
        let right = |l, j| match case.op {
            GemmOp::ABScaled => inputs.b[matrix][l * n + j],
            GemmOp::AtBSymmetric => a[l * n + j],
            _ => a[j * k + l],
        };
        let Scale { alpha, beta } = case.scale;
        let mut sums = product([m, n, k], left, right);
        if case.scaled() {
            let of = |(sum, aux): (&mut f64, &f64)| *sum = f64::from(beta) * aux + f64::from(alpha) * *sum;
            sums.iter_mut().zip(&inputs.aux[matrix]).for_each(of);
        }
        sums
    };
    (0..case.count).map(of).collect()
}

/// Checks integer operands with factors that are powers of two: the result must match bit for bit.
fn check(case: Case) {
    let inputs = Inputs::integers(case);
    let (got, want) = (run(case, &inputs), reference(case, &inputs));
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        let nearest: Vec<_> = want.iter().map(|&x| f64::from(bf16::nearest(x as f32))).collect();
        assert_same(&format!("{case:?}, matrix {i}"), got, &nearest);
    }
}

fn tiles(op: GemmOp, shape: GemmShape) -> Vec<TileShape> {
    let supported = |tile: &TileShape| TileConfig { tile: *tile, split_k: 1 }.is_supported(op, shape);
    TileShape::ALL.into_iter().filter(supported).collect()
}

const SCALE: Scale = Scale { alpha: 0.5, beta: -2.0 };

fn check_all(m: usize, n: usize, k: usize, count: usize, blocks: usize) {
    for op in OPS {
        for tile in tiles(op, GemmShape { m: if op.is_symmetric() { n } else { m }, n, k }) {
            check(Case { op, m, n, k, count, tile, blocks, scale: SCALE });
        }
    }
}

fn smallest_shape_matches_reference() {
    check_all(1, 8, 8, 1, 1);
    check_all(1, 8, 8, 3, 1);
}

fn shapes_around_a_tile_match_reference() {
    for (m, n, k) in [(1, 200, 64), (65, 64, 8), (127, 136, 56), (128, 192, 128), (129, 128, 200), (64, 72, 72)] {
        check_all(m, n, k, 2, 1);
    }
}

/// Outputs of 2 x 2 to 4 x 4 tiles. Blocks have odd and even numbers of tiles, some consumers have none, and the pipeline
/// continues from tile to tile and from matrix to matrix.
fn any_grid_size_matches_reference() {
    for blocks in [1, 4, 17] {
        check_all(264, 392, 72, 3, blocks);
    }
}

/// A full group of 16 rows of tiles, and a smaller group.
fn several_tile_groups_match_reference() {
    let case = Case {
        op: GemmOp::ABScaled,
        m: 2200,
        n: 136,
        k: 8,
        count: 2,
        tile: TileShape::T128x128,
        blocks: 5,
        scale: SCALE,
    };
    check(case);
}

/// A pipeline of four or five stages wraps around more than once within a tile.
fn long_k_matches_reference() {
    check_all(65, 200, 712, 2, 2);
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = (1..300usize, multiples_of_8(460), multiples_of_8(300), select(OPS.to_vec()), 1..5usize, 1..9usize);
    (sizes, any::<Index>()).prop_map(|((m, n, k, op, count, blocks), which)| {
        let tile = *which.get(&tiles(op, GemmShape { m: if op.is_symmetric() { n } else { m }, n, k }));
        Case { op, m, n, k, count, tile, blocks, scale: Scale { alpha: 0.3, beta: 1.7 } }
    })
}

/// Checks operands that are not integers, within the rounding of the output.
fn random_shapes_match_reference() {
    for_all(24, (cases(), 0..u32::MAX), |(case, seed)| {
        let inputs = Inputs::fractions(case, seed);
        for (got, want) in run(case, &inputs).iter().zip(&reference(case, &inputs)) {
            assert_close(&format!("{case:?}"), got, want, bf16::ROUNDING, 1e-3);
        }
    });
}

/// The values below the diagonal of aux differ from those above it, which the kernel must not read.
fn symmetric_outputs_are_symmetric() {
    for_all(12, (cases(), select(SYMMETRIC.to_vec()), 0..u32::MAX), |(case, op, seed)| {
        let case = Case { op, tile: if seed % 2 == 0 { TileShape::T128x128 } else { TileShape::T128x192 }, ..case };
        let mut inputs = Inputs::fractions(case, seed);
        inputs.aux = Inputs::new(case, |len, i| noise(len, i ^ 1)).aux;
        let n = case.n;
        for aux in &mut inputs.aux {
            for i in 0..n {
                aux[i * n..i * n + i].fill(f64::NAN);
            }
        }
        for out in run(case, &inputs) {
            assert!(out.iter().all(|x| x.is_finite()), "{case:?} reads aux below the diagonal");
            assert_same(&format!("{case:?}"), &out, &mirrored(&out, n));
        }
    });
}

/// A matrix has the same bits alone and in any batch. NaN stays in its matrix.
fn matrices_are_independent() {
    for_all(8, (cases(), 0..u32::MAX), |(case, seed)| {
        let case = Case { count: 3, ..case };
        let mut inputs = Inputs::fractions(case, seed);
        let together = run(case, &inputs);
        for (i, want) in together.iter().enumerate() {
            let alone = |of: &[Vec<f64>]| of.get(i).cloned().into_iter().collect();
            let inputs = Inputs { a: alone(&inputs.a), b: alone(&inputs.b), aux: alone(&inputs.aux) };
            assert_same(&format!("{case:?}, matrix {i}"), &run(Case { count: 1, ..case }, &inputs)[0], want);
        }
        inputs.a[1][0] = f64::NAN;
        let got = run(case, &inputs);
        assert_same(&format!("{case:?}"), &got[0], &together[0]);
        assert_same(&format!("{case:?}"), &got[2], &together[2]);
        assert!(got[1].iter().any(|x| x.is_nan()), "{case:?}");
    });
}

/// So the result for a matrix does not depend on what the autotuner chooses.
fn tile_shapes_have_the_same_bits() {
    for op in OPS {
        let (m, n, k) = (200, 328, 264);
        let of = |tile| {
            let case = Case { op, m, n, k, count: 2, tile, blocks: 3, scale: Scale { alpha: 0.3, beta: 1.7 } };
            run(case, &Inputs::fractions(case, 5)).concat()
        };
        let tiles = tiles(op, GemmShape { m: if op.is_symmetric() { n } else { m }, n, k });
        assert_eq!(tiles.len(), if op.is_symmetric() { 2 } else { 6 });
        for &tile in &tiles[1..] {
            assert_same(&format!("{op:?}, {tile:?}"), &of(tile), &of(tiles[0]));
        }
    }
}

/// The number of tiles is about half of all. The race check of the other tests finds elements that two tiles write.
fn every_subtile_on_and_above_the_diagonal_is_computed_once() {
    let tiles = |n| [TileShape::T128x128, TileShape::T128x192].map(|tile| tile.symmetric_tiles(n));
    assert_eq!(tiles(8), [1, 1]);
    assert_eq!(tiles(128), [1, 1]);
    assert_eq!(tiles(136), [3, 2]);
    assert_eq!(tiles(384), [6, 5]);
    // Of 36 and 24 tiles.
    assert_eq!(tiles(768), [21, 16]);
}

fn factors_are_applied() {
    for op in [GemmOp::ABScaled, GemmOp::ABtSymmetricScaled] {
        for scale in [Scale::ONE, Scale { alpha: 0.0, beta: 1.0 }, Scale { alpha: -4.0, beta: 0.0 }] {
            check(Case { op, m: 72, n: 136, k: 72, count: 1, tile: TileShape::T128x128, blocks: 1, scale });
        }
    }
}

fn unsupported_shapes_are_rejected() {
    let square = GemmShape { m: 16, n: 16, k: 8 };
    for op in SYMMETRIC {
        assert!(square.is_supported(op) && op.is_batched() && op.is_symmetric());
        assert!(!GemmShape { m: 24, ..square }.is_supported(op), "{op:?}");
        assert!(!GemmShape { m: 20, n: 20, k: 8 }.is_supported(op), "{op:?}");
        let configs = candidate_configs(op, square, 132, 1 << 20);
        assert!(configs.iter().all(|config| config.split_k == 1 && tiles(op, square).contains(&config.tile)));
    }
    // The rows of a (K, N) are not those of a (N, K).
    let odd = GemmShape { k: 3, ..square };
    assert!(odd.is_supported(GemmOp::AtBSymmetric) && !odd.is_supported(GemmOp::ABtSymmetric));
    assert!(GemmShape { m: 3, ..square }.is_supported(GemmOp::ABScaled) && GemmOp::ABScaled.is_batched());
}
