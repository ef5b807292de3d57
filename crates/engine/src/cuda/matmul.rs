//! Linear layers as GEMMs.

use super::executor::EmulatedGpu;
use super::kernel_gemm::Scratch;
use super::{Cuda, Float, MatmulBackend, activation, bias, matmul_fp8};
use crate::gemm::{
    Batching, Bias, GELU_COLUMNS, Gemm, GemmCall, GemmEpilogue, GemmLayout, GemmOperands, GemmOutput, GemmPrecision,
    GroupOperands, Pass, Residual,
};
use crate::ops::{
    Activation, ActivationForward, ActivationInput, Epilogue, Groups, MatmulBackward, MatmulForward, MatmulShape,
};
use crate::tensor::{DType, Tensor};
use crate::{GeluFusion, Result, Workload};
use anyhow::{Context, ensure};
use gpu::launch::KernelLaunch;

/// Returns the f32 elements of scratch memory for partial sums of weight gradients, where wgmma kernels compute them.
pub(super) fn scratch<T: Float>(workload: &Workload, gpu: EmulatedGpu) -> usize {
    let kernels = T::DTYPE == DType::Bf16 && gpu.hopper && gpu.matmul != MatmulBackend::Cublaslt;
    if kernels { Scratch::needed(workload, gpu.sm_count) } else { 0 }
}

impl<T: Float> Cuda<T> {
    /// Returns the address of an operand: `tensor`, which must hold at least `len` floats.
    pub(super) fn operand(&self, name: &str, tensor: Tensor, len: usize) -> Result<u64> {
        Ok(self.arena.address::<T>(name, tensor, len)?.addr() as u64)
    }

    /// Returns the type and the address of a weight gradient of `len` elements, which may be f32.
    pub(super) fn weight_gradient_output(&self, dweight: Tensor, len: usize) -> Result<(GemmOutput, u64)> {
        if dweight.dtype == T::DTYPE {
            return Ok((GemmOutput::Storage, self.operand("dweight", dweight, len)?));
        }
        Ok((GemmOutput::F32, self.arena.address::<f32>("dweight", dweight, len)?.addr() as u64))
    }

    pub(super) fn gemm_precision(&self) -> GemmPrecision {
        match T::DTYPE {
            DType::Bf16 => GemmPrecision::Bf16,
            _ if self.executor.tf32() => GemmPrecision::Tf32,
            _ => GemmPrecision::F32,
        }
    }

    /// Returns a GEMM of M, N and K in the engine's precision.
    pub(super) fn gemm(&self, [m, n, k]: [usize; 3], layout: GemmLayout, epilogue: GemmEpilogue) -> Gemm {
        Gemm { m, n, k, layout, precision: self.gemm_precision(), batching: Batching::One, epilogue }
    }

    /// Returns the GEMM, a grouped one of kind `batching` if there are groups of `rows` rows, with their operands and the number of matrices of
    /// the weight.
    pub(super) fn grouped(
        &self,
        gemm: Gemm,
        batching: Batching,
        groups: Option<Groups>,
        rows: usize,
    ) -> Result<(Gemm, Option<GroupOperands>, usize)> {
        let Some(groups) = groups else { return Ok((gemm, None, 1)) };
        let gpu = self.executor.emulation();
        ensure!(
            T::DTYPE == DType::Bf16 && gpu.hopper && gpu.matmul != MatmulBackend::Cublaslt,
            "{gemm}: expected one matrix, found {}, for which only the bf16 kernels of a Hopper GPU exist",
            groups.count
        );
        let gemm = Gemm { batching, ..gemm };
        Ok((gemm, Some(self.groups(groups, rows)?), groups.count))
    }

    pub(super) fn run_gemm(&mut self, call: GemmCall) -> Result<()> {
        if call.gemm.m == 0 || call.gemm.n == 0 {
            return Ok(());
        }
        // SAFETY: `operand` has checked each tensor against the length that its shape implies; outputs are tensors of their own.
        unsafe { self.gemms.run(call, &mut *self.executor) }
    }

