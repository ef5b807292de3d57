//! The operands of a GEMM, and its description in cuBLASLt's terms.

use crate::result::{Error, Result};
use crate::sys;
use cuda_std::fp8::Fp8Format;
use gpu::activation::Activation;
use gpu::matmul::gemm::{Batching, Bias, Gemm, GemmEpilogue, GemmLayout, GemmOutput, GemmPrecision, Pass, Residual};
use gpu::matmul::launch::{ScaleFactors, StridedBatch};

/// Strides of a batch are multiples of this many elements, so that all of its matrices have the alignment of the first.
pub const BATCH_ALIGNMENT: usize = 128;

/// Device addresses of a GEMM's matrices, each a multiple of 16. Some are for kernels, because cuBLASLt lacks their epilogues.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GemmOperands {
    /// Left operand.
    pub a: u64,
    /// Right operand.
    pub b: u64,
    /// Output.
    pub out: u64,
    /// The residual, if it is not the output.
    pub residual: Option<u64>,
    /// A bias, or its gradient.
    pub bias: Option<u64>,
    /// Argument of an activation function.
    pub preactivation: Option<u64>,
    /// Output for a recomputed activation. With an FP8 output, it receives the transpose (N, M) in E4M3.
    pub activation: Option<u64>,
    /// Output for the sums (M, N) if cuBLASLt computes the GEMM of the backward pass of a gated activation, or of one to FP8, where it is
    /// optional.
    pub sums: Option<u64>,
    /// Factors of [`Residual::Scaled`]. Algorithms do not depend on them, so they are not part of the [`Gemm`].
    pub scale: Option<ScaleFactors>,
    /// The matrices of a batched GEMM. Algorithms must not depend on their number, so that the bits of a matrix do not depend
    /// on the others. So the batch is not part of the [`Gemm`].
    pub batch: Option<StridedBatch>,
    /// The groups of a grouped GEMM.
    pub groups: Option<GroupOperands>,
    /// Addresses of the f32 factors that restore a and b from their FP8 values.
    pub fp8_scales: Option<[u64; 2]>,
    /// The operands of an FP8 output.
    pub fp8_output: Option<Fp8Output>,
}

/// The groups of a grouped GEMM.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GroupOperands {
    /// Address of their description ([`Groups`](gpu::experts::Groups)).
    pub description: u64,
    /// Their number.
    pub count: usize,
}

/// The addresses that belong to an FP8 output (M, N).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Fp8Output {
    /// The scale, an f32.
    pub scale: u64,
    /// The largest magnitude as f32 bits: becomes the maximum of itself and the magnitudes of the output before it is divided by the scale.
    pub amax: u64,
    /// Receives the transpose (N, M).
    pub transposed: Option<u64>,
    /// The scale of a recomputed activation, an f32.
    pub activation_scale: Option<u64>,
}

/// Alignments of the operands b, a, output (and residual), bias and preactivation: the largest power of two up to 256 that divides each
/// address, 0 for none. An algorithm may rely on them.
pub type Alignments = [u32; 5];

/// A GEMM and its alignments: the key under which an algorithm is stored.
pub type GemmKey = (Gemm, Alignments);

/// The columns of a `preactivation` are a multiple of this: cuBLASLt requires it of a leading dimension.
pub const GELU_COLUMNS: usize = 8;

impl GemmOperands {
    /// Returns the alignments of the addresses.
    pub fn alignments(&self) -> Alignments {
        let of = |address: u64| 1 << address.trailing_zeros().min(8);
        let out = self.out | self.residual.unwrap_or(0);
        [of(self.b), of(self.a), of(out), self.bias.map_or(0, of), self.preactivation.map_or(0, of)]
    }

