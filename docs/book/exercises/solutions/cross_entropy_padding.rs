//! Cross-entropy of a batch with padded columns and ignored positions.
//!
//! logits (rows, Vp) have V columns of the vocabulary, followed by padding of unknown contents, which may be NaN. A target of -1 marks
//! a position without a label, such as the prompt in fine-tuning. The loss is the mean over the other positions.

/// Returns the mean loss, and replaces the logits by its gradient. Without any label, the loss and all gradients are 0.
pub fn cross_entropy(logits: &mut [f64], targets: &[i32], v: usize, vp: usize) -> f64 {
    let labels = targets.iter().filter(|&&target| target >= 0).count();
    let dloss = 1.0 / labels.max(1) as f64;
    let mut loss = 0.0;
    for (row, &target) in logits.chunks_mut(vp).zip(targets) {
        let (row, padding) = row.split_at_mut(v);
        padding.fill(0.0);
        if target < 0 {
            row.fill(0.0);
            continue;
        }
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|logit| (logit - max).exp()).sum();
        loss += dloss * (sum.ln() - (row[target as usize] - max));
        for logit in &mut *row {
            *logit = dloss * (*logit - max).exp() / sum;
        }
        row[target as usize] -= dloss;
    }
    loss
}
