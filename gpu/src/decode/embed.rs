//! Embeddings of the newest token of each slot: out (B, C) = `wte[token] + wpe[position]`.

use super::{POSITION, TOKEN, WORDS};
use cuda_std::{Element, Global, GlobalMut, Packet, kernel, thread};

/// Threads of a block.
const THREADS: usize = 128;

/// Returns the grid of [`decode_embed`]: (blocks of a row, slots, 1).
pub const fn grid<T: Element>(channels: usize, slots: usize) -> [u32; 3] {
    [channels.div_ceil(THREADS * T::PACKET) as u32, slots as u32, 1]
}

/// Computes out (B, C) from wte (Vp, C) and wpe (max T, C), which may be null. C is a multiple of the packet. An idle slot has position 0.
///
/// One packet per thread. Grid: [`grid`].
#[kernel(threads = 128, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn decode_embed<T: Element>(out: GlobalMut<T>, slots: Global<i32>, wte: Global<T>, wpe: Global<T>, channels: u32) {
    let (channels, column) = (channels as usize, thread::index_1d() * T::PACKET);
    if column >= channels {
        return;
    }
    let slot = thread::block_idx_y() as usize;
    let (token, position) =
        (slots.at(slot * WORDS + TOKEN) as usize, slots.at(slot * WORDS + POSITION).max(0) as usize);
    let token = wte.packet(token * channels + column);
    let sum = if wpe.is_null() {
        token
    } else {
        let position = wpe.packet(position * channels + column);
        Packet::from_fn(|i| token.get(i) + position.get(i))
    };
    out.set_packet(slot * channels + column, sum);
}
