//! Execution of blocks: one fiber per GPU thread.
//!
//! All fibers of a block run on one OS thread, one at a time. A fiber runs until it must wait: it records the wait in the
//! block and suspends itself. The scheduler then resumes a fiber that is ready. Different blocks of an unchecked launch run in parallel.
//! Those of a checked launch run on one OS thread, and a [`Schedule`] decides which of them continues.

use super::LANES;
use super::block::{Block, Fiber, Mode, Polling, RunningBlock, is_running, with};
use super::checker::{Checker, Local};
use super::grid::Grid;
use super::memory::Memory;
use super::report::{Fault, Report};
use super::running::{self, Running};
use super::schedule::{Choices, Schedule};
use super::stack::{self, FiberStack};
use super::{atomic, collective, tma, watchdog};
use corosensei::Yielder;
use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once, OnceLock};

/// Maximum number of live fibers over all blocks of an unchecked launch. Each fiber uses two memory mappings, of which Linux grants a
/// process 65,530 or more.
const MAX_FIBERS: usize = 16 << 10;

/// Returns the maximum number of live fibers of a checked launch, by the number of mappings that the system grants.
fn max_checked_fibers() -> usize {
    static MAX: OnceLock<usize> = OnceLock::new();
    *MAX.get_or_init(|| {
        let granted =
            std::fs::read_to_string("/proc/sys/vm/max_map_count").ok().and_then(|text| text.trim().parse().ok());
        // Half of the mappings are for the stacks of other tests and for all else.
        granted.map_or(MAX_FIBERS, |granted: usize| granted / 4).clamp(MAX_FIBERS, 132 * 2048)
    })
}

thread_local! {
    /// Source line of the last panic in a kernel.
    static PANICKED_AT: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs the body in every thread of every block, with blocks in parallel. Returns the report of the first fault.
pub fn run(grid: &Grid<'_>) -> Result<(), Report> {
    let blocks = grid.blocks()?;
    let most = MAX_FIBERS / grid.threads as usize;
    let workers = rayon::current_num_threads().min(most).min(usize::try_from(blocks).unwrap_or(usize::MAX));
    let next = AtomicU64::new(0);
    let running = Arc::new(Running::default());
    let work = |_| {
        let (live, unused) = (Vec::new(), Vec::new());
        Worker { grid, blocks, next: &next, running: &running, most: most / workers, live, unused }.run()
    };
    let first = (0..workers).into_par_iter().with_max_len(1).filter_map(work).min_by_key(|(number, _)| *number);
    first.map_or(Ok(()), |(_, report)| Err(report))
}

/// A block of an unchecked launch that has started.
struct Live {
    number: u64,
    block: Box<Block>,
    fibers: Vec<Fiber>,
    state: State,
}

/// An OS thread that runs blocks of an unchecked launch: the next one when a block has ended, or when all of its blocks poll or wait. Blocks
/// may therefore wait for each other on a machine with fewer cores than blocks.
struct Worker<'a> {
    grid: &'a Grid<'a>,
    blocks: u64,
    /// Number of the next block of the launch.
    next: &'a AtomicU64,
    running: &'a Arc<Running>,
    /// Maximum number of blocks that it runs at a time.
    most: usize,
    live: Vec<Live>,
    unused: Vec<(Box<Block>, Vec<FiberStack>)>,
}

