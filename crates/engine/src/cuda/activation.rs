//! Activation kernels. They run if no GEMM epilogue applies the activation.

use super::quantize::quantize;
use super::{Cuda, Float, shared_bytes};
use crate::ops::{Activate, ActivateBackward, Activation, Fp8Format, Quantize};
use crate::tensor::Tensor;
use crate::{Result, Workload};
use anyhow::{Context, ensure};
use cuda_std::{E4m3, Global, GlobalMut};
use gpu::activation::{activation_backward_select, activation_forward_select, grid};
use gpu::launch::KernelLaunch;
use gpu::quantize::{tile_and_maxima, transpose_grid};
use gpu::quantize_activation::{quantize_activation_gradient_select, quantize_activation_select, tiles_and_maxima};

/// Checks that the kernels support the channels of the MLP.
pub(super) fn check<T: Float>(workload: &Workload) -> Result<()> {
    let columns = workload.mlp_channels;
    ensure!(
        columns.is_multiple_of(T::PACKET),
        "MLP in {}: expected a multiple of {} channels, found {columns}; change --ffn or --channels, or use --device cpu",
        T::DTYPE.name(),
        T::PACKET
    );
    Ok(())
}

/// Sizes of an activation's output.
#[derive(Clone, Copy)]
pub(super) struct ActivationShape {
    pub rows: usize,
    /// Columns of the output; the preactivation has [`Activation::inputs`] times as many.
    pub columns: usize,
}

impl ActivationShape {
    /// Returns the elements of the output, and the columns by which a kernel finds up and gate.
    fn elements<T: Float>(self, activation: Activation) -> Result<(usize, u32)> {
        ensure!(
            self.columns.is_multiple_of(T::PACKET),
            "{activation:?}: expected a multiple of {} columns, found {}",
            T::PACKET,
            self.columns
        );
        Ok((self.rows * self.columns, self.columns as u32))
    }
}

/// The error for an activation without kernels.
fn no_kernel(activation: Activation) -> String {
    format!("{activation:?}: no kernel has this activation")
}

/// Returns the kernel of out (rows, columns) = activation(preactivation).
pub(super) fn forward_kernel<T: Float>(
    cuda: &Cuda<T>,
    activation: Activation,
    out: Tensor,
    preactivation: Tensor,
    shape: ActivationShape,
) -> Result<KernelLaunch> {
    let (n, columns) = shape.elements::<T>(activation)?;
    let inp = cuda.input("preactivation", preactivation, n * activation.inputs())?;
    let out = cuda.output("out", out, n)?;
    let launch = activation_forward_select::<T>((activation,), out, inp, n as u64, columns);
    let launch = launch.with_context(|| no_kernel(activation))?;
    Ok(KernelLaunch { launch, grid: [grid::<T>(n), 1, 1], shared_bytes: 0 })
}

/// Returns the kernel of dinp (rows, columns · [`Activation::inputs`]) = dout (rows, columns) times the derivative of the
/// activation.
///
/// If the activation has one input, `dinp` holds dout and is replaced in place. If it has two, `dout` is another tensor.
pub(super) fn backward_kernel<T: Float>(
    cuda: &Cuda<T>,
    activation: Activation,
    dinp: Tensor,
    dout: Tensor,
    preactivation: Tensor,
    shape: ActivationShape,
) -> Result<KernelLaunch> {
    let (n, columns) = shape.elements::<T>(activation)?;
    let inp = cuda.input("preactivation", preactivation, n * activation.inputs())?;
    let dinp = cuda.output("dinp", dinp, n * activation.inputs())?;
    let dout = if activation.is_gated() { cuda.input("dout", dout, n)? } else { Global::null() };
    let launch = activation_backward_select::<T>((activation,), dinp, dout, inp, n as u64, columns);
    let launch = launch.with_context(|| no_kernel(activation))?;
    Ok(KernelLaunch { launch, grid: [grid::<T>(n), 1, 1], shared_bytes: 0 })
}

pub(super) fn activate<T: Float>(cuda: &mut Cuda<T>, op: Activate) -> Result<()> {
    let Activate { activation, out, preactivation, columns } = op;
    let shape = ActivationShape { rows: out.len / columns, columns };
    cuda.launch_kernel(&forward_kernel(cuda, activation, out, preactivation, shape)?)
}

pub(super) fn activate_backward<T: Float>(cuda: &mut Cuda<T>, op: ActivateBackward) -> Result<()> {
    let ActivateBackward { activation, dinp, dout, preactivation, columns } = op;
    let shape = ActivationShape { rows: preactivation.len / activation.inputs() / columns, columns };
    cuda.launch_kernel(&backward_kernel(cuda, activation, dinp, dout.unwrap_or(dinp), preactivation, shape)?)
}

