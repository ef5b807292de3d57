//! State of a block, and access of the running thread to it.
//!
//! All fibers of a block run on one OS thread, one at a time, and a thread-local variable points at the running block.

use super::LANES;
use super::async_copy::AsyncCopies;
use super::atomic::Polls;
use super::checker::{Checker, Local};
use super::grid::Grid;
use super::hopper_state;
use super::order::Clock;
use super::report::{Fault, Line, Report, Site, ranges};
use super::running::Running;
use super::stack::FiberStack;
use super::wait::{Operation, ValueWait, Wait};
use super::warp::{Barrier, Warp};
use corosensei::{Coroutine, Yielder};
use std::cell::Cell;
use std::fmt::Write;
use std::panic::Location;
use std::ptr;
use std::sync::Arc;

pub type Fiber = Coroutine<(), (), (), FiberStack>;

/// State of the block that is being emulated.
pub struct Block {
    kernel: &'static str,
    size: [u32; 3],
    /// Extent in x, y and z.
    pub extent: [u32; 3],
    pub threads: u32,
    pub index: [u32; 3],
    /// Index of the running thread.
    pub current: usize,
    /// The thread number that the race check records for accesses. `None`: the running thread. Set while `wgmma::compute` reads.
    pub reader: Option<usize>,
    pub warps: Vec<Warp>,
    pub barriers: [Barrier; 16],
    pub copies: Vec<AsyncCopies>,
    pub hopper: hopper_state::State,
    waits: Vec<Option<Wait>>,
    pub yielders: Vec<*const Yielder<(), ()>>,
    /// Dynamic shared memory, aligned to 1024 bytes as on the device.
    shared: Vec<Kilobyte>,
    shared_bytes: usize,
    pub report: Option<Report>,
    /// An uninitialized read, held back until the block ends: see [`fail`].
    suspicion: Option<Report>,
    pub checker: Option<Box<Checker>>,
    pub polling: Polling,
    /// Threads that wait for values in memory.
    pub value_waits: Vec<ValueWait>,
    /// Threads that poll. They continue after others have run.
    pub spinning: Vec<usize>,
    pub polls: Polls,
    /// Whether other blocks shall run before this one continues.
    pub leaves: bool,
    /// Number of times a thread has written memory that other threads access atomically.
    pub changes: u64,
    /// The blocks of the launch, if they run in parallel.
    pub running: Option<Arc<Running>>,
}

/// Detects a thread that polls: it reads the same address forever, because no other thread runs in the meantime.
#[derive(Default)]
pub struct Polling {
    sampled: Option<(usize, Site)>,
    accesses: u64,
    /// Reads of the sampled address by the sampled line since it was sampled.
    reads: u32,
}

impl Polling {
    /// Number of reads of one address by one line, without a write in between, that counts as polling.
    const LIMIT: u32 = 1 << 22;

    /// Records a read or an atomic update. Returns true when the limit is reached.
    #[inline]
    pub fn record_read(&mut self, address: usize, at: Site) -> bool {
        self.accesses += 1;
        if self.sampled.is_some_and(|(sampled, line)| sampled == address && ptr::eq(line, at)) {
            self.reads += 1;
        } else if self.accesses.is_power_of_two() {
            (self.sampled, self.reads) = (Some((address, at)), 0);
        }
        self.reads >= Self::LIMIT
    }
}

#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(1024))]
struct Kilobyte([u8; 1024]);

/// Initial contents of shared memory: NaN as f32 and as bf16.
const POISON: Kilobyte = Kilobyte([0xff; 1024]);

thread_local! {
    static BLOCK: Cell<*mut Block> = const { Cell::new(ptr::null_mut()) };
    /// The fibers of the running block: their address and number.
    static FIBERS: Cell<(*const Fiber, usize)> = const { Cell::new((ptr::null(), 0)) };
    static CLOCK: Cell<u64> = const { Cell::new(0) };
    static MODE: Cell<Mode> = const { Cell::new(Mode::Outside) };
}

/// The kind of launch that runs on an OS thread.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// No kernel runs.
    Outside,
    /// The caller of the launch guarantees that accesses are valid.
    Unchecked,
    /// Each access is checked.
    Checked,
}

/// Returns the kind of the launch that runs on this OS thread.
#[inline]
pub fn mode() -> Mode {
    MODE.get()
}

