//! A circular buffer of shared-memory stages that a producer fills and consumers release: its barriers, and the position of one side.

use super::mbarrier::{MBarrier, MBarriers};
use super::{WARPGROUP, is_warpgroup_leader};
use crate::shared::Layout;
use crate::{thread, warp};

/// Stage index and mbarrier parity of one side (producer or consumer) of a pipeline, as in CUTLASS's `PipelineState`.
///
/// Each stage has a "full" and an "empty" mbarrier. A consumer waits on the full barrier of [`stage`](Self::stage) with
/// [`parity`](Self::parity), a producer on the empty barrier. The parity flips when the stage index wraps around.
///
/// All methods are inlined. If the number of stages is a compile-time constant, it occupies no register and the
/// remainder in [`skip`](Self::skip) needs no division instruction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PipelineState {
    stage: u32,
    parity: u32,
    stages: u32,
}

impl PipelineState {
    /// Returns the initial state of the producer of a pipeline of `stages` stages.
    ///
    /// The parity starts at 1: a wait for parity 1 on a new mbarrier returns at once, so all stages count as empty.
    #[must_use]
    #[inline(always)]
    pub const fn producer(stages: u32) -> Self {
        Self { stage: 0, parity: 1, stages }
    }

    /// Returns the initial state of a consumer of a pipeline of `stages` stages.
    ///
    /// The parity starts at 0: the first wait on each stage blocks until the producer has filled it.
    #[must_use]
    #[inline(always)]
    pub const fn consumer(stages: u32) -> Self {
        Self { stage: 0, parity: 0, stages }
    }

    /// Returns the index of the current stage.
    #[must_use]
    #[inline(always)]
    pub const fn stage(self) -> u32 {
        self.stage
    }

    /// Returns the mbarrier parity to wait for on the current stage.
    #[must_use]
    #[inline(always)]
    pub const fn parity(self) -> u32 {
        self.parity
    }

    /// Advances to the next stage and returns the index of the previous one.
    #[inline(always)]
    pub const fn advance(&mut self) -> u32 {
        let previous = self.stage;
        self.stage += 1;
        if self.stage == self.stages {
            self.stage = 0;
            self.parity ^= 1;
        }
        previous
    }

    /// Advances by `count` stages without visiting them.
    #[inline(always)]
    pub const fn skip(&mut self, count: u32) {
        let stage = self.stage + count;
        self.stage = stage % self.stages;
        self.parity ^= stage / self.stages % 2;
    }
}

/// The full and empty barriers of each stage.
#[derive(Clone, Copy)]
pub struct PipelineBarriers {
    /// Barrier i completes when stage i has been filled.
    pub full: MBarriers,
    /// Barrier i completes when stage i may be overwritten.
    pub empty: MBarriers,
}

impl PipelineBarriers {
    /// Takes the barriers of `stages` stages from `layout`.
    #[cfg(not(all(target_arch = "nvptx64", feature = "checked")))]
    pub fn new(layout: &mut Layout, stages: usize) -> Self {
        Self { full: layout.mbarriers(stages), empty: layout.mbarriers(stages) }
    }

    /// Initializes the barriers of the first `stages` stages. A stage is full after `arrivals` and the bytes that they announce, and
    /// empty after `releases`.
    #[inline(always)]
    pub fn init(self, stages: u32, arrivals: u32, releases: u32) {
        for stage in 0..stages {
            self.full.at(stage).init(arrivals);
            self.empty.at(stage).init(releases);
        }
    }

    /// Waits until the current stage of a consumer is full.
    #[inline(always)]
    #[track_caller]
    pub fn wait_full(self, state: PipelineState) {
        self.full.at(state.stage()).wait(state.parity());
    }

    /// Waits until the current stage of a producer is empty.
    #[inline(always)]
    #[track_caller]
    pub fn wait_empty(self, state: PipelineState) {
        self.empty.at(state.stage()).wait(state.parity());
    }

    /// Waits until the current stage of a producer is empty. Returns the stage and its full barrier, and advances the producer.
    #[inline(always)]
    #[track_caller]
    pub fn acquire(self, state: &mut PipelineState) -> (u32, MBarrier) {
        self.wait_empty(*state);
        let full = self.full.at(state.stage());
        (state.advance(), full)
    }

    /// Releases a stage that finished wgmma groups have read. No barrier is needed: a group finishes for all warps of a
    /// warpgroup together. There is one release for each warpgroup.
    #[inline(always)]
    #[track_caller]
    pub fn release(self, stage: u32) {
        if is_warpgroup_leader() {
            self.empty.at(stage).arrive();
        }
    }

    /// Does the same for a stage that a warpgroup has read with ordinary loads. The named barrier `barrier` of the warpgroup makes
    /// sure that all of its warps have finished reading.
    #[inline(always)]
    #[track_caller]
    pub fn release_after_reads(self, stage: u32, barrier: u32) {
        thread::sync_named(barrier, WARPGROUP);
        self.release(stage);
    }

    /// Releases a stage for the calling warp, which has read it with ordinary loads and with wgmma groups that have
    /// finished. There is one release for each warp: a warp's arrival orders the loads of its own lanes only.
    #[inline(always)]
    #[track_caller]
    pub fn release_by_warp(self, stage: u32) {
        warp::sync();
        if warp::lane() == 0 {
            self.empty.at(stage).arrive();
        }
    }

    /// Releases a stage for the calling lane, which has read it with ordinary loads. There is one release for each lane. Unlike
    /// [`release_by_warp`](Self::release_by_warp), racecheck follows it.
    #[inline(always)]
    #[track_caller]
    pub fn release_by_lane(self, stage: u32) {
        self.empty.at(stage).arrive();
    }
}

#[cfg(test)]
mod tests {
    use super::PipelineState;

    #[test]
    fn advance_flips_the_parity_on_wraparound() {
        let mut state = PipelineState::consumer(3);
        let mut visited = Vec::new();
        for _ in 0..7 {
            visited.push((state.stage(), state.parity()));
            assert_eq!(state.advance(), visited[visited.len() - 1].0);
        }
        assert_eq!(visited, [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 0)]);
    }

    #[test]
    fn a_single_stage_flips_the_parity_on_every_advance() {
        let mut state = PipelineState::producer(1);
        for parity in [1, 0, 1, 0] {
            assert_eq!((state.stage(), state.parity()), (0, parity));
            assert_eq!(state.advance(), 0);
        }
    }

    #[test]
    fn producer_and_consumer_start_with_opposite_parity() {
        let (producer, consumer) = (PipelineState::producer(4), PipelineState::consumer(4));
        assert_eq!((producer.stage(), producer.parity()), (0, 1));
        assert_eq!((consumer.stage(), consumer.parity()), (0, 0));
    }

    #[test]
    fn skip_equals_repeated_advance() {
        for stages in 1..6 {
            for start in 0..2 * stages {
                for count in 0..4 * stages {
                    let mut advanced = PipelineState::producer(stages);
                    for _ in 0..start {
                        advanced.advance();
                    }
                    let mut skipped = advanced;
                    for _ in 0..count {
                        advanced.advance();
                    }
                    skipped.skip(count);
                    assert_eq!(skipped, advanced, "{stages} stages: skip({count}) after {start} advances");
                }
            }
        }
    }
}
