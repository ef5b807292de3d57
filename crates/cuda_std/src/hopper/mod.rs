//! Hopper-only primitives (`sm_90a`): mbarriers, the tensor memory accelerator (TMA), warpgroup matrix
//! multiply-accumulate (wgmma), pipeline state for warp-specialized kernels, and register reallocation between
//! warpgroups.
//!
//! TMA and wgmma access shared memory through the async proxy. After ordinary stores to shared memory, each writing
//! thread must execute [`fence_async_proxy`], and a barrier must follow, before TMA or wgmma reads the data.

use crate::{backend, thread};

pub mod mbarrier;
pub mod pipeline;
pub mod tma;
pub mod wgmma;

pub use mbarrier::MBarrier;
pub use pipeline::{PipelineBarriers, PipelineState};
#[cfg(not(target_arch = "nvptx64"))]
pub use tma::Extents;
pub use tma::TensorMap;
pub use wgmma::{NarrowTile, SwizzledTile};

/// Threads of a warpgroup.
pub const WARPGROUP: u32 = 128;

/// Returns true for the first thread of each warpgroup.
#[inline(always)]
pub fn is_warpgroup_leader() -> bool {
    thread::thread_idx_x().is_multiple_of(WARPGROUP)
}

/// Orders this thread's ordinary accesses to shared memory before later accesses by TMA and wgmma
/// (`fence.proxy.async.shared::cta`).
#[inline(always)]
pub fn fence_async_proxy() {
    backend::hopper::fence_async_proxy();
}

/// Orders this thread's ordinary accesses to global memory before later accesses by TMA, and the reverse
/// (`fence.proxy.async.global`).
///
/// A thread that [waits for a counter](crate::GlobalMut::acquire_wait) must execute it before its own TMA accesses to the
/// memory that the counter protects. The thread that released the counter needs none: the [wait for its
/// stores](tma::wait_stores) contains one.
#[inline(always)]
pub fn fence_async_proxy_global() {
    backend::hopper::fence_async_proxy_global();
}

/// Increases the register limit to `N` per thread (`setmaxnreg.inc.sync.aligned.u32 N`). Waits until other warpgroups
/// have released enough registers.
///
/// All warps of a warpgroup must call it. `N` must be a multiple of 8 in 24..=256.
#[inline(always)]
pub fn increase_registers<const N: u32>() {
    backend::hopper::increase_registers::<N>();
}

/// Decreases the register limit to `N` per thread and releases the rest (`setmaxnreg.dec.sync.aligned.u32 N`).
///
/// The requirements are those of [`increase_registers`].
#[inline(always)]
pub fn decrease_registers<const N: u32>() {
    backend::hopper::decrease_registers::<N>();
}
