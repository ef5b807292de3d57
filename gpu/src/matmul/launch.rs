//! Host side: the kernels, tensor maps and tile configurations for a GEMM.

use super::batched::{matmul_batched, matmul_symmetric};
use super::column_sums::partial_rows;
pub use super::epilogue::Scale;
use super::epilogue::{
    Accumulate, Bias, BiasGelu, BiasResidual, Epilogue, GeluBackward, GeluBackwardAndGelu, Plain, ReluSquared,
    ReluSquaredBackward, ReluSquaredBackwardAndReluSquared, Symmetric, SymmetricScaled,
};
use super::kernel::{matmul_accumulate_column_sums, matmul_accumulate_f32, matmul_split_k, matmul_wgmma};
use super::mainloop::{A_BOX_ROWS, AB, ABt, AtB, OperandLayout};
use super::shared::SharedStorage;
use super::split_k::{matmul_split_k_reduce, reduce_grid};
use super::swiglu::{COLUMNS, matmul_swiglu_backward, matmul_swiglu_forward};
use super::tile::{
    Cooperative128x256, Cooperative128x320, Cooperative256x128, Cooperative256x192, EPILOGUE_TILE, Pingpong128x128,
    Pingpong128x192, TILE_K, Tile,
};
use crate::bias::bias_backward_reduce;
use crate::column_sum;
use crate::launch::{Extents, KernelLaunch};
use cuda_std::hopper::TensorMap;
use cuda_std::launch::Launch;
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, bf16};

/// A GEMM with its operand layouts and epilogue. All matrices are row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GemmOp {
    /// out (M, N) = a (M, K) · b (N, K)ᵀ
    ABt,
    /// out = a · bᵀ + bias (N)
    ABtBias,
    /// out = aux (M, N) + a · bᵀ + bias
    ABtBiasResidual,
    /// second (M, N) = a · bᵀ + bias, out = gelu(second)
    ABtBiasGelu,
    /// out = aux (M, N) + a · bᵀ
    ABtResidual,
    /// second (M, N) = a · bᵀ, out = max(second, 0)²
    ABtReluSquared,
    /// second (M, N) = a · bᵀ, out (M, N / 2) = up · silu(gate). The first N / 2 columns of second are up, the others gate.
    ABtSwiGlu,
    /// out (M, N) = a (M, K) · b (K, N)
    AB,
    /// out = a · b ⊙ gelu'(aux (M, N))
    ABGeluBackward,
    /// out = a · b ⊙ gelu'(aux (M, N)), second (M, N) = gelu(aux)
    ABGeluBackwardAndGelu,
    /// out = a · b ⊙ 2 max(aux (M, N), 0)
    ABReluSquaredBackward,
    /// out = a · b ⊙ 2 max(aux (M, N), 0), second (M, N) = max(aux, 0)²
    ABReluSquaredBackwardAndReluSquared,
    /// out (M, 2 N) = the gradient of aux (M, 2 N), where a · b is the gradient of up · silu(gate). The first N columns of
    /// aux are up, the others gate.
    ABSwiGluBackward,
    /// out of `ABSwiGluBackward`, second (M, N) = up · silu(gate)
    ABSwiGluBackwardAndSwiGlu,
    /// out (M, N) += a (K, M)ᵀ · b (K, N)
    AtBAccumulate,
    /// out (M, N) += a (K, M)ᵀ · b (K, N), bias (M) += column sums of a
    AtBAccumulateColumnSums,
    /// out (M, N) f32 += a (K, M)ᵀ · b (K, N)
    AtBAccumulateF32,
    /// out (M, N) = beta · aux (M, N) + alpha · a (M, K) · b (K, N), for each matrix of a batch
    ABScaled,
    /// out (N, N) = a (N, K) · b (N, K)ᵀ, where b is a, for each matrix of a batch
    ABtSymmetric,
    /// out (N, N) = beta · aux (N, N) + alpha · a (N, K) · b (N, K)ᵀ, where b is a and aux is symmetric, for each matrix of a
    /// batch
    ABtSymmetricScaled,
    /// out (N, N) = a (K, N)ᵀ · b (K, N), where b is a, for each matrix of a batch
    AtBSymmetric,
}

