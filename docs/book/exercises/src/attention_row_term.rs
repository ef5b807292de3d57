//! The gradient of the scores of a query, if the loss depends on the log-sum-exp as well.
//!
//! A query has scores s (keys), already scaled, and values v (keys, HS). Attention returns out (HS) = sum of p v, with p the softmax
//! of s, and lse, the log-sum-exp of s. Usually only out reaches the loss. But some losses also use lse: the z-loss keeps it small,
//! and the merge of two sets of keys weights them by it. Derive the gradient of s for given gradients of out and lse.
//!
//! Hint: what is the derivative of lse with respect to a score?

/// Returns the gradient of each score.
pub fn score_gradients(scores: &[f64], values: &[f64], dout: &[f64], dlse: f64) -> Vec<f64> {
    unimplemented!("exercise attention_row_term")
}
