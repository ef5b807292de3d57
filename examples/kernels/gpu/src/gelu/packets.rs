//! GELU, version 3: 16-byte packets.
//!
//! Problem: out (n) = gelu(inp (n)), both bf16. n is a multiple of 8.
//! Idea: a thread loads and stores 8 elements with one 16-byte instruction each. That is an eighth of the instructions, and a
//! warp has 512 bytes in flight with each load.
//! Limit: memory bandwidth. The version in `gpu/` replaces tanh by one exponential. That saves instructions, which matters in the
//! epilogue of a GEMM.

use super::gelu;
use cuda_std::{Element, Global, GlobalMut, Packet, bf16, kernel, thread};

/// Computes out (n) = gelu(inp (n)). Grid: n / 2048, rounded up.
#[kernel(threads = 256)]
pub fn gelu_packets(out: GlobalMut<bf16>, inp: Global<bf16>, n: u64) {
    let i = thread::index_1d() * bf16::PACKET;
    if i < n as usize {
        let x = inp.packet(i);
        out.set_packet(i, Packet::from_fn(|k| gelu(x.get(k))));
    }
}
