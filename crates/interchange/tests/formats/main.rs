//! Tests of import and export, in one program.
//!
//! The name of a file selects its tests: `cargo test --release -p interchange export::`.

mod common;
mod export;
mod import;
