//! Random bits and stochastic rounding.
//!
//! The random bits come from SquirrelNoise5 (Squirrel Eiserloh), a stateless hash of (index, seed). Rounding therefore
//! depends only on an element's index and the seed of the launch, never on the grid.

use cuda_std::{Element, Packet};

/// Increment of the hash index per y of a point.
const NEXT_ROW: u32 = 198_491_317;
/// Factor of the index, which the hash then adds to the seed.
const STEP: u32 = 0xd2a8_0a3f;

/// Returns 32 random bits for index `x` and `seed`.
#[inline(always)]
pub const fn squirrel5(x: u32, seed: u32) -> u32 {
    let mut bits = x.wrapping_mul(STEP).wrapping_add(seed);
    bits ^= bits >> 9;
    bits = bits.wrapping_add(0xa884_f197);
    bits ^= bits >> 11;
    bits = bits.wrapping_mul(0x6c73_6f4b);
    bits ^= bits >> 13;
    bits = bits.wrapping_add(0xb79f_3abb);
    bits ^= bits >> 15;
    bits = bits.wrapping_mul(0x1b56_c4f5);
    bits ^ (bits >> 17)
}

/// Returns the seed with which element `i` of a slice gets the random bits that element `first + i` of the whole tensor
/// gets with `seed`. The tensor has fewer than 2^32 elements.
pub const fn seed_from(seed: u32, first: usize) -> u32 {
    seed.wrapping_add((first as u32).wrapping_mul(STEP))
}

/// Returns the hash index of the point (`x`, `y`).
#[inline(always)]
const fn point(x: u32, y: u32) -> u32 {
    x.wrapping_add(NEXT_ROW.wrapping_mul(y))
}

/// Returns 32 random bits for the moments of element `index`: [`Stream::M`] in the upper half, [`Stream::V`] in the lower half.
///
/// The finalizer is that of MurmurHash3 (Appleby), half as many instructions as [`squirrel5`]. Its input is the same as there.
#[inline(always)]
pub const fn moment_bits(index: usize, seed: u32) -> u32 {
    let mut bits = point(index as u32, (index >> 32) as u32).wrapping_mul(STEP).wrapping_add(seed);
    bits ^= bits >> 16;
    bits = bits.wrapping_mul(0x85eb_ca6b);
    bits ^= bits >> 13;
    bits = bits.wrapping_mul(0xc2b2_ae35);
    bits ^ (bits >> 16)
}

/// Independent sequences of random bits with the same seed, one for each tensor that an update rounds.
///
/// All streams have the property of [`seed_from`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Parameters: the lower half of [`squirrel5`], with the halves of the index as a point.
    Params,
    /// First moments: the upper half of [`moment_bits`].
    M,
    /// Second moments: the lower half of [`moment_bits`].
    V,
}

impl Stream {
    /// Returns random bits for element `index`. Rounding uses the lower 16 bits.
    #[inline(always)]
    const fn bits(self, index: usize, seed: u32) -> u32 {
        match self {
            Self::Params => squirrel5(point(index as u32, (index >> 32) as u32), seed),
            Self::M => moment_bits(index, seed) >> 16,
            Self::V => moment_bits(index, seed),
        }
    }
}

/// Rounds `value` stochastically with the random bits of a stream, as the new value of element `index` of a tensor.
#[inline(always)]
pub fn round<T: Element>(stream: Stream, value: f32, index: usize, seed: u32) -> T {
    // f32 is not rounded. Without a hash that nothing uses, instances with f32 moments are compiled as if they had no streams.
    if const { size_of::<T>() == size_of::<f32>() } {
        return T::from_f32(value);
    }
    T::from_f32(T::round_stochastic(value, stream.bits(index, seed)))
}

/// Rounds `f(0) .. f(T::PACKET)` stochastically, as the new values of a tensor from element `index` on.
///
/// `index` is a multiple of `T::PACKET`. Rounding to bf16 takes 16 random bits, so each pair of elements shares the 32
/// bits of its first element.
#[inline(always)]
pub fn round_packet<T: Element>(index: usize, seed: u32, mut f: impl FnMut(usize) -> f32) -> Packet<T> {
    let first = point(index as u32, (index >> 32) as u32);
    Packet::from_fn(|k| {
        let bits = squirrel5(first.wrapping_add(k as u32 / 2 * 2), seed);
        T::round_stochastic(f(k), bits >> (k % 2 * 16))
    })
}

/// Rounds four values with [`round`], as the new values of a tensor from element `index` on.
#[inline(always)]
pub fn round_four<T: Element>(stream: Stream, values: [f32; 4], index: usize, seed: u32) -> [f32; 4] {
    if const { size_of::<T>() == size_of::<f32>() } {
        return values;
    }
    let mut rounded = [0.0; 4];
    for k in 0..4 {
        rounded[k] = round::<T>(stream, values[k], index + k, seed).to_f32();
    }
    rounded
}

#[cfg(test)]
mod tests {
    use super::{point, seed_from, squirrel5};

    #[test]
    fn squirrel5_matches_published_values() {
        assert_eq!(squirrel5(0, 0), 377_036_288);
        assert_eq!(squirrel5(1, 0), 3_365_260_061);
        assert_eq!(squirrel5(123_456, 42), 4_018_351_843);
        assert_eq!(squirrel5(point(3, 5), 7), 784_107_297);
    }

    #[test]
    fn slice_with_shifted_seed_gets_the_random_bits_of_the_whole_tensor() {
        for (first, i) in [(0, 5), (64, 0), (1_000_000_007, 12), (4_294_967_040, 63)] {
            assert_eq!(squirrel5(point(i, 0), seed_from(42, first)), squirrel5(point(first as u32 + i, 0), 42));
        }
    }
}
