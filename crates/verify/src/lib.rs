//! Correctness checks of an engine: against the CPU engine or the emulator ([`selftest`]), against itself
//! ([`selftest::determinism`]), and against a debug state of llm.c or PyTorch ([`llmc`]).
//!
//! The checks return their results. Printing them is the caller's task.

#![warn(missing_docs)]

mod debug_state;
pub mod llmc;
pub mod selftest;
mod tolerance;
