//! Linear layers as GEMMs.

use super::executor::EmulatedGpu;
use super::wgmma::Scratch;
use super::{Cuda, Float, MatmulBackend, bias, gelu};
use crate::gemm::{GELU_COLUMNS, Gemm, GemmCall, GemmEpilogue, GemmLayout, GemmOperands, GemmPrecision};
use crate::ops::{Epilogue, GeluForward, GeluInput, MatmulBackward, MatmulForward, MatmulShape};
use crate::tensor::{DType, Tensor};
use crate::{GeluFusion, Result, Workload};
use gpu::launch::KernelLaunch;

/// Returns the f32 elements of scratch memory for partial sums of weight gradients, where wgmma kernels compute them.
pub(super) fn scratch<T: Float>(workload: &Workload, gpu: EmulatedGpu) -> usize {
    let kernels = T::DTYPE == DType::Bf16 && gpu.hopper && gpu.matmul != MatmulBackend::Cublaslt;
    if kernels { Scratch::needed(workload, gpu.sm_count) } else { 0 }
}

impl<T: Float> Cuda<T> {
    /// Returns the address of an operand: `tensor`, which must hold at least `len` floats.
    fn operand(&self, name: &str, tensor: Tensor, len: usize) -> Result<u64> {
        Ok(self.arena.address::<T>(name, tensor, len)?.addr() as u64)
    }

    fn gemm_precision(&self) -> GemmPrecision {
        match T::DTYPE {
            DType::Bf16 => GemmPrecision::Bf16,
            _ if self.executor.tf32() => GemmPrecision::Tf32,
            _ => GemmPrecision::F32,
        }
    }

