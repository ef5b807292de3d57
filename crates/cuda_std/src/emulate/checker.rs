//! Validation of every memory access in a checked launch.
//!
//! The order of accesses is tracked with vector clocks that have one component per warp. Each synchronization of a warp
//! (`warp::sync`, a barrier, an arrival) ends a tick of its clock. A barrier joins the clocks of all warps that arrived
//! into the clocks of the warps that wait. Two accesses to one location, at least one of them a write, are a data race
//! unless one thread makes both, or the earlier one happens before the later one according to the clocks. Accesses of
//! different blocks are ordered only if both blocks have executed `fence::device`. A checked launch runs its blocks one
//! after the other, so reports are deterministic.

use super::LANES;
use super::memory::{Buffer, Memory};
use super::region::Region;
use super::report::{Fault, Line, Site};
use super::shadow::{Access, CELL, Cell, Overflow, Shadow};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::convert::Infallible;

/// Kind of a memory access.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Read,
    /// A read by `ldmatrix`.
    WarpRead,
    Write,
    Atomic,
    /// A write by `cp.async`, which completes at any time before its wait.
    AsyncWrite,
    /// A write to shared memory by a TMA load.
    BulkWrite,
    /// A read of shared memory by TMA or wgmma.
    AsyncRead,
    /// A write to global memory by a bulk store, which completes at any time before its wait.
    BulkStore,
    /// An addition to global memory by a bulk store.
    BulkAdd,
}

impl Kind {
    fn reads(self) -> bool {
        matches!(self, Self::Read | Self::WarpRead | Self::AsyncRead)
    }
}

/// An access to validate.
#[derive(Clone, Copy)]
pub struct Request {
    pub kind: Kind,
    pub address: usize,
    pub bytes: usize,
    pub align: usize,
    pub at: Site,
}

/// An invalid access.
pub struct Finding {
    pub fault: Fault,
    pub other: Option<Site>,
    pub message: String,
}

/// Number of times every thread is resumed without a write after which the block counts as livelocked.
const MAX_IDLE_STEPS: usize = 1 << 16;

/// Addresses below are those of elements of a null view. No process has memory there.
const NULL_PAGES: usize = 1 << 16;

/// For each warp of the block, the latest tick whose end is known.
pub type VectorClock = [u32; LANES];

/// Validates accesses and records them in shadow memory.
pub struct Checker {
    buffers: Vec<Buffer>,
    shared_start: usize,
    shared_bytes: usize,
    shared: Shadow,
    /// The arrays and tiles that kernels have reserved in shared memory, for reports.
    regions: Vec<Region>,
    order: Order,
    sites: Sites,
    /// Number of times a fiber was resumed since the last write.
    idle_steps: usize,
}

/// The happens-before relation.
struct Order {
    /// Clock of each warp. A warp's own component is its current tick.
    clocks: [VectorClock; LANES],
    /// Tick of each warp that began when its lanes last synchronized, either directly or through another warp.
    synced: VectorClock,
    /// Tick that began when each thread last executed `fence_async_proxy`.
    proxy_fences: Vec<u32>,
    /// Joined clocks of the warps that arrived at each hardware barrier.
    barriers: [VectorClock; 16],
    /// Number of the running block.
    block: u32,
    /// Number of warps in a block.
    warps: usize,
    /// Numbers of the blocks that have executed `fence::device`.
    fenced: HashSet<u32>,
    /// The accesses that happen before the latest value of each counter, by the address of the counter.
    released: HashMap<usize, Known>,
    /// Successful waits for counters in the running block.
    acquired: Vec<Acquired>,
    /// For each thread, the latest of these waits that no `fence_async_proxy_global` follows.
    unfenced_waits: HashMap<usize, Site>,
}

/// Clocks of several blocks.
type Known = BTreeMap<u32, VectorClock>;

/// A successful wait for a counter.
struct Acquired {
    thread: usize,
    /// Tick of the thread's warp at the time of the wait.
    tick: u32,
    known: Known,
}

impl Order {
    /// Returns whether the access `before` happens before an access by `thread` at the current time.
    #[inline(always)]
    fn happens_before(&self, before: Access, thread: usize) -> bool {
        if before.is_none() {
            return true;
        }
        if before.block != self.block {
            return self.happens_before_in_other_block(before, thread);
        }
        let warp = thread / LANES;
        before.thread() == thread
            || before.is(Access::WARP) && before.warp() == warp
            || self.known_tick(warp, before.warp()) > before.clock
    }

