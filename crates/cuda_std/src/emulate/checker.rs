//! Validation of every memory access in a checked launch.
//!
//! Two accesses to one location, at least one of them a write, are a data race unless one thread makes both, both are atomic, or the
//! earlier one happens before the later one ([`order`](super::order)).

use super::LANES;
use super::locations::{At, Locations};
use super::memory::{Buffer, Memory};
use super::order::{Order, Release, Scope, TotalOrder};
use super::region::Region;
use super::report::{Fault, Line, Site};
use super::schedule::Choices;
use super::shadow::{Access, Cell, Overflow, Shadow};
use std::collections::HashMap;
use std::convert::Infallible;
use std::rc::Rc;

/// Kind of a memory access.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Read,
    /// A read by `ldmatrix`.
    WarpRead,
    Write,
    AtomicRead,
    AtomicWrite,
    /// A read-modify-write.
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
        matches!(self, Self::Read | Self::WarpRead | Self::AsyncRead | Self::AtomicRead)
    }
}

/// Kind of an atomic read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Reading {
    /// A load, which may return an older value.
    Load,
    /// The read of the newest value, without a change.
    Newest,
    /// The read of a read-modify-write that changes the value.
    Change,
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

/// Validates accesses and records them in shadow memory.
pub struct Checker {
    buffers: Vec<Buffer>,
    /// The values of buffers that threads access atomically.
    locations: Locations,
    total: TotalOrder,
    /// The bytes of buffers before the last write, by the number of the buffer, if the schedule shows races.
    old: HashMap<usize, Vec<u8>>,
    /// Older bytes that the last access shall return.
    returned: Option<*const u8>,
    /// Whether threads of a block have exchanged values in shared memory.
    exchanged_in_blocks: bool,
    sites: Sites,
    pub choices: Choices,
    /// The state that belongs to the running block.
    local: Box<Local>,
}

/// The part of the state that belongs to one block.
pub struct Local {
    shared_start: usize,
    shared_bytes: usize,
    shared: Shadow,
    /// The values in shared memory that threads access atomically.
    locations: Locations,
    /// The arrays and tiles that kernels have reserved in shared memory, for reports.
    regions: Vec<Region>,
    order: Order,
    /// Number of times a fiber was resumed since the last write.
    idle_steps: usize,
}

impl Local {
    /// Creates the state of a block of `warps` warps with `shared_bytes` bytes of shared memory at `shared_start`.
    pub fn new(shared_start: usize, shared_bytes: usize, warps: usize) -> Self {
        Self {
            shared_start,
            shared_bytes,
            shared: Shadow::new(shared_bytes),
            locations: Locations::default(),
            regions: Vec::new(),
            order: Order::new(warps, 0),
            idle_steps: 0,
        }
    }

