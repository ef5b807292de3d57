//! Host side: the kernels, tensor maps and tile configurations for a GEMM, and its text.

use super::column_sums::partial_rows;
pub use super::epilogue::ScaleFactors;
use super::gated::COLUMNS;
use super::gemm::{Batching, Bias, EXACT_COLUMNS, Gemm, GemmEpilogue, GemmLayout, GemmOutput, GemmPrecision, Pass};
use super::kernel::{Stored, matmul_exists, matmul_select};
use super::mainloop::A_BOX_ROWS;
use super::shared::SharedStorage;
use super::split_k::{matmul_split_k_reduce, reduce_grid};
pub use super::tile::TileShape;
use super::tile::{EPILOGUE_TILE, TILE_K, TILE_K_FP8};
use crate::bias::bias_backward_reduce;
use crate::column_sum;
use crate::experts::GROUP_BLOCK;
use crate::launch::{KernelLaunch, shared_bytes};
use core::fmt;
use cuda_std::fp8::Fp8Format;
use cuda_std::hopper::{Extents, TensorMap};
use cuda_std::launch::Launch;
use cuda_std::{E4m3, Global, GlobalMut, bf16};

impl TileShape {
    /// Returns the tile shape with these dimensions, if there is one.
    pub fn from_dims(tile_m: u32, tile_n: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|shape| shape.dims() == [tile_m, tile_n])
    }

    /// Returns the number of tiles of an output (m, n).
    pub(crate) fn tiles(self, m: usize, n: usize) -> usize {
        let [tile_m, tile_n] = self.dims();
        m.div_ceil(tile_m as usize) * n.div_ceil(tile_n as usize)
    }
}

/// The matrices of a batched GEMM: their number, and the elements from the start of a matrix to that of the next. out and aux
/// have the same stride. Strides are multiples of 8. In a grouped GEMM, `count` is the number of groups, and there are no strides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct StridedBatch {
    /// Number of matrices.
    pub count: usize,
    /// Stride of a.
    pub a: usize,
    /// Stride of b.
    pub b: usize,
    /// Stride of out and aux.
    pub out: usize,
}

/// The dimensions of a tensor map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Map {
    /// Extents of the tensor.
    pub extents: Extents,
    /// Rows and columns of the box that a TMA instruction copies.
    pub tile: (u32, u32),
    /// Whether the elements are FP8, not bf16.
    pub fp8: bool,
}

/// The tensor maps of a GEMM. Those of operands that it does not use are arbitrary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Maps {
    /// Map of a.
    pub a: Map,
    /// Map of b.
    pub b: Map,
    /// Map of out.
    pub out: Map,
    /// Map of aux: the residual, or the preactivation of a backward pass.
    pub aux: Map,
    /// Map of second: the preactivation of a forward pass, or the activation that a backward pass recomputes, unless out is in FP8.
    pub second: Map,
}

