//! Watches every access of a checked launch.
//!
//! What orders two accesses is tracked with vector clocks whose components are warps: each synchronisation of a warp
//! (`warp::sync`, a barrier, an arrival) ends a tick of its clock, and a barrier hands every warp that waits at it the
//! clocks of all that arrived. Two accesses to one place, one of them a write, are a race unless they are one thread's, or
//! the later one's warp has been handed a tick beyond the earlier one's. Between blocks nothing orders but
//! `fence::device`: both blocks must have fenced. Blocks of a checked launch run one after the other, so that a report is
//! the same on every run.

use super::LANES;
use super::memory::{Buffer, Memory};
use super::report::{Fault, Line, Site};
use super::shadow::{Access, CELL, Shadow};
use std::collections::HashSet;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Read,
    /// A read by `ldmatrix`.
    WarpRead,
    Write,
    Atomic,
    /// A write that happens at some time before its wait.
    AsyncWrite,
    /// Such a write by TMA.
    BulkWrite,
    /// A read of shared memory by TMA or wgmma.
    AsyncRead,
}

impl Kind {
    fn reads(self) -> bool {
        matches!(self, Self::Read | Self::WarpRead | Self::AsyncRead)
    }
}

/// An access about to be made.
#[derive(Clone, Copy)]
pub struct Request {
    pub kind: Kind,
    pub address: usize,
    pub bytes: usize,
    pub align: usize,
    pub at: Site,
}

pub struct Finding {
    pub fault: Fault,
    pub other: Option<Site>,
    pub message: String,
}

/// So many steps of every thread in which none writes anything are for ever.
const MAX_IDLE_STEPS: usize = 1 << 16;

/// For every warp of the cluster how far it is known to have come.
pub type Clocks = [u32; LANES];

pub struct Checker {
    buffers: Vec<Buffer>,
    /// Where the shared memory of each block of the cluster begins, and what is known of it.
    shared_starts: Vec<usize>,
    shared_bytes: usize,
    shared: Vec<Shadow>,
    /// For each block of the cluster and warp of another: the thread that reached into the block last, at what tick, where.
    reached: Vec<[Option<(usize, u32, Site)>; LANES]>,
    order: Order,
    sites: Sites,
    /// How often fibers were resumed since anything was written.
    idle_steps: usize,
}

/// What has happened before what.
struct Order {
    /// What each warp knows of each warp's clock; its own is the tick it is in.
    clocks: [Clocks; LANES],
    /// The tick that began when the lanes of each warp last met, or one learnt from another.
    met: Clocks,
    /// The tick that began when each thread last fenced the asynchronous proxy.
    proxy_fences: Vec<u32>,
    /// What the warps that arrived at each barrier knew.
    barriers: Vec<[Clocks; 16]>,
    /// The cluster, the block of it that runs, and the warps of a block.
    block: u32,
    rank: usize,
    warps: usize,
    fenced: HashSet<u32>,
}

impl Order {
    /// Whether `before` and what `thread` does now can be told apart in time.
    #[inline(always)]
    fn holds(&self, before: Access, thread: usize) -> bool {
        if before.is_none() {
            return true;
        }
        if before.block != self.block {
            return self.fenced.contains(&before.block) && self.fenced.contains(&self.block);
        }
        let (thread, warp) = (self.thread(thread), self.warp(thread / LANES));
        before.thread() == thread
            || before.is(Access::WARP) && before.warp() == warp
            || self.known(warp, before.warp()) > before.clock
    }

    /// How far `warp` knows `of` to have come. A warp's own ticks count once its lanes have met.
    #[inline(always)]
    fn known(&self, warp: usize, of: usize) -> u32 {
        if of == warp { self.met[warp] } else { self.clocks[warp][of] }
    }

    /// Number in the cluster of a thread of the block that runs.
    #[inline(always)]
    fn thread(&self, thread: usize) -> usize {
        self.rank * self.warps * LANES + thread
    }

    #[inline(always)]
    fn warp(&self, warp: usize) -> usize {
        self.rank * self.warps + warp
    }

    /// Whether a write is TMA's, or its thread has fenced since.
    #[inline]
    fn fenced_proxy(&self, write: Access) -> bool {
        write.is_none()
            || write.block != self.block
            || write.is(Access::BULK)
            || self.proxy_fences[write.thread()] > write.clock
    }

    #[inline]
    fn access(&self, thread: usize, flags: u16, site: u16) -> Access {
        let (thread, warp) = (self.thread(thread), self.warp(thread / LANES));
        Access::new(self.block, self.clocks[warp][warp], thread, flags, site)
    }
}

/// Source lines seen, by number.
struct Sites {
    all: Vec<Site>,
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
                let number = u16::try_from(number).expect("fewer than 65,536 accesses in a kernel's source");
                *recent = Some((site, number));
                number
            }
        }
    }
}

