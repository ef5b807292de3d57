//! State of a block that belongs to `sm_90a` instructions: mbarriers, TMA and wgmma.

use super::async_copy::{Load, Store};
use super::order::Clock;
use super::report::{Fault, Line, Site};
use super::shadow::Access;
use super::warpgroup::Warpgroup;
use std::collections::{BTreeMap, VecDeque};

/// State of a block that belongs to `sm_90a` instructions.
#[derive(Default)]
pub struct State {
    /// mbarriers by offset in shared memory.
    pub barriers: BTreeMap<usize, MBarrier>,
    /// Pending TMA loads, oldest first.
    pub loads: VecDeque<Load>,
    /// Pending TMA stores of each thread, oldest first.
    pub stores: BTreeMap<usize, Vec<Store>>,
    /// Number of committed groups of TMA stores of each thread.
    pub store_groups: BTreeMap<usize, usize>,
    pub warpgroups: BTreeMap<usize, Warpgroup>,
}

impl State {
    /// Returns the fault of a block that ends in this state, if any: (fault, thread, line, message).
    pub fn incomplete(&self) -> Option<(Fault, Option<usize>, Site, String)> {
        let load = self.loads.front().map(|load| {
            let text = format!(
                "incomplete asynchronous copy: the block ends before its TMA load has completed ({})",
                Line(load.at)
            );
            (Fault::AsyncCopy, None, load.at, text)
        });
        let store = || {
            let (thread, store) = self.stores.iter().find_map(|(thread, stores)| Some((*thread, stores.first()?)))?;
            let text = format!(
                "incomplete asynchronous copy: the thread ends without waiting for its TMA store ({})",
                Line(store.at)
            );
            Some((Fault::AsyncCopy, Some(thread), store.at, text))
        };
        let wgmma = || {
            let (thread, at) = self.warpgroups.iter().find_map(|(group, state)| state.pending(*group))?;
            let text = format!("incomplete wgmma: the thread ends without waiting for its wgmma ({})", Line(at));
            Some((Fault::Accumulators, Some(thread), at, text))
        };
        load.or_else(store).or_else(wgmma)
    }

    /// Returns what the mbarrier at this offset is missing to complete its phase.
    pub fn missing(&self, offset: usize) -> String {
        self.barriers.get(&offset).map_or_else(String::new, MBarrier::missing)
    }
}

/// State of an mbarrier.
pub struct MBarrier {
    /// Arrivals per phase.
    pub expected: u32,
    /// Missing arrivals in this phase.
    pub pending: u32,
    /// Expected bytes minus copied bytes. Negative if bytes arrive before they are announced.
    pub bytes: i64,
    pub phase: u32,
    /// Threads of the block that wait.
    pub waiting: Vec<usize>,
    /// Joined clocks of the arrivals in this phase.
    pub arriving: Clock,
    /// Joined clocks of the arrivals in completed phases.
    pub completed: Clock,
    pub init: Init,
}

/// Initialization of an mbarrier.
pub struct Init {
    pub thread: usize,
    pub at: Site,
    /// Whether the thread has executed `fence_init` since, which makes the initialization visible to TMA.
    pub fenced: bool,
    pub access: Access,
}

impl MBarrier {
    /// Returns the part of a deadlock report that describes this mbarrier.
    pub fn missing(&self) -> String {
        let mut missing = Vec::new();
        if self.pending > 0 {
            missing.push(format!("{} of {} arrivals are missing", self.pending, self.expected));
        }
        match self.bytes {
            0 => (),
            bytes @ 1.. => missing.push(format!("{bytes} expected bytes are missing")),
            bytes => missing.push(format!("{} bytes were copied without an arrival that announced them", -bytes)),
        }
        format!("; {}", missing.join(" and "))
    }
}
