//! The wgmma backend: GEMMs by this project's kernels, in bf16 and FP8 on sm_90a.

use super::executor::Executor;
use crate::gemm::{Gemm, GemmEpilogue, GemmLayout, GemmOperands, GemmOutput, GemmPrecision, KernelConfig};
use crate::tensor::DType;
use crate::{Result, Workload};
use anyhow::{Context, ensure};
use cuda_std::{Global, GlobalMut};
use gpu::launch::KernelLaunch;
use gpu::matmul::gemm::Batching;
use gpu::matmul::launch::{self, KernelOperands, Map, StridedBatch, TileConfig, TileShape};

/// Device memory for the partial sums of weight gradients.
#[derive(Clone, Copy)]
pub struct Scratch {
    /// The memory.
    pub partials: GlobalMut<f32>,
    /// Its length in elements.
    pub len: usize,
}

impl Scratch {
    /// No memory.
    pub const NONE: Self = Self { partials: GlobalMut::from_address(0), len: 0 };

    /// Maximum number of useful elements: a gradient in more parts than these hold gains nothing.
    const MAX_LEN: usize = 16 << 20;

    /// Returns the number of elements that the weights of a transformer layer and the vocabulary need.
    pub fn needed(workload: &Workload, sm_count: usize) -> usize {
        let head = (workload.padded_vocab, workload.channels);
        let lengths = workload.linear_layers.iter().chain([&head]).flat_map(|&(m, n)| {
            let gemm = Gemm {
                m,
                n,
                k: workload.rows(),
                layout: GemmLayout::Tn,
                precision: GemmPrecision::Bf16,
                batching: Batching::One,
                epilogue: GemmEpilogue::BIAS_GRADIENT,
            };
            let configs = launch::candidate_configs(&gemm, sm_count, Self::MAX_LEN);
            configs.into_iter().map(move |config| config.scratch_len(&gemm))
        });
        lengths.max().unwrap_or(0)
    }
}

/// A GEMM that a wgmma kernel computes.
#[derive(Clone, Copy, Debug)]
pub struct WgmmaGemm {
    gemm: Gemm,
    operands: GemmOperands,
}

impl WgmmaGemm {
    /// Returns the kernel's view of a GEMM, or `None` if no kernel computes it.
    pub fn new(gemm: &Gemm, operands: &GemmOperands) -> Option<Self> {
        let kernels = Self { gemm: *gemm, operands: *operands };
        let supported = gemm.epilogue.output != GemmOutput::F32 || kernels.adds_to_output();
        (supported && launch::is_supported(gemm)).then_some(kernels)
    }

    /// Returns true if the residual is the output. Only then sums can be split over K, or added to f32.
    fn adds_to_output(&self) -> bool {
        self.operands.residual.is_none_or(|residual| residual == self.operands.out)
    }

    /// Returns the configurations that may be the fastest, most promising first.
    pub fn configs(&self, sm_count: usize, scratch: Scratch) -> Vec<KernelConfig> {
        let scratch_len = if self.adds_to_output() { scratch.len } else { 0 };
        let stored = |TileConfig { tile, split_k }: TileConfig| {
            let [tile_m, tile_n] = tile.dims();
            KernelConfig { tile_m, tile_n, split_k: split_k as u32 }
        };
        launch::candidate_configs(&self.gemm, sm_count, scratch_len).into_iter().map(stored).collect()
    }

    /// Reports whether a configuration, which may come from a run with more memory, is possible in this one.
    pub fn supports(&self, config: KernelConfig, scratch: Scratch) -> bool {
        self.config(config).is_some_and(|config| config.scratch_len(&self.gemm) <= scratch.len)
    }

    fn config(&self, KernelConfig { tile_m, tile_n, split_k }: KernelConfig) -> Option<TileConfig> {
        let config = TileConfig { tile: TileShape::from_dims(tile_m, tile_n)?, split_k: split_k as usize };
        ((split_k == 1 || self.adds_to_output()) && config.is_supported(&self.gemm)).then_some(config)
    }

    /// Returns the launches in order; none where kernels for sm_90a do not run.
    pub fn launches(
        &self,
        config: KernelConfig,
        scratch: Scratch,
        executor: &mut dyn Executor,
    ) -> Result<Vec<KernelLaunch>> {
        let config = self.config(config).with_context(|| format!("{self:?}: no kernel with configuration {config}"))?;
        let Scratch { partials: scratch, len: scratch_len } = scratch;
        let needed = config.scratch_len(&self.gemm);
        ensure!(
            needed <= scratch_len,
            "{self:?} with {config:?}: expected {needed} f32 of scratch memory, found {scratch_len}"
        );
        let GemmOperands { a, b, out, residual, bias, preactivation, activation, scale, batch, groups, .. } =
            self.operands;
        let (factors, groups) = (scale.unwrap_or_default(), groups.unwrap_or_default());
        let batch = batch.unwrap_or(StridedBatch { count: groups.count, ..StridedBatch::default() });
        let quantizes = self.gemm.epilogue.output == GemmOutput::Fp8;
        let (aux, second) = if self.gemm.epilogue.writes_preactivation() {
            (None, preactivation)
        } else {
            (preactivation.or(residual), activation.filter(|_| !quantizes))
        };
        let mut map = |address: u64, Map { extents, tile, fp8 }: Map| {
            let dtype = if fp8 { DType::Fp8 } else { DType::Bf16 };
            executor.tensor_map(address, dtype, extents, tile)
        };
        let maps = launch::maps(&self.gemm, batch, config.tile);
        let (a, b, out_tensor) = (map(a, maps.a)?, map(b, maps.b)?, map(out, maps.out)?);
        // An operand that the epilogue does not use has the map of out.
        let mut optional = |address: Option<u64>, dimensions: Map| match address {
            Some(address) => map(address, dimensions),
            None => Ok(out_tensor),
        };
        let (aux, second) = (optional(aux, maps.aux)?, optional(second, maps.second)?);
        let (Some(a), Some(b), Some(out_tensor), Some(aux), Some(second)) = (a, b, out_tensor, aux, second) else {
            return Ok(Vec::new());
        };
        let quantized = self.operands.fp8_output.unwrap_or_default();
        let operands = KernelOperands {
            a,
            b,
            out: out_tensor,
            aux,
            second,
            bias: GlobalMut::from_address(bias.unwrap_or_default()),
            scales: self.operands.fp8_scales.unwrap_or_default().map(Global::from_address),
            scale_out: Global::from_address(quantized.scale),
            amax: GlobalMut::from_address(quantized.amax),
            transposed: GlobalMut::from_address(quantized.transposed.unwrap_or_default()),
            activation: GlobalMut::from_address(activation.unwrap_or_default()),
            scale_activation: Global::from_address(quantized.activation_scale.unwrap_or_default()),
            out_address: out,
            scratch,
            factors,
            count: batch.count,
            groups: Global::from_address(groups.description),
        };
        Ok(launch::launches(&self.gemm, config, operands, executor.sm_count()))
    }
}
