//! Host side: which kernel, which boxes, which grid.

use super::epilogue::{Accumulate, BOX, Bias, BiasGelu, Epilogue, GeluBackward, Plain};
use super::mainloop::{AB, ABt, AtB, Operands, TILE_K};
use super::pingpong::{Columns128, Columns192, TILE_M, matmul_parts, matmul_pingpong, pingpong_shared_bytes};
use super::split::{add_parts_grid, matmul_add_parts};
use crate::attention::launch::Prepared;
use cuda_std::hopper::TensorMap;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::launch::Launch;
use cuda_std::{Global, GlobalMut, bf16};

/// What is computed, row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Product {
    /// out (M, N) = a (M, K) · b (N, K)ᵀ
    ABt,
    /// out = a · bᵀ + bias (N)
    ABtBias,
    /// aux (M, N) = a · bᵀ + bias; out = gelu(aux)
    ABtBiasGelu,
    /// out (M, N) = a (M, K) · b (K, N)
    AB,
    /// out = a · b ⊙ gelu'(aux (M, N))
    ABGeluBackward,
    /// out (M, N) += a (K, M)ᵀ · b (K, N)
    AtBAccumulate,
}

impl Product {
    /// Whether b is stored (K, N).
    fn b_by_rows(self) -> bool {
        matches!(self, Self::AB | Self::ABGeluBackward | Self::AtBAccumulate)
    }
}

/// Columns of a tile. Wide tiles read less for each product, narrow ones leave less of the last tiles unused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Width {
    Narrow,
    Wide,
}

impl Width {
    pub const ALL: [Self; 2] = [Self::Narrow, Self::Wide];

    /// Of tiles of so many columns.
    pub fn of(columns: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|width| width.columns() == columns)
    }

    fn tiles(self, shape: Shape) -> usize {
        shape.m.div_ceil(TILE_M as usize) * shape.n.div_ceil(self.columns() as usize)
    }

    pub fn columns(self) -> u32 {
        match self {
            Self::Narrow => Columns128::COLUMNS,
            Self::Wide => Columns192::COLUMNS,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

impl Shape {
    /// Whether the kernels take it: TMA wants rows that are multiples of 16 bytes, extents and tiles are 32-bit.
    pub fn is_possible(self, product: Product) -> bool {
        let fits = |extent: usize| (1..1 << 31).contains(&extent);
        let row_of_a = if product == Product::AtBAccumulate { self.m } else { self.k };
        let aligned = self.n.is_multiple_of(8) && row_of_a.is_multiple_of(8);
        let tiles = self.m.div_ceil(TILE_M as usize) * self.n.div_ceil(Columns128::COLUMNS as usize);
        aligned && fits(self.m) && fits(self.n) && fits(self.k) && fits(tiles)
    }
}

/// A tensor map: rows and columns of the tensor, and of the box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Map {
    pub extents: [usize; 2],
    pub tile: (u32, u32),
}

/// The maps of a, of b, of out and aux.
pub fn maps(product: Product, shape: Shape, width: Width) -> [Map; 3] {
    let Shape { m, n, k } = shape;
    let map = |rows, columns, tile_rows| Map { extents: [rows, columns], tile: (tile_rows, TILE_K) };
    let a = if product == Product::AtBAccumulate { map(k, m, TILE_K) } else { map(m, k, TILE_M) };
    let b = if product.b_by_rows() { map(k, n, TILE_K) } else { map(n, k, width.columns()) };
    [a, b, Map { extents: [m, n], tile: (BOX, BOX) }]
}

/// Tensor maps as [`maps`] says, the bias, the output itself, and room for parts of the sums; those that the product does
/// not use may be any.
#[derive(Clone, Copy)]
pub struct Operand {
    pub a: Global<TensorMap>,
    pub b: Global<TensorMap>,
    pub out: Global<TensorMap>,
    pub aux: Global<TensorMap>,
    pub bias: Global<bf16>,
    pub sums: GlobalMut<bf16>,
    pub parts: GlobalMut<f32>,
    /// Elements of `parts`.
    pub room: usize,
}

/// How a product is divided: into tiles of so many columns, over so many parts of K.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiling {
    pub width: Width,
    /// More than 1 for [`Product::AtBAccumulate`] only.
    pub splits: usize,
}

impl Tiling {
    /// f32 elements that the sums of parts of K take.
    pub fn room(self, shape: Shape) -> usize {
        let Self { width, splits } = self;
        if splits > 1 { splits * width.tiles(shape) * (TILE_M * width.columns()) as usize } else { 0 }
    }

