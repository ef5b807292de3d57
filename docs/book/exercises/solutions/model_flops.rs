//! Exercise: parameters, FLOPs and utilization of a GPT-2.
//!
//! Compute by formula what `train` prints: the number of parameters, the FLOPs that a token takes in training, and the model FLOPs
//! utilization. The chapter "A training step" derives the formulas. Count wte once: the head shares it, and the lookup of the encoder takes
//! no FLOPs. Attention is causal.

/// The shape of a GPT-2.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// L, number of layers.
    pub layers: usize,
    /// C, number of channels.
    pub channels: usize,
    /// V, number of tokens in the vocabulary. wte has this many rows, rounded up to a multiple of 128.
    pub vocab: usize,
    /// Longest sequence: the rows of wpe.
    pub positions: usize,
}

/// Returns the number of parameters, with wte (padded vocabulary), wpe, the matrices, biases and norms of all layers, and the final norm.
pub fn parameters(shape: Shape) -> usize {
    let c = shape.channels;
    let matrices = 3 * c * c + c * c + 4 * c * c + 4 * c * c;
    let biases = 3 * c + c + 4 * c + c;
    let norms = 4 * c;
    shape.vocab.next_multiple_of(128) * c + shape.positions * c + shape.layers * (matrices + biases + norms) + 2 * c
}

/// Returns the FLOPs per token of the forward and the backward pass for sequences of `t` tokens.
pub fn flops_per_token(shape: Shape, t: usize) -> usize {
    6 * parameters(shape) + 6 * shape.layers * shape.channels * t
}

/// Returns the share of the FLOPs that the head takes, between 0 and 1.
pub fn head_share(shape: Shape, t: usize) -> f64 {
    let head = 6 * shape.vocab.next_multiple_of(128) * shape.channels;
    head as f64 / flops_per_token(shape, t) as f64
}

/// Returns the sequence length at which attention takes as many FLOPs as the four matmuls of a layer.
pub fn balanced_length(shape: Shape) -> usize {
    // 6 C T = 6 · 12 C²
    12 * shape.channels
}

/// Returns the model FLOPs utilization: the achieved share of `peak` FLOP/s at `tokens_per_second`.
pub fn mfu(shape: Shape, t: usize, tokens_per_second: f64, peak: f64) -> f64 {
    flops_per_token(shape, t) as f64 * tokens_per_second / peak
}
