//! A block and its fibers.
//!
//! All fibers of a block run on one OS thread, one at a time; a thread-local points at the block that runs there. A
//! fiber runs until it must wait, says so in the block and suspends; the scheduler resumes whoever is ready. Blocks run
//! in parallel.

use super::LANES;
use super::access::AsyncCopies;
use super::collective::{Barrier, Wait, Warp};
use super::report::{Fault, Line, Report, Site, ranges};
use super::stack::{self, FiberStack};
use corosensei::{Coroutine, Yielder};
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use std::cell::Cell;
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

type Fiber = Coroutine<(), (), (), FiberStack>;

/// Fibers alive at once, all blocks together: each costs two of the 65,530 mappings Linux gives a process.
const MAX_FIBERS: usize = 16 << 10;
const MAX_THREADS: u32 = 1024;
/// What every launch can be sure of is far less; this is what an H200's multiprocessor has.
const MAX_SHARED: usize = 227 << 10;

pub struct Block {
    kernel: &'static str,
    size: [u32; 3],
    threads: u32,
    index: [u32; 3],
    /// The thread whose fiber runs.
    pub current: usize,
    pub warps: Vec<Warp>,
    pub barriers: [Barrier; 16],
    pub copies: Vec<AsyncCopies>,
    waits: Vec<Option<Wait>>,
    yielders: Vec<*const Yielder<(), ()>>,
    /// Dynamic shared memory, 1024-byte aligned as on the device.
    shared: Vec<Kilobyte>,
    report: Option<Report>,
}

#[derive(Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(1024))]
struct Kilobyte([u8; 1024]);

/// What shared memory holds before it is written: NaN as f32 and as bf16.
const POISON: Kilobyte = Kilobyte([0xff; 1024]);

thread_local! {
    static BLOCK: Cell<*mut Block> = const { Cell::new(ptr::null_mut()) };
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
    // SAFETY: `run_block` keeps the block alive while BLOCK points at it; only one fiber of it runs at a time, and none
    // holds a reference across a suspension, so this is the only one.
    f(unsafe { &mut *block })
}

/// Stops this fiber until the scheduler finds it ready again.
#[inline]
pub fn suspend() {
    let yielder = with(|block| block.yielders[block.current]);
    // SAFETY: set by the fiber that runs here, whose frame below this one holds the yielder.
    unsafe { (*yielder).suspend(()) }
}

/// Stops the kernel with this finding.
#[cold]
pub fn fail(fault: Fault, at: Site, other: Option<Site>, message: String) -> ! {
    with(|block| {
        let report = block.report_of(fault, Some(at), other, message);
        block.report.get_or_insert(Report { thread: Some(block.current as u32), ..report });
    });
    loop {
        // The scheduler sees the report and unwinds the fiber from here.
        suspend();
    }
}

impl Block {
    fn new(kernel: &'static str, size: [u32; 3], threads: u32, shared_bytes: usize) -> Self {
        let threads = threads as usize;
        Self {
            kernel,
            size,
            threads: threads as u32,
            index: [0; 3],
            current: 0,
            warps: (0..threads.div_ceil(LANES)).map(|w| Warp::new((threads - w * LANES).min(LANES))).collect(),
            barriers: Default::default(),
            copies: (0..threads).map(|_| AsyncCopies::default()).collect(),
            waits: vec![None; threads],
            yielders: vec![ptr::null(); threads],
            shared: vec![POISON; shared_bytes.div_ceil(1024)],
            report: None,
        }
    }

    fn start(&mut self, index: [u32; 3]) {
        self.index = index;
        self.warps.iter_mut().for_each(Warp::start);
        self.barriers = Default::default();
        self.copies.iter_mut().for_each(AsyncCopies::clear);
        self.waits.fill(None);
        self.shared.fill(POISON);
    }

