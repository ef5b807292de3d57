//! Clusters: blocks scheduled together that reach each other's shared memory.

use crate::backend;

/// This block's rank in its cluster (`%cluster_ctarank`).
#[inline(always)]
pub fn block_rank() -> u32 {
    backend::hopper::cluster_rank()
}

/// Barrier of all threads of the cluster, ordering their memory accesses
/// (`barrier.cluster.arrive.release`, `barrier.cluster.wait.acquire`).
#[inline(always)]
#[track_caller]
pub fn sync() {
    backend::hopper::cluster_sync();
}
