//! The sm_90a matrix product, emulated and watched, against sums in f64.

mod common;

use common::{assert_close, noise};
use cuda_std::emulate::{Memory, Report};
use cuda_std::hopper::TensorMap;
use cuda_std::{Element, bf16};
use gpu::matmul::{self, A_BOX, OUT_BOX, TILE_N};

/// (rows, columns) of bf16 whose rows begin at multiples of 16 bytes, as TMA wants them; NaN between the rows.
struct Matrix {
    rows: usize,
    columns: usize,
    values: Vec<bf16>,
}

impl Matrix {
    fn stride(columns: usize) -> usize {
        columns.next_multiple_of(8)
    }

    fn random(rows: usize, columns: usize, seed: u32) -> Self {
        let stride = Self::stride(columns);
        let noise = noise(rows * stride, seed);
        let value = |i: usize| if i % stride < columns { noise[i] as f32 } else { f32::NAN };
        Self { rows, columns, values: (0..rows * stride).map(|i| bf16::from_f32(value(i))).collect() }
    }

    fn row(&self, row: usize) -> impl Iterator<Item = f64> {
        self.values[row * Self::stride(self.columns)..][..self.columns].iter().map(|x| f64::from(x.to_f32()))
    }

    /// Its map, in `memory`.
    fn map(&self, memory: &mut Memory, name: &str, rows_of_box: u32) -> cuda_std::Global<TensorMap> {
        let base = memory.input(name, &self.values);
        let bytes = 2 * Self::stride(self.columns);
        let map = TensorMap::emulated(base, self.rows, self.columns, bytes, rows_of_box, 64);
        memory.input(&format!("map of {name}"), &[map])
    }
}

/// out, rows of `Matrix::stride(n)`, of which what TMA must not write stays 77.
fn run(a: &Matrix, b: &Matrix, cluster: u32, blocks: u32) -> Result<Vec<f64>, Report> {
    let (m, n, k) = (a.rows, b.rows, a.columns);
    let mut memory = Memory::new();
    let out = memory.buffer("out", &vec![bf16::from_f32(77.0); m * Matrix::stride(n)]);
    let map = TensorMap::emulated(out.reader(), m, n, 2 * Matrix::stride(n), OUT_BOX.0, OUT_BOX.1);
    let out_map = memory.input("map of out", &[map]);
    let a = a.map(&mut memory, "a", A_BOX.0);
    let b = b.map(&mut memory, "b", TILE_N / cluster);
    let (m, n, k) = (m as u32, n as u32, k as u32);
    let launch = match cluster {
        1 => matmul::matmul_wgmma::<1>(a, b, out_map, m, n, k),
        _ => matmul::matmul_wgmma::<2>(a, b, out_map, m, n, k),
    };
    launch.emulate_cluster_checked(&mut memory, [blocks, 1, 1], matmul::shared_bytes(), cluster)?;
    Ok(memory.read(out).iter().map(|x| f64::from(x.to_f32())).collect())
}

fn check(m: usize, n: usize, k: usize, cluster: u32, blocks: u32) {
    let (a, b) = (Matrix::random(m, k, 1), Matrix::random(n, k, 2));
    let got = run(&a, &b, cluster, blocks).unwrap();
    let product = |row: usize, column: usize| a.row(row).zip(b.row(column)).map(|(a, b)| a * b).sum();
    let stride = Matrix::stride(n);
    let want = |i: usize| if i % stride < n { product(i / stride, i % stride) } else { 77.0 };
    let want: Vec<f64> = (0..m * stride).map(want).collect();
    // Rounding to bf16, and f32 sums of K products near 1/9.
    let what = format!("{m} x {n} x {k}, clusters of {cluster}, {blocks} blocks");
    assert_close(&what, &got, &want, 1.0 / 250.0, 1e-3 * (k as f64).sqrt());
}

#[test]
fn one_element() {
    check(1, 1, 1, 1, 1);
}

#[test]
fn one_element_in_a_cluster() {
    check(1, 1, 1, 2, 2);
}

#[test]
fn edges_everywhere() {
    check(100, 100, 100, 1, 1);
    check(130, 130, 130, 1, 4);
}

/// Nine tiles for four blocks.
#[test]
fn fewer_blocks_than_tiles() {
    check(300, 520, 200, 1, 4);
}

/// Six pairs of tiles for two clusters, the lower one of some outside.
#[test]
fn fewer_clusters_than_tiles() {
    check(300, 520, 200, 2, 4);
}

/// A ring of four stages goes round more than once within a tile.
#[test]
fn many_steps() {
    check(65, 257, 700, 1, 1);
    check(129, 100, 700, 2, 2);
}
