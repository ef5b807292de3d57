//! Gradient of the embedding, version 2: a segmented sum without atomics.
//!
//! Problem: as in version 1, with dwte and dwpe in bf16. The host has sorted the positions by token: `order` (B T) lists
//! positions, and `sorted` (B T) their tokens, so that equal tokens form a run.
//! Idea: the block of the first position of a run adds up the whole run, so each row of dwte has one writer. A second kernel adds
//! up dwpe over B in a loop. Both orders are fixed: the result is the same in every run.
//! Limit: load balance. One block adds up the most frequent token alone, one row after the other, while all other blocks have
//! ended. Version 1 can be faster. The version in `gpu/` splits the sorted positions into chunks of equal length.

use cuda_std::{Element, Global, GlobalMut, bf16, kernel, thread};

/// Adds the sums of runs to dwte (V, C). Grid: B T, one block for each sorted position.
#[kernel(threads = 128)]
pub fn encoder_backward_runs(
    dwte: GlobalMut<bf16>,
    dout: Global<bf16>,
    order: Global<i32>,
    sorted: Global<i32>,
    positions: u32,
    channels: u32,
) {
    let (first, positions, channels) = (thread::block_idx_x() as usize, positions as usize, channels as usize);
    let token = sorted.at(first);
    if first > 0 && sorted.at(first - 1) == token {
        return;
    }
    let mut channel = thread::thread_idx_x() as usize;
    while channel < channels {
        let (mut sum, mut i) = (0.0, first);
        while i < positions && sorted.at(i) == token {
            sum += dout.at(order.at(i) as usize * channels + channel).to_f32();
            i += 1;
        }
        let at = token as usize * channels + channel;
        dwte.set(at, bf16::from_f32(dwte.at(at).to_f32() + sum));
        channel += thread::block_dim_x() as usize;
    }
}

/// Adds the sums over B to dwpe (T, C). Grid: T C / 128, rounded up.
#[kernel(threads = 128)]
pub fn encoder_backward_positions(dwpe: GlobalMut<bf16>, dout: Global<bf16>, batch: u32, sequence: u32, channels: u32) {
    let (i, size) = (thread::index_1d(), sequence as usize * channels as usize);
    if i < size {
        let sum: f32 = (0..batch as usize).map(|b| dout.at(b * size + i).to_f32()).sum();
        dwpe.set(i, bf16::from_f32(dwpe.at(i).to_f32() + sum));
    }
}
