//! Digests of tensors: sums of hashes of elements and their positions.
//!
//! The sum does not depend on an order. The host adds the partial sums of all warps.

use cuda_std::{Global, GlobalMut, kernel, thread, warp};

/// Threads of a block.
const THREADS: usize = 256;
/// Warps of a block.
const WARPS: usize = THREADS / warp::LANES as usize;
/// 32-bit words that a thread loads at a time.
const WORDS: usize = 4;

/// 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Returns the hash of the bits of one element at a position: the finalizer of SplitMix64, a bijection for each position.
#[inline(always)]
pub const fn hash(bits: u64, position: u64) -> u64 {
    let mut x = bits.wrapping_add(position.wrapping_add(1).wrapping_mul(GOLDEN));
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// Returns the grid size of [`digest`] for n words.
pub fn grid(n: usize, sm_count: usize) -> u32 {
    n.div_ceil(THREADS * WORDS).min(sm_count * 8) as u32
}

/// Returns the length of `partials` of [`digest`].
pub const fn partials(grid: u32) -> usize {
    grid as usize * WARPS * 2
}

/// Computes partials (grid, 8, 2), the lower and the upper 32 bits of each warp's share of the digest of words (n), with a grid-stride
/// loop.
///
/// The words are 32 bits each and hold elements of `BYTES` bytes, the first of them at position `first`. Both arrays have the type f32,
/// but their values are bits. n is a multiple of 4, and `words` is 16-byte aligned. Grid: any, for example [`grid`].
#[kernel(threads = 256, instances(bytes_1 = <1>, bytes_2 = <2>, bytes_4 = <4>))]
pub fn digest<const BYTES: usize>(partials: GlobalMut<f32>, words: Global<f32>, first: u64, n: u64) {
    let (n, thread) = (n as usize, thread::index_1d());
    let mut sum = 0u64;
    let mut i = thread * WORDS;
    while i < n {
        let loaded = words.four(i);
        for k in 0..WORDS {
            let position = first.wrapping_add(((i + k) * (4 / BYTES)) as u64);
            sum = sum.wrapping_add(hash_word::<BYTES>(loaded[k].to_bits(), position));
        }
        i += thread::count_1d() * WORDS;
    }
    let mut offset = warp::LANES / 2;
    while offset > 0 {
        sum = sum.wrapping_add(warp::shuffle_xor(sum, offset));
        offset /= 2;
    }
    if warp::lane() == 0 {
        let at = 2 * (thread / warp::LANES as usize);
        partials.set(at, f32::from_bits(sum as u32));
        partials.set(at + 1, f32::from_bits((sum >> 32) as u32));
    }
}

/// Returns the sum of the hashes of a word's elements, the first of which is at `position`.
#[inline(always)]
fn hash_word<const BYTES: usize>(word: u32, position: u64) -> u64 {
    let mut sum = 0u64;
    for k in 0..4 / BYTES {
        let bits = word >> (8 * BYTES * k) & (u32::MAX >> (32 - 8 * BYTES));
        sum = sum.wrapping_add(hash(bits as u64, position.wrapping_add(k as u64)));
    }
    sum
}