    /// Checks that the operands match the epilogue and are aligned. cuBLASLt would reject some violations without a reason, and
    /// access invalid memory for others.
    pub fn validate(&self, gemm: &Gemm) -> Result<()> {
        let fail = |what: String| Err(Error::Operand { gemm: *gemm, what });
        let GemmOperands { a, b, out, residual, bias, preactivation, activation, sums, scale, batch, .. } = *self;
        let GemmOperands { fp8_scales, fp8_output, groups, .. } = *self;
        let (fp8, epilogue) = (gemm.is_fp8(), gemm.epilogue);
        let quantizes = epilogue.output == GemmOutput::Fp8;
        let recomputes = matches!(epilogue.activation, Some((_, Pass::BackwardAndValue)));
        let activation_scale = fp8_output.and_then(|output| output.activation_scale);
        for (name, given, used) in [
            ("factors", scale.is_some(), epilogue.residual == Some(Residual::Scaled)),
            ("batch", batch.is_some(), matches!(gemm.batching, Batching::Strided | Batching::Symmetric)),
            ("groups", groups.is_some(), gemm.batching.is_grouped()),
            ("scales of FP8 operands", fp8_scales.is_some(), fp8),
            ("scale of an FP8 output", fp8_output.is_some(), quantizes),
            ("scale of an activation in FP8", activation_scale.is_some(), quantizes && recomputes),
        ] {
            if given != used {
                let (expected, found) = if used { ("some", "none") } else { ("none", "some") };
                return fail(format!("{name}: expected {expected} for this epilogue, found {found}"));
            }
        }
        if quantizes && !fp8 {
            return fail("an FP8 output: expected FP8 operands".to_owned());
        }
        if fp8 && (gemm.layout != GemmLayout::Nt || !gemm.n.is_multiple_of(16) || !gemm.k.is_multiple_of(16)) {
            return fail("FP8: expected layout NT, and multiples of 16 as N and K".to_owned());
        }
        if gemm.batching == Batching::Symmetric && (a != b || gemm.m != gemm.n || gemm.layout == GemmLayout::Nn) {
            return fail("a symmetric output: expected one matrix as a and b, multiplied by its transpose".to_owned());
        }
        if residual.is_some() && epilogue.residual.is_none() {
            return fail("operand residual: expected none, found an address".to_owned());
        }
        let optional = [
            ("bias", bias, epilogue.bias.is_some()),
            ("preactivation", preactivation, epilogue.activation.is_some()),
            ("activation", activation, recomputes),
            ("sums", sums.filter(|_| !quantizes), epilogue.is_gated() && !epilogue.writes_preactivation()),
        ];
        for (name, address, used) in optional {
            if address.is_some() != used {
                let (expected, found) = if used { ("an address", "none") } else { ("none", "an address") };
                return fail(format!("operand {name}: expected {expected}, found {found}"));
            }
        }
        let required = [("a", Some(a)), ("b", Some(b)), ("out", Some(out)), ("residual", residual)];
        for (name, address) in required.into_iter().chain(optional.map(|(name, address, _)| (name, address))) {
            if let Some(address) = address
                && (address == 0 || !address.is_multiple_of(16))
            {
                return fail(format!(
                    "operand {name}: expected an address that is a multiple of 16 bytes, found {address:#x}"
                ));
            }
        }
        if epilogue.activation.is_some() && !gemm.n.is_multiple_of(GELU_COLUMNS) {
            return fail(format!(
                "activation epilogues: expected a multiple of {GELU_COLUMNS} columns, found {}",
                gemm.n
            ));
        }
        if let Some(StridedBatch { a, b, out, .. }) = batch {
            let (strides, Gemm { m, n, k, .. }) = ([a, b, out], *gemm);
            let fits = |(stride, len): (usize, usize)| stride >= len && stride.is_multiple_of(BATCH_ALIGNMENT);
            if !strides.into_iter().zip([m * k, k * n, m * n]).all(fits) {
                let alignment = BATCH_ALIGNMENT;
                return fail(format!(
                    "strides: expected multiples of {alignment} that cover the matrices, found {strides:?}"
                ));
            }
        }
        Ok(())
    }
}

/// Returns cuBLASLt's epilogue of a GEMM, or `None` if it lacks the epilogue.
pub(crate) fn library_epilogue(gemm: &Gemm) -> Option<u32> {
    let GemmEpilogue { bias, activation, output, .. } = gemm.epilogue;
    match (bias, activation) {
        _ if output == GemmOutput::Fp8 || gemm.batching.is_grouped() => None,
        (None, None) => Some(sys::EPILOGUE_DEFAULT),
        (Some(Bias::Add), None) => Some(sys::EPILOGUE_BIAS),
        (Some(Bias::Add), Some((Activation::Gelu, Pass::Forward))) => Some(sys::EPILOGUE_GELU_AUX_BIAS),
        (None, Some((Activation::Gelu, Pass::Backward))) => Some(sys::EPILOGUE_DGELU),
        _ => None,
    }
}

/// Returns cuBLASLt's type of the matrices other than a and b.
pub(crate) fn storage_type(precision: GemmPrecision) -> i32 {
    match precision {
        GemmPrecision::Bf16 | GemmPrecision::Fp8 { .. } => sys::R_16BF,
        GemmPrecision::F32 | GemmPrecision::Tf32 => sys::R_32F,
    }
}

/// Returns cuBLASLt's types of a and b.
pub(crate) fn operand_types(precision: GemmPrecision) -> [i32; 2] {
    match precision {
        GemmPrecision::Fp8 { a: Fp8Format::E5m2, .. } => [sys::R_8F_E5M2, sys::R_8F_E4M3],
        GemmPrecision::Fp8 { a: Fp8Format::E4m3, .. } => [sys::R_8F_E4M3; 2],
        _ => [storage_type(precision); 2],
    }
}
