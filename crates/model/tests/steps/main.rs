//! Tests of training steps with adapters, with experts, in FP8, with masked targets and with Muon, in one program.
//!
//! The name of a file selects its tests: `cargo test --release -p model muon::`.

mod adapters;
mod experts;
mod fp8;
mod masked_targets;
mod muon;