    /// Reports whether a wgmma kernel computes the GEMM.
    fn runs_on_wgmma(&self, call: &GemmCall) -> Result<bool> {
        Ok(self.gemms.kernel_for(call, self.executor.sm_count())?.is_some())
    }

    /// Reports whether the GEMM with `oc` output columns applies the activation in its epilogue.
    pub(super) fn fuses_forward(&self, activation: Activation, bias: Option<Tensor>, oc: usize) -> bool {
        activation == Activation::Gelu
            && self.gelu_fusion >= GeluFusion::Forward
            && bias.is_some()
            && oc.is_multiple_of(GELU_COLUMNS)
    }

    /// Returns the GEMM of a forward pass.
    pub(super) fn forward_gemm(&self, op: &MatmulForward) -> Result<GemmCall> {
        let MatmulForward { out, inp, weight, bias, epilogue, shape: MatmulShape { rows, c, oc }, .. } = *op;
        let mut fused = GemmEpilogue { bias: bias.map(|_| Bias::Add), ..GemmEpilogue::NONE };
        let (residual, preactivation) = match epilogue {
            Epilogue::None => (None, None),
            Epilogue::Residual(residual) => {
                fused.residual = Some(Residual::Add);
                (Some(residual), None)
            }
            Epilogue::Activation(activation, preactivation) => {
                fused = fused.with(activation, Pass::Forward);
                (None, Some(preactivation))
            }
        };
        let (gemm, groups, matrices) =
            self.grouped(self.gemm([rows, oc, c], GemmLayout::Nt, fused), Batching::Grouped, op.groups, rows)?;
        let operands = GemmOperands {
            a: self.operand("inp", inp, rows * c)?,
            b: self.operand("weight", weight, matrices * oc * c)?,
            out: self.operand("out", out, rows * oc)?,
            groups,
            bias: bias.map(|bias| self.operand("bias", bias, oc)).transpose()?,
            residual: residual.map(|residual| self.operand("residual", residual, rows * oc)).transpose()?,
            preactivation: preactivation.map(|tensor| self.operand("preactivation", tensor, rows * oc)).transpose()?,
            ..GemmOperands::default()
        };
        Ok(GemmCall { gemm, operands, fallback: Vec::new(), after: Vec::new() })
    }

    /// Returns the GEMM of a forward pass that applies an activation that cuBLASLt lacks in its epilogue, if there is a wgmma
    /// kernel for it.
    ///
    /// Without the kernel, an activation kernel runs after the GEMM. Both apply the activation
    /// to rounded sums, so both give the bits of recomputing it.
    fn fused_forward(
        &self,
        op: &MatmulForward,
        activation: Activation,
        preactivation: Tensor,
    ) -> Result<Option<GemmCall>> {
        if op.bias.is_some() || activation == Activation::Gelu {
            return Ok(None);
        }
        let epilogue = GemmEpilogue::NONE.with(activation, Pass::Forward);
        let shape = activation::ActivationShape { rows: op.shape.rows, columns: op.shape.oc / activation.inputs() };
        let unfused = self.forward_gemm(&MatmulForward { out: preactivation, epilogue: Epilogue::None, ..*op })?;
        let operands = GemmOperands {
            out: self.operand("out", op.out, shape.rows * shape.columns)?,
            preactivation: Some(unfused.operands.out),
            ..unfused.operands
        };
        let after = vec![activation::forward_kernel(self, activation, op.out, preactivation, shape)?];
        let call = GemmCall { gemm: Gemm { epilogue, ..unfused.gemm }, operands, fallback: Vec::new(), after };
        Ok(self.gemms.may_use_kernel(&call).then_some(call))
    }

