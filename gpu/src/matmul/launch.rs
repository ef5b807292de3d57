//! Host side: which kernel, which boxes, which grid.

use super::column_sums::slices;
use super::epilogue::{
    Accumulate, BOX, Bias, BiasGelu, BiasResidual, Epilogue, GeluBackward, GeluBackwardAndGelu, Plain,
};
use super::mainloop::{A_BOX, AB, ABt, AtB, Operands, TILE_K};
use super::pingpong::{matmul_add_f32, matmul_parts, matmul_pingpong, matmul_with_column_sums, pingpong_shared_bytes};
use super::split::{add_parts_grid, matmul_add_parts};
use super::tiles::{Tile, Together128, Together192, Together256, Together320, Turns128, Turns192};
use crate::bias::bias_backward_reduce;
use crate::column_sum;
use crate::launch::KernelLaunch;
use cuda_std::hopper::TensorMap;
use cuda_std::launch::Launch;
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, bf16};

/// What is computed, row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Product {
    /// out (M, N) = a (M, K) · b (N, K)ᵀ
    ABt,
    /// out = a · bᵀ + bias (N)
    ABtBias,
    /// out = aux (M, N) + a · bᵀ + bias
    ABtBiasResidual,
    /// second (M, N) = a · bᵀ + bias; out = gelu(second)
    ABtBiasGelu,
    /// out (M, N) = a (M, K) · b (K, N)
    AB,
    /// out = a · b ⊙ gelu'(aux (M, N))
    ABGeluBackward,
    /// The same; second (M, N) = gelu(aux)
    ABGeluBackwardAndGelu,
    /// out (M, N) += a (K, M)ᵀ · b (K, N)
    AtBAccumulate,
    /// The same; bias (M) += column sums of a
    AtBAccumulateSums,
    /// out (M, N) f32 += a (K, M)ᵀ · b (K, N)
    AtBAccumulateF32,
}

impl Product {
    /// Whether it is a weight's gradient: a is stored (K, M), K may be split.
    fn accumulates(self) -> bool {
        matches!(self, Self::AtBAccumulate | Self::AtBAccumulateSums | Self::AtBAccumulateF32)
    }

    /// Whether b is stored (K, N).
    fn b_by_rows(self) -> bool {
        self.accumulates() || matches!(self, Self::AB | Self::ABGeluBackward | Self::ABGeluBackwardAndGelu)
    }

    /// Whether there is much to write: consumers take turns then.
    fn writes_much(self) -> bool {
        matches!(self, Self::ABtBiasGelu | Self::ABGeluBackward | Self::ABGeluBackwardAndGelu)
    }
}

/// Rows and columns of a tile. Large ones read less for each product, small ones leave less of the last tiles unused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Size {
    T128x128,
    T128x192,
    T256x128,
    T256x192,
    T128x256,
    T128x320,
}

/// `$call` with `$tile` as the kernels' tile of a size.
macro_rules! for_size {
    ($size:expr, $tile:ident => $call:expr) => {
        match $size {
            Size::T128x128 => {
                type $tile = Turns128;
                $call
            }
            Size::T128x192 => {
                type $tile = Turns192;
                $call
            }
            Size::T256x128 => {
                type $tile = Together128;
                $call
            }
            Size::T256x192 => {
                type $tile = Together192;
                $call
            }
            Size::T128x256 => {
                type $tile = Together256;
                $call
            }
            Size::T128x320 => {
                type $tile = Together320;
                $call
            }
        }
    };
}

impl Size {
    pub const ALL: [Self; 6] =
        [Self::T128x128, Self::T128x192, Self::T256x128, Self::T256x192, Self::T128x256, Self::T128x320];

    /// Of so many rows and columns.
    pub fn of(rows: u32, columns: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|size| (size.rows(), size.columns()) == (rows, columns))
    }

    pub fn rows(self) -> u32 {
        for_size!(self, T => T::ROWS)
    }

    pub fn columns(self) -> u32 {
        for_size!(self, T => T::COLUMNS)
    }

    fn tiles(self, shape: Shape) -> usize {
        shape.m.div_ceil(self.rows() as usize) * shape.n.div_ceil(self.columns() as usize)
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
        let row_of_a = if product.accumulates() { self.m } else { self.k };
        let aligned = self.n.is_multiple_of(8) && row_of_a.is_multiple_of(8);
        aligned && fits(self.m) && fits(self.n) && fits(self.k) && fits(Size::T128x128.tiles(self))
    }
}

/// A tensor map: rows and columns of the tensor, and of the box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Map {
    pub extents: [usize; 2],
    pub tile: (u32, u32),
}

