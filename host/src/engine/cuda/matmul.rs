//! Linear layers. A row-major matrix is its column-major transpose to cuBLASLt, see the `cublaslt` crate.

use super::kernel_products::Scratch;
use super::{Cuda, Emulation, Float, Products, bias, gelu};
use crate::engine::{Ending, GeluForward, GeluFusion, GeluInput, Linear, Result, Scope};
use crate::tensor::{DType, Tensor};
use cublaslt::{Element, Epilogue, Operands, Problem};
use gpu::attention::launch::Prepared;

/// f32 elements of scratch: partial sums of weights' gradients, where kernels compute them.
pub(super) fn scratch<T: Float>(scope: &Scope, machine: Emulation) -> usize {
    let kernels = T::DTYPE == DType::Bf16 && machine.hopper && machine.products != Products::Cublaslt;
    if kernels { Scratch::needed(scope, machine.multiprocessors) } else { 0 }
}

impl<T: Float> Cuda<T> {
    /// An operand: `tensor`, which must hold at least `len` floats.
    fn operand(&self, name: &str, tensor: Tensor, len: usize) -> Result<u64> {
        Ok(self.arena.address::<T>(name, tensor, len)?.addr() as u64)
    }

    fn element(&self) -> Element {
        match T::DTYPE {
            DType::Bf16 => Element::Bf16,
            _ if self.executor.tf32() => Element::Tf32,
            _ => Element::F32,
        }
    }

    fn product(&mut self, problem: &Problem, operands: &Operands) -> Result<()> {
        self.product_or(problem, operands, Vec::new())
    }

    /// As [`Executor::matmul`](super::executor::Executor::matmul).
    fn product_or(&mut self, problem: &Problem, operands: &Operands, otherwise: Vec<Prepared>) -> Result<()> {
        if problem.m == 0 || problem.n == 0 {
            return Ok(());
        }
        // SAFETY: `operand` has held each tensor to the length its shape implies; outputs are tensors of their own.
        unsafe { self.executor.matmul(problem, operands, otherwise) }
    }
}

/// A GELU epilogue's auxiliary matrix has a leading dimension that is a multiple of this.
const FUSED_GELU_WIDTH: usize = 8;

impl<T: Float> Cuda<T> {
    /// Whether the product that gives `oc` columns, with a bias, applies GELU itself.
    fn fuses_gelu_forward(&self, bias: Option<Tensor>, oc: usize) -> bool {
        self.gelu_fusion >= GeluFusion::Forward && bias.is_some() && oc.is_multiple_of(FUSED_GELU_WIDTH)
    }
}

/// A product with an ending of its own.
fn forward_product<T: Float>(
    cuda: &Cuda<T>,
    out: Tensor,
    inp: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    ending: Ending,
    shape: Linear,
) -> Result<(Problem, Operands)> {
    let Linear { rows, c, oc } = shape;
    let (residual, pre_gelu) = match ending {
        Ending::Sum => (None, None),
        Ending::Residual(residual) => (Some(residual), None),
        Ending::Gelu(pre_gelu) => (None, Some(pre_gelu)),
    };
    let problem = Problem {
        m: oc,
        n: rows,
        k: c,
        transpose_a: true,
        transpose_b: false,
        element: cuda.element(),
        epilogue: match (bias, pre_gelu) {
            (Some(_), Some(_)) => Epilogue::GeluAuxBias,
            (Some(_), None) => Epilogue::Bias,
            _ => Epilogue::None,
        },
        accumulate: residual.is_some(),
        output: None,
    };
    let operands = Operands {
        a: cuda.operand("weight", weight, oc * c)?,
        b: cuda.operand("inp", inp, rows * c)?,
        d: cuda.operand("out", out, rows * oc)?,
        bias: bias.map(|bias| cuda.operand("bias", bias, oc)).transpose()?,
        c: residual.map(|residual| cuda.operand("residual", residual, rows * oc)).transpose()?,
        aux: pre_gelu.map(|pre_gelu| cuda.operand("pre_gelu", pre_gelu, rows * oc)).transpose()?,
        gelu: None,
    };
    Ok((problem, operands))
}

pub(super) fn forward<T: Float>(
    cuda: &mut Cuda<T>,
    out: Tensor,
    inp: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    ending: Ending,
    shape: Linear,
) -> Result<()> {
    let apart = match ending {
        Ending::Gelu(pre_gelu) if !cuda.fuses_gelu_forward(bias, shape.oc) => Some(pre_gelu),
        _ => None,
    };
    let (product, own_ending) = apart.map_or((out, ending), |pre_gelu| (pre_gelu, Ending::Sum));
    let (problem, operands) = forward_product(cuda, product, inp, weight, bias, own_ending, shape)?;
    cuda.product(&problem, &operands)?;
    apart.map_or(Ok(()), |pre_gelu| gelu::forward(cuda, out, pre_gelu, shape.rows * shape.oc))
}