    /// Whether every part of K has a step.
    pub fn is_possible(self, shape: Shape) -> bool {
        let steps = shape.k.div_ceil(TILE_K as usize);
        (self.splits - 1) * steps.div_ceil(self.splits) < steps
    }

    /// In tenths of the time that a multiprocessor takes for a step of a tile of 64 columns: an epilogue costs four steps, a
    /// part of a tile to write and to read a tenth, spread over the GPU, and another kernel's launch ten.
    fn cost(self, shape: Shape, multiprocessors: usize) -> usize {
        let Self { width, splits } = self;
        let items = width.tiles(shape) * splits;
        let steps = shape.k.div_ceil(TILE_K as usize).div_ceil(splits);
        let added = if splits == 1 { 0 } else { items + 100 };
        (items.div_ceil(multiprocessors) * (steps + 4) * 10 + added) * (width.columns() / BOX) as usize
    }
}

const MOST_SPLITS: usize = 32;
/// Numbers of parts that are worth timing, for each width.
const BEST_SPLITS: usize = 2;

/// The ways that may be the fastest, most promising first, of those whose sums of parts fit in `room` elements. Never empty.
pub fn tilings(product: Product, shape: Shape, multiprocessors: usize, room: usize) -> Vec<Tiling> {
    let cost = |tiling: &Tiling| tiling.cost(shape, multiprocessors);
    let most = if product == Product::AtBAccumulate { MOST_SPLITS } else { 1 };
    let of_width = |width| {
        let tilings = (1..=most).map(move |splits| Tiling { width, splits });
        let mut tilings: Vec<_> =
            tilings.filter(|tiling| tiling.is_possible(shape) && tiling.room(shape) <= room).collect();
        tilings.sort_by_key(cost);
        tilings.truncate(BEST_SPLITS);
        tilings
    };
    let mut tilings: Vec<_> = Width::ALL.into_iter().flat_map(of_width).collect();
    tilings.sort_by_key(cost);
    tilings
}

/// The kernels for a shape that [is possible](Shape::is_possible), in their order. Sums of parts must fit in the operands'
/// room.
pub fn prepare(
    product: Product,
    shape: Shape,
    tiling: Tiling,
    operands: Operand,
    multiprocessors: usize,
) -> Vec<Prepared> {
    let grid = [multiprocessors as u32, 1, 1];
    let shared_bytes = pingpong_shared_bytes();
    let Tiling { width, splits } = tiling;
    assert!(tiling.room(shape) <= operands.room, "{tiling:?} of {shape:?} in room for {}", operands.room);
    if splits > 1 {
        let (parts, sum, sum_grid) = match width {
            Width::Narrow => in_parts::<Columns128>(shape, operands, splits),
            Width::Wide => in_parts::<Columns192>(shape, operands, splits),
        };
        let sum = Prepared { launch: sum, grid: sum_grid, shared_bytes: 0 };
        return vec![Prepared { launch: parts, grid, shared_bytes }, sum];
    }
    let launch = match product {
        Product::ABt => of_width::<ABt, Plain>(shape, width, operands),
        Product::ABtBias => of_width::<ABt, Bias>(shape, width, operands),
        Product::ABtBiasGelu => of_width::<ABt, BiasGelu>(shape, width, operands),
        Product::AB => of_width::<AB, Plain>(shape, width, operands),
        Product::ABGeluBackward => of_width::<AB, GeluBackward>(shape, width, operands),
        Product::AtBAccumulate => of_width::<AtB, Accumulate>(shape, width, operands),
    };
    vec![Prepared { launch, grid, shared_bytes }]
}

fn in_parts<A: Accumulators + 'static>(shape: Shape, operands: Operand, splits: usize) -> (Launch, Launch, [u32; 3]) {
    let Operand { a, b, sums, parts, .. } = operands;
    let (m, n, k, splits) = (shape.m as u32, shape.n as u32, shape.k as u32, splits as u32);
    let multiply = matmul_parts::<A>(a, b, parts, m, n, k, splits);
    (multiply, matmul_add_parts::<A>(sums, parts.reader(), m, n, splits), add_parts_grid::<A>(shape.m, shape.n))
}

fn of_width<L: Operands, E: Epilogue>(shape: Shape, width: Width, operands: Operand) -> Launch {
    match width {
        Width::Narrow => of::<L, E, Columns128>(shape, operands),
        Width::Wide => of::<L, E, Columns192>(shape, operands),
    }
}

fn of<L: Operands, E: Epilogue, A: Accumulators + 'static>(shape: Shape, operands: Operand) -> Launch {
    let Operand { a, b, out, aux, bias, .. } = operands;
    matmul_pingpong::<L, E, A>(a, b, out, aux, bias, shape.m as u32, shape.n as u32, shape.k as u32)
}
