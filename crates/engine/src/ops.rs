//! The operations of training and text generation: one argument struct for each, declared once and implemented by every engine.
//!
//! "float" is the engine's storage type: f32, or bf16 on CUDA. Statistics and losses are f32.
//! Weights are (OC, C) row-major, as in llm.c. Parameter gradients accumulate (`+=`). Activation gradients are
//! overwritten, except the residual stream's gradient, to which [`NormBackward`] adds.
//!
//! To add an operation, declare its struct here, add it to the list at [`Operation`], and handle it in the `execute`
//! method of each engine; the compiler reports every engine that lacks it.

mod decode;
mod experts;
mod fp8;
mod norm;
mod outputs;
mod stream;
mod update;
mod value_embedding;

pub use decode::{
    CacheFill, CacheRead, DecodeAttention, DecodeEmbed, DecodeMatmul, DecodeOperation, DecodeStep, DecodeStepShape,
    SampleTokens, Slot, SlotSampling, decode_splits,
};
pub use experts::{
    BIAS_GRADIENT, ChoiceGradients, Combine, Dispatch, ExpertRange, GROUP_ROWS, Groups, Route, RouteBackward, Router,
    RouterScores,
};
pub(crate) use fp8::largest_rounded;
pub use fp8::{
    Bf16Scale, Dequantize, Fp8Accumulation, Fp8Backward, Fp8Format, Fp8Forward, Fp8Logits, Fp8Scale, Fp8Scales,
    Quantize, Scaling, nearest_bf16,
};
pub use norm::{NormBackward, NormForward};
pub use stream::{Mix, MixBackward, Smear, SmearBackward};
pub use update::{
    AdamW, AdamWUpdate, Master, MuonAdditions, MuonApply, MuonCoefficients, MuonMomentum, MuonVariance, Orthogonalize,
    SMALLEST_NORM, SMALLEST_VARIANCE, UpdateRange,
};
pub use value_embedding::{GateInputBackward, RowTokens, ValueEmbed, ValueEmbedBackward, ValueGate};

use crate::Result;
use crate::batch::BatchLayout;
use crate::tensor::Tensor;
use anyhow::ensure;
use serde::{Deserialize, Serialize};

/// Declares [`Operation`] with one variant for each argument struct, and the conversions into it.
macro_rules! operations {
    ($($name:ident $(<$lifetime:lifetime>)?),* $(,)?) => {
        /// An operation with its arguments, as [`Engine::execute`](crate::Engine::execute) takes it.
        #[derive(Clone, Debug)]
        pub enum Operation<'a> {
            $(#[doc = concat!("See [`", stringify!($name), "`].")] $name($name $(<$lifetime>)?),)*
        }

        impl Operation<'_> {
            /// Returns the name of the operation's type.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$name(_) => stringify!($name),)*
                }
            }
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
    NormForward,
    NormBackward,
    RotaryForward,
    RotaryBackward,
    MatmulForward,
    MatmulBackward,
    Activate,
    ActivateBackward,
    ScaleBlocks,
    Mix,
    MixBackward,
    Smear,
    SmearBackward,
    ValueEmbed,
    ValueEmbedBackward,
    GateInputBackward,
    Route,
    ChoiceGradients,
    RouteBackward,
    Dispatch,
    Combine,
    AttentionForward,
    AttentionBackward,
    Classifier,
    MostLikely,
    Sum,
    GlobalNorm,
    SquaredSum<'a>,
    SquareRoot,
    AdamWUpdate<'a>,
    MuonMomentum,
    Orthogonalize<'a>,
    MuonVariance,
    MuonApply,
    Quantize,
    Dequantize,
    Fp8Scales,
    DecodeEmbed,
    DecodeMatmul,
    DecodeAttention,
    DecodeStep<'a>,
    CacheFill,
    CacheRead,
    SampleTokens,
);

/// Computes `out[b, t] = wte[token[b, t]] + wpe[t]`, without the second term if there is no `wpe`.
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
    pub wpe: Option<Tensor>,
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
    pub dwpe: Option<Tensor>,
    /// (B, T, C) float
    pub dout: Tensor,
    /// The batch, sorted by [`BatchLayout::sort`].
    pub batch: Tensor,
    /// Layout of `batch`.
    pub layout: BatchLayout,
    /// Channels.
    pub c: usize,
}

/// Determines which two channels of a head form the pair that a rotary embedding rotates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RotaryPairs {
    /// Channels i and i + HS/2, as in transformers.
    HalfSplit,
    /// Channels 2i and 2i + 1, as in Meta's Llama and llm.c.
    Interleaved,
}

