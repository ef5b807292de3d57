//! GEMMs by this project's kernels: in bf16 and FP8 with wgmma on sm_90a, and in FP8 with mma.sync on sm_89 and later.

use super::executor::{EmulatedGpu, Executor};
use crate::gemm::{Gemm, GemmEpilogue, GemmLayout, GemmOperands, GemmOutput, GemmPrecision, KernelConfig};
use crate::tensor::DType;
use crate::{Result, Workload};
use anyhow::{Context, ensure};
use cuda_std::{Global, GlobalMut};
use gpu::launch::KernelLaunch;
use gpu::matmul::gemm::Batching;
use gpu::matmul::launch::{self, KernelOperands, Map, StridedBatch, TileConfig, TileShape};
use gpu::matmul_mma::launch::{self as mma, Addresses};

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

/// The instruction with which kernels multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Instruction {
    Wgmma,
    MmaSync,
}

/// A GEMM that a kernel computes.
#[derive(Clone, Copy, Debug)]
pub struct KernelGemm {
    instruction: Instruction,
    gemm: Gemm,
    operands: GemmOperands,
}

impl KernelGemm {
    /// Returns the kernel's view of a GEMM, or `None` if no kernel of the GPU computes it.
    pub fn new(gpu: EmulatedGpu, gemm: &Gemm, operands: &GemmOperands) -> Option<Self> {
        let (instruction, is_supported) = match gpu {
            EmulatedGpu { hopper: true, .. } => (Instruction::Wgmma, launch::is_supported(gemm)),
            EmulatedGpu { mma_fp8: true, .. } => (Instruction::MmaSync, mma::is_supported(gemm)),
            _ => return None,
        };
        let kernels = Self { instruction, gemm: *gemm, operands: *operands };
        let is_possible = gemm.epilogue.output != GemmOutput::F32 || kernels.adds_to_output();
        (is_supported && is_possible).then_some(kernels)
    }

    /// Names the instruction.
    pub fn instruction(&self) -> &'static str {
        match self.instruction {
            Instruction::Wgmma => "wgmma",
            Instruction::MmaSync => "mma.sync",
        }
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
        let configs = match self.instruction {
            Instruction::Wgmma => launch::candidate_configs(&self.gemm, sm_count, scratch_len),
            Instruction::MmaSync => vec![mma::CONFIG],
        };
        configs.into_iter().map(stored).collect()
    }

    /// Reports whether a configuration, which may come from a run with more memory, is possible in this one.
    pub fn supports(&self, config: KernelConfig, scratch: Scratch) -> bool {
        self.config(config).is_some_and(|config| config.scratch_len(&self.gemm) <= scratch.len)
    }

    fn config(&self, KernelConfig { tile_m, tile_n, split_k }: KernelConfig) -> Option<TileConfig> {
        let config = TileConfig { tile: TileShape::from_dims(tile_m, tile_n)?, split_k: split_k as usize };
        let is_supported = match self.instruction {
            Instruction::Wgmma => (split_k == 1 || self.adds_to_output()) && config.is_supported(&self.gemm),
            Instruction::MmaSync => config == mma::CONFIG,
        };
        is_supported.then_some(config)
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
        let quantized = self.operands.fp8_output.unwrap_or_default();
        let operands = KernelOperands {
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
            ..KernelOperands::default()
        };
        if self.instruction == Instruction::MmaSync {
            // A residual that is not given is the output.
            let [aux, second] = [aux, second].map(|address| address.unwrap_or(out));
            return Ok(vec![mma::launch(&self.gemm, Addresses { a, b, aux, second }, operands)]);
        }
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
        let operands = KernelOperands { a, b, out: out_tensor, aux, second, ..operands };
        Ok(launch::launches(&self.gemm, config, operands, executor.sm_count()))
    }
}
