//! The sm_90a matrix product against sums in f64.

mod common;

use common::{Tolerance, assert_close, entries, for_all, integers, noise, rounded, wide};
use cuda_std::emulate::Memory;
use cuda_std::hopper::TensorMap;
use cuda_std::{Element, Global, bf16};
use gpu::matmul::{self, A_BOX, OUT_BOX, TILE_N};
use proptest::sample::select;
use proptest::strategy::Strategy;

tests! {
    kernels of "matmul/cooperative.rs";
    once: one_element, around_a_tile, fewer_and_more_blocks_than_tiles, more_rows_than_a_group, many_steps, fractions,
        linear, rows_of_a_and_b_are_apart, spoilt_rows, overflow;
}

/// M, N, K; blocks of a cluster; clusters of the grid.
#[derive(Clone, Copy, Debug)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    cluster: u32,
    clusters: u32,
}

/// Elements between rows, which TMA must neither use nor write.
const BETWEEN: f32 = f32::NAN;

/// Rows of bf16 begin at multiples of 16 bytes, as TMA wants them.
fn stride(columns: usize) -> usize {
    columns.next_multiple_of(8)
}

fn map(
    memory: &mut Memory,
    name: &str,
    base: Global<bf16>,
    rows: usize,
    columns: usize,
    tile: u32,
) -> Global<TensorMap> {
    let map = TensorMap::emulated(base, rows, columns, 2 * stride(columns), tile, OUT_BOX.1);
    memory.input(&format!("map of {name}"), &[map])
}

fn operand(memory: &mut Memory, name: &str, values: &[f64], columns: usize, tile: u32) -> Global<TensorMap> {
    let row = |row: &[f64]| {
        let mut row = rounded::<bf16>(row);
        row.resize(stride(columns), bf16::from_f32(BETWEEN));
        row
    };
    let base = memory.input(name, &values.chunks(columns).flat_map(row).collect::<Vec<_>>());
    map(memory, name, base, values.len() / columns, columns, tile)
}

/// out (M, N) = a (M, K) · b (N, K)ᵀ.
fn multiply(a: &[f64], b: &[f64], case: Case) -> Vec<f64> {
    let Case { m, n, k, cluster, clusters } = case;
    let mut memory = Memory::new();
    let a = operand(&mut memory, "a", a, k, A_BOX.0);
    let b = operand(&mut memory, "b", b, k, TILE_N / cluster);
    let out = memory.buffer("out", &vec![bf16::from_f32(BETWEEN); m * stride(n)]);
    let out_map = map(&mut memory, "out", out.reader(), m, n, OUT_BOX.0);
    let launch = match cluster {
        1 => matmul::matmul_wgmma::<1>(a, b, out_map, m as u32, n as u32, k as u32),
        _ => matmul::matmul_wgmma::<2>(a, b, out_map, m as u32, n as u32, k as u32),
    };
    entries::launched(&launch);
    let grid = [clusters * cluster, 1, 1];
    if let Err(report) = launch.emulate_cluster_checked(&mut memory, grid, matmul::shared_bytes(), cluster) {
        panic!("{report}, in {case:?}");
    }
    let out = wide(&memory.read(out));
    assert!(out.chunks(stride(n)).all(|row| row[n..].iter().all(|x| x.is_nan())), "{case:?} writes between rows");
    out.chunks(stride(n)).flat_map(|row| &row[..n]).copied().collect()
}

/// The product, unrounded.
fn sums(a: &[f64], b: &[f64], k: usize) -> Vec<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    a.chunks(k).flat_map(|a| b.chunks(k).map(|b| dot(a, b)).collect::<Vec<_>>()).collect()
}

/// The product, rounded once.
fn reference(a: &[f64], b: &[f64], k: usize) -> Vec<f64> {
    sums(a, b, k).iter().map(|&sum| f64::from(bf16::nearest(sum as f32))).collect()
}

/// Of integers, whose sums f32 has: every bit of the result is known.
fn check(case: Case) {
    let Case { m, n, k, .. } = case;
    let (a, b) = (integers(m * k, 1), integers(n * k, 2));
    assert_close(&format!("{case:?}"), &multiply(&a, &b, case), &reference(&a, &b, k), 0.0, 0.0);
}

fn check_both(m: usize, n: usize, k: usize, clusters: u32) {
    for cluster in [1, 2] {
        check(Case { m, n, k, cluster, clusters });
    }
}

fn one_element() {
    check_both(1, 1, 1, 1);
}

fn around_a_tile() {
    let sizes = [
        (1, 257, 64),
        (63, 1, 65),
        (64, 63, 127),
        (65, 65, 1),
        (127, 255, 63),
        (128, 256, 128),
        (129, 129, 129),
        (255, 127, 7),
        (257, 64, 130),
    ];
    for (m, n, k) in sizes {
        check_both(m, n, k, 1);
    }
}

/// 3 x 3 tiles, or 2 x 3 pairs of which the lower block of some is outside; a ring that goes on from tile to tile.
fn fewer_and_more_blocks_than_tiles() {
    for clusters in [1, 2, 4, 7, 11] {
        check_both(300, 520, 200, clusters);
    }
}

