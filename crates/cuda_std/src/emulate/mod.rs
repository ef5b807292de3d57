//! The CPU back end: every GPU thread of a block is a fiber, and collective operations are points where fibers meet.
//!
//! A file imports only files that are named before it in this list:
//! * `report` describes faults; `shadow` is the access history of memory; `stack` is the pool of fiber stacks.
//! * `order` is the happens-before relation; `locations` keeps the values of memory that threads access atomically; `schedule` decides
//!   which block runs.
//! * `memory` has the buffers of a checked launch; `region` describes the arrays in shared memory; `grid` validates a launch.
//! * `checker` validates memory accesses.
//! * `wait`, `warp`, `running`, `tensor_map`, `async_copy`, `warpgroup` and `hopper_state` are the parts of the state of a block.
//! * `block` is that state, and the access of the running thread to it; `print` writes the output of kernels; `trap` reports faults
//!   of the host's memory protection and endless loops, which `watchdog` finds.
//! * `access` performs loads, stores and `cp.async`, and has the checks that other instructions share; `shared_view` checks
//!   the bounds of arrays in shared memory.
//! * `atomic` implements atomics, fences and waits for values; `arithmetic` implements special functions and conversions; `collective`
//!   implements warp-wide operations and barriers.
//! * `tensor` computes `ldmatrix` and `mma`; `mbarrier` implements mbarriers.
//! * `tma` implements TMA loads and stores; `wgmma` implements `wgmma.mma_async`.
//! * `hopper` implements the other `sm_90a` instructions and names all of them.
//! * `scheduler` runs the fibers of the blocks of a launch.

mod access;
mod arithmetic;
mod async_copy;
mod atomic;
mod block;
mod checker;
mod collective;
mod grid;
pub mod hopper;
mod hopper_state;
mod locations;
mod mbarrier;
mod memory;
mod order;
mod print;
mod region;
mod report;
mod running;
mod schedule;
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
mod watchdog;
mod wgmma;

pub use access::*;
pub use arithmetic::{
    bf16x2, cos_approx, div_rn, e4m3x2, e5m2x2, exp2, f16_to_f32, f16x2, fma, fma_f64, larger_magnitudes, log2, max,
    min_or_nan, multiply_bf16x2, opaque, permute_bytes, recip, rsqrt, sin_approx, sqrt, sqrt_f64, sqrt_rn,
};
pub use atomic::{
    acquire_wait_u32, atomic_add_f32, atomic_add_u32, atomic_max_u32, compare_exchange_u32, compare_exchange_u64,
    exchange_u32, exchange_u64, fence_block, fence_device, fence_sc_block, fence_sc_device, fence_sc_system,
    fence_system, fetch_add_f32, fetch_add_f64, fetch_add_i32, fetch_add_u32, fetch_add_u64, fetch_and_u32,
    fetch_and_u64, fetch_max_i32, fetch_max_u32, fetch_max_u64, fetch_min_i32, fetch_min_u32, fetch_min_u64,
    fetch_or_u32, fetch_or_u64, fetch_xor_u32, fetch_xor_u64, load_acquire_u32, load_acquire_u64, load_relaxed_two_u64,
    load_relaxed_u32, load_relaxed_u64, release_add_u32, shared_add_f32, shared_add_f64, shared_add_i32,
    shared_add_u32, shared_add_u64, shared_and_u32, shared_and_u64, shared_compare_exchange_u32,
    shared_compare_exchange_u64, shared_exchange_u32, shared_exchange_u64, shared_load_acquire_u32,
    shared_load_acquire_u64, shared_load_relaxed_u32, shared_load_relaxed_u64, shared_max_i32, shared_max_u32,
    shared_max_u64, shared_min_i32, shared_min_u32, shared_min_u64, shared_or_u32, shared_or_u64,
    shared_store_relaxed_u32, shared_store_relaxed_u64, shared_store_release_u32, shared_store_release_u64,
    shared_xor_u32, shared_xor_u64, store_relaxed_u32, store_relaxed_u64, store_release_u32, store_release_u64,
};
pub use block::{
    block_dim_x, block_dim_y, block_dim_z, block_idx_x, block_idx_y, block_idx_z, clock, grid_dim_x, grid_dim_y,
    grid_dim_z, lane_id, nanoseconds, thread_idx_1d, thread_idx_x, thread_idx_y, thread_idx_z, trap,
};
pub use collective::{
    active_mask, arrive_named, ballot, ballot_masked, match_all, match_any, match_low_bits, nanosleep, reduce_add_i32,
    reduce_add_u32, reduce_and, reduce_max_i32, reduce_max_u32, reduce_min_i32, reduce_min_u32, reduce_or, reduce_xor,
    shuffle_down, shuffle_idx, shuffle_masked, shuffle_up, shuffle_xor, sync_masked, sync_named, sync_threads,
    sync_threads_and, sync_threads_count, sync_threads_or, sync_warp,
};
pub use grid::Grid;
pub use memory::{HostAccess, Memory};
pub use print::{print, printed_by};
pub use report::{Fault, Report};
pub use schedule::Schedule;
pub use scheduler::{run, run_checked, run_each, run_seeds};
pub use shared_view::{SharedView, reserve};
pub use tensor::{ldmatrix_x4, ldmatrix_x4_trans, mma_bf16, mma_e4m3, mma_e5m2, mma_f32};

/// Number of lanes in a warp.
const LANES: usize = 32;
