//! Activation kernels. They run if no GEMM epilogue applies the activation.

use super::quantize::quantize;
use super::{Cuda, Float, shared_bytes};
use crate::ops::{Activation, Fp8Format, Quantize};
use crate::tensor::Tensor;
use crate::{Result, Workload};
use anyhow::ensure;
use cuda_std::{E4m3, E5m2, Fp8, GlobalMut};
use gpu::launch::KernelLaunch;
use gpu::quantize::{tile_and_maxima, transpose_grid};
use gpu::quantize_activation::{self, quantize_activation, quantize_activation_gradient, tiles_and_maxima};
use gpu::{gelu, relu_squared, swiglu};

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
pub(super) struct Shape {
    pub rows: usize,
    /// Columns of the output; the preactivation has [`Activation::inputs`] times as many.
    pub columns: usize,
}

impl Shape {
    /// Returns the elements of the output.
    const fn elements(self) -> usize {
        self.rows * self.columns
    }

    /// Checks that rows consist of whole packets.
    fn check<T: Float>(self, activation: Activation) -> Result<()> {
        ensure!(
            self.columns.is_multiple_of(T::PACKET),
            "{activation:?}: expected a multiple of {} columns, found {}",
            T::PACKET,
            self.columns
        );
        Ok(())
    }
}

/// Returns the kernel of out (rows, columns) = activation(preactivation).
pub(super) fn forward_kernel<T: Float>(
    cuda: &Cuda<T>,
    activation: Activation,
    out: Tensor,
    preactivation: Tensor,
    shape: Shape,
) -> Result<KernelLaunch> {
    let n = shape.elements();
    let inp = cuda.input("preactivation", preactivation, n * activation.inputs())?;
    let out = cuda.output("out", out, n)?;
    let (launch, grid) = match activation {
        Activation::Gelu => (gelu::gelu_forward::<T>(out, inp, n as u64), gelu::grid::<T>(n)),
        Activation::ReluSquared => {
            shape.check::<T>(activation)?;
            (relu_squared::relu_squared_forward::<T>(out, inp, n as u64), relu_squared::grid::<T>(n))
        }
        Activation::SwiGlu => {
            shape.check::<T>(activation)?;
            (swiglu::swiglu_forward::<T>(out, inp, n as u64, shape.columns as u32), swiglu::grid::<T>(n))
        }
    };
    Ok(KernelLaunch { launch, grid: [grid, 1, 1], shared_bytes: 0 })
}

/// Computes out (rows, columns) = activation(preactivation).
pub(super) fn forward<T: Float>(
    cuda: &mut Cuda<T>,
    activation: Activation,
    out: Tensor,
    preactivation: Tensor,
    shape: Shape,
) -> Result<()> {
    let kernel = forward_kernel(cuda, activation, out, preactivation, shape)?;
    cuda.launch(&kernel.launch, kernel.grid, kernel.shared_bytes)
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
    shape: Shape,
) -> Result<KernelLaunch> {
    let n = shape.elements();
    let inp = cuda.input("preactivation", preactivation, n * activation.inputs())?;
    let dinp = cuda.output("dinp", dinp, n * activation.inputs())?;
    let (launch, grid) = match activation {
        Activation::Gelu => (gelu::gelu_backward::<T>(dinp, inp, n as u64), gelu::grid::<T>(n)),
        Activation::ReluSquared => {
            shape.check::<T>(activation)?;
            (relu_squared::relu_squared_backward::<T>(dinp, inp, n as u64), relu_squared::grid::<T>(n))
        }
        Activation::SwiGlu => {
            shape.check::<T>(activation)?;
            let dout = cuda.input("dout", dout, n)?;
            (swiglu::swiglu_backward::<T>(dinp, dout, inp, n as u64, shape.columns as u32), swiglu::grid::<T>(n))
        }
    };
    Ok(KernelLaunch { launch, grid: [grid, 1, 1], shared_bytes: 0 })
}

/// Runs [`backward_kernel`].
pub(super) fn backward<T: Float>(
    cuda: &mut Cuda<T>,
    activation: Activation,
    dinp: Tensor,
    dout: Tensor,
    preactivation: Tensor,
    shape: Shape,
) -> Result<()> {
    let kernel = backward_kernel(cuda, activation, dinp, dout, preactivation, shape)?;
    cuda.launch(&kernel.launch, kernel.grid, kernel.shared_bytes)
}

