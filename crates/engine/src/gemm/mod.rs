//! General matrix multiplications (GEMMs): a row-major description that every backend understands.
//!
//! A model operation such as [`MatmulBackward`](crate::ops::MatmulBackward) becomes one or more [`Gemm`]s. Three backends
//! compute them: cuBLASLt ([`cublaslt`]), this project's wgmma kernels (`cuda/wgmma.rs`), and a CPU reference for the
//! emulator ([`mod@reference`]). `cuda/gemm_dispatch.rs` selects the backend, and `cuda/gemm_tuner.rs` times the alternatives.
//! Column-major terms appear in [`cublaslt`] only.
//!
//! A new storage type is a variant of [`GemmPrecision`]. A new fusion is a variant of [`GemmEpilogue`] with, if cuBLASLt lacks
//! it, an entry in `GemmEpilogue::part`. Callers do not change.

mod choice;
pub mod cublaslt;
pub mod reference;

pub use ::cublaslt::{Batch, Scale};
pub use choice::{Algorithms, Choice, KernelConfig, Timing, Tuning};

use crate::Result;
use anyhow::bail;
use cuda_std::fp8::Fp8Format;
use gpu::launch::KernelLaunch;
use std::fmt;

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
        /// Whether sums over 128 columns of K are added in f32.
        exact: bool,
    },
}

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

/// Determines how the sums become the output. GELU is the tanh approximation. relu² is max(x, 0)².
///
/// SwiGLU has F outputs for 2 F columns of its preactivation: those of up, then those of gate. Its output is up · silu(gate).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmEpilogue {
    /// out = sum
    None,
    /// out = sum + bias (N)
    Bias,
    /// out = residual (M, N) + sum
    Residual,
    /// out = residual (M, N) + sum + bias (N)
    BiasResidual,
    /// preactivation (M, N) = sum + bias (N); out = gelu(preactivation)
    BiasGelu,
    /// out = sum ⊙ gelu'(preactivation (M, N))
    GeluBackward,
    /// out = sum ⊙ gelu'(preactivation); activation (M, N) = gelu(preactivation). cuBLASLt lacks it.
    GeluBackwardRecompute,
    /// preactivation (M, N) = sum; out = relu²(preactivation). cuBLASLt lacks it.
    ReluSquared,
    /// out = sum ⊙ 2 max(preactivation (M, N), 0). cuBLASLt lacks it.
    ReluSquaredBackward,
    /// out = sum ⊙ 2 max(preactivation, 0); activation (M, N) = relu²(preactivation). cuBLASLt lacks it.
    ReluSquaredBackwardRecompute,
    /// preactivation (M, N) = sum; out (M, N / 2) = swiglu(preactivation). cuBLASLt lacks it.
    SwiGlu,
    /// out (M, 2 N) = the gradient of preactivation (M, 2 N), where sum is the gradient of swiglu(preactivation). cuBLASLt lacks it.
    SwiGluBackward,
    /// The output of `SwiGluBackward`; activation (M, N) = swiglu(preactivation). cuBLASLt lacks it.
    SwiGluBackwardRecompute,
    /// The epilogue `BiasGelu` with out in E4M3: gelu(preactivation), rounded to bf16, divided by its scale. cuBLASLt lacks it.
    BiasGeluFp8,
    /// The epilogue `GeluBackward` with out in the format of a: rounded to bf16, divided by its scale. cuBLASLt lacks it.
    GeluBackwardFp8,
    /// out += sum
    Accumulate,
    /// out += sum; bias (M) += column sums of a (K, M). cuBLASLt lacks it.
    AccumulateBiasGrad,
    /// out = beta · residual (M, N) + alpha · sum, for each matrix of a batch
    BatchedResidual,
    /// out = sum, for each matrix of a batch. b is a, so out is symmetric. cuBLASLt computes all of it, the kernels only the tiles
    /// on and above the diagonal.
    Symmetric,
    /// out = beta · residual (M, N) + alpha · sum, for each matrix of a batch. b is a, and residual is symmetric, so out is, too.
    SymmetricResidual,
}

impl GemmEpilogue {
    /// Reports whether the epilogue reads or writes `bias`.
    pub(crate) fn uses_bias(self) -> bool {
        matches!(self, Self::Bias | Self::BiasResidual | Self::BiasGelu | Self::BiasGeluFp8 | Self::AccumulateBiasGrad)
    }

