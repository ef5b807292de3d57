//! Operations in FP8: quantization, scales, and the operands that linear layers take in addition.
//!
//! A tensor is stored as x / scale in an FP8 format, rounded to nearest even and saturating at the largest number of the format.
//! One f32 scale belongs to the whole tensor. NaN and infinities become NaN, so saturation hides neither.

use super::{Groups, MatmulBackward};
use crate::tensor::Tensor;
pub use cuda_std::fp8::{Bf16Scale, Fp8Format};
use cuda_std::{Element, bf16};
use serde::{Deserialize, Serialize};

/// The scale of a tensor in FP8, and the statistic that it is computed from.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Scale {
    /// (1) f32: the factor that restores the tensor from its FP8 values.
    pub scale: Tensor,
    /// (1) f32: the largest magnitude ("amax").
    pub amax: Tensor,
    /// Set if losses are counted. (2) i32: accumulates the numbers of values that saturate and that become 0.
    pub counts: Option<Tensor>,
}

/// Determines the scale of a tensor that is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scaling {
    /// amax = the largest magnitude of this tensor; scale = amax / the largest number of the format.
    Current,
    /// The same, but amax is the largest magnitude since it was last zeroed, which includes this tensor.
    Calibrate,
    /// The scale is given. amax = the largest magnitude since it was last zeroed, which includes this tensor.
    Delayed,
    /// The scale is given, and amax does not change.
    Given,
}

/// Quantizes `inp` (rows, columns), or a batch of such matrices, to FP8, in one or both layouts. Rows and columns are multiples of 16.
#[derive(Clone, Copy, Debug)]
pub struct Quantize {
    /// (rows, columns) FP8
    pub out: Option<Tensor>,
    /// (columns, rows) FP8
    pub transposed: Option<Tensor>,
    /// (rows, columns) float
    pub inp: Tensor,
    /// The scale of the result.
    pub scale: Fp8Scale,
    /// Determines the scale.
    pub scaling: Scaling,
    /// The FP8 format.
    pub format: Fp8Format,
    /// Rows and columns of a matrix.
    pub shape: [usize; 2],
    /// (columns) float, accumulated: the sums over the rows of the quantized values, times the scale. Needs both layouts and one matrix.
    pub column_sums: Option<Tensor>,
    /// Number of matrices, one after another in `inp`, `out` and `transposed`.
    pub matrices: usize,
    /// Set for rows in expert order. Rows after the last group are not read, and what is written there is undefined.
    pub groups: Option<Groups>,
}

impl Quantize {
    /// Returns the quantization of one matrix, without outputs.
    pub const fn new(inp: Tensor, shape: [usize; 2], format: Fp8Format, scale: Fp8Scale, scaling: Scaling) -> Self {
        Self {
            out: None,
            transposed: None,
            inp,
            scale,
            scaling,
            format,
            shape,
            column_sums: None,
            matrices: 1,
            groups: None,
        }
    }

    /// Returns the elements of all matrices.
    pub const fn elements(&self) -> usize {
        self.matrices * self.shape[0] * self.shape[1]
    }
}

/// Computes `out` = `inp` · `scale`, which is exact: [`Bf16Scale`] supports the scale, and the elements of `inp` are finite.
#[derive(Clone, Copy, Debug)]
pub struct Dequantize {
    /// (n) float. n is a multiple of 16.
    pub out: Tensor,
    /// (n) E4M3
    pub inp: Tensor,
    /// (1) f32
    pub scale: Tensor,
}

/// Computes the scales of delayed scaling at the start of a step, and makes room for the step's statistics.
///
/// `scales[i]` = the largest finite `amaxes[h, i]` / `largest`, or 1 if that is 0. Then row h of `amaxes` moves to row h + 1, the
/// last row is dropped, and row 0 becomes zero.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Scales {
    /// (n) f32
    pub scales: Tensor,
    /// (H, n) f32: amaxes of the last H steps, the newest first.
    pub amaxes: Tensor,
    /// The number that the largest magnitude becomes. Larger values of this step saturate at the largest number of the format.
    pub largest: f32,
}

/// Receives the gradient of the logits (rows, Vp) of a [`Classifier`](super::Classifier). Rows and Vp are multiples of 16.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Logits {
    /// (rows, Vp) FP8
    pub out: Tensor,
    /// (Vp, rows) FP8, which may share memory with the logits.
    pub transposed: Tensor,
    /// (1) f32: receives the scale, dloss / the largest number of the format. No gradient is larger than dloss.
    pub scale: Tensor,
}

