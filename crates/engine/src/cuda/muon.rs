//! Muon: elementwise kernels, and Newton-Schulz iterations as GEMMs.

use super::{Cuda, Float, StorageType, shared_bytes};
use crate::Result;
use crate::gemm::{
    Batching, Gemm, GemmCall, GemmEpilogue, GemmLayout, GemmOperands, Residual, ScaleFactors, StridedBatch,
};
use crate::ops::{Master, MuonApply, MuonMomentum, MuonVariance, Orthogonalize, SMALLEST_NORM, SMALLEST_VARIANCE};
use crate::tensor::{DType, Tensor};
use anyhow::{bail, ensure};
use cuda_std::bf16;
use gpu::{column_sum, muon};

pub(super) fn momentum<T: Float>(cuda: &mut Cuda<T>, op: MuonMomentum) -> Result<()> {
    match (T::DTYPE, op.m.dtype) {
        (_, DType::F32) => launch_momentum::<T, f32>(cuda, op),
        (DType::Bf16, DType::Bf16) => launch_momentum::<T, bf16>(cuda, op),
        (params, m) => bail!(
            "muon: expected m in f32, or in bf16 beside bf16 parameters; found {} parameters and {} m",
            params.name(),
            m.name()
        ),
    }
}

/// Launches the kernel for momentum of type `M`.
fn launch_momentum<T: Float, M: Float>(cuda: &mut Cuda<T>, op: MuonMomentum) -> Result<()> {
    let MuonMomentum { update, m, grads, stats, momentum, grad_factor, clip, seed } = op;
    let n = update.len;
    let launch = muon::muon_momentum::<T, M>(
        cuda.output("update", update, n)?,
        cuda.output("m", m, n)?,
        cuda.input("grads", grads, n)?,
        cuda.input("stats", stats, 2)?,
        momentum,
        grad_factor,
        clip,
        seed,
        n as u64,
    );
    cuda.launch(launch, [muon::grid::<T>(n), 1, 1], 0)
}

pub(super) fn variance<T: Float>(cuda: &mut Cuda<T>, op: MuonVariance) -> Result<()> {
    match (T::DTYPE, op.second.dtype) {
        (_, DType::F32) => launch_variance::<T, f32>(cuda, op),
        (DType::Bf16, DType::Bf16) => launch_variance::<T, bf16>(cuda, op),
        (params, second) => bail!(
            "muon: expected running means in f32, or in bf16 beside bf16 parameters; found {} parameters and {} means",
            params.name(),
            second.name()
        ),
    }
}

/// Launches the kernels for running means of type `M`.
fn launch_variance<T: Float, M: Float>(cuda: &mut Cuda<T>, op: MuonVariance) -> Result<()> {
    let MuonVariance { update, second, sums, stats, rows, cols, beta2, grad_factor, seed } = op;
    let (elements, n) = (rows * cols, rows.max(cols));
    let x = cuda.output("update", update, elements)?;
    let sums = cuda.output("sums", sums, n)?;
    let [rows, cols] = [rows, cols].map(|side| side as u32);
    let row_grid = [muon::row_grid(op.rows), 1, 1];
    if rows >= cols {
        cuda.launch(muon::muon_row_sums::<T>(sums, x.reader(), elements as u64, rows, cols), row_grid, 0)?;
    } else {
        let launch = muon::variance::muon_column_sums::<T>(sums, x.reader(), rows, cols);
        cuda.launch(launch, [column_sum::grid(n), 1, 1], shared_bytes(column_sum::shared))?;
    }
    let launch = muon::variance::muon_variance_factors::<M>(
        cuda.output("second", second, n)?,
        sums,
        cuda.input("stats", stats, 2)?,
        muon::variance::Variance { beta2, smallest: SMALLEST_VARIANCE, grad_factor, seed },
        rows.min(cols),
        rows.max(cols),
    );
    cuda.launch(launch, [1, 1, 1], shared_bytes(muon::shared))?;
    cuda.launch(muon::variance::muon_scale_by_factors::<T>(x, sums.reader(), rows, cols), row_grid, 0)
}

