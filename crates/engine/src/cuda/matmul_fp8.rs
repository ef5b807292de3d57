//! Linear layers as GEMMs with FP8 operands. All GEMMs have the layout NT, because FP8 tensor cores read both operands along K.

use super::quantize::{quantize, transpose_quantized};
use super::{Cuda, Float, Fp8Bits, activation, bias};
use crate::gemm::{
    Batching, EXACT_COLUMNS, Fp8Output, GELU_COLUMNS, Gemm, GemmCall, GemmEpilogue, GemmLayout, GemmOperands,
    GemmOutput, GemmPrecision, LOGITS_COLUMNS, LOGITS_TOKENS, Pass, Residual,
};
use crate::ops::{
    Activation, ActivationInput, Epilogue, Fp8Accumulation, Fp8Backward, Fp8Format, Fp8Forward, MatmulBackward,
    MatmulForward, MatmulShape, Quantize, Scaling,
};
use crate::tensor::Tensor;
use crate::{GeluFusion, Result};
use anyhow::ensure;
use gpu::launch::KernelLaunch;

impl<T: Float> Cuda<T> {
    fn fp8_address(&self, name: &str, tensor: Tensor, len: usize) -> Result<u64> {
        Ok(self.arena.address::<Fp8Bits>(name, tensor, len)?.addr() as u64)
    }

    fn scale_addresses(&self, scales: [Tensor; 2]) -> Result<Option<[u64; 2]>> {
        let [a, b] = scales.map(|scale| self.arena.address::<f32>("scale", scale, 1));
        Ok(Some([a?.addr() as u64, b?.addr() as u64]))
    }

    /// Runs a GEMM that quantizes its output in the epilogue, and what remains of `next`. The epilogue, or a kernel before the GEMM,
    /// recomputes the activation. Returns false and does nothing if there is no such kernel, if the scale or the counts of losses need
    /// the output in bf16, or if the kernel is slower than a GEMM and the kernel `unfused`. The bits do not depend on whether there is.
    fn run_quantizing(
        &mut self,
        gemm: Gemm,
        operands: GemmOperands,
        next: &Quantize,
        recomputed: Option<&Recomputed>,
        unfused: Option<KernelLaunch>,
    ) -> Result<bool> {
        let Quantize { out: Some(out), scaling, scale, shape: [rows, columns], .. } = *next else { return Ok(false) };
        let [scale_address, amax] = [scale.scale, scale.amax].map(|x| self.arena.address::<f32>("scale", x, 1));
        // Column sums cost an epilogue more than the kernel that transposes, which computes them while it waits for memory.
        let transposed = next.transposed.filter(|_| next.column_sums.is_none());
        let transposed = transposed.map(|tensor| self.fp8_address("transpose in FP8", tensor, rows * columns));
        let operands = GemmOperands {
            out: self.fp8_address("out in FP8", out, rows * columns)?,
            fp8_output: Some(Fp8Output {
                scale: scale_address?.addr() as u64,
                amax: amax?.addr() as u64,
                transposed: transposed.transpose()?,
                activation_scale: recomputed.map(|recomputed| recomputed.scale),
            }),
            activation: recomputed.map(|recomputed| recomputed.transposed),
            ..operands
        };
        let epilogue = match gemm.epilogue.activation {
            Some((activation, _)) if recomputed.is_some() => gemm.epilogue.with(activation, Pass::BackwardAndValue),
            _ => gemm.epilogue,
        };
        let gemm = Gemm { epilogue: GemmEpilogue { output: GemmOutput::Fp8, ..epilogue }, ..gemm };
        let fallback = recomputed.map(|recomputed| recomputed.kernel.clone()).into_iter().collect();
        let call = GemmCall { gemm, operands, fallback, after: unfused.into_iter().collect() };
        if !self.gemms.may_use_kernel(&call) {
            return Ok(false);
        }
        if scaling == Scaling::Calibrate && self.gemms.is_collecting() {
            // Steps after the first one have delayed scales, so the autotuner must see both variants.
            self.run_gemm(call)?;
            return Ok(false);
        }
        if scaling != Scaling::Delayed || scale.counts.is_some() {
            return Ok(false);
        }
        let has_alternative = !call.after.is_empty() && !self.gemms.is_collecting();
        if has_alternative && self.gemms.kernel_for(&call, self.executor.sm_count())?.is_none() {
            return Ok(false);
        }
        self.run_gemm(call)?;
        if next.column_sums.is_some() {
            transpose_quantized(self, next)?;
        }
        Ok(true)
    }
}