impl Worker<'_> {
    fn run(mut self) -> Option<(u64, Report)> {
        let mut polling = running::Polling::default();
        let found = self.run_blocks(&mut polling);
        if found.is_some() {
            self.next.store(self.blocks, Ordering::Relaxed);
        }
        polling.end(self.running);
        while !self.live.is_empty() {
            self.end(0);
        }
        self.unused.drain(..).for_each(|(_, stacks)| stack::give_back(stacks));
        found
    }

    /// Runs blocks until none is left or one faults.
    fn run_blocks(&mut self, polling: &mut running::Polling) -> Option<(u64, Report)> {
        // `stuck` is the number of blocks that have run one after another without a change.
        let (mut at, mut stuck) = (0, 0);
        loop {
            if self.live.is_empty() {
                match self.start() {
                    Ok(true) => (),
                    Ok(false) => return None,
                    Err(report) => return Some((0, report)),
                }
            }
            at %= self.live.len();
            if self.resume(at) {
                polling.end(self.running);
                stuck = 0;
            } else {
                stuck += 1;
            }
            let Live { number, block, state, .. } = &mut self.live[at];
            match state {
                State::Faulted(report) => return Some((*number, report.clone())),
                State::Ended => {
                    if let Some(report) = block.incomplete_async_work() {
                        return Some((*number, report));
                    }
                    self.end(at);
                }
                _ => at += 1,
            }
            if stuck > 0 && stuck >= self.live.len() {
                stuck = 0;
                if self.live.len() < self.most && matches!(self.start(), Ok(true)) {
                    at = self.live.len() - 1;
                } else if let Some(report) = self.wait(polling) {
                    return Some(report);
                }
            }
        }
    }

    /// Starts the next block. Returns false if there is none.
    fn start(&mut self) -> Result<bool, Report> {
        let (mut block, stacks) = match self.unused.pop() {
            Some(unused) => unused,
            None => (Box::new(Block::new(self.grid)), self.grid.stacks()?),
        };
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        if number >= self.blocks {
            self.unused.push((block, stacks));
            return Ok(false);
        }
        block.running = Some(self.running.clone());
        block.start(self.grid.index(number));
        self.running.started(self.live.is_empty());
        let fibers = fibers(self.grid.body, stacks);
        self.live.push(Live { number, block, fibers, state: State::Left });
        Ok(true)
    }

    /// Ends a block.
    fn end(&mut self, at: usize) {
        let Live { mut block, fibers, .. } = self.live.swap_remove(at);
        let stacks = unwind(&mut block, Mode::Unchecked, fibers);
        self.unused.push((block, stacks));
        self.running.finished(self.live.is_empty());
    }

    /// Runs a block until it stops. Returns whether it has ended or changed memory, or may continue at once.
    fn resume(&mut self, at: usize) -> bool {
        let Live { block, fibers, state, .. } = &mut self.live[at];
        let can_continue = atomic::wake_satisfied(block);
        match state {
            State::Polls => atomic::wake_spinning(block),
            State::Waits if !can_continue => return false,
            _ => (),
        }
        let before = block.changes;
        *state = resume(block, Mode::Unchecked, fibers);
        block.changes != before || !matches!(state, State::Polls | State::Waits)
    }

    /// Waits until a block may continue. Returns the report of a block if none of the launch can.
    fn wait(&self, polling: &mut running::Polling) -> Option<(u64, Report)> {
        let polls = |live: &&Live| matches!(live.state, State::Polls);
        if let Some(Live { number, block, .. }) = self.live.iter().find(polls) {
            return (!polling.pause(self.running)).then(|| (*number, livelock(block)));
        }
        polling.end(self.running);
        let satisfied = || self.live.iter().any(|live| live.block.value_waits.iter().any(|wait| wait.is_satisfied()));
        self.running.wait(satisfied);
        (!satisfied()).then(|| (self.live[0].number, deadlock(&self.live[0].block)))
    }
}

fn deadlock(block: &Block) -> Report {
    block.no_progress(Fault::Deadlock, "deadlock: no thread can make progress".to_owned())
}

fn livelock(block: &Block) -> Report {
    block.no_progress(Fault::Livelock, "livelock: the threads keep running, but none has written memory".to_owned())
}

/// Runs a checked launch with each of `seeds`, the later ones only if its threads exchange values by atomics. If
/// the results of a later schedule differ from those of the first one, leaves the first such results in memory.
pub fn run_seeds(grid: &Grid<'_>, memory: &mut Memory, seeds: impl IntoIterator<Item = u64>) -> Result<(), Report> {
    let before = memory.contents();
    let (mut first, mut other) = (None, None);
    for seed in seeds {
        if first.is_some() {
            memory.restore(&before);
        }
        let communicates = run_checked(grid, memory, Schedule::new(seed))?;
        match &first {
            None if !communicates => return Ok(()),
            None => first = Some(memory.contents()),
            Some(first) if other.is_none() => other = Some(memory.contents()).filter(|results| results != first),
            Some(_) => (),
        }
    }
    if let Some(results) = other.or(first) {
        memory.restore(&results);
    }
    Ok(())
}