pub(super) fn apply<T: Float>(cuda: &mut Cuda<T>, op: MuonApply) -> Result<()> {
    match (T::DTYPE, op.master) {
        (_, Master::None | Master::F32(_)) => launch_apply::<T, f32>(cuda, op),
        (DType::Bf16, Master::Remainder(_)) => launch_apply::<T, u16>(cuda, op),
        (params, Master::Remainder(_)) => {
            bail!("muon: expected remainders beside bf16 parameters, found {} parameters", params.name())
        }
    }
}

/// Launches the kernel for master weights `W`.
fn launch_apply<T: Float, W: StorageType + gpu::weights::Master>(cuda: &mut Cuda<T>, op: MuonApply) -> Result<()> {
    let MuonApply { params, master, update, stats, grad_factor, learning_rate, scale, weight_decay, seed, .. } = op;
    let cautious_decay = op.cautious_decay.into();
    let n = params.len;
    let launch = muon::muon_apply::<T, W>(
        cuda.output("params", params, n)?,
        cuda.optional_output("master", master.tensor(), n)?,
        cuda.input("update", update, n)?,
        cuda.input("stats", stats, 2)?,
        muon::Scalars { learning_rate, scale, weight_decay, cautious_decay, grad_factor, seed },
        n as u64,
    );
    cuda.launch(launch, [muon::grid::<T>(n), 1, 1], 0)
}

pub(super) fn orthogonalize<T: Float>(cuda: &mut Cuda<T>, op: Orthogonalize) -> Result<()> {
    let Orthogonalize { matrices, out, next, coefficients, additions, rows, cols, .. } = op;
    if matrices.is_empty() {
        return Ok(());
    }
    let small = is_small(rows, cols);
    let mut first = 0;
    while first < matrices.len() {
        let run = evenly_spaced(&matrices[first..]);
        if small {
            orthogonalize_small(cuda, op, first, run)?;
        } else if additions.equilibrate {
            scale_rows(cuda, op, first, run)?;
        } else {
            scale(cuda, op, first, run)?;
        }
        first += run.count;
    }
    if small {
        return Ok(());
    }
    let (mut from, mut to) = (next, out);
    for coefficients in coefficients.steps() {
        step(cuda, op, coefficients, from, to)?;
        std::mem::swap(&mut from, &mut to);
    }
    if additions.renormalize {
        let (stride, count) = (Orthogonalize::stride(rows * cols), matrices.len());
        let inp = Matrices { tensor: from.slice(0, (count - 1) * stride + rows * cols), count, stride };
        let scaling = muon::Scaling { factor: 1.0 / (op.side() as f32).sqrt(), epsilon: SMALLEST_NORM };
        scale_by_norms(cuda, op, to, inp, 0, scaling)?;
    }
    Ok(())
}

/// Returns whether one kernel orthogonalizes matrices of this shape. GEMMs need rows of a multiple of 8 elements.
fn is_small(rows: usize, cols: usize) -> bool {
    muon::small::fits(rows, cols) && !(rows.is_multiple_of(8) && cols.is_multiple_of(8))
}

/// Orthogonalizes the small matrices of a run. The results begin with number `first`.
fn orthogonalize_small<T: Float>(cuda: &mut Cuda<T>, op: Orthogonalize, first: usize, run: Matrices) -> Result<()> {
    let Orthogonalize { rows, cols, coefficients, additions, .. } = op;
    let (n, (factor, epsilon)) = (elements(op, first, run)?, coefficients.scaling());
    let stride = Orthogonalize::stride(n);
    let out = Tensor { len: (run.count - 1) * stride + n, ..op.result(first) };
    let launch = muon::small::muon_orthogonalize_small::<T>(
        cuda.output("out", out, out.len)?,
        cuda.input("matrices", run.tensor, run.tensor.len)?,
        muon::small::Iteration {
            coefficients: coefficients.steps(),
            scaling: muon::Scaling { factor, epsilon },
            smallest: SMALLEST_NORM,
            equilibrate: additions.equilibrate.into(),
            renormalize: additions.renormalize.into(),
        },
        stride as u64,
        run.stride as u64,
        rows as u32,
        cols as u32,
    );
    cuda.launch(launch, [run.count as u32, 1, 1], shared_bytes(muon::small::shared))
}

/// Matrices at equal distances.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Matrices {
    /// The memory from the first matrix to the end of the last.
    tensor: Tensor,
    count: usize,
    /// Elements from the start of a matrix to that of the next.
    stride: usize,
}