/// Returns whether the kernel that runs on this OS thread is checked.
#[inline]
pub fn is_checked() -> bool {
    mode() == Mode::Checked
}

/// Returns the block that runs on this OS thread, or null.
pub fn running_block() -> *mut Block {
    BLOCK.get()
}

/// Returns the fiber of a thread of the running block.
pub fn fiber_at(thread: usize) -> Option<*const Fiber> {
    let (fibers, count) = FIBERS.get();
    (thread < count).then(|| fibers.wrapping_add(thread))
}

/// Guard that points BLOCK at a block and restores the previous value on drop.
pub struct RunningBlock(*mut Block, Mode, (*const Fiber, usize));

impl RunningBlock {
    /// Makes `block` the running block of this OS thread.
    ///
    /// # Safety
    /// `block` must outlive the guard. Until the guard is dropped, the block must be accessed only through [`with`].
    /// `fibers` must stay allocated as long as one of them runs.
    pub unsafe fn new(block: *mut Block, mode: Mode, fibers: &[Fiber]) -> Self {
        Self(BLOCK.replace(block), MODE.replace(mode), FIBERS.replace((fibers.as_ptr(), fibers.len())))
    }
}

impl Drop for RunningBlock {
    fn drop(&mut self) {
        BLOCK.set(self.0);
        MODE.set(self.1);
        FIBERS.set(self.2);
    }
}

/// Returns whether a kernel is being emulated on this OS thread.
pub fn is_running() -> bool {
    !BLOCK.get().is_null()
}

/// Calls `f` with the block that runs on this OS thread. `f` must neither suspend nor call `with`.
#[inline]
pub fn with<R>(f: impl FnOnce(&mut Block) -> R) -> R {
    let block = BLOCK.get();
    if block.is_null() {
        outside_kernel();
    }
    // SAFETY: the caller of `RunningBlock::new` keeps the block alive while BLOCK points at it. Only one of its fibers
    // runs at a time, and none holds a reference across a suspension, so this reference is the only one.
    f(unsafe { &mut *block })
}

/// Panics, because device memory can be accessed only while a kernel runs.
#[cold]
#[track_caller]
pub fn outside_kernel() -> ! {
    panic!(
        "a device function of cuda_std was called outside a kernel; call it from a #[kernel] function and emulate the \
         launch"
    )
}

/// Suspends the running fiber until the scheduler resumes it.
#[inline]
pub fn suspend() {
    let yielder = with(|block| block.yielders[block.current]);
    // SAFETY: the pointer was set by the running fiber, and the yielder lives in a lower frame of the same stack.
    unsafe { (*yielder).suspend(()) }
}

/// Stops the kernel with this fault.
///
/// An uninitialized read stops only its thread. If another thread writes the location later, the two accesses are a
/// data race, which is the more useful report.
#[cold]
pub fn fail(fault: Fault, at: Site, other: Option<Site>, message: String) -> ! {
    with(|block| {
        let report = block.report_of(fault, Some(at), other, message);
        let report = Report { thread: Some(block.current as u32), ..report };
        let slot = if fault == Fault::Uninitialized { &mut block.suspicion } else { &mut block.report };
        slot.get_or_insert(report);
    });
    loop {
        // The scheduler finds the report and unwinds the fiber from this point.
        suspend();
    }
}

impl Block {
    pub fn new(grid: &Grid<'_>) -> Self {
        let threads = grid.threads as usize;
        Self {
            kernel: grid.kernel,
            size: grid.size,
            extent: grid.block,
            threads: grid.threads,
            index: [0; 3],
            current: 0,
            reader: None,
            warps: (0..threads.div_ceil(LANES)).map(|w| Warp::new((threads - w * LANES).min(LANES))).collect(),
            barriers: Default::default(),
            copies: (0..threads).map(|_| AsyncCopies::default()).collect(),
            hopper: hopper_state::State::default(),
            waits: vec![None; threads],
            yielders: vec![ptr::null(); threads],
            // At least one, so that addresses in undeclared shared memory differ from those of null views.
            shared: vec![POISON; grid.shared_bytes.div_ceil(1024).max(1)],
            shared_bytes: grid.shared_bytes,
            report: None,
            suspicion: None,
            checker: None,
            polling: Polling::default(),
            value_waits: Vec::new(),
            spinning: Vec::new(),
            polls: Polls::new(threads),
            leaves: false,
            changes: 0,
            running: None,
        }
    }