/// Runs a checked launch with each of `seeds` from the same memory, and calls `check` with the results of each.
pub fn run_each(
    grid: &Grid<'_>,
    memory: &mut Memory,
    seeds: impl IntoIterator<Item = u64>,
    mut check: impl FnMut(u64, &Memory),
) -> Result<(), Report> {
    let before = memory.contents();
    for seed in seeds {
        memory.restore(&before);
        run_checked(grid, memory, Schedule::new(seed))?;
        check(seed, memory);
    }
    Ok(())
}

/// Runs the blocks in the order of `schedule` and checks every memory access. Returns whether threads have exchanged values by atomics, so
/// that the results may depend on the schedule. Otherwise like [`run`].
pub fn run_checked(grid: &Grid<'_>, memory: &mut Memory, schedule: Schedule) -> Result<bool, Report> {
    let blocks = grid.blocks()?;
    let resident = schedule.resident_blocks(grid.threads, grid.shared_bytes);
    let mut launch = Checked { grid, blocks, resident, next: 0, idle: 0, slots: BTreeMap::new(), unused: Vec::new() };
    let mut first = launch.slot()?;
    let mut checker = Some(Box::new(Checker::new(memory, Choices::new(schedule, blocks), first.take_local())));
    // The checker keeps the state of a block that never runs.
    launch.unused.push(first);
    let found = launch.run(&mut checker);
    launch.finish();
    let communicates = checker.take().is_some_and(|checker| {
        let communicates = checker.values_exchanged();
        checker.give_back(memory);
        communicates
    });
    match found {
        Ok(()) => Ok(communicates),
        Err(report) => Err(Report { schedule: Some(schedule.seed), ..report }),
    }
}

/// A block of a checked launch, with its fibers and its part of the checker.
struct Slot {
    block: Box<Block>,
    fibers: Vec<Fiber>,
    stacks: Vec<FiberStack>,
    local: Option<Box<Local>>,
    state: State,
    /// The count of changes when the block last ran.
    seen: u64,
}

impl Slot {
    fn take_local(&mut self) -> Box<Local> {
        self.local.take().unwrap_or_else(|| self.block.local())
    }
}

/// A checked launch.
struct Checked<'a> {
    grid: &'a Grid<'a>,
    blocks: u64,
    /// Number of blocks that run at a time.
    resident: u64,
    /// Number of the next block that becomes resident.
    next: u64,
    /// Number of times a block has run since memory last changed, although all blocks polled.
    idle: usize,
    /// The resident blocks by number. `None`: not started.
    slots: BTreeMap<u64, Option<Slot>>,
    unused: Vec<Slot>,
}

/// Number of times each polling block runs without a change after which the launch counts as livelocked.
const MAX_IDLE_RUNS: usize = 2000;

