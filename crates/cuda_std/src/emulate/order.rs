//! The happens-before relation between the accesses of a checked launch.
//!
//! Within a block it is tracked with vector clocks that have one component per warp. Each synchronization of a warp (`warp::sync`, a
//! barrier, an arrival) ends a tick of its clock. A barrier joins the clocks of all warps that arrived into the clocks of the warps
//! that wait.
//!
//! Atomics order the accesses of single threads, also those of different blocks, as in the PTX memory model (PTX ISA, "Memory
//! Consistency Model"). The rules have these names in the documentation:
//! * **Release.** A releasing write publishes everything that happens before it. So does a relaxed write after a fence, for everything
//!   that happens before the fence.
//! * **Observation.** A read observes the write whose value it returns, and the writes before it in a chain of read-modify-writes.
//! * **Acquire.** An acquiring read receives what the observed writes have published. So does a fence after a relaxed read.
//! * **Scope.** A release and an acquire of different blocks order nothing if one of them has the scope of a block.
//! * **Total order.** Each sequentially consistent fence receives what the earlier ones of its scope have published.
//! * **Barriers extend fences.** A fence also orders what a barrier has put before it: a relaxed read by another thread of the block,
//!   and a relaxed write that follows in another thread. PTX guarantees this for sequentially consistent fences only.

use super::LANES;
use super::report::Site;
use super::shadow::Access;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

/// Accesses of one block: those of each warp before a tick, and further ones of single lanes.
#[derive(Clone, Default)]
pub struct Clock {
    warps: [u32; LANES],
    /// Mask of the warps with further accesses of single lanes.
    split: u32,
    /// For each of these warps, the tick of each lane.
    lanes: Vec<[u32; LANES]>,
}

impl Clock {
    /// Returns the accesses of `warp` that this clock contains.
    pub fn of_warp(&self, warp: usize) -> Self {
        let mut clock = Self::default();
        clock.warps[warp] = self.warps[warp];
        clock
    }

    #[inline(always)]
    fn contains(&self, access: Access) -> bool {
        self.warps[access.warp()] > access.clock
            || self.split >> access.warp() & 1 != 0 && self.contains_of_lanes(access)
    }

    #[inline]
    fn contains_of_lanes(&self, access: Access) -> bool {
        let lanes = &self.lanes[self.index(access.warp())];
        // A warp-wide access completes for all lanes at once.
        lanes[access.thread() % LANES] > access.clock
            || access.is(Access::WARP) && lanes.iter().any(|tick| *tick > access.clock)
    }

    /// Returns the index in `lanes` of a warp.
    fn index(&self, warp: usize) -> usize {
        (self.split & ((1 << warp) - 1)).count_ones() as usize
    }

    /// Adds accesses of the lanes of a warp.
    fn add_lanes(&mut self, warp: usize, ticks: &[u32; LANES]) {
        let index = self.index(warp);
        if self.split >> warp & 1 == 0 {
            if ticks.iter().all(|tick| *tick <= self.warps[warp]) {
                return;
            }
            self.split |= 1 << warp;
            self.lanes.insert(index, [0; LANES]);
        }
        let lanes = &mut self.lanes[index];
        for (lane, tick) in lanes.iter_mut().zip(ticks) {
            *lane = (*lane).max(*tick);
        }
        // All lanes of a warp are the warp.
        let first = lanes.iter().copied().fold(u32::MAX, u32::min);
        self.warps[warp] = self.warps[warp].max(first);
    }

    /// Joins `other` into this clock.
    pub fn join(&mut self, other: &Self) {
        for (tick, other) in self.warps.iter_mut().zip(&other.warps) {
            *tick = (*tick).max(*other);
        }
        if self.split | other.split != 0 {
            self.join_lanes(other);
        }
    }

    fn join_lanes(&mut self, other: &Self) {
        for (index, warp) in (0..LANES).filter(|warp| other.split >> warp & 1 != 0).enumerate() {
            self.add_lanes(warp, &other.lanes[index]);
        }
        for warp in 0..LANES {
            if self.split >> warp & 1 == 0 {
                continue;
            }
            let index = self.index(warp);
            if self.lanes[index].iter().all(|tick| *tick <= self.warps[warp]) {
                self.lanes.remove(index);
                self.split &= !(1 << warp);
            }
        }
    }
}

