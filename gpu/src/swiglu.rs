//! SwiGLU: out = up · silu(gate), silu(x) = x / (1 + e^(-x)) (Shazeer, 2020, arXiv:2002.05202).
//!
//! Shapes: out and its gradient (rows, F), the preactivation and its gradient (rows, 2 F). The first F columns of the
//! preactivation are up, the others gate. F is a multiple of the packet, and rows * F is below 2^32 packets.
//!
//! Both kernels are elementwise: each thread computes one packet of columns of one row. Memory traffic in elements per
//! element of out: 3 in the forward kernel, 5 in the backward kernel.
//!
//! GEMM kernels with a SwiGLU epilogue use the same device functions, so the fused and the unfused result are
//! bit-identical.

use cuda_std::{Element, Global, GlobalMut, Packet, kernel, math, thread};

const THREADS: usize = 512;

/// Returns the logistic function 1 / (1 + e^(-x)), accurate to a few ULP. It is 0 or 1 if e^(-x) overflows or vanishes.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    math::recip(1.0 + math::exp2(x * -core::f32::consts::LOG2_E))
}

/// Returns silu(x) = x sigmoid(x).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// Returns up · silu(gate).
#[inline(always)]
pub fn swiglu(up: f32, gate: f32) -> f32 {
    up * silu(gate)
}

/// Returns the gradients of up and gate, where `dout` is the gradient of swiglu(up, gate).
#[inline(always)]
pub fn swiglu_gradients(dout: f32, up: f32, gate: f32) -> [f32; 2] {
    let s = sigmoid(gate);
    // s - s² is s (1 - s), without the rounding error of 1 - s.
    let slope = math::fma(gate, math::fma(-s, s, s), s);
    [dout * (gate * s), dout * (up * slope)]
}

/// Returns the grid size of both kernels for n = rows * F elements of out.
pub const fn grid<T: Element>(n: usize) -> u32 {
    n.div_ceil(THREADS * T::PACKET) as u32
}

/// Returns the indices of the calling thread's packet in out and in the columns of up, or `None` past the end.
///
/// `n` is rows * F, `columns` is F. The packet of gate begins F elements after that of up.
#[inline(always)]
fn packets<T: Element>(n: u64, columns: u32) -> Option<[usize; 2]> {
    let i = thread::index_1d() * T::PACKET;
    if i >= n as usize {
        return None;
    }
    // A 32-bit division is several times cheaper than one of 64 bits.
    let row = (i / T::PACKET) as u32 / (columns / T::PACKET as u32).max(1);
    Some([i, i + row as usize * columns as usize])
}

/// Computes out (rows, F) = up · silu(gate) from inp (rows, 2 F).
///
/// `n` is rows * F, `columns` is F. One packet per thread. Grid: [`grid`].
#[kernel(threads = 512, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn swiglu_forward<T: Element>(out: GlobalMut<T>, inp: Global<T>, n: u64, columns: u32) {
    let Some([i, at]) = packets::<T>(n, columns) else { return };
    let (up, gate) = (inp.packet_streaming(at), inp.packet_streaming(at + columns as usize));
    out.set_packet(i, Packet::from_fn(|k| swiglu(up.get(k), gate.get(k))));
}

/// Computes dinp (rows, 2 F), the gradient of inp (rows, 2 F), from dout (rows, F).
///
/// `n` is rows * F, `columns` is F. One packet of dout per thread. Grid: [`grid`].
#[kernel(threads = 512, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn swiglu_backward<T: Element>(dinp: GlobalMut<T>, dout: Global<T>, inp: Global<T>, n: u64, columns: u32) {
    let Some([i, at]) = packets::<T>(n, columns) else { return };
    let dout = dout.packet_streaming(i);
    let (up, gate) = (inp.packet_streaming(at), inp.packet_streaming(at + columns as usize));
    let mut gradients = [[0.0; 2]; 8];
    for k in 0..T::PACKET {
        gradients[k] = swiglu_gradients(dout.get(k), up.get(k), gate.get(k));
    }
    dinp.set_packet(at, Packet::from_fn(|k| gradients[k][0]));
    dinp.set_packet(at + columns as usize, Packet::from_fn(|k| gradients[k][1]));
}
