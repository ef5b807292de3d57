//! The CPU back end: every GPU thread of a block is a fiber, and collective operations are points where fibers meet.
//!
//! A file imports only files that are named before it in this list:
//! * `report` describes faults; `shadow` is the access history of memory; `stack` is the pool of fiber stacks.
//! * `memory` has the buffers of a checked launch; `region` describes the arrays in shared memory; `grid` validates a launch.
//! * `checker` validates memory accesses and orders them with vector clocks.
//! * `wait`, `warp`, `running`, `tensor_map`, `async_copy`, `warpgroup` and `hopper_state` are the parts of the state of a block.
//! * `block` is that state, and the access of the running thread to it; `print` writes the output of kernels; `trap` reports faults
//!   of the host's memory protection.
//! * `access` performs loads, stores, atomics and `cp.async`, and has the checks that other instructions share; `shared_view` checks
//!   the bounds of arrays in shared memory.
//! * `arithmetic` implements special functions and conversions; `collective` implements warp-wide operations and barriers;
//!   `counter` implements counters in global memory that order the accesses of different blocks.
//! * `tensor` computes `ldmatrix` and `mma`; `mbarrier` implements mbarriers.
//! * `tma` implements TMA loads and stores; `wgmma` implements `wgmma.mma_async`.
//! * `hopper` implements the other `sm_90a` instructions and names all of them.
//! * `scheduler` runs the fibers of the blocks of a launch.

mod access;
mod arithmetic;
mod async_copy;
mod block;
mod checker;
mod collective;
mod counter;
mod grid;
pub mod hopper;
mod hopper_state;
mod mbarrier;
mod memory;
mod print;
mod region;
mod report;
mod running;
mod scheduler;
mod shadow;
mod shared_view;
mod stack;
mod tensor;
mod tensor_map;
mod tma;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod trap;
mod wait;
mod warp;
mod warpgroup;
mod wgmma;

pub use access::*;
pub use arithmetic::{
    bf16x2, cos_approx, div_rn, e4m3x2, e5m2x2, exp2, f16_to_f32, f16x2, fma, fma_f64, larger_magnitudes, log2, max,
    min_or_nan, opaque, permute_bytes, recip, rsqrt, sin_approx, sqrt, sqrt_f64, sqrt_rn,
};
pub use block::{
    block_dim_x, block_dim_y, block_dim_z, block_idx_x, block_idx_y, block_idx_z, clock, grid_dim_x, grid_dim_y,
    grid_dim_z, lane_id, nanoseconds, thread_idx_1d, thread_idx_x, thread_idx_y, thread_idx_z, trap,
};
pub use collective::{
    active_mask, arrive_named, ballot, ballot_masked, match_all, match_any, nanosleep, reduce_add_i32, reduce_add_u32,
    reduce_and, reduce_max_i32, reduce_max_u32, reduce_min_i32, reduce_min_u32, reduce_or, reduce_xor, shuffle_down,
    shuffle_idx, shuffle_masked, shuffle_up, shuffle_xor, sync_masked, sync_named, sync_threads, sync_threads_and,
    sync_threads_count, sync_threads_or, sync_warp,
};
pub use counter::{acquire_wait_u32, release_add_u32};
pub use grid::Grid;
pub use memory::{HostAccess, Memory};
pub use print::{print, printed_by};
pub use report::{Fault, Report};
pub use scheduler::{run, run_checked};
pub use shared_view::{SharedView, reserve};
pub use tensor::{ldmatrix_x4, ldmatrix_x4_trans, mma_bf16, mma_f32};

/// Number of lanes in a warp.
const LANES: usize = 32;
