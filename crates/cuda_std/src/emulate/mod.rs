//! The CPU back end: every GPU thread of a block is a fiber, and collective operations are points where fibers meet.
//!
//! * `block` schedules the fibers and holds the state of a block.
//! * `collective` implements warp-wide operations and barriers.
//! * `counter` implements counters in global memory that order the accesses of different blocks.
//! * `tensor` computes `ldmatrix` and `mma`; `hopper`, `mbarrier`, `tma` and `wgmma` implement the `sm_90a` instructions.
//! * `access` performs memory accesses. `checker` validates them with the access history in `shadow` and the buffers in
//!   `memory`.
//! * `arithmetic` implements special functions and conversions.

mod access;
mod arithmetic;
mod block;
mod checker;
mod collective;
mod counter;
pub mod hopper;
mod mbarrier;
mod memory;
mod region;
mod report;
mod shadow;
mod stack;
mod tensor;
mod tma;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod trap;
mod wgmma;

pub use access::{
    async_copy_16, async_copy_commit, async_copy_wait, atomic_add_f32, atomic_add_u32, evict_first, evict_last,
    fence_device, load, load64, load128, load128_streaming, load128_streaming_with, load128_with, shared_base, store,
    store64, store128, store128_streaming, store128_with,
};
pub use arithmetic::{bf16x2, div_rn, exp2, fma, log2, max, min_or_nan, opaque, recip, rsqrt, sqrt, sqrt_rn};
pub use block::{
    Grid, block_dim_x, block_idx_x, block_idx_y, block_idx_z, grid_dim_x, grid_dim_y, grid_dim_z, run, run_checked,
    thread_idx_x,
};
pub use collective::{
    arrive_named, ballot, shuffle_down, shuffle_idx, shuffle_xor, sync_named, sync_threads, sync_warp,
};
pub use counter::{acquire_wait_u32, release_add_u32};
pub use memory::{HostAccess, Memory};
pub use region::{SharedView, reserve};
pub use report::{Fault, Report};
pub use tensor::{ldmatrix_x4, ldmatrix_x4_trans, mma_bf16, mma_f32};

/// Number of lanes in a warp.
const LANES: usize = 32;
