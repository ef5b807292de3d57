//! Execution of blocks: one fiber per GPU thread.
//!
//! All fibers of a block run on one OS thread, one at a time, and a thread-local variable points at the running block.
//! A fiber runs until it must wait: it records the wait in the block and suspends itself. The scheduler then resumes a
//! fiber that is ready. Different blocks run in parallel.

use super::LANES;
use super::access::AsyncCopies;
use super::checker::{Checker, VectorClock};
use super::collective::{self, Barrier, Operation, Wait, Warp};
use super::counter::{self, CounterWait, Running};
use super::hopper;
use super::memory::Memory;
use super::report::{Fault, Line, Report, Site, ranges};
use super::stack::{self, FiberStack};
use corosensei::{Coroutine, Yielder};
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use std::cell::{Cell, RefCell};
use std::fmt::Write;
use std::panic::{self, AssertUnwindSafe, Location, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};

pub type Fiber = Coroutine<(), (), (), FiberStack>;

/// Maximum number of live fibers over all blocks. Each fiber uses two of the 65,530 memory mappings that Linux grants a
/// process by default.
const MAX_FIBERS: usize = 16 << 10;
/// Maximum number of threads in a block.
const MAX_THREADS: u32 = 1024;
/// Maximum dynamic shared memory of a block in bytes, on compute capability 9.0.
const MAX_SHARED: usize = 227 << 10;

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
    pub hopper: hopper::State,
    waits: Vec<Option<Wait>>,
    yielders: Vec<*const Yielder<(), ()>>,
    /// Dynamic shared memory, aligned to 1024 bytes as on the device.
    shared: Vec<Kilobyte>,
    report: Option<Report>,
    /// An uninitialized read, held back until the block ends: see [`fail`].
    suspicion: Option<Report>,
    pub checker: Option<Box<Checker>>,
    pub polling: Polling,
    /// Threads that wait for counters in global memory.
    pub counter_waits: Vec<CounterWait>,
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
    /// Source line of the last panic in a kernel.
    static PANICKED_AT: RefCell<String> = const { RefCell::new(String::new()) };
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
    // SAFETY: `run_block` keeps the block alive while BLOCK points at it. Only one of its fibers runs at a time, and
    // none holds a reference across a suspension, so this reference is the only one.
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
    fn new(grid: &Grid<'_>) -> Self {
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
            hopper: hopper::State::default(),
            waits: vec![None; threads],
            yielders: vec![ptr::null(); threads],
            // At least one, so that addresses in undeclared shared memory differ from those of null views.
            shared: vec![POISON; grid.shared_bytes.div_ceil(1024).max(1)],
            report: None,
            suspicion: None,
            checker: None,
            polling: Polling::default(),
            counter_waits: Vec::new(),
            running: None,
        }
    }

    /// Resets the state for the block at `index`.
    fn start(&mut self, index: [u32; 3]) {
        self.index = index;
        self.warps.iter_mut().for_each(Warp::start);
        self.barriers = Default::default();
        self.copies.iter_mut().for_each(AsyncCopies::clear);
        self.hopper = hopper::State::default();
        self.waits.fill(None);
        self.counter_waits.clear();
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
    pub fn release(&mut self) -> VectorClock {
        let warp = self.current / LANES;
        self.checker.as_mut().map_or_else(VectorClock::default, |checker| checker.release(warp))
    }

    /// Joins a released clock into the clock of `warp`.
    pub fn acquire(&mut self, warp: usize, clock: &VectorClock) {
        if let Some(checker) = &mut self.checker {
            checker.acquire(warp, clock);
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
        Report { kernel: self.kernel, block: self.index, thread: None, fault, at, other, message }
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
    fn verdict(&mut self) -> Option<Report> {
        match (self.report.clone(), self.suspicion.clone()) {
            (Some(race), Some(read)) if race.fault == Fault::DataRace && [race.at, race.other].contains(&read.at) => {
                Some(race)
            }
            (report, suspicion) => suspicion.or(report),
        }
    }

    /// Returns whether any thread has not finished.
    fn has_waiting_threads(&self) -> bool {
        (0..self.threads as usize).any(|thread| !self.finished(thread))
    }

    fn finished(&self, thread: usize) -> bool {
        self.warps[thread / LANES].finished >> (thread % LANES) & 1 != 0
    }

    /// Returns a report of a block that makes no progress: `message`, then the operation in which each thread waits.
    fn no_progress(&self, fault: Fault, mut message: String) -> Report {
        let (groups, finished) = self.waiting();
        for (wait, threads) in &groups {
            let missing = match wait.operation {
                Operation::MBarrier { offset, .. } => self.hopper.missing(offset as usize),
                Operation::SyncThreads => self.barriers[0].missing(),
                Operation::SyncNamed { id, .. } => self.barriers[id as usize].missing(),
                Operation::Counter { address, .. } => self.missing_count(address),
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
}

/// A launch with parameters that have not been validated yet.
pub struct Grid<'a> {
    pub kernel: &'static str,
    pub body: &'a (dyn Fn() + Sync),
    pub size: [u32; 3],
    pub threads: u32,
    /// Extent of a block in x, y and z; the product is `threads`.
    pub block: [u32; 3],
    pub shared_bytes: usize,
}

impl Grid<'_> {
    fn invalid(&self, message: &str) -> Report {
        let (kernel, block, fault) = (self.kernel, [0; 3], Fault::Launch);
        let message = format!("invalid launch: {message}");
        Report { kernel, block, thread: None, fault, at: None, other: None, message }
    }

    /// Returns the number of blocks, or a report if a device would reject this launch.
    fn blocks(&self) -> Result<u64, Report> {
        let Self { size, threads, shared_bytes, .. } = *self;
        if size.iter().zip([i32::MAX as u32, 65535, 65535]).any(|(n, most)| !(1..=most).contains(n)) {
            let message = format!("grid: expected 1 to 2^31-1 x 1 to 65535 x 1 to 65535 blocks, found {size:?}");
            return Err(self.invalid(&message));
        }
        if !(1..=MAX_THREADS).contains(&threads) {
            return Err(self.invalid(&format!("block size: expected 1 to {MAX_THREADS} threads, found {threads}")));
        }
        if shared_bytes > MAX_SHARED {
            let message = format!("shared memory: expected at most {MAX_SHARED} bytes per block, found {shared_bytes}");
            return Err(self.invalid(&message));
        }
        Ok(size.iter().map(|&n| u64::from(n)).product())
    }

    /// Returns the (x, y, z) index of block `number`.
    fn index(&self, number: u64) -> [u32; 3] {
        let [x, y] = [0, 1].map(|axis| u64::from(self.size[axis]));
        [number % x, number / x % y, number / (x * y)].map(|i| i as u32)
    }

    fn stacks(&self) -> Result<Vec<FiberStack>, Report> {
        stack::take(self.threads as usize).map_err(|error| {
            self.invalid(&format!("cannot allocate stacks for {} emulated threads: {error}", self.threads))
        })
    }
}

/// Runs the body in every thread of every block, with blocks in parallel. Returns the report of the first fault.
pub fn run(grid: &Grid<'_>) -> Result<(), Report> {
    let blocks = grid.blocks()?;
    let workers = rayon::current_num_threads().min(MAX_FIBERS / grid.threads as usize);
    let workers = workers.min(usize::try_from(blocks).unwrap_or(usize::MAX));
    let next = AtomicU64::new(0);
    let running = Arc::new(Running::default());
    let work = |_| {
        let mut stacks = match grid.stacks() {
            Ok(stacks) => stacks,
            Err(report) => return Some((0, report)),
        };
        let mut block = Block::new(grid);
        block.running = Some(running.clone());
        let mut found = None;
        while found.is_none() {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= blocks {
                break;
            }
            block.start(grid.index(number));
            running.started();
            found = run_block(&mut block, grid.body, &mut stacks).map(|report| (number, report));
            running.finished();
        }
        if found.is_some() {
            next.store(blocks, Ordering::Relaxed);
        }
        stack::give_back(stacks);
        found
    };
    let first = (0..workers).into_par_iter().with_max_len(1).filter_map(work).min_by_key(|(number, _)| *number);
    first.map_or(Ok(()), |(_, report)| Err(report))
}

/// Runs the blocks one after the other and checks every memory access. Otherwise like [`run`].
pub fn run_checked(grid: &Grid<'_>, memory: &mut Memory) -> Result<(), Report> {
    let blocks = grid.blocks()?;
    let mut stacks = grid.stacks()?;
    let mut block = Block::new(grid);
    let shared = block.shared_base().addr();
    let warps = grid.threads.div_ceil(LANES as u32) as usize;
    block.checker = Some(Box::new(Checker::new(memory, shared, grid.shared_bytes, warps)));
    let found = (0..blocks).find_map(|number| {
        block.start(grid.index(number));
        if let Some(checker) = &mut block.checker {
            checker.start_block(number as u32);
        }
        run_block(&mut block, grid.body, &mut stacks)
    });
    stack::give_back(stacks);
    if let Some(checker) = block.checker.take() {
        checker.give_back(memory);
    }
    found.map_or(Ok(()), Err)
}

/// Installs a panic hook that records the line of a kernel's panic for its report instead of printing it.
fn catch_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| match info.location() {
            Some(at) if is_running() => PANICKED_AT.set(format!("{}:{}:{}", at.file(), at.line(), at.column())),
            _ => before(info),
        }));
    });
}