/// The FP8 operands of a [`MatmulForward`](super::MatmulForward): its GEMM multiplies them instead of `inp` and `weight`.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Forward {
    /// (rows, C) E4M3: the input, which the operation that computed it has quantized. Nothing reads this operation's own `inp`.
    pub inp: Tensor,
    /// (1) f32: the scale of the input.
    pub inp_scale: Tensor,
    /// Set if the output is the input of another linear layer: quantizes it. Then nothing else reads it, and an engine may
    /// leave it unwritten.
    pub out: Option<Quantize>,
    /// (OC, C) E4M3: the quantized weight.
    pub weight: Tensor,
    /// (1) f32: the scale of the weight.
    pub weight_scale: Tensor,
    /// How products are accumulated.
    pub accumulation: Fp8Accumulation,
}

/// The FP8 operands of a [`MatmulBackward`](super::MatmulBackward): its GEMMs multiply them instead of `dout`, `inp` and `weight`.
/// The bias gradient is the column sums of the quantized gradient.
#[derive(Clone, Copy, Debug)]
pub struct Fp8Backward {
    /// (rows, OC) and (OC, rows), in `format`: receive the quantized gradient of the output and its transpose.
    pub dout: [Tensor; 2],
    /// Whether `dout` holds the quantized gradient, because the operation that computed it has quantized it. Then nothing reads
    /// the operation's own `dout`, and the bias gradient is that operation's, too.
    pub dout_is_quantized: bool,
    /// The scale of the gradient.
    pub dout_scale: Fp8Scale,
    /// Whether `dout` is the gradient of logits. A few of its elements are much larger than the others, so exact accumulation adds partial
    /// sums in f32 after fewer columns.
    pub dout_is_of_logits: bool,
    /// Determines the scale of the gradient.
    pub scaling: Scaling,
    /// (C, rows) E4M3: the quantized input, transposed. Its scale is that of the forward pass.
    pub inp_transposed: Tensor,
    /// Whether `inp_transposed` holds the quantized input. Otherwise this operation quantizes `inp`, which nothing else reads.
    pub inp_is_quantized: bool,
    /// The scale of the input.
    pub inp_scale: Fp8Scale,
    /// (C, OC) E4M3: the quantized weight, transposed.
    pub weight_transposed: Tensor,
    /// (1) f32: the scale of the weight.
    pub weight_scale: Tensor,
    /// How products are accumulated.
    pub accumulation: Fp8Accumulation,
    /// Set if `dinp` is the gradient of another linear layer's output: quantizes it. Then nothing else reads it, and
    /// an engine may leave it unwritten. If the operation recomputes an activation that is not gated, the gradient of the weight may be
    /// computed afterwards, so the quantized tensors share no memory with `dout`.
    pub dinp: Option<Quantize>,
}

impl Fp8Backward {
    /// Returns the quantization of the gradient of a linear layer's output, unless it is quantized.
    pub(crate) fn quantize_dout(&self, op: &MatmulBackward) -> Option<Quantize> {
        (!self.dout_is_quantized).then_some(Quantize {
            out: Some(self.dout[0]),
            transposed: op.dweight.map(|_| self.dout[1]),
            column_sums: op.dbias,
            groups: op.groups,
            ..Quantize::new(op.dout, [op.shape.rows, op.shape.oc], Fp8Format::E5m2, self.dout_scale, self.scaling)
        })
    }

    /// Returns the quantization of a linear layer's input, unless it is quantized.
    pub(crate) fn quantize_inp(&self, op: &MatmulBackward) -> Option<Quantize> {
        (!self.inp_is_quantized && op.dweight.is_some()).then_some(Quantize {
            transposed: Some(self.inp_transposed),
            groups: op.groups,
            ..Quantize::new(op.inp, [op.shape.rows, op.shape.c], Fp8Format::E4m3, self.inp_scale, Scaling::Given)
        })
    }
}

/// Determines how a GPU accumulates FP8 products. The CPU engine always uses f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fp8Accumulation {
    /// Tensor cores accumulate over all of K. Hopper's keep about 14 bits
    Fast,
    /// Partial sums are added in f32 after 8,192 columns of K, and those of gradients of logits after 2,048 tokens or 256 logits
    Exact,
    /// `exact` in the backward pass, which has the longest sums (over all tokens), and `fast` in the forward pass
    #[default]
    ExactGradients,
}

/// Rounds to the nearest bf16 number.
pub fn nearest_bf16(value: f32) -> f32 {
    bf16::from_f32(value).to_f32()
}

/// Returns the largest magnitude that rounds to the largest number of a format. Larger ones saturate.
pub(crate) const fn largest_rounded(format: Fp8Format) -> f32 {
    match format {
        Fp8Format::E4m3 => 464.0,
        Fp8Format::E5m2 => 61_440.0,
    }
}
