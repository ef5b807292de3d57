//! Serial Rust code for the CPU from which the chapters start: loops over slices, in the order of the formulas. It is not fast; the
//! training program uses `crates/engine`.

pub mod adamw;
pub mod attention;
pub mod classifier;
pub mod encoder;
pub mod gelu;
pub mod global_norm;
pub mod happens_before;
pub mod layernorm;
pub mod linear;
pub mod ring;
pub mod rounding;
pub mod training_step;
pub mod variance;
pub mod zero;
