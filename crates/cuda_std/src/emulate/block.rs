//! A block and its fibers.
//!
//! All fibers of a block run on one OS thread, one at a time; a thread-local points at the block that runs there. A
//! fiber runs until it must wait, says so in the block and suspends; the scheduler resumes whoever is ready. Blocks run
//! in parallel.

use super::LANES;
use super::access::AsyncCopies;
use super::checker::{Checker, Clocks};
use super::collective::{Barrier, Operation, Wait, Warp};
use super::hopper;
use super::memory::Memory;
use super::report::{Fault, Line, Report, Site, ranges};
use super::stack::{self, FiberStack};
use corosensei::{Coroutine, Yielder};
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use std::cell::{Cell, RefCell};
use std::fmt::Write;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

type Fiber = Coroutine<(), (), (), FiberStack>;

/// Fibers alive at once, all blocks together: each costs two of the 65,530 mappings Linux gives a process.
const MAX_FIBERS: usize = 16 << 10;
const MAX_THREADS: u32 = 1024;
/// The portable size.
const MAX_CLUSTER: u32 = 8;
/// Threads of a cluster that the checker tells apart.
const MAX_CHECKED: usize = LANES * LANES;
/// What every launch can be sure of is far less; this is what an H200's multiprocessor has.
const MAX_SHARED: usize = 227 << 10;

pub struct Block {
    kernel: &'static str,
    size: [u32; 3],
    pub threads: u32,
    pub index: [u32; 3],
    /// Number of this block in its cluster, and the cluster's blocks.
    pub rank: usize,
    pub cluster: Vec<*mut Block>,
    /// The thread whose fiber runs.
    pub current: usize,
    pub warps: Vec<Warp>,
    pub barriers: [Barrier; 16],
    pub copies: Vec<AsyncCopies>,
    pub hopper: hopper::State,
    waits: Vec<Option<Wait>>,
    yielders: Vec<*const Yielder<(), ()>>,
    /// Dynamic shared memory, 1024-byte aligned as on the device.
    shared: Vec<Kilobyte>,
    report: Option<Report>,
    suspicion: Option<Report>,
    /// In a cluster the block that runs has it.
    pub checker: Option<Box<Checker>>,
    pub polling: Polling,
}

/// Whether the thread that runs reads the same places over and over: nobody else runs meanwhile, so it would go on for ever.
#[derive(Default)]
pub struct Polling {
    place: Option<(usize, Site)>,
    accesses: u64,
    /// How often that place has been read since.
    reads: u32,
}

impl Polling {
    /// So many reads of one place by one line, with no write in between, are for ever.
    const LIMIT: u32 = 1 << 22;

    /// Notes a read or an atomic update; whether it is the one too many.
    #[inline]
    pub fn reads(&mut self, address: usize, at: Site) -> bool {
        self.accesses += 1;
        if self.place.is_some_and(|(place, line)| place == address && std::ptr::eq(line, at)) {
            self.reads += 1;
        } else if self.accesses.is_power_of_two() {
            (self.place, self.reads) = (Some((address, at)), 0);
        }
        self.reads >= Self::LIMIT
    }
}

#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(1024))]
struct Kilobyte([u8; 1024]);

/// What shared memory holds before it is written: NaN as f32 and as bf16.
const POISON: Kilobyte = Kilobyte([0xff; 1024]);

thread_local! {
    /// Where the last panic of a kernel was.
    static PANICKED_AT: RefCell<String> = const { RefCell::new(String::new()) };
    static BLOCK: Cell<*mut Block> = const { Cell::new(ptr::null_mut()) };
    /// Whether that block is watched.
    static CHECKED: Cell<bool> = const { Cell::new(false) };
}

#[inline]
pub fn is_checked() -> bool {
    CHECKED.get()
}

/// Whether a kernel is being emulated here.
pub fn is_running() -> bool {
    !BLOCK.get().is_null()
}

/// Calls `f` with the block that runs on this OS thread. `f` must not suspend, nor call `with`.
#[inline]
pub fn with<R>(f: impl FnOnce(&mut Block) -> R) -> R {
    let block = BLOCK.get();
    assert!(!block.is_null(), "a device function of cuda_std was called outside a kernel: launch one and emulate it");
    // SAFETY: `run_cluster` keeps the block alive while BLOCK points at it; only one fiber of it runs at a time, and none
    // holds a reference across a suspension, so this is the only one.
    f(unsafe { &mut *block })
}

