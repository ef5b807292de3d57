//! ReLU²: y = max(x, 0)² (So et al., 2021, arXiv:2109.08668).
//!
//! Both kernels are elementwise over n values, a multiple of the packet. The forward kernel moves 2 elements per value,
//! the backward kernel 3. GEMM kernels with a ReLU² epilogue use the same device functions, so the fused and the unfused
//! result are bit-identical.

use cuda_std::{Element, Global, GlobalMut, Packet, kernel, thread};

const THREADS: usize = 512;

/// Returns max(x, 0), and NaN for NaN. `math::max` would return 0 for NaN.
#[inline(always)]
fn relu(x: f32) -> f32 {
    if x <= 0.0 { 0.0 } else { x }
}

/// Returns max(x, 0)².
#[inline(always)]
pub fn relu_squared(x: f32) -> f32 {
    let positive = relu(x);
    positive * positive
}

/// Returns the derivative 2 max(x, 0).
#[inline(always)]
pub fn slope(x: f32) -> f32 {
    2.0 * relu(x)
}

/// Returns the grid size of both kernels for n elements.
pub const fn grid<T: Element>(n: usize) -> u32 {
    n.div_ceil(THREADS * T::PACKET) as u32
}

/// Computes out (n) = max(inp (n), 0)². One packet per thread. Grid: [`grid`].
#[kernel(threads = 512, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn relu_squared_forward<T: Element>(out: GlobalMut<T>, inp: Global<T>, n: u64) {
    let i = thread::index_1d() * T::PACKET;
    if i >= n as usize {
        return;
    }
    let x = inp.packet_streaming(i);
    out.set_packet(i, Packet::from_fn(|k| relu_squared(x.get(k))));
}

/// Computes grad (n) *= 2 max(inp (n), 0) in place, where inp is the input of the forward kernel. One packet per
/// thread. Grid: [`grid`].
#[kernel(threads = 512, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn relu_squared_backward<T: Element>(grad: GlobalMut<T>, inp: Global<T>, n: u64) {
    let i = thread::index_1d() * T::PACKET;
    if i >= n as usize {
        return;
    }
    let (x, dy) = (inp.packet_streaming(i), grad.packet(i));
    grad.set_packet(i, Packet::from_fn(|k| dy.get(k) * slope(x.get(k))));
}
