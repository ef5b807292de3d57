//! mbarriers: a phase completes when all expected threads have arrived and all expected bytes have been copied.

use super::access::{check, shared_offset};
use super::block::{Block, fail, suspend, with};
use super::checker::Kind;
use super::hopper_state::{Init, MBarrier};
use super::order::Clock;
use super::report::{Fault, Line, Site};
use super::shadow::Access;
use super::wait::{Operation, Wait};
use std::panic::Location;

/// Completes the phase of the mbarrier at `offset` if nothing is missing.
fn try_complete_phase(block: &mut Block, offset: usize) {
    let Some(barrier) = block.hopper.barriers.get_mut(&offset) else { return };
    if barrier.pending > 0 || barrier.bytes != 0 {
        return;
    }
    barrier.pending = barrier.expected;
    barrier.phase += 1;
    let arriving = std::mem::take(&mut barrier.arriving);
    barrier.completed.join(&arriving);
    for thread in std::mem::take(&mut barrier.waiting) {
        block.wake(thread);
    }
}

/// Counts `bytes` copied bytes for the mbarrier at `offset`. `clock` is the clock of the thread that issued the copy.
pub fn complete_bytes(block: &mut Block, offset: usize, bytes: usize, clock: &Clock) {
    if let Some(barrier) = block.hopper.barriers.get_mut(&offset) {
        barrier.bytes -= bytes as i64;
        barrier.arriving.join(clock);
        try_complete_phase(block, offset);
    }
}

/// Returns the offset in shared memory of the initialized mbarrier at `pointer`.
fn locate(pointer: *const u64, at: Site) -> usize {
    let offset = shared_offset(pointer, 8, 8, at, "mbarrier");
    if !with(|block| block.hopper.barriers.contains_key(&offset)) {
        let message =
            format!("uninitialized mbarrier: the mbarrier at shared memory + {offset} is used ({})", Line(at));
        fail(Fault::Uninitialized, at, None, message);
    }
    check(Kind::Atomic, pointer.addr(), 8, 8, at);
    // The check compares with the latest access only, which may be an atomic update by the thread that initialized the
    // mbarrier.
    let unordered = with(|block| {
        let init = &block.hopper.barriers.get(&offset)?.init;
        let checker = block.checker.as_ref()?;
        (!checker.happens_before(init.access, block.current)).then_some(init.at)
    });
    if let Some(init) = unordered {
        let message = format!(
            "data race: use of the mbarrier at shared memory + {offset} ({}) and its initialization ({}) with no \
             barrier in between",
            Line(at),
            Line(init)
        );
        fail(Fault::DataRace, at, Some(init), message);
    }
    offset
}

/// # Safety
/// `barrier` must point at 8 aligned bytes of the block's shared memory.
#[track_caller]
pub unsafe fn mbarrier_init(barrier: *mut u64, arrivals: u32) {
    let at = Location::caller();
    let offset = shared_offset(barrier, 8, 8, at, "mbarrier");
    check(Kind::Write, barrier.addr(), 8, 8, at);
    if !(1..1 << 20).contains(&arrivals) {
        let message = format!(
            "invalid operand: mbarrier initialization: expected 1 to 2^20-1 arrivals, found {arrivals} ({})",
            Line(at)
        );
        fail(Fault::Operand, at, None, message);
    }
    with(|block| {
        let access = block.checker.as_ref().map_or(Access::NONE, |checker| checker.access_now(block.current));
        let barrier = MBarrier {
            expected: arrivals,
            pending: arrivals,
            bytes: 0,
            phase: 0,
            waiting: Vec::new(),
            arriving: Clock::default(),
            completed: Clock::default(),
            init: Init { thread: block.current, at, fenced: false, access },
        };
        block.hopper.barriers.insert(offset, barrier);
    });
}

pub fn fence_mbarrier_init() {
    with(|block| {
        let current = block.current;
        for barrier in block.hopper.barriers.values_mut().filter(|barrier| barrier.init.thread == current) {
            barrier.init.fenced = true;
        }
    });
}

/// Same as [`locate`], for use by TMA: the initialization must have been fenced.
pub fn locate_fenced(pointer: *const u64, at: Site) -> usize {
    let offset = locate(pointer, at);
    let unfenced = with(|block| {
        let init = &block.hopper.barriers.get(&offset)?.init;
        (!init.fenced).then_some(init.at)
    });
    if let Some(init) = unfenced {
        let message = format!(
            "data race: use by TMA of the mbarrier at shared memory + {offset} ({}) and its initialization ({}) with \
             no fence_init in between",
            Line(at),
            Line(init)
        );
        fail(Fault::DataRace, at, Some(init), message);
    }
    offset
}

fn arrive(barrier: *const u64, bytes: u32, at: Site) {
    let offset = locate(barrier, at);
    let arrived = with(|block| {
        let clock = block.release_of_thread();
        let barrier = block.hopper.barriers.get_mut(&offset)?;
        barrier.pending = barrier.pending.checked_sub(1)?;
        barrier.bytes += i64::from(bytes);
        barrier.arriving.join(&clock);
        try_complete_phase(block, offset);
        Some(())
    });
    if arrived.is_none() {
        let message = format!(
            "invalid operand: too many arrivals in one phase of the mbarrier at shared memory + {offset} ({})",
            Line(at)
        );
        fail(Fault::Operand, at, None, message);
    }
}

/// # Safety
/// `barrier` must point at an initialized mbarrier of the block.
#[track_caller]
pub unsafe fn mbarrier_arrive_expect(barrier: *mut u64, bytes: u32) {
    arrive(barrier, bytes, Location::caller());
}

/// # Safety
/// Same as [`mbarrier_arrive_expect`].
#[track_caller]
pub unsafe fn mbarrier_arrive(barrier: *mut u64) {
    arrive(barrier, 0, Location::caller());
}

/// Waits until the phase of this parity has completed. Always returns true.
///
/// # Safety
/// Same as [`mbarrier_arrive_expect`].
#[track_caller]
pub unsafe fn mbarrier_try_wait(barrier: *mut u64, parity: u32) -> bool {
    let at = Location::caller();
    let offset = locate(barrier, at);
    if parity > 1 {
        let message = format!("invalid operand: mbarrier wait: expected parity 0 or 1, found {parity} ({})", Line(at));
        fail(Fault::Operand, at, None, message);
    }
    let wait = Wait { operation: Operation::MBarrier { offset: offset as u32, parity }, at };
    // The parity is tested again after a wakeup: if two phases have completed in the meantime, the device would keep
    // waiting.
    while !with(|block| {
        let (current, (warp, _)) = (block.current, block.warp_and_lane());
        let Some(barrier) = block.hopper.barriers.get_mut(&offset) else { return false };
        let done = barrier.phase % 2 != parity;
        if done {
            let clock = barrier.completed.clone();
            block.acquire(warp, &clock);
        } else {
            barrier.waiting.push(current);
            block.wait(wait);
        }
        done
    }) {
        suspend();
    }
    true
}