/// A rotation of queries and keys by their positions (RoPE; Su et al., 2021, arXiv:2104.09864), after an optional norm.
///
/// The pair (x, y) number i at position t becomes (x cos - y sin, y cos + x sin) with the cosine and sine of `table[t, i]`.
#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    /// (max T, HS/2, 2) f32: cosine and sine of each angle.
    pub table: Tensor,
    /// The pairs that are rotated.
    pub pairs: RotaryPairs,
    /// Set if queries and keys are normalized before.
    pub qk_norm: Option<HeadNorm>,
}

/// RMSNorm of queries and keys before the rotation (QK-norm).
#[derive(Clone, Copy, Debug)]
pub struct HeadNorm {
    /// Float weights of queries and keys, of the lengths of [`QkNormScope::widths`]; all ones if absent.
    pub weights: Option<[Tensor; 2]>,
    /// Added to the mean square.
    pub eps: f32,
    /// Factor of the normalized queries and keys.
    pub gain: f32,
    /// The values that are normalized together.
    pub scope: QkNormScope,
}

/// The values that a norm of queries and keys normalizes together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QkNormScope {
    /// Each head by itself, as in Qwen3.
    #[default]
    Head,
    /// All query heads of a token, and all of its key heads, as in OLMoE.
    AllHeads,
}

impl QkNormScope {
    /// Reports whether this is the default, which files leave out.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the number of query channels and of key channels that are normalized together.
    pub const fn widths(self, heads: usize, kv_heads: usize, head_size: usize) -> [usize; 2] {
        match self {
            Self::Head => [head_size; 2],
            Self::AllHeads => [heads * head_size, kv_heads * head_size],
        }
    }
}

impl Rotation {
    /// Checks that the table has the positions of the sequences.
    pub(crate) fn check_table(&self, shape: AttentionShape) -> Result<()> {
        let AttentionShape { t, head_size, .. } = shape;
        ensure!(
            self.table.len >= t * head_size,
            "rotary: expected a table of at least {t} positions, found {}; use a shorter sequence",
            self.table.len / head_size.max(1)
        );
        Ok(())
    }

    /// Returns the lengths of the weights of the norm of queries and keys.
    pub(crate) fn weight_lengths(
        &self,
        AttentionShape { heads, kv_heads, head_size, .. }: AttentionShape,
    ) -> [usize; 2] {
        self.qk_norm.map_or(QkNormScope::Head, |norm| norm.scope).widths(heads, kv_heads, head_size)
    }

    /// Returns the weights of the norm of queries and keys.
    pub(crate) fn weights(&self) -> Option<[Tensor; 2]> {
        self.qk_norm?.weights
    }
}

/// Rotates queries and keys in place.
#[derive(Clone, Copy, Debug)]
pub struct RotaryForward {
    /// (B, T, NH + 2 KV, HS) float: queries and keys are replaced, values are not read.
    pub qkv: Tensor,
    /// (B, T, NH + KV, HS) float: the queries and keys before the norm, for the backward pass; present if there is a norm.
    pub saved: Option<Tensor>,
    /// The rotation.
    pub rotation: Rotation,
    /// Sizes of the attention that reads the result.
    pub shape: AttentionShape,
}

/// Computes the gradient of a [`RotaryForward`]: rotates back, then propagates through the norm.
#[derive(Clone, Copy, Debug)]
pub struct RotaryBackward {
    /// (B, T, NH + 2 KV, HS) float: the gradients of queries and keys are replaced, those of values are not read.
    pub dqkv: Tensor,
    /// (B, T, NH + KV, HS) float, of the forward pass
    pub saved: Option<Tensor>,
    /// Float gradients of the norm's weights, accumulated; present if the weights are.
    pub dweights: Option<[Tensor; 2]>,
    /// The rotation of the forward pass.
    pub rotation: Rotation,
    /// Sizes of the attention.
    pub shape: AttentionShape,
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

pub use gpu::activation::Activation;

/// Determines how a linear layer's sums become its output. The tensors are (rows, OC) float and distinct from `out`, except that the residual
/// of a [`MatmulForward`] may be `out` itself: the sums are added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// out = sum
    None,
    /// out = residual + sum
    Residual(Tensor),
    /// preactivation = sum, out = activation(sum); out is (rows, OC / [`Activation::inputs`])
    Activation(Activation, Tensor),
}

/// Computes a linear layer: the epilogue of `inp (rows, C) · weight (OC, C)ᵀ + bias (OC)`.
///
/// With `groups`, the weight is (E, OC, C), and the rows are in expert order: each expert's rows are multiplied by its matrix. Rows of padding
/// become 0. The rows after the last expert's are undefined. There are neither a bias nor a residual nor FP8 then.
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
    /// Set if the GEMM multiplies in FP8.
    pub fp8: Option<Fp8Forward>,
    /// Set if each expert has its own matrix.
    pub groups: Option<Groups>,
}

