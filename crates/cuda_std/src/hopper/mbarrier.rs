//! Memory barriers in shared memory: phases that complete when enough threads have arrived and enough bytes have landed.

use crate::backend;
use crate::shared::Layout;

/// One barrier. It goes from phase to phase; [`wait`](Self::wait) names a phase by its parity.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct MBarrier(*mut u64);

impl MBarrier {
    /// Makes the barrier ready: a phase completes after `arrivals`. One thread does it, then
    /// [`fence_init`](Self::fence_init), then a barrier of the block (or cluster).
    #[inline(always)]
    #[track_caller]
    pub fn init(self, arrivals: u32) {
        // SAFETY: `Layout` gave this barrier 8 aligned bytes of shared memory of its own.
        unsafe { backend::hopper::mbarrier_init(self.0, arrivals) }
    }

    /// Makes initialisations visible to the cluster and to TMA (`fence.mbarrier_init.release.cluster`).
    #[inline(always)]
    pub fn fence_init() {
        backend::hopper::fence_mbarrier_init();
    }

    /// Arrives, and lets the phase wait for `bytes` more to land (`mbarrier.arrive.expect_tx`).
    #[inline(always)]
    #[track_caller]
    pub fn arrive_expecting(self, bytes: u32) {
        // SAFETY: as in `init`.
        unsafe { backend::hopper::mbarrier_arrive_expect(self.0, bytes) }
    }

    /// Arrives (`mbarrier.arrive`).
    #[inline(always)]
    #[track_caller]
    pub fn arrive(self) {
        // SAFETY: as in `init`.
        unsafe { backend::hopper::mbarrier_arrive(self.0) }
    }

    /// Arrives at the barrier at the same place in block `rank` of the cluster (`mapa`, then
    /// `mbarrier.arrive.shared::cluster`; the default semantics need no extra memory barrier).
    #[inline(always)]
    #[track_caller]
    pub fn arrive_at(self, rank: u32) {
        // SAFETY: as in `init`; all blocks of a cluster have one layout.
        unsafe { backend::hopper::mbarrier_arrive_cluster(self.0, rank) }
    }

    /// Waits until the phase of this `parity` has completed (`mbarrier.try_wait.parity`). A fresh barrier is in phase 0:
    /// waiting for parity 1 returns at once.
    #[inline(always)]
    #[track_caller]
    pub fn wait(self, parity: u32) {
        // SAFETY: as in `init`.
        while !unsafe { backend::hopper::mbarrier_try_wait(self.0, parity) } {}
    }

    #[inline(always)]
    pub(super) fn pointer(self) -> *mut u64 {
        self.0
    }
}

/// A row of barriers.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct MBarriers(*mut u64);

impl MBarriers {
    #[inline(always)]
    pub fn at(self, i: u32) -> MBarrier {
        MBarrier(self.0.wrapping_add(i as usize))
    }
}

impl Layout {
    /// `count` memory barriers.
    #[inline(always)]
    pub fn mbarriers(&mut self, count: usize) -> MBarriers {
        MBarriers(backend::hopper::window(self.take(8 * count, 8)).cast())
    }
}