/// Returns the tensor maps of a GEMM. `batch` may be arbitrary unless it is batched.
pub fn maps(gemm: &Gemm, batch: StridedBatch, tile: TileShape) -> Maps {
    let Gemm { m, n, k, layout, epilogue, .. } = *gemm;
    let (fp8, tile_k) = (gemm.is_fp8(), tile_k(gemm));
    let sums_groups = gemm.batching == Batching::GroupedSum;
    // Whether the matrix is one for all groups of a grouped GEMM.
    let matrix = |rows, columns, stride, tile, fp8, shared| {
        let extents = match gemm.batching {
            Batching::One => Extents::Matrix([rows, columns]),
            batching if batching.is_grouped() && shared => Extents::Matrix([rows, columns]),
            batching if batching.is_grouped() => Extents::Matrices([batch.count, rows, columns]),
            _ => Extents::Batch([batch.count, rows, columns], stride),
        };
        Map { extents, tile, fp8 }
    };
    let a = match layout {
        GemmLayout::Tn => matrix(k, m, batch.a, (TILE_K, TILE_K), fp8, true),
        _ => matrix(m, k, batch.a, (A_BOX_ROWS, tile_k), fp8, true),
    };
    let forward = matches!(epilogue.activation, Some((_, Pass::Forward)));
    let b = match layout {
        GemmLayout::Nt if forward && epilogue.is_gated() => {
            let pairs = if gemm.batching == Batching::Grouped { batch.count } else { 1 };
            Map { extents: Extents::Matrices([2 * pairs, n / 2, k]), tile: (tile.dims()[1] / 2, tile_k), fp8 }
        }
        GemmLayout::Nt => matrix(n, k, batch.b, (tile.b_box_rows(), tile_k), fp8, sums_groups),
        _ => matrix(k, n, batch.b, (TILE_K, TILE_K), fp8, sums_groups),
    };
    if epilogue.is_gated() {
        let f = if forward { n / 2 } else { n };
        let narrow = |extents| Map { extents, tile: (EPILOGUE_TILE, COLUMNS), fp8: false };
        let (activation, pairs) = (narrow(Extents::Matrix([m, f])), narrow(Extents::Interleaved([m, 2, f])));
        let (out, second) = if forward { (activation, pairs) } else { (pairs, activation) };
        return Maps { a, b, out, aux: pairs, second };
    }
    let output = |fp8| matrix(m, n, batch.out, (EPILOGUE_TILE, EPILOGUE_TILE), fp8, !sums_groups);
    Maps { a, b, out: output(epilogue.output == GemmOutput::Fp8), aux: output(false), second: output(false) }
}

/// Returns the columns of K in a pipeline stage.
fn tile_k(gemm: &Gemm) -> u32 {
    if gemm.is_fp8() { TILE_K_FP8 } else { TILE_K }
}

/// Returns true if the kernels compute a GEMM, in some tile shape.
pub fn is_supported(gemm: &Gemm) -> bool {
    has_valid_shape(gemm)
        && TileShape::ALL.into_iter().any(|tile| matmul_exists(key(gemm, TileConfig { tile, split_k: 1 })))
}

/// Returns true if kernels support the sizes of a GEMM.
///
/// Copies to shared memory require rows of multiples of 16 bytes. Dimensions and tile indices are 32-bit integers.
pub(crate) fn has_valid_shape(gemm: &Gemm) -> bool {
    let Gemm { m, n, k, layout, epilogue, .. } = *gemm;
    let (row_of_a, row_of_b) = match layout {
        GemmLayout::Nt => (k, k),
        GemmLayout::Nn => (k, n),
        GemmLayout::Tn => (m, n),
    };
    let row_of_out = if epilogue.writes_preactivation() { gemm.output_shape()[1] } else { n };
    let operand_multiple = if gemm.is_fp8() { 16 } else { 8 };
    let output_multiple = if epilogue.output == GemmOutput::Fp8 { 16 } else { 8 };
    let fits = |extent: usize| (1..1 << 31).contains(&extent);
    let grouped_rows = match gemm.batching {
        Batching::Grouped => m,
        Batching::GroupedSum => k,
        _ => 0,
    };
    grouped_rows.is_multiple_of(GROUP_BLOCK)
        && row_of_a.is_multiple_of(operand_multiple)
        && row_of_b.is_multiple_of(operand_multiple)
        && n.is_multiple_of(8)
        && row_of_out.is_multiple_of(output_multiple)
        && (gemm.batching != Batching::Symmetric || m == n)
        // The transpose of an FP8 output has rows of M.
        && (epilogue.output != GemmOutput::Fp8 || m.is_multiple_of(16))
        && [m, n, k, TileShape::T128x128.tiles(m, n)].into_iter().all(fits)
}

