//! Tests of the exercise `online_softmax_merge`.

/// Returns the parts of attention with these scores and values: maximum, sum and output.
fn attention(scores: &[f64], values: &[f64]) -> (f64, f64, Vec<f64>) {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let out = weights.iter().zip(values).map(|(weight, value)| weight * value).sum();
    (max, weights.iter().sum(), vec![out])
}

exercises::tests! {
    online_softmax_merge: {
        /// The example of the chapter: 25 from the first two keys, 56.25 from all four.
        fn parts_add_up_to_the_whole() {
            let part = |scores: &[f64], values: &[f64]| {
                let (max, sum, out) = attention(scores, values);
                solution::Partial { max, sum, out }
            };
            let scores = [1.0f64, 2.0, 8.0, 4.0].map(f64::ln);
            let values = [10.0, 20.0, 30.0, 40.0];
            for middle in 1..4 {
                let (a, b) = (part(&scores[..middle], &values[..middle]), part(&scores[middle..], &values[middle..]));
                for merged in [solution::merge(&a, &b), solution::merge(&b, &a)] {
                    assert!((merged.max - 8.0f64.ln()).abs() < 1e-12, "{merged:?}");
                    assert!((merged.sum - 1.875).abs() < 1e-12 && (merged.out[0] - 56.25).abs() < 1e-12, "{merged:?}");
                }
            }
        }

        /// Scores of a thousand: e^1000 is not finite.
        fn large_scores_do_not_overflow() {
            let a = solution::Partial { max: 1000.0, sum: 1.0, out: vec![5.0, 1.0] };
            let b = solution::Partial { max: -1000.0, sum: 1.0, out: vec![7.0, 2.0] };
            assert_eq!(solution::merge(&a, &b), a);
            assert_eq!(solution::merge(&b, &a), a);
        }

        /// A part without keys does not change the result, and two of them give another one.
        fn empty_parts_have_no_effect() {
            let empty = solution::Partial { max: f64::NEG_INFINITY, sum: 0.0, out: vec![0.0; 2] };
            let a = solution::Partial { max: 3.0, sum: 1.5, out: vec![2.0, -1.0] };
            assert_eq!(solution::merge(&a, &empty), a);
            assert_eq!(solution::merge(&empty, &a), a);
            assert_eq!(solution::merge(&empty, &empty), empty);
        }
    }
}
