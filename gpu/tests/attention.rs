//! Attention, emulated, against softmax(Q Kᵀ / sqrt(HS), causal) V and its derivatives written out in f64.

mod common;

use bytemuck::Pod;
use common::attention::{BF16, Buffer, F32, Tolerance, compare, part, reference};
use cuda_std::bf16;
use cuda_std::mma::TensorCore;
use gpu::attention::launch::{self, HEAD_SIZES, Prepared, Shape};

fn emulate(kernel: &Prepared) {
    // SAFETY: every buffer is allocated for the shape that the kernel was prepared for.
    unsafe { kernel.launch.emulate(kernel.grid, kernel.shared_bytes) }.unwrap();
}

struct Run<T> {
    out: Buffer<T>,
    lse: Buffer<f32>,
    dqkv: Buffer<T>,
}

fn run<T: TensorCore + Pod>(qkv: &Buffer<T>, dout: &Buffer<T>, shape: Shape) -> Run<T> {
    let rows = shape.b * shape.t * shape.nh;
    let mut out = Buffer::poisoned(rows * shape.hs);
    let mut lse = Buffer::poisoned(rows);
    let mut dqkv = Buffer::poisoned(3 * rows * shape.hs);
    let mut d = Buffer::poisoned(rows);
    emulate(&launch::forward::<T>(out.output(), lse.output(), qkv.input(), shape).unwrap());
    let kernels =
        launch::backward::<T>(dqkv.output(), d.output(), dout.input(), qkv.input(), out.input(), lse.input(), shape);
    kernels.unwrap().iter().for_each(emulate);
    d.values();
    Run { out, lse, dqkv }
}

fn check<T: TensorCore + Pod>(hs: usize, tolerance: &Tolerance) {
    // Below, at and above a warp's rows, a tile, and two tiles; odd batches and heads.
    for (b, t, nh) in [(1, 1, 1), (2, 17, 3), (1, 63, 2), (2, 64, 1), (1, 65, 3), (2, 130, 3), (1, 257, 1)] {
        let shape = Shape { b, t, nh, hs };
        let qkv = Buffer::<T>::random(b * t * 3 * nh * hs, 2.0, 1 + t as u64);
        let dout = Buffer::<T>::random(b * t * nh * hs, 1.0, 1000 + t as u64);
        let expected = reference(&qkv.values(), &dout.values(), shape);
        let got = run(&qkv, &dout, shape);
        let name = |what: &str| format!("{what} of B={b} T={t} NH={nh} HS={hs}");
        compare(&name("out"), &got.out.values(), &expected.out, tolerance);
        compare(&name("lse"), &got.lse.values(), &expected.lse, &Tolerance { mean: 2e-6, worst: 2e-5 });
        let dqkv = got.dqkv.values();
        for (i, what) in ["dQ", "dK", "dV"].into_iter().enumerate() {
            compare(&name(what), &part(&dqkv, i, shape), &part(&expected.dqkv, i, shape), tolerance);
        }
    }
}

macro_rules! cases {
    ($($name:ident: $element:ty, $hs:literal, $tolerance:ident;)*) => {$(
        #[test]
        fn $name() {
            check::<$element>($hs, &$tolerance);
        }
    )*};
}

cases! {
    bf16_64: bf16, 64, BF16;
    bf16_80: bf16, 80, BF16;
    bf16_96: bf16, 96, BF16;
    bf16_128: bf16, 128, BF16;
    f32_64: f32, 64, F32;
    f32_80: f32, 80, F32;
    f32_96: f32, 96, F32;
    f32_128: f32, 128, F32;
}

#[test]
fn two_runs_agree_bit_for_bit() {
    let shape = Shape { b: 2, t: 150, nh: 2, hs: 64 };
    let qkv = Buffer::<f32>::random(shape.b * shape.t * 3 * shape.nh * shape.hs, 2.0, 7);
    let dout = Buffer::<f32>::random(shape.b * shape.t * shape.nh * shape.hs, 1.0, 8);
    let (first, second) = (run(&qkv, &dout, shape), run(&qkv, &dout, shape));
    assert!(first.out.words == second.out.words);
    assert!(first.lse.words == second.lse.words);
    assert!(first.dqkv.words == second.dqkv.words);
}

/// Scores far apart, where a softmax without its maximum would overflow.
#[test]
fn large_scores_do_not_overflow() {
    let shape = Shape { b: 1, t: 70, nh: 1, hs: 64 };
    let qkv = Buffer::<f32>::random(shape.t * 3 * shape.hs, 40.0, 9);
    let dout = Buffer::<f32>::random(shape.t * shape.hs, 1.0, 10);
    let expected = reference(&qkv.values(), &dout.values(), shape);
    assert!(expected.lse.iter().any(|&lse| lse > 600.0));
    let got = run(&qkv, &dout, shape);
    let tolerance = Tolerance { mean: 1e-3, worst: 1e-2 };
    compare("out", &got.out.values(), &expected.out, &tolerance);
    compare("lse", &got.lse.values(), &expected.lse, &tolerance);
    compare("dqkv", &got.dqkv.values(), &expected.dqkv, &tolerance);
}

#[test]
fn other_head_sizes_are_refused() {
    let mut empty = Buffer::<bf16>::poisoned(0);
    let mut lse = Buffer::<f32>::poisoned(0);
    for hs in [0, 16, 72, 112, 160] {
        assert!(!HEAD_SIZES.contains(&hs));
        let shape = Shape { b: 1, t: 1, nh: 1, hs };
        let input = empty.input();
        assert!(launch::forward::<bf16>(empty.output(), lse.output(), input, shape).is_none());
    }
}