/// Calls `f` with block `rank` of the cluster that runs here, if there is one. As [`with`].
pub fn with_peer<R>(rank: usize, f: impl FnOnce(&mut Block) -> R) -> Option<R> {
    let peer = with(|block| block.cluster.get(rank).copied())?;
    // SAFETY: as in `with`: `run_cluster` keeps the whole cluster alive, and nobody has a reference to any of its blocks.
    Some(f(unsafe { &mut *peer }))
}

/// Stops this fiber until the scheduler finds it ready again.
#[inline]
pub fn suspend() {
    let yielder = with(|block| block.yielders[block.current]);
    // SAFETY: set by the fiber that runs here, whose frame below this one holds the yielder.
    unsafe { (*yielder).suspend(()) }
}

/// Stops the kernel with this finding. A read of what was never written stops only its thread at first: if another thread
/// goes on to write there, the two race, and that says more.
#[cold]
pub fn fail(fault: Fault, at: Site, other: Option<Site>, message: String) -> ! {
    with(|block| {
        let report = block.report_of(fault, Some(at), other, message);
        let report = Report { thread: Some(block.current as u32), ..report };
        let slot = if fault == Fault::Uninitialised { &mut block.suspicion } else { &mut block.report };
        slot.get_or_insert(report);
    });
    loop {
        // The scheduler sees the report and unwinds the fiber from here.
        suspend();
    }
}

impl Block {
    fn new(grid: &Grid<'_>) -> Self {
        let threads = grid.threads as usize;
        Self {
            kernel: grid.kernel,
            size: grid.size,
            threads: grid.threads,
            index: [0; 3],
            rank: 0,
            cluster: Vec::new(),
            current: 0,
            warps: (0..threads.div_ceil(LANES)).map(|w| Warp::new((threads - w * LANES).min(LANES))).collect(),
            barriers: Default::default(),
            copies: (0..threads).map(|_| AsyncCopies::default()).collect(),
            hopper: hopper::State::default(),
            waits: vec![None; threads],
            yielders: vec![ptr::null(); threads],
            shared: vec![POISON; grid.shared_bytes.div_ceil(1024)],
            report: None,
            suspicion: None,
            checker: None,
            polling: Polling::default(),
        }
    }

    fn start(&mut self, index: [u32; 3]) {
        self.index = index;
        self.warps.iter_mut().for_each(Warp::start);
        self.barriers = Default::default();
        self.copies.iter_mut().for_each(AsyncCopies::clear);
        self.hopper = hopper::State::default();
        self.waits.fill(None);
        (self.report, self.suspicion) = (None, None);
        self.shared.fill(POISON);
    }

    pub fn shared_base(&mut self) -> *mut u8 {
        self.shared().as_mut_ptr()
    }

    /// Dynamic shared memory, rounded up to whole kilobytes.
    pub fn shared(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.shared)
    }

    pub fn wake(&mut self, thread: usize) {
        self.warps[thread / LANES].wake(thread % LANES);
    }

    /// What the running thread's warp knows, for whoever the thread tells that it came here.
    pub fn publish(&mut self) -> Clocks {
        let warp = self.current / LANES;
        self.checker.as_mut().map_or_else(Clocks::default, |checker| checker.publish(warp))
    }

    /// Warp `warp` learns what others published.
    pub fn acquire(&mut self, warp: usize, known: &Clocks) {
        if let Some(checker) = &mut self.checker {
            checker.acquire(warp, known);
        }
    }

    /// All threads of the cluster have met.
    pub fn cluster_synced(&mut self) {
        if let Some(checker) = &mut self.checker {
            checker.cluster_synced();
        }
    }

    /// An asynchronous copy to this stretch of shared memory has landed.
    pub fn landed(&mut self, address: usize, bytes: usize) {
        if let Some(checker) = &mut self.checker {
            checker.bulk_landed(address, bytes);
        }
    }

    /// The running thread's warp and lane.
    #[inline]
    pub fn place(&self) -> (usize, usize) {
        (self.current / LANES, self.current % LANES)
    }

    /// Notes where the running thread is about to wait.
    #[inline]
    pub fn wait(&mut self, wait: Wait) {
        self.waits[self.current] = Some(wait);
    }

    pub fn report_of(&self, fault: Fault, at: Option<Site>, other: Option<Site>, message: String) -> Report {
        Report { kernel: self.kernel, block: self.index, thread: None, fault, at, other, message }
    }

    /// Who waits where, the same waits together, and who has ended.
    fn waiting(&self) -> (Vec<(Wait, Vec<usize>)>, Vec<usize>) {
        let (finished, waiting): (Vec<usize>, Vec<usize>) =
            (0..self.threads as usize).partition(|&thread| self.finished(thread));
        let mut groups: Vec<(Wait, Vec<usize>)> = Vec::new();
        for thread in waiting {
            let Some(wait) = self.waits[thread] else { continue };
            match groups.iter_mut().find(|(w, _)| *w == wait) {
                Some((_, threads)) => threads.push(thread),
                None => groups.push((wait, vec![thread])),
            }
        }
        (groups, finished)
    }

    /// What a thread was stopped for.
    fn verdict(&mut self) -> Option<Report> {
        match (self.report.clone(), self.suspicion.clone()) {
            (Some(race), Some(read)) if race.fault == Fault::Race && [race.at, race.other].contains(&read.at) => {
                Some(race)
            }
            (report, suspicion) => suspicion.or(report),
        }
    }

    /// What is wrong with how this block ended.
    fn ended_badly(&self) -> Option<Report> {
        self.left_over().or_else(|| self.ended_early())
    }

    /// Whether this block of a cluster may have ended while another reached into it.
    fn ended_early(&self) -> Option<Report> {
        let (block, thread, at) = self.checker.as_ref()?.ended_early()?;
        let message = format!("may end before thread {thread} of block number {block} reaches into it at {}", Line(at));
        Some(self.report_of(Fault::Race, Some(at), None, message))
    }

    /// Whether a thread has yet to end.
    fn waits(&self) -> bool {
        (0..self.threads as usize).any(|thread| !self.finished(thread))
    }

    fn finished(&self, thread: usize) -> bool {
        self.warps[thread / LANES].finished >> (thread % LANES) & 1 != 0
    }
}

