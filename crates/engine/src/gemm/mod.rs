//! General matrix multiplications (GEMMs): a row-major description that every backend understands.
//!
//! A model operation such as [`MatmulBackward`](crate::ops::MatmulBackward) becomes one or more [`Gemm`]s. Three backends
//! compute them: cuBLASLt (the crate [`cublaslt`]), this project's kernels (`cuda/kernel_gemm.rs`), and a CPU reference for the
//! emulator ([`mod@reference`]). `cuda/gemm_dispatch.rs` selects the backend, and `cuda/gemm_tuner.rs` times the alternatives.
//!
//! The description is that of the kernels ([`gpu::matmul::gemm`]). cuBLASLt lacks some epilogues: [`library_part`] states what is
//! left for kernels around it.

mod choice;
pub mod reference;

pub use choice::{Algorithms, GemmChoice, GemmTiming, KernelConfig, StepKind, Tuning};
pub use cublaslt::{
    Alignments, Fp8Output, GELU_COLUMNS, GemmKey, GemmOperands, GroupOperands, ScaleFactors, StridedBatch,
};
pub use gpu::matmul::gemm::{
    Batching, Bias, EXACT_COLUMNS, Gemm, GemmEpilogue, GemmLayout, GemmOutput, GemmPrecision, LOGITS_COLUMNS,
    LOGITS_TOKENS, Pass, Residual,
};

use crate::ops::Activation;
use gpu::launch::KernelLaunch;

/// A GEMM with its addresses, ready to run.
#[derive(Clone, Debug)]
pub struct GemmCall {
    /// The description.
    pub gemm: Gemm,
    /// The addresses.
    pub operands: GemmOperands,
    /// Kernels that run before the [part](Self::part), if no kernel computes the whole GEMM.
    pub fallback: Vec<KernelLaunch>,
    /// Kernels that compute the output from the sums, after the part that has no such epilogue. Of GEMMs that cuBLASLt lacks in FP8, these are
    /// the kernel that applies an activation or its gradient and quantizes, or the one that adds the bias after the residual.
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
        let has_kernels = !is_in_library(&self.gemm) && !self.after.is_empty();
        let gemm = if has_kernels { library_sums(&self.gemm) } else { part(&self.gemm) };
        let GemmOperands { out, preactivation, sums, .. } = self.operands;
        let plain_out = match self.gemm.epilogue.activation {
            Some((_, Pass::Forward)) if gemm != self.gemm => preactivation,
            Some((activation, Pass::Backward)) if activation.is_gated() => sums,
            Some(_) if gemm.epilogue.activation.is_none() => sums,
            _ => None,
        };
        let recomputes = matches!(gemm.epilogue.activation, Some((_, Pass::BackwardAndValue)));
        let operands =
            GemmOperands {
                out: plain_out.unwrap_or(out),
                bias: self.operands.bias.filter(|_| gemm.epilogue.bias.is_some()),
                preactivation: preactivation.filter(|_| gemm.epilogue.activation.is_some()),
                activation: self.operands.activation.filter(|_| recomputes),
                sums: sums.filter(|_| gemm.epilogue.is_gated() && !gemm.epilogue.writes_preactivation()),
                fp8_output: self.operands.fp8_output.filter(|_| gemm.epilogue.output == GemmOutput::Fp8).map(
                    |output| Fp8Output { activation_scale: output.activation_scale.filter(|_| recomputes), ..output },
                ),
                ..self.operands
            };
        let after = if gemm == part(&gemm) { Vec::new() } else { self.after.clone() };
        Self { gemm, operands, fallback: Vec::new(), after }
    }

    /// Reports whether a [part](Self::part) and other kernels may compute the GEMM.
    pub fn has_part(&self) -> bool {
        self.part().gemm != self.gemm
    }

    /// Returns the part that cuBLASLt can compute.
    pub fn library_part(&self) -> Self {
        let part = self.part();
        if part.gemm == self.gemm { part } else { part.library_part() }
    }
}

/// Returns the GEMM without the steps of its epilogue that cuBLASLt lacks in FP8: an activation to FP8, or a bias beside a residual.
fn library_sums(gemm: &Gemm) -> Gemm {
    let GemmEpilogue { bias, residual, .. } = gemm.epilogue;
    let bias = bias.filter(|_| residual.is_none());
    Gemm { epilogue: GemmEpilogue { bias, residual, ..GemmEpilogue::NONE }, ..*gemm }
}

