//! Tests of the primitives and the emulator, in one program.
//!
//! The name of a file selects its tests: `cargo test --release -p cuda_std checker::`.

mod between_blocks;
mod checked;
mod checker;
mod counters;
mod features;
mod fp8;
mod hopper;
mod hopper_fp8;
mod litmus;
mod messages;
mod planted;
mod primitives;
mod tensor_cores;
