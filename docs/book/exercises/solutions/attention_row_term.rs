//! The gradient of the scores of a query, if the loss depends on the log-sum-exp as well.
//!
//! A query has scores s (keys), already scaled, and values v (keys, HS). Attention returns out (HS) = sum of p v, with p the softmax
//! of s, and lse, the log-sum-exp of s. Usually only out reaches the loss. But some losses also use lse: the z-loss keeps it small,
//! and the merge of two sets of keys weights them by it. Derive the gradient of s for given gradients of out and lse.
//!
//! Hint: what is the derivative of lse with respect to a score?

/// Returns the gradient of each score.
pub fn score_gradients(scores: &[f64], values: &[f64], dout: &[f64], dlse: f64) -> Vec<f64> {
    let hs = dout.len();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    let p: Vec<f64> = scores.iter().map(|s| (s - max).exp() / sum).collect();
    let dp: Vec<f64> = values.chunks(hs).map(|value| value.iter().zip(dout).map(|(v, d)| v * d).sum()).collect();
    // The row term: the sum of p dp is that of dout ∘ out.
    let d: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
    // The derivative of lse is p.
    p.iter().zip(&dp).map(|(p, dp)| p * (dp - d + dlse)).collect()
}