/// The maps of a, of b, and of out, aux and second.
pub fn maps(product: Product, shape: Shape, size: Size) -> [Map; 3] {
    let Shape { m, n, k } = shape;
    let map = |rows, columns, tile_rows| Map { extents: [rows, columns], tile: (tile_rows, TILE_K) };
    let a = if product.accumulates() { map(k, m, TILE_K) } else { map(m, k, A_BOX) };
    let b = if product.b_by_rows() { map(k, n, TILE_K) } else { map(n, k, for_size!(size, T => T::B_BOX)) };
    [a, b, Map { extents: [m, n], tile: (BOX, BOX) }]
}

/// Tensor maps as [`maps`] says, the bias, where the output itself lies, and room for parts of the sums; those that the
/// product does not use may be any.
#[derive(Clone, Copy)]
pub struct Operand {
    pub a: Global<TensorMap>,
    pub b: Global<TensorMap>,
    pub out: Global<TensorMap>,
    pub aux: Global<TensorMap>,
    pub second: Global<TensorMap>,
    pub bias: GlobalMut<bf16>,
    /// Its address.
    pub sums: u64,
    pub parts: GlobalMut<f32>,
    /// Elements of `parts`.
    pub room: usize,
}

/// How a product is divided: into tiles, over so many parts of K.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiling {
    pub size: Size,
    /// More than 1 for weights' gradients only.
    pub splits: usize,
}

impl Tiling {
    /// f32 elements that sums take which are added up later: of parts of K, and of columns.
    pub fn room(self, product: Product, shape: Shape) -> usize {
        self.parts(shape) + self.slices(product, shape) * shape.m
    }

    fn parts(self, shape: Shape) -> usize {
        let Self { size, splits } = self;
        if splits > 1 { splits * size.tiles(shape) * (size.rows() * size.columns()) as usize } else { 0 }
    }

    /// Rows of column sums.
    fn slices(self, product: Product, shape: Shape) -> usize {
        let slices = for_size!(self.size, T => slices::<T>(shape.n as u32)) as usize;
        if product == Product::AtBAccumulateSums { self.splits * slices } else { 0 }
    }

    /// Whether there are kernels for it, and every part of K has a step.
    pub fn is_possible(self, product: Product, shape: Shape) -> bool {
        let Self { size, splits } = self;
        let steps = shape.k.div_ceil(TILE_K as usize);
        let together = for_size!(size, T => T::TOGETHER);
        // Of tiles that are not beside others, none would sum the lower half of the columns.
        let large = size == Size::T256x128 || size == Size::T256x192;
        let alone = product == Product::AtBAccumulateSums && large && shape.n <= size.columns() as usize;
        (splits == 1 || product.accumulates())
            && (splits - 1) * steps.div_ceil(splits) < steps
            && !alone
            && !(together && product.writes_much())
    }

    /// In tenths of the time that a multiprocessor takes for a step of 128 x 64: an epilogue costs four steps, a part of a tile
    /// to write and to read a tenth, spread over the GPU, and another kernel's launch ten.
    fn cost(self, shape: Shape, multiprocessors: usize) -> usize {
        let Self { size, splits } = self;
        let items = size.tiles(shape) * splits;
        let steps = shape.k.div_ceil(TILE_K as usize).div_ceil(splits);
        let added = if splits == 1 { 0 } else { items + 100 };
        let of_step = (size.rows() * size.columns() / (A_BOX * BOX)) as usize;
        (items.div_ceil(multiprocessors) * (steps + 4) * 10 + added) * of_step
    }
}

const MOST_SPLITS: usize = 32;
/// Numbers of parts that are worth timing, for each size.
const BEST_SPLITS: usize = 2;
/// No product has more [`tilings`].
pub const MOST_TILINGS: usize = Size::ALL.len() * BEST_SPLITS;

/// The ways that may be the fastest, most promising first, of those that do with `room` elements. Never empty.
pub fn tilings(product: Product, shape: Shape, multiprocessors: usize, room: usize) -> Vec<Tiling> {
    let cost = |tiling: &Tiling| tiling.cost(shape, multiprocessors);
    let of_size = |size| {
        let tilings = (1..=MOST_SPLITS).map(move |splits| Tiling { size, splits });
        let fits = |tiling: &Tiling| tiling.splits == 1 || tiling.room(product, shape) <= room;
        let mut tilings: Vec<_> = tilings.filter(|tiling| tiling.is_possible(product, shape) && fits(tiling)).collect();
        tilings.sort_by_key(cost);
        tilings.truncate(BEST_SPLITS);
        tilings
    };
    let mut tilings: Vec<_> = Size::ALL.into_iter().flat_map(of_size).collect();
    tilings.sort_by_key(cost);
    tilings
}