    /// Same as [`happens_before`](Self::happens_before), for an access of another block.
    #[cold]
    fn happens_before_in_other_block(&self, before: Access, thread: usize) -> bool {
        let known = |known: &Known| known.get(&before.block).is_some_and(|clock| clock[before.warp()] > before.clock);
        let fenced = self.fenced.contains(&before.block) && self.fenced.contains(&self.block);
        fenced || self.acquired_by(thread).any(|acquired| known(&acquired.known))
    }

    /// Returns the waits for counters that happen before the current time of `thread`.
    fn acquired_by(&self, thread: usize) -> impl Iterator<Item = &Acquired> {
        let warp = thread / LANES;
        let known = move |acquired: &&Acquired| {
            acquired.thread == thread || self.known_tick(warp, acquired.thread / LANES) > acquired.tick
        };
        self.acquired.iter().rev().filter(known)
    }

    /// Returns the latest tick of warp `of` that `warp` knows. A warp's own ticks count only once its lanes have
    /// synchronized.
    #[inline(always)]
    fn known_tick(&self, warp: usize, of: usize) -> u32 {
        if of == warp { self.synced[warp] } else { self.clocks[warp][of] }
    }

    /// Returns whether a write is visible to the async proxy: TMA made it, or its thread has executed
    /// `fence_async_proxy` since.
    #[inline]
    fn is_proxy_fenced(&self, write: Access) -> bool {
        write.is_none()
            || write.block != self.block
            || write.is(Access::BULK)
            || self.proxy_fences[write.thread()] > write.clock
    }

    #[inline]
    fn access(&self, thread: usize, flags: u16, site: u16) -> Access {
        let warp = thread / LANES;
        Access::new(self.block, self.clocks[warp][warp], thread, flags, site)
    }
}

/// Table of source lines, which shadow memory refers to by number.
struct Sites {
    all: Vec<Site>,
    /// Direct-mapped cache from the address of a site to its number.
    recent: [Option<(Site, u16)>; 256],
}

impl Sites {
    #[inline]
    fn number(&mut self, site: Site) -> u16 {
        let recent = &mut self.recent[std::ptr::from_ref(site).addr() / 8 % 256];
        match *recent {
            Some((known, number)) if std::ptr::eq(known, site) => number,
            _ => {
                let number = self.all.iter().position(|known| std::ptr::eq(*known, site)).unwrap_or_else(|| {
                    self.all.push(site);
                    self.all.len() - 1
                });
                let number = u16::try_from(number).expect("a kernel has fewer than 65,536 accesses in its source");
                *recent = Some((site, number));
                number
            }
        }
    }
}

/// The memory that an address belongs to, with the byte offset.
#[derive(Clone, Copy)]
enum Location {
    Shared(usize),
    /// Index of the buffer, offset.
    Buffer(usize, usize),
}

impl Location {
    fn offset(self) -> usize {
        let (Self::Shared(offset) | Self::Buffer(_, offset)) = self;
        offset
    }

    /// Returns the location at `offset` in the same memory.
    fn with_offset(self, offset: usize) -> Self {
        match self {
            Self::Shared(_) => Self::Shared(offset),
            Self::Buffer(buffer, _) => Self::Buffer(buffer, offset),
        }
    }
}

impl Checker {
    /// Creates a checker for blocks of `warps` warps with `shared_bytes` bytes of shared memory at `shared_start`.
    /// Takes the buffers out of `memory` until [`give_back`](Self::give_back).
    pub fn new(memory: &mut Memory, shared_start: usize, shared_bytes: usize, warps: usize) -> Self {
        let mut buffers = std::mem::take(&mut memory.buffers);
        for buffer in &mut buffers {
            buffer.shadow.forget_accesses();
        }
        Self {
            buffers,
            shared_start,
            shared_bytes,
            shared: Shadow::new(shared_bytes),
            regions: Vec::new(),
            order: Order {
                clocks: [[0; LANES]; LANES],
                synced: [0; LANES],
                proxy_fences: vec![0; LANES * LANES],
                barriers: [[0; LANES]; 16],
                block: 0,
                warps,
                fenced: HashSet::new(),
                released: HashMap::new(),
                acquired: Vec::new(),
                unfenced_waits: HashMap::new(),
            },
            sites: Sites { all: Vec::new(), recent: [None; 256] },
            idle_steps: 0,
        }
    }

