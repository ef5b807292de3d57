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
//! Modules, each of which uses only those before it:
//! * `tile`: tile shapes, and the scheduler that assigns tiles to thread blocks
//! * `shared`: the layout of shared memory
//! * `mainloop`: loads of operands, and the multiplication
//! * `epilogue`: bias, residual, GELU and ReLU², and the stores through shared memory
//! * `accumulate`: accumulation into an output in global memory without shared memory
//! * `split_k`: partial sums over slices of K, and the kernel that reduces them
//! * `column_sums`: the gradient of a bias, computed beside the gradient of its weight
//! * `kernel`: the warp-specialized kernels and their entry points
//! * `batched`: kernels for batches of matrices, and for symmetric outputs
//! * `swiglu`: kernels with a SwiGLU epilogue. Their tiles pair columns of up and gate.
//! * `fp8`, `fp8_epilogue`: kernels with FP8 operands, and their epilogues with an FP8 out
//! * `launch`, `fp8_launch` (host): the kernels and tensor maps for a GEMM

mod accumulate;
mod batched;
mod column_sums;
mod epilogue;
mod fp8;
mod fp8_epilogue;
#[cfg(not(target_arch = "nvptx64"))]
pub mod fp8_launch;
mod kernel;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
mod mainloop;
mod shared;
mod split_k;
mod swiglu;
mod tile;

pub use batched::{matmul_batched, matmul_symmetric};
pub use fp8::{matmul_fp8, matmul_fp8_accumulate_f32, matmul_fp8_split_k, matmul_fp8_to_fp8};
pub use kernel::{matmul_accumulate_column_sums, matmul_accumulate_f32, matmul_split_k, matmul_wgmma};
pub use split_k::matmul_split_k_reduce;
pub use swiglu::{matmul_swiglu_backward, matmul_swiglu_forward};