/// Returns the kernel that quantizes an activation, or its gradient if `dout` is given, from the output of a GEMM. Returns `None` if no
/// kernel with mma.sync may do it in its epilogue. The autotuner compares both, without the transposition that may follow.
fn unfused_kernel<T: Float>(
    cuda: &Cuda<T>,
    activation: Activation,
    preactivation: Tensor,
    dout: Option<Tensor>,
    next: &Quantize,
) -> Result<Option<KernelLaunch>> {
    if !cuda.executor.emulation().mma_fp8 {
        return Ok(None);
    }
    let next = Quantize { scaling: Scaling::Delayed, column_sums: None, ..*next };
    match dout {
        None => activation::quantizing_kernel(cuda, activation, preactivation, &next),
        Some(dout) => activation::gradient_kernel(cuda, activation, [dout, preactivation], &next),
    }
}

/// An activation that is recomputed for the gradient of a weight, in FP8.
struct Recomputed {
    /// The address of its transpose.
    transposed: u64,
    /// The address of its scale.
    scale: u64,
    /// The kernel that computes it, if no epilogue does.
    kernel: KernelLaunch,
}

impl Recomputed {
    /// Returns the activation with the quantization `input`. Returns `None` after it has been computed, if no epilogue can.
    fn new<T: Float>(cuda: &mut Cuda<T>, of: ActivationInput, input: Quantize) -> Result<Option<Self>> {
        let ActivationInput { activation, preactivation, .. } = of;
        // The forward pass applied the activation to rounded sums, so this gives the same bits.
        let kernel = activation::quantizing_kernel(cuda, activation, preactivation, &input)?;
        let (Some(kernel), Some(transposed), false) = (kernel, input.transposed, activation.is_gated()) else {
            activation::quantize_forward(cuda, activation, preactivation, input)?;
            return Ok(None);
        };
        let [rows, columns] = input.shape;
        let transposed = cuda.fp8_address("inp in FP8, transposed", transposed, rows * columns)?;
        let scale = cuda.arena.address::<f32>("scale", input.scale.scale, 1)?.addr() as u64;
        Ok(Some(Self { transposed, scale, kernel }))
    }
}

/// Returns the precision of a GEMM that sums over `k` columns. If `exact`, partial sums are added in f32 after `columns` of them.
fn precision(a: Fp8Format, exact: bool, columns: u32, k: usize) -> GemmPrecision {
    GemmPrecision::Fp8 { a, columns: (exact && k > columns as usize).then_some(columns) }
}

/// Returns the precision of a GEMM of the backward pass that sums over `k` columns. If `dout` is the gradient of logits and sums are exact,
/// partial sums are added in f32 after `of_logits` columns.
fn backward_precision(fp8: &Fp8Backward, of_logits: u32, k: usize) -> GemmPrecision {
    let columns = if fp8.dout_is_of_logits { of_logits } else { EXACT_COLUMNS };
    precision(Fp8Format::E5m2, fp8.accumulation != Fp8Accumulation::Fast, columns, k)
}

pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, op: &MatmulForward, fp8: &Fp8Forward) -> Result<()> {
    let MatmulForward { out, shape: MatmulShape { rows, c, oc }, .. } = *op;
    let activation = match op.epilogue {
        Epilogue::Activation(activation, preactivation) => Some((activation, preactivation)),
        _ => None,
    };
    let fuses = |activation| cuda.gemms.uses_wgmma() && cuda.fuses_forward(activation, op.bias, oc);
    let unfused = activation.filter(|(activation, _)| !fuses(*activation));
    let matrices = op.groups.map_or(1, |groups| groups.count);
    let plain = unfused.map(|(_, sums)| MatmulForward { out: sums, epilogue: Epilogue::None, ..*op });
    let GemmCall { gemm, operands, .. } = cuda.forward_gemm(plain.as_ref().unwrap_or(op))?;
    let operands = GemmOperands {
        a: cuda.fp8_address("inp in FP8", fp8.inp, rows * c)?,
        b: cuda.fp8_address("weight in FP8", fp8.weight, matrices * oc * c)?,
        fp8_scales: cuda.scale_addresses([fp8.inp_scale, fp8.weight_scale])?,
        ..operands
    };
    let gemm = Gemm {
        precision: precision(Fp8Format::E4m3, fp8.accumulation == Fp8Accumulation::Exact, EXACT_COLUMNS, c),
        ..gemm
    };
    let gpu = cuda.executor.emulation();
    if let Some(bias) = op.bias.filter(|_| gemm.epilogue.residual.is_some() && !gpu.hopper) {
        // cuBLASLt lacks bias and residual together for some shapes.
        let after = vec![bias::add_kernel(cuda, out, bias, [rows, oc])?];
        return cuda.run_gemm(GemmCall { gemm, operands, fallback: Vec::new(), after });
    }
    if gemm.epilogue.activation.is_some()
        && let Some(next) = fp8.out
        && cuda.run_quantizing(gemm, operands, &next, None, None)?
    {
        return Ok(());
    }
    if let Some((activation, preactivation)) = unfused {
        if let Some(next) = fp8.out
            && (gpu.mma_fp8 || activation != Activation::Gelu && op.bias.is_none())
        {
            let gemm = Gemm { epilogue: gemm.epilogue.with(activation, Pass::Forward), ..gemm };
            let operands = GemmOperands { preactivation: Some(operands.out), ..operands };
            let kernel = unfused_kernel(cuda, activation, preactivation, None, &next)?;
            if cuda.run_quantizing(gemm, operands, &next, None, kernel)? {
                return Ok(());
            }
        }
        let shape = activation::ActivationShape { rows, columns: oc / activation.inputs() };
        let kernel = activation::forward_kernel(cuda, activation, out, preactivation, shape)?;
        if op.groups.is_some() {
            // The kernel would read rows after the last group, which are undefined.
            let gemm = Gemm { epilogue: GemmEpilogue::NONE.with(activation, Pass::Forward), ..gemm };
            let out = cuda.operand("out", out, rows * shape.columns)?;
            let operands = GemmOperands { out, preactivation: Some(operands.out), ..operands };
            cuda.run_gemm(GemmCall { gemm, operands, fallback: Vec::new(), after: vec![kernel] })?;
            return fp8.out.map_or(Ok(()), |next| quantize(cuda, next));
        }
        cuda.run_gemm(GemmCall { gemm, operands, fallback: Vec::new(), after: Vec::new() })?;
        if let Some(next) = fp8.out {
            return activation::quantize_forward(cuda, activation, preactivation, next);
        }
        return cuda.launch_kernel(&kernel);
    }
    let kernel = activation.map(|(activation, preactivation)| {
        let shape = activation::ActivationShape { rows, columns: oc / activation.inputs() };
        activation::forward_kernel(cuda, activation, out, preactivation, shape)
    });
    let after = kernel.transpose()?.into_iter().collect();
    cuda.run_gemm(GemmCall { gemm, operands, fallback: Vec::new(), after })?;
    fp8.out.map_or(Ok(()), |next| quantize(cuda, next))
}