/// Guard that points BLOCK at a block and restores the previous value on drop.
struct RunningBlock(*mut Block, Mode, (*const Fiber, usize));

impl RunningBlock {
    fn new(block: *mut Block, mode: Mode, fibers: &[Fiber]) -> Self {
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

/// Creates the fiber of thread `thread` of the running block.
fn fiber(thread: usize, body: &(dyn Fn() + Sync), stack: FiberStack) -> Fiber {
    let run = move |yielder: &Yielder<(), ()>, ()| {
        with(|block| block.yielders[thread] = yielder);
        let outcome = catch_unwind(AssertUnwindSafe(body));
        with(|block| {
            let (warp, lane) = (thread / LANES, thread % LANES);
            block.warps[warp].finished |= 1 << lane;
            if block.warps[warp].has_returned() {
                collective::warp_returned(block);
            }
            // A fiber that is unwound after a fault also reaches this point; the report of the fault takes precedence.
            if let (Err(payload), None) = (outcome, &block.report) {
                let text = payload.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
                let report =
                    block.report_of(Fault::Panic, None, None, format!("panicked at {}: {text}", PANICKED_AT.take()));
                block.report = Some(Report { thread: Some(thread as u32), ..report });
            }
        });
    };
    // SAFETY: `body` outlives the fibers, because `run_block` finishes all of them before it returns.
    unsafe { Fiber::with_stack_unchecked(stack, run) }
}

/// Runs one block until it finishes or faults. On return `stacks` holds the same stacks again.
fn run_block(block: &mut Block, body: &(dyn Fn() + Sync), stacks: &mut Vec<FiberStack>) -> Option<Report> {
    let mode = if block.checker.is_some() { Mode::Checked } else { Mode::Unchecked };
    let mut fibers: Vec<Fiber> =
        stacks.drain(..).enumerate().map(|(thread, stack)| fiber(thread, body, stack)).collect();
    catch_panics();
    #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    super::trap::install();
    let running = RunningBlock::new(block, mode, &fibers);
    let found = schedule(&mut fibers).or_else(|| with(Block::verdict)).or_else(|| {
        with(|block| {
            hopper::finish_read_stores(block);
            if block.has_waiting_threads() {
                let message = "deadlock: no thread can make progress".to_owned();
                return Some(block.no_progress(Fault::Deadlock, message));
            }
            block.incomplete_async_work()
        })
    });
    stacks.extend(fibers.into_iter().map(|mut fiber| {
        fiber.force_unwind();
        fiber.into_stack()
    }));
    drop(running);
    found
}

/// Resumes the fibers of the running block until all of them have finished, none can continue, or one reports a fault.
/// Returns the report of a livelock, if there is one.
fn schedule(fibers: &mut [Fiber]) -> Option<Report> {
    let mut progress = true;
    while progress {
        progress = false;
        for warp in 0..fibers.len().div_ceil(LANES) {
            while let Some(lane) = with(|block| {
                let warp = &mut block.warps[warp];
                warp.next_ready().or_else(|| warp.wake_active().then(|| warp.next_ready()).flatten())
            }) {
                progress = true;
                let thread = warp * LANES + lane;
                with(|block| {
                    block.current = thread;
                    block.polling = Polling::default();
                });
                fibers[thread].resume(());
                let (faulted, idle) = with(|block| {
                    (block.report.is_some(), block.checker.as_mut().is_some_and(|checker| checker.step()))
                });
                if idle {
                    let message = "livelock: the threads keep running, but none has written memory".to_owned();
                    return Some(with(|block| block.no_progress(Fault::Livelock, message)));
                }
                if faulted {
                    return None;
                }
            }
        }
        // TMA loads complete as late as possible, and only while a thread is waiting.
        if !progress && with(|block| block.has_waiting_threads()) {
            progress = with(hopper::complete_one_load) || counter::wake_one_waiting();
        }
    }
    None
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