    /// Records an array or tile in shared memory. A region with the same bytes is replaced.
    pub fn reserve(&mut self, region: Region) {
        if self.regions.last() != Some(&region) {
            self.regions.retain(|known| !known.covers_same_bytes(&region));
            self.regions.push(region);
        }
    }

    /// Returns the buffers to `memory`.
    pub fn give_back(self, memory: &mut Memory) {
        memory.buffers = self.buffers;
    }

    /// Resets the state that belongs to one block.
    pub fn start_block(&mut self, block: u32) {
        self.order.block = block;
        self.idle_steps = 0;
        self.order.clocks = [[0; LANES]; LANES];
        self.order.synced = [0; LANES];
        self.order.proxy_fences.fill(0);
        self.order.barriers = [[0; LANES]; 16];
        self.order.acquired.clear();
        self.order.unfenced_waits.clear();
        self.shared.forget_accesses();
        self.shared.forget_contents();
    }

    /// Records that a fiber was resumed. Returns whether the block counts as livelocked.
    pub fn step(&mut self) -> bool {
        self.idle_steps += 1;
        self.idle_steps >= MAX_IDLE_STEPS * LANES * self.order.warps
    }

    /// Ends a tick of `warp` and returns its clock.
    pub fn release(&mut self, warp: usize) -> VectorClock {
        self.order.clocks[warp][warp] += 1;
        self.order.clocks[warp]
    }

    /// Joins a released clock into the clock of `warp`.
    pub fn acquire(&mut self, warp: usize, clock: &VectorClock) {
        join(&mut self.order.clocks[warp], clock);
        self.order.synced[warp] = self.order.synced[warp].max(clock[warp]);
    }

    /// Returns an access by `thread` at the current time.
    pub fn access_now(&self, thread: usize) -> Access {
        self.order.access(thread, 0, 0)
    }

    /// Returns whether `before` happens before the current time of `thread`.
    pub fn happens_before(&self, before: Access, thread: usize) -> bool {
        self.order.happens_before(before, thread)
    }

    /// Records a `fence_async_proxy` by `thread`.
    pub fn proxy_fenced(&mut self, thread: usize) {
        let warp = thread / LANES;
        self.order.clocks[warp][warp] += 1;
        self.order.proxy_fences[thread] = self.order.clocks[warp][warp];
    }

    /// Records a `warp::sync`.
    pub fn warp_synced(&mut self, warp: usize) {
        let clock = self.release(warp);
        self.acquire(warp, &clock);
    }

    /// Records the arrival of `warp` at a hardware barrier.
    pub fn barrier_arrived(&mut self, warp: usize, barrier: usize) {
        let clock = self.release(warp);
        self.acquire(warp, &clock);
        join(&mut self.order.barriers[barrier], &clock);
    }

    /// Records the completion of a hardware barrier, where the warps whose bits are set in `waiting` have waited.
    pub fn barrier_completed(&mut self, barrier: usize, waiting: u32) {
        let clock = std::mem::take(&mut self.order.barriers[barrier]);
        for warp in (0..LANES).filter(|warp| waiting >> warp & 1 != 0) {
            self.acquire(warp, &clock);
        }
    }

    /// Records a `fence::device` in the running block.
    pub fn device_fenced(&mut self) {
        self.order.fenced.insert(self.order.block);
    }

    /// Records a release addition by `thread` to the counter at `address`.
    pub fn counter_released(&mut self, thread: usize, address: usize) {
        let own = self.release(thread / LANES);
        let mut known = Known::from([(self.order.block, own)]);
        for acquired in self.order.acquired_by(thread) {
            join_known(&mut known, &acquired.known);
        }
        join_known(self.order.released.entry(address).or_default(), &known);
    }

    /// Records that `thread` has waited for a value of the counter at `address`.
    pub fn counter_acquired(&mut self, thread: usize, address: usize, at: Site) {
        let warp = thread / LANES;
        let known = self.order.released.get(&address).cloned().unwrap_or_default();
        self.order.acquired.push(Acquired { thread, tick: self.order.clocks[warp][warp], known });
        self.order.unfenced_waits.insert(thread, at);
    }

