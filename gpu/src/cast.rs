//! Conversions between f32 and the storage type, n elements, any n. Both arrays are 16-byte aligned.

use cuda_std::{Element, Global, GlobalMut, Packet, kernel, thread};

const THREADS: usize = 256;

/// Blocks of both kernels.
pub const fn grid<T: Element>(n: usize) -> u32 {
    n.div_ceil(THREADS * T::PACKET) as u32
}

/// out (n) = inp (n), exactly. One packet of T per thread.
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn cast_to_f32<T: Element>(out: GlobalMut<f32>, inp: Global<T>, n: u64) {
    let (first, n) = (thread::index_1d() * T::PACKET, n as usize);
    if first + T::PACKET <= n {
        let x = inp.packet_streaming(first);
        for part in 0..T::PACKET / f32::PACKET {
            let offset = part * f32::PACKET;
            out.set_packet(first + offset, Packet::from_fn(|k| x.get(offset + k)));
        }
    } else {
        for i in first..n {
            out.set(i, inp.at(i).to_f32());
        }
    }
}

/// out (n) = inp (n), rounded to nearest. One packet of T per thread.
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn cast_from_f32<T: Element>(out: GlobalMut<T>, inp: Global<f32>, n: u64) {
    let (first, n) = (thread::index_1d() * T::PACKET, n as usize);
    if first + T::PACKET <= n {
        let mut x = [Packet::zero(); 2];
        for part in 0..T::PACKET / f32::PACKET {
            x[part] = inp.packet_streaming(first + part * f32::PACKET);
        }
        out.set_packet(first, Packet::from_fn(|k| x[k / f32::PACKET].get(k % f32::PACKET)));
    } else {
        for i in first..n {
            out.set(i, T::from_f32(inp.at(i)));
        }
    }
}