/// The threads that a fence or an atomic orders.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Scope {
    /// The threads of a block, and of a cluster of one block.
    Block,
    /// All threads, also of other GPUs and of the host.
    Device,
}

/// Accesses of several blocks, by the number of the block.
#[derive(Clone, Default)]
pub struct Known(BTreeMap<u32, Rc<Clock>>);

impl Known {
    fn contains(&self, access: Access) -> bool {
        self.0.get(&access.block).is_some_and(|past| past.contains(access))
    }

    fn join(&mut self, other: &Self) {
        for (block, past) in &other.0 {
            match self.0.get_mut(block) {
                Some(known) if Rc::ptr_eq(known, past) => (),
                Some(known) => Rc::make_mut(known).join(past),
                None => {
                    self.0.insert(*block, past.clone());
                }
            }
        }
    }
}

/// The accesses that a write has published.
pub struct Release {
    scope: Scope,
    block: u32,
    known: Known,
}

impl Release {
    /// Joins releases of the same scope.
    pub fn merged(releases: Vec<Rc<Self>>) -> Vec<Rc<Self>> {
        if releases.len() < 2 {
            return releases;
        }
        let of_scope = |scope| {
            let mut all = releases.iter().filter(|release| release.scope == scope);
            let first = all.next()?.clone();
            let (block, mut known) = (first.block, first.known.clone());
            let mut is_changed = false;
            for release in all {
                known.join(&release.known);
                is_changed = true;
            }
            Some(if is_changed { Rc::new(Self { scope, block, known }) } else { first })
        };
        [Scope::Block, Scope::Device].into_iter().filter_map(of_scope).collect()
    }

    fn reaches(&self, scope: Scope, block: u32) -> bool {
        self.block == block || self.scope.min(scope) > Scope::Block
    }
}

/// The accesses that a thread has received.
struct Acquired {
    /// The acquire, as an access.
    at: Access,
    release: Rc<Release>,
    /// Whether a synchronization of some lanes of the warp is the acquire.
    is_sync: bool,
}

/// A relaxed read of a write that has published something.
struct Observed {
    at: Access,
    release: Rc<Release>,
}

/// A fence, and what it publishes together with a later write.
struct Fence {
    at: Access,
    release: Rc<Release>,
}

/// Number of synchronizations of some lanes of a warp that are kept for each thread.
const KEPT_SYNCS: usize = 8;

/// The accesses that sequentially consistent fences of device scope have published.
pub type TotalOrder = Option<Rc<Release>>;

/// The happens-before relation as the threads of one block know it.
pub struct Order {
    /// Current tick of each warp.
    ticks: [u32; LANES],
    /// The accesses that happen before the current time of each warp. Its own component began when its lanes last synchronized, either directly or through another warp.
    clocks: [Clock; LANES],
    /// Tick that began when each thread last executed `fence_async_proxy`.
    proxy_fences: Vec<u32>,
    /// Joined clocks of the warps that arrived at each hardware barrier.
    barriers: [Clock; 16],
    /// Number of the block.
    pub block: u32,
    /// Number of warps in a block.
    pub warps: usize,
    acquired: Vec<Acquired>,
    observed: Vec<Observed>,
    /// The latest fences of each thread.
    fences: Vec<Fence>,
    /// The accesses that sequentially consistent fences of block scope have published.
    total: TotalOrder,
    /// For each thread, the latest acquire that no `fence_async_proxy_global` follows.
    unfenced_waits: HashMap<usize, Site>,
}

impl Order {
    pub fn new(warps: usize, block: u32) -> Self {
        Self {
            ticks: [0; LANES],
            clocks: Default::default(),
            proxy_fences: vec![0; LANES * LANES],
            barriers: Default::default(),
            block,
            warps,
            acquired: Vec::new(),
            observed: Vec::new(),
            fences: Vec::new(),
            total: None,
            unfenced_waits: HashMap::new(),
        }
    }

    /// Returns whether the access `before` happens before an access by `thread` at the current time.
    #[inline(always)]
    pub fn happens_before(&self, before: Access, thread: usize) -> bool {
        if before.is_none() {
            return true;
        }
        before.block == self.block && self.precedes_in_block(before, thread)
            || !self.acquired.is_empty() && self.is_acquired(before, thread)
    }

