//! The classifier: softmax, cross-entropy loss and the gradient of the logits, for one row.

/// Returns the loss of a row of logits (Vp), and replaces them by their gradient.
///
/// The softmax is over columns 0 to V. `dloss` is the gradient of the loss. The gradient of the padding is 0.
pub fn classifier(row: &mut [f64], v: usize, target: usize, dloss: f64) -> f64 {
    let (logits, padding) = row.split_at_mut(v);
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
    let loss = sum.ln() - (logits[target] - max);
    for (i, logit) in logits.iter_mut().enumerate() {
        let onehot = if i == target { 1.0 } else { 0.0 };
        *logit = ((*logit - max).exp() / sum - onehot) * dloss;
    }
    padding.fill(0.0);
    loss
}

#[cfg(test)]
mod tests {
    use super::classifier;

    /// Returns an array of PyTorch's recorded output.
    fn recorded(name: &str) -> Vec<f64> {
        let mut lines = include_str!("../../pytorch/classifier.txt").lines();
        let values = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(": ")).unwrap();
        values.split(' ').map(|value| value.parse().unwrap()).collect()
    }

    #[test]
    fn results_are_those_of_pytorch() {
        let mut row = [0.0, 2.0f64.ln(), 5.0f64.ln()];
        let loss = classifier(&mut row, 3, 2, 1.0);
        assert!((loss - recorded("loss")[0]).abs() < 1e-9);
        assert!(row.iter().zip(recorded("dlogits")).all(|(x, y)| (x - y).abs() < 1e-9), "{row:?}");
    }

    #[test]
    fn gradient_is_a_finite_difference() {
        const LOGITS: [f64; 5] = [0.3, -2.0, 1.5, 0.0, 4.0];
        let mut gradient = LOGITS;
        classifier(&mut gradient, 5, 3, 0.25);
        for (i, expected) in gradient.iter().enumerate() {
            let loss_at = |step: f64| {
                let mut row = LOGITS;
                row[i] += step;
                0.25 * classifier(&mut row, 5, 3, 0.25)
            };
            let difference = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5;
            assert!((difference - expected).abs() < 1e-9, "{i}: {difference} {expected}");
        }
        assert!(gradient.iter().sum::<f64>().abs() < 1e-12);
    }

    #[test]
    fn padding_does_not_change_the_result() {
        let (mut row, mut padded) = (vec![1.0, 2.0, 3.0], vec![1.0, 2.0, 3.0, 1e9, f64::NAN]);
        let losses = [classifier(&mut row, 3, 0, 1.0), classifier(&mut padded, 3, 0, 1.0)];
        assert_eq!(losses[0].to_bits(), losses[1].to_bits());
        row.extend([0.0; 2]);
        assert_eq!(row, padded);
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let mut row = vec![1000.0, 0.0];
        let loss = classifier(&mut row, 2, 1, 1.0);
        assert!((loss - 1000.0).abs() < 1e-9, "{loss}");
        assert_eq!(row, [1.0, -1.0]);
    }
}
