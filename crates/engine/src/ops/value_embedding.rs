//! Value embeddings: each token has a vector that is added to its attention values (Zhou et al., 2024, arXiv:2410.17897, as in
//! nanochat).

use super::AttentionShape;
use crate::tensor::Tensor;

/// The gate of a value embedding: 3 σ(weight · x[..G]) for each key-value head, where x is the normalized input of the layer and σ the
/// sigmoid.
#[derive(Clone, Copy, Debug)]
pub struct ValueGate {
    /// (B·T, C) float: x before the RMSNorm
    pub inp: Tensor,
    /// (B·T) f32: the reciprocal root mean squares of `inp`
    pub rstd: Tensor,
    /// (C) float: weights of the norm; all ones if absent
    pub norm_weight: Option<Tensor>,
    /// (KV, G) float
    pub weight: Tensor,
    /// Channels (C).
    pub c: usize,
}

impl ValueGate {
    /// Upper bound of a gate. A gate with weights of 0 has half this value.
    pub const LARGEST: f32 = 3.0;

    /// Returns the channels that the gate reads (G).
    pub const fn channels(&self, shape: AttentionShape) -> usize {
        self.weight.len / shape.kv_heads
    }
}

/// The token of each row.
#[derive(Clone, Copy, Debug)]
pub struct RowTokens {
    /// i32: the token of row i is at i · `stride`.
    pub tokens: Tensor,
    /// Words from one token to the next: 1 in a batch, [`Slot::WORDS`](super::Slot::WORDS) in slots.
    pub stride: usize,
}

/// Adds the gated embedding of each token to its values: `v[h] += gate[h] · table[token, h]`.
#[derive(Clone, Copy, Debug)]
pub struct ValueEmbed {
    /// (B, T, NH + 2 KV, HS) float: values are replaced, queries and keys are not read.
    pub qkv: Tensor,
    /// (Vp, KV, HS) float
    pub table: Tensor,
    /// The tokens (B·T).
    pub tokens: RowTokens,
    /// The gate.
    pub gate: ValueGate,
    /// Sizes of the attention that reads the values.
    pub shape: AttentionShape,
}

/// Computes the gradients of a [`ValueEmbed`]. That of the values does not change.
#[derive(Clone, Copy, Debug)]
pub struct ValueEmbedBackward {
    /// (B·T, KV, HS) float: the gradients of the rows of the table, for [`EncoderBackward`](super::EncoderBackward)
    pub drows: Tensor,
    /// (B·T, KV) f32: the gradients of the gates' sums, for [`GateInputBackward`]
    pub dgates: Tensor,
    /// (KV, G) float, accumulated; absent if it is frozen
    pub dweight: Option<Tensor>,
    /// (B, T, NH + 2 KV, HS) float: only the gradients of the values are read.
    pub dqkv: Tensor,
    /// (Vp, KV, HS) float
    pub table: Tensor,
    /// The tokens (B·T).
    pub tokens: RowTokens,
    /// The gate.
    pub gate: ValueGate,
    /// Sizes of the attention.
    pub shape: AttentionShape,
}

/// Adds the gradient through gates to that of their input: `dinp[row, ..G] += Σ dgates[row, h] · weight[h]`.
#[derive(Clone, Copy, Debug)]
pub struct GateInputBackward {
    /// (rows, C) float, accumulated
    pub dinp: Tensor,
    /// (rows, KV) f32
    pub dgates: Tensor,
    /// (KV, G) float
    pub weight: Tensor,
    /// Key-value heads (KV).
    pub heads: usize,
    /// Channels (C).
    pub c: usize,
}