    /// Returns the GEMM of dinp that applies the derivative of an activation that cuBLASLt lacks in its epilogue, if there is a
    /// wgmma kernel for it. Without the kernel, an activation kernel runs after the GEMM.
    fn fused_backward(&self, op: &MatmulBackward, input: ActivationInput) -> Result<Option<GemmCall>> {
        let MatmulBackward { dinp, dout, inp, weight, shape: MatmulShape { rows, c, oc }, .. } = *op;
        let ActivationInput { activation, preactivation, .. } = input;
        if activation == Activation::Gelu {
            return Ok(None);
        }
        let sums = activation.is_gated().then_some(inp);
        let gemm = self.gemm([rows, c, oc], GemmLayout::Nn, GemmEpilogue::NONE.with(activation, Pass::Backward));
        let (gemm, groups, matrices) = self.grouped(gemm, Batching::Grouped, op.groups, rows)?;
        let inputs = rows * c * activation.inputs();
        let operands = GemmOperands {
            a: self.operand("dout", dout, rows * oc)?,
            b: self.operand("weight", weight, matrices * oc * c)?,
            out: self.operand("dinp", dinp, inputs)?,
            groups,
            preactivation: Some(self.operand("preactivation", preactivation, inputs)?),
            sums: sums.map(|sums| self.operand("inp", sums, rows * c)).transpose()?,
            ..GemmOperands::default()
        };
        let (shape, dact) = (activation::ActivationShape { rows, columns: c }, sums.unwrap_or(dinp));
        let after = vec![activation::backward_kernel(self, activation, dinp, dact, preactivation, shape)?];
        let call = GemmCall { gemm, operands, fallback: Vec::new(), after };
        Ok(self.gemms.may_use_kernel(&call).then_some(call))
    }

    /// Returns the GEMM that also recomputes the activation `inp`, for which `kernel` is the fallback.
    fn with_recompute(&self, call: &GemmCall, inp: Tensor, kernel: KernelLaunch) -> Result<GemmCall> {
        let (function, _) = call.gemm.epilogue.activation.context("this GEMM reads no activation")?;
        let gemm = Gemm { epilogue: call.gemm.epilogue.with(function, Pass::BackwardAndValue), ..call.gemm };
        let activation = Some(self.operand("inp", inp, gemm.m * gemm.n)?);
        let operands = GemmOperands { activation, ..call.operands };
        Ok(GemmCall { gemm, operands, fallback: vec![kernel], after: call.after.clone() })
    }

    /// Returns the GEMM that recomputes `out`, the GELU of a GEMM's sums, or `None` if an activation kernel gives the same bits.
    ///
    /// cuBLASLt applies GELU before it rounds the sum to `pre_gelu`; wgmma kernels apply it to the rounded value.
    fn gelu_recompute_gemm(
        &self,
        out: Tensor,
        input: ActivationInput,
        forward: ActivationForward,
    ) -> Result<Option<GemmCall>> {
        let ActivationForward { inp, weight, bias, shape } = forward;
        if !self.fuses_forward(input.activation, bias, shape.oc) {
            return Ok(None);
        }
        let epilogue = Epilogue::Activation(input.activation, input.preactivation);
        let call =
            self.forward_gemm(&MatmulForward { bias, epilogue, ..MatmulForward::new([out, inp, weight], shape) })?;
        Ok(if self.runs_on_wgmma(&call)? { None } else { Some(call) })
    }

    /// Recomputes `inp`, the output of an activation, or returns the kernel that does if the GEMM of dinp is to do it instead.
    fn recompute(
        &mut self,
        inp: Tensor,
        input: ActivationInput,
        forward: ActivationForward,
        dinp: &GemmCall,
    ) -> Result<Option<KernelLaunch>> {
        let shape = activation::ActivationShape { rows: dinp.gemm.m, columns: dinp.gemm.n };
        let kernel = activation::forward_kernel(self, input.activation, inp, input.preactivation, shape)?;
        let fused = dinp.gemm.epilogue.activation.is_some();
        if fused && self.gemms.is_collecting() {
            // No backend is chosen yet for the forward GEMM nor for this one, so the autotuner must see both variants.
            self.run_gemm(dinp.clone())?;
            return Ok(Some(kernel));
        }
        if let Some(call) = self.gelu_recompute_gemm(inp, input, forward)? {
            self.run_gemm(call)?;
            return Ok(None);
        }
        // Recomputation must not change bits: dinp uses the same backend as without recomputation.
        if fused && self.runs_on_wgmma(dinp)? {
            return Ok(Some(kernel));
        }
        self.launch_kernel(&kernel)?;
        Ok(None)
    }
}

pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, op: &MatmulForward) -> Result<()> {
    if let Some(fp8) = op.fp8 {
        return matmul_fp8::forward(cuda, op, &fp8);
    }
    match op.epilogue {
        Epilogue::Activation(activation, preactivation) if !cuda.fuses_forward(activation, op.bias, op.shape.oc) => {
            if let Some(call) = cuda.fused_forward(op, activation, preactivation)? {
                return cuda.run_gemm(call);
            }
            let unfused = MatmulForward { out: preactivation, epilogue: Epilogue::None, ..*op };
            cuda.run_gemm(cuda.forward_gemm(&unfused)?)?;
            let shape = activation::ActivationShape { rows: op.shape.rows, columns: op.shape.oc / activation.inputs() };
            cuda.launch_kernel(&activation::forward_kernel(cuda, activation, op.out, preactivation, shape)?)
        }
        _ => cuda.run_gemm(cuda.forward_gemm(op)?),
    }
}

pub(super) fn backward<T: Float>(cuda: &mut Cuda<T>, op: &MatmulBackward) -> Result<()> {
    if let Some(fp8) = op.fp8 {
        return matmul_fp8::backward(cuda, op, &fp8);
    }
    // The bias gradient's scratch memory is checked before anything is launched.
    let bias_kernels = match op.dbias {
        Some(dbias) => bias::backward_kernels(cuda, dbias, op.dout, op.shape)?,
        None => Vec::new(),
    };
    if let Some(input) = op.activation
        && let Some(call) = cuda.fused_backward(op, input)?
    {
        return backward_fused(cuda, op, input, call, bias_kernels);
    }
    match op.activation {
        Some(input) if input.activation.is_gated() => backward_gated(cuda, op, input, bias_kernels),
        _ => {
            backward_input(cuda, op)?;
            backward_weight(cuda, op, bias_kernels)
        }
    }
}

/// Computes the gradients of a layer. Its input is the output of an activation. `call` computes dinp, by a wgmma kernel if
/// that is the fastest.
fn backward_fused<T: Float>(
    cuda: &mut Cuda<T>,
    op: &MatmulBackward,
    input: ActivationInput,
    call: GemmCall,
    bias_kernels: Vec<KernelLaunch>,
) -> Result<()> {
    let shape = activation::ActivationShape { rows: op.shape.rows, columns: op.shape.c };
    let forward = activation::forward_kernel(cuda, input.activation, op.inp, input.preactivation, shape)?;
    let forward = input.recompute.map(|_| forward);
    let recomputing = forward.clone().map(|kernel| cuda.with_recompute(&call, op.inp, kernel)).transpose()?;
    if cuda.gemms.is_collecting() {
        cuda.run_gemm(call)?;
        if let Some(recomputing) = recomputing {
            cuda.run_gemm(recomputing)?;
        }
        return backward_weight(cuda, op, bias_kernels);
    }
    // Recomputation must not change bits: dinp uses the same backend as without recomputation.
    if cuda.runs_on_wgmma(&call)? {
        cuda.run_gemm(recomputing.unwrap_or(call))?;
        return backward_weight(cuda, op, bias_kernels);
    }
    if let Some(kernel) = forward {
        cuda.launch_kernel(&kernel)?;
    }
    // The weight gradient reads `inp`. Then the sums of a gated activation's GEMM replace it.
    backward_weight(cuda, op, bias_kernels)?;
    cuda.run_gemm(call)
}

/// Computes the gradients of a layer. Its input `inp` is the output of a gated activation.
///
/// The gradient of `inp` replaces `inp` after the weight gradient has read it.
fn backward_gated<T: Float>(
    cuda: &mut Cuda<T>,
    op: &MatmulBackward,
    input: ActivationInput,
    bias_kernels: Vec<KernelLaunch>,
) -> Result<()> {
    let ActivationInput { activation, preactivation, recompute } = input;
    let shape = activation::ActivationShape { rows: op.shape.rows, columns: op.shape.c };
    if recompute.is_some() {
        // GEMM epilogues apply the activation to rounded sums, so this kernel gives the bits of the forward pass.
        cuda.launch_kernel(&activation::forward_kernel(cuda, activation, op.inp, preactivation, shape)?)?;
    }
    backward_weight(cuda, op, bias_kernels)?;
    backward_input(cuda, &MatmulBackward { dinp: op.inp, activation: None, ..*op })?;
    cuda.launch_kernel(&activation::backward_kernel(cuda, activation, op.dinp, op.inp, preactivation, shape)?)
}

