//! GEMM, version 1: one thread for each element of the output, in column order.
//!
//! Problem: out (M, N) = a (M, K) · b (K, N).
//! Idea: each thread computes the dot product of a row of a and a column of b.
//! Limit: consecutive threads have consecutive rows. So a warp reads 32 different rows of a, and writes 32 different rows of out:
//! each access touches 32 sectors of memory to use 2 bytes of each.

use cuda_std::{Element, Global, GlobalMut, bf16, kernel, math, thread};

/// Computes out. Grid: M N / 256, rounded up.
#[kernel(threads = 256)]
pub fn gemm_naive(out: GlobalMut<bf16>, a: Global<bf16>, b: Global<bf16>, m: u32, n: u32, k: u32) {
    let (i, m, n, k) = (thread::index_1d(), m as usize, n as usize, k as usize);
    if i >= m * n {
        return;
    }
    let (row, column) = (i % m, i / m);
    let mut sum = 0.0;
    for l in 0..k {
        sum = math::fma(a.at(row * k + l).to_f32(), b.at(l * n + column).to_f32(), sum);
    }
    out.set(row * n + column, bf16::from_f32(sum));
}