/// Returns the key of the kernel instance: layout, precision, kind of batch, what it stores, and tile.
fn key(
    gemm: &Gemm,
    TileConfig { tile, split_k }: TileConfig,
) -> (GemmLayout, GemmPrecision, Batching, Stored, TileShape) {
    let precision = match gemm.precision {
        // An argument of the launch has the number of columns.
        GemmPrecision::Fp8 { a, columns: Some(_) } => GemmPrecision::Fp8 { a, columns: Some(EXACT_COLUMNS) },
        precision => precision,
    };
    let stored = if split_k > 1 {
        Stored::Partials { column_sums: gemm.epilogue.bias == Some(Bias::Gradient) }
    } else {
        Stored::Output(gemm.epilogue)
    };
    (gemm.layout, precision, gemm.batching, stored, tile)
}

/// Returns true if the sums may be split over K, if the residual is out: weight gradients.
fn is_weight_gradient(gemm: &Gemm) -> bool {
    let output = GemmOutput::Storage;
    let added =
        matches!(GemmEpilogue { output, ..gemm.epilogue }, GemmEpilogue::RESIDUAL | GemmEpilogue::BIAS_GRADIENT);
    added && gemm.batching == Batching::One && (gemm.layout == GemmLayout::Tn || gemm.is_fp8())
}