enum Place {
    Shared(usize, usize),
    Buffer(usize, usize),
}

impl Checker {
    /// For clusters of blocks of `warps` warps, whose shared memory begins at `shared_starts`.
    pub fn new(memory: &mut Memory, shared_starts: Vec<usize>, shared_bytes: usize, warps: usize) -> Self {
        let blocks = shared_starts.len();
        let mut buffers = std::mem::take(&mut memory.buffers);
        for buffer in &mut buffers {
            buffer.shadow.forget_accesses();
        }
        Self {
            buffers,
            shared_starts,
            shared_bytes,
            shared: (0..blocks).map(|_| Shadow::new(shared_bytes)).collect(),
            reached: vec![[None; LANES]; blocks],
            order: Order {
                clocks: [[0; LANES]; LANES],
                met: [0; LANES],
                proxy_fences: vec![0; LANES * LANES],
                barriers: vec![[[0; LANES]; 16]; blocks],
                block: 0,
                rank: 0,
                warps,
                fenced: HashSet::new(),
            },
            sites: Sites { all: Vec::new(), recent: [None; 256] },
            idle_steps: 0,
        }
    }

    pub fn give_back(self, memory: &mut Memory) {
        memory.buffers = self.buffers;
    }

    pub fn start_block(&mut self, block: u32) {
        self.order.block = block;
        self.idle_steps = 0;
        self.order.clocks = [[0; LANES]; LANES];
        self.order.met = [0; LANES];
        self.order.proxy_fences.fill(0);
        self.reached.fill([None; LANES]);
        self.order.barriers.fill([[0; LANES]; 16]);
        for shared in &mut self.shared {
            shared.forget_accesses();
            shared.forget_contents();
        }
    }

    /// A fiber was resumed; whether that has happened for long without a write.
    pub fn step(&mut self) -> bool {
        self.idle_steps += 1;
        self.idle_steps >= MAX_IDLE_STEPS * LANES * self.order.warps * self.shared.len()
    }

    /// Block `rank` of the cluster is the one that runs.
    pub fn enter(&mut self, rank: usize) {
        self.order.rank = rank;
    }

    /// A thread of `warp` tells others what it knows: what is to be learnt from it.
    pub fn publish(&mut self, warp: usize) -> Clocks {
        let warp = self.order.warp(warp);
        self.order.clocks[warp][warp] += 1;
        self.order.clocks[warp]
    }

    pub fn acquire(&mut self, warp: usize, known: &Clocks) {
        let warp = self.order.warp(warp);
        learn(&mut self.order.clocks[warp], known);
        self.order.met[warp] = self.order.met[warp].max(known[warp]);
    }

    /// `thread` arrives at a barrier of block `rank`, or writes to its shared memory.
    pub fn reaches_into(&mut self, rank: usize, thread: usize, at: Site) {
        let warp = self.order.warp(thread / LANES);
        self.reached[rank][warp] = Some((self.order.thread(thread), self.order.clocks[warp][warp], at));
    }

    /// Block number, thread and line of what may reach into the block that runs when its last thread has ended.
    pub fn ended_early(&self) -> Option<(usize, usize, Site)> {
        let Order { rank, warps, clocks, block, .. } = &self.order;
        let known = |other: usize| clocks[rank * warps..][..*warps].iter().map(|own| own[other]).max();
        let mut reached = self.reached[*rank].iter().enumerate();
        let late = reached.find_map(|(warp, reached)| reached.filter(|(_, tick, _)| known(warp) <= Some(*tick)));
        let (thread, _, at) = late?;
        let threads = warps * LANES;
        Some((*block as usize * self.shared.len() + thread / threads, thread % threads, at))
    }

    /// An access that `thread` makes now.
    pub fn access_now(&self, thread: usize) -> Access {
        self.order.access(thread, 0, 0)
    }

    /// Whether what `thread` does now comes after this access.
    pub fn comes_after(&self, access: Access, thread: usize) -> bool {
        self.order.holds(access, thread)
    }

    /// `thread` orders its accesses before later ones by TMA and wgmma.
    pub fn proxy_fenced(&mut self, thread: usize) {
        let (thread, warp) = (self.order.thread(thread), self.order.warp(thread / LANES));
        self.order.clocks[warp][warp] += 1;
        self.order.proxy_fences[thread] = self.order.clocks[warp][warp];
    }

    /// All threads of the cluster have met.
    pub fn cluster_synced(&mut self) {
        let mut all = [0; LANES];
        for warp in 0..LANES {
            self.order.clocks[warp][warp] += 1;
            learn(&mut all, &self.order.clocks[warp]);
        }
        self.order.clocks.fill(all);
        self.order.met = all;
    }

    pub fn warp_synced(&mut self, warp: usize) {
        let known = self.publish(warp);
        self.acquire(warp, &known);
    }

