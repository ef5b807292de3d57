//! Execution of blocks: one fiber per GPU thread.
//!
//! All fibers of a block run on one OS thread, one at a time. A fiber runs until it must wait: it records the wait in the
//! block and suspends itself. The scheduler then resumes a fiber that is ready. Different blocks run in parallel.

use super::LANES;
use super::block::{Block, Fiber, Mode, Polling, RunningBlock, is_running, with};
use super::checker::Checker;
use super::grid::Grid;
use super::memory::Memory;
use super::report::{Fault, Report};
use super::running::Running;
use super::stack::{self, FiberStack};
use super::{collective, counter, tma};
use corosensei::Yielder;
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use std::cell::RefCell;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};

/// Maximum number of live fibers over all blocks. Each fiber uses two of the 65,530 memory mappings that Linux grants a
/// process by default.
const MAX_FIBERS: usize = 16 << 10;

thread_local! {
    /// Source line of the last panic in a kernel.
    static PANICKED_AT: RefCell<String> = const { RefCell::new(String::new()) };
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
    // SAFETY: the guard is dropped before this function returns, and `block` is not used until then. The vector of fibers
    // is freed after the last fiber has been unwound.
    let running = unsafe { RunningBlock::new(block, mode, &fibers) };
    let found = schedule(&mut fibers).or_else(|| with(Block::verdict)).or_else(|| {
        with(|block| {
            tma::finish_read_stores(block);
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
            progress = with(tma::complete_one_load) || counter::wake_one_waiting();
        }
    }
    None
}