/// Groups of 16 tiles, then one of fewer, and of two columns.
fn more_rows_than_a_group() {
    check(Case { m: 2200, n: 300, k: 8, cluster: 1, clusters: 5 });
    check(Case { m: 4200, n: 300, k: 8, cluster: 2, clusters: 3 });
}

/// A ring of four stages goes round more than once within a tile.
fn many_steps() {
    check_both(65, 257, 700, 1);
    check_both(257, 100, 519, 2);
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = |most| {
        (1..=most, select(vec![1, 8, 63, 64, 65, 127, 128, 129]), 0..2)
            .prop_map(|(any, edge, which)| if which == 0 { any } else { edge })
    };
    let sizes = (sizes(400usize), sizes(600usize), sizes(300usize), 1..=2u32, 1..5u32);
    sizes.prop_map(|(m, n, k, cluster, clusters)| Case { m, n, k, cluster, clusters })
}

/// f32 sums of K products near 1/3, then a rounding to bf16.
fn fractions() {
    for_all(12, (cases(), 0..u32::MAX), |(case, seed)| {
        let Case { m, n, k, .. } = case;
        let exact = |values: &[f64]| wide(&rounded::<bf16>(values));
        let (a, b) = (exact(&noise(m * k, seed)), exact(&noise(n * k, !seed)));
        let want = sums(&a, &b, k);
        assert_close(&format!("{case:?}"), &multiply(&a, &b, case), &want, bf16::ROUNDING, 1e-4 * (k as f64).sqrt());
    });
}

fn linear() {
    for_all(6, (cases(), 0..u32::MAX), |(case, seed)| {
        // Few enough small integers that bf16 has their sums.
        let case = Case { k: case.k.min(30), ..case };
        let small = |len, seed| integers(len, seed).iter().map(|x| (x / 4.0).trunc()).collect::<Vec<_>>();
        let (m, n, k) = (case.m, case.n, case.k);
        let (x, y, b) = (small(m * k, seed), small(m * k, seed ^ 1), small(n * k, seed ^ 2));
        let sum = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| 4.0 * x + y).collect::<Vec<_>>();
        let want = sum(&multiply(&x, &b, case), &multiply(&y, &b, case));
        let want = wide(&rounded::<bf16>(&want));
        assert_close(&format!("{case:?}"), &multiply(&sum(&x, &y), &b, case), &want, 0.0, 0.0);
    });
}

/// Rows of `values` in an order with no pattern, and that order.
fn shuffled(values: &[f64], columns: usize, seed: u32) -> (Vec<f64>, Vec<usize>) {
    let keys = noise(values.len() / columns, seed);
    let mut order: Vec<_> = (0..keys.len()).collect();
    order.sort_by(|&i, &j| keys[i].total_cmp(&keys[j]));
    (order.iter().flat_map(|&row| &values[row * columns..][..columns]).copied().collect(), order)
}

/// Where the rows of a and of b lie changes no bit of their products.
fn rows_of_a_and_b_are_apart() {
    for_all(6, (cases(), 0..u32::MAX), |(case, seed)| {
        let Case { m, n, k, .. } = case;
        let (a, b) = (noise(m * k, seed), noise(n * k, seed ^ 1));
        let ((shuffled_a, rows), (shuffled_b, columns)) = (shuffled(&a, k, seed ^ 2), shuffled(&b, k, seed ^ 3));
        let straight = multiply(&a, &b, case);
        let row = |row: &usize| columns.iter().map(|column| straight[row * n + column]).collect::<Vec<_>>();
        let want: Vec<_> = rows.iter().flat_map(row).collect();
        assert_close(&format!("{case:?}"), &multiply(&shuffled_a, &shuffled_b, case), &want, 0.0, 0.0);
    });
}

/// NaN and infinity in a row of a stay in that row, in a row of b in that column.
fn spoilt_rows() {
    for cluster in [1, 2] {
        let case = Case { m: 140, n: 270, k: 70, cluster, clusters: 1 };
        let Case { m, n, k, .. } = case;
        let (mut a, mut b) = (integers(m * k, 1), integers(n * k, 2));
        a[5 * k + 69] = f64::NAN;
        a[130 * k] = f64::INFINITY;
        b[63 * k + 1] = f64::NEG_INFINITY;
        b[269 * k + 64] = f64::NAN;
        let got = multiply(&a, &b, case);
        assert_close(&format!("{case:?}"), &got, &reference(&a, &b, k), 0.0, 0.0);
        let spoilt = |i: usize| [5, 130].contains(&(i / n)) || [63, 269].contains(&(i % n));
        assert!((0..m * n).all(|i| spoilt(i) || got[i].is_finite()));
    }
}

/// Sums beyond the largest bf16, also by rounding alone, are infinite; those just below are not.
fn overflow() {
    let case = Case { m: 3, n: 2, k: 4, cluster: 1, clusters: 1 };
    let huge = 126f64.exp2();
    let a = [[huge; 4], [-huge; 4], [huge, huge, huge, 0.0]].concat();
    let b = [[1.0; 4], [1.0, 0.5, 0.25, 0.25]].concat();
    let want = [f64::INFINITY, 2.0 * huge, f64::NEG_INFINITY, -2.0 * huge, 3.0 * huge, 1.75 * huge];
    assert_close("sums", &multiply(&a, &b, case), &want, 0.0, 0.0);
}
