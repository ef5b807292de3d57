//! `sm_90a` only: memory barriers, the tensor memory accelerator, warpgroup matrix products, clusters, register budgets.
//!
//! The proxy rule: shared memory written by ordinary stores and read next by TMA or wgmma needs
//! [`fence_async_proxy`] in each writing thread, then a barrier.

use crate::backend;

pub mod cluster;
pub mod mbarrier;
pub mod pipeline;
pub mod tma;
pub mod wgmma;

pub use mbarrier::MBarrier;
pub use pipeline::PipelineState;
pub use tma::TensorMap;
pub use wgmma::SwizzledTile;

/// Orders this thread's ordinary accesses to shared memory before later ones by TMA and wgmma
/// (`fence.proxy.async.shared::cta`).
#[inline(always)]
pub fn fence_async_proxy() {
    backend::hopper::fence_async_proxy();
}

/// Takes registers up to `N` per thread from the pool (`setmaxnreg.inc.sync.aligned.u32 N`); blocks until others have
/// given enough back. All warps of a warpgroup call it; `N` a multiple of 8 in 24..=256.
#[inline(always)]
pub fn take_registers<const N: u32>() {
    backend::hopper::take_registers::<N>();
}

/// Gives registers above `N` per thread back to the pool (`setmaxnreg.dec.sync.aligned.u32 N`).
#[inline(always)]
pub fn give_registers<const N: u32>() {
    backend::hopper::give_registers::<N>();
}
