//! The GPU kernels in this program, as the build script made them: `MODULES`, and why there are none where it found no
//! device toolchain.

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
