//! Additions to the residual stream of a decoder: scaled sums, and the smear of token embeddings (nanochat, after modded-nanogpt).

use super::Documents;
use crate::tensor::Tensor;

/// Computes `out = scale · inp + added_scale · added`.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    /// (n) float
    pub out: Tensor,
    /// (n) float
    pub inp: Tensor,
    /// (n) float, which may be `inp`
    pub added: Tensor,
    /// (1) float; 1 if absent
    pub scale: Option<Tensor>,
    /// (1) float; 1 if absent
    pub added_scale: Option<Tensor>,
    /// Subtracts the second term.
    pub subtracts: bool,
}

/// Adds the gradients of a [`Mix`], or those of one of its terms.
///
/// `dadded += added_scale · dout`, `dadded_scale += Σ dout · added`, both negative if the mix subtracts; and with `scale`,
/// `dscale += Σ dout · inp` and `dout = scale · dout`, which then is the gradient of `inp`.
#[derive(Clone, Copy, Debug)]
pub struct MixBackward {
    /// (n) float, replaced if there is a `scale`
    pub dout: Tensor,
    /// (n) float, accumulated
    pub dadded: Tensor,
    /// (1) float, accumulated; absent if the scale is frozen
    pub dscale: Option<Tensor>,
    /// (1) float, accumulated; absent if the scale is frozen
    pub dadded_scale: Option<Tensor>,
    /// (n) float
    pub inp: Tensor,
    /// (n) float, which may be `inp`
    pub added: Tensor,
    /// (1) float
    pub scale: Option<Tensor>,
    /// (1) float; 1 if absent
    pub added_scale: Option<Tensor>,
    /// Whether the mix subtracts.
    pub subtracts: bool,
}

/// Adds to each token's embedding that of the token before it: `out[t] = inp[t] + scale · σ(weight · inp[t, ..G]) · inp[t - 1]`, where
/// σ is the sigmoid. The first token of a sequence or document has none before it.
#[derive(Clone, Copy, Debug)]
pub struct Smear {
    /// (B, T, C) float
    pub out: Tensor,
    /// (B, T) f32: σ, for the backward pass
    pub gates: Tensor,
    /// (B, T, C) float
    pub inp: Tensor,
    /// (B, C) float: the embedding before the first token of each sequence; zeros if absent
    pub before: Option<Tensor>,
    /// (G) float
    pub weight: Tensor,
    /// (1) float
    pub scale: Tensor,
    /// The documents of the batch, if it states them.
    pub documents: Option<Documents>,
    /// Tokens of a sequence (T).
    pub t: usize,
    /// Channels (C).
    pub c: usize,
}

/// Computes the gradient of the input of a [`Smear`] without `before`, and adds those of its parameters.
#[derive(Clone, Copy, Debug)]
pub struct SmearBackward {
    /// (B, T, C) float
    pub dinp: Tensor,
    /// (G) float, accumulated; absent if it is frozen
    pub dweight: Option<Tensor>,
    /// (1) float, accumulated; absent if it is frozen
    pub dscale: Option<Tensor>,
    /// (B, T, C) float
    pub dout: Tensor,
    /// (B, T) f32, of the forward pass
    pub gates: Tensor,
    /// (B, T, C) float
    pub inp: Tensor,
    /// (G) float
    pub weight: Tensor,
    /// (1) float
    pub scale: Tensor,
    /// The documents of the batch, if it states them.
    pub documents: Option<Documents>,
    /// Tokens of a sequence (T).
    pub t: usize,
    /// Channels (C).
    pub c: usize,
}
