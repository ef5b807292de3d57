//! GEMM, version 2: coalesced accesses.
//!
//! Problem: as in version 1.
//! Idea: consecutive threads have consecutive columns. A warp then reads one element of a, which is broadcast, and 32 neighboring
//! elements of b, and writes 32 neighboring elements of out. Only two lines differ from version 1.
//! Limit: two loads for each multiply-add. All of a passes through the load units N times, and all of b M times.

use cuda_std::{Element, Global, GlobalMut, bf16, kernel, math, thread};

/// Computes out. Grid: M N / 256, rounded up.
#[kernel(threads = 256)]
pub fn gemm_coalesced(out: GlobalMut<bf16>, a: Global<bf16>, b: Global<bf16>, m: u32, n: u32, k: u32) {
    let (i, m, n, k) = (thread::index_1d(), m as usize, n as usize, k as usize);
    if i >= m * n {
        return;
    }
    let (row, column) = (i / n, i % n);
    let mut sum = 0.0;
    for l in 0..k {
        sum = math::fma(a.at(row * k + l).to_f32(), b.at(l * n + column).to_f32(), sum);
    }
    out.set(row * n + column, bf16::from_f32(sum));
}