    /// Reports whether the epilogue reads or writes `preactivation`.
    pub(crate) fn uses_preactivation(self) -> bool {
        match self {
            Self::None
            | Self::Bias
            | Self::Residual
            | Self::BiasResidual
            | Self::Accumulate
            | Self::AccumulateBiasGrad
            | Self::BatchedResidual
            | Self::Symmetric
            | Self::SymmetricResidual => false,
            Self::BiasGelu
            | Self::BiasGeluFp8
            | Self::GeluBackward
            | Self::GeluBackwardFp8
            | Self::GeluBackwardRecompute
            | Self::ReluSquared
            | Self::ReluSquaredBackward
            | Self::ReluSquaredBackwardRecompute
            | Self::SwiGlu
            | Self::SwiGluBackward
            | Self::SwiGluBackwardRecompute => true,
        }
    }

    /// Reports whether the epilogue writes `preactivation`.
    pub(crate) fn writes_preactivation(self) -> bool {
        matches!(self, Self::BiasGelu | Self::BiasGeluFp8 | Self::ReluSquared | Self::SwiGlu)
    }

    /// Returns the epilogue that also recomputes the activation, for one that multiplies by its derivative.
    pub(crate) fn with_recompute(self) -> Option<Self> {
        match self {
            Self::GeluBackward => Some(Self::GeluBackwardRecompute),
            Self::ReluSquaredBackward => Some(Self::ReluSquaredBackwardRecompute),
            Self::SwiGluBackward => Some(Self::SwiGluBackwardRecompute),
            _ => None,
        }
    }

    /// Reports whether the output is FP8.
    pub(crate) fn is_fp8(self) -> bool {
        matches!(self, Self::BiasGeluFp8 | Self::GeluBackwardFp8)
    }

    /// Reports whether the epilogue recomputes an activation.
    fn recomputes(self) -> bool {
        matches!(self, Self::GeluBackwardRecompute | Self::ReluSquaredBackwardRecompute | Self::SwiGluBackwardRecompute)
    }

    /// Reports whether the output has other columns than the sums. Then the unfused sums need separate memory.
    fn uses_sums(self) -> bool {
        matches!(self, Self::SwiGluBackward | Self::SwiGluBackwardRecompute)
    }

    /// Returns the epilogue without one step, which fallback kernels then compute. See [`GemmCall::part`].
    fn part(self) -> Self {
        match self {
            Self::AccumulateBiasGrad => Self::Accumulate,
            Self::GeluBackwardRecompute => Self::GeluBackward,
            Self::ReluSquaredBackwardRecompute => Self::ReluSquaredBackward,
            Self::SwiGluBackwardRecompute => Self::SwiGluBackward,
            Self::ReluSquared | Self::ReluSquaredBackward | Self::SwiGlu | Self::SwiGluBackward => Self::None,
            epilogue => epilogue,
        }
    }

    fn uses_residual(self) -> bool {
        matches!(self, Self::Residual | Self::BiasResidual) || self.uses_scale()
    }

    /// Reports whether the epilogue has factors.
    fn uses_scale(self) -> bool {
        matches!(self, Self::BatchedResidual | Self::SymmetricResidual)
    }

    /// Reports whether the output is symmetric.
    fn is_symmetric(self) -> bool {
        matches!(self, Self::Symmetric | Self::SymmetricResidual)
    }

    /// Reports whether the operands are batches of matrices.
    pub(crate) fn is_batched(self) -> bool {
        self == Self::BatchedResidual || self.is_symmetric()
    }

    /// Reports whether the sums are added to something.
    pub(crate) fn accumulates(self) -> bool {
        self.uses_residual() || matches!(self, Self::Accumulate | Self::AccumulateBiasGrad)
    }
}

/// A GEMM without its addresses: what a backend needs to choose an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gemm {
    /// Rows of the output.
    pub m: usize,
    /// Columns of the output.
    pub n: usize,
    /// Terms of a sum.
    pub k: usize,
    /// Which operand is transposed.
    pub layout: GemmLayout,
    /// Storage type.
    pub precision: GemmPrecision,
    /// Determines how the sums become the output.
    pub epilogue: GemmEpilogue,
    /// Stores the output in f32 where `precision` is bf16.
    pub f32_output: bool,
}

