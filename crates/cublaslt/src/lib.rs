//! cuBLASLt, opened at run time.
//!
//! The crate has three layers. [`sys`] declares the types and functions of cuBLASLt, [`result`] converts its status codes
//! to errors and owns its descriptors, and [`Handle`], [`Workspace`] and [`Matmuls`] are the interface for programs.
//!
//! Matrices are column-major, as in cuBLASLt. A row-major (rows, columns) matrix is a column-major (columns, rows) matrix,
//! its transpose. The linear layer out (B·T, OC) = inp (B·T, C) · weight (OC, C)^T is therefore D (OC, B·T) = A^T · B with
//! A = weight and B = inp.

#![warn(missing_docs)]

mod handle;
mod matmul;
mod plans;
pub mod result;
pub mod sys;
mod tuning;

pub use handle::{Handle, Workspace, find};
pub use matmul::{Batch, Element, Epilogue, Fp8, Operands, Problem, Scale};
pub use plans::Matmuls;
pub use result::{Error, Result};
pub use tuning::{FINALISTS, Finalists, MARGIN, SCREENING_RUNS, Timing, fastest, race};
