//! Host side: selects the kernel instance for a storage type and a number of channels, with its grid and shared memory.

use super::{rmsnorm_backward_reduce, rmsnorm_backward_select, rmsnorm_forward_fp8_select, rmsnorm_forward_select};
use crate::column_sum;
use crate::launch::KernelLaunch;
use crate::norm_rows::Shape;
use crate::quantize::QuantizedOperands;
use cuda_std::shared::Layout;
use cuda_std::{E4m3, Element, Global, GlobalMut, bf16};

/// The sizes of an operation, and the GPU's.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Rows.
    pub rows: usize,
    /// C, a number of channels for which [`Shape::of`] returns a shape.
    pub channels: usize,
    /// Number of SMs.
    pub sm_count: usize,
}

/// The operands of the forward kernel.
#[derive(Clone, Copy)]
pub struct ForwardOperands<T> {
    /// (rows, C)
    pub out: GlobalMut<T>,
    /// (rows)
    pub rstd: GlobalMut<f32>,
    /// (rows, C)
    pub inp: Global<T>,
    /// (C)
    pub weight: Option<Global<T>>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Returns the forward kernel, or `None` if no kernel supports the number of channels.
pub fn forward<T: Element>(operands: ForwardOperands<T>, size: Size) -> Option<KernelLaunch> {
    let (shape, rows, channels) = (Shape::of::<T>(size.channels)?, size.rows as u32, size.channels as u32);
    let ForwardOperands { out, rstd, inp, weight, eps } = operands;
    let weight = weight.unwrap_or(Global::null());
    Some(KernelLaunch {
        launch: rmsnorm_forward_select::<T>(shape.arguments(), out, rstd, inp, weight, eps, rows, channels)?,
        grid: [shape.forward_grid(size.rows, size.sm_count), 1, 1],
        shared_bytes: shape.forward_shared_bytes::<T>(),
    })
}

/// The operands of the forward kernel that quantizes its output.
#[derive(Clone, Copy)]
pub struct Fp8ForwardOperands {
    /// (rows, C)
    pub quantized: QuantizedOperands<E4m3>,
    /// (rows)
    pub rstd: GlobalMut<f32>,
    /// (rows, C)
    pub inp: Global<bf16>,
    /// (C)
    pub weight: Option<Global<bf16>>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Returns the forward kernel that quantizes its output, or `None` if no kernel supports the number of channels.
pub fn forward_fp8(operands: Fp8ForwardOperands, size: Size) -> Option<KernelLaunch> {
    let (shape, rows, channels) = (Shape::of::<bf16>(size.channels)?, size.rows as u32, size.channels as u32);
    let Fp8ForwardOperands { quantized: QuantizedOperands { out, amax, scale }, rstd, inp, weight, eps } = operands;
    let weight = weight.unwrap_or(Global::null());
    Some(KernelLaunch {
        launch: rmsnorm_forward_fp8_select::<E4m3>(
            shape.arguments(),
            out,
            rstd,
            amax,
            scale,
            inp,
            weight,
            eps,
            rows,
            channels,
        )?,
        grid: [shape.forward_fp8_grid(size.rows, size.sm_count), 1, 1],
        shared_bytes: shape.forward_fp8_shared_bytes(),
    })
}

/// The operands of the backward kernels.
#[derive(Clone, Copy)]
pub struct BackwardOperands<T> {
    /// (rows, C), accumulated
    pub dinp: GlobalMut<T>,
    /// (rows, C)
    pub dout: Global<T>,
    /// (rows, C)
    pub inp: Global<T>,
    /// (rows)
    pub rstd: Global<f32>,
    /// The weight, if the norm has one.
    pub weight: Option<Weight<T>>,
}

/// The weight of a norm, and its gradient.
#[derive(Clone, Copy)]
pub struct Weight<T> {
    /// (C)
    pub weight: Global<T>,
    /// (C), accumulated
    pub dweight: GlobalMut<T>,
    /// Scratch memory of [`backward_partials`] elements.
    pub partials: GlobalMut<f32>,
}

/// Returns the number of f32 elements of [`Weight::partials`], or `None` if no kernel supports the number of channels.
pub fn backward_partials<T: Element>(size: Size) -> Option<usize> {
    Some(Shape::of::<T>(size.channels)?.backward_grid(size.rows, size.sm_count) as usize * size.channels)
}

/// Returns the backward kernels in the order in which they must run, or `None` if no kernel supports the number of
/// channels.
pub fn backward<T: Element>(operands: BackwardOperands<T>, size: Size) -> Option<Vec<KernelLaunch>> {
    let (shape, rows, channels) = (Shape::of::<T>(size.channels)?, size.rows as u32, size.channels as u32);
    let blocks = shape.backward_grid(size.rows, size.sm_count);
    let BackwardOperands { dinp, dout, inp, rstd, weight } = operands;
    let weights = weight.map(|Weight { weight, partials, .. }| (weight, partials));
    let (of_weight, partials) = weights.unwrap_or((Global::null(), GlobalMut::null()));
    let (packets, warps, group_rows) = shape.arguments();
    let key = (packets, warps, group_rows, weight.is_some());
    let first = KernelLaunch {
        launch: rmsnorm_backward_select::<T>(key, dinp, partials, dout, inp, of_weight, rstd, rows, channels)?,
        grid: [blocks, 1, 1],
        shared_bytes: shape.backward_shared_bytes::<T>(),
    };
    let Some(Weight { dweight, partials, .. }) = weight else { return Some(vec![first]) };
    let mut layout = Layout::new();
    column_sum::shared(&mut layout);
    Some(vec![
        first,
        KernelLaunch {
            launch: rmsnorm_backward_reduce::<T>(dweight, partials.reader(), blocks, channels),
            grid: [column_sum::grid(size.channels), 1, 1],
            shared_bytes: layout.bytes(),
        },
    ])
}
