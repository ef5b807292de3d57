//! The wgmma backend: GEMMs by this project's kernels, in bf16 and FP8 on sm_90a.

use super::executor::Executor;
use super::wgmma_fp8;
use crate::gemm::{Gemm, GemmEpilogue, GemmLayout, GemmOperands, GemmPrecision, KernelConfig};
use crate::tensor::DType;
use crate::{Result, Workload};
use anyhow::{Context, ensure};
use cuda_std::GlobalMut;
use gpu::launch::KernelLaunch;
use gpu::matmul::fp8_launch::Fp8Gemm;
use gpu::matmul::launch::{self, Batch, GemmOp, GemmShape, KernelOperands, Map, Scale, TileConfig, TileShape};

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

    /// Most elements that are worth having: a gradient in more parts than these hold gains nothing.
    const MAX_LEN: usize = 16 << 20;

    /// Returns the number of elements that the weights of a transformer layer and the vocabulary need.
    pub fn needed(workload: &Workload, sm_count: usize) -> usize {
        let head = (workload.padded_vocab, workload.channels);
        let lengths = workload.linear_layers().into_iter().chain([head]).flat_map(|(m, n)| {
            let (op, shape) = (GemmOp::AtBAccumulateColumnSums, GemmShape { m, n, k: workload.rows() });
            let configs = launch::candidate_configs(op, shape, sm_count, Self::MAX_LEN);
            configs.into_iter().map(move |config| config.scratch_len(op, shape))
        });
        lengths.max().unwrap_or(0)
    }
}

/// A GEMM that a wgmma kernel computes.
#[derive(Clone, Copy, Debug)]
pub struct WgmmaGemm {
    kernel: Kernel,
    /// Whether the epilogue writes the preactivation rather than reading it.
    writes_preactivation: bool,
    shape: GemmShape,
    operands: GemmOperands,
}

/// The kernels for a type of operands.
#[derive(Clone, Copy, Debug)]
enum Kernel {
    Bf16(GemmOp),
    Fp8(Fp8Gemm),
}

impl WgmmaGemm {
    /// Returns the kernel's view of a GEMM, or `None` if no kernel computes it.
    pub fn new(gemm: &Gemm, operands: &GemmOperands) -> Option<Self> {
        let shape = GemmShape { m: gemm.m, n: gemm.n, k: gemm.k };
        let kernel = match gemm.precision {
            GemmPrecision::Bf16 => Kernel::Bf16(Self::bf16(gemm).filter(|op| shape.is_supported(*op))?),
            GemmPrecision::Fp8 { a, exact } => Kernel::Fp8(wgmma_fp8::kernel(gemm, a, exact, shape)?),
            GemmPrecision::F32 | GemmPrecision::Tf32 => return None,
        };
        let writes_preactivation = gemm.epilogue.writes_preactivation();
        Some(Self { kernel, writes_preactivation, shape, operands: *operands })
    }

    /// Returns the bf16 kernels for a GEMM.
    fn bf16(gemm: &Gemm) -> Option<GemmOp> {
        Some(match (gemm.layout, gemm.epilogue, gemm.f32_output) {
            (GemmLayout::Nt, GemmEpilogue::None, false) => GemmOp::ABt,
            (GemmLayout::Nt, GemmEpilogue::Bias, false) => GemmOp::ABtBias,
            (GemmLayout::Nt, GemmEpilogue::BiasResidual, false) => GemmOp::ABtBiasResidual,
            (GemmLayout::Nt, GemmEpilogue::BiasGelu, false) => GemmOp::ABtBiasGelu,
            (GemmLayout::Nt, GemmEpilogue::Residual, false) => GemmOp::ABtResidual,
            (GemmLayout::Nt, GemmEpilogue::ReluSquared, false) => GemmOp::ABtReluSquared,
            (GemmLayout::Nt, GemmEpilogue::SwiGlu, false) => GemmOp::ABtSwiGlu,
            (GemmLayout::Nn, GemmEpilogue::None, false) => GemmOp::AB,
            (GemmLayout::Nn, GemmEpilogue::GeluBackward, false) => GemmOp::ABGeluBackward,
            (GemmLayout::Nn, GemmEpilogue::GeluBackwardRecompute, false) => GemmOp::ABGeluBackwardAndGelu,
            (GemmLayout::Nn, GemmEpilogue::ReluSquaredBackward, false) => GemmOp::ABReluSquaredBackward,
            (GemmLayout::Nn, GemmEpilogue::ReluSquaredBackwardRecompute, false) => {
                GemmOp::ABReluSquaredBackwardAndReluSquared
            }
            (GemmLayout::Nn, GemmEpilogue::SwiGluBackward, false) => GemmOp::ABSwiGluBackward,
            (GemmLayout::Nn, GemmEpilogue::SwiGluBackwardRecompute, false) => GemmOp::ABSwiGluBackwardAndSwiGlu,
            (GemmLayout::Tn, GemmEpilogue::Accumulate, false) => GemmOp::AtBAccumulate,
            (GemmLayout::Tn, GemmEpilogue::AccumulateBiasGrad, false) => GemmOp::AtBAccumulateColumnSums,
            (GemmLayout::Tn, GemmEpilogue::Accumulate, true) => GemmOp::AtBAccumulateF32,
            (GemmLayout::Nn, GemmEpilogue::BatchedResidual, false) => GemmOp::ABScaled,
            (GemmLayout::Nt, GemmEpilogue::Symmetric, false) => GemmOp::ABtSymmetric,
            (GemmLayout::Nt, GemmEpilogue::SymmetricResidual, false) => GemmOp::ABtSymmetricScaled,
            (GemmLayout::Tn, GemmEpilogue::Symmetric, false) => GemmOp::AtBSymmetric,
            _ => return None,
        })
    }