    /// Resets the state for the block at `index`.
    pub fn start(&mut self, index: [u32; 3]) {
        self.index = index;
        self.warps.iter_mut().for_each(Warp::start);
        self.barriers = Default::default();
        self.copies.iter_mut().for_each(AsyncCopies::clear);
        self.hopper = hopper_state::State::default();
        self.waits.fill(None);
        self.value_waits.clear();
        self.spinning.clear();
        self.polls.clear();
        (self.report, self.suspicion) = (None, None);
        self.shared.fill(POISON);
    }

    pub fn shared_base(&mut self) -> *mut u8 {
        self.shared().as_mut_ptr()
    }

    /// Returns dynamic shared memory, rounded up to whole kilobytes.
    pub fn shared(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.shared)
    }

    pub fn wake(&mut self, thread: usize) {
        self.warps[thread / LANES].wake(thread % LANES);
    }

    /// Ends a tick of the running thread's warp and returns the warp's clock, for threads that synchronize with it.
    pub fn release(&mut self) -> Clock {
        let warp = self.current / LANES;
        self.checker.as_mut().map_or_else(Clock::default, |checker| checker.order().release(warp))
    }

    /// Ends a tick of the running thread's warp and returns the thread's clock.
    pub fn release_of_thread(&mut self) -> Clock {
        let thread = self.current;
        self.checker.as_mut().map_or_else(Clock::default, |checker| checker.order().release_of_thread(thread))
    }

    /// Joins a released clock into the clock of `warp`.
    pub fn acquire(&mut self, warp: usize, clock: &Clock) {
        if let Some(checker) = &mut self.checker {
            checker.order().acquire(warp, clock);
        }
    }

    /// Returns new state of this block for a checker.
    pub fn local(&mut self) -> Box<Local> {
        let shared = self.shared_base().addr();
        Box::new(Local::new(shared, self.shared_bytes, self.warps.len()))
    }

    /// Exchanges the state of the block that the checker is at with `local`.
    pub fn switch_checker(&mut self, local: &mut Option<Box<Local>>) {
        if let (Some(checker), Some(local)) = (&mut self.checker, local) {
            checker.switch(local);
        }
    }

    /// Lets other threads and blocks run before the running thread continues.
    pub fn leave(&mut self) {
        self.wake(self.current);
        self.leaves = true;
    }

    /// Records that the running thread has changed memory that other threads access atomically.
    pub fn memory_changed(&mut self) {
        self.changes += 1;
        super::atomic::wake_satisfied(self);
        if let Some(running) = &self.running {
            running.changed();
        }
    }

    /// Records that a TMA load into this range of shared memory has completed.
    pub fn bulk_copy_completed(&mut self, address: usize, bytes: usize) {
        if let Some(checker) = &mut self.checker {
            checker.bulk_copy_completed(address, bytes);
        }
    }

    /// Returns warp and lane of the running thread.
    #[inline]
    pub fn warp_and_lane(&self) -> (usize, usize) {
        (self.current / LANES, self.current % LANES)
    }

    /// Records the operation in which the running thread is about to wait.
    #[inline]
    pub fn wait(&mut self, wait: Wait) {
        self.waits[self.current] = Some(wait);
    }

    pub fn report_of(&self, fault: Fault, at: Option<Site>, other: Option<Site>, message: String) -> Report {
        Report { kernel: self.kernel, block: self.index, thread: None, fault, at, other, schedule: None, message }
    }

    /// Ends the running thread with a report.
    #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub fn end_thread(&mut self, report: Report) {
        let (warp, lane) = self.warp_and_lane();
        self.warps[warp].finished |= 1 << lane;
        self.report.get_or_insert(report);
    }

    /// Returns the waiting threads, grouped by operation and line, and the finished threads.
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

    /// Returns the report for which a thread was stopped, if any.
    pub fn verdict(&mut self) -> Option<Report> {
        match (self.report.clone(), self.suspicion.clone()) {
            (Some(race), Some(read)) if race.fault == Fault::DataRace && [race.at, race.other].contains(&read.at) => {
                Some(race)
            }
            (report, suspicion) => suspicion.or(report),
        }
    }

    /// Returns whether any thread has not finished.
    pub fn has_waiting_threads(&self) -> bool {
        (0..self.threads as usize).any(|thread| !self.finished(thread))
    }

    fn finished(&self, thread: usize) -> bool {
        self.warps[thread / LANES].finished >> (thread % LANES) & 1 != 0
    }

    /// Returns a report of a block that makes no progress: `message`, then the operation in which each thread waits.
    pub fn no_progress(&self, fault: Fault, mut message: String) -> Report {
        let (groups, finished) = self.waiting();
        for (wait, threads) in &groups {
            let missing = match wait.operation {
                Operation::MBarrier { offset, .. } => self.hopper.missing(offset as usize),
                Operation::SyncThreads
                | Operation::SyncThreadsOr
                | Operation::SyncThreadsAnd
                | Operation::SyncThreadsCount => self.barriers[0].missing(),
                Operation::SyncNamed { id, .. } => self.barriers[id as usize].missing(),
                Operation::Value { address, .. } => self.missing_value(address),
                Operation::Poll { address, .. } => self.place(address),
                _ => String::new(),
            };
            let (threads, at) = (ranges(threads), Line(wait.at));
            let _ = write!(message, "\n  threads {threads}: waiting in {} at {at}{missing}", wait.operation);
        }
        if !finished.is_empty() {
            let _ = write!(message, "\n  threads {}: finished", ranges(&finished));
        }
        let site = |i: usize| groups.get(i).map(|(wait, _)| wait.at);
        self.report_of(fault, site(0), site(1), message)
    }

    /// Returns the part of a deadlock report that describes the awaited word at `address`.
    fn missing_value(&self, address: usize) -> String {
        let wait = self.value_waits.iter().find(|wait| wait.word.addr() == address);
        wait.map_or_else(String::new, |wait| format!("{}; the value is {}", self.place(address), wait.found()))
    }

    /// Returns the name of an address, for the report of a wait.
    fn place(&self, address: usize) -> String {
        self.checker.as_ref().map_or_else(String::new, |checker| format!(", of {}", checker.name_of(address)))
    }

    /// Returns the report of a block that ended before its asynchronous operations were waited for.
    pub fn incomplete_async_work(&self) -> Option<Report> {
        let copy = || {
            let (thread, at) =
                self.copies.iter().enumerate().find_map(|(thread, copies)| Some((thread, copies.oldest()?)))?;
            let text = format!(
                "incomplete asynchronous copy: the thread ends without waiting for its cp.async ({})",
                Line(at)
            );
            Some((Fault::AsyncCopy, Some(thread), at, text))
        };
        let (fault, thread, at, message) = self.hopper.incomplete().or_else(copy)?;
        let report = self.report_of(fault, Some(at), None, message);
        Some(Report { thread: thread.map(|thread| thread as u32), ..report })
    }
}