pub(super) fn backward<T: Float>(cuda: &mut Cuda<T>, op: &MatmulBackward, fp8: &Fp8Backward) -> Result<()> {
    let MatmulBackward { dbias, activation, .. } = *op;
    ensure!(
        !(fp8.dout_is_quantized && dbias.is_some()),
        "matmul_backward in FP8: expected the bias gradient of a gradient that is quantized here, found one that is quantized"
    );
    if let Some(gradient) = fp8.quantize_dout(op) {
        quantize(cuda, gradient)?;
    }
    let recomputed = match (fp8.quantize_inp(op), activation) {
        (Some(input), Some(of @ ActivationInput { recompute: Some(_), .. })) => Recomputed::new(cuda, of, input)?,
        (Some(input), _) => {
            quantize(cuda, input)?;
            None
        }
        (None, _) => None,
    };
    if recomputed.is_some() {
        // The GEMM of the input gradient may write the operand of the other GEMM.
        input_gradient(cuda, op, fp8, recomputed)?;
        return weight_gradient(cuda, op, fp8);
    }
    weight_gradient(cuda, op, fp8)?;
    // Only quantization reads `inp`, so the sums of a gated activation's gradient may replace it.
    input_gradient(cuda, op, fp8, None)
}

/// Computes dweight (OC, C) += doutᵀ (OC, rows) · inpᵀ (C, rows)ᵀ, unless the weight is frozen.
fn weight_gradient<T: Float>(cuda: &mut Cuda<T>, op: &MatmulBackward, fp8: &Fp8Backward) -> Result<()> {
    let (MatmulShape { rows, c, oc }, Some(dweight)) = (op.shape, op.dweight) else { return Ok(()) };
    let matrices = op.groups.map_or(1, |groups| groups.count);
    let (output, out) = cuda.weight_gradient_output(dweight, matrices * oc * c)?;
    let epilogue = GemmEpilogue { output, ..GemmEpilogue::RESIDUAL };
    let gemm = Gemm {
        precision: backward_precision(fp8, LOGITS_TOKENS, rows),
        ..cuda.gemm([oc, c, rows], GemmLayout::Nt, epilogue)
    };
    let (gemm, groups, _) = cuda.grouped(gemm, Batching::GroupedSum, op.groups, rows)?;
    let operands = GemmOperands {
        a: cuda.fp8_address("dout in FP8, transposed", fp8.dout[1], rows * oc)?,
        b: cuda.fp8_address("inp in FP8, transposed", fp8.inp_transposed, rows * c)?,
        out,
        groups,
        residual: Some(out),
        fp8_scales: cuda.scale_addresses([fp8.dout_scale.scale, fp8.inp_scale.scale])?,
        ..GemmOperands::default()
    };
    cuda.run_gemm(GemmCall { gemm, operands, fallback: Vec::new(), after: Vec::new() })
}

