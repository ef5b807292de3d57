//! State of warps and of hardware barriers.

use super::LANES;
use super::report::Site;
use super::wait::{Operation, Wait};

/// Words that a lane deposits in a warp-wide operation and receives from it.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct Slot(pub [u32; 16]);

/// One slot per lane.
pub type Slots = [Slot; LANES];

/// Scheduling and exchange state of a warp.
pub struct Warp {
    /// Mask of the lanes that exist. The masks below also have one bit per lane.
    pub lanes: u32,
    pub ready: u32,
    pub arrived: u32,
    pub finished: u32,
    /// The operation that some lanes have reached and others have not.
    pending: Option<Wait>,
    /// Index of the slots that are being filled. The slots are double-buffered: a lane can be one operation ahead of a
    /// lane that has not read its result yet, but never two.
    pub parity: usize,
    pub slots: [Slots; 2],
    /// Operations that some lanes of a mask have reached.
    pub masked: Vec<Masked>,
    /// Result of each lane's last operation among the lanes of a mask.
    pub masked_results: [u32; LANES],
    /// Predicates of the last barrier that the warp waited at.
    pub votes: Votes,
    /// Lanes that wait in `active_mask`.
    pub active: Vec<(usize, Site)>,
}

/// An operation of the lanes of a mask: where it is, the lanes that have arrived, and their words.
pub struct Masked {
    pub wait: Wait,
    pub arrived: u32,
    pub words: [u32; LANES],
    /// The lane from which each lane reads, in a shuffle.
    pub from: [u8; LANES],
}

impl Warp {
    pub fn new(lanes: usize) -> Self {
        let lanes = u32::MAX >> (LANES - lanes);
        let slots = [[Slot([0; 16]); LANES]; 2];
        Self {
            lanes,
            ready: 0,
            arrived: 0,
            finished: 0,
            pending: None,
            parity: 0,
            slots,
            masked: Vec::new(),
            masked_results: [0; LANES],
            votes: Votes::default(),
            active: Vec::new(),
        }
    }

    pub fn start(&mut self) {
        (self.ready, self.arrived, self.finished, self.pending) = (self.lanes, 0, 0, None);
        self.masked.clear();
        self.active.clear();
    }

    /// Returns whether all lanes have returned from the kernel.
    pub fn has_returned(&self) -> bool {
        self.finished == self.lanes
    }

    /// Removes the first ready lane and returns it.
    #[inline]
    pub fn next_ready(&mut self) -> Option<usize> {
        let lane = self.ready.trailing_zeros();
        self.ready &= self.ready.wrapping_sub(1);
        (lane < LANES as u32).then_some(lane as usize)
    }

    #[inline]
    pub fn wake(&mut self, lane: usize) {
        self.ready |= 1 << lane;
    }

    /// Records that `lane` has reached `wait`. Returns whether it was the last lane, or the operation in which the
    /// other lanes wait if it is a different one.
    #[inline]
    pub fn arrive(&mut self, lane: usize, wait: Wait) -> Result<bool, Wait> {
        match self.pending {
            Some(pending) if !pending.same(wait) => return Err(pending),
            _ => self.pending = Some(wait),
        }
        self.arrived |= 1 << lane;
        let complete = self.arrived == self.lanes;
        if complete {
            (self.arrived, self.pending) = (0, None);
        }
        Ok(complete)
    }

    /// Wakes the lanes that wait in `active_mask` at the same line as the first of them. Returns whether there are any.
    pub fn wake_active(&mut self) -> bool {
        let Some((_, at)) = self.active.first().copied() else { return false };
        let mask = self.active.iter().filter(|(_, other)| *other == at).fold(0, |mask, (lane, _)| mask | 1 << lane);
        self.active.retain(|(_, other)| *other != at);
        for lane in (0..LANES).filter(|lane| mask >> lane & 1 != 0) {
            self.masked_results[lane] = mask;
        }
        self.ready |= mask;
        true
    }
}

/// A hardware barrier of the block (`bar.sync`, `bar.arrive`).
#[derive(Default)]
pub struct Barrier {
    /// Number of threads that complete this phase, and the line at which the first warp arrived.
    pub expects: Option<(u32, Site)>,
    pub arrived: u32,
    /// Mask of the warps to wake.
    pub waiting: u32,
    /// The operation of the first warp to arrive.
    pub operation: Option<Operation>,
    pub votes: Votes,
}

/// The predicates of the threads at a barrier that reduces them.
#[derive(Clone, Copy, Default)]
pub struct Votes {
    pub no: u32,
    pub yes: u32,
}

impl Barrier {
    /// Returns the part of a deadlock report that describes this barrier.
    pub fn missing(&self) -> String {
        self.expects.map_or_else(String::new, |(expects, _)| {
            format!("; {} of {expects} threads have not arrived", expects - self.arrived)
        })
    }
}
