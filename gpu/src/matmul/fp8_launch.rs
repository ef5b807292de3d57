//! Host side: the kernels, tensor maps and tile configurations for a GEMM with FP8 operands.

use super::epilogue::{Accumulate, Bias, BiasGelu, BiasResidual, Epilogue, GeluBackward, Plain};
use super::fp8::{
    E4m3ByE4m3, E4m3ByE4m3Exact, E5m2ByE4m3, E5m2ByE4m3Exact, matmul_fp8, matmul_fp8_accumulate_f32,
    matmul_fp8_split_k, matmul_fp8_to_fp8,
};
use super::fp8_epilogue::QuantizedEpilogue;
use super::launch::{GemmShape, Map, Maps, TileConfig, TileShape};
use super::mainloop::{A_BOX_ROWS, OperandLayout};
use super::shared::SharedStorage;
use super::split_k::{matmul_split_k_reduce, reduce_grid};
use super::tile::{
    Cooperative128x128, Cooperative128x192, Cooperative128x256, Cooperative128x320, Cooperative256x128,
    Cooperative256x192, EPILOGUE_TILE, Pingpong128x128, Pingpong128x192, TILE_K, TILE_K_FP8, Tile,
};
use crate::launch::{Extents, KernelLaunch};
use cuda_std::fp8::Fp8Format;
use cuda_std::hopper::TensorMap;
use cuda_std::launch::Launch;
use cuda_std::{E4m3, E5m2, Fp8, Global, GlobalMut, bf16};

/// The epilogue of a GEMM out (M, N) = epilogue(s · a (M, K) · b (N, K)ᵀ), where s is the product of both scales. All
/// matrices but a and b are bf16, unless the variant says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fp8Epilogue {
    /// out = s · a · bᵀ
    Plain,
    /// out = s · a · bᵀ + bias (N)
    Bias,
    /// out = aux (M, N) + s · a · bᵀ + bias
    BiasResidual,
    /// out = aux (M, N) + s · a · bᵀ. aux may be out: a weight gradient.
    Residual,
    /// second (M, N) = s · a · bᵀ + bias, out = gelu(second)
    BiasGelu,
    /// out = s · a · bᵀ ⊙ gelu'(aux (M, N))
    GeluBackward,
    /// out of `BiasGelu` in E4M3
    BiasGeluFp8,
    /// out of `GeluBackward` in the format of a
    GeluBackwardFp8,
    /// out (M, N) f32 += s · a · bᵀ
    AccumulateF32,
}

impl Fp8Epilogue {
    /// Returns true if the kernels can split K: weight gradients.
    fn is_weight_gradient(self) -> bool {
        matches!(self, Self::Residual | Self::AccumulateF32)
    }

    /// Returns true if out is FP8.
    pub fn is_fp8(self) -> bool {
        matches!(self, Self::BiasGeluFp8 | Self::GeluBackwardFp8)
    }

    /// Returns true if the epilogue needs the buffers of a ping-pong tile.
    fn needs_pingpong(self) -> bool {
        matches!(self, Self::BiasGelu | Self::GeluBackward) || self.is_fp8()
    }
}

/// A GEMM with FP8 operands. b is E4M3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fp8Gemm {
    /// The format of a. E5M2 is for gradients: kernels with a bias do not exist.
    pub a: Fp8Format,
    /// The epilogue.
    pub epilogue: Fp8Epilogue,
    /// Whether sums over 128 columns of K are added in f32.
    pub exact: bool,
}

/// The operands of a GEMM. Those that the epilogue does not use may be arbitrary.
#[derive(Clone, Copy)]
pub struct Fp8Operands {
    /// Tensor map of a, as described by [`Fp8Gemm::maps`].
    pub a: Global<TensorMap>,
    /// Tensor map of b.
    pub b: Global<TensorMap>,
    /// Tensor map of out.
    pub out: Global<TensorMap>,
    /// Tensor map of aux.
    pub aux: Global<TensorMap>,
    /// Tensor map of second.
    pub second: Global<TensorMap>,
    /// The bias.
    pub bias: Global<bf16>,
    /// The factor that restores a from its FP8 values.
    pub scale_a: Global<f32>,
    /// The factor that restores b from its FP8 values.
    pub scale_b: Global<f32>,
    /// The factor that restores an FP8 out.
    pub scale_out: Global<f32>,
    /// Receives the largest magnitude of an FP8 out, before it is divided by the scale, as f32 bits.
    pub amax: GlobalMut<u32>,
    /// Device address of out, which is also aux if K is split.
    pub out_address: u64,
    /// Scratch memory for partial sums, with at least [`Fp8Gemm::scratch_len`] elements.
    pub scratch: GlobalMut<f32>,
}

