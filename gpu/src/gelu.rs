//! GELU, the tanh form: y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
//!
//! Elementwise over n values, n a multiple of the packet. Backward overwrites the gradient in place.

use cuda_std::{Element, Global, GlobalMut, Packet, kernel, math, thread};

const SCALE: f32 = 0.797_884_6; // sqrt(2 / pi)
const CUBIC: f32 = 0.044_715;

const THREADS: usize = 512;

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
    let y = Packet::from_fn(|k| {
        let x = x.get(k);
        0.5 * x * (1.0 + math::tanh(SCALE * (x + CUBIC * x * x * x)))
    });
    out.set_packet(i, y);
}

/// grad (n) *= gelu'(inp (n)), where inp is what went into the forward. One packet per thread.
#[kernel(threads = 512, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn gelu_backward<T: Element>(grad: GlobalMut<T>, inp: Global<T>, n: u64) {
    let i = thread::index_1d() * T::PACKET;
    if i >= n as usize {
        return;
    }
    let (x, dy) = (inp.packet_streaming(i), grad.packet(i));
    let dx = Packet::from_fn(|k| {
        let x = x.get(k);
        let tanh = math::tanh(SCALE * (x + CUBIC * x * x * x));
        // Bounded, since infinity times the 0 that 1 - tanh^2 is by then would be NaN.
        let inner = SCALE * (1.0 + 3.0 * CUBIC * (x * x).min(1e6));
        dy.get(k) * 0.5 * ((1.0 + tanh) + x * (1.0 - tanh * tanh) * inner)
    });
    grad.set_packet(i, dx);
}