/// Nobody goes on, and somebody waits: where everybody in the cluster is.
fn stuck(cluster: &[*mut Block], fault: Fault, mut message: String) -> Report {
    let (mut sites, mut first) = (Vec::new(), None);
    for &block in cluster {
        // SAFETY: as in `with`; nobody has a reference to any of the blocks.
        let block = unsafe { &*block };
        let (groups, finished) = block.waiting();
        let [x, y, z] = block.index;
        let of_block = if cluster.len() > 1 { format!("block ({x}, {y}, {z}): ") } else { String::new() };
        for (wait, threads) in groups {
            first.get_or_insert(block);
            sites.push(wait.at);
            let missing = match wait.operation {
                Operation::MBarrier { offset, .. } => block.hopper.missing(offset as usize),
                Operation::SyncThreads => block.barriers[0].missing(),
                Operation::SyncNamed { id, .. } => block.barriers[id as usize].missing(),
                _ => String::new(),
            };
            let (at, threads) = (Line(wait.at), ranges(&threads));
            let _ = write!(message, "\n  {of_block}waiting in {}{missing} at {at}: threads {threads}", wait.operation);
        }
        if !finished.is_empty() {
            let _ = write!(message, "\n  {of_block}finished: threads {}", ranges(&finished));
        }
    }
    // SAFETY: as above.
    let block = first.unwrap_or_else(|| unsafe { &*cluster[0] });
    block.report_of(fault, sites.first().copied(), sites.get(1).copied(), message)
}

/// A launch, before it is known to be possible.
pub struct Grid<'a> {
    pub kernel: &'static str,
    pub body: &'a (dyn Fn() + Sync),
    pub size: [u32; 3],
    pub threads: u32,
    pub shared_bytes: usize,
    /// Blocks of a cluster, along x.
    pub cluster: u32,
}

impl Grid<'_> {
    fn refuse(&self, message: String) -> Report {
        let (kernel, block, fault) = (self.kernel, [0; 3], Fault::Launch);
        Report { kernel, block, thread: None, fault, at: None, other: None, message }
    }

    /// The number of clusters, if a device would take this launch.
    fn clusters(&self) -> Result<u64, Report> {
        let Self { size, threads, shared_bytes, cluster, .. } = *self;
        if size.iter().zip([i32::MAX as u32, 65535, 65535]).any(|(n, most)| !(1..=most).contains(n)) {
            let message = format!("a grid of {size:?} blocks, expected 1 to 2^31-1 by 1 to 65535 by 1 to 65535");
            return Err(self.refuse(message));
        }
        if !(1..=MAX_THREADS).contains(&threads) {
            return Err(self.refuse(format!("a block of {threads} threads, expected 1 to {MAX_THREADS}")));
        }
        if shared_bytes > MAX_SHARED {
            let message = format!("{shared_bytes} bytes of shared memory for a block, expected {MAX_SHARED} at most");
            return Err(self.refuse(message));
        }
        if !(1..=MAX_CLUSTER).contains(&cluster) || !size[0].is_multiple_of(cluster) {
            let message =
                format!("clusters of {cluster} of {} blocks, expected a divisor up to {MAX_CLUSTER}", size[0]);
            return Err(self.refuse(message));
        }
        Ok(size.iter().map(|&n| u64::from(n)).product::<u64>() / u64::from(cluster))
    }

    fn index(&self, number: u64) -> [u32; 3] {
        let [x, y] = [0, 1].map(|axis| u64::from(self.size[axis]));
        [number % x, number / x % y, number / (x * y)].map(|i| i as u32)
    }

    fn stacks(&self) -> Result<Vec<FiberStack>, Report> {
        let fibers = self.fibers();
        stack::take(fibers)
            .map_err(|error| self.refuse(format!("no memory for the stacks of {fibers} fibers: {error}")))
    }

    /// Of a cluster.
    fn fibers(&self) -> usize {
        (self.threads * self.cluster) as usize
    }

    fn new_cluster(&self) -> Vec<Block> {
        (0..self.cluster).map(|_| Block::new(self)).collect()
    }

    /// Makes the blocks ready to run as cluster `number`.
    fn start(&self, blocks: &mut [Block], number: u64) {
        let first = number * u64::from(self.cluster);
        for (rank, block) in blocks.iter_mut().enumerate() {
            block.start(self.index(first + rank as u64));
            block.rank = rank;
        }
    }
}