impl GemmOp {
    /// Returns true for a weight gradient: a is stored as (K, M), and K may be split.
    fn is_weight_gradient(self) -> bool {
        matches!(self, Self::AtBAccumulate | Self::AtBAccumulateColumnSums | Self::AtBAccumulateF32)
    }

    /// Returns true if a is stored as (K, M).
    fn a_m_major(self) -> bool {
        self.is_weight_gradient() || self == Self::AtBSymmetric
    }

    /// Returns true if the operands are batches of matrices.
    pub fn is_batched(self) -> bool {
        self == Self::ABScaled || self.is_symmetric()
    }

    /// Returns true if the output is symmetric. The kernels compute only its tiles on and above the diagonal.
    pub fn is_symmetric(self) -> bool {
        matches!(self, Self::ABtSymmetric | Self::ABtSymmetricScaled | Self::AtBSymmetric)
    }

    /// Returns true if b is stored as (K, N).
    fn b_n_major(self) -> bool {
        match self {
            Self::ABt
            | Self::ABtBias
            | Self::ABtBiasResidual
            | Self::ABtBiasGelu
            | Self::ABtResidual
            | Self::ABtReluSquared
            | Self::ABtSwiGlu
            | Self::ABtSymmetric
            | Self::ABtSymmetricScaled => false,
            Self::AB
            | Self::ABGeluBackward
            | Self::ABGeluBackwardAndGelu
            | Self::ABReluSquaredBackward
            | Self::ABReluSquaredBackwardAndReluSquared
            | Self::ABSwiGluBackward
            | Self::ABSwiGluBackwardAndSwiGlu
            | Self::AtBAccumulate
            | Self::AtBAccumulateColumnSums
            | Self::AtBAccumulateF32
            | Self::ABScaled
            | Self::AtBSymmetric => true,
        }
    }

    /// Returns true if the epilogue is long enough, or needs enough buffers, that only ping-pong kernels are instantiated.
    fn needs_pingpong(self) -> bool {
        matches!(
            self,
            Self::ABtBiasGelu
                | Self::ABGeluBackward
                | Self::ABGeluBackwardAndGelu
                | Self::ABtReluSquared
                | Self::ABReluSquaredBackwardAndReluSquared
                | Self::ABtSwiGlu
                | Self::ABSwiGluBackward
                | Self::ABSwiGluBackwardAndSwiGlu
                | Self::ABtSymmetric
                | Self::ABtSymmetricScaled
                | Self::AtBSymmetric
        )
    }
}

/// Rows and columns of an output tile. Large tiles load less per FLOP, small tiles leave fewer SMs idle at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TileShape {
    /// 128 x 128, ping-pong
    T128x128,
    /// 128 x 192, ping-pong
    T128x192,
    /// 256 x 128, cooperative
    T256x128,
    /// 256 x 192, cooperative
    T256x192,
    /// 128 x 256, cooperative
    T128x256,
    /// 128 x 320, cooperative
    T128x320,
}

/// Evaluates `$call` with `$tile` as the [`Tile`] of a [`TileShape`].
macro_rules! with_tile {
    ($shape:expr, $tile:ident => $call:expr) => {
        match $shape {
            TileShape::T128x128 => {
                type $tile = Pingpong128x128;
                $call
            }
            TileShape::T128x192 => {
                type $tile = Pingpong128x192;
                $call
            }
            TileShape::T256x128 => {
                type $tile = Cooperative256x128;
                $call
            }
            TileShape::T256x192 => {
                type $tile = Cooperative256x192;
                $call
            }
            TileShape::T128x256 => {
                type $tile = Cooperative128x256;
                $call
            }
            TileShape::T128x320 => {
                type $tile = Cooperative128x320;
                $call
            }
        }
    };
}

