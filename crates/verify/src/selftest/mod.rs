//! Comparison of every engine operation with a reference engine on the same inputs.
//!
//! The `selftest` command runs the cases on a GPU, `cargo test` runs them on the emulator, and `bench kernels` times
//! them. [`determinism`] checks that two training runs agree in every bit.

mod case;
mod cases;
mod compare;
pub mod determinism;

pub use case::{Case, Outcome, Part, Speed, Work};
pub use cases::{
    DocumentLengths, MaskedAttention, attention, copy, edge_cases, fp8, model_cases, square_matmul, training_step_cases,
};
pub use compare::ErrorStats;
