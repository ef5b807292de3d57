//! Gradient of the embedding, version 1: atomic additions.
//!
//! Problem: dwte (V, C) f32 += the rows of dout (B, T, C) bf16 at their tokens; dwpe (T, C) f32 += the sums over B.
//! Idea: several positions add to one row, so the additions must be atomic.
//! Limit: one element for each thread, with two atomic additions. Frequent tokens make thousands of threads wait for one address.
//! The order of the additions differs between runs, and f32 addition is not associative: the result is not reproducible.

use cuda_std::{Element, Global, GlobalMut, bf16, kernel, thread};

/// Adds the gradients of `positions` = B T positions. Grid: B T C / 256, rounded up.
#[kernel(threads = 256)]
pub fn encoder_backward_atomic(
    dwte: GlobalMut<f32>,
    dwpe: GlobalMut<f32>,
    dout: Global<bf16>,
    tokens: Global<i32>,
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
    let gradient = dout.at(i).to_f32();
    dwte.atomic_add(token * channels + channel, gradient);
    dwpe.atomic_add(t * channels + channel, gradient);
}
