//! Digests of tensors: sums of hashes of elements and their positions.
//!
//! The digest of a tensor is Σ mix(bits of element i + (i + 1) · 2^64/φ), modulo 2^64, where `mix` is the finalizer of SplitMix64 (Steele
//! et al., 2014), a bijection. One changed element always changes the digest. The sum does not depend on an order, and the digests of
//! the parts of a tensor add up to that of the whole if each part knows the position of its first element.

use crate::tensor::Tensor;
use crate::{Engine, Result};
use gpu::digest::hash;
use rayon::prelude::*;

/// Elements of one task.
const CHUNK: usize = 1 << 16;

/// Maximum number of bytes copied to the host at a time.
const PART: usize = 64 << 20;

/// Returns the digest of little-endian elements of `size` bytes, 1, 2 or 4. The first of them is at position `first`.
pub fn of_bytes(bytes: &[u8], size: usize, first: u64) -> u64 {
    let chunk = |(i, chunk): (usize, &[u8])| {
        let start = first.wrapping_add((i * CHUNK) as u64);
        let of_element = |(k, element): (usize, &[u8])| {
            let bits = element.iter().rev().fold(0, |bits, &byte| bits << 8 | u64::from(byte));
            hash(bits, start.wrapping_add(k as u64))
        };
        chunk.chunks(size).enumerate().map(of_element).fold(0, u64::wrapping_add)
    };
    bytes.par_chunks(CHUNK * size).enumerate().map(chunk).reduce(|| 0, u64::wrapping_add)
}

/// Returns the digest of a tensor, read through the host. See [`Engine::digest`].
pub(crate) fn through_host(engine: &mut (impl Engine + ?Sized), tensor: Tensor, first: u64) -> Result<u64> {
    let size = tensor.dtype.bytes();
    let (mut sum, mut bytes) = (0u64, Vec::new());
    for start in (0..tensor.len).step_by(PART / size) {
        let part = tensor.slice(start, (PART / size).min(tensor.len - start));
        bytes.resize(part.bytes(), 0);
        engine.read_bytes(part, &mut bytes)?;
        sum = sum.wrapping_add(of_bytes(&bytes, size, first.wrapping_add(start as u64)));
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::of_bytes;

    #[test]
    fn each_flipped_bit_changes_the_digest() {
        let mut bytes: Vec<u8> = (0..200).map(|i| (i * 37 % 251) as u8).collect();
        for size in [1, 2, 4] {
            let digest = of_bytes(&bytes, size, 0);
            for bit in 0..8 * bytes.len() {
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert_ne!(of_bytes(&bytes, size, 0), digest, "bit {bit}");
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            // Equal elements in another order.
            let mut swapped = bytes.clone();
            swapped.rotate_left(size);
            assert_ne!(of_bytes(&swapped, size, 0), digest);
        }
    }

    #[test]
    fn digests_of_parts_add_up() {
        let bytes: Vec<u8> = (0..1_000_000).map(|i| (i * 7 % 253) as u8).collect();
        let parts = of_bytes(&bytes[..400], 4, 5).wrapping_add(of_bytes(&bytes[400..], 4, 105));
        assert_eq!(of_bytes(&bytes, 4, 5), parts);
        assert_eq!(of_bytes(&[], 4, 5), 0);
    }
}
