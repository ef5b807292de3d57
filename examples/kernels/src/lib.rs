//! GPU kernels from naive to fast, run and checked on a GPU or in the emulator. The README describes the program.

pub mod device;
pub mod families;
pub mod registry;
pub mod run;
pub mod session;
pub mod values;
