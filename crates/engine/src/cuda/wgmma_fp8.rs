//! FP8 kernels of the [wgmma backend](super::wgmma).

use super::executor::Executor;
use crate::Result;
use crate::gemm::{Gemm, GemmEpilogue, GemmLayout, GemmOperands};
use crate::tensor::DType;
use anyhow::Context;
use cuda_std::fp8::Fp8Format;
use cuda_std::{Global, GlobalMut};
use gpu::launch::KernelLaunch;
use gpu::matmul::fp8_launch::{Fp8Epilogue, Fp8Gemm, Fp8Operands};
use gpu::matmul::launch::{GemmShape, Map, TileConfig};

/// Returns the kernels for a GEMM whose left operand is in format `a`, or `None` if there are none.
pub(super) fn kernel(gemm: &Gemm, a: Fp8Format, exact: bool, shape: GemmShape) -> Option<Fp8Gemm> {
    let epilogue = match gemm.epilogue {
        GemmEpilogue::None => Fp8Epilogue::Plain,
        GemmEpilogue::Bias => Fp8Epilogue::Bias,
        GemmEpilogue::Residual => Fp8Epilogue::Residual,
        GemmEpilogue::BiasResidual => Fp8Epilogue::BiasResidual,
        GemmEpilogue::BiasGelu => Fp8Epilogue::BiasGelu,
        GemmEpilogue::BiasGeluFp8 => Fp8Epilogue::BiasGeluFp8,
        GemmEpilogue::GeluBackward => Fp8Epilogue::GeluBackward,
        GemmEpilogue::GeluBackwardFp8 => Fp8Epilogue::GeluBackwardFp8,
        _ => return None,
    };
    let kernel = Fp8Gemm { a, epilogue, exact };
    let possible = gemm.layout == GemmLayout::Nt && !gemm.f32_output && kernel.is_supported(shape);
    possible.then_some(kernel)
}

/// Returns the launches in order; none where kernels for sm_90a do not run. `scratch` has the length that `config` needs.
pub(super) fn launches(
    gemm: Fp8Gemm,
    shape: GemmShape,
    config: TileConfig,
    operands: &GemmOperands,
    scratch: GlobalMut<f32>,
    executor: &mut dyn Executor,
) -> Result<Vec<KernelLaunch>> {
    let GemmOperands { a, b, out, residual, bias, preactivation, fp8_scales, fp8_output, .. } = *operands;
    let [scale_a, scale_b] = fp8_scales.context("FP8 GEMM: expected scales, found none")?.map(Global::from_address);
    // Unused if the output is not FP8.
    let [scale_out, amax] = fp8_output.unwrap_or_default();
    // BiasGelu writes the preactivation; other epilogues read an operand.
    let (aux, second) = match gemm.epilogue {
        Fp8Epilogue::BiasGelu | Fp8Epilogue::BiasGeluFp8 => (None, preactivation),
        _ => (preactivation.or(residual), None),
    };
    let maps = gemm.maps(shape, config.tile);
    let mut map = |address: u64, dtype, Map { extents, tile }: Map| executor.tensor_map(address, dtype, extents, tile);
    let (a, b) = (map(a, DType::Fp8, maps.a)?, map(b, DType::Fp8, maps.b)?);
    let out_map = map(out, if gemm.epilogue.is_fp8() { DType::Fp8 } else { DType::Bf16 }, maps.out)?;
    // An operand that the epilogue does not use has the map of out.
    let mut optional = |address: Option<u64>, dimensions: Map| {
        address.map_or(Ok(out_map), |address| map(address, DType::Bf16, dimensions))
    };
    let (aux, second) = (optional(aux, maps.aux)?, optional(second, maps.second)?);
    let (Some(a), Some(b), Some(out_map), Some(aux), Some(second)) = (a, b, out_map, aux, second) else {
        return Ok(Vec::new());
    };
    let operands = Fp8Operands {
        a,
        b,
        out: out_map,
        aux,
        second,
        bias: Global::from_address(bias.unwrap_or_default()),
        scale_a,
        scale_b,
        scale_out: Global::from_address(scale_out),
        amax: GlobalMut::from_address(amax),
        out_address: out,
        scratch,
    };
    Ok(gemm.launches(shape, config, operands, executor.sm_count()))
}
