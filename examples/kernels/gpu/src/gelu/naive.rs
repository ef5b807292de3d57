//! GELU, version 1: one thread for each element.
//!
//! Problem: out (n) = gelu(inp (n)), both f32.
//! Idea: elements are independent, so each gets a thread. Neighboring threads access neighboring addresses (coalesced), so a
//! warp's 32 loads become one transaction of 128 bytes.
//! Limit: bytes in flight. A warp requests 128 bytes, waits for them, computes and ends.

use super::gelu;
use cuda_std::{Global, GlobalMut, kernel, thread};

/// Computes out (n) = gelu(inp (n)). Grid: n / 256, rounded up.
#[kernel(threads = 256)]
pub fn gelu_naive(out: GlobalMut<f32>, inp: Global<f32>, n: u64) {
    let i = thread::index_1d();
    if i < n as usize {
        out.set(i, gelu(inp.at(i)));
    }
}
