//! Comparison of an engine with the CPU reference, with itself, and with llm.c.

mod debug_state;
pub mod llmc;
pub mod selftest;
mod tolerance;