/// The product to repeat where `out`, the GELU of `pre_gelu`, is to be made again: the library's GELU saw its product before that
/// was rounded to `pre_gelu`. `None` where the GELU of what is in `pre_gelu` has the same bits, as that of the kernels.
fn gelu_product<T: Float>(
    cuda: &Cuda<T>,
    out: Tensor,
    pre_gelu: Tensor,
    GeluForward { inp, weight, bias, shape }: GeluForward,
) -> Result<Option<(Problem, Operands)>> {
    if !cuda.fuses_gelu_forward(bias, shape.oc) {
        return Ok(None);
    }
    let product = forward_product(cuda, out, inp, weight, bias, Ending::Gelu(pre_gelu), shape)?;
    Ok(if cuda.executor.is_by_kernel(&product.0, &product.1)? { None } else { Some(product) })
}

/// Writes inp, the GELU of `pre_gelu`, again; or returns the pass that does, if the product that gives dinp is to do it.
fn make_again<T: Float>(
    cuda: &mut Cuda<T>,
    inp: Tensor,
    pre_gelu: Tensor,
    again: GeluForward,
    dinp: (&Problem, &Operands),
) -> Result<Option<Prepared>> {
    let (problem, operands) = dinp;
    let pass = gelu::prepare(cuda, inp, pre_gelu, problem.n * problem.m)?;
    let fused = problem.epilogue == Epilogue::DGelu;
    if fused && cuda.executor.notes_products() {
        // Nothing is decided of the forward's product yet, nor of this one: either way is to be known.
        cuda.product(problem, operands)?;
        return Ok(Some(pass));
    }
    if let Some((problem, operands)) = gelu_product(cuda, inp, pre_gelu, again)? {
        cuda.product(&problem, &operands)?;
        return Ok(None);
    }
    // Where the library gives dinp to those that keep inp, it has to here, or the bits of dinp would depend on what is kept.
    if fused && cuda.executor.is_by_kernel(problem, operands)? {
        return Ok(Some(pass));
    }
    cuda.launch(&pass.launch, pass.grid, pass.shared_bytes)?;
    Ok(None)
}

pub(super) fn backward<T: Float>(
    cuda: &mut Cuda<T>,
    dinp: Tensor,
    dweight: Tensor,
    dbias: Option<Tensor>,
    dout: Tensor,
    inp: Tensor,
    weight: Tensor,
    gelu: Option<GeluInput>,
    shape: Linear,
) -> Result<()> {
    let Linear { rows, c, oc } = shape;
    let sums = dbias.map_or(Ok(Vec::new()), |dbias| bias::backward(cuda, dbias, dout, rows, oc))?;
    let fused = gelu.filter(|_| cuda.gelu_fusion == GeluFusion::Both && c.is_multiple_of(FUSED_GELU_WIDTH));
    let element = cuda.element();
    let dout = cuda.operand("dout", dout, rows * oc)?;

    let problem = Problem {
        m: c,
        n: rows,
        k: oc,
        transpose_a: false,
        transpose_b: false,
        element,
        epilogue: if fused.is_some() { Epilogue::DGelu } else { Epilogue::None },
        accumulate: false,
        output: None,
    };
    let operands = Operands {
        a: cuda.operand("weight", weight, oc * c)?,
        b: dout,
        d: cuda.operand("dinp", dinp, rows * c)?,
        c: None,
        bias: None,
        aux: fused.map(|gelu| cuda.operand("pre_gelu", gelu.pre_gelu, rows * c)).transpose()?,
        gelu: None,
    };
    let pass = match gelu {
        Some(GeluInput { pre_gelu, again: Some(again) }) => {
            make_again(cuda, inp, pre_gelu, again, (&problem, &operands))?
        }
        _ => None,
    };
    match pass {
        Some(pass) => {
            let problem = Problem { epilogue: Epilogue::DGeluAndGelu, ..problem };
            let operands = Operands { gelu: Some(cuda.operand("inp", inp, rows * c)?), ..operands };
            cuda.product_or(&problem, &operands, vec![pass])?;
        }
        None => cuda.product(&problem, &operands)?,
    }
    if let (Some(gelu), None) = (gelu, fused) {
        gelu::backward(cuda, dinp, gelu.pre_gelu, rows * c)?;
    }

    let problem = Problem {
        m: c,
        n: oc,
        k: rows,
        transpose_a: false,
        transpose_b: true,
        element,
        epilogue: if dbias.is_some() { Epilogue::BiasGradB } else { Epilogue::None },
        accumulate: true,
        output: (dweight.dtype != T::DTYPE).then_some(Element::F32),
    };
    let operands = Operands {
        a: cuda.operand("inp", inp, rows * c)?,
        b: dout,
        d: if problem.output.is_some() {
            cuda.arena.address::<f32>("dweight", dweight, oc * c)?.addr() as u64
        } else {
            cuda.operand("dweight", dweight, oc * c)?
        },
        c: None,
        bias: dbias.map(|dbias| cuda.operand("dbias", dbias, oc)).transpose()?,
        aux: None,
        gelu: None,
    };
    cuda.product_or(&problem, &operands, sums)
}
