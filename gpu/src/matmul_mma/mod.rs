//! GEMM with FP8 operands through `mma.sync`, for GPUs with FP8 tensor cores and without wgmma: `sm_89` and later.
//!
//! A thread block computes a tile of 128 x 128. Its eight warps compute 64 x 32 each. There is one kernel, [`matmul_mma()`]. Its instances
//! have the epilogues of a step in FP8. As in [`crate::matmul`], their types state the [`Gemm`](crate::matmul::gemm::Gemm) that they compute.
//!
//! Invariants:
//! * `cp.async` fills the stages of the pipeline in the order of K. Each step commits one group, which is empty at the end of K. So the
//!   stage of a step is full when all but the newest `STAGES` - 2 groups have completed.
//! * The barrier of a step follows the reads of the step before. The load after the barrier overwrites the stage of that step.
//! * Rows and columns outside of the operands are zeros in shared memory, and are not stored.
//! * The epilogue uses the memory of the stages, after a barrier. Each warp has buffers of its own there.
//! * Accumulators have the layout of wgmma, so the elementwise part of epilogues and the quantization are those of the wgmma kernels.
//!
//! An FP8 output has the bits that separate kernels would compute from the sums in bf16: the gradient of an activation reads the sums after
//! their rounding.
//!
//! In the exact mode, tensor cores accumulate over some columns of K, and their sums are added in f32 ([`crate::matmul`]). A block has all
//! registers of an SM, so every instance has both sets of accumulators, and the number of columns is an argument of the launch.

mod epilogue;
mod kernel;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
mod mainloop;

pub use kernel::matmul_mma;