/// Quantizes activation(preactivation): in the kernel that computes it, or else after it has been written to `op.inp`.
pub(super) fn quantize_forward<T: Float>(
    cuda: &mut Cuda<T>,
    activation: Activation,
    preactivation: Tensor,
    op: Quantize,
) -> Result<()> {
    if let Some(kernel) = quantizing_kernel(cuda, activation, preactivation, &op)? {
        return cuda.launch_kernel(&kernel);
    }
    let shape = ActivationShape { rows: op.shape[0], columns: op.shape[1] };
    cuda.launch_kernel(&forward_kernel(cuda, activation, op.inp, preactivation, shape)?)?;
    quantize(cuda, op)
}

/// Returns the kernel that computes and quantizes activation(preactivation), or `None` if the scale is not given.
pub(super) fn quantizing_kernel<T: Float>(
    cuda: &Cuda<T>,
    activation: Activation,
    preactivation: Tensor,
    op: &Quantize,
) -> Result<Option<KernelLaunch>> {
    let [rows, columns] = op.shape;
    let given = cuda.given_scale(op)?.filter(|_| op.format == Fp8Format::E4m3 && op.column_sums.is_none());
    let Some((amax, scale)) = given else { return Ok(None) };
    let (n, r, c) = (rows * columns, rows as u32, columns as u32);
    let inp = cuda.input("preactivation", preactivation, n * activation.inputs())?;
    let address =
        |name, tensor: Option<Tensor>| tensor.map_or(Ok(GlobalMut::null()), |tensor| cuda.fp8::<E4m3>(name, tensor, n));
    let (out, transposed) = (address("out", op.out)?, address("transposed", op.transposed)?);
    let key = (activation, op.out.is_some() || op.transposed.is_none(), op.transposed.is_some());
    let launch = quantize_activation_select(key, out, transposed, amax, inp, scale, r, c, cuda.end(op)?);
    let launch = launch.with_context(|| no_kernel(activation))?;
    let (grid, shared_bytes) = (transpose_grid(rows, columns), shared_bytes(tile_and_maxima));
    Ok(Some(KernelLaunch { launch, grid, shared_bytes }))
}

/// Quantizes the gradient of `preactivation`, given `dout`, that of activation(preactivation): in the kernel that computes it, or
/// else after it has been written to `op.inp`. The tensors are those of [`backward_kernel`].
pub(super) fn quantize_backward<T: Float>(
    cuda: &mut Cuda<T>,
    activation: Activation,
    dout: Tensor,
    preactivation: Tensor,
    op: Quantize,
) -> Result<()> {
    if let Some(kernel) = gradient_kernel(cuda, activation, [dout, preactivation], &op)? {
        cuda.launch_kernel(&kernel)?;
        return cuda.add_column_sums(&op);
    }
    let shape = ActivationShape { rows: op.shape[0], columns: op.shape[1] / activation.inputs() };
    cuda.launch_kernel(&backward_kernel(cuda, activation, op.inp, dout, preactivation, shape)?)?;
    quantize(cuda, op)
}

/// Returns the kernel of [`quantize_backward`] that also computes the partial sums of the columns, or `None` if the scale is not
/// given or a layout is missing.
pub(super) fn gradient_kernel<T: Float>(
    cuda: &Cuda<T>,
    activation: Activation,
    [dout, preactivation]: [Tensor; 2],
    op: &Quantize,
) -> Result<Option<KernelLaunch>> {
    let (Some(out), Some(transposed)) = (op.out, op.transposed) else { return Ok(None) };
    let given = cuda.given_scale(op)?.filter(|_| op.format == Fp8Format::E5m2);
    let Some((amax, scale)) = given else { return Ok(None) };
    let ([rows, width], inputs) = (op.shape, activation.inputs());
    let (n, columns) = (rows * width, width / inputs);
    let inp = cuda.input("preactivation", preactivation, n)?;
    let dout = cuda.input("dout", dout, n / inputs)?;
    let (out, transposed) = (cuda.fp8("out", out, n)?, cuda.fp8("transposed", transposed, n)?);
    let (r, c) = (rows as u32, columns as u32);
    let sums = cuda.partial_sums(op)?;
    let (key, partials) = ((activation, sums.is_some()), sums.unwrap_or(GlobalMut::null()));
    let launch = quantize_activation_gradient_select(key, out, transposed, amax, partials, dout, inp, scale, r, c);
    let launch = launch.with_context(|| no_kernel(activation))?;
    let (grid, shared_bytes) = (transpose_grid(rows, columns), shared_bytes(tiles_and_maxima));
    Ok(Some(KernelLaunch { launch, grid, shared_bytes }))
}