/// Returns as many matrices as possible, from the first on.
fn evenly_spaced(matrices: &[Tensor]) -> Matrices {
    let first = matrices[0];
    let bytes = first.dtype.bytes();
    let distance = |pair: &[Tensor]| pair[1].offset.checked_sub(pair[0].offset).map(|distance| distance / bytes);
    // The kernels read vectors of 8 elements.
    let stride = matrices.windows(2).next().and_then(distance).filter(|stride| stride.is_multiple_of(8));
    let Some(stride) = stride else { return Matrices { tensor: first, count: 1, stride: 0 } };
    let count = 1 + matrices.windows(2).take_while(|pair| distance(pair) == Some(stride)).count();
    Matrices { tensor: Tensor { len: (count - 1) * stride + first.len, ..first }, count, stride }
}

/// Writes the matrices of a run, divided by their norms, to `next`, where they begin with number `first`.
fn scale<T: Float>(cuda: &mut Cuda<T>, op: Orthogonalize, first: usize, run: Matrices) -> Result<()> {
    let (factor, epsilon) = op.coefficients.scaling();
    scale_by_norms(cuda, op, op.next, run, first, muon::Scaling { factor, epsilon })
}

/// Returns the elements of a matrix, after a check of the inputs.
fn elements(op: Orthogonalize, first: usize, run: Matrices) -> Result<usize> {
    let n = op.rows * op.cols;
    ensure!(
        op.matrices[first..first + run.count].iter().all(|matrix| matrix.len == n),
        "orthogonalize: expected matrices of {n} elements, found {:?}",
        op.matrices
    );
    Ok(n)
}

/// Writes the matrices `inp`, scaled by their norms, to `out`, where they begin with number `first`.
fn scale_by_norms<T: Float>(
    cuda: &mut Cuda<T>,
    op: Orthogonalize,
    out: Tensor,
    inp: Matrices,
    first: usize,
    scaling: muon::Scaling,
) -> Result<()> {
    let (n, matrices) = (elements(op, first, inp)?, inp.count as u32);
    let len = inp.count * muon::PARTIALS as usize;
    let partials = op.partials.slice(first * muon::PARTIALS as usize, len);
    let values = cuda.input("matrices", inp.tensor, inp.tensor.len)?;
    let sums =
        muon::muon_squared_sums::<T>(cuda.output("partials", partials, len)?, values, inp.stride as u64, n as u64);
    cuda.launch(sums, [muon::PARTIALS, matrices, 1], shared_bytes(muon::shared))?;
    let stride = Orthogonalize::stride(n);
    let out_len = (inp.count - 1) * stride + n;
    let launch = muon::muon_scale::<T>(
        cuda.output("out", out.slice(first * stride, out_len), out_len)?,
        values,
        cuda.input("partials", partials, len)?,
        scaling,
        stride as u64,
        inp.stride as u64,
        n as u64,
    );
    cuda.launch(launch, [muon::grid::<T>(n), matrices, 1], shared_bytes(muon::shared))
}

/// Writes the matrices of a run, with equal norms of their rows and divided by their norms, to `next`, where they begin with number `first`.
fn scale_rows<T: Float>(cuda: &mut Cuda<T>, op: Orthogonalize, first: usize, run: Matrices) -> Result<()> {
    let (rows, cols, n) = (op.rows, op.cols, elements(op, first, run)?);
    let len = run.count * rows;
    let row_sums = op.partials.slice(first * rows, len);
    let inp = cuda.input("matrices", run.tensor, run.tensor.len)?;
    let grid = [muon::row_grid(rows), run.count as u32, 1];
    let sums = cuda.output("partials", row_sums, len)?;
    cuda.launch(muon::muon_row_sums::<T>(sums, inp, run.stride as u64, rows as u32, cols as u32), grid, 0)?;
    let stride = Orthogonalize::stride(n);
    let out_len = (run.count - 1) * stride + n;
    let (factor, epsilon) = op.coefficients.scaling();
    let launch = muon::muon_scale_rows::<T>(
        cuda.output("next", op.next.slice(first * stride, out_len), out_len)?,
        inp,
        cuda.input("partials", row_sums, len)?,
        muon::Scaling { factor, epsilon },
        SMALLEST_NORM,
        stride as u64,
        run.stride as u64,
        rows as u32,
        cols as u32,
    );
    cuda.launch(launch, grid, shared_bytes(muon::shared))
}