    fn run_gemm(&mut self, call: GemmCall) -> Result<()> {
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

    /// Reports whether the GEMM with `oc` output columns and a bias applies GELU in its epilogue.
    fn fuses_gelu_forward(&self, bias: Option<Tensor>, oc: usize) -> bool {
        self.gelu_fusion >= GeluFusion::Forward && bias.is_some() && oc.is_multiple_of(GELU_COLUMNS)
    }

    /// Returns the GEMM of a forward pass.
    fn forward_gemm(&self, op: MatmulForward) -> Result<GemmCall> {
        let MatmulForward { out, inp, weight, bias, epilogue, shape: MatmulShape { rows, c, oc } } = op;
        let (residual, pre_gelu) = match epilogue {
            Epilogue::None => (None, None),
            Epilogue::Residual(residual) => (Some(residual), None),
            Epilogue::Gelu(pre_gelu) => (None, Some(pre_gelu)),
        };
        let epilogue = match (bias, epilogue) {
            (Some(_), Epilogue::None) => GemmEpilogue::Bias,
            (Some(_), Epilogue::Residual(_)) => GemmEpilogue::BiasResidual,
            (Some(_), Epilogue::Gelu(_)) => GemmEpilogue::BiasGelu,
            (None, Epilogue::Residual(_)) => GemmEpilogue::Residual,
            (None, _) => GemmEpilogue::None,
        };
        let precision = self.gemm_precision();
        let gemm = Gemm { m: rows, n: oc, k: c, layout: GemmLayout::Nt, precision, epilogue, f32_output: false };
        let operands = GemmOperands {
            a: self.operand("inp", inp, rows * c)?,
            b: self.operand("weight", weight, oc * c)?,
            out: self.operand("out", out, rows * oc)?,
            bias: bias.map(|bias| self.operand("bias", bias, oc)).transpose()?,
            residual: residual.map(|residual| self.operand("residual", residual, rows * oc)).transpose()?,
            pre_gelu: pre_gelu.map(|pre_gelu| self.operand("pre_gelu", pre_gelu, rows * oc)).transpose()?,
            gelu: None,
        };
        Ok(GemmCall { gemm, operands, fallback: Vec::new() })
    }

    /// Returns the GEMM that recomputes `out`, the GELU of `pre_gelu`, or `None` if a GELU kernel gives the same bits.
    ///
    /// cuBLASLt applies GELU before it rounds the sum to `pre_gelu`; wgmma kernels apply it to the rounded value.
    fn gelu_recompute_gemm(&self, out: Tensor, pre_gelu: Tensor, forward: GeluForward) -> Result<Option<GemmCall>> {
        let GeluForward { inp, weight, bias, shape } = forward;
        if !self.fuses_gelu_forward(bias, shape.oc) {
            return Ok(None);
        }
        let epilogue = Epilogue::Gelu(pre_gelu);
        let call = self.forward_gemm(MatmulForward { out, inp, weight, bias, epilogue, shape })?;
        Ok(if self.runs_on_wgmma(&call)? { None } else { Some(call) })
    }

    /// Recomputes `inp`, the GELU of `pre_gelu`, or returns the kernel that does if the GEMM of dinp is to do it instead.
    fn recompute_gelu(
        &mut self,
        inp: Tensor,
        pre_gelu: Tensor,
        forward: GeluForward,
        dinp: &GemmCall,
    ) -> Result<Option<KernelLaunch>> {
        let kernel = gelu::forward_kernel(self, inp, pre_gelu, dinp.gemm.m * dinp.gemm.n)?;
        let fused = dinp.gemm.epilogue == GemmEpilogue::GeluBackward;
        if fused && self.gemms.is_collecting() {
            // No backend is chosen yet for the forward GEMM nor for this one, so the autotuner must see both variants.
            self.run_gemm(dinp.clone())?;
            return Ok(Some(kernel));
        }
        if let Some(call) = self.gelu_recompute_gemm(inp, pre_gelu, forward)? {
            self.run_gemm(call)?;
            return Ok(None);
        }
        // Recomputation must not change bits: dinp uses the same backend as without recomputation.
        if fused && self.runs_on_wgmma(dinp)? {
            return Ok(Some(kernel));
        }
        self.launch(&kernel.launch, kernel.grid, kernel.shared_bytes)?;
        Ok(None)
    }
}

pub(super) fn forward<T: Float>(cuda: &mut Cuda<T>, op: MatmulForward) -> Result<()> {
    match op.epilogue {
        Epilogue::Gelu(pre_gelu) if !cuda.fuses_gelu_forward(op.bias, op.shape.oc) => {
            let unfused = MatmulForward { out: pre_gelu, epilogue: Epilogue::None, ..op };
            cuda.run_gemm(cuda.forward_gemm(unfused)?)?;
            gelu::forward(cuda, op.out, pre_gelu, op.shape.rows * op.shape.oc)
        }
        _ => cuda.run_gemm(cuda.forward_gemm(op)?),
    }
}

pub(super) fn backward<T: Float>(cuda: &mut Cuda<T>, op: &MatmulBackward) -> Result<()> {
    // The bias gradient's scratch memory is checked before anything is launched.
    let bias_kernels = match op.dbias {
        Some(dbias) => bias::backward_kernels(cuda, dbias, op.dout, op.shape)?,
        None => Vec::new(),
    };
    backward_input(cuda, op)?;
    backward_weight(cuda, op, bias_kernels)
}

/// dinp (rows, C) = dout (rows, OC) · weight (OC, C), times the derivative of GELU where the input is one
fn backward_input<T: Float>(cuda: &mut Cuda<T>, op: &MatmulBackward) -> Result<()> {
    let MatmulBackward { dinp, dout, inp, weight, gelu, shape: MatmulShape { rows, c, oc }, .. } = *op;
    let fused = gelu.filter(|_| cuda.gelu_fusion == GeluFusion::Both && c.is_multiple_of(GELU_COLUMNS));
    let gemm = Gemm {
        m: rows,
        n: c,
        k: oc,
        layout: GemmLayout::Nn,
        precision: cuda.gemm_precision(),
        epilogue: if fused.is_some() { GemmEpilogue::GeluBackward } else { GemmEpilogue::None },
        f32_output: false,
    };
    let operands = GemmOperands {
        a: cuda.operand("dout", dout, rows * oc)?,
        b: cuda.operand("weight", weight, oc * c)?,
        out: cuda.operand("dinp", dinp, rows * c)?,
        pre_gelu: fused.map(|gelu| cuda.operand("pre_gelu", gelu.pre_gelu, rows * c)).transpose()?,
        ..GemmOperands::default()
    };
    let call = GemmCall { gemm, operands, fallback: Vec::new() };
    let recompute_kernel = match gelu {
        Some(GeluInput { pre_gelu, recompute: Some(forward) }) => cuda.recompute_gelu(inp, pre_gelu, forward, &call)?,
        _ => None,
    };
    match recompute_kernel {
        Some(kernel) => {
            let gemm = Gemm { epilogue: GemmEpilogue::GeluBackwardRecompute, ..gemm };
            let operands = GemmOperands { gelu: Some(cuda.operand("inp", inp, rows * c)?), ..operands };
            cuda.run_gemm(GemmCall { gemm, operands, fallback: vec![kernel] })?;
        }
        None => cuda.run_gemm(call)?,
    }
    match gelu {
        Some(gelu) if fused.is_none() => gelu::backward(cuda, dinp, gelu.pre_gelu, rows * c),
        _ => Ok(()),
    }
}

/// dweight (OC, C) += dout (rows, OC)ᵀ · inp (rows, C), and dbias (OC) += column sums of dout
fn backward_weight<T: Float>(cuda: &mut Cuda<T>, op: &MatmulBackward, bias_kernels: Vec<KernelLaunch>) -> Result<()> {
    let MatmulBackward { dweight, dbias, dout, inp, shape: MatmulShape { rows, c, oc }, .. } = *op;
    let f32_output = dweight.dtype != T::DTYPE;
    let gemm = Gemm {
        m: oc,
        n: c,
        k: rows,
        layout: GemmLayout::Tn,
        precision: cuda.gemm_precision(),
        epilogue: if dbias.is_some() { GemmEpilogue::AccumulateBiasGrad } else { GemmEpilogue::Accumulate },
        f32_output,
    };
    let operands = GemmOperands {
        a: cuda.operand("dout", dout, rows * oc)?,
        b: cuda.operand("inp", inp, rows * c)?,
        out: if f32_output {
            cuda.arena.address::<f32>("dweight", dweight, oc * c)?.addr() as u64
        } else {
            cuda.operand("dweight", dweight, oc * c)?
        },
        bias: dbias.map(|dbias| cuda.operand("dbias", dbias, oc)).transpose()?,
        ..GemmOperands::default()
    };
    cuda.run_gemm(GemmCall { gemm, operands, fallback: bias_kernels })
}
