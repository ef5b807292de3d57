//! Tests of training steps in FP8 and with Muon, in one program.
//!
//! The name of a file selects its tests: `cargo test --release -p model muon::`.

mod fp8;
mod muon;
