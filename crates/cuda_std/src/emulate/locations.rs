//! The values of memory that threads access atomically.
//!
//! A relaxed or acquiring read may return an older value, as on a GPU, where another block's write is not visible at once. If the write of
//! a value, or a read of it by any thread, happens before the read, the read returns this value or a newer one (coherence). A
//! read-modify-write reads the newest value (atomicity).

use super::order::{Order, Release};
use super::shadow::Access;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

/// Number of values of a location that are kept.
const KEPT: usize = 8;

/// A value that was written.
struct Value {
    bits: u64,
    write: Access,
    /// The accesses that this write has published, and those of the writes before it in a chain of read-modify-writes.
    releases: Vec<Rc<Release>>,
    /// The first read of this value by each thread.
    reads: Vec<Access>,
}

/// Values of the locations, by address. The newest is last.
#[derive(Default)]
pub struct Locations {
    all: HashMap<usize, VecDeque<Value>>,
    /// Whether a thread has read a value atomically that another thread has written atomically, without another order between them; or
    /// written a location that another block has read.
    pub exchanged: bool,
}

/// An atomic access of a thread, with the bits in memory before it.
#[derive(Clone, Copy)]
pub struct At {
    pub address: usize,
    pub bits: u64,
    pub access: Access,
}

impl Locations {
    /// Returns whether values of this location are kept.
    pub fn has(&self, address: usize) -> bool {
        self.all.contains_key(&address)
    }

    /// Returns the values of a location. Ordinary writes replace them by the contents of the memory.
    fn values(&mut self, at: At) -> &mut VecDeque<Value> {
        let values = self.all.entry(at.address).or_default();
        if values.back().is_none_or(|newest| newest.bits != at.bits) {
            values.clear();
            values.push_back(Value { bits: at.bits, write: Access::NONE, releases: Vec::new(), reads: Vec::new() });
        }
        values
    }

    /// Reads a value, and returns it with what its writes have published. `choose` gets the number of values that the thread may read,
    /// and returns how many of the newest it skips. `changes`: the read is part of a read-modify-write that changes the value.
    pub fn read(
        &mut self,
        at: At,
        order: &Order,
        changes: bool,
        choose: impl FnOnce(usize) -> usize,
    ) -> (u64, Vec<Rc<Release>>) {
        let thread = at.access.thread();
        let values = self.values(at);
        let is_visible = |value: &Value| {
            order.happens_before(value.write, thread)
                || value.reads.iter().any(|read| order.happens_before(*read, thread))
        };
        let oldest = values.iter().rposition(is_visible).unwrap_or(0);
        let newest = values.len() - 1;
        let value = &mut values[newest - if newest > oldest { choose(newest - oldest + 1) } else { 0 }];
        if !value.reads.iter().any(|read| (read.block, read.thread()) == (at.access.block, thread)) {
            value.reads.push(at.access);
        }
        let (bits, releases, write) = (value.bits, value.releases.clone(), value.write);
        // Threads of a block wait for each other by reads, not by updates, such as those of a histogram.
        let is_of_other_block = write.block != at.access.block;
        self.exchanged |= !write.is_none() && (is_of_other_block || !changes && !order.happens_before(write, thread));
        (bits, releases)
    }

    /// Records a write of `bits`, which publishes `releases`. A read-modify-write also passes on what the writes before it have
    /// published.
    pub fn write(&mut self, at: At, bits: u64, mut releases: Vec<Rc<Release>>, is_update: bool) {
        let values = self.values(at);
        if let (true, Some(newest)) = (is_update, values.back()) {
            releases.extend_from_slice(&newest.releases);
            releases = Release::merged(releases);
        }
        if values.len() == KEPT {
            values.pop_front();
        }
        let is_read_by_other = |value: &Value| value.reads.iter().any(|read| read.block != at.access.block);
        let is_shared = values.iter().any(is_read_by_other);
        values.push_back(Value { bits, write: at.access, releases, reads: Vec::new() });
        self.exchanged |= is_shared;
    }
}
