//! Tests of the exercise gelu_slope.

#![expect(clippy::float_cmp, reason = "these results are exact")]

/// Returns gelu(x) in f64.
fn gelu(x: f64) -> f64 {
    x / (1.0 + (-2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x)).exp())
}

exercises::tests! {
    gelu_slope: {
        /// Finite differences of GELU in f64, from -6 to 6.
        fn slope_is_that_of_finite_differences() {
            for i in -96..=96 {
                let x = f64::from(i) / 16.0;
                let expected = (gelu(x + 1e-6) - gelu(x - 1e-6)) / 2e-6;
                let found = f64::from(solution::gelu_slope(x as f32));
                assert!((found - expected).abs() < 2e-6, "x = {x}: expected {expected}, found {found}");
            }
        }

        /// The slope is 1 for large x and 0 for small x, even where x² or x³ overflows.
        fn slope_is_finite_for_all_finite_x() {
            for x in [50.0, 1e10, 1e15, 1e25, f32::MAX] {
                assert_eq!([solution::gelu_slope(x), solution::gelu_slope(-x)], [1.0, 0.0], "x = ±{x}");
            }
        }

        /// A negative slope near x = -1 is right: GELU has a minimum at -0.75.
        fn slope_is_negative_left_of_the_minimum() {
            assert!(solution::gelu_slope(-0.8) < 0.0 && solution::gelu_slope(-0.7) > 0.0);
        }
    }
}