/// The kernels for a shape that [is possible](Shape::is_possible), in their order. What they add up later must fit in the
/// operands' room.
pub fn prepare(
    product: Product,
    shape: Shape,
    tiling: Tiling,
    operands: Operand,
    multiprocessors: usize,
) -> Vec<KernelLaunch> {
    let room = tiling.room(product, shape);
    assert!(
        room <= operands.room,
        "{product:?} of {shape:?}, {tiling:?}, needs room for {room}, not {}",
        operands.room
    );
    let Tiling { size, splits } = tiling;
    let Operand { a, b, out, bias, sums, parts, .. } = operands;
    let (m, n, k) = (shape.m as u32, shape.n as u32, shape.k as u32);
    let column_sums = parts.skip(tiling.parts(shape));
    let in_parts = splits > 1;
    let multiply = match product {
        Product::ABt => in_turns_or_together::<ABt, Plain>(shape, size, operands),
        Product::ABtBias => in_turns_or_together::<ABt, Bias>(shape, size, operands),
        Product::ABtBiasResidual => in_turns_or_together::<ABt, BiasResidual>(shape, size, operands),
        Product::ABtBiasGelu => in_turns::<ABt, BiasGelu>(shape, size, operands),
        Product::AB => in_turns_or_together::<AB, Plain>(shape, size, operands),
        Product::ABGeluBackward => in_turns::<AB, GeluBackward>(shape, size, operands),
        Product::ABGeluBackwardAndGelu => in_turns::<AB, GeluBackwardAndGelu>(shape, size, operands),
        Product::AtBAccumulateSums if in_parts => {
            for_size!(size, T => matmul_parts::<T, true>(a, b, parts, column_sums, m, n, k, splits as u32))
        }
        _ if in_parts => {
            for_size!(size, T => matmul_parts::<T, false>(a, b, parts, column_sums, m, n, k, splits as u32))
        }
        Product::AtBAccumulate => in_turns_or_together::<AtB, Accumulate>(shape, size, operands),
        Product::AtBAccumulateSums => {
            for_size!(size, T => matmul_with_column_sums::<T>(a, b, out, column_sums, m, n, k))
        }
        Product::AtBAccumulateF32 => {
            for_size!(size, T => matmul_add_f32::<T>(a, b, GlobalMut::from_address(sums), m, n, k))
        }
    };
    let grid = [multiprocessors as u32, 1, 1];
    let mut kernels = vec![KernelLaunch { launch: multiply, grid, shared_bytes: pingpong_shared_bytes() }];
    if in_parts {
        let (rows, columns, splits) = (size.rows(), size.columns(), splits as u32);
        let launch = if product == Product::AtBAccumulateF32 {
            matmul_add_parts::<f32>(GlobalMut::from_address(sums), parts.reader(), rows, columns, m, n, splits)
        } else {
            matmul_add_parts::<bf16>(GlobalMut::from_address(sums), parts.reader(), rows, columns, m, n, splits)
        };
        let grid = add_parts_grid([rows, columns], size.tiles(shape));
        kernels.push(KernelLaunch { launch, grid, shared_bytes: 0 });
    }
    if product == Product::AtBAccumulateSums {
        let slices = tiling.slices(product, shape) as u32;
        let mut layout = Layout::new();
        column_sum::shared(&mut layout);
        kernels.push(KernelLaunch {
            launch: bias_backward_reduce::<bf16>(bias, column_sums.reader(), slices, m),
            grid: [column_sum::grid(shape.m), 1, 1],
            shared_bytes: layout.bytes(),
        });
    }
    kernels
}

fn in_turns_or_together<L: Operands, E: Epilogue>(shape: Shape, size: Size, operands: Operand) -> Launch {
    match size {
        Size::T256x128 => of::<L, E, Together128>(shape, operands),
        Size::T256x192 => of::<L, E, Together192>(shape, operands),
        Size::T128x256 => of::<L, E, Together256>(shape, operands),
        Size::T128x320 => of::<L, E, Together320>(shape, operands),
        _ => in_turns::<L, E>(shape, size, operands),
    }
}

fn in_turns<L: Operands, E: Epilogue>(shape: Shape, size: Size, operands: Operand) -> Launch {
    if size.columns() == Turns128::COLUMNS {
        of::<L, E, Turns128>(shape, operands)
    } else {
        of::<L, E, Turns192>(shape, operands)
    }
}

fn of<L: Operands, E: Epilogue, T: Tile>(shape: Shape, operands: Operand) -> Launch {
    let Operand { a, b, out, aux, second, bias, .. } = operands;
    matmul_pingpong::<L, E, T>(a, b, out, aux, second, bias.reader(), shape.m as u32, shape.n as u32, shape.k as u32)
}
