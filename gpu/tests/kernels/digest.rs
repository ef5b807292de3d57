//! Digests of tensors with elements of 1, 2 and 4 bytes.

use crate::common::{for_all, run};
use cuda_std::emulate::Memory;
use gpu::digest::{digest, grid, hash, partials};

tests! {
    kernels of "digest.rs";
    once: digests_are_sums_of_hashes, each_bit_and_each_position_counts;
}

/// Returns the digest of `bytes`, elements of `BYTES` bytes, computed by `blocks` blocks.
fn digest_of<const BYTES: usize>(bytes: &[u8], first: u64, blocks: u32) -> u64 {
    let words: Vec<f32> = bytes.as_chunks().0.iter().map(|word| f32::from_bits(u32::from_le_bytes(*word))).collect();
    let mut memory = Memory::new();
    let (out, inp) = (memory.output::<f32>("partials", partials(blocks)), memory.input("words", &words));
    run(&mut memory, &digest::<BYTES>(out, inp, first, words.len() as u64), blocks, 0);
    let pairs = memory.read(out);
    pairs.as_chunks().0.iter().fold(0, |sum, &[low, high]: &[f32; 2]| {
        sum.wrapping_add(u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32)
    })
}

fn expected<const BYTES: usize>(bytes: &[u8], first: u64) -> u64 {
    let element = |bytes: &[u8]| bytes.iter().rev().fold(0, |bits, &byte| bits << 8 | u64::from(byte));
    let hash = |(i, bytes): (usize, &[u8])| hash(element(bytes), first.wrapping_add(i as u64));
    bytes.chunks(BYTES).enumerate().map(hash).fold(0, u64::wrapping_add)
}

/// Returns reproducible bytes with all bit patterns, also those of NaN.
fn bytes(n: usize, seed: u64) -> Vec<u8> {
    (0..n).map(|i| (hash(i as u64, seed) >> 32) as u8).collect()
}

fn digests_are_sums_of_hashes() {
    fn check<const BYTES: usize>(packets: usize, first: u64, blocks: u32) {
        let bytes = bytes(16 * packets, first);
        let found = digest_of::<BYTES>(&bytes, first, blocks);
        assert_eq!(found, expected::<BYTES>(&bytes, first), "{packets} packets of {BYTES} bytes from {first}");
    }
    for_all(32, (1..3000usize, 0..u64::MAX, 1..4usize), |(packets, first, sm_count)| {
        let blocks = grid(4 * packets, sm_count);
        check::<1>(packets, first, blocks);
        check::<2>(packets, first, blocks);
        check::<4>(packets, first, blocks);
    });
    // Several rounds of the grid-stride loop.
    check::<2>(5000, 7, 3);
}

fn each_bit_and_each_position_counts() {
    let mut bytes = bytes(64, 3);
    let whole = digest_of::<2>(&bytes, 0, 1);
    for bit in 0..8 * bytes.len() {
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert_ne!(digest_of::<2>(&bytes, 0, 1), whole, "bit {bit}");
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
    assert_ne!(digest_of::<2>(&bytes, 1, 1), whole);
    let [left, right] = [(0, 0..32), (16, 32..64)].map(|(first, range)| digest_of::<2>(&bytes[range], first, 1));
    assert_eq!(left.wrapping_add(right), whole);
}