    pub fn arrived(&mut self, warp: usize, barrier: usize) {
        let known = self.publish(warp);
        self.acquire(warp, &known);
        learn(&mut self.order.barriers[self.order.rank][barrier], &known);
    }

    /// Barrier `barrier` lets the warps whose bits are set in `waiting` go.
    pub fn released(&mut self, barrier: usize, waiting: u32) {
        let known = std::mem::take(&mut self.order.barriers[self.order.rank][barrier]);
        for warp in (0..LANES).filter(|warp| waiting >> warp & 1 != 0) {
            self.acquire(warp, &known);
        }
    }

    pub fn fenced(&mut self) {
        self.order.fenced.insert(self.order.block);
    }

    fn locate(&self, address: usize) -> Option<Place> {
        for (rank, start) in self.shared_starts.iter().enumerate() {
            let shared = address.wrapping_sub(*start);
            if shared < self.shared_bytes {
                return Some(Place::Shared(rank, shared));
            }
        }
        let next = self.buffers.partition_point(|buffer| buffer.start() <= address);
        let buffer = next.checked_sub(1)?;
        let offset = address - self.buffers[buffer].start();
        (offset < self.buffers[buffer].bytes).then_some(Place::Buffer(buffer, offset))
    }

    #[cold]
    fn out_of_bounds(&self, request: Request) -> Finding {
        let far = |from: usize, to: usize| {
            if to >= from { format!("+ {}", to - from) } else { format!("- {}", from - to) }
        };
        let address = request.address;
        let place = if let Some(buffer) = self.buffers.iter().find(|buffer| buffer.near(address)) {
            format!("{} {}, which has {} bytes", buffer.name, far(buffer.start(), address), buffer.bytes)
        } else if address.abs_diff(self.shared_starts[self.order.rank]) < 1 << 20 {
            let (start, bytes) = (self.shared_starts[self.order.rank], self.shared_bytes);
            format!("shared memory {}, of which the launch gave {bytes} bytes", far(start, address))
        } else {
            format!("address {address:#x}, in no buffer of this launch")
        };
        let message = format!("out of bounds: {} at {place}, at {}", describe(request), Line(request.at));
        Finding { fault: Fault::OutOfBounds, other: None, message }
    }

    /// Where an address lies.
    pub fn place(&self, address: usize) -> String {
        self.locate(address).map_or_else(|| format!("address {address:#x}"), |place| self.name(&place))
    }

    fn name(&self, place: &Place) -> String {
        match place {
            Place::Shared(_, offset) => format!("shared memory + {offset}"),
            Place::Buffer(buffer, offset) => format!("{} + {offset}", self.buffers[*buffer].name),
        }
    }

    fn shadow(&mut self, place: &Place) -> &mut Shadow {
        match *place {
            Place::Shared(rank, _) => &mut self.shared[rank],
            Place::Buffer(buffer, _) => &mut self.buffers[buffer].shadow,
        }
    }

    /// Says what is wrong with an access of `thread`, or remembers it.
    pub fn access(&mut self, thread: usize, request: Request) -> Result<(), Finding> {
        let Request { kind, address, bytes, align, at } = request;
        if !kind.reads() {
            self.idle_steps = 0;
        }
        let Some(place) = self.locate(address) else { return Err(self.out_of_bounds(request)) };
        let (offset, size) = match place {
            Place::Shared(_, offset) => (offset, self.shared_bytes),
            Place::Buffer(buffer, offset) => (offset, self.buffers[buffer].bytes),
        };
        if offset + bytes > size {
            return Err(self.out_of_bounds(request));
        }
        let simple = |checker: &Self, fault, what: &str| {
            let message = format!("{what}: {} at {}, at {}", describe(request), checker.name(&place), Line(at));
            Err(Finding { fault, other: None, message })
        };
        if !address.is_multiple_of(align) {
            return simple(self, Fault::Misaligned, &format!("not aligned to {align} bytes"));
        }
        if let Place::Buffer(buffer, _) = place
            && !kind.reads()
            && !self.buffers[buffer].writable
        {
            return simple(self, Fault::ReadOnly, "this buffer is an input");
        }
        if offset.is_multiple_of(CELL) && bytes.is_multiple_of(CELL) {
            self.races(thread, request, &place, offset)?;
        }
        match kind {
            Kind::Write => self.shadow(&place).set_written(offset, bytes),
            Kind::AsyncWrite | Kind::BulkWrite => (),
            Kind::Read | Kind::WarpRead | Kind::AsyncRead | Kind::Atomic => {
                if self.shadow(&place).first_unwritten(offset, bytes).is_some() {
                    return simple(self, Fault::Uninitialised, "read of what was never written");
                }
            }
        }
        Ok(())
    }

