//! Embedding, version 2: one thread for each packet of 8 channels.
//!
//! Problem: as in version 1. C is a multiple of 8.
//! Idea: 16-byte accesses, and the divisions are shared by 8 elements.
//! Limit: a chain of two loads: a row of wte is requested when its token has arrived. The version in `gpu/` gives a warp a whole
//! row, so that the token is loaded once for it and no division remains.

use cuda_std::{Element, Global, GlobalMut, Packet, bf16, kernel, thread};

/// Computes out for `positions` = B T positions. Grid: B T C / 2048, rounded up.
#[kernel(threads = 256)]
pub fn encoder_packets(
    out: GlobalMut<bf16>,
    tokens: Global<i32>,
    wte: Global<bf16>,
    wpe: Global<bf16>,
    positions: u32,
    sequence: u32,
    channels: u32,
) {
    let (i, channels) = (thread::index_1d() * bf16::PACKET, channels as usize);
    if i >= positions as usize * channels {
        return;
    }
    let (position, channel) = (i / channels, i % channels);
    let (token, t) = (tokens.at(position) as usize, position % sequence as usize);
    let (a, b) = (wte.packet(token * channels + channel), wpe.packet(t * channels + channel));
    out.set_packet(i, Packet::from_fn(|k| a.get(k) + b.get(k)));
}
