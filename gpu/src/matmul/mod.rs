//! GEMM in bf16 or FP8 with f32 accumulation for `sm_90a`: TMA loads, wgmma and warp-specialized persistent kernels.
//!
//! A thread block has three warpgroups: a producer, which issues the TMA loads, and two consumers, which multiply and
//! run the epilogue. A tile is one of two kinds, named as in CUTLASS:
//! * Ping-pong (128 x 128, 128 x 192): each consumer has its own tiles, so that one consumer's epilogue overlaps with
//!   the other consumer's mainloop. Epilogues with a second output exist for these tiles only.
//! * Cooperative (256 x 128, 256 x 192, 128 x 256, 128 x 320): the consumers share a tile, half of its rows each. A
//!   tile loads a quarter to a third less per FLOP than a ping-pong tile, but nothing overlaps with its epilogue.
//!   In the exact mode of FP8, the small tiles are cooperative too.
//!
//! On an H200, tiles of 128 x 192 reach 803 to 805 TFLOP/s at M = N = K = 8192. cuBLASLt reaches 805 to 807 in the same
//! run.
//!
//! There is one kernel, [`matmul()`]. Its instances are combinations of operands, epilogues and tile shapes. The types of an
//! instance determine the [`Gemm`](gemm::Gemm) that it computes.
//!
//! Modules, each of which uses only those before it:
//! * `gemm`: the description of a GEMM
//! * `tile`: tile shapes, and the scheduler that assigns tiles to thread blocks
//! * `shared`: the layout of shared memory
//! * `mainloop`: the types of operands, their loads, and the multiplication
//! * `buffers`: buffers of epilogues in shared memory
//! * `epilogue`: bias, residual and activation functions, and the stores through shared memory
//! * `quantized`: epilogues with an FP8 out
//! * `gated`: epilogues with a gated activation function, whose tiles pair columns of up and gate
//! * `accumulate`: accumulation into an output in global memory without shared memory
//! * `split_k`: partial sums over slices of K, and the kernel that reduces them
//! * `column_sums`: the gradient of a bias, computed beside the gradient of its weight
//! * `kernel`: the warp-specialized kernel and the table of its instances
//! * `launch` (host): the kernels and tensor maps for a GEMM
//!
//! Hopper's tensor cores accumulate FP8 GEMMs with about 14 bits ([`cuda_std::hopper::wgmma`]). There are two modes:
//! * fast: tensor cores accumulate over all of K.
//! * exact: tensor cores accumulate over [`gemm::EXACT_COLUMNS`] of K, and their sums are added in f32. This takes a second set of
//!   accumulators, so a consumer has 64 rows and tiles have 128 x 128 or 128 x 192 elements.
//!
//! FP8 wgmma takes K-major operands only, so a GEMM whose operands are stored otherwise needs transposed copies. The scales are
//! f32 in device memory, so that a CUDA graph need not change when they do.

#![cfg_attr(
    all(target_arch = "nvptx64", not(cuda_feature = "wgmma")),
    allow(dead_code, unused_imports, reason = "the GEMM with mma.sync uses a part of this module")
)]

mod accumulate;
mod buffers;
mod column_sums;
pub(crate) mod epilogue;
mod gated;
pub mod gemm;
mod kernel;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
mod mainloop;
pub(crate) mod quantized;
mod shared;
mod split_k;
pub(crate) mod tile;

#[cfg(any(not(target_arch = "nvptx64"), cuda_feature = "wgmma"))]
pub use kernel::matmul;
#[cfg(any(not(target_arch = "nvptx64"), cuda_feature = "wgmma"))]
pub use split_k::matmul_split_k_reduce;