/// Device addresses of a GEMM's matrices, each a multiple of 16.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GemmOperands {
    /// Left operand.
    pub a: u64,
    /// Right operand.
    pub b: u64,
    /// Output.
    pub out: u64,
    /// Added to the sums by epilogues with a residual.
    pub residual: Option<u64>,
    /// A bias, or its gradient.
    pub bias: Option<u64>,
    /// Argument of an activation function.
    pub preactivation: Option<u64>,
    /// Output for a recomputed activation.
    pub activation: Option<u64>,
    /// Output for the sums (M, N) if cuBLASLt computes the GEMM of [`GemmEpilogue::SwiGluBackward`].
    pub sums: Option<u64>,
    /// Factors of [`GemmEpilogue::BatchedResidual`] and [`GemmEpilogue::SymmetricResidual`]. Algorithms do not depend on them,
    /// so they are not part of the [`Gemm`].
    pub scale: Option<Scale>,
    /// The batch of a batched epilogue: the number of matrices, and the elements from the start of one to that of the next in
    /// a, b, and `d`: out and residual. Algorithms must not depend on the number, so that the bits of a matrix do not depend
    /// on the others. So the batch is not part of the [`Gemm`].
    pub batch: Option<Batch>,
    /// Addresses of the f32 factors that restore a and b from their FP8 values.
    pub fp8_scales: Option<[u64; 2]>,
    /// Addresses of an FP8 output's scale, and of its largest magnitude as f32 bits, which becomes the maximum of itself and the
    /// magnitudes of the output before it is divided by the scale.
    pub fp8_output: Option<[u64; 2]>,
}

/// Alignments of the operands b, a, output (and residual), bias and preactivation: the largest power of two up to 256 that divides each
/// address, 0 for none. An algorithm may rely on them.
pub type Alignments = [u32; 5];

/// A GEMM and its alignments: the key under which an algorithm is stored.
pub type GemmKey = (Gemm, Alignments);

/// A GEMM with its addresses, ready to run.
#[derive(Clone, Debug)]
pub struct GemmCall {
    /// The description.
    pub gemm: Gemm,
    /// The addresses.
    pub operands: GemmOperands,
    /// Kernels that run before the [part](Self::part), if no wgmma kernel computes the whole GEMM.
    pub fallback: Vec<KernelLaunch>,
    /// Kernels that compute the output from the sums, after the part that has no such epilogue.
    pub after: Vec<KernelLaunch>,
}

impl GemmCall {
    /// Returns the key of its algorithm.
    pub fn key(&self) -> GemmKey {
        (self.gemm, self.operands.alignments())
    }

    /// Returns the GEMM without one step of its epilogue, which [`fallback`](Self::fallback) or, if the part has none,
    /// [`after`](Self::after) computes. Returns the same GEMM if cuBLASLt can compute it.
    pub fn part(&self) -> Self {
        let gemm = self.gemm.part();
        let epilogue = gemm.epilogue;
        let GemmOperands { out, preactivation, sums, .. } = self.operands;
        let plain_out = match self.gemm.epilogue {
            GemmEpilogue::ReluSquared | GemmEpilogue::SwiGlu => preactivation,
            GemmEpilogue::BiasGelu if gemm != self.gemm => preactivation,
            GemmEpilogue::SwiGluBackward => sums,
            _ => None,
        };
        let operands = GemmOperands {
            out: plain_out.unwrap_or(out),
            bias: self.operands.bias.filter(|_| epilogue.uses_bias()),
            preactivation: preactivation.filter(|_| epilogue.uses_preactivation()),
            activation: self.operands.activation.filter(|_| epilogue.recomputes()),
            sums: sums.filter(|_| epilogue.uses_sums()),
            ..self.operands
        };
        let after = if gemm == gemm.part() { Vec::new() } else { self.after.clone() };
        Self { gemm, operands, fallback: Vec::new(), after }
    }

    /// Returns the part that cuBLASLt can compute.
    pub fn library_part(&self) -> Self {
        let part = self.part();
        if part.gemm == self.gemm { part } else { part.library_part() }
    }
}

impl GemmOperands {
    /// Returns the alignments of the addresses.
    pub fn alignments(&self) -> Alignments {
        let of = |address: u64| 1 << address.trailing_zeros().min(8);
        let out = self.out | self.residual.unwrap_or(0);
        [of(self.b), of(self.a), of(out), self.bias.map_or(0, of), self.preactivation.map_or(0, of)]
    }
}