/// Runs the body in every thread of every block, blocks in parallel, or says why that came to no end.
pub fn run(grid: &Grid<'_>) -> Result<(), Report> {
    let clusters = grid.clusters()?;
    let workers = rayon::current_num_threads().min(MAX_FIBERS / grid.fibers());
    let workers = workers.min(usize::try_from(clusters).unwrap_or(usize::MAX));
    let next = AtomicU64::new(0);
    let work = |_| {
        let mut stacks = match grid.stacks() {
            Ok(stacks) => stacks,
            Err(report) => return Some((0, report)),
        };
        let mut blocks = grid.new_cluster();
        let mut found = None;
        while found.is_none() {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= clusters {
                break;
            }
            grid.start(&mut blocks, number);
            found = run_cluster(&mut blocks, grid.body, &mut stacks).map(|report| (number, report));
        }
        if found.is_some() {
            next.store(clusters, Ordering::Relaxed);
        }
        stack::give_back(stacks);
        found
    };
    let first = (0..workers).into_par_iter().with_max_len(1).filter_map(work).min_by_key(|(number, _)| *number);
    first.map_or(Ok(()), |(_, report)| Err(report))
}

/// As [`run`], one cluster after the other, watching every access.
pub fn run_checked(grid: &Grid<'_>, memory: &mut Memory) -> Result<(), Report> {
    let clusters = grid.clusters()?;
    if grid.fibers() > MAX_CHECKED {
        let message = format!("a cluster of {} threads, of which at most {MAX_CHECKED} can be checked", grid.fibers());
        return Err(grid.refuse(message));
    }
    let mut stacks = grid.stacks()?;
    let mut blocks = grid.new_cluster();
    let shared = blocks.iter_mut().map(|block| block.shared_base().addr()).collect();
    let warps = grid.threads.div_ceil(LANES as u32) as usize;
    blocks[0].checker = Some(Box::new(Checker::new(memory, shared, grid.shared_bytes, warps)));
    let found = (0..clusters).find_map(|number| {
        grid.start(&mut blocks, number);
        if let Some(checker) = &mut blocks[0].checker {
            checker.start_block(number as u32);
        }
        run_cluster(&mut blocks, grid.body, &mut stacks)
    });
    stack::give_back(stacks);
    if let Some(checker) = blocks[0].checker.take() {
        checker.give_back(memory);
    }
    found.map_or(Ok(()), Err)
}

/// Lets panics of kernels go into their reports, with their lines, instead of to standard error.
fn catch_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| match info.location() {
            Some(at) if is_running() => PANICKED_AT.set(format!("{}:{}", at.file(), at.line())),
            _ => before(info),
        }));
    });
}

/// Points BLOCK at a block, and back at what it was when dropped.
struct Running(*mut Block, bool);

impl Running {
    fn new(block: *mut Block, checked: bool) -> Self {
        Self(BLOCK.replace(block), CHECKED.replace(checked))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        BLOCK.set(self.0);
        CHECKED.set(self.1);
    }
}

/// Goes over to another block of the cluster.
fn switch(to: *mut Block) {
    let from = BLOCK.replace(to);
    if from != to && CHECKED.get() {
        // SAFETY: `run_cluster` keeps both blocks alive, and nobody else has a reference to either.
        let checker = unsafe { (*from).checker.take() };
        with(|block| {
            block.checker = checker;
            if let Some(checker) = &mut block.checker {
                checker.enter(block.rank);
            }
        });
    }
}

