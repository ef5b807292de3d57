//! GELU in its tanh approximation: y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel, 2016,
//! arXiv:1606.08415).
//!
//! Both kernels are elementwise over n values, a multiple of the packet. GEMM kernels with a GELU epilogue use the same
//! device functions, so the fused and the unfused result are bit-identical.

use cuda_std::{Element, Global, GlobalMut, Packet, kernel, math, thread};

const SCALE: f32 = 0.797_884_6; // sqrt(2 / pi)
const CUBIC: f32 = 0.044_715;

const THREADS: usize = 512;

/// Returns the gate (1 + tanh(u)) / 2, u = SCALE (x + CUBIC x³), from x and `square` = x².
///
/// Computed as 1 / (1 + e^(-2u)), which is accurate to a few ULP. 1 + tanh(u) would cancel for large negative x.
#[inline(always)]
fn gate(x: f32, square: f32) -> f32 {
    const LINEAR: f32 = -2.0 * SCALE * core::f32::consts::LOG2_E;
    math::recip(1.0 + math::exp2(x * math::fma(square, LINEAR * CUBIC, LINEAR)))
}

/// Returns gelu(x).
#[inline(always)]
pub fn gelu(x: f32) -> f32 {
    x * gate(x, x * x)
}

/// Returns the derivative gelu'(x).
#[inline(always)]
pub fn slope(x: f32) -> f32 {
    gelu_and_slope(x)[1]
}

/// Returns gelu(x) and gelu'(x), bit-identical to [`gelu`] and [`slope`], but computes the gate only once.
#[inline(always)]
pub fn gelu_and_slope(x: f32) -> [f32; 2] {
    // The bound keeps an overflowing square from giving infinity * 0 = NaN below. It does not affect the gate, which is
    // 0 or 1 there.
    let square = (x * x).min(1e6);
    let s = gate(x, square);
    let gate_slope = x * math::fma(-s, s, s);
    [x * s, math::fma(gate_slope, math::fma(square, 6.0 * SCALE * CUBIC, 2.0 * SCALE), s)]
}

/// Returns the grid size of both kernels for n elements.
pub const fn grid<T: Element>(n: usize) -> u32 {
    n.div_ceil(THREADS * T::PACKET) as u32
}

/// Computes out (n) = gelu(inp (n)). One packet per thread. Grid: [`grid`].
#[kernel(threads = 512, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn gelu_forward<T: Element>(out: GlobalMut<T>, inp: Global<T>, n: u64) {
    let i = thread::index_1d() * T::PACKET;
    if i >= n as usize {
        return;
    }
    let x = inp.packet_streaming(i);
    out.set_packet(i, Packet::from_fn(|k| gelu(x.get(k))));
}

/// Computes grad (n) *= gelu'(inp (n)) in place, where inp is the input of the forward kernel. One packet per thread.
/// Grid: [`grid`].
#[kernel(threads = 512, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn gelu_backward<T: Element>(grad: GlobalMut<T>, inp: Global<T>, n: u64) {
    let i = thread::index_1d() * T::PACKET;
    if i >= n as usize {
        return;
    }
    let (x, dy) = (inp.packet_streaming(i), grad.packet(i));
    grad.set_packet(i, Packet::from_fn(|k| dy.get(k) * slope(x.get(k))));
}
