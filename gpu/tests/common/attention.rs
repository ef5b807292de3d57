//! Attention in f64, and what its tests share.

use bytemuck::Pod;
use cuda_std::mma::TensorCore;
use cuda_std::{Global, GlobalMut};
use gpu::attention::launch::Shape;

/// Elements after the end of each buffer. NaN, so that what is read there shows, and checked to stay so.
const GUARD: usize = 64;

/// A tensor in memory aligned as a GPU's would be.
pub struct Buffer<T> {
    pub words: Vec<u128>,
    len: usize,
    element: std::marker::PhantomData<T>,
}

impl<T: TensorCore + Pod> Buffer<T> {
    /// All NaN.
    pub fn poisoned(len: usize) -> Self {
        let words = vec![0; ((len + GUARD) * size_of::<T>()).div_ceil(16)];
        let mut buffer = Self { words, len, element: std::marker::PhantomData };
        bytemuck::cast_slice_mut::<_, T>(&mut buffer.words).fill(T::from_f32(f32::NAN));
        buffer
    }

    /// Uniform in ±`range`, rounded to `T`.
    pub fn random(len: usize, range: f32, seed: u64) -> Self {
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

    pub fn all(&self) -> &[T] {
        bytemuck::cast_slice(&self.words)
    }

    /// The elements, after a look at the guard.
    pub fn values(&self) -> Vec<f64> {
        let (values, guard) = self.all().split_at(self.len);
        assert!(guard.iter().all(|x| x.to_f32().is_nan()), "written past the end");
        values.iter().map(|x| x.to_f32() as f64).collect()
    }

    pub fn input(&self) -> Global<T> {
        Global::new(self.all().as_ptr())
    }

    pub fn output(&mut self) -> GlobalMut<T> {
        GlobalMut::new(bytemuck::cast_slice_mut::<_, T>(&mut self.words).as_mut_ptr())
    }
}

/// What the kernels compute, in f64.
pub struct Reference {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    pub dqkv: Vec<f64>,
}

pub fn reference(qkv: &[f64], dout: &[f64], Shape { b, t, nh, hs }: Shape) -> Reference {
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
pub struct Tolerance {
    pub mean: f64,
    pub worst: f64,
}

pub fn compare(what: &str, got: &[f64], expected: &[f64], tolerance: &Tolerance) {
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
pub fn part(packed: &[f64], part: usize, Shape { nh, hs, .. }: Shape) -> Vec<f64> {
    packed.chunks(3 * nh * hs).flat_map(|row| &row[part * nh * hs..][..nh * hs]).copied().collect()
}

pub const BF16: Tolerance = Tolerance { mean: 5e-3, worst: 5e-2 };
pub const F32: Tolerance = Tolerance { mean: 2e-6, worst: 2e-5 };