    /// Records a `fence_async_proxy_global` by `thread`.
    pub fn global_proxy_fenced(&mut self, thread: usize) {
        self.order.unfenced_waits.remove(&thread);
    }

    fn locate(&self, address: usize) -> Option<Location> {
        let shared = address.wrapping_sub(self.shared_start);
        if shared < self.shared_bytes {
            return Some(Location::Shared(shared));
        }
        let next = self.buffers.partition_point(|buffer| buffer.start() <= address);
        let buffer = next.checked_sub(1)?;
        let offset = address - self.buffers[buffer].start();
        (offset < self.buffers[buffer].bytes).then_some(Location::Buffer(buffer, offset))
    }

    #[cold]
    fn out_of_bounds(&self, request: Request) -> Finding {
        let relative = |start: usize, to: usize| {
            if to >= start { format!("+ {}", to - start) } else { format!("- {}", start - to) }
        };
        let address = request.address;
        let place = if let Some(buffer) = self.buffers.iter().find(|buffer| buffer.near(address)) {
            let (name, offset, bytes) = (&buffer.name, relative(buffer.start(), address), buffer.bytes);
            match buffer.element {
                // A buffer of bytes may hold elements of any type.
                1 => format!("{name} {offset}, which has {bytes} bytes"),
                element => {
                    let index = (address as isize - buffer.start() as isize).div_euclid(element as isize);
                    format!("{name} {offset} (index {index}), which has {bytes} bytes ({} elements)", bytes / element)
                }
            }
        } else if address < NULL_PAGES {
            format!("address {address:#x}, through a null view; pass a buffer, or test is_null first")
        } else if self.is_shared(address) {
            let offset = relative(self.shared_start, address);
            match self.shared_bytes {
                0 => format!(
                    "shared memory {offset}, but the launch has no shared memory; name its layout in #[kernel(shared = …)]"
                ),
                bytes => format!("shared memory {offset}, which has {bytes} bytes"),
            }
        } else {
            format!("address {address:#x}, which is in no buffer of this launch")
        };
        let message = format!("out-of-bounds access: {} at {place} ({})", describe(request), Line(request.at));
        Finding { fault: Fault::OutOfBounds, other: None, message }
    }

    /// Returns whether an address is in shared memory as it is allocated, in whole kilobytes, or in an array that a kernel has reserved
    /// beyond its end. Memory of the host may be next to it.
    fn is_shared(&self, address: usize) -> bool {
        let offset = address.wrapping_sub(self.shared_start);
        let allocated = self.shared_bytes.next_multiple_of(1024).max(1024);
        offset < allocated || self.regions.iter().any(|region| region.contains(offset))
    }

    /// Returns the buffer that starts at `start`.
    fn buffer_at(&self, start: usize) -> Option<&Buffer> {
        self.buffers.iter().find(|buffer| buffer.start() == start)
    }

    /// Returns whether `address` is in the buffer that starts at `start` or in its guard zones.
    pub fn is_near(&self, start: usize, address: usize) -> bool {
        self.buffer_at(start).is_some_and(|buffer| buffer.near(address))
    }

    /// Returns the name of the buffer that starts at `start`.
    pub fn buffer_name(&self, start: usize) -> String {
        self.buffer_at(start).map_or_else(|| format!("the view at {start:#x}"), |buffer| buffer.name.clone())
    }

    /// Returns the name of an address: the buffer and the offset.
    pub fn name_of(&self, address: usize) -> String {
        self.locate(address).map_or_else(|| format!("address {address:#x}"), |location| self.name(location))
    }

    fn name(&self, location: Location) -> String {
        match location {
            Location::Shared(offset) => {
                let region = self.regions.iter().rev().find(|region| region.contains(offset));
                let region = region.map_or_else(String::new, |region| format!(" ({})", region.place(offset)));
                format!("shared memory + {offset}{region}")
            }
            Location::Buffer(buffer, offset) => {
                let Buffer { name, element, .. } = &self.buffers[buffer];
                let index = if *element > 1 { format!(" (index {})", offset / element) } else { String::new() };
                format!("{name} + {offset}{index}")
            }
        }
    }

    fn shadow(&mut self, location: Location) -> &mut Shadow {
        match location {
            Location::Shared(_) => &mut self.shared,
            Location::Buffer(buffer, _) => &mut self.buffers[buffer].shadow,
        }
    }