/// The columns of a `preactivation` are a multiple of this: cuBLASLt requires it of a leading dimension.
pub const GELU_COLUMNS: usize = 8;

impl Gemm {
    /// Returns the GEMM without one step of its epilogue. See [`GemmCall::part`].
    fn part(self) -> Self {
        let epilogue = match (self.precision, self.epilogue) {
            // cuBLASLt's GELU epilogues are for other types.
            (GemmPrecision::Fp8 { .. }, GemmEpilogue::BiasGelu) => GemmEpilogue::Bias,
            (GemmPrecision::Fp8 { .. }, GemmEpilogue::GeluBackward) => GemmEpilogue::None,
            (_, epilogue) => epilogue.part(),
        };
        Self { epilogue, ..self }
    }

    /// Returns the part that cuBLASLt can compute.
    pub fn library_part(self) -> Self {
        self.part().part()
    }

    /// Reports whether cuBLASLt computes the library part. With FP8 operands, it lacks bias and residual together for some
    /// shapes. An FP8 output has no part.
    pub fn is_in_library(self) -> bool {
        let fp8 = matches!(self.precision, GemmPrecision::Fp8 { .. });
        !(fp8 && (self.epilogue == GemmEpilogue::BiasResidual || self.epilogue.is_fp8()))
    }

    /// Checks that the operands match the epilogue and are aligned.
    pub fn validate(&self, operands: &GemmOperands) -> Result<()> {
        let GemmOperands { a, b, out, residual, bias, preactivation, activation, sums, scale, batch, .. } = *operands;
        let GemmOperands { fp8_scales, fp8_output, .. } = *operands;
        let fp8 = matches!(self.precision, GemmPrecision::Fp8 { .. });
        for (name, given, used) in [
            ("factors", scale.is_some(), self.epilogue.uses_scale()),
            ("batch", batch.is_some(), self.epilogue.is_batched()),
            ("scales of FP8 operands", fp8_scales.is_some(), fp8),
            ("scale of an FP8 output", fp8_output.is_some(), self.epilogue.is_fp8()),
        ] {
            if given != used {
                let (expected, found) = if used { ("some", "none") } else { ("none", "some") };
                bail!("{self}: {name}: expected {expected} for this epilogue, found {found}");
            }
        }
        if self.epilogue.is_fp8() && !fp8 {
            bail!("{self}: an FP8 output: expected FP8 operands");
        }
        if fp8 && (self.layout != GemmLayout::Nt || !self.n.is_multiple_of(16) || !self.k.is_multiple_of(16)) {
            bail!("{self}: FP8: expected layout NT, and multiples of 16 as N and K");
        }
        if self.epilogue.is_symmetric() && (a != b || self.m != self.n || self.layout == GemmLayout::Nn) {
            bail!("{self}: a symmetric output: expected one matrix as a and b, multiplied by its transpose");
        }
        let optional = [
            ("residual", residual, self.epilogue.uses_residual()),
            ("bias", bias, self.epilogue.uses_bias()),
            ("preactivation", preactivation, self.epilogue.uses_preactivation()),
            ("activation", activation, self.epilogue.recomputes()),
            ("sums", sums, self.epilogue.uses_sums()),
        ];
        for (name, address, used) in optional {
            if address.is_some() != used {
                let (expected, found) = if used { ("an address", "none") } else { ("none", "an address") };
                bail!("{self}: operand {name}: expected {expected}, found {found}");
            }
        }
        let required = [("a", Some(a)), ("b", Some(b)), ("out", Some(out))];
        for (name, address) in required.into_iter().chain(optional.map(|(name, address, _)| (name, address))) {
            if let Some(address) = address
                && (address == 0 || !address.is_multiple_of(16))
            {
                bail!("{self}: operand {name}: expected an address that is a multiple of 16 bytes, found {address:#x}");
            }
        }
        if self.epilogue.uses_preactivation() && !self.n.is_multiple_of(GELU_COLUMNS) {
            bail!("{self}: activation epilogues: expected a multiple of {GELU_COLUMNS} columns, found {}", self.n);
        }
        Ok(())
    }
}

