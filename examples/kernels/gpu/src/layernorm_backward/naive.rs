//! Gradient of LayerNorm, version 1: one thread for each row.
//!
//! Problem: dinp (rows, C) bf16 +=, dweight (C) and dbias (C) f32 +=, from dout and inp (rows, C), weight (C), mean and rstd (rows)
//! f32.
//! Idea: the first pass over the row computes the two means, the second the gradient of the input. The gradients of the
//! parameters are sums over rows, that is over threads: each thread adds its term atomically.
//! Limit: uncoalesced accesses, and two atomic additions for each element. Only 2 C addresses receive all of them, and the lanes of
//! a warp add to the same one.

use cuda_std::{Element, Global, GlobalMut, bf16, kernel, thread};

/// Adds the gradients. Grid: rows / 128, rounded up.
#[kernel(threads = 128)]
pub fn layernorm_backward_naive(
    dinp: GlobalMut<bf16>,
    dweight: GlobalMut<f32>,
    dbias: GlobalMut<f32>,
    dout: Global<bf16>,
    inp: Global<bf16>,
    weight: Global<bf16>,
    mean: Global<f32>,
    rstd: Global<f32>,
    rows: u32,
    channels: u32,
) {
    let (row, channels) = (thread::index_1d(), channels as usize);
    if row >= rows as usize {
        return;
    }
    let (m, r) = (mean.at(row), rstd.at(row));
    let (dinp, dout, inp) = (dinp.skip(row * channels), dout.skip(row * channels), inp.skip(row * channels));
    let (mut sum_g, mut sum_gx) = (0.0, 0.0);
    for c in 0..channels {
        let g = dout.at(c).to_f32() * weight.at(c).to_f32();
        sum_g += g;
        sum_gx += g * (inp.at(c).to_f32() - m) * r;
    }
    let (mean_g, mean_gx) = (sum_g / channels as f32, sum_gx / channels as f32);
    for c in 0..channels {
        let (dy, xhat) = (dout.at(c).to_f32(), (inp.at(c).to_f32() - m) * r);
        let dx = r * (dy * weight.at(c).to_f32() - mean_g - xhat * mean_gx);
        dinp.set(c, bf16::from_f32(dinp.at(c).to_f32() + dx));
        dweight.atomic_add(c, dy * xhat);
        dbias.atomic_add(c, dy);
    }
}