/// Evaluates `$call` with the tile type of a shape in fast or exact mode as `$tile`.
macro_rules! with_tile {
    ($shape:expr, $exact:expr, $tile:ident => $call:expr) => {
        match ($shape, $exact) {
            (TileShape::T128x128, false) => with_tile!(Pingpong128x128, $tile => $call),
            (TileShape::T128x192, false) => with_tile!(Pingpong128x192, $tile => $call),
            (TileShape::T256x128, _) => with_tile!(Cooperative256x128, $tile => $call),
            (TileShape::T256x192, _) => with_tile!(Cooperative256x192, $tile => $call),
            (TileShape::T128x256, _) => with_tile!(Cooperative128x256, $tile => $call),
            (TileShape::T128x320, _) => with_tile!(Cooperative128x320, $tile => $call),
            (TileShape::T128x128, true) => with_tile!(Cooperative128x128, $tile => $call),
            (TileShape::T128x192, true) => with_tile!(Cooperative128x192, $tile => $call),
        }
    };
    ($type:ident, $tile:ident => $call:expr) => {{
        type $tile = $type;
        $call
    }};
}

/// Values of split-K to consider for each tile shape.
const SPLIT_K_CANDIDATES: usize = 2;
const MAX_SPLIT_K: usize = 32;

impl Fp8Gemm {
    /// Returns true if kernels for this shape exist. TMA requires rows of multiples of 16 bytes.
    pub fn is_supported(self, shape: GemmShape) -> bool {
        use Fp8Epilogue::{Bias, BiasGelu, BiasGeluFp8, BiasResidual};
        let fits = |extent: usize| (1..1 << 31).contains(&extent);
        let has_bias = matches!(self.epilogue, Bias | BiasResidual | BiasGelu | BiasGeluFp8);
        let columns = if self.epilogue.is_fp8() { 16 } else { 8 };
        let aligned = shape.n.is_multiple_of(columns) && shape.k.is_multiple_of(16);
        aligned
            && !(has_bias && self.a == Fp8Format::E5m2)
            && fits(shape.m)
            && fits(shape.n)
            && fits(shape.k)
            && fits(TileShape::T128x128.tiles(shape))
    }

    /// Returns true if the kernels are instantiated for this configuration and no slice of K is empty.
    pub fn supports(self, shape: GemmShape, TileConfig { tile, split_k }: TileConfig) -> bool {
        let steps = shape.k.div_ceil(TILE_K_FP8 as usize);
        let small = matches!(tile, TileShape::T128x128 | TileShape::T128x192);
        (split_k == 1 || self.epilogue.is_weight_gradient())
            && split_k >= 1
            && (split_k - 1) * steps.div_ceil(split_k) < steps
            && (small || !(self.exact || self.epilogue.needs_pingpong()))
    }

    /// Returns the f32 elements of scratch memory for partial sums of slices of K.
    pub fn scratch_len(self, shape: GemmShape, TileConfig { tile, split_k }: TileConfig) -> usize {
        if split_k > 1 { split_k * tile.tiles(shape) * (tile.tile_m() * tile.tile_n()) as usize } else { 0 }
    }

    /// Returns the supported configurations that may be the fastest, in order of estimated run time, with at most
    /// `scratch_len` elements of scratch memory.
    pub fn candidate_configs(self, shape: GemmShape, sm_count: usize, scratch_len: usize) -> Vec<TileConfig> {
        // A step of 128 columns takes as long as one of 64 columns in bf16.
        let steps = GemmShape { k: shape.k.div_ceil((TILE_K_FP8 / TILE_K) as usize), ..shape };
        let cost = |config: &TileConfig| config.cost(steps, sm_count);
        let of_tile = |tile| {
            let configs = (1..=MAX_SPLIT_K).map(|split_k| TileConfig { tile, split_k });
            let fits =
                |config: &TileConfig| self.supports(shape, *config) && self.scratch_len(shape, *config) <= scratch_len;
            let mut configs: Vec<_> = configs.filter(fits).collect();
            configs.sort_by_key(cost);
            configs.truncate(SPLIT_K_CANDIDATES);
            configs
        };
        let mut configs: Vec<_> = TileShape::ALL.into_iter().flat_map(of_tile).collect();
        configs.sort_by_key(cost);
        configs
    }

    /// Returns the tensor maps: a, b and an FP8 out have elements of one byte, the others bf16.
    pub fn maps(self, GemmShape { m, n, k }: GemmShape, tile: TileShape) -> Maps {
        let map = |rows, columns, tile| Map { extents: Extents::Matrix([rows, columns]), tile };
        let b_rows = with_tile!(tile, self.exact, T => T::B_BOX_ROWS);
        let out = map(m, n, (EPILOGUE_TILE, EPILOGUE_TILE));
        let (a, b) = (map(m, k, (A_BOX_ROWS, TILE_K_FP8)), map(n, k, (b_rows, TILE_K_FP8)));
        Maps { a, b, out, aux: out, second: out }
    }

