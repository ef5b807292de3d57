//! Matrix products by this program's own kernels, in bf16 on sm_90a.

use super::executor::Executor;
use super::tensor_maps::Extents;
use crate::engine::{KernelTiling, Result, Scope};
use anyhow::{Context, ensure};
use cublaslt::{Element, Epilogue, Operands, Problem};
use cuda_std::{Global, GlobalMut};
use gpu::attention::launch::Prepared;
use gpu::matmul::launch::{self, Map, Operand, Product, Shape, Size, Tiling};

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
            let (product, shape) = (Product::AtBAccumulateSums, Shape { m, n, k: scope.b * scope.t });
            let tilings = launch::tilings(product, shape, multiprocessors, Self::MOST);
            tilings.into_iter().map(move |tiling| tiling.room(product, shape))
        });
        rooms.max().unwrap_or(0)
    }
}

/// What the library can compute of a product: all but a bias's gradient that is added to the bias, and GELU beside its slope.
pub fn by_library(problem: &Problem, operands: &Operands) -> (Problem, Operands) {
    match problem.epilogue {
        Epilogue::BiasGradB if problem.accumulate => {
            (Problem { epilogue: Epilogue::None, ..*problem }, Operands { bias: None, ..*operands })
        }
        Epilogue::DGeluAndGelu => {
            (Problem { epilogue: Epilogue::DGelu, ..*problem }, Operands { gelu: None, ..*operands })
        }
        _ => (*problem, *operands),
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
        let Problem { transpose_a, transpose_b, accumulate, output, .. } = *problem;
        let product = match (transpose_a, transpose_b, accumulate, problem.epilogue, output) {
            (true, false, false, Epilogue::None, None) => Product::ABt,
            (true, false, false, Epilogue::Bias, None) => Product::ABtBias,
            (true, false, true, Epilogue::Bias, None) => Product::ABtBiasResidual,
            (true, false, false, Epilogue::GeluAuxBias, None) => Product::ABtBiasGelu,
            (false, false, false, Epilogue::None, None) => Product::AB,
            (false, false, false, Epilogue::DGelu, None) => Product::ABGeluBackward,
            (false, false, false, Epilogue::DGeluAndGelu, None) => Product::ABGeluBackwardAndGelu,
            (false, true, true, Epilogue::None, None) => Product::AtBAccumulate,
            (false, true, true, Epilogue::BiasGradB, None) => Product::AtBAccumulateSums,
            (false, true, true, Epilogue::None, Some(Element::F32)) => Product::AtBAccumulateF32,
            _ => return None,
        };
        let shape = Shape { m: problem.n, n: problem.m, k: problem.k };
        let plain = problem.element == Element::Bf16;
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
        let kept = |Tiling { size, splits }| KernelTiling {
            rows: size.rows(),
            columns: size.columns(),
            splits: splits as u32,
        };
        tilings.into_iter().map(kept).collect()
    }

    /// Of the [tilings](Self::tilings), counted round.
    pub fn nth_tiling(&self, n: usize, executor: &dyn Executor) -> KernelTiling {
        let tilings = self.tilings(executor);
        tilings[n % tilings.len()]
    }

    /// Whether `tiling`, which may have been kept by a run with more memory, is possible in this one.
    pub fn can_be(&self, tiling: KernelTiling, executor: &dyn Executor) -> bool {
        self.tiling(tiling).is_some_and(|tiling| tiling.room(self.product, self.shape) <= executor.scratch().room)
    }

    fn tiling(&self, KernelTiling { rows, columns, splits }: KernelTiling) -> Option<Tiling> {
        let tiling = Tiling { size: Size::of(rows, columns)?, splits: splits as usize };
        (splits > 0 && tiling.is_possible(self.product, self.shape)).then_some(tiling)
    }

    /// The launches, in their order; none where kernels for sm_90a do not run.
    pub fn prepare(&self, tiling: KernelTiling, executor: &mut dyn Executor) -> Result<Vec<Prepared>> {
        let tiling = self.tiling(tiling).with_context(|| format!("no kernel divides {self:?} into {tiling}"))?;
        let Scratch { parts, room } = executor.scratch();
        let needed = tiling.room(self.product, self.shape);
        ensure!(needed <= room, "{self:?} by {tiling:?} needs {needed} f32 of scratch, {room} were planned");
        let Operands { a, b, d, c, bias, aux, gelu } = self.operands;
        // The library's auxiliary matrix is what a forward writes and a backward reads.
        let (aux, second) = if self.product == Product::ABtBiasGelu { (None, aux) } else { (aux.or(c), gelu) };
        let mut map = |address: u64, Map { extents, tile }: Map| {
            executor.tensor_map(Global::from_address(address), Extents::Matrix(extents), tile)
        };
        let [a_map, b_map, out_map] = launch::maps(self.product, self.shape, tiling.size);
        let (a, b, out) = (map(b, a_map)?, map(a, b_map)?, map(d, out_map)?);
        let (aux, second) = (map(aux.unwrap_or(d), out_map)?, map(second.unwrap_or(d), out_map)?);
        let (Some(a), Some(b), Some(out), Some(aux), Some(second)) = (a, b, out, aux, second) else {
            return Ok(Vec::new());
        };
        let bias = GlobalMut::from_address(bias.unwrap_or_default());
        let operands = Operand { a, b, out, aux, second, bias, sums: d, parts, room };
        Ok(launch::prepare(self.product, self.shape, tiling, operands, executor.multiprocessors()))
    }
}
