//! cuBLASLt, opened at run time.
//!
//! Three layers: [`sys`] has the library's types and functions as they are, [`result`] turns its status codes into
//! errors and owns its descriptors, and [`Handle`], [`Workspace`] and [`Matmuls`] are what a program uses.
//!
//! Matrices are column-major here, as cuBLASLt has them: a row-major (rows, columns) matrix is its column-major
//! transpose, so a linear layer out (B·T, OC) = inp (B·T, C) · weight (OC, C)^T is the product D (OC, B·T) with
//! A = weight transposed and B = inp as it is.

mod handle;
mod matmul;
mod plans;
pub mod result;
pub mod sys;
mod tuning;

pub use handle::{Handle, Workspace, find};
pub use matmul::{Element, Epilogue, Operands, Problem};
pub use plans::Matmuls;
pub use result::{Error, Result};
pub use tuning::{Choice, FINAL_RUNS, MARGIN, Timing};