/// Evaluates `$call` with the type of the ping-pong tile of a shape as `$tile`.
macro_rules! with_pingpong_tile {
    ($shape:expr, $tile:ident => $call:expr) => {
        if $shape.tile_n() == Pingpong128x128::TILE_N {
            type $tile = Pingpong128x128;
            $call
        } else {
            type $tile = Pingpong128x192;
            $call
        }
    };
}

impl TileShape {
    /// All tile shapes.
    pub const ALL: [Self; 6] =
        [Self::T128x128, Self::T128x192, Self::T256x128, Self::T256x192, Self::T128x256, Self::T128x320];

    /// Returns the tile shape with these dimensions, if there is one.
    pub fn from_dims(tile_m: u32, tile_n: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|shape| shape.dims() == [tile_m, tile_n])
    }

    /// Returns the rows of a tile.
    pub fn tile_m(self) -> u32 {
        with_tile!(self, T => T::TILE_M)
    }

    /// Returns the columns of a tile.
    pub fn tile_n(self) -> u32 {
        with_tile!(self, T => T::TILE_N)
    }

    fn dims(self) -> [u32; 2] {
        [self.tile_m(), self.tile_n()]
    }

    /// Returns the number of tiles of an output.
    pub(super) fn tiles(self, shape: GemmShape) -> usize {
        shape.m.div_ceil(self.tile_m() as usize) * shape.n.div_ceil(self.tile_n() as usize)
    }

    /// Returns the number of tiles that the kernels compute for a symmetric output (n, n).
    pub fn symmetric_tiles(self, n: usize) -> usize {
        let (tile_m, tile_n) = (self.tile_m() as usize, self.tile_n() as usize);
        (0..n).step_by(tile_m).map(|row| n.div_ceil(tile_n) - row / tile_n).sum()
    }
}

/// The dimensions of a GEMM: out (M, N), summed over K.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmShape {
    /// Rows of out.
    pub m: usize,
    /// Columns of out.
    pub n: usize,
    /// The dimension that is summed over.
    pub k: usize,
}

impl GemmShape {
    /// Returns true if the kernels support this shape.
    ///
    /// TMA requires rows of multiples of 16 bytes. Dimensions and tile indices are 32-bit integers.
    pub fn is_supported(self, op: GemmOp) -> bool {
        let fits = |extent: usize| (1..1 << 31).contains(&extent);
        let row_of_a = if op.a_m_major() { self.m } else { self.k };
        let columns = if op == GemmOp::ABtSwiGlu { 2 * 8 } else { 8 };
        let aligned = self.n.is_multiple_of(columns) && row_of_a.is_multiple_of(8);
        let square = !op.is_symmetric() || self.m == self.n;
        aligned && square && fits(self.m) && fits(self.n) && fits(self.k) && fits(TileShape::T128x128.tiles(self))
    }
}

/// The matrices of a batched GEMM: their number, and the elements from the start of a matrix to that of the next. out and aux
/// have the same stride. Strides are multiples of 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Number of matrices.
    pub count: usize,
    /// Stride of a.
    pub a: usize,
    /// Stride of b.
    pub b: usize,
    /// Stride of out and aux.
    pub out: usize,
}

impl Batch {
    /// The batch of a GEMM that is not batched.
    pub const ONE: Self = Self { count: 1, a: 0, b: 0, out: 0 };
}

/// The dimensions of a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Map {
    /// Extents of the tensor.
    pub extents: Extents,
    /// Rows and columns of the box that a TMA instruction copies.
    pub tile: (u32, u32),
}

/// The tensor maps of a GEMM. Those of operands that the [`GemmOp`] does not use are arbitrary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Maps {
    /// Map of a.
    pub a: Map,
    /// Map of b.
    pub b: Map,
    /// Map of out.
    pub out: Map,
    /// Map of aux.
    pub aux: Map,
    /// Map of second.
    pub second: Map,
}

