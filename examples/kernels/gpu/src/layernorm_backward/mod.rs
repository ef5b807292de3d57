//! The gradient of layer normalization.
//!
//! With xhat = (inp - mean) rstd and g = dout weight: dinp += rstd (g - mean of g - xhat mean of (g xhat)), where the means are
//! over C; dweight += sum over rows of dout xhat, dbias += sum over rows of dout.

pub mod columns;
pub mod naive;
pub mod shared_sums;
pub mod warp;
