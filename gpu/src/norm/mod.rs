//! Normalization over C: LayerNorm and RMSNorm.
//!
//! * LayerNorm (Ba et al., 2016, arXiv:1607.06450): out = (inp - mean) * rstd * weight + bias, where rstd = 1 /
//!   sqrt(variance + 1e-5) with the biased variance.
//! * RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467): out = inp * rstd * weight, where rstd = 1 / sqrt(mean(inp²) +
//!   eps). The weight is optional: without it, out = inp * rstd.
//!
//! Shapes: inp, out and the gradients of both (rows, C), mean and rstd (rows) f32, weight and bias (C). C is a multiple of
//! the packet. RMSNorm has neither mean nor bias.
//!
//! The backward kernel adds to the gradient of inp, so that the gradient of a residual stream needs no further pass. The
//! gradients of weight and bias are a two-stage reduction: per-block column sums in `partials` (blocks, SUMS, C) f32, which
//! [`norm_backward_reduce`] adds up. There are no atomics, and the result is deterministic for a given grid. SUMS is 0 for a
//! norm without parameters, 1 with a weight, 2 with a bias, and 3 if the kernel also sums the columns of the updated dinp: if
//! dinp is the gradient of a linear layer's output, its column sums are that layer's bias gradient, and no separate kernel is
//! needed. These values are summed before they are rounded to T, which is more accurate than summing the stored values and
//! saves their conversion.
//!
//! Bytes that must be moved per row of bf16: 4 C + 4 in RMSNorm's forward kernel (inp, out, rstd) and 8 C + 4 in its backward
//! kernel (dout, inp, dinp twice, rstd). LayerNorm moves another 4 for the mean.
//!
//! `rows` distributes rows over threads, `forward` and `backward` have the kernels, and `launch` (host) selects them.

mod backward;
mod forward;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
pub mod rows;

pub use backward::{norm_backward, norm_backward_reduce};
pub use forward::{norm_forward, norm_forward_fp8};

/// A norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// LayerNorm.
    LayerNorm,
    /// RMSNorm.
    RmsNorm,
}

/// A norm as the type parameter of a kernel.
pub trait Norm: 'static {
    /// The norm.
    const KIND: NormKind;
    /// True if the norm subtracts the mean, and then adds a bias.
    const CENTERED: bool = matches!(Self::KIND, NormKind::LayerNorm);
}

/// LayerNorm.
pub struct LayerNorm;
/// RMSNorm.
pub struct RmsNorm;

impl Norm for LayerNorm {
    const KIND: NormKind = NormKind::LayerNorm;
}

impl Norm for RmsNorm {
    const KIND: NormKind = NormKind::RmsNorm;
}
