//! Residual addition without a normalisation after it. Elementwise over n values, n a multiple of the packet.

use cuda_std::{Element, Global, GlobalMut, Packet, kernel, thread};

const THREADS: usize = 512;

/// Blocks of [`residual_forward`].
pub const fn grid<T: Element>(n: usize) -> u32 {
    n.div_ceil(THREADS * T::PACKET) as u32
}

/// out (n) = a (n) + b (n). One packet per thread.
#[kernel(threads = 512, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn residual_forward<T: Element>(out: GlobalMut<T>, a: Global<T>, b: Global<T>, n: u64) {
    let i = thread::index_1d() * T::PACKET;
    if i >= n as usize {
        return;
    }
    let (a, b) = (a.packet_streaming(i), b.packet_streaming(i));
    out.set_packet(i, Packet::from_fn(|k| a.get(k) + b.get(k)));
}