    pub fn shared_base(&mut self) -> *mut u8 {
        bytemuck::cast_slice_mut::<_, u8>(&mut self.shared).as_mut_ptr()
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

    fn report_of(&self, fault: Fault, at: Option<Site>, other: Option<Site>, message: String) -> Report {
        Report { kernel: self.kernel, block: self.index, thread: None, fault, at, other, message }
    }

    /// Nobody is ready and somebody waits.
    fn deadlock(&self) -> Report {
        let finished: Vec<usize> = (0..self.threads as usize).filter(|&t| self.finished(t)).collect();
        let mut groups: Vec<(Wait, Vec<usize>)> = Vec::new();
        for thread in (0..self.threads as usize).filter(|&t| !self.finished(t)) {
            let Some(wait) = self.waits[thread] else { continue };
            match groups.iter_mut().find(|(w, _)| *w == wait) {
                Some((_, threads)) => threads.push(thread),
                None => groups.push((wait, vec![thread])),
            }
        }
        let mut message = String::from("deadlock");
        for (wait, threads) in &groups {
            let _ =
                write!(message, "\n  waiting in {} at {}: threads {}", wait.operation, Line(wait.at), ranges(threads));
        }
        if !finished.is_empty() {
            let _ = write!(message, "\n  finished: threads {}", ranges(&finished));
        }
        let sites: Vec<Site> = groups.iter().map(|(wait, _)| wait.at).collect();
        self.report_of(Fault::Deadlock, sites.first().copied(), sites.get(1).copied(), message)
    }

    fn finished(&self, thread: usize) -> bool {
        self.warps[thread / LANES].finished >> (thread % LANES) & 1 != 0
    }
}

/// Runs `body` in every thread of `grid` blocks, or says why it could not be run to its end.
pub fn run(
    kernel: &'static str,
    body: &(dyn Fn() + Sync),
    grid: [u32; 3],
    threads: u32,
    shared_bytes: usize,
) -> Result<(), Report> {
    let refuse =
        |message| Report { kernel, block: [0; 3], thread: None, fault: Fault::Launch, at: None, other: None, message };
    if grid.contains(&0) || grid[1] > 65535 || grid[2] > 65535 || grid[0] > i32::MAX as u32 {
        return Err(refuse(format!("the grid {grid:?} is not 1 to 2^31-1 x 1 to 65535 x 1 to 65535 blocks")));
    }
    if !(1..=MAX_THREADS).contains(&threads) {
        return Err(refuse(format!("a block of {threads} threads, expected 1 to {MAX_THREADS}")));
    }
    if shared_bytes > MAX_SHARED {
        return Err(refuse(format!("{shared_bytes} bytes of shared memory, a multiprocessor has {MAX_SHARED}")));
    }
    let blocks = grid.iter().map(|&n| u64::from(n)).product::<u64>();
    let workers = rayon::current_num_threads().min(MAX_FIBERS / threads as usize);
    let workers = workers.min(usize::try_from(blocks).unwrap_or(usize::MAX));
    let next = AtomicU64::new(0);
    let work = |_| {
        let mut stacks = match stack::take(threads as usize) {
            Ok(stacks) => stacks,
            Err(error) => return Some((0, refuse(format!("no memory for the stacks of {threads} fibers: {error}")))),
        };
        let mut block = Block::new(kernel, grid, threads, shared_bytes);
        let mut found = None;
        while found.is_none() {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= blocks {
                break;
            }
            let [x, y] = [0, 1].map(|axis| u64::from(grid[axis]));
            block.start([number % x, number / x % y, number / (x * y)].map(|i| i as u32));
            found = run_block(&mut block, body, &mut stacks).map(|report| (number, report));
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

/// Points BLOCK at a block, and back at what it was when dropped.
struct Running(*mut Block);

impl Running {
    fn new(block: *mut Block) -> Self {
        Self(BLOCK.replace(block))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        BLOCK.set(self.0);
    }
}

/// Runs one block to its end; `stacks` are the same on return.
fn run_block(block: &mut Block, body: &(dyn Fn() + Sync), stacks: &mut Vec<FiberStack>) -> Option<Report> {
    let mut fibers: Vec<Fiber> = stacks
        .drain(..)
        .enumerate()
        .map(|(thread, stack)| {
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
                        let report = block.report_of(Fault::Panic, None, None, format!("panicked: {text}"));
                        block.report = Some(Report { thread: Some(thread as u32), ..report });
                    }
                });
            };
            // SAFETY: `body` outlives the fibers, all of which are finished before this function returns.
            unsafe { Fiber::with_stack_unchecked(stack, run) }
        })
        .collect();

    let block: *mut Block = block;
    let running = Running::new(block);
    let mut progress = true;
    'run: while progress {
        progress = false;
        for warp in 0..fibers.len().div_ceil(LANES) {
            while let Some(lane) = with(|block| block.warps[warp].next_ready()) {
                progress = true;
                let thread = warp * LANES + lane;
                with(|block| block.current = thread);
                fibers[thread].resume(());
                if with(|block| block.report.is_some()) {
                    break 'run;
                }
            }
        }
    }
    let report = with(|block| {
        let stuck = (0..fibers.len()).any(|thread| !block.finished(thread));
        if stuck && block.report.is_none() {
            block.report = Some(block.deadlock());
        }
        block.report.clone()
    });
    stacks.extend(fibers.into_iter().map(|mut fiber| {
        fiber.force_unwind();
        fiber.into_stack()
    }));
    drop(running);
    // SAFETY: no fiber is left, so nothing else refers to the block.
    unsafe { (*block).report = None };
    report
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