/// Returns the GEMM without one step of its epilogue. See [`GemmCall::part`].
fn part(gemm: &Gemm) -> Gemm {
    let epilogue = gemm.epilogue;
    let bias = epilogue.bias.filter(|bias| *bias == Bias::Add);
    let activation = match epilogue.activation {
        Some((activation, Pass::BackwardAndValue)) => Some((activation, Pass::Backward)),
        // Only kernels of this project quantize the output.
        _ if epilogue.output == GemmOutput::Fp8 => epilogue.activation,
        // The activations of cuBLASLt.
        Some((Activation::Gelu, Pass::Forward)) if bias.is_some() && !gemm.is_fp8() => epilogue.activation,
        Some((Activation::Gelu, Pass::Backward)) if !gemm.is_fp8() => epilogue.activation,
        _ => None,
    };
    Gemm { epilogue: GemmEpilogue { bias, activation, ..epilogue }, ..*gemm }
}

/// Returns the part of a GEMM that cuBLASLt can compute.
pub fn library_part(gemm: &Gemm) -> Gemm {
    part(&part(gemm))
}

/// Returns true if cuBLASLt computes the library part. With FP8 operands, it lacks bias and residual together for some
/// shapes, and FP8 outputs.
pub fn is_in_library(gemm: &Gemm) -> bool {
    let GemmEpilogue { bias, residual, output, .. } = gemm.epilogue;
    let both = bias == Some(Bias::Add) && residual.is_some();
    !(gemm.is_fp8() && (both || output == GemmOutput::Fp8)) && !gemm.batching.is_grouped()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuda_std::fp8::Fp8Format;

    const FORWARD: Gemm = Gemm {
        m: 256,
        n: 2304,
        k: 768,
        layout: GemmLayout::Nt,
        precision: GemmPrecision::Bf16,
        batching: Batching::One,
        epilogue: GemmEpilogue::BIAS,
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
        groups: None,
        fp8_scales: None,
        fp8_output: None,
    };

    const BIAS_RESIDUAL: GemmEpilogue = GemmEpilogue { residual: Some(Residual::Add), ..GemmEpilogue::BIAS };

    fn refusal(gemm: Gemm, operands: GemmOperands) -> String {
        operands.validate(&gemm).unwrap_err().to_string()
    }

    #[test]
    fn alignment_is_the_lowest_set_bit_up_to_256() {
        assert_eq!(AT.alignments(), [256, 16, 32, 64, 0]);
        assert_eq!(GemmOperands { residual: Some(0x5010), ..AT }.alignments(), [256, 16, 16, 64, 0]);
        assert_eq!(GemmOperands { residual: Some(0x5040), ..AT }.alignments(), AT.alignments());
    }

    #[test]
    fn operands_must_match_the_epilogue() {
        AT.validate(&FORWARD).unwrap();
        assert!(refusal(FORWARD, GemmOperands { bias: None, ..AT }).ends_with("bias: expected an address, found none"));
        let gelu = Gemm {
            layout: GemmLayout::Nn,
            epilogue: GemmEpilogue::NONE.with(Activation::Gelu, Pass::Backward),
            ..FORWARD
        };
        assert!(refusal(gelu, AT).ends_with("bias: expected none, found an address"));
        let at = GemmOperands { bias: None, preactivation: Some(0x5000), ..AT };
        at.validate(&gelu).unwrap();
        assert!(refusal(Gemm { n: 2300, ..gelu }, at).ends_with("expected a multiple of 8 columns, found 2300"));
        let recompute = Gemm { epilogue: GemmEpilogue::NONE.with(Activation::Gelu, Pass::BackwardAndValue), ..gelu };
        assert!(refusal(recompute, at).ends_with("activation: expected an address, found none"));
        let both = GemmOperands { activation: Some(0x6000), ..at };
        both.validate(&recompute).unwrap();
        assert!(refusal(gelu, both).ends_with("activation: expected none, found an address"));
        let residual = GemmOperands { residual: Some(0x5000), ..AT };
        residual.validate(&Gemm { epilogue: BIAS_RESIDUAL, ..FORWARD }).unwrap();
        assert!(refusal(FORWARD, residual).contains("residual"));
        let scale = Some(ScaleFactors { alpha: 1.0, beta: 0.5 });
        let strides = StridedBatch { count: 2, a: 256 * 768, b: 768 * 2304, out: 256 * 2304 };
        let batch = Some(strides);
        let epilogue = GemmEpilogue { residual: Some(Residual::Scaled), ..GemmEpilogue::NONE };
        let batched = Gemm { layout: GemmLayout::Nn, batching: Batching::Strided, epilogue, ..FORWARD };
        let scaled = GemmOperands { bias: None, scale, batch, ..residual };
        scaled.validate(&batched).unwrap();
        assert!(refusal(batched, GemmOperands { scale: None, ..scaled }).contains("factors: expected some"));
        assert!(refusal(batched, GemmOperands { batch: None, ..scaled }).contains("batch: expected some"));
        assert!(refusal(FORWARD, GemmOperands { scale, ..AT }).contains("factors: expected none"));
        assert!(refusal(FORWARD, GemmOperands { batch, ..AT }).contains("batch: expected none"));
        for wrong in [StridedBatch { b: 768 * 2304 - 128, ..strides }, StridedBatch { out: 256 * 2304 + 64, ..strides }]
        {
            let text = refusal(batched, GemmOperands { batch: Some(wrong), ..scaled });
            assert!(text.contains("strides: expected multiples of 128"), "{text}");
        }
        let (batching, epilogue) = (Batching::Symmetric, GemmEpilogue::NONE);
        let symmetric = Gemm { n: 256, layout: GemmLayout::Tn, batching, epilogue, ..FORWARD };
        let gram = GemmOperands { b: AT.a, residual: None, scale: None, ..scaled };
        gram.validate(&symmetric).unwrap();
        assert!(
            refusal(symmetric, GemmOperands { b: AT.b, ..gram }).contains("a symmetric output: expected one matrix")
        );
        assert!(refusal(Gemm { m: 128, ..symmetric }, gram).contains("a symmetric output"));
        assert!(refusal(FORWARD, GemmOperands { a: 0x2008, ..AT }).ends_with("found 0x2008"));
        assert!(refusal(FORWARD, GemmOperands { out: 0, ..AT }).ends_with("found 0x0"));
    }

    #[test]
    fn the_library_part_omits_what_cublaslt_lacks() {
        let gemm = Gemm { layout: GemmLayout::Tn, epilogue: GemmEpilogue::BIAS_GRADIENT, ..FORWARD };
        let call = GemmCall { gemm, operands: AT, fallback: Vec::new(), after: Vec::new() }.library_part();
        assert_eq!((call.gemm.epilogue, call.operands.bias), (GemmEpilogue::RESIDUAL, None));
        call.operands.validate(&call.gemm).unwrap();
        assert_eq!(library_part(&FORWARD), FORWARD);
    }

    #[test]
    fn fp8_operands_have_scales_and_one_layout() {
        let precision = GemmPrecision::Fp8 { a: Fp8Format::E5m2, columns: Some(128) };
        let (gemm, at) = (Gemm { precision, ..FORWARD }, GemmOperands { fp8_scales: Some([0x10, 0x14]), ..AT });
        at.validate(&gemm).unwrap();
        assert_eq!(gemm.to_string(), "256x2304x768 NT e5m2 exact-128 bias");
        assert!(refusal(gemm, AT).contains("scales of FP8 operands: expected some"));
        assert!(refusal(FORWARD, at).contains("scales of FP8 operands: expected none"));
        for wrong in [Gemm { n: 2312, ..gemm }, Gemm { k: 776, ..gemm }, Gemm { layout: GemmLayout::Nn, ..gemm }] {
            assert!(refusal(wrong, at).contains("expected layout NT, and multiples of 16 as N and K"));
        }
        assert!(is_in_library(&gemm) && !is_in_library(&Gemm { epilogue: BIAS_RESIDUAL, ..gemm }));
        let gelu = GemmEpilogue::BIAS.with(Activation::Gelu, Pass::Forward);
        let quantized = Gemm { epilogue: GemmEpilogue { output: GemmOutput::Fp8, ..gelu }, ..gemm };
        let output = GemmOperands { preactivation: Some(0x5000), fp8_output: Some(Fp8Output::default()), ..at };
        output.validate(&quantized).unwrap();
        assert!(!is_in_library(&quantized) && library_part(&quantized) == quantized);
        assert!(refusal(quantized, GemmOperands { fp8_output: None, ..output }).contains("FP8 output: expected some"));
        assert!(
            refusal(gemm, GemmOperands { fp8_output: Some(Fp8Output::default()), ..at })
                .contains("FP8 output: expected none")
        );
        let of_bf16 = Gemm { precision: GemmPrecision::Bf16, ..quantized };
        assert!(refusal(of_bf16, GemmOperands { fp8_scales: None, ..output }).contains("expected FP8 operands"));
        // A kernel can recompute the activation before the GEMM.
        let of_pass =
            |pass| GemmEpilogue { output: GemmOutput::Fp8, ..GemmEpilogue::NONE.with(Activation::Gelu, pass) };
        let both = Gemm { epilogue: of_pass(Pass::BackwardAndValue), ..gemm };
        let plain = GemmOperands { bias: None, activation: Some(0x6000), ..output };
        assert!(refusal(both, plain).contains("scale of an activation in FP8: expected some"));
        let scaled = Fp8Output { activation_scale: Some(0x18), ..Fp8Output::default() };
        let operands = GemmOperands { fp8_output: Some(scaled), ..plain };
        operands.validate(&both).unwrap();
        assert!(!is_in_library(&both) && both.to_string().ends_with("gelu-backward+gelu fp8-out"));
        let call = GemmCall { gemm: both, operands, fallback: Vec::new(), after: Vec::new() };
        let part = call.part();
        part.operands.validate(&part.gemm).unwrap();
        assert!(call.has_part() && !part.has_part() && part.gemm.epilogue == of_pass(Pass::Backward));
        // cuBLASLt has no GELU epilogues in FP8: kernels run after its part.
        let gelu = Gemm { epilogue: gelu, ..gemm };
        let operands = GemmOperands { preactivation: Some(0x5000), ..at };
        let call = GemmCall { gemm: gelu, operands, fallback: Vec::new(), after: Vec::new() }.part();
        call.operands.validate(&call.gemm).unwrap();
        assert_eq!((call.gemm.epilogue, call.operands.out), (GemmEpilogue::BIAS, 0x5000));
        let backward = Gemm { epilogue: GemmEpilogue::NONE.with(Activation::Gelu, Pass::Backward), ..gemm };
        let operands = GemmOperands { bias: None, ..operands };
        let call = GemmCall { gemm: backward, operands, fallback: Vec::new(), after: Vec::new() }.library_part();
        call.operands.validate(&call.gemm).unwrap();
        assert_eq!((call.gemm.epilogue, call.operands.out), (GemmEpilogue::NONE, AT.out));
    }

    /// A part keeps the kernels of the steps that it still has.
    #[test]
    fn parts_of_activation_gemms_store_the_sums_where_the_kernels_read_them() {
        let with = |activation, pass| GemmEpilogue::NONE.with(activation, pass);
        let (relu, swiglu) = (Activation::ReluSquared, Activation::SwiGlu);
        let launch = gpu::activation::activation_forward::<f32, gpu::activation::Gelu>(
            cuda_std::GlobalMut::from_address(16),
            cuda_std::Global::from_address(16),
            4,
            4,
        );
        let kernel = KernelLaunch { launch, grid: [1; 3], shared_bytes: 0 };
        let both = GemmOperands { bias: None, preactivation: Some(0x5000), ..AT };
        let again = GemmOperands { activation: Some(0x6000), ..both };
        let sums = Some(0x7000);
        for (epilogue, operands, part, out) in [
            (with(relu, Pass::Forward), both, GemmEpilogue::NONE, 0x5000),
            (with(swiglu, Pass::Forward), both, GemmEpilogue::NONE, 0x5000),
            (with(relu, Pass::Backward), both, GemmEpilogue::NONE, AT.out),
            (with(swiglu, Pass::Backward), GemmOperands { sums, ..both }, GemmEpilogue::NONE, 0x7000),
            (with(relu, Pass::BackwardAndValue), again, with(relu, Pass::Backward), AT.out),
            (
                with(swiglu, Pass::BackwardAndValue),
                GemmOperands { sums, ..again },
                with(swiglu, Pass::Backward),
                AT.out,
            ),
        ] {
            let gemm = Gemm { epilogue, ..FORWARD };
            operands.validate(&gemm).unwrap();
            let call = GemmCall { gemm, operands, fallback: vec![kernel.clone()], after: vec![kernel.clone()] };
            let found = call.part();
            found.operands.validate(&found.gemm).unwrap();
            assert_eq!((found.gemm.epilogue, found.operands.out), (part, out));
            assert_eq!((found.fallback.len(), found.after.len()), (0, usize::from(part != GemmEpilogue::NONE)));
            let library = call.library_part();
            library.operands.validate(&library.gemm).unwrap();
            assert_eq!((library.gemm, library.after.len()), (Gemm { epilogue: GemmEpilogue::NONE, ..gemm }, 0));
            assert_eq!(library_part(&gemm), library.gemm);
            assert_eq!(found.part().operands.out, library.operands.out);
        }
    }

    #[test]
    fn a_gemm_is_displayed_with_sizes_layout_type_and_epilogue() {
        assert_eq!(FORWARD.to_string(), "256x2304x768 NT bf16 bias");
        let epilogue = GemmEpilogue { output: GemmOutput::F32, ..GemmEpilogue::BIAS_GRADIENT };
        let gemm = Gemm { layout: GemmLayout::Tn, epilogue, ..FORWARD };
        assert_eq!(gemm.to_string(), "256x2304x768 TN bf16 residual+bias-gradient f32-out");
        let epilogue = GemmEpilogue::NONE.with(Activation::ReluSquared, Pass::BackwardAndValue);
        assert_eq!(epilogue.to_string(), "relu²-backward+relu²");
    }
}
