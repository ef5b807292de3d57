//! Serial Rust code for the CPU from which the chapters start: loops over slices, in the order of the formulas. It is not fast; the
//! training program uses `crates/engine`.
