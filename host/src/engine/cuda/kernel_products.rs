//! Matrix products by this program's own kernels: those in bf16 on sm_90a, forward and for the gradient of the input.

use super::executor::Executor;
use super::tensor_maps::Extents;
use crate::engine::Result;
use cublaslt::{Element, Epilogue, Operands, Problem};
use cuda_std::Global;
use gpu::attention::launch::Prepared;
pub use gpu::matmul::launch::Width;
use gpu::matmul::launch::{self, Map, Operand, Product, Shape};

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
        let product = match (problem.transpose_a, problem.epilogue) {
            (true, Epilogue::None) => Product::ABt,
            (true, Epilogue::Bias) => Product::ABtBias,
            (true, Epilogue::GeluAuxBias) => Product::ABtBiasGelu,
            (false, Epilogue::None) => Product::AB,
            (false, Epilogue::DGelu) => Product::ABGeluBackward,
            _ => return None,
        };
        let shape = Shape { m: problem.n, n: problem.m, k: problem.k };
        let plain = problem.element == Element::Bf16 && problem.batch == 1 && problem.output.is_none();
        let overwrites = !problem.transpose_b && !problem.accumulate;
        (plain && overwrites && shape.is_possible()).then_some(Self { product, shape, operands: *operands })
    }

    /// What to take as long as nothing has been timed: wide tiles unless they leave more unused.
    pub fn default_width(&self) -> Width {
        let padded = |width: Width| self.shape.n.next_multiple_of(width.columns() as usize);
        if padded(Width::Wide) <= padded(Width::Narrow) { Width::Wide } else { Width::Narrow }
    }

    /// The launch; `None` where kernels for sm_90a do not run.
    pub fn prepare(&self, width: Width, executor: &mut dyn Executor) -> Result<Option<Prepared>> {
        let Operands { a, b, d, bias, aux } = self.operands;
        let mut map = |address: u64, Map { extents, tile }: Map| {
            executor.tensor_map(Global::from_address(address), Extents::Matrix(extents), tile)
        };
        let [a_map, b_map, out_map] = launch::maps(self.product, self.shape, width);
        let maps = (map(b, a_map)?, map(a, b_map)?, map(d, out_map)?, map(aux.unwrap_or(d), out_map)?);
        let (Some(a), Some(b), Some(out), Some(aux)) = maps else { return Ok(None) };
        let bias = Global::from_address(bias.unwrap_or_default());
        let operands = Operand { a, b, out, aux, bias };
        Ok(Some(launch::prepare(self.product, self.shape, width, operands, executor.multiprocessors())))
    }
}