/// Computes dinp (rows, C) = dout (rows, OC) · weight (OC, C), times the derivative of an activation of one input.
fn backward_input<T: Float>(cuda: &mut Cuda<T>, op: &MatmulBackward) -> Result<()> {
    let MatmulBackward { dinp, adds_to_dinp, dout, inp, weight, activation, .. } = *op;
    let MatmulShape { rows, c, oc } = op.shape;
    let fused = activation.filter(|input| {
        let fuses = cuda.gelu_fusion == GeluFusion::Both && c.is_multiple_of(GELU_COLUMNS);
        fuses && input.activation == Activation::Gelu
    });
    let epilogue = GemmEpilogue {
        activation: fused.map(|input| (input.activation, Pass::Backward)),
        residual: adds_to_dinp.then_some(Residual::Add),
        ..GemmEpilogue::NONE
    };
    let gemm = cuda.gemm([rows, c, oc], GemmLayout::Nn, epilogue);
    let (gemm, groups, matrices) = cuda.grouped(gemm, Batching::Grouped, op.groups, rows)?;
    let operands = GemmOperands {
        a: cuda.operand("dout", dout, rows * oc)?,
        b: cuda.operand("weight", weight, matrices * oc * c)?,
        groups,
        out: cuda.operand("dinp", dinp, rows * c)?,
        preactivation: fused.map(|input| cuda.operand("preactivation", input.preactivation, rows * c)).transpose()?,
        ..GemmOperands::default()
    };
    let call = GemmCall { gemm, operands, fallback: Vec::new(), after: Vec::new() };
    let recompute_kernel = match activation {
        Some(input @ ActivationInput { recompute: Some(forward), .. }) => cuda.recompute(inp, input, forward, &call)?,
        _ => None,
    };
    match recompute_kernel {
        Some(kernel) => cuda.run_gemm(cuda.with_recompute(&call, inp, kernel)?)?,
        None => cuda.run_gemm(call)?,
    }
    match activation {
        Some(ActivationInput { activation, preactivation, .. }) if fused.is_none() => {
            let shape = activation::ActivationShape { rows, columns: c };
            cuda.launch_kernel(&activation::backward_kernel(cuda, activation, dinp, dinp, preactivation, shape)?)
        }
        _ => Ok(()),
    }
}

/// Computes dweight (OC, C) += dout (rows, OC)ᵀ · inp (rows, C), and dbias (OC) += column sums of dout.
fn backward_weight<T: Float>(cuda: &mut Cuda<T>, op: &MatmulBackward, bias_kernels: Vec<KernelLaunch>) -> Result<()> {
    let MatmulBackward { dweight, dbias, dout, inp, shape: MatmulShape { rows, c, oc }, .. } = *op;
    let Some(dweight) = dweight else { return bias_kernels.iter().try_for_each(|kernel| cuda.launch_kernel(kernel)) };
    let matrices = op.groups.map_or(1, |groups| groups.count);
    let (output, out) = cuda.weight_gradient_output(dweight, matrices * oc * c)?;
    let epilogue = GemmEpilogue { bias: dbias.map(|_| Bias::Gradient), output, ..GemmEpilogue::RESIDUAL };
    let gemm = cuda.gemm([oc, c, rows], GemmLayout::Tn, epilogue);
    let (gemm, groups, _) = cuda.grouped(gemm, Batching::GroupedSum, op.groups, rows)?;
    let operands = GemmOperands {
        groups,
        a: cuda.operand("dout", dout, rows * oc)?,
        b: cuda.operand("inp", inp, rows * c)?,
        out,
        bias: dbias.map(|dbias| cuda.operand("dbias", dbias, oc)).transpose()?,
        ..GemmOperands::default()
    };
    cuda.run_gemm(GemmCall { gemm, operands, fallback: bias_kernels, after: Vec::new() })
}