impl Checked<'_> {
    /// Returns a block that is not in use.
    fn slot(&mut self) -> Result<Slot, Report> {
        if let Some(slot) = self.unused.pop() {
            return Ok(slot);
        }
        let block = Box::new(Block::new(self.grid));
        Ok(Slot { block, fibers: Vec::new(), stacks: self.grid.stacks()?, local: None, state: State::Left, seen: 0 })
    }

    fn run(&mut self, checker: &mut Option<Box<Checker>>) -> Result<(), Report> {
        let mut changes = 0;
        loop {
            while self.next < self.blocks && (self.slots.len() as u64) < self.resident {
                self.slots.insert(self.next, None);
                self.next += 1;
            }
            if self.slots.is_empty() {
                return Ok(());
            }
            let Some(number) = self.pick(checker, changes) else { return Err(self.stuck(checker)) };
            let mut slot = match self.slots.remove(&number).flatten() {
                Some(slot) => slot,
                None => self.start(number)?,
            };
            slot.block.checker = checker.take();
            slot.block.switch_checker(&mut slot.local);
            if matches!(slot.state, State::Polls) {
                atomic::wake_spinning(&mut slot.block);
            }
            atomic::wake_satisfied(&mut slot.block);
            let before = slot.block.changes;
            slot.state = resume(&mut slot.block, Mode::Checked, &mut slot.fibers);
            changes += slot.block.changes - before;
            if slot.block.changes != before {
                self.idle = 0;
            }
            slot.seen = changes;
            let ended = match &slot.state {
                State::Faulted(report) => Some(Err(report.clone())),
                State::Ended => Some(slot.block.incomplete_async_work().map_or(Ok(()), Err)),
                _ => None,
            };
            if ended.is_some() {
                // Values on the stacks of the fibers may access the block.
                slot.stacks = unwind(&mut slot.block, Mode::Checked, std::mem::take(&mut slot.fibers));
            }
            slot.block.switch_checker(&mut slot.local);
            *checker = slot.block.checker.take();
            match ended {
                Some(result) => {
                    self.unused.push(slot);
                    result?;
                }
                None => {
                    self.slots.insert(number, Some(slot));
                }
            }
        }
    }

    /// Starts block `number`.
    fn start(&mut self, number: u64) -> Result<Slot, Report> {
        let mut slot = self.slot()?;
        slot.block.start(self.grid.index(number));
        let mut local = slot.take_local();
        local.start_block(number as u32);
        slot.local = Some(local);
        slot.fibers = fibers(self.grid.body, std::mem::take(&mut slot.stacks));
        slot.state = State::Left;
        Ok(slot)
    }

    /// Returns the number of the block to run, or `None` if none can make progress.
    fn pick(&mut self, checker: &mut Option<Box<Checker>>, changes: u64) -> Option<u64> {
        let has_room = (self.slots.values().flatten().count() + 1) * self.grid.threads as usize <= max_checked_fibers();
        let can_run = |slot: &Option<Slot>| match slot {
            None => has_room,
            Some(slot) => match slot.state {
                State::Waits => slot.block.value_waits.iter().any(|wait| wait.is_satisfied()),
                State::Polls => slot.seen != changes,
                _ => true,
            },
        };
        let numbers = |can_run: &dyn Fn(&Option<Slot>) -> bool| -> Vec<u64> {
            self.slots.iter().filter(|(_, slot)| can_run(slot)).map(|(number, _)| *number).collect()
        };
        let candidates = numbers(&can_run);
        let choices = &mut checker.as_mut()?.choices;
        if !candidates.is_empty() {
            return Some(candidates[choices.pick(&candidates)]);
        }
        let candidates = numbers(&|slot| slot.as_ref().is_some_and(|slot| matches!(slot.state, State::Polls)));
        self.idle += 1;
        let is_idle = candidates.is_empty() || self.idle > MAX_IDLE_RUNS * candidates.len();
        (!is_idle).then(|| candidates[choices.pick_polling(&candidates)])
    }

    /// Returns the report of a launch whose blocks cannot make progress.
    fn stuck(&mut self, checker: &mut Option<Box<Checker>>) -> Report {
        // An uninitialized read stops its thread, and then others wait for it in vain.
        if let Some(report) = self.slots.values_mut().flatten().find_map(|slot| slot.block.verdict()) {
            return report;
        }
        let mut report = match self.slots.values_mut().flatten().next() {
            Some(slot) => {
                slot.block.checker = checker.take();
                let polls = matches!(slot.state, State::Polls);
                let report = if polls { livelock(&slot.block) } else { deadlock(&slot.block) };
                *checker = slot.block.checker.take();
                report
            }
            None => self.grid.invalid("no block can start"),
        };
        let waiting = self.slots.iter().find(|(_, slot)| slot.is_none()).map(|(number, _)| *number);
        let next = waiting.or((self.next < self.blocks).then_some(self.next));
        if let Some(number) = next {
            let holds = match waiting {
                Some(_) => format!("the emulator holds {} threads", max_checked_fibers()),
                None => format!("the GPU holds {} blocks of this kernel", self.resident),
            };
            let _ = write!(report.message, "\n  block number {number} has not started: {holds} at a time");
        }
        report
    }

    /// Ends the blocks that have not ended.
    fn finish(&mut self) {
        for slot in std::mem::take(&mut self.slots).into_values().flatten().chain(self.unused.drain(..)) {
            let Slot { mut block, fibers, stacks, .. } = slot;
            stack::give_back(unwind(&mut block, Mode::Checked, fibers));
            stack::give_back(stacks);
        }
    }
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