/// Computes dinp (rows, C) = dout (rows, OC) · weightᵀ (C, OC)ᵀ, times the derivative of an activation, and the activation if it is
/// recomputed.
fn input_gradient<T: Float>(
    cuda: &mut Cuda<T>,
    op: &MatmulBackward,
    fp8: &Fp8Backward,
    recomputed: Option<Recomputed>,
) -> Result<()> {
    let MatmulBackward { dinp, adds_to_dinp, inp, activation, shape: MatmulShape { rows, c, oc }, .. } = *op;
    let dact = match activation {
        Some(input) if input.activation.is_gated() => inp,
        _ => dinp,
    };
    let fused = activation.filter(|input| {
        let fuses = cuda.gemms.uses_wgmma() && cuda.gelu_fusion == GeluFusion::Both && c.is_multiple_of(GELU_COLUMNS);
        fuses && input.activation == Activation::Gelu
    });
    let epilogue = GemmEpilogue {
        activation: fused.map(|input| (input.activation, Pass::Backward)),
        residual: adds_to_dinp.then_some(Residual::Add),
        ..GemmEpilogue::NONE
    };
    let gemm = Gemm {
        precision: backward_precision(fp8, LOGITS_COLUMNS, oc),
        ..cuda.gemm([rows, c, oc], GemmLayout::Nt, epilogue)
    };
    let (gemm, groups, matrices) = cuda.grouped(gemm, Batching::Grouped, op.groups, rows)?;
    let operands = GemmOperands {
        a: cuda.fp8_address("dout in FP8", fp8.dout[0], rows * oc)?,
        b: cuda.fp8_address("weight in FP8, transposed", fp8.weight_transposed, matrices * oc * c)?,
        groups,
        out: cuda.operand("dinp", dact, rows * c)?,
        preactivation: fused.map(|input| cuda.operand("preactivation", input.preactivation, rows * c)).transpose()?,
        fp8_scales: cuda.scale_addresses([fp8.dout_scale.scale, fp8.weight_scale])?,
        ..GemmOperands::default()
    };
    if let (Some(ActivationInput { activation, preactivation, .. }), Some(_)) = (activation, op.groups) {
        // The gradient of the router reads dinp, so the epilogue writes it in bf16.
        let gemm = Gemm { epilogue: GemmEpilogue::NONE.with(activation, Pass::Backward), ..gemm };
        let wide = rows * c * activation.inputs();
        let operands = GemmOperands {
            out: cuda.operand("dinp", dinp, wide)?,
            preactivation: Some(cuda.operand("preactivation", preactivation, wide)?),
            sums: Some(operands.out),
            ..operands
        };
        let shape = activation::ActivationShape { rows, columns: c };
        let after = vec![activation::backward_kernel(cuda, activation, dinp, dact, preactivation, shape)?];
        cuda.run_gemm(GemmCall { gemm, operands, fallback: Vec::new(), after })?;
        return fp8.dinp.map_or(Ok(()), |next| quantize(cuda, next));
    }
    if let (Some(input), Some(next)) = (activation, fp8.dinp)
        && (fused.is_some()
            || input.activation == Activation::ReluSquared
            || input.activation == Activation::Gelu && cuda.executor.emulation().mma_fp8)
    {
        let gemm = Gemm { epilogue: GemmEpilogue::NONE.with(input.activation, Pass::Backward), ..gemm };
        let preactivation = Some(cuda.operand("preactivation", input.preactivation, rows * c)?);
        let operands = GemmOperands { preactivation, sums: Some(operands.out), ..operands };
        let kernel = unfused_kernel(cuda, input.activation, input.preactivation, Some(dact), &next)?;
        if cuda.run_quantizing(gemm, operands, &next, recomputed.as_ref(), kernel)? {
            return Ok(());
        }
    }
    if let Some(Recomputed { kernel, .. }) = recomputed {
        cuda.launch_kernel(&kernel)?;
    }
    let shape = activation::ActivationShape { rows, columns: c };
    if let Some(ActivationInput { activation, preactivation, .. }) = fused {
        let after = vec![activation::backward_kernel(cuda, activation, dinp, dact, preactivation, shape)?];
        cuda.run_gemm(GemmCall { gemm, operands, fallback: Vec::new(), after })?;
        return fp8.dinp.map_or(Ok(()), |next| quantize(cuda, next));
    }
    cuda.run_gemm(GemmCall { gemm, operands, fallback: Vec::new(), after: Vec::new() })?;
    match (activation, fp8.dinp) {
        (Some(ActivationInput { activation, preactivation, .. }), Some(next)) => {
            activation::quantize_backward(cuda, activation, dact, preactivation, next)
        }
        (Some(ActivationInput { activation, preactivation, .. }), None) => {
            cuda.launch_kernel(&activation::backward_kernel(cuda, activation, dinp, dact, preactivation, shape)?)
        }
        (None, Some(next)) => quantize(cuda, next),
        (None, None) => Ok(()),
    }
}