/// Returns the tensor maps of a GEMM. `batch` is used by batched operations only.
pub fn maps(op: GemmOp, shape: GemmShape, batch: Batch, tile: TileShape) -> Maps {
    let GemmShape { m, n, k } = shape;
    if op.is_batched() {
        return batched_maps(op, shape, batch, tile);
    }
    let map = |rows, columns, box_rows| Map { extents: Extents::Matrix([rows, columns]), tile: (box_rows, TILE_K) };
    let a = if op.a_m_major() { map(k, m, TILE_K) } else { map(m, k, A_BOX_ROWS) };
    let b = match op {
        GemmOp::ABtSwiGlu => Map { extents: Extents::Matrices([2, n / 2, k]), tile: (tile.tile_n() / 2, TILE_K) },
        _ if op.b_n_major() => map(k, n, TILE_K),
        _ => map(n, k, with_tile!(tile, T => T::B_BOX_ROWS)),
    };
    let narrow = |extents| Map { extents, tile: (EPILOGUE_TILE, COLUMNS) };
    let activation = |f| narrow(Extents::Matrix([m, f]));
    let preactivation = |f| narrow(Extents::Interleaved([m, 2, f]));
    let (out, aux, second) = match op {
        GemmOp::ABtSwiGlu => (activation(n / 2), activation(n / 2), preactivation(n / 2)),
        GemmOp::ABSwiGluBackward | GemmOp::ABSwiGluBackwardAndSwiGlu => {
            (preactivation(n), preactivation(n), activation(n))
        }
        _ => [map(m, n, EPILOGUE_TILE); 3].into(),
    };
    Maps { a, b, out, aux, second }
}

fn batched_maps(op: GemmOp, GemmShape { m, n, k }: GemmShape, batch: Batch, tile: TileShape) -> Maps {
    let map = |rows, columns, stride, box_rows| Map {
        extents: Extents::Batch([batch.count, rows, columns], stride),
        tile: (box_rows, TILE_K),
    };
    let a = if op.a_m_major() { map(k, m, batch.a, TILE_K) } else { map(m, k, batch.a, A_BOX_ROWS) };
    let b = if op.b_n_major() {
        map(k, n, batch.b, TILE_K)
    } else {
        map(n, k, batch.b, with_tile!(tile, T => T::B_BOX_ROWS))
    };
    let out = map(m, n, batch.out, EPILOGUE_TILE);
    Maps { a, b, out, aux: out, second: out }
}

/// The operands of a GEMM. Operands that the [`GemmOp`] does not use may be arbitrary.
#[derive(Clone, Copy)]
pub struct KernelOperands {
    /// Tensor map of a, as described by [`maps`].
    pub a: Global<TensorMap>,
    /// Tensor map of b.
    pub b: Global<TensorMap>,
    /// Tensor map of out.
    pub out: Global<TensorMap>,
    /// Tensor map of aux.
    pub aux: Global<TensorMap>,
    /// Tensor map of second.
    pub second: Global<TensorMap>,
    /// The bias, or its gradient.
    pub bias: GlobalMut<bf16>,
    /// Device address of out.
    pub out_address: u64,
    /// Scratch memory for partial sums.
    pub scratch: GlobalMut<f32>,
    /// Elements of `scratch`.
    pub scratch_len: usize,
    /// The factors of a scaled operation.
    pub scale: Scale,
    /// The number of matrices of a batched operation.
    pub count: usize,
}

/// A tile configuration: how a GEMM is divided among thread blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileConfig {
    /// The shape of an output tile.
    pub tile: TileShape,
    /// Slices of K that are computed independently. Greater than 1 for weight gradients only.
    pub split_k: usize,
}

impl TileConfig {
    /// Returns the f32 elements of scratch memory for partial sums of slices of K, and for partial column sums.
    pub fn scratch_len(self, op: GemmOp, shape: GemmShape) -> usize {
        self.partials_len(shape) + self.column_sum_rows(op, shape) * shape.m
    }