    /// Validates and records an access by `thread`.
    pub fn access(&mut self, thread: usize, request: Request) -> Result<(), Finding> {
        let Request { kind, address, bytes, align, at } = request;
        if !kind.reads() {
            self.idle_steps = 0;
        }
        let Some(location) = self.locate(address) else { return Err(self.out_of_bounds(request)) };
        let (offset, size) = match location {
            Location::Shared(offset) => (offset, self.shared_bytes),
            Location::Buffer(buffer, offset) => (offset, self.buffers[buffer].bytes),
        };
        if offset + bytes > size {
            return Err(self.out_of_bounds(request));
        }
        let invalid = |checker: &Self, fault, what: &str, detail: &str| {
            let (access, name) = (describe(request), checker.name(location));
            let message = format!("{what}: {access} at {name}{detail} ({})", Line(at));
            Err(Finding { fault, other: None, message })
        };
        if !address.is_multiple_of(align) {
            let detail = format!(", which is not aligned to {align} bytes");
            return invalid(self, Fault::Misaligned, "misaligned access", &detail);
        }
        if let Location::Buffer(buffer, _) = location
            && !kind.reads()
            && !self.buffers[buffer].writable
        {
            return invalid(self, Fault::ReadOnly, "write to a read-only buffer", "");
        }
        if matches!(request.kind, Kind::BulkStore | Kind::BulkAdd)
            && let Some(wait) = self.order.unfenced_waits.get(&thread).copied()
        {
            let (access, name) = (describe(request), self.name(location));
            let message = format!(
                "data race: {access} at {name} ({}) and the thread's acquire_wait ({}) with no fence_async_proxy_global \
                 in between",
                Line(at),
                Line(wait)
            );
            return Err(Finding { fault: Fault::DataRace, other: Some(wait), message });
        }
        if offset.is_multiple_of(CELL) && bytes.is_multiple_of(CELL) {
            self.check_races(thread, request, location)?;
        }
        match kind {
            Kind::Write => self.shadow(location).set_written(offset, bytes),
            Kind::AsyncWrite | Kind::BulkWrite | Kind::BulkStore => (),
            Kind::Read | Kind::WarpRead | Kind::AsyncRead | Kind::Atomic | Kind::BulkAdd => {
                if self.shadow(location).first_unwritten(offset, bytes).is_some() {
                    return invalid(self, Fault::Uninitialized, "uninitialized read", "");
                }
            }
        }
        Ok(())
    }

    #[inline]
    fn check_races(&mut self, thread: usize, request: Request, location: Location) -> Result<(), Finding> {
        let kind = request.kind;
        let flags = match kind {
            Kind::Read | Kind::Write => 0,
            Kind::WarpRead | Kind::AsyncRead => Access::WARP,
            Kind::Atomic => Access::ATOMIC,
            Kind::AsyncWrite | Kind::BulkWrite | Kind::BulkStore | Kind::BulkAdd => Access::PENDING,
        };
        let order = &self.order;
        let access = order.access(thread, flags, self.sites.number(request.at));
        let shadow = match location {
            Location::Shared(_) => &mut self.shared,
            Location::Buffer(buffer, _) => &mut self.buffers[buffer].shadow,
        };
        let range = (location.offset(), request.bytes);
        let found = shadow.update(range, !kind.reads(), |i, cell, overflow| {
            let conflict = |with, kind| Err((with, Conflict { cell: location.with_offset(i * CELL), kind }));
            if cell.write.is(Access::PENDING) {
                return conflict(cell.write, ConflictKind::AsyncCopy);
            }
            let both_atomic = kind == Kind::Atomic && cell.write.is(Access::ATOMIC);
            if !both_atomic && !order.happens_before(cell.write, thread) {
                return conflict(cell.write, ConflictKind::Write);
            }
            if matches!(kind, Kind::AsyncRead | Kind::BulkWrite) && !order.is_proxy_fenced(cell.write) {
                return conflict(cell.write, ConflictKind::UnfencedWrite);
            }
            let ordered = cell.reads.map(|read| order.happens_before(read, thread));
            if kind.reads() {
                overflow.read(i, cell, access, ordered);
                return Ok(());
            }
            let read = ordered.iter().position(|ordered| !ordered).map(|read| cell.reads[read]);
            let in_overflow =
                || overflow.of(i, cell).iter().find(|read| !order.happens_before(**read, thread)).copied();
            if let Some(read) = read.or_else(in_overflow) {
                return conflict(read, ConflictKind::Read);
            }
            overflow.wrote(i, cell, access);
            Ok(())
        });
        found.map_err(|(with, conflict)| self.conflict(request, with, &conflict))
    }