    /// Returns the values around `address`, which are `global` unless it is in shared memory, and the order of the block.
    fn locations<'a>(&'a mut self, address: usize, global: &'a mut Locations) -> (&'a mut Locations, &'a mut Order) {
        let is_shared = address.wrapping_sub(self.shared_start) < self.shared_bytes;
        (if is_shared { &mut self.locations } else { global }, &mut self.order)
    }

    /// Resets the state for a block.
    pub fn start_block(&mut self, block: u32) {
        self.idle_steps = 0;
        self.order = Order::new(self.order.warps, block);
        self.locations = Locations::default();
        self.shared.forget_accesses();
        self.shared.forget_contents();
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
    /// Creates a checker that starts with the block of `local`. Takes the buffers out of `memory` until
    /// [`give_back`](Self::give_back).
    pub fn new(memory: &mut Memory, choices: Choices, local: Box<Local>) -> Self {
        let mut buffers = std::mem::take(&mut memory.buffers);
        for buffer in &mut buffers {
            buffer.shadow.forget_accesses();
        }
        let sites = Sites { all: Vec::new(), recent: [None; 256] };
        Self {
            buffers,
            locations: Locations::default(),
            total: None,
            old: HashMap::new(),
            returned: None,
            exchanged_in_blocks: false,
            sites,
            choices,
            local,
        }
    }

    /// Makes `local` the state of the running block, and leaves that of the previous one.
    pub fn switch(&mut self, local: &mut Box<Local>) {
        self.exchanged_in_blocks |= self.local.locations.exchanged;
        std::mem::swap(&mut self.local, local);
    }

    /// Returns whether threads have exchanged values by atomics, so that results may depend on the schedule.
    pub fn values_exchanged(&self) -> bool {
        self.locations.exchanged || self.exchanged_in_blocks
    }

    /// Records an array or tile in shared memory. A region with the same bytes is replaced.
    pub fn reserve(&mut self, region: Region) {
        if self.local.regions.last() != Some(&region) {
            self.local.regions.retain(|known| !known.covers_same_bytes(&region));
            self.local.regions.push(region);
        }
    }

    /// Returns the buffers to `memory`.
    pub fn give_back(self, memory: &mut Memory) {
        memory.buffers = self.buffers;
    }

    /// Records that a fiber was resumed. Returns whether the block counts as livelocked.
    pub fn step(&mut self) -> bool {
        self.local.idle_steps += 1;
        self.local.idle_steps >= MAX_IDLE_STEPS * LANES * self.local.order.warps
    }

    /// Returns the happens-before relation of the running block.
    pub fn order(&mut self) -> &mut Order {
        &mut self.local.order
    }

    /// Returns an access by `thread` at the current time.
    pub fn access_now(&self, thread: usize) -> Access {
        self.local.order.access(thread, 0, 0)
    }

    /// Returns whether `before` happens before the current time of `thread`.
    pub fn happens_before(&self, before: Access, thread: usize) -> bool {
        self.local.order.happens_before(before, thread)
    }

    /// Records a fence by `thread`.
    pub fn fenced(&mut self, thread: usize, scope: Scope, is_sequential: bool) {
        let Self { local, total, .. } = self;
        local.order.fenced(thread, scope, is_sequential.then_some(total));
    }

    /// Returns the value that an atomic read by `thread` of the location, which contains `bits`, returns. See [`Locations::read`].
    pub fn atomic_read(
        &mut self,
        thread: usize,
        (address, bits): (usize, u64),
        (acquires, kind): (bool, Reading),
        at: Site,
    ) -> u64 {
        let Self { local, locations, choices, .. } = self;
        let (locations, order) = local.locations(address, locations);
        let access = order.access(thread, 0, 0);
        let choose = |count| if kind == Reading::Load { choices.skip(count) } else { 0 };
        let (bits, releases) = locations.read(At { address, bits, access }, order, kind == Reading::Change, choose);
        order.observes(thread, &releases, acquires, at);
        bits
    }

    /// Records an atomic write by `thread` to the location, which contains `old`. `is_update`: the write is part of a read-modify-write.
    pub fn atomic_write(
        &mut self,
        thread: usize,
        (address, old, new): (usize, u64, u64),
        releases: bool,
        is_update: bool,
    ) {
        let (locations, order) = self.local.locations(address, &mut self.locations);
        let access = order.access(thread, 0, 0);
        let published: Vec<Rc<Release>> = order.writes(thread, releases);
        if !is_update || !published.is_empty() || locations.has(address) {
            locations.write(At { address, bits: old, access }, new, published, is_update);
        }
    }

    fn locate(&self, address: usize) -> Option<Location> {
        let shared = address.wrapping_sub(self.local.shared_start);
        if shared < self.local.shared_bytes {
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
            let offset = relative(self.local.shared_start, address);
            match self.local.shared_bytes {
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
        let Local { shared_start, shared_bytes, regions, .. } = &*self.local;
        let offset = address.wrapping_sub(*shared_start);
        let allocated = shared_bytes.next_multiple_of(1024).max(1024);
        offset < allocated || regions.iter().any(|region| region.contains(offset))
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
                let region = self.local.regions.iter().rev().find(|region| region.contains(offset));
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
            Location::Shared(_) => &mut self.local.shared,
            Location::Buffer(buffer, _) => &mut self.buffers[buffer].shadow,
        }
    }

    /// Validates and records an access by `thread`.
    pub fn access(&mut self, thread: usize, request: Request) -> Result<(), Finding> {
        let Request { kind, address, bytes, align, at } = request;
        if !kind.reads() {
            self.local.idle_steps = 0;
        }
        let Some(location) = self.locate(address) else { return Err(self.out_of_bounds(request)) };
        let (offset, size) = match location {
            Location::Shared(offset) => (offset, self.local.shared_bytes),
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
            && let Some(wait) = self.local.order.unfenced_wait(thread)
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
        let races = self.check_races(thread, request, location)?;
        if self.choices.shows_races
            && let Location::Buffer(buffer, _) = location
        {
            self.keep_or_return_old(buffer, offset, request, races);
        }
        match kind {
            Kind::Write | Kind::AtomicWrite => self.shadow(location).set_written(offset, bytes),
            Kind::AsyncWrite | Kind::BulkWrite | Kind::BulkStore => (),
            Kind::Read | Kind::WarpRead | Kind::AsyncRead | Kind::AtomicRead | Kind::Atomic | Kind::BulkAdd => {
                if self.shadow(location).first_unwritten(offset, bytes).is_some() {
                    return invalid(self, Fault::Uninitialized, "uninitialized read", "");
                }
            }
        }
        Ok(())
    }

    /// Keeps the bytes that a write replaces. Lets a read that races with a write of another block return them, if the schedule says so.
    #[cold]
    fn keep_or_return_old(&mut self, buffer: usize, offset: usize, Request { kind, bytes, .. }: Request, races: bool) {
        let old = self.old.entry(buffer).or_insert_with(|| self.buffers[buffer].contents().to_vec());
        if kind == Kind::Write {
            old[offset..offset + bytes].copy_from_slice(&self.buffers[buffer].contents()[offset..offset + bytes]);
        } else if kind == Kind::Read && races && self.choices.skip(2) == 1 {
            self.returned = Some(old[offset..].as_ptr());
        }
    }

    /// Returns the address of the older bytes that the last access, a read, shall return, if any.
    pub fn take_old(&mut self) -> Option<*const u8> {
        self.returned.take()
    }

    /// Validates the order of an access, and records it. Returns whether it races with a write of another block, if that is no fault.
    #[inline]
    fn check_races(&mut self, thread: usize, request: Request, location: Location) -> Result<bool, Finding> {
        let kind = request.kind;
        let flags = match kind {
            Kind::Read | Kind::Write => 0,
            Kind::WarpRead | Kind::AsyncRead => Access::WARP,
            Kind::Atomic | Kind::AtomicRead | Kind::AtomicWrite => Access::ATOMIC,
            Kind::AsyncWrite | Kind::BulkWrite | Kind::BulkStore | Kind::BulkAdd => Access::PENDING,
        };
        // Without other schedules, the blocks have not exchanged values, and nothing orders them.
        let of_all_blocks = !self.choices.is_in_order();
        let (shows_races, mut races) = (self.choices.shows_races, false);
        let Local { order, shared, .. } = &mut *self.local;
        let access = order.access(thread, flags, self.sites.number(request.at));
        let shadow = match location {
            Location::Shared(_) => shared,
            Location::Buffer(buffer, _) => &mut self.buffers[buffer].shadow,
        };
        let range = (location.offset(), request.bytes);
        let found = shadow.update(range, !kind.reads(), |i, cell, overflow| {
            let conflict = |with, kind| Err((with, Conflict { cell: location.with_offset(i), kind }));
            let is_shown = |with: Access| shows_races && with.block != order.block;
            if cell.write.is(Access::PENDING) {
                return conflict(cell.write, ConflictKind::AsyncCopy);
            }
            let is_atomic = matches!(kind, Kind::Atomic | Kind::AtomicRead | Kind::AtomicWrite);
            let both_atomic = is_atomic && cell.write.is(Access::ATOMIC);
            if !both_atomic && !order.happens_before(cell.write, thread) {
                if !is_shown(cell.write) {
                    return conflict(cell.write, ConflictKind::Write);
                }
                races = true;
            }
            if matches!(kind, Kind::AsyncRead | Kind::BulkWrite) && !order.is_proxy_fenced(cell.write) {
                return conflict(cell.write, ConflictKind::UnfencedWrite);
            }
            let ordered = cell.reads.map(|read| order.happens_before(read, thread));
            if kind.reads() {
                overflow.read(i, cell, access, ordered, of_all_blocks);
                return Ok(());
            }
            let ordered = [0, 1].map(|i| ordered[i] || is_atomic && cell.reads[i].is(Access::ATOMIC));
            let read = ordered.iter().position(|ordered| !ordered).map(|read| cell.reads[read]);
            let in_overflow = || {
                overflow
                    .of(i, cell)
                    .iter()
                    .find(|read| !(order.happens_before(**read, thread) || is_atomic && read.is(Access::ATOMIC)))
                    .copied()
            };
            if let Some(read) = read.or_else(in_overflow).filter(|read| !is_shown(*read)) {
                return conflict(read, ConflictKind::Read);
            }
            overflow.wrote(i, cell, access);
            Ok(())
        });
        found.map(|()| races).map_err(|(with, conflict)| self.conflict(request, with, &conflict))
    }

    /// Returns the finding for `request`, which conflicts with the earlier access `with`.
    #[cold]
    fn conflict(&self, request: Request, with: Access, conflict: &Conflict) -> Finding {
        let same_block = with.block == self.local.order.block;
        let thread = if same_block && with.warp() >= self.local.order.warps {
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
        let missing = if same_block { "barrier" } else { "release and acquire" };
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
        let access = self.local.order.access(thread, 0, 0);
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
        let Ok(()) = self.local.shared.update((offset, bytes), false, completed);
        self.local.shared.set_written(offset, bytes);
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

fn describe(request: Request) -> String {
    let what = match request.kind {
        Kind::Read => "read",
        Kind::WarpRead => "ldmatrix",
        Kind::AsyncRead => "read by TMA or wgmma",
        Kind::Write => "write",
        Kind::AtomicRead => "atomic read",
        Kind::AtomicWrite => "atomic write",
        Kind::Atomic => "atomic update",
        Kind::AsyncWrite => "asynchronous copy",
        Kind::BulkWrite => "TMA load",
        Kind::BulkStore => "bulk store",
        Kind::BulkAdd => "bulk addition",
    };
    format!("{what} of {} bytes", request.bytes)
}
