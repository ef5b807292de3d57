//! One kernel for two element types.
//!
//! **Problem.** The activation function SiLU, y = x / (1 + e^-x), for tensors of f32 and of bf16.
//!
//! **Idea.** The kernel is generic over the element type and computes in f32. `instances` lists the types that are compiled for the
//! GPU: `silu_f32` and `silu_bf16`. A thread loads and stores 16 bytes at once, a packet of 4 f32 or 8 bf16. The last thread has an
//! incomplete packet, which it processes one element at a time.
//!
//! **Tests.** Both types, for lengths that are not multiples of the packet. Infinities and NaN. An x that is shorter than y is an
//! out-of-bounds access.

use cuda_std::{Element, GlobalSlice, GlobalSliceMut, Packet, kernel, math, thread};

/// Threads per block.
pub const THREADS: usize = 256;

/// Returns the grid for `n` elements of type `T`.
pub const fn grid<T: Element>(n: usize) -> [u32; 3] {
    [n.div_ceil(THREADS * T::PACKET) as u32, 1, 1]
}

fn silu_of(x: f32) -> f32 {
    x / (1.0 + math::exp(-x))
}

/// Computes y (n) = SiLU(x (n)).
#[kernel(threads = 256, checked, instances(f32 = <f32>, bf16 = <cuda_std::bf16>))]
pub fn silu<T: Element>(y: GlobalSliceMut<T>, x: GlobalSlice<T>) {
    let first = thread::index_1d() * T::PACKET;
    if first + T::PACKET <= y.len() {
        let packet = x.packet(first);
        y.set_packet(first, Packet::from_fn(|i| silu_of(packet.get(i))));
    } else {
        for i in first..y.len() {
            y.set(i, T::from_f32(silu_of(x.at(i).to_f32())));
        }
    }
}
