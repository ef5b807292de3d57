//! Rings of slots in shared memory that a producer fills and consumer warpgroups release.

use super::WARPGROUP;
use cuda_std::hopper::mbarrier::MBarriers;
use cuda_std::shared::Layout;
use cuda_std::thread;

/// A place in a ring of `count` slots; the parity flips each time round. A consumer starts with parity 0, a producer with
/// 1, for fresh slots count as released.
#[derive(Clone, Copy)]
pub struct Place {
    pub slot: u32,
    pub parity: u32,
    count: u32,
}

impl Place {
    #[inline(always)]
    pub fn new(parity: u32, count: u32) -> Self {
        Self { slot: 0, parity, count }
    }

    /// Moves on and returns the slot left behind.
    #[inline(always)]
    pub fn advance(&mut self) -> u32 {
        let slot = self.slot;
        self.slot += 1;
        if self.slot == self.count {
            self.slot = 0;
            self.parity ^= 1;
        }
        slot
    }
}

/// The two barriers of each of a ring's slots.
#[derive(Clone, Copy)]
pub struct Slots {
    pub full: MBarriers,
    pub empty: MBarriers,
}

impl Slots {
    pub fn new(layout: &mut Layout, count: u32) -> Self {
        Self { full: layout.mbarriers(count as usize), empty: layout.mbarriers(count as usize) }
    }

    /// A slot is full after `arrivals` (and the bytes they announce), empty when all `consumers` have released it.
    #[inline(always)]
    pub fn init(self, count: u32, arrivals: u32, consumers: u32) {
        for slot in 0..count {
            self.full.at(slot).init(arrivals);
            self.empty.at(slot).init(consumers);
        }
    }

    /// A consumer warpgroup has read a slot with ordinary loads: each warp must be done before one thread says so.
    #[inline(always)]
    pub fn release_read(self, slot: u32, consumer: u32) {
        thread::sync_named(1 + consumer, WARPGROUP);
        self.release(slot);
    }

    /// A consumer warpgroup has waited for the products that read a slot, which end for all its warps together.
    #[inline(always)]
    pub fn release(self, slot: u32) {
        if thread::thread_idx_x().is_multiple_of(WARPGROUP) {
            self.empty.at(slot).arrive();
        }
    }

    /// A consumer lets the next slot pass, which holds nothing for it.
    #[inline(always)]
    pub fn skip(self, place: &mut Place) {
        self.full.at(place.slot).wait(place.parity);
        self.release(place.advance());
    }
}
