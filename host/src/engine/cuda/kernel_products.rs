//! Matrix products by this program's own kernels, in bf16 on sm_90a.

use super::executor::Executor;
use super::tensor_maps::Extents;
use crate::engine::{KernelTiling, Result, Scope};
use anyhow::{Context, ensure};
use cublaslt::{Element, Epilogue, Operands, Problem};
use cuda_std::{Global, GlobalMut};
use gpu::attention::launch::Prepared;
use gpu::matmul::launch::{self, Map, Operand, Product, Shape, Tiling, Width};

/// Room for the partial sums of weights' gradients.
#[derive(Clone, Copy)]
pub struct Scratch {
    pub parts: GlobalMut<f32>,
    /// Elements.
    pub room: usize,
}

impl Scratch {
    pub const NONE: Self = Self { parts: GlobalMut::from_address(0), room: 0 };

    /// What is worth having, in elements; a gradient in more parts than this holds gains nothing.
    const MOST: usize = 16 << 20;

    /// Elements of scratch: enough for the weights of a transformer layer and the vocabulary's.
    pub fn needed(scope: &Scope, multiprocessors: usize) -> usize {
        let c = scope.channels;
        let weights = [(3 * c, c), (c, c), (4 * c, c), (c, 4 * c), (scope.padded_vocab, c)];
        let rooms = weights.into_iter().flat_map(|(m, n)| {
            let shape = Shape { m, n, k: scope.b * scope.t };
            let tilings = launch::tilings(Product::AtBAccumulate, shape, multiprocessors, Self::MOST);
            tilings.into_iter().map(move |tiling| tiling.room(shape))
        });
        rooms.max().unwrap_or(0)
    }
}

/// A product that a kernel takes, row-major.
#[derive(Clone, Copy, Debug)]
pub struct KernelProduct {
    product: Product,
    shape: Shape,
    operands: Operands,
}

impl KernelProduct {
    /// `None` where there is no kernel for it. The library's column-major D = op(A) · op(B) is the row-major
    /// Dᵀ = op(B)ᵀ · op(A)ᵀ.
    pub fn of(problem: &Problem, operands: &Operands) -> Option<Self> {
        let product = match (problem.transpose_a, problem.transpose_b, problem.epilogue, problem.accumulate) {
            (true, false, Epilogue::None, false) => Product::ABt,
            (true, false, Epilogue::Bias, false) => Product::ABtBias,
            (true, false, Epilogue::GeluAuxBias, false) => Product::ABtBiasGelu,
            (false, false, Epilogue::None, false) => Product::AB,
            (false, false, Epilogue::DGelu, false) => Product::ABGeluBackward,
            (false, true, Epilogue::None, true) => Product::AtBAccumulate,
            _ => return None,
        };
        let shape = Shape { m: problem.n, n: problem.m, k: problem.k };
        let plain = problem.element == Element::Bf16 && problem.batch == 1 && problem.output.is_none();
        (plain && shape.is_possible(product)).then_some(Self { product, shape, operands: *operands })
    }

    /// As [`of`](Self::of), where nothing else may compute it.
    pub fn required(problem: &Problem, operands: &Operands) -> Result<Self> {
        Self::of(problem, operands)
            .with_context(|| format!("--matmul rust: no kernel computes {problem}; expected --matmul auto"))
    }

    /// What may be the fastest, most promising first.
    pub fn tilings(&self, executor: &dyn Executor) -> Vec<KernelTiling> {
        let (multiprocessors, room) = (executor.multiprocessors(), executor.scratch().room);
        let tilings = launch::tilings(self.product, self.shape, multiprocessors, room);
        let kept = |Tiling { width, splits }| KernelTiling { columns: width.columns(), splits: splits as u32 };
        tilings.into_iter().map(kept).collect()
    }

    /// The launches, in their order; none where kernels for sm_90a do not run.
    pub fn prepare(&self, tiling: KernelTiling, executor: &mut dyn Executor) -> Result<Vec<Prepared>> {
        let KernelTiling { columns, splits } = tiling;
        let width = Width::of(columns).with_context(|| format!("no kernel has tiles of {columns} columns"))?;
        let tiling = Tiling { width, splits: splits as usize };
        let Scratch { parts, room } = executor.scratch();
        ensure!(
            splits > 0 && tiling.room(self.shape) <= room,
            "{:?} in {splits} parts of K needs {} f32 of scratch, {room} were planned",
            self.shape,
            tiling.room(self.shape)
        );
        let Operands { a, b, d, bias, aux } = self.operands;
        let mut map = |address: u64, Map { extents, tile }: Map| {
            executor.tensor_map(Global::from_address(address), Extents::Matrix(extents), tile)
        };
        let [a_map, b_map, out_map] = launch::maps(self.product, self.shape, width);
        let maps = (map(b, a_map)?, map(a, b_map)?, map(d, out_map)?, map(aux.unwrap_or(d), out_map)?);
        let (Some(a), Some(b), Some(out), Some(aux)) = maps else { return Ok(Vec::new()) };
        let bias = Global::from_address(bias.unwrap_or_default());
        let operands = Operand { a, b, out, aux, bias, sums: GlobalMut::from_address(d), parts, room };
        Ok(launch::prepare(self.product, self.shape, tiling, operands, executor.multiprocessors()))
    }
}
