//! The first kernel of the sort: counts the digits of all keys.
//!
//! **Problem.** counts (4, 256): how many of keys (n) have the value d in digit p, for the four digits of 8 bits, the lowest first.
//!
//! **Idea.** A block counts in shared memory, many keys for each thread, and adds its counts to the result at the end.
//!
//! **Limit.** Atomic additions to shared memory, four for each key. It takes 10 % of the time of a sort of 2^28 keys on an H200.

use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, kernel, thread};

/// Bits of a digit.
pub const BITS: u32 = 8;
/// Number of values of a digit.
pub const DIGITS: usize = 1 << BITS;
/// Number of digits of a key.
pub const PASSES: usize = (u32::BITS / BITS) as usize;

const THREADS: usize = 512;
/// Packets of four keys that a thread loads at once.
const FOURS: usize = 4;

/// Returns digit `pass` of a key.
#[inline(always)]
pub(crate) fn digit(key: u32, pass: u32) -> usize {
    (key >> (BITS * pass)) as usize % DIGITS
}

/// Returns the grid for `n` keys on a GPU with `sm_count` SMs.
pub fn grid(n: usize, sm_count: usize) -> u32 {
    n.div_ceil(THREADS * FOURS * 4).clamp(1, 4 * sm_count) as u32
}

/// Lays out the shared memory: the counts of the block.
pub fn shared(layout: &mut Layout) -> SharedArray<u32> {
    layout.array(PASSES * DIGITS).named("counts of the block")
}

/// Adds the counts of keys (n) to counts (4, 256). Grid: see [`grid`].
#[kernel(threads = 512, shared = shared)]
pub fn histogram(counts: GlobalMut<u32>, keys: Global<u32>, n: u64) {
    let (of_block, t, n) = (shared(&mut Layout::new()), thread::thread_idx_x() as usize, n as usize);
    let count = |key: u32| {
        for pass in 0..PASSES {
            of_block.fetch_add(pass * DIGITS + digit(key, pass as u32), 1);
        }
    };
    for i in (t..PASSES * DIGITS).step_by(THREADS) {
        of_block.set(i, 0);
    }
    thread::sync_threads();
    let (step, mut i) = (4 * thread::count_1d(), 4 * thread::index_1d());
    while i + (FOURS - 1) * step + 4 <= n {
        let mut fours = [[0; 4]; FOURS];
        for k in 0..FOURS {
            fours[k] = keys.four_streaming(i + k * step);
        }
        for four in fours {
            four.into_iter().for_each(count);
        }
        i += FOURS * step;
    }
    while i < n {
        for j in i..n.min(i + 4) {
            count(keys.at(j));
        }
        i += step;
    }
    thread::sync_threads();
    for i in (t..PASSES * DIGITS).step_by(THREADS) {
        counts.fetch_add(i, of_block.at(i));
    }
}