    /// Returns the kernel launches, in order. The shape and the configuration must be supported.
    pub fn launches(
        self,
        shape: GemmShape,
        config: TileConfig,
        operands: Fp8Operands,
        sm_count: usize,
    ) -> Vec<KernelLaunch> {
        let launch = match (self.a, self.exact) {
            (Fp8Format::E4m3, false) => self.gemm::<E4m3ByE4m3>(shape, config, operands),
            (Fp8Format::E4m3, true) => self.gemm::<E4m3ByE4m3Exact>(shape, config, operands),
            (Fp8Format::E5m2, false) => self.gemm::<E5m2ByE4m3>(shape, config, operands),
            (Fp8Format::E5m2, true) => self.gemm::<E5m2ByE4m3Exact>(shape, config, operands),
        };
        let mut kernels =
            vec![KernelLaunch { launch, grid: [sm_count as u32, 1, 1], shared_bytes: SharedStorage::bytes() }];
        let TileConfig { tile, split_k } = config;
        if split_k > 1 {
            let (tile_m, tile_n) = (tile.tile_m(), tile.tile_n());
            let (m, n, split_k) = (shape.m as u32, shape.n as u32, split_k as u32);
            let (address, partials) = (operands.out_address, operands.scratch.reader());
            let launch = if self.epilogue == Fp8Epilogue::AccumulateF32 {
                matmul_split_k_reduce::<f32>(GlobalMut::from_address(address), partials, tile_m, tile_n, m, n, split_k)
            } else {
                matmul_split_k_reduce::<bf16>(GlobalMut::from_address(address), partials, tile_m, tile_n, m, n, split_k)
            };
            let grid = reduce_grid([tile_m, tile_n], tile.tiles(shape));
            kernels.push(KernelLaunch { launch, grid, shared_bytes: 0 });
        }
        kernels
    }

    /// Returns the launch of the GEMM kernel itself.
    fn gemm<L: OperandLayout>(self, shape: GemmShape, config: TileConfig, operands: Fp8Operands) -> Launch {
        let TileConfig { tile, split_k } = config;
        let Fp8Operands { a, b, scale_a, scale_b, scratch, .. } = operands;
        let (m, n, k) = (shape.m as u32, shape.n as u32, shape.k as u32);
        if split_k > 1 {
            let split_k = split_k as u32;
            return with_tile!(tile, self.exact, T =>
                matmul_fp8_split_k::<L, T>(a, b, scratch, scale_a, scale_b, m, n, k, split_k));
        }
        match self.epilogue {
            Fp8Epilogue::Plain => self.to_bf16::<L, Plain>(shape, tile, operands),
            Fp8Epilogue::Bias => self.to_bf16::<L, Bias>(shape, tile, operands),
            Fp8Epilogue::BiasResidual => self.to_bf16::<L, BiasResidual>(shape, tile, operands),
            Fp8Epilogue::Residual => self.to_bf16::<L, Accumulate>(shape, tile, operands),
            Fp8Epilogue::BiasGelu => self.to_bf16::<L, BiasGelu>(shape, tile, operands),
            Fp8Epilogue::GeluBackward => self.to_bf16::<L, GeluBackward>(shape, tile, operands),
            Fp8Epilogue::BiasGeluFp8 => self.to_fp8::<L, BiasGelu, E4m3>(shape, tile, operands),
            Fp8Epilogue::GeluBackwardFp8 if self.a == Fp8Format::E4m3 => {
                self.to_fp8::<L, GeluBackward, E4m3>(shape, tile, operands)
            }
            Fp8Epilogue::GeluBackwardFp8 => self.to_fp8::<L, GeluBackward, E5m2>(shape, tile, operands),
            Fp8Epilogue::AccumulateF32 => {
                let out = GlobalMut::from_address(operands.out_address);
                with_tile!(tile, self.exact, T =>
                    matmul_fp8_accumulate_f32::<L, T>(a, b, out, scale_a, scale_b, m, n, k))
            }
        }
    }

    fn to_bf16<L: OperandLayout, E: Epilogue>(
        self,
        shape: GemmShape,
        tile: TileShape,
        operands: Fp8Operands,
    ) -> Launch {
        let Fp8Operands { a, b, out, aux, second, bias, scale_a, scale_b, .. } = operands;
        let (m, n, k) = (shape.m as u32, shape.n as u32, shape.k as u32);
        with_tile!(tile, self.exact, T =>
            matmul_fp8::<L, E, T>(a, b, out, aux, second, bias, scale_a, scale_b, m, n, k))
    }
    fn to_fp8<L: OperandLayout, E: QuantizedEpilogue, O: Fp8>(
        self,
        shape: GemmShape,
        tile: TileShape,
        operands: Fp8Operands,
    ) -> Launch {
        let Fp8Operands { a, b, out, aux, second, bias, scale_a, scale_b, scale_out, amax, .. } = operands;
        let (m, n, k) = (shape.m as u32, shape.n as u32, shape.k as u32);
        with_tile!(tile, self.exact, T => matmul_fp8_to_fp8::<L, E, O, T>(
            a, b, out, aux, second, bias, scale_a, scale_b, scale_out, amax, m, n, k))
    }
}