    /// Returns the finding for `request`, which conflicts with the earlier access `with`.
    #[cold]
    fn conflict(&self, request: Request, with: Access, conflict: &Conflict) -> Finding {
        let same_block = with.block == self.order.block;
        let thread = if same_block && with.warp() >= self.order.warps {
            "wgmma".to_owned()
        } else if same_block {
            format!("thread {}", with.thread())
        } else {
            format!("thread {} of block number {}", with.thread(), with.block)
        };
        let other = self.sites.all[usize::from(with.site)];
        let access = format!("{} at {} ({})", describe(request), self.name(conflict.cell), Line(request.at));
        let race = |earlier: &str, missing: &str| {
            format!("data race: {access} and {earlier} by {thread} ({}) with no {missing} in between", Line(other))
        };
        let missing = if same_block { "barrier" } else { "fence::device or counter" };
        let (fault, message) = match conflict.kind {
            ConflictKind::AsyncCopy => {
                let line = Line(other);
                let message = format!(
                    "asynchronous copy in flight: {access} before the wait for the copy that {thread} issued ({line})"
                );
                (Fault::AsyncCopy, message)
            }
            ConflictKind::Write => (Fault::DataRace, race("write", missing)),
            ConflictKind::Read => (Fault::DataRace, race("read", missing)),
            ConflictKind::UnfencedWrite => (Fault::DataRace, race("write", "fence_async_proxy")),
        };
        Finding { fault, other: Some(other), message }
    }

    /// Records that the `cp.async` or bulk store of `thread` of `bytes` bytes to `address` has completed.
    pub fn async_copy_completed(&mut self, thread: usize, address: usize, bytes: usize) {
        let Some(location) = self.locate(address) else { return };
        let offset = location.offset();
        let access = self.order.access(thread, 0, 0);
        let shadow = self.shadow(location);
        let completed = |_, cell: &mut Cell, _: &mut Overflow| {
            cell.write = access.from(cell.write.site);
            Ok::<(), Infallible>(())
        };
        let Ok(()) = shadow.update((offset, bytes), false, completed);
        shadow.set_written(offset, bytes);
    }

    /// Records that a TMA load to these bytes of shared memory has completed. The write keeps the time of its issue.
    pub fn bulk_copy_completed(&mut self, address: usize, bytes: usize) {
        let Some(Location::Shared(offset)) = self.locate(address) else { return };
        let completed = |_, cell: &mut Cell, _: &mut Overflow| {
            cell.write.complete();
            Ok::<(), Infallible>(())
        };
        let Ok(()) = self.shared.update((offset, bytes), false, completed);
        self.shared.set_written(offset, bytes);
    }
}

/// A conflict with an earlier access.
struct Conflict {
    cell: Location,
    kind: ConflictKind,
}

/// Kind of the earlier access of a conflict.
enum ConflictKind {
    AsyncCopy,
    Read,
    Write,
    /// A write that happens before the access, but without a proxy fence.
    UnfencedWrite,
}

/// Joins clock `other` into `clock`.
pub fn join(clock: &mut VectorClock, other: &VectorClock) {
    for (tick, other) in clock.iter_mut().zip(other) {
        *tick = (*tick).max(*other);
    }
}

/// Joins the clocks of `other` into those of `known`.
fn join_known(known: &mut Known, other: &Known) {
    for (block, clock) in other {
        join(known.entry(*block).or_insert([0; LANES]), clock);
    }
}

fn describe(request: Request) -> String {
    let what = match request.kind {
        Kind::Read => "read",
        Kind::WarpRead => "ldmatrix",
        Kind::AsyncRead => "read by TMA or wgmma",
        Kind::Write => "write",
        Kind::Atomic => "atomic update",
        Kind::AsyncWrite => "asynchronous copy",
        Kind::BulkWrite => "TMA load",
        Kind::BulkStore => "bulk store",
        Kind::BulkAdd => "bulk addition",
    };
    format!("{what} of {} bytes", request.bytes)
}
