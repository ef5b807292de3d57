//! Moments of an optimizer in eight bits per value: block floating point with stochastic rounding.
//!
//! Eight adjacent values share 64 bits: the exponent of the largest (8 bits) and a code of 7 bits for each. A shared exponent is the idea
//! of the microscaling formats (Rouhani et al., 2023, arXiv:2310.10537). Scales for small blocks make optimizer states of 8 bits possible
//! (Dettmers et al., 2021, arXiv:2110.02861). With blocks of eight, a thread needs no other thread, and any slice of a tensor that begins
//! at a multiple of eight is complete.
//!
//! ```text
//! moment   bits of a code                      smallest normal and smallest code, relative to the block's power of two
//! first    1 sign, 3 exponent, 3 mantissa      2^-6, 2^-9
//! second   4 exponent, 3 mantissa              2^-14, 2^-17
//! ```
//!
//! Values are rounded stochastically, twice. First each is rounded to three bits of mantissa, from which the shared exponent follows. Then
//! values below the normal range are rounded to multiples of the smallest code. The expectation of a stored value is the value itself.
//! Rounding to nearest would stop a running mean with a decay of 0.95 or more, because an update changes it by less than the distance
//! between codes. A second moment is a divisor, so a positive one never becomes zero: it is at least the smallest code.
//!
//! Encoding a decoded block gives the same bits with any noise, so a checkpoint in f32 restores a run exactly.
//!
//! A word holds four codes in its lower 28 bits. Its upper four bits hold one half of the shared exponent, the lower half in the first word.

/// Values of a block.
pub const BLOCK: usize = 8;

/// Number of bits of an f32 after the first three of its mantissa.
const DROPPED: u32 = 20;
/// Bits of a code.
const CODE_BITS: u32 = 7;
/// Bits of the largest stored magnitude, as f32. The factor that scales a block with it to [1, 2) is a normal number.
const LARGEST: u32 = 253 << 23 | 7 << DROPPED;

/// The smallest shared exponent. With it, even the smallest code is a normal number in f32 and bf16. A block of smaller values becomes zero.
const SMALLEST_EXPONENT: u32 = 18;

/// The noise that rounds values to nearest.
pub const NEAREST: [u32; BLOCK] = [0x8000_8000; BLOCK];

/// Returns 2^`exponent`, a normal number.
pub(crate) const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

/// Returns the power of two that moves numbers in [1, 2) to the largest exponent of a code.
const fn code_scale(signed: bool) -> f32 {
    power_of_two(if signed { 7 - 127 } else { 15 - 127 })
}

/// Returns the values of a block: first moments if `SIGNED`, otherwise second moments.
#[inline(always)]
pub fn decode<const SIGNED: bool>(block: u64) -> [f32; BLOCK] {
    let words = [block as u32, (block >> 32) as u32];
    let scale = f32::from_bits((words[0] >> 28 | words[1] >> 28 << 4) << 23);
    let mut values = [0.0; BLOCK];
    for k in 0..BLOCK {
        let code = words[k / 4] >> (CODE_BITS * (k % 4) as u32) & 0x7f;
        let magnitude = if SIGNED { code & 0x3f } else { code };
        // A code is the upper part of a small f32. Both factors are powers of two, so the value is exact.
        let value = f32::from_bits(magnitude << DROPPED) * const { 1.0 / code_scale(SIGNED) } * scale;
        values[k] = if SIGNED { f32::from_bits(value.to_bits() | code >> 6 << 31) } else { value };
    }
    values
}