impl MatmulForward {
    /// Returns a layer without bias, in the precision of its tensors: `out = inp · weightᵀ`.
    pub const fn new([out, inp, weight]: [Tensor; 3], shape: MatmulShape) -> Self {
        Self { out, inp, weight, bias: None, epilogue: Epilogue::None, shape, fp8: None, groups: None }
    }
}

/// Computes the gradients of a linear layer.
///
/// `dinp = dout · weight`, multiplied by the derivative of the activation if `activation` is given; `dweight += doutᵀ · inp`, unless the
/// weight is frozen; `dbias += Σ_rows dout`.
///
/// With `groups`, weight and dweight are (E, OC, C), as in [`MatmulForward`]. Each expert's dweight is a sum over its rows. `adds_to_dinp` is
/// false then, and there is no bias.
#[derive(Clone, Copy, Debug)]
pub struct MatmulBackward {
    /// (rows, C) float; with an activation its gradient (rows, C · [`Activation::inputs`])
    pub dinp: Tensor,
    /// Adds to `dinp` instead of overwriting it. There is no activation then.
    pub adds_to_dinp: bool,
    /// (OC, C) float or f32, accumulated; `None` if the weight is frozen.
    pub dweight: Option<Tensor>,
    /// (OC) float, accumulated
    pub dbias: Option<Tensor>,
    /// (rows, OC) float
    pub dout: Tensor,
    /// (rows, C) float. Its contents are lost with a gated activation.
    pub inp: Tensor,
    /// (OC, C) float
    pub weight: Tensor,
    /// Set if `inp` is the output of an activation.
    pub activation: Option<ActivationInput>,
    /// Sizes.
    pub shape: MatmulShape,
    /// Set if the GEMMs multiply in FP8.
    pub fp8: Option<Fp8Backward>,
    /// Set if each expert has its own matrix.
    pub groups: Option<Groups>,
}

impl MatmulBackward {
    /// Returns the gradients of [`MatmulForward::new`]: `dinp = dout · weight`, `dweight += doutᵀ · inp`.
    pub const fn new(
        dinp: Tensor,
        dweight: Option<Tensor>,
        [dout, inp, weight]: [Tensor; 3],
        shape: MatmulShape,
    ) -> Self {
        Self {
            dinp,
            adds_to_dinp: false,
            dweight,
            dbias: None,
            dout,
            inp,
            weight,
            activation: None,
            shape,
            fp8: None,
            groups: None,
        }
    }
}

/// States that a linear layer's input (rows, C) is activation(preactivation).
#[derive(Clone, Copy, Debug)]
pub struct ActivationInput {
    /// The activation.
    pub activation: Activation,
    /// (rows, C · [`Activation::inputs`]) float
    pub preactivation: Tensor,
    /// Set if the input was not kept: the layer that computed it. The input is recomputed, bit for bit, before it is read.
    pub recompute: Option<ActivationForward>,
}

/// Operands of a [`MatmulForward`] with [`Epilogue::Activation`].
#[derive(Clone, Copy, Debug)]
pub struct ActivationForward {
    /// (rows, C) float
    pub inp: Tensor,
    /// (OC, C) float
    pub weight: Tensor,
    /// (OC) float
    pub bias: Option<Tensor>,
    /// Sizes.
    pub shape: MatmulShape,
}

/// Computes `out = activation(preactivation)`, where no linear layer does that in its epilogue.
#[derive(Clone, Copy, Debug)]
pub struct Activate {
    /// The activation.
    pub activation: Activation,
    /// (rows, columns) float
    pub out: Tensor,
    /// (rows, columns · [`Activation::inputs`]) float
    pub preactivation: Tensor,
    /// Columns of the output.
    pub columns: usize,
}

/// Computes the gradient of an activation's argument.
#[derive(Clone, Copy, Debug)]
pub struct ActivateBackward {
    /// The activation.
    pub activation: Activation,
    /// (rows, columns · [`Activation::inputs`]) float. With one input, it holds the gradient of the output and is replaced.
    pub dinp: Tensor,
    /// (rows, columns) float: the gradient of the output of an activation with two inputs.
    pub dout: Option<Tensor>,
    /// (rows, columns · [`Activation::inputs`]) float
    pub preactivation: Tensor,
    /// Columns of the output.
    pub columns: usize,
}

/// Scales blocks on the diagonal of a matrix, and sets all other elements to 0. Block i has the rows from `ends[i - 1]` to `ends[i]`, and
/// the next `block_columns` columns.
#[derive(Clone, Copy, Debug)]
pub struct ScaleBlocks {
    /// (rows, columns) float, replaced
    pub values: Tensor,
    /// Columns.
    pub columns: usize,
    /// Factor of the blocks.
    pub factor: f32,
    /// The ends of the rows of three blocks. Blocks may be empty.
    pub ends: [usize; 3],
    /// Columns of a block.
    pub block_columns: usize,
    /// The blocks that are scaled. The others become 0.
    pub kept: [bool; 3],
}

