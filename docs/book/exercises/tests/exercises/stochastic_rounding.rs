//! Tests of the exercise stochastic_rounding.

#![expect(clippy::float_cmp, reason = "these results are exact")]

/// Returns the number that a bf16 represents.
fn to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

exercises::tests! {
    stochastic_rounding: {
        /// The mean over all random bits is the number itself, without any error, for both signs and for subnormal numbers.
        fn rounding_is_unbiased() {
            for value in [1.001f32, -1.001, 5.4321, 0.999_99, -1e-30, 1e-40] {
                let rounded = (0..=u16::MAX).map(|random| f64::from(to_f32(solution::round(value, random))));
                assert_eq!(rounded.sum::<f64>() / 65536.0, f64::from(value), "{value}");
            }
        }

        /// Only the two neighbors occur.
        fn results_are_the_neighbors() {
            let mut found: Vec<u16> = (0..=u16::MAX).map(|random| solution::round(1.001, random)).collect();
            found.sort_unstable();
            found.dedup();
            assert_eq!(found, [0x3f80, 0x3f81]);
        }

        /// Numbers that are bf16 already do not change.
        fn representable_numbers_are_unchanged() {
            for bits in [0x0000, 0x8000, 0x3f80, 0xbf81, 0x0001, 0x7f7f, 0x7f80, 0xff80] {
                for random in [0, 1, 0x7fff, 0x8000, 0xffff] {
                    assert_eq!(solution::round(to_f32(bits), random), bits, "{bits:04x}");
                }
            }
        }

        /// NaN with all significand bits, with one, and negative.
        fn nan_remains_nan() {
            for bits in [0x7fff_ffff, 0x7f80_0001, 0xffff_ffff, 0xff80_0001] {
                for random in [0, 1, 0x8000, 0xffff] {
                    assert!(to_f32(solution::round(f32::from_bits(bits), random)).is_nan(), "{bits:08x}");
                }
            }
        }
    }
}
