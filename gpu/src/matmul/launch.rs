//! Host side: which kernel, which boxes, which grid.

use super::epilogue::{BOX, Bias, BiasGelu, Epilogue, GeluBackward, Plain};
use super::mainloop::{AB, ABt, Operands, TILE_K};
use super::pingpong::{Columns128, Columns192, TILE_M, matmul_pingpong, pingpong_shared_bytes};
use crate::attention::launch::Prepared;
use cuda_std::hopper::TensorMap;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::launch::Launch;
use cuda_std::{Global, bf16};

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
}

impl Product {
    /// Whether b is stored (K, N).
    fn b_by_rows(self) -> bool {
        matches!(self, Self::AB | Self::ABGeluBackward)
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
    pub fn is_possible(self) -> bool {
        let fits = |extent: usize| (1..1 << 31).contains(&extent);
        let aligned = self.n.is_multiple_of(8) && self.k.is_multiple_of(8);
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
    let b = if product.b_by_rows() { map(k, n, TILE_K) } else { map(n, k, width.columns()) };
    [map(m, k, TILE_M), b, Map { extents: [m, n], tile: (BOX, BOX) }]
}

/// Tensor maps as [`maps`] says, and the bias; those that the product does not use may be any.
#[derive(Clone, Copy)]
pub struct Operand {
    pub a: Global<TensorMap>,
    pub b: Global<TensorMap>,
    pub out: Global<TensorMap>,
    pub aux: Global<TensorMap>,
    pub bias: Global<bf16>,
}

/// The kernel for a shape that [is possible](Shape::is_possible).
pub fn prepare(product: Product, shape: Shape, width: Width, operands: Operand, multiprocessors: usize) -> Prepared {
    let launch = match product {
        Product::ABt => of_width::<ABt, Plain>(shape, width, operands),
        Product::ABtBias => of_width::<ABt, Bias>(shape, width, operands),
        Product::ABtBiasGelu => of_width::<ABt, BiasGelu>(shape, width, operands),
        Product::AB => of_width::<AB, Plain>(shape, width, operands),
        Product::ABGeluBackward => of_width::<AB, GeluBackward>(shape, width, operands),
    };
    Prepared { launch, grid: [multiprocessors as u32, 1, 1], shared_bytes: pingpong_shared_bytes() }
}

fn of_width<L: Operands, E: Epilogue>(shape: Shape, width: Width, operands: Operand) -> Launch {
    match width {
        Width::Narrow => of::<L, E, Columns128>(shape, operands),
        Width::Wide => of::<L, E, Columns192>(shape, operands),
    }
}

fn of<L: Operands, E: Epilogue, A: Accumulators + 'static>(shape: Shape, operands: Operand) -> Launch {
    let Operand { a, b, out, aux, bias } = operands;
    matmul_pingpong::<L, E, A>(a, b, out, aux, bias, shape.m as u32, shape.n as u32, shape.k as u32)
}