    /// Returns the configurations that may be the fastest, most promising first.
    pub fn configs(&self, sm_count: usize, scratch: Scratch) -> Vec<KernelConfig> {
        let configs = match self.kernel {
            Kernel::Bf16(op) => launch::candidate_configs(op, self.shape, sm_count, scratch.len),
            // Only a weight gradient, which is added to itself, may be split.
            Kernel::Fp8(gemm) if self.operands.residual == Some(self.operands.out) => {
                gemm.candidate_configs(self.shape, sm_count, scratch.len)
            }
            Kernel::Fp8(gemm) => gemm.candidate_configs(self.shape, sm_count, 0),
        };
        let stored = |TileConfig { tile, split_k }| KernelConfig {
            tile_m: tile.tile_m(),
            tile_n: tile.tile_n(),
            split_k: split_k as u32,
        };
        configs.into_iter().map(stored).collect()
    }

    /// Reports whether a configuration, which may come from a run with more memory, is possible in this one.
    pub fn supports(&self, config: KernelConfig, scratch: Scratch) -> bool {
        self.config(config).is_some_and(|config| self.scratch_len(config) <= scratch.len)
    }

    fn config(&self, KernelConfig { tile_m, tile_n, split_k }: KernelConfig) -> Option<TileConfig> {
        let config = TileConfig { tile: TileShape::from_dims(tile_m, tile_n)?, split_k: split_k as usize };
        let supported = match self.kernel {
            Kernel::Bf16(op) => config.is_supported(op, self.shape),
            Kernel::Fp8(gemm) => {
                let splits = split_k == 1 || self.operands.residual == Some(self.operands.out);
                splits && gemm.supports(self.shape, config)
            }
        };
        (split_k > 0 && supported).then_some(config)
    }

    /// Returns the f32 elements of scratch memory for partial sums.
    fn scratch_len(&self, config: TileConfig) -> usize {
        match self.kernel {
            Kernel::Bf16(op) => config.scratch_len(op, self.shape),
            Kernel::Fp8(gemm) => gemm.scratch_len(self.shape, config),
        }
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
        let needed = self.scratch_len(config);
        ensure!(
            needed <= scratch_len,
            "{self:?} with {config:?}: expected {needed} f32 of scratch memory, found {scratch_len}"
        );
        let op = match self.kernel {
            Kernel::Bf16(op) => op,
            Kernel::Fp8(gemm) => {
                return wgmma_fp8::launches(gemm, self.shape, config, &self.operands, scratch, executor);
            }
        };
        let GemmOperands { a, b, out, residual, bias, preactivation, activation, scale, batch, .. } = self.operands;
        let scale = scale.map_or(Scale::ONE, |scale| Scale { alpha: scale.alpha, beta: scale.beta });
        let batch =
            batch.map_or(Batch::ONE, |batch| Batch { count: batch.count, a: batch.a, b: batch.b, out: batch.d });
        let (aux, second) =
            if self.writes_preactivation { (None, preactivation) } else { (preactivation.or(residual), activation) };
        let mut map =
            |address: u64, Map { extents, tile }: Map| executor.tensor_map(address, DType::Bf16, extents, tile);
        let maps = launch::maps(op, self.shape, batch, config.tile);
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
        let bias = GlobalMut::from_address(bias.unwrap_or_default());
        let operands = KernelOperands {
            a,
            b,
            out: out_tensor,
            aux,
            second,
            bias,
            out_address: out,
            scratch,
            scratch_len,
            scale,
            count: batch.count,
        };
        Ok(launch::launches(op, self.shape, config, operands, executor.sm_count()))
    }
}
