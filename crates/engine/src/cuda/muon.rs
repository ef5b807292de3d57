//! Muon: elementwise kernels, and Newton-Schulz iterations as GEMMs.

use super::{Cuda, Float, global_norm};
use crate::Result;
use crate::gemm::{Gemm, GemmCall, GemmEpilogue, GemmLayout, GemmOperands, Scale};
use crate::ops::{GlobalNorm, Master, MuonApply, MuonMomentum, Orthogonalize};
use crate::tensor::{DType, Tensor};
use anyhow::bail;
use cuda_std::{GlobalMut, bf16};
use gpu::muon;

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
    let MuonMomentum { update, m, grads, stats, momentum, clip, seed } = op;
    let n = update.len;
    let launch = muon::muon_momentum::<T, M>(
        cuda.output("update", update, n)?,
        cuda.output("m", m, n)?,
        cuda.input("grads", grads, n)?,
        cuda.input("stats", stats, 2)?,
        momentum,
        clip,
        seed,
        n as u64,
    );
    cuda.launch(&launch, [muon::grid::<T>(n), 1, 1], 0)
}

pub(super) fn apply<T: Float>(cuda: &mut Cuda<T>, op: MuonApply) -> Result<()> {
    let n = op.params.len;
    match (T::DTYPE, op.master) {
        (_, Master::None) => launch_apply::<T, f32>(cuda, op, GlobalMut::new(std::ptr::null_mut())),
        (_, Master::F32(masters)) => launch_apply(cuda, op, cuda.output::<f32>("master", masters, n)?),
        (DType::Bf16, Master::Remainder(remainders)) => {
            launch_apply(cuda, op, cuda.output::<u16>("remainder", remainders, n)?)
        }
        (params, Master::Remainder(_)) => {
            bail!("muon: expected remainders beside bf16 parameters, found {} parameters", params.name())
        }
    }
}

/// Launches the kernel for master weights `W`.
fn launch_apply<T: Float, W: gpu::weights::Master>(
    cuda: &mut Cuda<T>,
    op: MuonApply,
    masters: GlobalMut<W>,
) -> Result<()> {
    let MuonApply { params, update, stats, learning_rate, scale, weight_decay, seed, .. } = op;
    let n = params.len;
    let launch = muon::muon_apply::<T, W>(
        cuda.output("params", params, n)?,
        masters,
        cuda.input("update", update, n)?,
        cuda.input("stats", stats, 2)?,
        muon::Scalars { learning_rate, scale, weight_decay, seed },
        n as u64,
    );
    cuda.launch(&launch, [muon::grid::<T>(n), 1, 1], 0)
}

pub(super) fn orthogonalize<T: Float>(cuda: &mut Cuda<T>, op: Orthogonalize) -> Result<()> {
    let Orthogonalize { matrix, next, norm, rows, cols, coefficients, .. } = op;
    let n = rows * cols;
    global_norm::global_norm(cuda, GlobalNorm { norm, grads: matrix.slice(0, n) })?;
    let (factor, epsilon) = coefficients.scaling();
    let launch = muon::muon_scale::<T>(
        cuda.output("next", next, n)?,
        cuda.input("matrix", matrix, n)?,
        cuda.input("norm", norm, 1)?,
        factor,
        epsilon,
        n as u64,
    );
    cuda.launch(&launch, [muon::grid::<T>(n), 1, 1], 0)?;
    let (mut from, mut to) = (next, matrix);
    for coefficients in coefficients.steps() {
        step(cuda, op, coefficients, from, to)?;
        std::mem::swap(&mut from, &mut to);
    }
    Ok(())
}

/// Computes one Newton-Schulz step from the matrix `from` to the matrix `to`.
fn step<T: Float>(cuda: &mut Cuda<T>, op: Orthogonalize, [a, b, c]: [f32; 3], from: Tensor, to: Tensor) -> Result<()> {
    let Orthogonalize { gram, polynomial, rows, cols, .. } = op;
    let side = op.side();
    compute_gram(cuda, op, from)?;
    let gram = cuda.operand("gram", gram, side * side)?;
    let square = GemmOperands {
        a: gram,
        b: gram,
        out: cuda.operand("polynomial", polynomial, side * side)?,
        residual: Some(gram),
        scale: Some(Scale { alpha: c, beta: b }),
        ..GemmOperands::default()
    };
    run(cuda, [side; 3], GemmLayout::Nn, GemmEpilogue::Residual, square)?;
    let x = cuda.operand("matrix", from, rows * cols)?;
    let (left, right) = if rows <= cols { (square.out, x) } else { (x, square.out) };
    let product = GemmOperands {
        a: left,
        b: right,
        out: cuda.operand("matrix", to, rows * cols)?,
        residual: Some(x),
        scale: Some(Scale { alpha: 1.0, beta: a }),
        ..GemmOperands::default()
    };
    run(cuda, [rows, cols, side], GemmLayout::Nn, GemmEpilogue::Residual, product)
}

/// Computes X·Xᵀ, or Xᵀ·X if that is smaller. The result is symmetric: a kernel that computes half of its tiles would do.
fn compute_gram<T: Float>(cuda: &mut Cuda<T>, op: Orthogonalize, x: Tensor) -> Result<()> {
    let Orthogonalize { gram, rows, cols, .. } = op;
    let (side, layout) = (op.side(), if rows <= cols { GemmLayout::Nt } else { GemmLayout::Tn });
    let x = cuda.operand("matrix", x, rows * cols)?;
    let out = cuda.operand("gram", gram, side * side)?;
    let operands = GemmOperands { a: x, b: x, out, ..GemmOperands::default() };
    run(cuda, [side, side, rows.max(cols)], layout, GemmEpilogue::None, operands)
}

fn run<T: Float>(
    cuda: &mut Cuda<T>,
    [m, n, k]: [usize; 3],
    layout: GemmLayout,
    epilogue: GemmEpilogue,
    operands: GemmOperands,
) -> Result<()> {
    let gemm = Gemm { m, n, k, layout, precision: cuda.gemm_precision(), epilogue, f32_output: false };
    cuda.run_gemm(GemmCall { gemm, operands, fallback: Vec::new(), after: Vec::new() })
}
