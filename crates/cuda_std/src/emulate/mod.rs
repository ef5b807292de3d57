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
mod print;
mod region;
mod report;
mod shadow;
mod stack;
mod tensor;
mod tma;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod trap;
mod wgmma;

pub use access::*;
pub use arithmetic::{
    bf16x2, div_rn, e4m3x2, e5m2x2, exp2, f16_to_f32, f16x2, fma, fma_f64, log2, max, min_or_nan, opaque,
    permute_bytes, recip, rsqrt, sqrt, sqrt_f64, sqrt_rn,
};
pub use block::{
    Grid, block_dim_x, block_dim_y, block_dim_z, block_idx_x, block_idx_y, block_idx_z, clock, grid_dim_x, grid_dim_y,
    grid_dim_z, lane_id, nanoseconds, run, run_checked, thread_idx_1d, thread_idx_x, thread_idx_y, thread_idx_z, trap,
};
pub use collective::{
    active_mask, arrive_named, ballot, ballot_masked, shuffle_down, shuffle_idx, shuffle_masked, shuffle_up,
    shuffle_xor, sync_masked, sync_named, sync_threads, sync_warp,
};
pub use counter::{acquire_wait_u32, release_add_u32};
pub use memory::{HostAccess, Memory};
pub use print::{print, printed_by};
pub use region::{SharedView, reserve};
pub use report::{Fault, Report};
pub use tensor::{ldmatrix_x4, ldmatrix_x4_trans, mma_bf16, mma_f32};

/// Number of lanes in a warp.
const LANES: usize = 32;