/// Creates the fibers of a block, which has a thread for each stack.
fn fibers(body: &(dyn Fn() + Sync), stacks: Vec<FiberStack>) -> Vec<Fiber> {
    catch_panics();
    watchdog::watch();
    stacks.into_iter().enumerate().map(|(thread, stack)| fiber(thread, body, stack)).collect()
}

/// Ends the fibers of a block and returns their stacks.
fn unwind(block: &mut Block, mode: Mode, fibers: Vec<Fiber>) -> Vec<FiberStack> {
    // SAFETY: the guard is dropped before this function returns, and `block` is not used until then. The vector of fibers is freed after
    // the last fiber has been unwound.
    let running = unsafe { RunningBlock::new(block, mode, &fibers) };
    let unwind = |mut fiber: Fiber| {
        fiber.force_unwind();
        fiber.into_stack()
    };
    let stacks = fibers.into_iter().map(unwind).collect();
    drop(running);
    stacks
}

/// The state of a block that has stopped running.
enum State {
    /// All threads have ended.
    Ended,
    Faulted(Report),
    /// It lets other blocks run.
    Left,
    /// All threads that could run poll.
    Polls,
    /// All threads wait.
    Waits,
}

/// Runs a block until it stops.
fn resume(block: &mut Block, mode: Mode, fibers: &mut [Fiber]) -> State {
    // SAFETY: the guard is dropped before this function returns, and `block` is not used until then. The fibers outlive it.
    let running = unsafe { RunningBlock::new(block, mode, fibers) };
    let state = schedule(fibers).unwrap_or_else(|| {
        with(|block| {
            if let Some(report) = block.verdict().filter(|_| block.report.is_some()) {
                return State::Faulted(report);
            }
            if !block.has_waiting_threads() {
                tma::finish_read_stores(block);
                return State::Ended;
            }
            if !block.spinning.is_empty() {
                return State::Polls;
            }
            if block.value_waits.is_empty() {
                return State::Faulted(block.verdict().unwrap_or_else(|| deadlock(block)));
            }
            State::Waits
        })
    });
    drop(running);
    state
}

/// Resumes the fibers of the running block until all of them have finished, none can continue, one reports a fault, or one lets other
/// blocks run.
fn schedule(fibers: &mut [Fiber]) -> Option<State> {
    let warps = fibers.len().div_ceil(LANES);
    let first = with(|block| block.checker.as_mut().map_or(0, |checker| checker.choices.first_warp(warps)));
    let mut progress = true;
    while progress {
        progress = false;
        for warp in (first..warps).chain(0..first) {
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
                watchdog::beat();
                fibers[thread].resume(());
                let (faulted, idle, leaves) = with(|block| {
                    let idle = block.checker.as_mut().is_some_and(|checker| checker.step());
                    (block.report.is_some(), idle, std::mem::take(&mut block.leaves))
                });
                if idle {
                    return Some(State::Faulted(with(|block| livelock(block))));
                }
                if faulted {
                    return None;
                }
                if leaves {
                    return Some(State::Left);
                }
            }
        }
        // TMA loads complete as late as possible, and only while a thread is waiting.
        if !progress && with(|block| block.has_waiting_threads()) {
            progress = with(tma::complete_one_load) || with(atomic::wake_satisfied);
        }
    }
    None
}