/// The operands of a GEMM. Operands that it does not use may be arbitrary.
#[derive(Clone, Copy, Default)]
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
    /// The factors that restore a and b from their FP8 values.
    pub scales: [Global<f32>; 2],
    /// The factor that restores an FP8 out.
    pub scale_out: Global<f32>,
    /// Receives the largest magnitude of an FP8 out, before it is divided by the scale, as f32 bits.
    pub amax: GlobalMut<u32>,
    /// Receives the transpose of an FP8 out, unless null.
    pub transposed: GlobalMut<E4m3>,
    /// Receives the transpose of the activation that is recomputed beside an FP8 out.
    pub activation: GlobalMut<E4m3>,
    /// The factor that restores the activation.
    pub scale_activation: Global<f32>,
    /// Device address of out.
    pub out_address: u64,
    /// Scratch memory for partial sums: [`TileConfig::scratch_len`] elements.
    pub scratch: GlobalMut<f32>,
    /// The factors of a scaled residual.
    pub factors: ScaleFactors,
    /// The number of matrices of a batch, or of groups.
    pub count: usize,
    /// The groups of a grouped GEMM, as described by [`Groups`](crate::experts::Groups).
    pub groups: Global<u32>,
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
    pub fn scratch_len(self, gemm: &Gemm) -> usize {
        self.partials_len(gemm) + self.column_sum_rows(gemm) * gemm.m
    }

    /// Returns the elements of the partial sums of slices of K.
    fn partials_len(self, gemm: &Gemm) -> usize {
        let Self { tile, split_k } = self;
        let [tile_m, tile_n] = tile.dims();
        if split_k > 1 { split_k * tile.tiles(gemm.m, gemm.n) * (tile_m * tile_n) as usize } else { 0 }
    }

    /// Returns the rows of partial column sums.
    fn column_sum_rows(self, gemm: &Gemm) -> usize {
        let rows = partial_rows(self.tile, gemm.n as u32) as usize;
        if gemm.epilogue.bias == Some(Bias::Gradient) { self.split_k * rows } else { 0 }
    }

    /// Returns true if there is a kernel for this configuration and no slice of K is empty. The GEMM must be
    /// [supported](is_supported).
    pub fn is_supported(self, gemm: &Gemm) -> bool {
        let Self { tile, split_k } = self;
        let steps = gemm.k.div_ceil(tile_k(gemm) as usize);
        // Tiles of 256 rows divide the column sums between neighbouring tiles: there must be more than one in a row of
        // tiles.
        let [tile_m, tile_n] = tile.dims();
        let no_neighbour = gemm.epilogue.bias == Some(Bias::Gradient) && tile_m == 256 && gemm.n <= tile_n as usize;
        split_k >= 1
            && (split_k == 1 || is_weight_gradient(gemm))
            && (split_k - 1) * steps.div_ceil(split_k) < steps
            && !no_neighbour
            && matmul_exists(key(gemm, self))
    }

    /// Estimates the run time, in tenths of the time that an SM takes for a step of 128 x 64 of the mainloop.
    ///
    /// An epilogue costs four steps. A partial tile costs a tenth of a step to write and read, spread over all SMs.
    /// Launching the reduction costs ten steps. A step of 128 columns of FP8 takes as long as one of 64 columns of bf16.
    fn cost(self, gemm: &Gemm, sm_count: usize) -> usize {
        let Self { tile, split_k } = self;
        let ([tile_m, tile_n], work_tiles) = (tile.dims(), tile.tiles(gemm.m, gemm.n) * split_k);
        let steps = gemm.k.div_ceil(tile_k(gemm) as usize).div_ceil(split_k);
        let reduction = if split_k == 1 { 0 } else { work_tiles + 100 };
        let step_cost = (tile_m * tile_n / (A_BOX_ROWS * EPILOGUE_TILE)) as usize;
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
/// empty if the GEMM is [supported](is_supported).
pub fn candidate_configs(gemm: &Gemm, sm_count: usize, scratch_len: usize) -> Vec<TileConfig> {
    let cost = |config: &TileConfig| config.cost(gemm, sm_count);
    let with_tile_shape = |tile| {
        let configs = (1..=MAX_SPLIT_K).map(move |split_k| TileConfig { tile, split_k });
        let fits = |config: &TileConfig| config.split_k == 1 || config.scratch_len(gemm) <= scratch_len;
        let mut configs: Vec<_> = configs.filter(|config| config.is_supported(gemm) && fits(config)).collect();
        configs.sort_by_key(cost);
        configs.truncate(SPLIT_K_CANDIDATES);
        configs
    };
    let mut configs: Vec<_> = TileShape::ALL.into_iter().flat_map(with_tile_shape).collect();
    configs.sort_by_key(cost);
    configs
}

/// Returns the kernel launches of a GEMM, in order. The GEMM and the configuration must be supported.
///
/// # Panics
/// Panics if there is no kernel.
pub fn launches(gemm: &Gemm, config: TileConfig, operands: KernelOperands, sm_count: usize) -> Vec<KernelLaunch> {
    let TileConfig { tile, split_k } = config;
    let KernelOperands { bias, out_address, scratch, .. } = operands;
    let (m, n) = (gemm.m as u32, gemm.n as u32);
    // Partial column sums follow the partial sums.
    let partials = scratch.skip(config.partials_len(gemm));
    let mut kernels = vec![KernelLaunch {
        launch: kernel(gemm, config, operands, partials)
            .unwrap_or_else(|| panic!("{gemm} with {config:?}: expected a configuration with a kernel")),
        grid: [sm_count as u32, 1, 1],
        shared_bytes: shared_bytes(SharedStorage::new),
    }];
    if split_k > 1 {
        let ([tile_m, tile_n], parts) = (tile.dims(), split_k as u32);
        let (sums, out) = (scratch.reader(), out_address);
        let launch = if gemm.epilogue.output == GemmOutput::F32 {
            matmul_split_k_reduce::<f32>(GlobalMut::from_address(out), sums, tile_m, tile_n, m, n, parts)
        } else {
            matmul_split_k_reduce::<bf16>(GlobalMut::from_address(out), sums, tile_m, tile_n, m, n, parts)
        };
        let grid = reduce_grid([tile_m, tile_n], tile.tiles(gemm.m, gemm.n));
        kernels.push(KernelLaunch { launch, grid, shared_bytes: 0 });
    }
    if gemm.epilogue.bias == Some(Bias::Gradient) {
        let rows = config.column_sum_rows(gemm) as u32;
        let launch = bias_backward_reduce::<bf16>(bias, partials.reader(), rows, m);
        let (grid, shared_bytes) = ([column_sum::grid(gemm.m), 1, 1], shared_bytes(column_sum::shared));
        kernels.push(KernelLaunch { launch, grid, shared_bytes });
    }
    kernels
}

/// Returns the launch of the GEMM kernel itself. `partials` is the memory for partial column sums.
fn kernel(gemm: &Gemm, config: TileConfig, operands: KernelOperands, partials: GlobalMut<f32>) -> Option<Launch> {
    let KernelOperands { a, b, out, aux, second, bias, scales: [scale_a, scale_b], scale_out, amax, .. } = operands;
    let sums = if config.split_k > 1 { operands.scratch } else { GlobalMut::from_address(operands.out_address) };
    let fp8_out = GlobalMut::from_address(operands.out_address);
    let pairs = gemm.layout == GemmLayout::Nt && gemm.epilogue.writes_preactivation() && gemm.epilogue.is_gated();
    let n = if pairs { gemm.n / 2 } else { gemm.n };
    let parts = if gemm.batching == Batching::One { config.split_k } else { operands.count };
    let ScaleFactors { alpha, beta } = operands.factors;
    let [m, n, k, parts] = [gemm.m, n, gemm.k, parts].map(|size| size as u32);
    let columns = match gemm.precision {
        GemmPrecision::Fp8 { columns, .. } => columns.unwrap_or(0),
        _ => 0,
    };
    let bias = bias.reader();
    matmul_select(
        key(gemm, config),
        a,
        b,
        out,
        aux,
        second,
        bias,
        scale_a,
        scale_b,
        scale_out,
        amax,
        fp8_out,
        operands.transposed,
        operands.activation,
        operands.scale_activation,
        sums,
        partials,
        alpha,
        beta,
        m,
        n,
        k,
        parts,
        columns,
        operands.groups,
    )
}

impl fmt::Display for GemmEpilogue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if self.bias == Some(Bias::Add) {
            parts.push("bias".to_owned());
        }
        if self.residual.is_some() {
            parts.push("residual".to_owned());
        }
        if self.bias == Some(Bias::Gradient) {
            parts.push("bias-gradient".to_owned());
        }
        if let Some((activation, pass)) = self.activation {
            let name = activation.name().to_lowercase();
            match pass {
                Pass::Forward => parts.push(name),
                Pass::Backward => parts.push(format!("{name}-backward")),
                Pass::BackwardAndValue => parts.extend([format!("{name}-backward"), name]),
            }
        }
        let output = match self.output {
            GemmOutput::Storage => None,
            GemmOutput::F32 => Some("f32-out"),
            GemmOutput::Fp8 => Some("fp8-out"),
        };
        let parts = Some(parts.join("+")).filter(|parts| !parts.is_empty());
        f.write_str(&parts.as_deref().into_iter().chain(output).collect::<Vec<_>>().join(" "))
    }
}

