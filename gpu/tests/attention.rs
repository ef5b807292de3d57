//! Attention, emulated, against softmax(Q Kᵀ / sqrt(HS), causal) V and its derivatives written out in f64.

use bytemuck::Pod;
use cuda_std::mma::TensorCore;
use cuda_std::{Global, GlobalMut, bf16};
use gpu::attention::launch::{self, HEAD_SIZES, Prepared, Shape};

/// Elements after the end of each buffer. NaN, so that what is read there shows, and checked to stay so.
const GUARD: usize = 64;

/// A tensor in memory aligned as a GPU's would be.
struct Buffer<T> {
    words: Vec<u128>,
    len: usize,
    element: std::marker::PhantomData<T>,
}

impl<T: TensorCore + Pod> Buffer<T> {
    /// All NaN.
    fn poisoned(len: usize) -> Self {
        let words = vec![0; ((len + GUARD) * size_of::<T>()).div_ceil(16)];
        let mut buffer = Self { words, len, element: std::marker::PhantomData };
        bytemuck::cast_slice_mut::<_, T>(&mut buffer.words).fill(T::from_f32(f32::NAN));
        buffer
    }

    /// Uniform in ±`range`, rounded to `T`.
    fn random(len: usize, range: f32, seed: u64) -> Self {
        let mut buffer = Self::poisoned(len);
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        for element in &mut bytemuck::cast_slice_mut::<_, T>(&mut buffer.words)[..len] {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *element = T::from_f32(((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * range);
        }
        buffer
    }

    fn all(&self) -> &[T] {
        bytemuck::cast_slice(&self.words)
    }

    /// The elements, after a look at the guard.
    fn values(&self) -> Vec<f64> {
        let (values, guard) = self.all().split_at(self.len);
        assert!(guard.iter().all(|x| x.to_f32().is_nan()), "written past the end");
        values.iter().map(|x| x.to_f32() as f64).collect()
    }

    fn input(&self) -> Global<T> {
        Global::new(self.all().as_ptr())
    }

    fn output(&mut self) -> GlobalMut<T> {
        GlobalMut::new(bytemuck::cast_slice_mut::<_, T>(&mut self.words).as_mut_ptr())
    }
}

fn emulate(kernel: &Prepared) {
    // SAFETY: every buffer is allocated for the shape that the kernel was prepared for.
    unsafe { kernel.launch.emulate(kernel.grid, kernel.shared_bytes) }.unwrap();
}

/// What the kernels compute, in f64.
struct Reference {
    out: Vec<f64>,
    lse: Vec<f64>,
    dqkv: Vec<f64>,
}

fn reference(qkv: &[f64], dout: &[f64], Shape { b, t, nh, hs }: Shape) -> Reference {
    let mut out = vec![0.0; b * t * nh * hs];
    let mut lse = vec![0.0; b * nh * t];
    let mut dqkv = vec![0.0; b * t * 3 * nh * hs];
    let scale = 1.0 / (hs as f64).sqrt();
    for (b, h) in (0..b).flat_map(|b| (0..nh).map(move |h| (b, h))) {
        let packed = |t_: usize, part: usize| (((b * t + t_) * 3 + part) * nh + h) * hs;
        let plain = |t_: usize| ((b * t + t_) * nh + h) * hs;
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
        let row = |t_: usize, part: usize| &qkv[packed(t_, part)..][..hs];
        for query in 0..t {
            let scores: Vec<_> = (0..=query).map(|key| dot(row(query, 0), row(key, 1)) * scale).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            lse[(b * nh + h) * t + query] = max + sum.ln();
            let p: Vec<_> = scores.iter().map(|s| (s - max).exp() / sum).collect();
            let dout = &dout[plain(query)..][..hs];
            let dp: Vec<_> = (0..=query).map(|key| dot(dout, row(key, 2))).collect();
            let mean = dot(&p, &dp);
            for key in 0..=query {
                let ds = p[key] * (dp[key] - mean) * scale;
                for i in 0..hs {
                    out[plain(query) + i] += p[key] * qkv[packed(key, 2) + i];
                    dqkv[packed(query, 0) + i] += ds * qkv[packed(key, 1) + i];
                    dqkv[packed(key, 1) + i] += ds * qkv[packed(query, 0) + i];
                    dqkv[packed(key, 2) + i] += p[key] * dout[i];
                }
            }
        }
    }
    Reference { out, lse, dqkv }
}

/// Errors allowed, relative to the root mean square of what is expected: in the mean, and of one element.
struct Tolerance {
    mean: f64,
    worst: f64,
}

fn compare(what: &str, got: &[f64], expected: &[f64], tolerance: &Tolerance) {
    let rms = |values: &mut dyn Iterator<Item = f64>| {
        let (mut sum, mut count) = (0.0, 0);
        for x in values {
            sum += x * x;
            count += 1;
        }
        (sum / f64::from(count)).sqrt()
    };
    // Where all is zero (gradients of scores at T = 1), errors count as they are.
    let scale = match rms(&mut expected.iter().copied()) {
        scale if scale < 1e-9 => 1.0,
        scale => scale,
    };
    let error = || got.iter().zip(expected).map(|(x, y)| x - y);
    let mean = rms(&mut error()) / scale;
    let (at, worst) = error()
        .map(|e| if e.is_nan() { f64::INFINITY } else { e.abs() / scale })
        .enumerate()
        .fold((0, 0.0), |worst, (i, e)| if e > worst.1 { (i, e) } else { worst });
    println!("{what}: mean error {mean:.1e}, worst {worst:.1e}");
    assert!(
        mean <= tolerance.mean && worst <= tolerance.worst,
        "{what}: mean error {mean:.2e} (allowed {:.0e}), worst {worst:.2e} (allowed {:.0e}): element {at} is {}, not {}",
        tolerance.mean,
        tolerance.worst,
        got[at],
        expected[at],
    );
}

/// One part of (B,T,3,NH,HS).
fn part(packed: &[f64], part: usize, Shape { nh, hs, .. }: Shape) -> Vec<f64> {
    packed.chunks(3 * nh * hs).flat_map(|row| &row[part * nh * hs..][..nh * hs]).copied().collect()
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

const BF16: Tolerance = Tolerance { mean: 5e-3, worst: 5e-2 };
const F32: Tolerance = Tolerance { mean: 2e-6, worst: 2e-5 };

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
