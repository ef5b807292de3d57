//! GELU, version 2: bf16 storage.
//!
//! Problem: out (n) = gelu(inp (n)), both bf16.
//! Idea: half the bytes. Arithmetic stays in f32: only loads and stores convert.
//! Limit: a warp now loads 64 bytes per instruction. There are too few bytes in flight to fill the memory system, so the kernel is
//! hardly faster than version 1.

use super::gelu;
use cuda_std::{Element, Global, GlobalMut, bf16, kernel, thread};

/// Computes out (n) = gelu(inp (n)). Grid: n / 256, rounded up.
#[kernel(threads = 256)]
pub fn gelu_bf16(out: GlobalMut<bf16>, inp: Global<bf16>, n: u64) {
    let i = thread::index_1d();
    if i < n as usize {
        out.set(i, bf16::from_f32(gelu(inp.at(i).to_f32())));
    }
}
