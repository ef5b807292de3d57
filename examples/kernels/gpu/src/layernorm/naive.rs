//! LayerNorm, version 1: one thread for each row.
//!
//! Problem: out (rows, C), mean (rows) and rstd (rows) f32, from inp (rows, C), weight (C) and bias (C).
//! Idea: rows are independent. A thread reads its row three times: for the mean, for the variance, and for the output.
//! Limit: uncoalesced accesses. Neighboring threads read addresses that are a whole row apart, so each load of a warp touches 32
//! different sectors of 32 bytes, to use 2 bytes of each.

use super::EPSILON;
use cuda_std::{Element, Global, GlobalMut, bf16, kernel, math, thread};

/// Normalizes the rows. Grid: rows / 128, rounded up.
#[kernel(threads = 128)]
pub fn layernorm_naive(
    out: GlobalMut<bf16>,
    mean: GlobalMut<f32>,
    rstd: GlobalMut<f32>,
    inp: Global<bf16>,
    weight: Global<bf16>,
    bias: Global<bf16>,
    rows: u32,
    channels: u32,
) {
    let (row, channels) = (thread::index_1d(), channels as usize);
    if row >= rows as usize {
        return;
    }
    let (inp, out) = (inp.skip(row * channels), out.skip(row * channels));
    let mut sum = 0.0;
    for c in 0..channels {
        sum += inp.at(c).to_f32();
    }
    let m = sum / channels as f32;
    let mut squares = 0.0;
    for c in 0..channels {
        let d = inp.at(c).to_f32() - m;
        squares += d * d;
    }
    let r = math::rsqrt(squares / channels as f32 + EPSILON);
    for c in 0..channels {
        let normed = (inp.at(c).to_f32() - m) * r;
        out.set(c, bf16::from_f32(normed * weight.at(c).to_f32() + bias.at(c).to_f32()));
    }
    mean.set(row, m);
    rstd.set(row, r);
}
