//! The description of a GEMM, which callers, kernels and other backends share.
//!
//! A GEMM is a layout, a precision, a kind of batch, and an epilogue that is composed from parts. The types of a kernel
//! instance state what they compute in the same terms, so the instance for a GEMM is found, not listed.

use crate::activation::Activation;
use cuda_std::fp8::Fp8Format;

/// Storage type of the matrices; sums are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmPrecision {
    /// bf16 on tensor cores.
    Bf16,
    /// f32 without tensor cores.
    F32,
    /// f32 in memory, rounded to 10 bits of mantissa on tensor cores.
    Tf32,
    /// FP8 operands with a scale each, on tensor cores; all other matrices are bf16. The layout is [`GemmLayout::Nt`].
    Fp8 {
        /// The format of a; b is E4M3.
        a: Fp8Format,
        /// The columns of K after which the sums of tensor cores are added in f32, a multiple of 128. `None`: tensor cores add up all of K.
        columns: Option<u32>,
    },
}

/// The columns of K that tensor cores accumulate in FP8 before the sum is added in f32, in the exact mode. After every 32 columns, tensor
/// cores truncate the accumulator to about 14 bits: the error grows with K, and small addends are lost.
pub const EXACT_COLUMNS: u32 = 8192;
/// The same for a sum over tokens of gradients of logits.
pub const LOGITS_TOKENS: u32 = 2048;
/// The same for a sum over the gradients of a token's logits. That of the target is much larger than most others.
pub const LOGITS_COLUMNS: u32 = 256;

/// Determines which operand is transposed in memory. Every matrix is row-major without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmLayout {
    /// out (M, N) = a (M, K) · b (N, K)ᵀ, the forward pass of a linear layer
    Nt,
    /// out (M, N) = a (M, K) · b (K, N), the gradient of a linear layer's input
    Nn,
    /// out (M, N) = a (K, M)ᵀ · b (K, N), the gradient of a linear layer's weight
    Tn,
}

/// Determines how many GEMMs an operation consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Batching {
    /// One.
    One,
    /// A strided batch: GEMMs of one shape, with a constant stride between their matrices.
    Strided,
    /// A batch of GEMMs of one shape in which b is a, multiplied by its transpose. So every output is symmetric; kernels
    /// compute only its tiles on and above the diagonal.
    Symmetric,
    /// A grouped GEMM over groups of rows of different sizes, which are in device memory ([`Groups`](crate::experts::Groups)). The rows of
    /// group g of a (M, K) are multiplied by matrix g of b, into the same rows of out (M, N). M is an upper limit of the rows of all groups.
    Grouped,
    /// A grouped GEMM that sums over groups of K. Matrix g of out is a · b over group g. K is an upper limit of the rows of all groups.
    GroupedSum,
}

impl Batching {
    /// Returns true for a grouped GEMM.
    pub const fn is_grouped(self) -> bool {
        matches!(self, Self::Grouped | Self::GroupedSum)
    }
}

/// The part of a bias in an epilogue. It has N elements; its gradient M.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bias {
    /// The bias is added to each row of the sums.
    Add,
    /// The GEMM of a weight gradient adds the column sums of a (K, M) to the gradient of the bias.
    Gradient,
}

/// A value to which an epilogue adds the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Residual {
    /// out = residual (M, N) + sum. The residual may be out itself, as in a gradient that accumulates.
    Add,
    /// out = beta · residual + alpha · sum
    Scaled,
}

/// The use of an activation function in an epilogue. The preactivation, its argument, is rounded to the stored type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// preactivation (M, N) = sum; out = activation(preactivation), (M, N), or (M, N / 2) if the function is gated
    Forward,
    /// out = the gradient of preactivation, where sum is that of activation(preactivation). Both are (M, N), or (M, 2 N) if
    /// the function is gated.
    Backward,
    /// The output of `Backward`; activation (M, N) = activation(preactivation).
    BackwardAndValue,
}

/// The type of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmOutput {
    /// The storage type of the matrices other than FP8 operands.
    Storage,
    /// f32.
    F32,
    /// FP8 in the format of a: the output in storage precision, divided by its scale.
    Fp8,
}

/// Determines how the sums become the output: bias, then residual or activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GemmEpilogue {
    /// Whether a bias takes part.
    pub bias: Option<Bias>,
    /// The value to which the sums are added.
    pub residual: Option<Residual>,
    /// The activation function.
    pub activation: Option<(Activation, Pass)>,
    /// The type of the output.
    pub output: GemmOutput,
}

impl GemmEpilogue {
    /// out = sum
    pub const NONE: Self = Self { bias: None, residual: None, activation: None, output: GemmOutput::Storage };
    /// out = residual + sum
    pub const RESIDUAL: Self = Self { residual: Some(Residual::Add), ..Self::NONE };
    /// out = sum + bias
    pub const BIAS: Self = Self { bias: Some(Bias::Add), ..Self::NONE };
    /// out = residual + sum, and the gradient of a bias.
    pub const BIAS_GRADIENT: Self = Self { bias: Some(Bias::Gradient), ..Self::RESIDUAL };

    /// Returns the epilogue with an activation function.
    pub const fn with(self, activation: Activation, pass: Pass) -> Self {
        Self { activation: Some((activation, pass)), ..self }
    }

    /// Returns true if the epilogue writes a preactivation.
    pub const fn writes_preactivation(self) -> bool {
        matches!(self.activation, Some((_, Pass::Forward)))
    }

    /// Returns true if the output has other columns than the sums.
    pub const fn is_gated(self) -> bool {
        matches!(self.activation, Some((activation, _)) if activation.is_gated())
    }
}

/// A GEMM without its addresses: what a backend needs to choose an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gemm {
    /// Rows of the sums.
    pub m: usize,
    /// Columns of the sums.
    pub n: usize,
    /// Terms of a sum.
    pub k: usize,
    /// Which operand is transposed.
    pub layout: GemmLayout,
    /// Storage type.
    pub precision: GemmPrecision,
    /// The number of GEMMs.
    pub batching: Batching,
    /// Determines how the sums become the output.
    pub epilogue: GemmEpilogue,
}

impl Gemm {
    /// Returns true if the operands are FP8.
    pub const fn is_fp8(&self) -> bool {
        matches!(self.precision, GemmPrecision::Fp8 { .. })
    }

    /// Returns the rows and columns of the output.
    pub const fn output_shape(&self) -> [usize; 2] {
        let columns = match self.epilogue.activation {
            Some((activation, Pass::Forward)) => self.n / activation.inputs(),
            Some((activation, _)) => self.n * activation.inputs(),
            None => self.n,
        };
        [self.m, columns]
    }
}