    /// Returns the elements of the partial sums of slices of K.
    fn partials_len(self, shape: GemmShape) -> usize {
        let Self { tile, split_k } = self;
        if split_k > 1 { split_k * tile.tiles(shape) * (tile.tile_m() * tile.tile_n()) as usize } else { 0 }
    }

    /// Returns the rows of partial column sums.
    fn column_sum_rows(self, op: GemmOp, shape: GemmShape) -> usize {
        let rows = with_tile!(self.tile, T => partial_rows::<T>(shape.n as u32)) as usize;
        if op == GemmOp::AtBAccumulateColumnSums { self.split_k * rows } else { 0 }
    }

    /// Returns true if the kernels are instantiated for this configuration and no slice of K is empty.
    pub fn is_supported(self, op: GemmOp, shape: GemmShape) -> bool {
        let Self { tile, split_k } = self;
        let steps = shape.k.div_ceil(TILE_K as usize);
        let cooperative = with_tile!(tile, T => T::COOPERATIVE);
        // Tiles of 256 rows divide the column sums between neighbouring tiles: there must be more than one in a row of
        // tiles.
        let large = tile == TileShape::T256x128 || tile == TileShape::T256x192;
        let no_neighbour = op == GemmOp::AtBAccumulateColumnSums && large && shape.n <= tile.tile_n() as usize;
        (split_k == 1 || op.is_weight_gradient())
            && (split_k - 1) * steps.div_ceil(split_k) < steps
            && !no_neighbour
            && !(cooperative && op.needs_pingpong())
    }

    /// Estimates the run time, in tenths of the time that an SM takes for a step of 128 x 64 of the mainloop.
    ///
    /// An epilogue costs four steps. A partial tile costs a tenth of a step to write and read, spread over all SMs.
    /// Launching the reduction costs ten steps.
    pub(super) fn cost(self, shape: GemmShape, sm_count: usize) -> usize {
        let Self { tile, split_k } = self;
        let work_tiles = tile.tiles(shape) * split_k;
        let steps = shape.k.div_ceil(TILE_K as usize).div_ceil(split_k);
        let reduction = if split_k == 1 { 0 } else { work_tiles + 100 };
        let step_cost = (tile.tile_m() * tile.tile_n() / (A_BOX_ROWS * EPILOGUE_TILE)) as usize;
        (work_tiles.div_ceil(sm_count) * (steps + 4) * 10 + reduction) * step_cost
    }
}

const MAX_SPLIT_K: usize = 32;
/// Values of split-K to time for each tile shape.
const SPLIT_K_CANDIDATES: usize = 2;
/// The largest number of configurations that [`candidate_configs`] returns.
pub const MAX_CANDIDATE_CONFIGS: usize = TileShape::ALL.len() * SPLIT_K_CANDIDATES;

/// Returns the supported configurations that may be the fastest, in order of estimated run time.
///
/// Configurations with split-K are restricted to those whose scratch fits in `scratch_len` elements. The result is not
/// empty.
pub fn candidate_configs(op: GemmOp, shape: GemmShape, sm_count: usize, scratch_len: usize) -> Vec<TileConfig> {
    let cost = |config: &TileConfig| config.cost(shape, sm_count);
    let with_tile_shape = |tile| {
        let configs = (1..=MAX_SPLIT_K).map(move |split_k| TileConfig { tile, split_k });
        let fits = |config: &TileConfig| config.split_k == 1 || config.scratch_len(op, shape) <= scratch_len;
        let mut configs: Vec<_> = configs.filter(|config| config.is_supported(op, shape) && fits(config)).collect();
        configs.sort_by_key(cost);
        configs.truncate(SPLIT_K_CANDIDATES);
        configs
    };
    let mut configs: Vec<_> = TileShape::ALL.into_iter().flat_map(with_tile_shape).collect();
    configs.sort_by_key(cost);
    configs
}