/// Evaluates `$call` with the type of an activation's function as `$function`.
macro_rules! with_function {
    (type $type:ident, $function:ident => $call:expr) => {{
        type $function = quantize_activation::$type;
        $call
    }};
    ($activation:expr, $function:ident => $call:expr) => {
        match $activation {
            Activation::Gelu => with_function!(type Gelu, $function => $call),
            Activation::ReluSquared => with_function!(type ReluSquared, $function => $call),
            Activation::SwiGlu => with_function!(type SwiGlu, $function => $call),
        }
    };
}

/// Quantizes activation(preactivation): in the kernel that computes it, or else after it has been written to `op.inp`.
pub(super) fn quantize_forward<T: Float>(
    cuda: &mut Cuda<T>,
    activation: Activation,
    preactivation: Tensor,
    op: Quantize,
) -> Result<()> {
    let [rows, columns] = op.shape;
    let given = cuda.given_scale(&op)?.filter(|_| op.format == Fp8Format::E4m3 && op.column_sums.is_none());
    let Some((amax, scale)) = given else {
        forward(cuda, activation, op.inp, preactivation, Shape { rows, columns })?;
        return quantize(cuda, op);
    };
    let (n, r, c) = (rows * columns, rows as u32, columns as u32);
    let inp = cuda.input("preactivation", preactivation, n * activation.inputs())?;
    let address =
        |name, tensor: Option<Tensor>| tensor.map_or(Ok(GlobalMut::null()), |tensor| cuda.fp8::<E4m3>(name, tensor, n));
    let (out, transposed) = (address("out", op.out)?, address("transposed", op.transposed)?);
    let launch = with_function!(activation, F => match (op.out, op.transposed) {
        (Some(_), Some(_)) => quantize_activation::<F, true, true>(out, transposed, amax, inp, scale, r, c),
        (None, Some(_)) => quantize_activation::<F, false, true>(out, transposed, amax, inp, scale, r, c),
        (_, None) => quantize_activation::<F, true, false>(out, transposed, amax, inp, scale, r, c),
    });
    cuda.launch(&launch, transpose_grid(rows, columns), shared_bytes(tile_and_maxima))
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
    let kernel = match op.format {
        Fp8Format::E4m3 => gradient_kernel::<T, E4m3>(cuda, activation, [dout, preactivation], &op)?,
        Fp8Format::E5m2 => gradient_kernel::<T, E5m2>(cuda, activation, [dout, preactivation], &op)?,
    };
    if let Some(KernelLaunch { launch, grid, shared_bytes }) = kernel {
        cuda.launch(&launch, grid, shared_bytes)?;
        return cuda.add_column_sums(&op);
    }
    let shape = Shape { rows: op.shape[0], columns: op.shape[1] / activation.inputs() };
    backward(cuda, activation, op.inp, dout, preactivation, shape)?;
    quantize(cuda, op)
}

/// Returns the kernel of [`quantize_backward`] that also computes the partial sums of the columns, or `None` if the scale is not
/// given or a layout is missing.
fn gradient_kernel<T: Float, F: Fp8>(
    cuda: &Cuda<T>,
    activation: Activation,
    [dout, preactivation]: [Tensor; 2],
    op: &Quantize,
) -> Result<Option<KernelLaunch>> {
    let (Some(out), Some(transposed)) = (op.out, op.transposed) else { return Ok(None) };
    let Some((amax, scale)) = cuda.given_scale(op)? else { return Ok(None) };
    let ([rows, width], inputs) = (op.shape, activation.inputs());
    let (n, columns) = (rows * width, width / inputs);
    let inp = cuda.input("preactivation", preactivation, n)?;
    let dout = cuda.input("dout", dout, n / inputs)?;
    let (out, transposed) = (cuda.fp8::<F>("out", out, n)?, cuda.fp8::<F>("transposed", transposed, n)?);
    let (r, c) = (rows as u32, columns as u32);
    let launch = with_function!(activation, A => if let Some(sums) = cuda.partial_sums(op)? {
        quantize_activation_gradient::<A, F, true>(out, transposed, amax, sums, dout, inp, scale, r, c)
    } else {
        let none = GlobalMut::null();
        quantize_activation_gradient::<A, F, false>(out, transposed, amax, none, dout, inp, scale, r, c)
    });
    let (grid, shared_bytes) = (transpose_grid(rows, columns), shared_bytes(tiles_and_maxima));
    Ok(Some(KernelLaunch { launch, grid, shared_bytes }))
}
