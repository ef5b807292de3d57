//! The operations of training: one argument struct for each, declared once and implemented by every engine.
//!
//! "float" is the engine's storage type: f32, or bf16 on CUDA. Statistics, losses and optimizer state are f32.
//! Weights are (OC, C) row-major, as in llm.c. Parameter gradients accumulate (`+=`). Activation gradients are
//! overwritten, except the residual stream's gradient, to which [`LayerNormBackward`] adds.
//!
//! To add an operation, declare its struct here, add it to the list at [`Operation`], and handle it in the `execute`
//! method of each engine; the compiler reports every engine that lacks it.

use crate::Result;
use crate::batch::BatchLayout;
use crate::tensor::Tensor;
use anyhow::ensure;
use std::ops::Range;

/// Declares [`Operation`] with one variant for each argument struct, and the conversions into it.
macro_rules! operations {
    ($($name:ident $(<$lifetime:lifetime>)?),* $(,)?) => {
        /// An operation with its arguments, as [`Engine::execute`](crate::Engine::execute) takes it.
        #[derive(Clone, Debug)]
        pub enum Operation<'a> {
            $(#[doc = concat!("See [`", stringify!($name), "`].")] $name($name $(<$lifetime>)?),)*
        }

        $(impl<'a> From<$name $(<$lifetime>)?> for Operation<'a> {
            fn from(operation: $name $(<$lifetime>)?) -> Self {
                Self::$name(operation)
            }
        })*
    };
}

operations!(
    EncoderForward,
    EncoderBackward,
    LayerNormForward,
    LayerNormBackward,
    MatmulForward,
    MatmulBackward,
    AttentionForward,
    AttentionBackward,
    Classifier,
    Sum,
    GlobalNorm,
    SquaredSum<'a>,
    SquareRoot,
    AdamWUpdate<'a>,
);

/// Computes `out[b, t] = wte[token[b, t]] + wpe[t]`.
#[derive(Clone, Copy, Debug)]
pub struct EncoderForward {
    /// (B, T, C) float
    pub out: Tensor,
    /// The batch; its inputs are the tokens.
    pub batch: Tensor,
    /// Layout of `batch`.
    pub layout: BatchLayout,
    /// (Vp, C) float
    pub wte: Tensor,
    /// (max T, C) float
    pub wpe: Tensor,
    /// Channels.
    pub c: usize,
}

/// Adds the gradients of both embeddings: `dwte[v] += Σ dout` over the positions of token `v`, and `dwpe[t] += Σ_b dout[b, t]`.
///
/// Both sums are in f32 and in a fixed order. In bf16 the results are rounded stochastically, with the batch's seed.
#[derive(Clone, Copy, Debug)]
pub struct EncoderBackward {
    /// (Vp, C) float, accumulated
    pub dwte: Tensor,
    /// (max T, C) float, accumulated
    pub dwpe: Tensor,
    /// (B, T, C) float
    pub dout: Tensor,
    /// The batch, sorted by [`BatchLayout::sort`].
    pub batch: Tensor,
    /// Layout of `batch`.
    pub layout: BatchLayout,
    /// Channels.
    pub c: usize,
}

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

/// Sizes of a linear layer: out (rows, OC) = inp (rows, C) · weightᵀ (C, OC).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatmulShape {
    /// Rows of input and output, usually B·T.
    pub rows: usize,
    /// Input channels.
    pub c: usize,
    /// Output channels.
    pub oc: usize,
}

/// Determines how a linear layer's sums become its output. The tensors are (rows, OC) float and distinct from `out`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// out = sum
    None,
    /// out = residual + sum
    Residual(Tensor),
    /// pre_gelu = sum, out = gelu(sum)
    Gelu(Tensor),
}

/// Computes a linear layer: the epilogue of `inp (rows, C) · weight (OC, C)ᵀ + bias (OC)`.
#[derive(Clone, Copy, Debug)]
pub struct MatmulForward {
    /// (rows, OC) float
    pub out: Tensor,
    /// (rows, C) float
    pub inp: Tensor,
    /// (OC, C) float
    pub weight: Tensor,
    /// (OC) float
    pub bias: Option<Tensor>,
    /// Determines how the sums become the output.
    pub epilogue: Epilogue,
    /// Sizes.
    pub shape: MatmulShape,
}

/// Computes the gradients of a linear layer.
///
/// `dinp = dout · weight`, times gelu'(pre_gelu) if `gelu` is given; `dweight += doutᵀ · inp`;
/// `dbias += Σ_rows dout`.
#[derive(Clone, Copy, Debug)]
pub struct MatmulBackward {
    /// (rows, C) float
    pub dinp: Tensor,
    /// (OC, C) float or f32, accumulated
    pub dweight: Tensor,
    /// (OC) float, accumulated
    pub dbias: Option<Tensor>,
    /// (rows, OC) float
    pub dout: Tensor,
    /// (rows, C) float
    pub inp: Tensor,
    /// (OC, C) float
    pub weight: Tensor,
    /// Set if `inp` is a GELU.
    pub gelu: Option<GeluInput>,
    /// Sizes.
    pub shape: MatmulShape,
}

/// States that a linear layer's input (rows, C) is gelu(pre_gelu).
#[derive(Clone, Copy, Debug)]
pub struct GeluInput {
    /// (rows, C) float
    pub pre_gelu: Tensor,
    /// Set if the input was not kept: the layer that computed it. The input is recomputed, bit for bit, before it is read.
    pub recompute: Option<GeluForward>,
}

