//! Host side: selects the kernel instance for a norm, a storage type and a number of channels, with its grid and shared memory.

use super::backward::{norm_backward_exists, norm_backward_reduce, norm_backward_select};
use super::forward::{norm_forward_fp8_select, norm_forward_select};
pub use super::{NormKind, rows::RowShape};
use crate::column_sum;
use crate::launch::{KernelLaunch, shared_bytes};
use crate::quantize::QuantizedOperands;
use cuda_std::launch::Launch;
use cuda_std::{E4m3, Element, Global, GlobalMut, bf16};

/// The sizes of an operation, and the GPU's.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// The norm.
    pub norm: NormKind,
    /// Rows.
    pub rows: usize,
    /// C, a number of channels for which [`RowShape::of`] returns a shape.
    pub channels: usize,
    /// Number of SMs.
    pub sm_count: usize,
}

impl Size {
    /// Returns the launch of a forward kernel.
    fn forward<T: Element>(self, launch: Option<Launch>, shape: RowShape, fp8: bool) -> Option<KernelLaunch> {
        let grid = [shape.forward_grid(self.rows, self.sm_count), 1, 1];
        Some(KernelLaunch { launch: launch?, grid, shared_bytes: shape.forward_shared_bytes::<T>(fp8) })
    }
}

/// The operands of a forward kernel.
#[derive(Clone, Copy)]
pub struct ForwardOperands<T> {
    /// (rows), or null for RMSNorm
    pub mean: GlobalMut<f32>,
    /// (rows)
    pub rstd: GlobalMut<f32>,
    /// (rows, C)
    pub inp: Global<T>,
    /// (C). RMSNorm's may be null.
    pub weight: Global<T>,
    /// (C), or null for RMSNorm
    pub bias: Global<T>,
    /// Added to RMSNorm's mean square.
    pub eps: f32,
}

/// Returns the kernel that writes out (rows, C), or `None` if no kernel supports the number of channels. If `quantizes`, its bits are
/// those that [`forward_fp8`] quantizes; T is then bf16.
pub fn forward<T: Element>(
    out: GlobalMut<T>,
    operands: ForwardOperands<T>,
    size: Size,
    quantizes: bool,
) -> Option<KernelLaunch> {
    let shape = if quantizes { RowShape::of_fp8(size.channels)? } else { RowShape::of::<T>(size.channels)? };
    let ForwardOperands { mean, rstd, inp, weight, bias, eps } = operands;
    let (keys, rows, channels) = ((size.norm, shape), size.rows as u32, size.channels as u32);
    let launch = norm_forward_select::<T>(keys, out, mean, rstd, inp, weight, bias, eps, rows, channels);
    size.forward::<T>(launch, shape, false)
}

/// Returns the kernel that quantizes out (rows, C), or `None` if no kernel supports the number of channels.
pub fn forward_fp8(
    quantized: QuantizedOperands<E4m3>,
    operands: ForwardOperands<bf16>,
    size: Size,
) -> Option<KernelLaunch> {
    let shape = RowShape::of_fp8(size.channels)?;
    let QuantizedOperands { out, amax, scale } = quantized;
    let ForwardOperands { mean, rstd, inp, weight, bias, eps } = operands;
    let (keys, rows, channels) = ((size.norm, shape), size.rows as u32, size.channels as u32);
    let launch =
        norm_forward_fp8_select::<E4m3>(keys, out, mean, rstd, amax, scale, inp, weight, bias, eps, rows, channels);
    size.forward::<bf16>(launch, shape, true)
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
    /// (rows), for LayerNorm
    pub mean: Option<Global<f32>>,
    /// (rows)
    pub rstd: Global<f32>,
    /// The weight, if the norm has one.
    pub weight: Option<Weight<T>>,
}

/// The weight of a norm, and the gradients of its parameters.
#[derive(Clone, Copy)]
pub struct Weight<T> {
    /// (C)
    pub weight: Global<T>,
    /// (C), accumulated
    pub dweight: GlobalMut<T>,
    /// (C), accumulated, for LayerNorm
    pub dbias: Option<GlobalMut<T>>,
    /// (C), accumulated: the column sums of dinp, for LayerNorm if [`sums_columns`]
    pub column_sums: Option<GlobalMut<T>>,
    /// Scratch memory of [`backward_partials`] elements.
    pub partials: GlobalMut<f32>,
}

impl<T> Weight<T> {
    /// Returns the column sums that the kernel computes.
    fn sums(&self) -> usize {
        1 + usize::from(self.dbias.is_some()) + usize::from(self.column_sums.is_some())
    }
}

/// Returns whether LayerNorm's backward kernel has an instance that computes the column sums of dinp.
pub fn sums_columns<T: Element>(channels: usize) -> bool {
    RowShape::of::<T>(channels).is_some_and(|shape| norm_backward_exists::<T>((NormKind::LayerNorm, shape, 3)))
}

/// Returns the number of f32 elements of [`Weight::partials`] for `sums` column sums, or `None` if no kernel supports the number of
/// channels.
pub fn backward_partials<T: Element>(size: Size, sums: usize) -> Option<usize> {
    Some(RowShape::of::<T>(size.channels)?.backward_grid(size.rows, size.sm_count) as usize * sums * size.channels)
}

/// Returns the backward kernels in the order in which they must run, or `None` if no kernel supports the number of
/// channels.
pub fn backward<T: Element>(operands: BackwardOperands<T>, size: Size) -> Option<Vec<KernelLaunch>> {
    let (shape, rows, channels) = (RowShape::of::<T>(size.channels)?, size.rows as u32, size.channels as u32);
    let blocks = shape.backward_grid(size.rows, size.sm_count);
    let BackwardOperands { dinp, dout, inp, mean, rstd, weight } = operands;
    let sums = weight.as_ref().map_or(0, Weight::sums);
    let (of_weight, partials) = weight.as_ref().map(|weight| (weight.weight, weight.partials)).unwrap_or_default();
    let (keys, mean) = ((size.norm, shape, sums), mean.unwrap_or_default());
    let launch = norm_backward_select::<T>(keys, dinp, partials, dout, inp, of_weight, mean, rstd, rows, channels)?;
    let first = KernelLaunch { launch, grid: [blocks, 1, 1], shared_bytes: shape.backward_shared_bytes::<T>() };
    let Some(Weight { dweight, dbias, column_sums, partials, .. }) = weight else { return Some(vec![first]) };
    let [dbias, column_sums] = [dbias, column_sums].map(Option::unwrap_or_default);
    let launch = norm_backward_reduce::<T>(dweight, dbias, column_sums, partials.reader(), blocks, channels);
    let grid = [column_sum::grid(sums * size.channels), 1, 1];
    let reduce = KernelLaunch { launch, grid, shared_bytes: shared_bytes(column_sum::shared) };
    Some(vec![first, reduce])
}
