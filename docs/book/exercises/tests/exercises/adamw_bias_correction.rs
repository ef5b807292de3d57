//! Tests of the exercise adamw_bias_correction.

/// Returns the step of AdamW as it is defined.
fn step(m: f64, v: f64, beta1: f64, beta2: f64, epsilon: f64, t: i32) -> f64 {
    m / (1.0 - beta1.powi(t)) / ((v / (1.0 - beta2.powi(t))).sqrt() + epsilon)
}

exercises::tests! {
    adamw_bias_correction: {
        /// At step 1, m = (1 - beta1) g and v = (1 - beta2) g², so the step is g / (|g| + epsilon).
        fn first_step_is_the_sign_of_the_gradient() {
            let (factor, epsilon) = solution::folded_corrections(0.9, 0.95, 0.0, 1);
            let (m, v) = (0.1 * -3.0, 0.05 * 9.0f64);
            assert!((factor * m / (v.sqrt() + epsilon) + 1.0).abs() < 1e-12);
        }

        /// The folded step equals the defined one, for large and for tiny moments, beside which epsilon counts.
        fn folded_step_is_the_step() {
            for t in [1, 2, 10, 1000] {
                let (factor, epsilon) = solution::folded_corrections(0.9, 0.95, 1e-8, t);
                for (m, v) in [(0.3, 0.2), (-1e-3, 1e-5), (1e-9, 1e-17), (1e-9, 0.0)] {
                    let (found, expected) = (factor * m / (f64::sqrt(v) + epsilon), step(m, v, 0.9, 0.95, 1e-8, t));
                    assert!((found / expected - 1.0).abs() < 1e-12, "step {t}: expected {expected}, found {found}");
                }
            }
        }

        /// After many steps nothing is left to correct.
        fn corrections_end() {
            assert_eq!(solution::folded_corrections(0.9, 0.95, 1e-8, 100_000), (1.0, 1e-8));
        }
    }
}