/// Operands of a [`MatmulForward`] with [`Epilogue::Gelu`].
#[derive(Clone, Copy, Debug)]
pub struct GeluForward {
    /// (rows, C) float
    pub inp: Tensor,
    /// (OC, C) float
    pub weight: Tensor,
    /// (OC) float
    pub bias: Option<Tensor>,
    /// Sizes.
    pub shape: MatmulShape,
}

/// Sizes of a multi-head attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Sequences.
    pub b: usize,
    /// Tokens of a sequence.
    pub t: usize,
    /// Heads (NH).
    pub heads: usize,
    /// Channels of a head (HS).
    pub head_size: usize,
}

/// Computes causal attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionForward {
    /// (B, T, NH, HS) float
    pub out: Tensor,
    /// (B, NH, T) f32: log-sum-exp of each query's scores, for the backward pass.
    pub lse: Tensor,
    /// (B, T, 3, NH, HS) float
    pub qkv: Tensor,
    /// Sizes.
    pub shape: AttentionShape,
}

/// Computes the gradient of queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBackward {
    /// (B, T, 3, NH, HS) float
    pub dqkv: Tensor,
    /// (B, T, NH, HS) float
    pub dout: Tensor,
    /// (B, T, 3, NH, HS) float
    pub qkv: Tensor,
    /// (B, T, NH, HS) float
    pub out: Tensor,
    /// (B, NH, T) f32
    pub lse: Tensor,
    /// Sizes.
    pub shape: AttentionShape,
}

/// Adds the cross-entropy of softmax(logits) and targets to `losses`, and optionally replaces the logits by their gradient.
#[derive(Clone, Copy, Debug)]
pub struct Classifier {
    /// (rows, Vp) float. With `dloss` they become their gradient, 0 in the padding columns V..Vp.
    pub logits: Tensor,
    /// (rows) f32, accumulated
    pub losses: Tensor,
    /// (rows) i32
    pub targets: Tensor,
    /// Vocabulary size V.
    pub v: usize,
    /// Padded vocabulary size Vp.
    pub vp: usize,
    /// Gradient of each row's loss.
    pub dloss: Option<f32>,
}

/// Computes `out = Σ values`, in a fixed order.
#[derive(Clone, Copy, Debug)]
pub struct Sum {
    /// (1) f32
    pub out: Tensor,
    /// (n) f32
    pub values: Tensor,
}

/// Computes the L2 norm of all gradients, in a fixed order.
#[derive(Clone, Copy, Debug)]
pub struct GlobalNorm {
    /// (1) f32
    pub norm: Tensor,
    /// (n) float
    pub grads: Tensor,
}

/// Computes the sum of the squares of all values, in a fixed order.
#[derive(Clone, Copy, Debug)]
pub struct SquaredSum<'a> {
    /// (1) f32
    pub out: Tensor,
    /// float
    pub values: &'a [Tensor],
}

/// Computes `out = √value`.
#[derive(Clone, Copy, Debug)]
pub struct SquareRoot {
    /// (1) f32
    pub out: Tensor,
    /// (1) f32
    pub value: Tensor,
}

/// Hyperparameters of one AdamW update.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    /// Learning rate.
    pub learning_rate: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the denominator.
    pub eps: f32,
    /// Decoupled weight decay, applied to the ranges that decay.
    pub weight_decay: f32,
    /// 1 for the first update.
    pub step: u32,
    /// Gradients are scaled by `clip / norm` if their norm exceeds `clip`.
    pub clip: f32,
    /// Seed of the stochastic rounding to bf16; each range adds its own.
    pub seed: u32,
}

/// Elements of the parameters that AdamW treats alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpdateRange {
    /// Indices into the tensors of [`AdamWUpdate`].
    pub elements: Range<usize>,
    /// Applies weight decay.
    pub decayed: bool,
    /// Added to [`AdamW::seed`]. Elements at equal distance from their ranges' starts draw equal random numbers if these agree.
    pub seed: u32,
}

/// Applies one AdamW update to ranges of the parameters. Nothing changes unless both values of `stats` are finite.
#[derive(Clone, Copy, Debug)]
pub struct AdamWUpdate<'a> {
    /// (n) float
    pub params: Tensor,
    /// (n) float
    pub grads: Tensor,
    /// (n) f32, first moment
    pub m: Tensor,
    /// (n) f32, second moment
    pub v: Tensor,
    /// (n) f32 master weights, which receive the update; none if `params` are f32.
    pub master: Option<Tensor>,
    /// Ascending ranges that do not overlap and begin at multiples of 8 elements.
    pub ranges: &'a [UpdateRange],
    /// (2) f32: sum of the losses, and norm of all gradients.
    pub stats: Tensor,
    /// Hyperparameters.
    pub settings: AdamW,
}

impl AdamWUpdate<'_> {
    /// Checks that the ranges ascend, do not overlap, lie in the tensors and are aligned as AdamW's kernel requires.
    pub(crate) fn check_ranges(&self) -> Result<()> {
        let mut end = 0;
        for Range { start, end: next } in self.ranges.iter().map(|range| range.elements.clone()) {
            ensure!(
                end <= start && start <= next && next <= self.params.len,
                "adamw: range {start}..{next} after {end}, of {} parameters: ranges must ascend and lie in them",
                self.params.len
            );
            let alignment = gpu::adamw::Range::ALIGNMENT;
            ensure!(
                start.is_multiple_of(alignment),
                "adamw: range {start}..{next} does not begin at a multiple of {alignment} elements"
            );
            end = next;
        }
        Ok(())
    }
}
