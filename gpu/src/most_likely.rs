//! Whether the target of a row is its most likely token, for evaluations by greedy choice.

use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedArray, block, kernel, thread};

const THREADS: usize = 512;

/// Lays out the shared memory: the partial results of a block reduction.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(32)
}

/// Sets hits (rows) to 1 where no token of logits (rows, Vp) precedes the one in targets (rows), else to 0.
///
/// A token precedes the target if its logit is larger, if it is equal and the token is lower, or if one of both logits is NaN. Tokens are
/// 0..V; columns V..Vp are padding. Vp is a multiple of the packet. Grid: rows. Shared memory: [`shared`].
#[kernel(threads = 512, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn most_likely<T: Element>(
    hits: GlobalMut<f32>,
    logits: Global<T>,
    targets: Global<i32>,
    vocabulary: u32,
    padded: u32,
) {
    let (row, vocabulary, padded) = (thread::block_idx_x() as usize, vocabulary as usize, padded as usize);
    let logits = logits.skip(row * padded);
    let target = targets.at(row) as usize;
    let chosen = logits.at(target).to_f32();
    let mut preceded = 0.0;
    let mut first = thread::thread_idx_x() as usize * T::PACKET;
    while first < vocabulary {
        let packet = logits.packet(first);
        for k in 0..T::PACKET {
            let (token, logit) = (first + k, packet.get(k));
            let follows = if token >= target { logit <= chosen } else { logit < chosen };
            if token < vocabulary && !follows {
                preceded = 1.0;
            }
        }
        first += THREADS * T::PACKET;
    }
    let preceded = block::max(preceded, shared(&mut Layout::new()));
    if thread::thread_idx_x() == 0 {
        hits.set(row, 1.0 - preceded);
    }
}