    #[inline(always)]
    fn precedes_in_block(&self, before: Access, thread: usize) -> bool {
        let warp = thread / LANES;
        before.thread() == thread
            || before.is(Access::WARP) && before.warp() == warp
            || self.clocks[warp].contains(before)
    }

    /// Returns whether `thread` has acquired `before`.
    #[cold]
    fn is_acquired(&self, before: Access, thread: usize) -> bool {
        self.acquired_by(thread).any(|acquired| acquired.release.known.contains(before))
    }

    /// Returns the acquires that happen before the current time of `thread`, newest first.
    fn acquired_by(&self, thread: usize) -> impl Iterator<Item = &Acquired> {
        self.acquired.iter().rev().filter(move |acquired| self.precedes_in_block(acquired.at, thread))
    }

    /// Returns whether a write is visible to the async proxy: TMA made it, or its thread has executed
    /// `fence_async_proxy` since.
    #[inline]
    pub fn is_proxy_fenced(&self, write: Access) -> bool {
        write.is_none()
            || write.block != self.block
            || write.is(Access::BULK)
            || self.proxy_fences[write.thread()] > write.clock
    }

    /// Returns an access by `thread` at the current time.
    #[inline]
    pub fn access(&self, thread: usize, flags: u16, site: u16) -> Access {
        let warp = thread / LANES;
        Access::new(self.block, self.ticks[warp], thread, flags, site)
    }

    /// Ends a tick of `warp` for all of its lanes, and returns its clock.
    pub fn release(&mut self, warp: usize) -> Clock {
        self.ticks[warp] += 1;
        let mut clock = self.clocks[warp].clone();
        clock.warps[warp] = self.ticks[warp];
        clock
    }

    /// Ends a tick of the warp of `thread`, and returns the clock of the thread: of the other lanes, it contains only what precedes the
    /// last synchronization of the warp.
    pub fn release_of_thread(&mut self, thread: usize) -> Clock {
        let warp = thread / LANES;
        self.ticks[warp] += 1;
        let mut clock = self.clocks[warp].clone();
        let mut ticks = [0; LANES];
        ticks[thread % LANES] = self.ticks[warp];
        clock.add_lanes(warp, &ticks);
        clock
    }

    /// Joins a released clock into the clock of `warp`.
    pub fn acquire(&mut self, warp: usize, clock: &Clock) {
        self.clocks[warp].join(clock);
    }

    /// Records a `fence_async_proxy` by `thread`.
    pub fn proxy_fenced(&mut self, thread: usize) {
        let warp = thread / LANES;
        self.ticks[warp] += 1;
        self.proxy_fences[thread] = self.ticks[warp];
    }

    /// Records a `warp::sync`.
    pub fn warp_synced(&mut self, warp: usize) {
        let clock = self.release(warp);
        self.acquire(warp, &clock);
    }

    /// Records a synchronization of the lanes of `warp` in `mask`. It orders nothing for the other lanes.
    pub fn lanes_synced(&mut self, warp: usize, mask: u32) {
        self.ticks[warp] += 1;
        let mut clock = self.clocks[warp].clone();
        clock.add_lanes(warp, &std::array::from_fn(|lane| self.ticks[warp] * (mask >> lane & 1)));
        let mut known = Known(BTreeMap::from([(self.block, Rc::new(clock))]));
        let threads: Vec<usize> =
            (0..LANES).filter(|lane| mask >> lane & 1 != 0).map(|lane| warp * LANES + lane).collect();
        for thread in &threads {
            for acquired in self.acquired_by(*thread) {
                known.join(&acquired.release.known);
            }
        }
        let release = Rc::new(Release { scope: Scope::Block, block: self.block, known });
        for thread in threads {
            let at = self.access(thread, 0, 0);
            // `known` contains what the thread has received before. The earlier entries are for threads that know only those.
            let mine = |acquired: &Acquired| acquired.is_sync && acquired.at.thread() == thread;
            if self.acquired.iter().filter(|acquired| mine(acquired)).count() == KEPT_SYNCS
                && let Some(oldest) = self.acquired.iter().position(mine)
            {
                self.acquired.remove(oldest);
            }
            self.acquired.push(Acquired { at, release: release.clone(), is_sync: true });
        }
    }