impl ScaleBlocks {
    /// Scales a whole matrix (rows, columns).
    pub const fn whole(values: Tensor, columns: usize, factor: f32) -> Self {
        Self { values, columns, factor, ends: [values.len / columns; 3], block_columns: columns, kept: [true; 3] }
    }
}

/// Sizes of a grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245): query head h reads key-value head
/// h / (NH / KV). With KV = NH it is multi-head attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Sequences.
    pub b: usize,
    /// Tokens of a sequence.
    pub t: usize,
    /// Query heads (NH).
    pub heads: usize,
    /// Key-value heads (KV), a divisor of NH.
    pub kv_heads: usize,
    /// Channels of a head (HS).
    pub head_size: usize,
}

impl AttentionShape {
    /// Returns the heads of a row of qkv: NH + 2 KV.
    pub const fn packed_heads(self) -> usize {
        self.heads + 2 * self.kv_heads
    }

    /// Checks that each key-value head has the same number of query heads.
    pub(crate) fn check(self) -> Result<()> {
        ensure!(
            self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads),
            "attention: expected a number of key-value heads that divides {} heads, found {}",
            self.heads,
            self.kv_heads
        );
        Ok(())
    }
}

/// What hides keys from queries, besides the causal mask. The default hides nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionMask {
    /// A query attends only to keys of its own document.
    pub documents: Option<Documents>,
    /// Number of keys that a query attends to at most, including its own position. Not 0.
    pub window: Option<usize>,
}

/// The documents of a batch, i32. [`BatchLayout::find_documents`](crate::BatchLayout::find_documents) computes them.
#[derive(Clone, Copy, Debug)]
pub struct Documents {
    /// (B, T): the first position of the document at each position.
    pub first_keys: Tensor,
    /// (B, T): the last position of the document at each position.
    pub last_queries: Tensor,
    /// (B, tiles): the order of the tiles of queries in the `sm_90a` kernels, which does not change results.
    pub query_tiles: Tensor,
    /// (B, tiles): the order of the tiles of keys.
    pub key_tiles: Tensor,
}

/// Computes causal attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionForward {
    /// (B, T, NH, HS) float
    pub out: Tensor,
    /// (B, NH, T) f32: log-sum-exp of each query's scores, for the backward pass.
    pub lse: Tensor,
    /// (B, T, NH + 2 KV, HS) float
    pub qkv: Tensor,
    /// Sizes.
    pub shape: AttentionShape,
    /// Index of the first query of each sequence that is needed. The outputs of earlier queries are undefined afterwards.
    pub first_query: usize,
    /// What hides keys.
    pub mask: AttentionMask,
    /// Quantizes `out` for a linear layer in FP8.
    pub quantized: Option<Quantize>,
}

/// Computes the gradient of queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBackward {
    /// (B, T, NH + 2 KV, HS) float
    pub dqkv: Tensor,
    /// (B, T, NH, HS) float
    pub dout: Tensor,
    /// (B, T, NH + 2 KV, HS) float
    pub qkv: Tensor,
    /// (B, T, NH, HS) float
    pub out: Tensor,
    /// (B, NH, T) f32
    pub lse: Tensor,
    /// Sizes.
    pub shape: AttentionShape,
    /// What hides keys, as in the forward pass.
    pub mask: AttentionMask,
}

/// Adds the cross-entropy of softmax(logits) and targets to `losses`, and optionally replaces the logits by their gradient. A row with
/// [`MASKED_TARGET`](crate::MASKED_TARGET) adds nothing, and its gradient is 0.
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
    /// Bounds the logits: they are replaced by softcap · tanh(logit / softcap) first.
    pub softcap: Option<f32>,
    /// Set if the gradient is written in FP8. Then `logits` are undefined afterwards. Needs `dloss`.
    pub fp8: Option<Fp8Logits>,
}

/// Sets `hits` to 1 where the target has the largest logit of its row, the first of several, and else to 0. A NaN makes its row 0. A
/// softcap would not change the result.
#[derive(Clone, Copy, Debug)]
pub struct MostLikely {
    /// (rows) f32
    pub hits: Tensor,
    /// (rows, Vp) float
    pub logits: Tensor,
    /// (rows) i32, none of them masked
    pub targets: Tensor,
    /// Vocabulary size V.
    pub v: usize,
    /// Padded vocabulary size Vp.
    pub vp: usize,
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
