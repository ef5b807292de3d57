//! Embedding, version 1: one thread for each element of the output.
//!
//! Problem: out (B, T, C) = wte (V, C) at tokens (B, T) + wpe (T, C), bf16. The tokens are i32.
//! Idea: the index of the element gives position and channel. Consecutive threads read consecutive channels of one row, so the
//! accesses are coalesced although the rows are scattered.
//! Limit: accesses of 2 bytes, and two integer divisions for each element.

use cuda_std::{Element, Global, GlobalMut, bf16, kernel, thread};

/// Computes out for `positions` = B T positions. Grid: B T C / 256, rounded up.
#[kernel(threads = 256)]
pub fn encoder_naive(
    out: GlobalMut<bf16>,
    tokens: Global<i32>,
    wte: Global<bf16>,
    wpe: Global<bf16>,
    positions: u32,
    sequence: u32,
    channels: u32,
) {
    let (i, channels) = (thread::index_1d(), channels as usize);
    if i >= positions as usize * channels {
        return;
    }
    let (position, channel) = (i / channels, i % channels);
    let (token, t) = (tokens.at(position) as usize, position % sequence as usize);
    let sum = wte.at(token * channels + channel).to_f32() + wpe.at(t * channels + channel).to_f32();
    out.set(i, bf16::from_f32(sum));
}