/// Returns the kernel launches of a GEMM, in order. The shape and the configuration must be supported.
///
/// # Panics
/// Panics if `operands.scratch_len` is less than [`TileConfig::scratch_len`].
pub fn launches(
    op: GemmOp,
    shape: GemmShape,
    config: TileConfig,
    operands: KernelOperands,
    sm_count: usize,
) -> Vec<KernelLaunch> {
    let needed = config.scratch_len(op, shape);
    assert!(
        needed <= operands.scratch_len,
        "{op:?} of {shape:?} with {config:?}: expected scratch of {needed} elements, found {}",
        operands.scratch_len
    );
    let TileConfig { tile, split_k } = config;
    let KernelOperands { bias, out_address, scratch, .. } = operands;
    let (m, n) = (shape.m as u32, shape.n as u32);
    let column_sums = scratch.skip(config.partials_len(shape));
    let mut kernels = vec![KernelLaunch {
        launch: gemm(op, shape, config, operands, column_sums),
        grid: [sm_count as u32, 1, 1],
        shared_bytes: SharedStorage::bytes(),
    }];
    if split_k > 1 {
        let ([tile_m, tile_n], split_k) = (tile.dims(), split_k as u32);
        let partials = scratch.reader();
        let launch = if op == GemmOp::AtBAccumulateF32 {
            let out = GlobalMut::from_address(out_address);
            matmul_split_k_reduce::<f32>(out, partials, tile_m, tile_n, m, n, split_k)
        } else {
            let out = GlobalMut::from_address(out_address);
            matmul_split_k_reduce::<bf16>(out, partials, tile_m, tile_n, m, n, split_k)
        };
        let grid = reduce_grid([tile_m, tile_n], tile.tiles(shape));
        kernels.push(KernelLaunch { launch, grid, shared_bytes: 0 });
    }
    if op == GemmOp::AtBAccumulateColumnSums {
        let rows = config.column_sum_rows(op, shape) as u32;
        let mut layout = Layout::new();
        column_sum::shared(&mut layout);
        kernels.push(KernelLaunch {
            launch: bias_backward_reduce::<bf16>(bias, column_sums.reader(), rows, m),
            grid: [column_sum::grid(shape.m), 1, 1],
            shared_bytes: layout.bytes(),
        });
    }
    kernels
}

