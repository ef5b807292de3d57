//! Squirrel's noise function, version 5 (Squirrel Eiserloh): a stateless hash of (index, seed), and stochastic rounding
//! with it. Rounding depends on the element's index and the launch's seed alone, never on the grid.

use cuda_std::{Element, Packet};

const NEXT_ROW: u32 = 198_491_317;
/// What one more index adds to the seed.
const STEP: u32 = 0xd2a8_0a3f;

/// 32 random bits for `x` under `seed`.
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

/// The seed under which element `i` of a stretch is rounded as element `first + i` of the whole under `seed`, for a whole of
/// less than 2^32 elements.
pub const fn seed_from(seed: u32, first: usize) -> u32 {
    seed.wrapping_add((first as u32).wrapping_mul(STEP))
}

/// The number of the point (`x`, `y`).
#[inline(always)]
const fn point(x: u32, y: u32) -> u32 {
    x.wrapping_add(NEXT_ROW.wrapping_mul(y))
}

/// 32 random bits for the point (`x`, `y`) under `seed`.
#[inline(always)]
pub const fn squirrel5_2d(x: u32, y: u32, seed: u32) -> u32 {
    squirrel5(point(x, y), seed)
}

/// `value`, the new content of element `index` of a tensor, rounded stochastically.
#[inline(always)]
pub fn round<T: Element>(value: f32, index: usize, seed: u32) -> T {
    T::from_f32(T::round_stochastic(value, squirrel5_2d(index as u32, (index >> 32) as u32, seed)))
}

/// The packet of values `f(0) .. f(T::PACKET)`, the new content of the tensor from element `index` on, a multiple of `T::PACKET`,
/// rounded stochastically: a pair shares the 32 bits of its first, of which each needs 16.
#[inline(always)]
pub fn round_packet<T: Element>(index: usize, seed: u32, mut f: impl FnMut(usize) -> f32) -> Packet<T> {
    let first = point(index as u32, (index >> 32) as u32);
    Packet::from_fn(|k| {
        let bits = squirrel5(first.wrapping_add(k as u32 / 2 * 2), seed);
        T::round_stochastic(f(k), bits >> (k % 2 * 16))
    })
}

/// Four values, the new content of the tensor from element `index` on, each rounded as by [`round`].
#[inline(always)]
pub fn round_four<T: Element>(values: [f32; 4], index: usize, seed: u32) -> [f32; 4] {
    let mut rounded = [0.0; 4];
    for k in 0..4 {
        rounded[k] = round::<T>(values[k], index + k, seed).to_f32();
    }
    rounded
}

#[cfg(test)]
mod tests {
    use super::{seed_from, squirrel5, squirrel5_2d};

    #[test]
    fn published_values() {
        assert_eq!(squirrel5(0, 0), 377_036_288);
        assert_eq!(squirrel5(1, 0), 3_365_260_061);
        assert_eq!(squirrel5(123_456, 42), 4_018_351_843);
        assert_eq!(squirrel5_2d(3, 5, 7), 784_107_297);
    }

    #[test]
    fn a_stretch_draws_as_the_whole() {
        for (first, i) in [(0, 5), (64, 0), (1_000_000_007, 12), (4_294_967_040, 63)] {
            assert_eq!(squirrel5_2d(i, 0, seed_from(42, first)), squirrel5_2d(first as u32 + i, 0, 42));
        }
    }
}
