//! Kernels with a planted fault, and the report that the emulator gives for each. A comment marks the faulty line.
//!
//! On a GPU, most of these kernels run without an error and give a wrong result sometimes, or only on some GPUs.

pub mod cp_async_without_wait;
pub mod divergent_barrier;
pub mod histogram_without_atomics;
pub mod missing_barrier;
pub mod missing_bound;
pub mod shuffle_without_sync;
#[cfg(any(not(target_arch = "nvptx64"), cuda_feature = "tma"))]
pub mod tma_without_wait;
