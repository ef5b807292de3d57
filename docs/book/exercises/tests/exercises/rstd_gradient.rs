//! Tests of the exercise rstd_gradient.
exercises::tests! {
    rstd_gradient: {
        /// Mean 3, variance 4, rstd 1/2: the gradient is -(1/8) (x - 3) / 4.
        fn example_by_hand() {
            let found = solution::rstd_gradient(1.0, &[1.0, 1.0, 5.0, 5.0], 0.0);
            assert_eq!(found, [0.0625, 0.0625, -0.0625, -0.0625]);
        }

        /// Each entry is a finite difference.
        fn gradient_is_that_of_finite_differences() {
            let rstd = |x: &[f64]| {
                let mean = x.iter().sum::<f64>() / x.len() as f64;
                let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
                (variance + 0.1).sqrt().recip()
            };
            let x = [0.3, -1.2, 2.0, 0.9, -0.4];
            let found = solution::rstd_gradient(-2.0, &x, 0.1);
            for i in 0..x.len() {
                let (mut above, mut below) = (x, x);
                above[i] += 1e-5;
                below[i] -= 1e-5;
                let expected = -2.0 * (rstd(&above) - rstd(&below)) / 2e-5;
                assert!((found[i] - expected).abs() < 1e-8, "{i}: expected {expected}, found {}", found[i]);
            }
        }

        /// A constant added to all elements does not change the variance, so the gradient has no part in this direction.
        fn gradient_sums_to_zero() {
            let sum: f64 = solution::rstd_gradient(1.5, &[1.0, 2.0, 4.0], 1e-5).iter().sum();
            assert!(sum.abs() < 1e-15, "{sum}");
        }

        /// epsilon keeps the gradient of a constant row finite.
        fn constant_row_has_no_gradient() {
            assert!(solution::rstd_gradient(1.0, &[2.0; 3], 1e-5).iter().all(|&x| x == 0.0));
        }
    }
}