/// Returns the launch of the GEMM kernel itself.
fn gemm(
    op: GemmOp,
    shape: GemmShape,
    TileConfig { tile, split_k }: TileConfig,
    operands: KernelOperands,
    column_sums: GlobalMut<f32>,
) -> Launch {
    let KernelOperands { a, b, out, aux, second, out_address, scratch, scale: Scale { alpha, beta }, count, .. } =
        operands;
    let (m, n, k, count) = (shape.m as u32, shape.n as u32, shape.k as u32, count as u32);
    match op {
        GemmOp::ABt => any_tile::<ABt, Plain>(shape, tile, operands),
        GemmOp::ABtBias => any_tile::<ABt, Bias>(shape, tile, operands),
        GemmOp::ABtBiasResidual => any_tile::<ABt, BiasResidual>(shape, tile, operands),
        GemmOp::ABtBiasGelu => pingpong::<ABt, BiasGelu>(shape, tile, operands),
        GemmOp::ABtResidual => any_tile::<ABt, Accumulate>(shape, tile, operands),
        GemmOp::ABtReluSquared => pingpong::<ABt, ReluSquared>(shape, tile, operands),
        GemmOp::ABtSwiGlu => {
            with_pingpong_tile!(tile, T => matmul_swiglu_forward::<T>(a, b, out, second, m, n / 2, k))
        }
        GemmOp::AB => any_tile::<AB, Plain>(shape, tile, operands),
        GemmOp::ABGeluBackward => pingpong::<AB, GeluBackward>(shape, tile, operands),
        GemmOp::ABGeluBackwardAndGelu => pingpong::<AB, GeluBackwardAndGelu>(shape, tile, operands),
        GemmOp::ABReluSquaredBackward => any_tile::<AB, ReluSquaredBackward>(shape, tile, operands),
        GemmOp::ABReluSquaredBackwardAndReluSquared => {
            pingpong::<AB, ReluSquaredBackwardAndReluSquared>(shape, tile, operands)
        }
        GemmOp::ABSwiGluBackward => {
            with_pingpong_tile!(tile, T => matmul_swiglu_backward::<T, false>(a, b, out, aux, second, m, n, k))
        }
        GemmOp::ABSwiGluBackwardAndSwiGlu => {
            with_pingpong_tile!(tile, T => matmul_swiglu_backward::<T, true>(a, b, out, aux, second, m, n, k))
        }
        GemmOp::AtBAccumulateColumnSums if split_k > 1 => {
            with_tile!(tile, T => matmul_split_k::<T, true>(a, b, scratch, column_sums, m, n, k, split_k as u32))
        }
        _ if split_k > 1 => {
            with_tile!(tile, T => matmul_split_k::<T, false>(a, b, scratch, column_sums, m, n, k, split_k as u32))
        }
        GemmOp::AtBAccumulate => any_tile::<AtB, Accumulate>(shape, tile, operands),
        GemmOp::AtBAccumulateColumnSums => {
            with_tile!(tile, T => matmul_accumulate_column_sums::<T>(a, b, out, column_sums, m, n, k))
        }
        GemmOp::AtBAccumulateF32 => {
            with_tile!(tile, T => matmul_accumulate_f32::<T>(a, b, GlobalMut::from_address(out_address), m, n, k))
        }
        GemmOp::ABScaled => with_tile!(tile, T => matmul_batched::<T>(a, b, out, aux, alpha, beta, m, n, k, count)),
        GemmOp::ABtSymmetric => symmetric::<ABt, Symmetric>(shape, tile, operands),
        GemmOp::ABtSymmetricScaled => symmetric::<ABt, SymmetricScaled>(shape, tile, operands),
        GemmOp::AtBSymmetric => symmetric::<AtB, Symmetric>(shape, tile, operands),
    }
}

fn symmetric<L: OperandLayout, E: Epilogue>(shape: GemmShape, tile: TileShape, operands: KernelOperands) -> Launch {
    let KernelOperands { a, b, out, aux, scale: Scale { alpha, beta }, count, .. } = operands;
    let (n, k, count) = (shape.n as u32, shape.k as u32, count as u32);
    with_pingpong_tile!(tile, T => matmul_symmetric::<L, E, T>(a, b, out, aux, alpha, beta, n, k, count))
}

fn any_tile<L: OperandLayout, E: Epilogue>(shape: GemmShape, tile: TileShape, operands: KernelOperands) -> Launch {
    match tile {
        TileShape::T256x128 => matmul::<L, E, Cooperative256x128>(shape, operands),
        TileShape::T256x192 => matmul::<L, E, Cooperative256x192>(shape, operands),
        TileShape::T128x256 => matmul::<L, E, Cooperative128x256>(shape, operands),
        TileShape::T128x320 => matmul::<L, E, Cooperative128x320>(shape, operands),
        _ => pingpong::<L, E>(shape, tile, operands),
    }
}

fn pingpong<L: OperandLayout, E: Epilogue>(shape: GemmShape, tile: TileShape, operands: KernelOperands) -> Launch {
    with_pingpong_tile!(tile, T => matmul::<L, E, T>(shape, operands))
}

fn matmul<L: OperandLayout, E: Epilogue, T: Tile>(shape: GemmShape, operands: KernelOperands) -> Launch {
    let KernelOperands { a, b, out, aux, second, bias, .. } = operands;
    matmul_wgmma::<L, E, T>(a, b, out, aux, second, bias.reader(), shape.m as u32, shape.n as u32, shape.k as u32)
}