/// Returns the index of the running thread. Stops the kernel if its block is not one-dimensional.
#[inline]
#[track_caller]
pub fn thread_idx_1d() -> u32 {
    let (thread, extent) = with(|block| (block.current as u32, block.extent));
    if extent[1] * extent[2] != 1 {
        let at = Location::caller();
        let message = format!(
            "invalid operand: index of a thread of a one-dimensional block in one of {extent:?} threads; use lane_id or \
             linear_index ({})",
            Line(at)
        );
        fail(Fault::Operand, at, None, message);
    }
    thread
}

/// Stops the kernel, as the instruction does.
#[track_caller]
pub fn trap() -> ! {
    let at = Location::caller();
    fail(Fault::Trap, at, None, format!("trap ({})", Line(at)))
}

/// Returns the number of calls on this OS thread, so that results are the same in each run.
pub fn clock() -> u64 {
    CLOCK.replace(CLOCK.get() + 1)
}

/// Returns the nanoseconds since the first call.
pub fn nanoseconds() -> u64 {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed().as_nanos() as u64
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
    thread_idx_x = |block| block.current as u32 % block.extent[0];
    thread_idx_y = |block| block.current as u32 / block.extent[0] % block.extent[1];
    thread_idx_z = |block| block.current as u32 / (block.extent[0] * block.extent[1]);
    block_dim_y = |block| block.extent[1];
    block_dim_z = |block| block.extent[2];
    lane_id = |block| (block.current % LANES) as u32;
    block_idx_x = |block| block.index[0];
    block_idx_y = |block| block.index[1];
    block_idx_z = |block| block.index[2];
    block_dim_x = |block| block.extent[0];
    grid_dim_x = |block| block.size[0];
    grid_dim_y = |block| block.size[1];
    grid_dim_z = |block| block.size[2];
}
