//! Barriers of a pipeline of shared-memory stages that the producer fills and the consumer warpgroups release.

use super::{CONSUMERS, WARPGROUP};
use cuda_std::hopper::PipelineState;
use cuda_std::hopper::mbarrier::MBarriers;
use cuda_std::shared::Layout;
use cuda_std::{thread, warp};

/// Releases of a stage by [`PipelineBarriers::release_by_warp`]: one for each consumer warp.
pub const WARP_RELEASES: u32 = CONSUMERS * WARPGROUP / warp::LANES;

/// Releases of a stage by [`PipelineBarriers::release_by_thread`]: one for each consumer thread.
pub const THREAD_RELEASES: u32 = CONSUMERS * WARPGROUP;

/// The full and empty barriers of each stage.
#[derive(Clone, Copy)]
pub struct PipelineBarriers {
    pub full: MBarriers,
    pub empty: MBarriers,
}

impl PipelineBarriers {
    pub fn new(layout: &mut Layout, stages: u32) -> Self {
        Self { full: layout.mbarriers(stages as usize), empty: layout.mbarriers(stages as usize) }
    }

    /// Initializes the barriers. A stage is full after `arrivals` and the bytes that they announce, and empty after
    /// `releases`: [`CONSUMERS`] or [`WARP_RELEASES`].
    #[inline(always)]
    pub fn init(self, stages: u32, arrivals: u32, releases: u32) {
        for stage in 0..stages {
            self.full.at(stage).init(arrivals);
            self.empty.at(stage).init(releases);
        }
    }

    /// Releases a stage that a consumer warpgroup has read with ordinary loads. All of its warps must have finished
    /// reading before one thread arrives.
    #[inline(always)]
    pub fn release_after_reads(self, stage: u32, consumer: u32) {
        thread::sync_named(1 + consumer, WARPGROUP);
        self.release(stage);
    }

    /// Releases a stage that finished wgmma groups have read. No barrier is needed: a group finishes for all warps of a
    /// warpgroup together.
    #[inline(always)]
    pub fn release(self, stage: u32) {
        if thread::thread_idx_x().is_multiple_of(WARPGROUP) {
            self.empty.at(stage).arrive();
        }
    }

    /// Releases a stage for the calling warp, which has read it with ordinary loads and with wgmma groups that have
    /// finished. All warps of all consumers release each stage: a warp's arrival orders the loads of its own lanes only.
    #[inline(always)]
    pub fn release_by_warp(self, stage: u32) {
        warp::sync();
        if warp::lane() == 0 {
            self.empty.at(stage).arrive();
        }
    }

    /// Releases a stage for the calling thread, which has read it with ordinary loads and with wgmma groups that have finished.
    /// All threads of all consumers release each stage.
    #[inline(always)]
    pub fn release_by_thread(self, stage: u32) {
        self.empty.at(stage).arrive();
    }

    /// Skips the next stage, which contains nothing for this consumer.
    #[inline(always)]
    pub fn skip(self, state: &mut PipelineState) {
        self.full.at(state.stage()).wait(state.parity());
        self.release(state.advance());
    }
}
