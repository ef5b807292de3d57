//! Tests of the exercise `attention_row_term`.

/// Returns the sum of dout ∘ out, plus dlse times lse: the scalar whose gradient is to be computed.
fn loss(scores: &[f64], values: &[f64], dout: &[f64], dlse: f64) -> f64 {
    let sum: f64 = scores.iter().map(|s| s.exp()).sum();
    let dot = |value: &[f64]| value.iter().zip(dout).map(|(v, d)| v * d).sum::<f64>();
    let out: f64 = scores.iter().zip(values.chunks(dout.len())).map(|(s, v)| s.exp() / sum * dot(v)).sum();
    out + dlse * sum.ln()
}

exercises::tests! {
    attention_row_term: {
        /// The example of the chapter: probabilities 1/4 and 3/4, values 1 and 3, gradient 2.
        fn example_of_the_chapter() {
            let gradients = solution::score_gradients(&[0.0, 3.0f64.ln()], &[1.0, 3.0], &[2.0], 0.0);
            assert!((gradients[0] + 0.75).abs() < 1e-12 && (gradients[1] - 0.75).abs() < 1e-12, "{gradients:?}");
        }

        /// Each gradient is a finite difference of the loss.
        fn gradients_are_finite_differences() {
            let (scores, values, dout) = ([0.5, -1.0, 2.0], [1.0, 0.5, -2.0, 3.0, 0.25, -1.0], [0.75, -1.5]);
            for dlse in [0.0, 0.5, -2.0] {
                let gradients = solution::score_gradients(&scores, &values, &dout, dlse);
                for (i, gradient) in gradients.iter().enumerate() {
                    let loss_at = |step: f64| {
                        let mut scores = scores;
                        scores[i] += step;
                        loss(&scores, &values, &dout, dlse)
                    };
                    let difference = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5;
                    assert!((difference - gradient).abs() < 1e-8, "dlse {dlse}, score {i}: {difference} {gradient}");
                }
            }
        }

        /// Adding a constant to all scores adds it to lse and does not change out, so the gradients sum to dlse.
        fn gradients_sum_to_dlse() {
            let gradients = solution::score_gradients(&[900.0, 901.0, 899.5], &[1.0, -4.0, 2.0], &[3.0], 0.5);
            assert!((gradients.iter().sum::<f64>() - 0.5).abs() < 1e-12, "{gradients:?}");
        }
    }
}
