//! LayerNorm and RMSNorm.

use super::Quantize;
use crate::tensor::Tensor;

/// Normalizes each row and keeps its statistics for the backward pass.
///
/// LayerNorm, if `mean` is given: `out = (inp - mean) · rstd · weight + bias`, where rstd is the reciprocal standard deviation.
///
/// RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467), if it is not: `out = inp · rstd · weight`, where
/// rstd = 1 / √(mean(inp²) + eps).
#[derive(Clone, Copy, Debug)]
pub struct NormForward {
    /// (rows, C) float
    pub out: Tensor,
    /// (rows) f32, for LayerNorm
    pub mean: Option<Tensor>,
    /// (rows) f32
    pub rstd: Tensor,
    /// (rows, C) float
    pub inp: Tensor,
    /// (C) float. RMSNorm may have none, as if all were ones.
    pub weight: Option<Tensor>,
    /// (C) float, for LayerNorm
    pub bias: Option<Tensor>,
    /// Channels.
    pub c: usize,
    /// Added to RMSNorm's mean square. LayerNorm adds 1e-5 to the variance.
    pub eps: f32,
    /// Set if `out` is the input of a linear layer in FP8: quantizes it. Then nothing else reads it, and an engine may leave it
    /// unwritten.
    pub quantized: Option<Quantize>,
}

/// Adds the gradient through a norm to `dinp`, and the gradients of its weight and bias.
#[derive(Clone, Copy, Debug)]
pub struct NormBackward {
    /// (rows, C) float, accumulated
    pub dinp: Tensor,
    /// (C) float, accumulated; present if `weight` is.
    pub dweight: Option<Tensor>,
    /// (C) float, accumulated; for LayerNorm
    pub dbias: Option<Tensor>,
    /// (C) float, for LayerNorm: accumulates the column sums of the new `dinp`, the gradient of a bias that was added to `inp`.
    pub column_sums: Option<Tensor>,
    /// (rows, C) float
    pub dout: Tensor,
    /// (rows, C) float
    pub inp: Tensor,
    /// (C) float
    pub weight: Option<Tensor>,
    /// (rows) f32, for LayerNorm
    pub mean: Option<Tensor>,
    /// (rows) f32
    pub rstd: Tensor,
    /// Channels.
    pub c: usize,
}
