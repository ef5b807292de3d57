//! LayerNorm and RMSNorm.

use super::Quantize;
use crate::tensor::Tensor;

/// Computes `out = (inp - mean) · rstd · weight + bias` for each row, and keeps the statistics for the backward pass.
#[derive(Clone, Copy, Debug)]
pub struct LayerNormForward {
    /// (rows, C) float
    pub out: Tensor,
    /// (rows) f32
    pub mean: Tensor,
    /// (rows) f32, reciprocal standard deviation
    pub rstd: Tensor,
    /// (rows, C) float
    pub inp: Tensor,
    /// (C) float
    pub weight: Tensor,
    /// (C) float
    pub bias: Tensor,
    /// Channels.
    pub c: usize,
    /// Set if `out` is the input of a linear layer in FP8: quantizes it. Then nothing else reads it, and an engine may leave it
    /// unwritten.
    pub quantized: Option<Quantize>,
}

/// Adds the gradient through a LayerNorm to `dinp`, and the gradients of its weight and bias.
#[derive(Clone, Copy, Debug)]
pub struct LayerNormBackward {
    /// (rows, C) float, accumulated
    pub dinp: Tensor,
    /// (C) float, accumulated
    pub dweight: Tensor,
    /// (C) float, accumulated
    pub dbias: Tensor,
    /// (C) float: accumulates the column sums of the new `dinp`, the gradient of a bias that was added to `inp`.
    pub column_sums: Option<Tensor>,
    /// (rows, C) float
    pub dout: Tensor,
    /// (rows, C) float
    pub inp: Tensor,
    /// (C) float
    pub weight: Tensor,
    /// (rows) f32
    pub mean: Tensor,
    /// (rows) f32
    pub rstd: Tensor,
    /// Channels.
    pub c: usize,
}

/// Computes `out = inp · rstd · weight` for each row, where rstd = 1 / √(mean(inp²) + eps) (Zhang and Sennrich, 2019,
/// arXiv:1910.07467), and keeps rstd for the backward pass.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormForward {
    /// (rows, C) float
    pub out: Tensor,
    /// (rows) f32
    pub rstd: Tensor,
    /// (rows, C) float
    pub inp: Tensor,
    /// (C) float; all ones if absent.
    pub weight: Option<Tensor>,
    /// Channels.
    pub c: usize,
    /// Added to the mean square.
    pub eps: f32,
    /// Set if `out` is the input of a linear layer in FP8: quantizes it. Then nothing else reads it, and an engine may leave it
    /// unwritten.
    pub quantized: Option<Quantize>,
}

/// Adds the gradient through an RMSNorm to `dinp`, and the gradient of its weight.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormBackward {
    /// (rows, C) float, accumulated
    pub dinp: Tensor,
    /// (C) float, accumulated; present if `weight` is.
    pub dweight: Option<Tensor>,
    /// (rows, C) float
    pub dout: Tensor,
    /// (rows, C) float
    pub inp: Tensor,
    /// (C) float
    pub weight: Option<Tensor>,
    /// (rows) f32
    pub rstd: Tensor,
    /// Channels.
    pub c: usize,
}

/// A norm with its operands.
#[derive(Clone, Copy, Debug)]
pub enum NormForward {
    /// LayerNorm
    LayerNorm(LayerNormForward),
    /// RMSNorm
    RmsNorm(RmsNormForward),
}

impl NormForward {
    /// Returns the output.
    pub const fn out(&self) -> Tensor {
        match self {
            Self::LayerNorm(op) => op.out,
            Self::RmsNorm(op) => op.out,
        }
    }
}
