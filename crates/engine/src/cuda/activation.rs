//! Activation kernels. They run if no GEMM epilogue applies the activation.

use super::{Cuda, Float};
use crate::ops::Activation;
use crate::tensor::Tensor;
use crate::{Result, Workload};
use anyhow::ensure;
use gpu::launch::KernelLaunch;
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
