//! GELU, the tanh form: y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
//!
//! Elementwise over n values, n a multiple of the packet. Backward overwrites the gradient in place. Matrix products that end
//! in a GELU use the same two functions, so that a pass of its own gives the same bits.

use cuda_std::{Element, Global, GlobalMut, Packet, kernel, math, thread};

const SCALE: f32 = 0.797_884_6; // sqrt(2 / pi)
const CUBIC: f32 = 0.044_715;

const THREADS: usize = 512;

/// (1 + tanh(SCALE (x + CUBIC x³))) / 2 as 1 / (1 + e^(-2 SCALE (x + CUBIC x³))), x² given: exact to a few units in the
/// last place also where it is tiny, which 1 + tanh is not.
#[inline(always)]
fn gate(x: f32, square: f32) -> f32 {
    const LINEAR: f32 = -2.0 * SCALE * core::f32::consts::LOG2_E;
    math::recip(1.0 + math::exp2(x * math::fma(square, LINEAR * CUBIC, LINEAR)))
}

/// gelu(x)
#[inline(always)]
pub fn gelu(x: f32) -> f32 {
    x * gate(x, x * x)
}

/// gelu'(x)
#[inline(always)]
pub fn slope(x: f32) -> f32 {
    gelu_and_slope(x)[1]
}

/// gelu(x) and gelu'(x), with the bits of [`gelu`] and of [`slope`], at the cost of one gate.
#[inline(always)]
pub fn gelu_and_slope(x: f32) -> [f32; 2] {
    // Bounded, since infinity times the 0 that the gate's slope is by then would be NaN. The gate is 0 or 1 there either way.
    let square = (x * x).min(1e6);
    let s = gate(x, square);
    let bend = x * math::fma(-s, s, s);
    [x * s, math::fma(bend, math::fma(square, 6.0 * SCALE * CUBIC, 2.0 * SCALE), s)]
}

/// Blocks of both kernels.
pub const fn grid<T: Element>(n: usize) -> u32 {
    n.div_ceil(THREADS * T::PACKET) as u32
}

/// out (n) = gelu(inp (n)). One packet per thread.
#[kernel(threads = 512, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn gelu_forward<T: Element>(out: GlobalMut<T>, inp: Global<T>, n: u64) {
    let i = thread::index_1d() * T::PACKET;
    if i >= n as usize {
        return;
    }
    let x = inp.packet_streaming(i);
    out.set_packet(i, Packet::from_fn(|k| gelu(x.get(k))));
}

/// grad (n) *= gelu'(inp (n)), where inp is what went into the forward. One packet per thread.
#[kernel(threads = 512, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn gelu_backward<T: Element>(grad: GlobalMut<T>, inp: Global<T>, n: u64) {
    let i = thread::index_1d() * T::PACKET;
    if i >= n as usize {
        return;
    }
    let (x, dy) = (inp.packet_streaming(i), grad.packet(i));
    grad.set_packet(i, Packet::from_fn(|k| dy.get(k) * slope(x.get(k))));
}
