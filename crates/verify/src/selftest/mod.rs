//! Every operation of an engine against the CPU engine, on the same inputs: one table of cases, run on a GPU by the
//! `selftest` command and through the emulator by `cargo test`. Besides, whether two runs agree.

mod case;
mod cases;
mod compare;
pub mod determinism;

pub use case::{Case, Outcome, Speed, Work};
pub use cases::{attention, copy, edge, model, of_model, square_product};
pub use compare::Error;