/// A thread of the block that runs when it is first resumed.
fn fiber(thread: usize, body: &(dyn Fn() + Sync), stack: FiberStack) -> Fiber {
    let run = move |yielder: &Yielder<(), ()>, ()| {
        with(|block| block.yielders[thread] = yielder);
        let outcome = catch_unwind(AssertUnwindSafe(body));
        with(|block| {
            let (warp, lane) = (thread / LANES, thread % LANES);
            block.warps[warp].finished |= 1 << lane;
            // A fiber that is being unwound comes here too, after the report it was stopped for.
            if let (Err(payload), None) = (outcome, &block.report) {
                let text = payload.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
                let report =
                    block.report_of(Fault::Panic, None, None, format!("panicked at {}: {text}", PANICKED_AT.take()));
                block.report = Some(Report { thread: Some(thread as u32), ..report });
            }
        });
    };
    // SAFETY: `body` outlives the fibers, all of which `run_cluster` finishes before it returns.
    unsafe { Fiber::with_stack_unchecked(stack, run) }
}

/// Runs the blocks of one cluster to their end; `stacks` are the same on return.
fn run_cluster(blocks: &mut [Block], body: &(dyn Fn() + Sync), stacks: &mut Vec<FiberStack>) -> Option<Report> {
    let threads = blocks[0].threads as usize;
    let mut fibers: Vec<Fiber> =
        stacks.drain(..).enumerate().map(|(i, stack)| fiber(i % threads, body, stack)).collect();
    let checked = blocks[0].checker.is_some();
    let count = blocks.len();
    let first: *mut Block = blocks.as_mut_ptr();
    let cluster: Vec<*mut Block> = (0..count).map(|rank| first.wrapping_add(rank)).collect();
    catch_panics();
    let running = Running::new(first, checked);
    for &block in &cluster {
        switch(block);
        with(|block| block.cluster.clone_from(&cluster));
    }
    let mut progress = true;
    let mut livelock = None;
    'run: while progress {
        progress = false;
        for (&block, fibers) in cluster.iter().zip(fibers.chunks_mut(threads)) {
            switch(block);
            for warp in 0..threads.div_ceil(LANES) {
                while let Some(lane) = with(|block| block.warps[warp].next_ready()) {
                    progress = true;
                    let thread = warp * LANES + lane;
                    with(|block| {
                        block.current = thread;
                        block.polling = Polling::default();
                    });
                    fibers[thread].resume(());
                    let (reported, idle) = with(|block| {
                        (block.report.is_some(), block.checker.as_mut().is_some_and(|checker| checker.step()))
                    });
                    if idle {
                        let message =
                            "livelock: threads go on and on, and none has written anything for long".to_owned();
                        livelock = Some(stuck(&cluster, Fault::Livelock, message));
                    }
                    if reported || idle {
                        break 'run;
                    }
                }
            }
        }
        // Copies land as late as they can, and only for somebody who waits.
        // SAFETY: as in `with`; nobody has a reference to any of the blocks here.
        if !progress && cluster.iter().any(|&block| unsafe { &*block }.waits()) {
            for &block in &cluster {
                switch(block);
                progress |= with(hopper::land_one);
            }
        }
    }
    let mut found = livelock;
    for &block in &cluster {
        switch(block);
        found = found.or_else(|| with(Block::verdict));
    }
    let found = found.or_else(|| {
        // SAFETY: as above.
        if cluster.iter().any(|&block| unsafe { &*block }.waits()) {
            return Some(stuck(&cluster, Fault::Deadlock, "deadlock".to_owned()));
        }
        cluster.iter().find_map(|&block| {
            switch(block);
            with(|block| block.ended_badly())
        })
    });
    let mut rest = fibers.into_iter();
    for &block in &cluster {
        switch(block);
        stacks.extend(rest.by_ref().take(threads).map(|mut fiber| {
            fiber.force_unwind();
            fiber.into_stack()
        }));
    }
    switch(first);
    drop(running);
    found
}

macro_rules! index {
    ($($name:ident = |$block:ident| $value:expr;)*) => {$(
        #[inline]
        pub fn $name() -> u32 {
            with(|$block| $value)
        }
    )*};
}

index! {
    thread_idx_x = |block| block.current as u32;
    block_idx_x = |block| block.index[0];
    block_idx_y = |block| block.index[1];
    block_idx_z = |block| block.index[2];
    block_dim_x = |block| block.threads;
    grid_dim_x = |block| block.size[0];
    grid_dim_y = |block| block.size[1];
    grid_dim_z = |block| block.size[2];
}
