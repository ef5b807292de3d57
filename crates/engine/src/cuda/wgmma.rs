//! The wgmma backend: GEMMs by this project's kernels, in bf16 on sm_90a.

use super::executor::Executor;
use super::tensor_maps::Extents;
use crate::gemm::{Gemm, GemmEpilogue, GemmLayout, GemmOperands, GemmPrecision, KernelConfig};
use crate::{Result, Workload};
use anyhow::{Context, ensure};
use cuda_std::{Global, GlobalMut};
use gpu::launch::KernelLaunch;
use gpu::matmul::launch::{self, GemmOp, GemmShape, KernelOperands, Map, TileConfig, TileShape};

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
        let c = workload.channels;
        let weights = [(3 * c, c), (c, c), (4 * c, c), (c, 4 * c), (workload.padded_vocab, c)];
        let lengths = weights.into_iter().flat_map(|(m, n)| {
            let (op, shape) = (GemmOp::AtBAccumulateColumnSums, GemmShape { m, n, k: workload.b * workload.t });
            let configs = launch::candidate_configs(op, shape, sm_count, Self::MAX_LEN);
            configs.into_iter().map(move |config| config.scratch_len(op, shape))
        });
        lengths.max().unwrap_or(0)
    }
}

/// A GEMM that a wgmma kernel computes.
#[derive(Clone, Copy, Debug)]
pub struct WgmmaGemm {
    op: GemmOp,
    shape: GemmShape,
    operands: GemmOperands,
}

impl WgmmaGemm {
    /// Returns the kernel's view of a GEMM, or `None` if no kernel computes it.
    pub fn new(gemm: &Gemm, operands: &GemmOperands) -> Option<Self> {
        let op = match (gemm.layout, gemm.epilogue, gemm.f32_output) {
            (GemmLayout::Nt, GemmEpilogue::None, false) => GemmOp::ABt,
            (GemmLayout::Nt, GemmEpilogue::Bias, false) => GemmOp::ABtBias,
            (GemmLayout::Nt, GemmEpilogue::BiasResidual, false) => GemmOp::ABtBiasResidual,
            (GemmLayout::Nt, GemmEpilogue::BiasGelu, false) => GemmOp::ABtBiasGelu,
            (GemmLayout::Nn, GemmEpilogue::None, false) => GemmOp::AB,
            (GemmLayout::Nn, GemmEpilogue::GeluBackward, false) => GemmOp::ABGeluBackward,
            (GemmLayout::Nn, GemmEpilogue::GeluBackwardRecompute, false) => GemmOp::ABGeluBackwardAndGelu,
            (GemmLayout::Tn, GemmEpilogue::Accumulate, false) => GemmOp::AtBAccumulate,
            (GemmLayout::Tn, GemmEpilogue::AccumulateBiasGrad, false) => GemmOp::AtBAccumulateColumnSums,
            (GemmLayout::Tn, GemmEpilogue::Accumulate, true) => GemmOp::AtBAccumulateF32,
            _ => return None,
        };
        let shape = GemmShape { m: gemm.m, n: gemm.n, k: gemm.k };
        let possible = gemm.precision == GemmPrecision::Bf16 && shape.is_supported(op);
        possible.then_some(Self { op, shape, operands: *operands })
    }

    /// Returns the configurations that may be the fastest, most promising first.
    pub fn configs(&self, sm_count: usize, scratch: Scratch) -> Vec<KernelConfig> {
        let configs = launch::candidate_configs(self.op, self.shape, sm_count, scratch.len);
        let stored = |TileConfig { tile, split_k }| KernelConfig {
            tile_m: tile.tile_m(),
            tile_n: tile.tile_n(),
            split_k: split_k as u32,
        };
        configs.into_iter().map(stored).collect()
    }

    /// Reports whether a configuration, which may come from a run with more memory, is possible in this one.
    pub fn supports(&self, config: KernelConfig, scratch: Scratch) -> bool {
        self.config(config).is_some_and(|config| config.scratch_len(self.op, self.shape) <= scratch.len)
    }

    fn config(&self, KernelConfig { tile_m, tile_n, split_k }: KernelConfig) -> Option<TileConfig> {
        let config = TileConfig { tile: TileShape::from_dims(tile_m, tile_n)?, split_k: split_k as usize };
        (split_k > 0 && config.is_supported(self.op, self.shape)).then_some(config)
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
        let needed = config.scratch_len(self.op, self.shape);
        ensure!(
            needed <= scratch_len,
            "{self:?} with {config:?}: expected {needed} f32 of scratch memory, found {scratch_len}"
        );
        let GemmOperands { a, b, out, residual, bias, pre_gelu, gelu } = self.operands;
        // The forward pass writes pre_gelu; the backward pass reads it.
        let (aux, second) =
            if self.op == GemmOp::ABtBiasGelu { (None, pre_gelu) } else { (pre_gelu.or(residual), gelu) };
        let mut map = |address: u64, Map { extents, tile }: Map| {
            executor.tensor_map(Global::from_address(address), Extents::Matrix(extents), tile)
        };
        let [a_map, b_map, out_map] = launch::maps(self.op, self.shape, config.tile);
        let (a, b, out_tensor) = (map(a, a_map)?, map(b, b_map)?, map(out, out_map)?);
        let (aux, second) = (map(aux.unwrap_or(out), out_map)?, map(second.unwrap_or(out), out_map)?);
        let (Some(a), Some(b), Some(out_tensor), Some(aux), Some(second)) = (a, b, out_tensor, aux, second) else {
            return Ok(Vec::new());
        };
        let bias = GlobalMut::from_address(bias.unwrap_or_default());
        let operands =
            KernelOperands { a, b, out: out_tensor, aux, second, bias, out_address: out, scratch, scratch_len };
        Ok(launch::launches(self.op, self.shape, config, operands, executor.sm_count()))
    }
}
