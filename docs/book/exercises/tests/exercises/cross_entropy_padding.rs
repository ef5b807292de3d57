//! Tests of the exercise `cross_entropy_padding`.

/// Two columns of padding after three of the vocabulary.
const PADDING: [f64; 2] = [f64::NAN, 1e300];

/// Returns rows with these logits and with padding.
fn padded(rows: &[[f64; 3]]) -> Vec<f64> {
    rows.iter().flat_map(|row| row.iter().chain(&PADDING).copied()).collect()
}

/// Asserts that all values differ by at most 1e-9.
#[track_caller]
fn assert_close(found: &[f64], expected: &[f64]) {
    assert!(
        found.len() == expected.len() && found.iter().zip(expected).all(|(x, y)| (x - y).abs() < 1e-9),
        "{found:?} {expected:?}"
    );
}

exercises::tests! {
    cross_entropy_padding: {
        /// The example of the chapter: probabilities 1/8, 2/8 and 5/8.
        fn padding_does_not_count() {
            let mut logits = padded(&[[0.0, 2.0f64.ln(), 5.0f64.ln()]]);
            let loss = solution::cross_entropy(&mut logits, &[2], 3, 5);
            assert_close(&[loss], &[1.6f64.ln()]);
            assert_close(&logits, &[0.125, 0.25, -0.375, 0.0, 0.0]);
        }

        /// The mean is over the positions with a label.
        fn ignored_positions_do_not_count() {
            let row = [0.0, 2.0f64.ln(), 5.0f64.ln()];
            let mut logits = padded(&[row, [f64::INFINITY, 0.0, 0.0], row]);
            let loss = solution::cross_entropy(&mut logits, &[2, -1, 0], 3, 5);
            assert_close(&[loss], &[0.5 * (1.6f64.ln() + 8.0f64.ln())]);
            let first = [0.0625, 0.125, -0.1875, 0.0, 0.0];
            let last = [-0.4375, 0.125, 0.3125, 0.0, 0.0];
            assert_close(&logits, &[first, [0.0; 5], last].concat());
        }

        /// Logits of a thousand: e^1000 is not finite.
        fn large_logits_do_not_overflow() {
            let mut logits = padded(&[[1000.0, 0.0, -1000.0]]);
            assert_close(&[solution::cross_entropy(&mut logits, &[1], 3, 5)], &[1000.0]);
            assert_close(&logits, &[1.0, -1.0, 0.0, 0.0, 0.0]);
        }

        /// A batch without labels has loss 0, not 0 / 0.
        fn batch_without_labels_has_no_gradient() {
            let mut logits = padded(&[[1.0, 2.0, 3.0]]);
            assert_close(&[solution::cross_entropy(&mut logits, &[-1], 3, 5)], &[0.0]);
            assert_eq!(logits, [0.0; 5]);
        }
    }
}
