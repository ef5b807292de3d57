//! mbarriers: barrier objects in shared memory that count arrivals of threads and bytes of asynchronous copies.

use crate::backend;
use crate::shared::Layout;

/// An mbarrier. Its phases complete one after the other; [`wait`](Self::wait) identifies a phase by its parity.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct MBarrier(*mut u64);

impl MBarrier {
    /// Initializes the mbarrier to complete each phase after `arrivals` arrivals (`mbarrier.init`).
    ///
    /// One thread must call it and then [`fence_init`](Self::fence_init). A barrier of the block must follow before
    /// other threads use the mbarrier.
    #[inline(always)]
    #[track_caller]
    pub fn init(self, arrivals: u32) {
        // SAFETY: `Layout` reserved 8 aligned bytes of shared memory for this mbarrier.
        unsafe { backend::hopper::mbarrier_init(self.0, arrivals) }
    }

    /// Makes initializations by this thread visible to the async proxy (`fence.mbarrier_init.release.cluster`).
    #[inline(always)]
    pub fn fence_init() {
        backend::hopper::fence_mbarrier_init();
    }

    /// Arrives and adds `bytes` to the bytes that must be copied before the phase completes
    /// (`mbarrier.arrive.expect_tx`).
    #[inline(always)]
    #[track_caller]
    pub fn arrive_expect_tx(self, bytes: u32) {
        // SAFETY: see `init`.
        unsafe { backend::hopper::mbarrier_arrive_expect(self.0, bytes) }
    }

    /// Arrives (`mbarrier.arrive`).
    #[inline(always)]
    #[track_caller]
    pub fn arrive(self) {
        // SAFETY: see `init`.
        unsafe { backend::hopper::mbarrier_arrive(self.0) }
    }

    /// Waits until the phase with this `parity` has completed (`mbarrier.try_wait.parity`). A new mbarrier is in phase
    /// 0, so a wait for parity 1 returns at once.
    #[inline(always)]
    #[track_caller]
    pub fn wait(self, parity: u32) {
        // SAFETY: see `init`.
        while !unsafe { backend::hopper::mbarrier_try_wait(self.0, parity) } {}
    }

    #[inline(always)]
    pub(super) fn pointer(self) -> *mut u64 {
        self.0
    }
}

/// An array of mbarriers.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct MBarriers(*mut u64);

impl MBarriers {
    /// Returns mbarrier `i`.
    #[inline(always)]
    pub fn at(self, i: u32) -> MBarrier {
        MBarrier(self.0.wrapping_add(i as usize))
    }
}

#[cfg(not(all(target_arch = "nvptx64", feature = "checked")))]
impl Layout {
    /// Reserves `count` mbarriers.
    #[inline(always)]
    #[track_caller]
    pub fn mbarriers(&mut self, count: usize) -> MBarriers {
        let barriers = self.take::<MBarriers, u64>(8 * count, 8, None);
        MBarriers(backend::hopper::window(barriers.pointer()))
    }
}