impl fmt::Display for Gemm {
    /// Formats as `65536x2304x768 NT bf16 bias`: M x N x K, layout, storage type and epilogue.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layout = match self.layout {
            GemmLayout::Nt => "NT",
            GemmLayout::Nn => "NN",
            GemmLayout::Tn => "TN",
        };
        let precision = match self.precision {
            GemmPrecision::Bf16 => "bf16",
            GemmPrecision::F32 => "f32",
            GemmPrecision::Tf32 => "tf32",
            GemmPrecision::Fp8 { a: Fp8Format::E4m3, exact: false } => "e4m3",
            GemmPrecision::Fp8 { a: Fp8Format::E4m3, exact: true } => "e4m3 exact",
            GemmPrecision::Fp8 { a: Fp8Format::E5m2, exact: false } => "e5m2",
            GemmPrecision::Fp8 { a: Fp8Format::E5m2, exact: true } => "e5m2 exact",
        };
        let epilogue = match self.epilogue {
            GemmEpilogue::None => "",
            GemmEpilogue::Bias => " bias",
            GemmEpilogue::Residual => " residual",
            GemmEpilogue::BiasResidual => " bias+residual",
            GemmEpilogue::BiasGelu => " bias+gelu",
            GemmEpilogue::BiasGeluFp8 => " bias+gelu fp8-out",
            GemmEpilogue::GeluBackward => " gelu-backward",
            GemmEpilogue::GeluBackwardFp8 => " gelu-backward fp8-out",
            GemmEpilogue::GeluBackwardRecompute => " gelu-backward+gelu",
            GemmEpilogue::ReluSquared => " relu²",
            GemmEpilogue::ReluSquaredBackward => " relu²-backward",
            GemmEpilogue::ReluSquaredBackwardRecompute => " relu²-backward+relu²",
            GemmEpilogue::SwiGlu => " swiglu",
            GemmEpilogue::SwiGluBackward => " swiglu-backward",
            GemmEpilogue::SwiGluBackwardRecompute => " swiglu-backward+swiglu",
            GemmEpilogue::Accumulate => " accumulate",
            GemmEpilogue::AccumulateBiasGrad => " accumulate+bias-grad",
            GemmEpilogue::BatchedResidual => " batched residual",
            GemmEpilogue::Symmetric => " batched symmetric",
            GemmEpilogue::SymmetricResidual => " batched symmetric residual",
        };
        let output = if self.f32_output { " f32-out" } else { "" };
        write!(f, "{}x{}x{} {layout} {precision}{epilogue}{output}", self.m, self.n, self.k)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORWARD: Gemm = Gemm {
        m: 256,
        n: 2304,
        k: 768,
        layout: GemmLayout::Nt,
        precision: GemmPrecision::Bf16,
        epilogue: GemmEpilogue::Bias,
        f32_output: false,
    };
    const AT: GemmOperands = GemmOperands {
        a: 0x2010,
        b: 0x1000,
        out: 0x3020,
        residual: None,
        bias: Some(0x4040),
        preactivation: None,
        activation: None,
        sums: None,
        scale: None,
        batch: None,
        fp8_scales: None,
        fp8_output: None,
    };

    fn refusal(gemm: Gemm, operands: GemmOperands) -> String {
        gemm.validate(&operands).unwrap_err().to_string()
    }

    #[test]
    fn alignment_is_the_lowest_set_bit_up_to_256() {
        assert_eq!(AT.alignments(), [256, 16, 32, 64, 0]);
        assert_eq!(GemmOperands { residual: Some(0x5010), ..AT }.alignments(), [256, 16, 16, 64, 0]);
        assert_eq!(GemmOperands { residual: Some(0x5040), ..AT }.alignments(), AT.alignments());
    }

    #[test]
    fn operands_must_match_the_epilogue() {
        FORWARD.validate(&AT).unwrap();
        assert!(refusal(FORWARD, GemmOperands { bias: None, ..AT }).ends_with("bias: expected an address, found none"));
        let gelu = Gemm { layout: GemmLayout::Nn, epilogue: GemmEpilogue::GeluBackward, ..FORWARD };
        assert!(refusal(gelu, AT).ends_with("bias: expected none, found an address"));
        let at = GemmOperands { bias: None, preactivation: Some(0x5000), ..AT };
        gelu.validate(&at).unwrap();
        assert!(refusal(Gemm { n: 2300, ..gelu }, at).ends_with("expected a multiple of 8 columns, found 2300"));
        let recompute = Gemm { epilogue: GemmEpilogue::GeluBackwardRecompute, ..gelu };
        assert!(refusal(recompute, at).ends_with("activation: expected an address, found none"));
        let both = GemmOperands { activation: Some(0x6000), ..at };
        recompute.validate(&both).unwrap();
        assert!(refusal(gelu, both).ends_with("activation: expected none, found an address"));
        let residual = GemmOperands { residual: Some(0x5000), ..AT };
        Gemm { epilogue: GemmEpilogue::BiasResidual, ..FORWARD }.validate(&residual).unwrap();
        assert!(refusal(FORWARD, residual).contains("residual"));
        let scale = Some(Scale { alpha: 1.0, beta: 0.5 });
        let batch = Some(Batch { count: 2, a: 256 * 768, b: 768 * 2304, d: 256 * 2304 });
        let batched = Gemm { layout: GemmLayout::Nn, epilogue: GemmEpilogue::BatchedResidual, ..FORWARD };
        let scaled = GemmOperands { bias: None, scale, batch, ..residual };
        batched.validate(&scaled).unwrap();
        assert!(refusal(batched, GemmOperands { scale: None, ..scaled }).contains("factors: expected some"));
        assert!(refusal(batched, GemmOperands { batch: None, ..scaled }).contains("batch: expected some"));
        assert!(refusal(FORWARD, GemmOperands { scale, ..AT }).contains("factors: expected none"));
        assert!(refusal(FORWARD, GemmOperands { batch, ..AT }).contains("batch: expected none"));
        let symmetric = Gemm { n: 256, layout: GemmLayout::Tn, epilogue: GemmEpilogue::Symmetric, ..FORWARD };
        let gram = GemmOperands { b: AT.a, residual: None, scale: None, ..scaled };
        symmetric.validate(&gram).unwrap();
        assert!(
            refusal(symmetric, GemmOperands { b: AT.b, ..gram }).contains("a symmetric output: expected one matrix")
        );
        assert!(refusal(Gemm { m: 128, ..symmetric }, gram).contains("a symmetric output"));
        assert!(refusal(FORWARD, GemmOperands { a: 0x2008, ..AT }).ends_with("found 0x2008"));
        assert!(refusal(FORWARD, GemmOperands { out: 0, ..AT }).ends_with("found 0x0"));
    }

    #[test]
    fn the_library_part_omits_what_cublaslt_lacks() {
        let gemm = Gemm { layout: GemmLayout::Tn, epilogue: GemmEpilogue::AccumulateBiasGrad, ..FORWARD };
        let call = GemmCall { gemm, operands: AT, fallback: Vec::new(), after: Vec::new() }.library_part();
        assert_eq!((call.gemm.epilogue, call.operands.bias), (GemmEpilogue::Accumulate, None));
        call.gemm.validate(&call.operands).unwrap();
        assert_eq!(FORWARD.library_part(), FORWARD);
    }

    #[test]
    fn fp8_operands_have_scales_and_one_layout() {
        let precision = GemmPrecision::Fp8 { a: Fp8Format::E5m2, exact: true };
        let (gemm, at) = (Gemm { precision, ..FORWARD }, GemmOperands { fp8_scales: Some([0x10, 0x14]), ..AT });
        gemm.validate(&at).unwrap();
        assert_eq!(gemm.to_string(), "256x2304x768 NT e5m2 exact bias");
        assert!(refusal(gemm, AT).contains("scales of FP8 operands: expected some"));
        assert!(refusal(FORWARD, at).contains("scales of FP8 operands: expected none"));
        for wrong in [Gemm { n: 2312, ..gemm }, Gemm { k: 776, ..gemm }, Gemm { layout: GemmLayout::Nn, ..gemm }] {
            assert!(refusal(wrong, at).contains("expected layout NT, and multiples of 16 as N and K"));
        }
        assert!(gemm.is_in_library() && !Gemm { epilogue: GemmEpilogue::BiasResidual, ..gemm }.is_in_library());
        let quantized = Gemm { epilogue: GemmEpilogue::BiasGeluFp8, ..gemm };
        let output = GemmOperands { preactivation: Some(0x5000), fp8_output: Some([0x20, 0x24]), ..at };
        quantized.validate(&output).unwrap();
        assert!(!quantized.is_in_library() && quantized.library_part() == quantized);
        assert!(refusal(quantized, GemmOperands { fp8_output: None, ..output }).contains("FP8 output: expected some"));
        assert!(
            refusal(gemm, GemmOperands { fp8_output: Some([0x20, 0x24]), ..at }).contains("FP8 output: expected none")
        );
        let of_bf16 = Gemm { precision: GemmPrecision::Bf16, ..quantized };
        assert!(refusal(of_bf16, GemmOperands { fp8_scales: None, ..output }).contains("expected FP8 operands"));
        // cuBLASLt has no GELU epilogues in FP8: kernels run after its part.
        let gelu = Gemm { epilogue: GemmEpilogue::BiasGelu, ..gemm };
        let operands = GemmOperands { preactivation: Some(0x5000), ..at };
        let call = GemmCall { gemm: gelu, operands, fallback: Vec::new(), after: Vec::new() }.part();
        call.gemm.validate(&call.operands).unwrap();
        assert_eq!((call.gemm.epilogue, call.operands.out), (GemmEpilogue::Bias, 0x5000));
        let backward = Gemm { epilogue: GemmEpilogue::GeluBackward, ..gemm };
        let operands = GemmOperands { bias: None, ..operands };
        let call = GemmCall { gemm: backward, operands, fallback: Vec::new(), after: Vec::new() }.library_part();
        call.gemm.validate(&call.operands).unwrap();
        assert_eq!((call.gemm.epilogue, call.operands.out), (GemmEpilogue::None, AT.out));
    }

    /// A part keeps the kernels of the steps that it still has.
    #[test]
    fn parts_of_activation_gemms_store_the_sums_where_the_kernels_read_them() {
        use GemmEpilogue::{
            None as Plain, ReluSquared, ReluSquaredBackward, ReluSquaredBackwardRecompute, SwiGlu, SwiGluBackward,
            SwiGluBackwardRecompute,
        };
        let launch = gpu::gelu::gelu_forward::<f32>(
            cuda_std::GlobalMut::from_address(16),
            cuda_std::Global::from_address(16),
            4,
        );
        let kernel = KernelLaunch { launch, grid: [1; 3], shared_bytes: 0 };
        let both = GemmOperands { bias: None, preactivation: Some(0x5000), ..AT };
        let again = GemmOperands { activation: Some(0x6000), ..both };
        let sums = Some(0x7000);
        for (epilogue, operands, part, out) in [
            (ReluSquared, both, Plain, 0x5000),
            (SwiGlu, both, Plain, 0x5000),
            (ReluSquaredBackward, both, Plain, AT.out),
            (SwiGluBackward, GemmOperands { sums, ..both }, Plain, 0x7000),
            (ReluSquaredBackwardRecompute, again, ReluSquaredBackward, AT.out),
            (SwiGluBackwardRecompute, GemmOperands { sums, ..again }, SwiGluBackward, AT.out),
        ] {
            let gemm = Gemm { epilogue, ..FORWARD };
            gemm.validate(&operands).unwrap();
            let call = GemmCall { gemm, operands, fallback: vec![kernel.clone()], after: vec![kernel.clone()] };
            let found = call.part();
            found.gemm.validate(&found.operands).unwrap();
            assert_eq!((found.gemm.epilogue, found.operands.out), (part, out));
            assert_eq!((found.fallback.len(), found.after.len()), (0, usize::from(part != Plain)));
            let library = call.library_part();
            library.gemm.validate(&library.operands).unwrap();
            assert_eq!((library.gemm, library.after.len()), (Gemm { epilogue: Plain, ..gemm }, 0));
            assert_eq!(gemm.library_part(), library.gemm);
            assert_eq!(found.part().operands.out, library.operands.out);
        }
    }

    #[test]
    fn a_gemm_is_displayed_with_sizes_layout_type_and_epilogue() {
        assert_eq!(FORWARD.to_string(), "256x2304x768 NT bf16 bias");
        let gemm = Gemm { layout: GemmLayout::Tn, epilogue: GemmEpilogue::Accumulate, f32_output: true, ..FORWARD };
        assert_eq!(gemm.to_string(), "256x2304x768 TN bf16 accumulate f32-out");
    }
}
