//! Gradient of GELU, version 1: one thread for each element.
//!
//! Problem: grad (n) *= gelu'(inp (n)) in place, where inp is the input of the forward pass. Both bf16.
//! Idea: the derivative needs only the input, so the forward pass stores nothing else. With u the argument of tanh and t = tanh u:
//! gelu'(x) = (1 + t) / 2 + x/2 (1 - t²) u'.
//! Limit: accesses of 2 bytes, as in version 2 of the forward pass. The kernel in `gpu/` uses packets.

use super::{CUBIC, SCALE};
use cuda_std::{Element, Global, GlobalMut, bf16, kernel, math, thread};

/// Computes grad (n) *= gelu'(inp (n)). Grid: n / 256, rounded up.
#[kernel(threads = 256)]
pub fn gelu_backward_naive(grad: GlobalMut<bf16>, inp: Global<bf16>, n: u64) {
    let i = thread::index_1d();
    if i < n as usize {
        let x = inp.at(i).to_f32();
        let t = math::tanh(SCALE * (x + CUBIC * x * x * x));
        let slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * SCALE * (1.0 + 3.0 * CUBIC * x * x);
        grad.set(i, bf16::from_f32(grad.at(i).to_f32() * slope));
    }
}