/// The matrices of one operand of the steps.
#[derive(Clone, Copy)]
struct BatchOperand {
    address: u64,
    /// Elements from the start of a matrix to that of the next.
    stride: usize,
}

/// Returns the address of a batch of matrices with `elements` elements each.
fn operand<T: Float>(
    cuda: &Cuda<T>,
    name: &str,
    batch: Tensor,
    op: Orthogonalize,
    elements: usize,
) -> Result<BatchOperand> {
    let stride = Orthogonalize::stride(elements);
    let address = cuda.operand(name, batch, (op.matrices.len() - 1) * stride + elements)?;
    Ok(BatchOperand { address, stride })
}

/// Computes one Newton-Schulz step from the matrices `from` to the matrices `to`.
fn step<T: Float>(cuda: &mut Cuda<T>, op: Orthogonalize, [a, b, c]: [f32; 3], from: Tensor, to: Tensor) -> Result<()> {
    let Orthogonalize { rows, cols, .. } = op;
    let side = op.side();
    let x = operand(cuda, "matrices", from, op, rows * cols)?;
    let out = operand(cuda, "out", to, op, rows * cols)?;
    let gram = operand(cuda, "gram", op.gram, op, side * side)?;
    let polynomial = operand(cuda, "polynomial", op.polynomial, op, side * side)?;
    let count = op.matrices.len();

    let layout = if rows <= cols { GemmLayout::Nt } else { GemmLayout::Tn };
    run(cuda, [side, side, rows.max(cols)], layout, Batching::Symmetric, count, [x, x, gram], None)?;
    let scale = Some((gram, ScaleFactors { alpha: c, beta: b }));
    let operands = [gram, gram, polynomial];
    run(cuda, [side; 3], GemmLayout::Nt, Batching::Symmetric, count, operands, scale)?;
    let (left, right) = if rows <= cols { (polynomial, x) } else { (x, polynomial) };
    let scale = Some((x, ScaleFactors { alpha: 1.0, beta: a }));
    run(cuda, [rows, cols, side], GemmLayout::Nn, Batching::Strided, count, [left, right, out], scale)
}

/// Runs a GEMM on a batch of `count` matrices a, b and out, with a residual and its factors, if given.
fn run<T: Float>(
    cuda: &mut Cuda<T>,
    [m, n, k]: [usize; 3],
    layout: GemmLayout,
    batching: Batching,
    count: usize,
    [a, b, out]: [BatchOperand; 3],
    scale: Option<(BatchOperand, ScaleFactors)>,
) -> Result<()> {
    let epilogue = GemmEpilogue { residual: scale.map(|_| Residual::Scaled), ..GemmEpilogue::NONE };
    let gemm = Gemm { batching, ..cuda.gemm([m, n, k], layout, epilogue) };
    let operands = GemmOperands {
        a: a.address,
        b: b.address,
        out: out.address,
        residual: scale.map(|(residual, _)| residual.address),
        scale: scale.map(|(_, scale)| scale),
        batch: Some(StridedBatch { count, a: a.stride, b: b.stride, out: out.stride }),
        ..GemmOperands::default()
    };
    cuda.run_gemm(GemmCall { gemm, operands, fallback: Vec::new(), after: Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_as_long_as_possible() {
        let at = |i: usize| Tensor { offset: 2 * i, len: 24, dtype: DType::Bf16 };
        let of = |starts: &[usize]| evenly_spaced(&starts.iter().map(|&i| at(i)).collect::<Vec<_>>());
        let run = |count, stride, len| Matrices { tensor: Tensor { len, ..at(8) }, count, stride };
        assert_eq!(of(&[8]), run(1, 0, 24));
        assert_eq!(of(&[8, 32, 56]), run(3, 24, 72));
        assert_eq!(of(&[8, 108, 148, 188]), run(1, 0, 24), "100 is not a multiple of 8");
        assert_eq!(of(&[8, 48, 88, 120]), run(3, 40, 104));
        assert_eq!(of(&[8, 0]), run(1, 0, 24), "descending");
    }
}