    #[inline]
    fn races(&mut self, thread: usize, request: Request, place: &Place, offset: usize) -> Result<(), Finding> {
        let kind = request.kind;
        let flags = match kind {
            Kind::Read | Kind::Write => 0,
            Kind::WarpRead | Kind::AsyncRead => Access::WARP,
            Kind::Atomic => Access::ATOMIC,
            Kind::AsyncWrite | Kind::BulkWrite => Access::PENDING,
        };
        let order = &self.order;
        let access = order.access(thread, flags, self.sites.number(request.at));
        let shadow = match *place {
            Place::Shared(rank, _) => &mut self.shared[rank],
            Place::Buffer(buffer, _) => &mut self.buffers[buffer].shadow,
        };
        for i in offset / CELL..(offset + request.bytes) / CELL {
            let cell = *shadow.cell(i);
            if cell.write.is(Access::PENDING) {
                return Err(self.clash(thread, request, place, i * CELL, cell.write, "began to copy to"));
            }
            let both_atomic = kind == Kind::Atomic && cell.write.is(Access::ATOMIC);
            if !both_atomic && !order.holds(cell.write, thread) {
                return Err(self.clash(thread, request, place, i * CELL, cell.write, "wrote"));
            }
            if matches!(kind, Kind::AsyncRead | Kind::BulkWrite) && !order.fenced_proxy(cell.write) {
                return Err(self.clash(thread, request, place, i * CELL, cell.write, "wrote"));
            }
            let past = cell.reads.map(|read| order.holds(read, thread));
            if kind.reads() {
                shadow.read(i, access, past);
                continue;
            }
            let read = past.iter().position(|past| !past).map(|read| cell.reads[read]);
            let in_crowd = || shadow.crowd(i, cell).iter().find(|read| !order.holds(**read, thread)).copied();
            if let Some(read) = read.or_else(in_crowd) {
                return Err(self.clash(thread, request, place, i * CELL, read, "read"));
            }
            shadow.wrote(i, access);
        }
        Ok(())
    }

    #[cold]
    fn clash(&self, thread: usize, request: Request, place: &Place, offset: usize, with: Access, did: &str) -> Finding {
        let (fault, why) = if with.is(Access::PENDING) {
            (Fault::AsyncCopy, "and nobody has waited for that")
        } else if matches!(request.kind, Kind::AsyncRead | Kind::BulkWrite)
            && did == "wrote"
            && self.order.holds(with, thread)
        {
            (Fault::Race, "with no fence_async_proxy after it")
        } else if with.block == self.order.block {
            (Fault::Race, "with no barrier in between")
        } else {
            (Fault::Race, "with no fence in between")
        };
        let other = self.sites.all[usize::from(with.site)];
        let word = match place {
            Place::Shared(rank, _) => Place::Shared(*rank, offset),
            Place::Buffer(buffer, _) => Place::Buffer(*buffer, offset),
        };
        let rank = with.warp() / self.order.warps;
        let other_thread = with.thread() - rank * self.order.warps * LANES;
        let who = if with.block == self.order.block && rank == self.order.rank {
            format!("thread {other_thread}")
        } else {
            format!("thread {other_thread} of block number {}", with.block as usize * self.shared.len() + rank)
        };
        let message = format!(
            "{}: {} at {}, at {}; {who} {did} it at {} {why}",
            if fault == Fault::Race { "race" } else { "asynchronous copy under way" },
            describe(request),
            self.name(&word),
            Line(request.at),
            Line(other)
        );
        Finding { fault, other: Some(other), message }
    }

    /// The 16 bytes of `thread`'s asynchronous copy to `address` have landed.
    pub fn landed(&mut self, thread: usize, address: usize) {
        let Some(place) = self.locate(address) else { return };
        let (Place::Shared(_, offset) | Place::Buffer(_, offset)) = place;
        let access = self.order.access(thread, 0, 0);
        let shadow = self.shadow(&place);
        for i in offset / CELL..(offset + 16) / CELL {
            let cell = shadow.cell(i);
            let site = cell.write.site;
            cell.write = access;
            cell.write.site = site;
        }
        shadow.set_written(offset, 16);
    }

    /// A copy by TMA to these bytes of shared memory has landed, as of the time when it was issued.
    pub fn bulk_landed(&mut self, address: usize, bytes: usize) {
        let Some(Place::Shared(rank, offset)) = self.locate(address) else { return };
        let shadow = &mut self.shared[rank];
        for i in offset / CELL..(offset + bytes) / CELL {
            shadow.cell(i).write.land();
        }
        shadow.set_written(offset, bytes);
    }
}

pub fn learn(mine: &mut Clocks, other: &Clocks) {
    for (mine, other) in mine.iter_mut().zip(other) {
        *mine = (*mine).max(*other);
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
    };
    format!("{what} of {} bytes", request.bytes)
}