    /// Records the arrival of `warp` at a hardware barrier.
    pub fn barrier_arrived(&mut self, warp: usize, barrier: usize) {
        let clock = self.release(warp);
        self.acquire(warp, &clock);
        self.barriers[barrier].join(&clock);
    }

    /// Records the completion of a hardware barrier. The bits of `waiting` select the warps that have waited.
    pub fn barrier_completed(&mut self, barrier: usize, waiting: u32) {
        let clock = std::mem::take(&mut self.barriers[barrier]);
        for warp in (0..LANES).filter(|warp| waiting >> warp & 1 != 0) {
            self.acquire(warp, &clock);
        }
    }

    /// Returns the wait for a counter by `thread` that no `fence_async_proxy_global` follows.
    pub fn unfenced_wait(&self, thread: usize) -> Option<Site> {
        self.unfenced_waits.get(&thread).copied()
    }

    /// Records a `fence_async_proxy_global` by `thread`.
    pub fn global_proxy_fenced(&mut self, thread: usize) {
        self.unfenced_waits.remove(&thread);
    }

    /// Ends a tick of the warp of `thread`, and returns everything that happens before the current time of the thread.
    fn publish(&mut self, thread: usize, scope: Scope) -> Rc<Release> {
        let own = Rc::new(self.release_of_thread(thread));
        let mut known = Known(BTreeMap::from([(self.block, own)]));
        for acquired in self.acquired_by(thread) {
            known.join(&acquired.release.known);
        }
        Rc::new(Release { scope, block: self.block, known })
    }

    /// Records a write by `thread`, and returns what it publishes.
    pub fn writes(&mut self, thread: usize, releases: bool) -> Vec<Rc<Release>> {
        if releases {
            return vec![self.publish(thread, Scope::Device)];
        }
        let before = |fence: &&Fence| self.precedes_in_block(fence.at, thread);
        Release::merged(self.fences.iter().filter(before).map(|fence| fence.release.clone()).collect())
    }

    /// Records that `thread` has read a value. Its writes have published `releases`.
    pub fn observes(&mut self, thread: usize, releases: &[Rc<Release>], acquires: bool, site: Site) {
        let at = self.access(thread, 0, 0);
        for release in releases {
            if acquires && release.reaches(Scope::Device, self.block) {
                self.receive(at, release.clone());
            } else if !self.observed.iter().any(|seen| seen.at.thread() == thread && Rc::ptr_eq(&seen.release, release))
            {
                self.observed.push(Observed { at, release: release.clone() });
            }
        }
        if acquires {
            self.unfenced_waits.insert(thread, site);
        }
    }

    fn receive(&mut self, at: Access, release: Rc<Release>) {
        let is_known =
            |acquired: &Acquired| acquired.at.thread() == at.thread() && Rc::ptr_eq(&acquired.release, &release);
        if !self.acquired.iter().rev().any(is_known) {
            self.acquired.push(Acquired { at, release, is_sync: false });
        }
    }

    /// Records a fence by `thread`. If it is sequentially consistent, `total` is what the earlier ones of device scope have published.
    pub fn fenced(&mut self, thread: usize, scope: Scope, total: Option<&mut TotalOrder>) {
        let at = self.access(thread, 0, 0);
        for i in 0..self.observed.len() {
            let Observed { at: read, ref release } = self.observed[i];
            if self.precedes_in_block(read, thread) && release.reaches(scope, self.block) {
                let release = release.clone();
                self.receive(at, release);
            }
        }
        let is_sequential = total.is_some();
        let mut own = self.total.take();
        let total = total.filter(|_| scope > Scope::Block);
        for earlier in
            [total.as_deref().cloned().flatten(), own.clone()].into_iter().flatten().filter(|_| is_sequential)
        {
            self.receive(at, earlier);
        }
        let release = self.publish(thread, scope);
        if is_sequential {
            // Later fences receive this one's past with all earlier ones', because it has received them.
            own = Some(release.clone());
            if let Some(total) = total {
                *total = Some(release.clone());
            }
        }
        self.total = own;
        self.fences.retain(|fence| fence.at.thread() != thread || fence.release.scope > scope);
        self.fences.push(Fence { at, release });
    }
}