/// Returns the block of finite values: first moments if `SIGNED`, otherwise second moments, which are not negative.
///
/// `noise` has 32 random bits for each value. The upper half decides the first rounding, to three bits of mantissa, and the lower half that
/// of values below the normal range.
#[inline(always)]
pub fn encode<const SIGNED: bool>(values: [f32; BLOCK], noise: [u32; BLOCK]) -> u64 {
    let mut rounded = [0; BLOCK];
    let mut largest = 0;
    for k in 0..BLOCK {
        let magnitude = values[k].to_bits() & 0x7fff_ffff;
        rounded[k] = ((magnitude + (noise[k] >> 16 << 4)) >> DROPPED << DROPPED).min(LARGEST);
        largest = largest.max(rounded[k]);
    }
    let exponent = largest >> 23;
    if exponent < SMALLEST_EXPONENT {
        return 0;
    }
    let scale = f32::from_bits((254 - exponent) << 23);
    let mut words = [exponent << 28, exponent >> 4 << 28];
    for k in 0..BLOCK {
        let small = f32::from_bits(rounded[k]) * scale * const { code_scale(SIGNED) };
        let code = (small.to_bits() + ((noise[k] & 0xffff) << 4)) >> DROPPED;
        let code = if SIGNED { code | values[k].to_bits() >> 31 << 6 } else { code.max((rounded[k] != 0) as u32) };
        words[k / 4] |= code << (CODE_BITS * (k % 4) as u32);
    }
    words[0] as u64 | (words[1] as u64) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::noise::squirrel5;

    fn noise(seed: u32) -> [u32; BLOCK] {
        core::array::from_fn(|k| squirrel5(k as u32, seed))
    }

    /// Returns values with exponents over the range of a block and beyond, some of them zero.
    fn values(seed: u32, signed: bool) -> [f32; BLOCK] {
        let scale = (squirrel5(100, seed) % 180) as i32 - 90;
        core::array::from_fn(|k| {
            let bits = squirrel5(k as u32 + 50, seed);
            let value = (1.0 + (bits & 0xffff) as f32 / 65536.0) * power_of_two(scale - (bits >> 16 & 0x1f) as i32);
            if bits >> 28 == 0 {
                0.0
            } else if signed && bits & 1 << 27 != 0 {
                -value
            } else {
                value
            }
        })
    }

    fn round_trip<const SIGNED: bool>(values: [f32; BLOCK], noise: [u32; BLOCK]) -> [f32; BLOCK] {
        decode::<SIGNED>(encode::<SIGNED>(values, noise))
    }

    fn decoded_blocks_are_encoded_exactly<const SIGNED: bool>() {
        for seed in 0..20_000 {
            let block = encode::<SIGNED>(values(seed, SIGNED), noise(seed));
            for other in [noise(seed + 1), NEAREST, [0; BLOCK], [u32::MAX; BLOCK]] {
                assert_eq!(encode::<SIGNED>(decode::<SIGNED>(block), other), block, "{seed}");
            }
        }
    }

    #[test]
    fn checkpoints_restore_blocks() {
        decoded_blocks_are_encoded_exactly::<true>();
        decoded_blocks_are_encoded_exactly::<false>();
    }

    fn expectation_is_the_value<const SIGNED: bool>(smallest: f32) {
        let values: [f32; BLOCK] = core::array::from_fn(|k| {
            let value = 1.97 * smallest.powf(k as f32 / (BLOCK - 1) as f32);
            if SIGNED && k % 2 == 1 { -value } else { value }
        });
        let samples = 400_000;
        let mut sums = [0.0; BLOCK];
        for seed in 0..samples {
            for (sum, value) in sums.iter_mut().zip(round_trip::<SIGNED>(values, noise(seed))) {
                *sum += f64::from(value);
            }
        }
        for (sum, value) in sums.into_iter().zip(values) {
            let mean = sum / f64::from(samples);
            let relative = mean / f64::from(value) - 1.0;
            assert!(relative.abs() < 0.005, "{value:e}: mean {mean:e}, relative error {relative:e}");
        }
    }

    #[test]
    fn rounding_is_unbiased() {
        expectation_is_the_value::<true>(power_of_two(-10));
        expectation_is_the_value::<false>(power_of_two(-16));
    }

    #[test]
    fn nearest_values_are_within_half_a_step() {
        for seed in 0..20_000 {
            let values = values(seed, true);
            let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
            for (value, stored) in values.into_iter().zip(round_trip::<true>(values, NEAREST)) {
                // The two roundings err by at most 2^-4 of the value and, if the exponent of the block has grown, 2^-9 of the largest value.
                let bound = value.abs() * power_of_two(-4) + largest * power_of_two(-9);
                assert!((value - stored).abs() <= bound, "{seed}: {value:e}, {stored:e}");
            }
        }
    }

    #[track_caller]
    fn assert_same(got: [f32; BLOCK], expected: [f32; BLOCK]) {
        assert_eq!(got.map(f32::to_bits), expected.map(f32::to_bits), "{got:?}, {expected:?}");
    }

    #[test]
    fn second_moments_stay_positive_and_zero_stays_zero() {
        let mut values = [0.0; BLOCK];
        values[0] = 1.0;
        values[5] = 1e-20;
        for seed in 0..1000 {
            let stored = round_trip::<false>(values, noise(seed));
            assert_same(stored, [1.0, 0.0, 0.0, 0.0, 0.0, power_of_two(-17), 0.0, 0.0]);
        }
        assert_eq!(encode::<true>([0.0; BLOCK], [u32::MAX; BLOCK]), 0);
        assert_same(decode::<true>(0), [0.0; BLOCK]);
    }

    #[test]
    fn extreme_magnitudes_are_stored() {
        for value in [5e-33, 1e-30, 1e30, 8e37] {
            let stored = round_trip::<true>([value, -value, 0.0, 0.0, 0.0, 0.0, 0.0, value / 2.0], NEAREST);
            let first = stored[0];
            assert!((first / value - 1.0).abs() <= 0.0625, "{value:e}: {stored:?}");
            assert_same(stored, [first, -first, 0.0, 0.0, 0.0, 0.0, 0.0, first / 2.0]);
        }
        // Larger ones saturate, and smaller ones become zero.
        assert_same(round_trip::<false>([f32::MAX; BLOCK], NEAREST), [f32::from_bits(LARGEST); BLOCK]);
        assert_same(round_trip::<false>([1e-33; BLOCK], NEAREST), [0.0; BLOCK]);
    }
}
