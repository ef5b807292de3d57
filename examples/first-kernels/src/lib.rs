//! The compiled kernels.

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
