//! cuBLASLt, opened at run time.
//!
//! The crate has three layers. [`sys`] declares the types and functions of cuBLASLt, [`result`] converts its status codes
//! to errors and owns its descriptors, and [`Handle`] and [`Matmuls`] are the interface for programs.
//!
//! A GEMM is described in the row-major terms of the kernels ([`gpu::matmul::gemm`]). cuBLASLt's column-major terms appear only
//! where its descriptors are created.

#![warn(missing_docs)]

mod handle;
mod matmul;
mod plans;
pub mod result;
pub mod sys;
mod tuning;

pub use gpu::matmul::launch::{ScaleFactors, StridedBatch};
pub use handle::{Handle, find};
pub use matmul::{Alignments, BATCH_ALIGNMENT, Fp8Output, GELU_COLUMNS, GemmKey, GemmOperands, GroupOperands};
pub use plans::Matmuls;
pub use result::{Error, Result};
pub use tuning::{FINALISTS, Finalists, MARGIN, SCREENING_RUNS, fastest, race};