impl fmt::Display for Gemm {
    /// Formats as `65536x2304x768 NT bf16 bias`: M x N x K, layout, storage type, batch and epilogue.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layout = match self.layout {
            GemmLayout::Nt => "NT",
            GemmLayout::Nn => "NN",
            GemmLayout::Tn => "TN",
        };
        let precision = match self.precision {
            GemmPrecision::Bf16 => "bf16",
            GemmPrecision::F32 => "f32",
            GemmPrecision::Tf32 => "tf32",
            GemmPrecision::Fp8 { a: Fp8Format::E4m3, .. } => "e4m3",
            GemmPrecision::Fp8 { a: Fp8Format::E5m2, .. } => "e5m2",
        };
        let exact = match self.precision {
            GemmPrecision::Fp8 { columns: Some(columns), .. } => format!(" exact-{columns}"),
            _ => String::new(),
        };
        let batch = match self.batching {
            Batching::One => "",
            Batching::Strided => " batched",
            Batching::Symmetric => " batched symmetric",
            Batching::Grouped | Batching::GroupedSum => " grouped",
        };
        write!(f, "{}x{}x{} {layout} {precision}{exact}{batch}", self.m, self.n, self.k)?;
        if self.epilogue == GemmEpilogue::NONE { Ok(()) } else { write!(f, " {}", self.epilogue) }
    }
}
