//! Memory barriers: a phase ends when as many threads as `init` said have arrived and all bytes announced have landed.

use super::super::access::check;
use super::super::block::{Block, fail, suspend, with, with_peer};
use super::super::checker::{Clocks, Kind, learn};
use super::super::collective::{Operation, Wait};
use super::super::report::{Fault, Line, Site};
use super::super::shadow::Access;
use super::{reach, shared_offset};
use std::panic::Location;

pub struct MBarrier {
    /// Arrivals of every phase.
    expected: u32,
    /// Arrivals this phase lacks.
    pending: u32,
    /// Bytes announced less bytes landed: below zero where they land first.
    bytes: i64,
    phase: u32,
    /// Threads of the block that wait.
    waiting: Vec<usize>,
    /// What those who have arrived in this phase knew, and those who arrived in earlier ones.
    arriving: Clocks,
    completed: Clocks,
    initialised: Init,
}

/// Who made the barrier ready, and whether that has been fenced, so that TMA and other blocks may use it.
struct Init {
    thread: usize,
    at: Site,
    fenced: bool,
    /// As the checker knows it.
    access: Access,
}

impl MBarrier {
    pub fn missing(&self) -> String {
        let mut missing = Vec::new();
        if self.pending > 0 {
            missing.push(format!("lacks {} of {} arrivals", self.pending, self.expected));
        }
        match self.bytes {
            0 => (),
            bytes @ 1.. => missing.push(format!("lacks {bytes} bytes")),
            bytes => missing.push(format!("has {} bytes that no arrival announced", -bytes)),
        }
        format!(", which {}", missing.join(" and "))
    }
}

/// Ends the phase of the barrier at `offset` in `block` if nothing is missing.
fn end_phase(block: &mut Block, offset: usize) {
    let Some(barrier) = block.hopper.barriers.get_mut(&offset) else { return };
    if barrier.pending > 0 || barrier.bytes != 0 {
        return;
    }
    barrier.pending = barrier.expected;
    barrier.phase += 1;
    learn(&mut barrier.completed, &std::mem::take(&mut barrier.arriving));
    for thread in std::mem::take(&mut barrier.waiting) {
        block.wake(thread);
    }
}

/// `bytes` have landed that count for the barrier at `offset`; `known` is what their issuer knew.
pub fn complete_bytes(block: &mut Block, offset: usize, bytes: usize, known: &Clocks) {
    if let Some(barrier) = block.hopper.barriers.get_mut(&offset) {
        barrier.bytes -= bytes as i64;
        learn(&mut barrier.arriving, known);
        end_phase(block, offset);
    }
}

/// The barrier that `pointer` points at in the running block, which block `rank` must have, too.
pub fn locate(pointer: *const u64, rank: usize, at: Site) -> usize {
    let offset = shared_offset(pointer, 8, 8, at, "memory barrier");
    if with_peer(rank, |block| block.hopper.barriers.contains_key(&offset)) != Some(true) {
        let message = format!("the memory barrier at shared memory + {offset} was never initialised, at {}", Line(at));
        fail(Fault::Uninitialised, at, None, message);
    }
    let address = with_peer(rank, |block| block.shared_base().addr() + offset).unwrap_or_default();
    check(Kind::Atomic, address, 8, 8, at);
    // The access just checked only clashes with the latest one, which may be an atomic by who initialised the barrier.
    let init =
        with_peer(rank, |block| block.hopper.barriers.get(&offset).map(|b| (b.initialised.access, b.initialised.at)));
    if let Some((access, init)) = init.flatten()
        && !with(|block| block.checker.as_ref().is_none_or(|checker| checker.comes_after(access, block.current)))
    {
        let message = format!(
            "race: the memory barrier at shared memory + {offset} is used at {}, with no barrier after its initialisation at {}",
            Line(at),
            Line(init)
        );
        fail(Fault::Race, at, Some(init), message);
    }
    offset
}

/// # Safety
/// `barrier` must be 8 aligned bytes of the block's shared memory.
#[track_caller]
pub unsafe fn mbarrier_init(barrier: *mut u64, arrivals: u32) {
    let at = Location::caller();
    let offset = shared_offset(barrier, 8, 8, at, "memory barrier");
    check(Kind::Write, barrier.addr(), 8, 8, at);
    if !(1..1 << 20).contains(&arrivals) {
        let message = format!("a memory barrier of {arrivals} arrivals, expected 1 to 2^20-1, at {}", Line(at));
        fail(Fault::Operand, at, None, message);
    }
    let access = with(|block| block.checker.as_ref().map_or(Access::NONE, |checker| checker.access_now(block.current)));
    let fresh = MBarrier {
        expected: arrivals,
        pending: arrivals,
        bytes: 0,
        phase: 0,
        waiting: Vec::new(),
        arriving: Clocks::default(),
        completed: Clocks::default(),
        initialised: Init { thread: with(|block| block.current), at, fenced: false, access },
    };
    with(|block| block.hopper.barriers.insert(offset, fresh));
}

pub fn fence_mbarrier_init() {
    with(|block| {
        let current = block.current;
        for barrier in block.hopper.barriers.values_mut().filter(|barrier| barrier.initialised.thread == current) {
            barrier.initialised.fenced = true;
        }
    });
}

/// As [`locate`], for use by TMA or from another block.
pub fn locate_fenced(pointer: *const u64, rank: usize, at: Site) -> usize {
    let offset = locate(pointer, rank, at);
    let unfenced = with_peer(rank, |block| {
        let init = &block.hopper.barriers.get(&offset)?.initialised;
        (!init.fenced).then_some(init.at)
    });
    if let Some(init) = unfenced.flatten() {
        let message = format!(
            "race: the memory barrier at shared memory + {offset}, initialised at {} with no fence_init after it, is used by \
             TMA or another block at {}",
            Line(init),
            Line(at)
        );
        fail(Fault::Race, at, Some(init), message);
    }
    offset
}

fn arrive(barrier: *const u64, rank: usize, bytes: u32, at: Site) {
    let own = with(|block| block.rank) == rank;
    let offset = if own { locate(barrier, rank, at) } else { locate_fenced(barrier, rank, at) };
    let known = with(Block::publish);
    let arrived = with_peer(rank, |block| {
        let barrier = block.hopper.barriers.get_mut(&offset)?;
        barrier.pending = barrier.pending.checked_sub(1)?;
        barrier.bytes += i64::from(bytes);
        learn(&mut barrier.arriving, &known);
        end_phase(block, offset);
        Some(())
    });
    if arrived.flatten().is_none() {
        let message = format!(
            "one arrival too many in this phase of the memory barrier at shared memory + {offset}, at {}",
            Line(at)
        );
        fail(Fault::Operand, at, None, message);
    }
}

/// # Safety
/// `barrier` must be an initialised barrier of the block.
#[track_caller]
pub unsafe fn mbarrier_arrive_expect(barrier: *mut u64, bytes: u32) {
    arrive(barrier, with(|block| block.rank), bytes, Location::caller());
}

/// # Safety
/// As [`mbarrier_arrive_expect`].
#[track_caller]
pub unsafe fn mbarrier_arrive(barrier: *mut u64) {
    arrive(barrier, with(|block| block.rank), 0, Location::caller());
}

/// # Safety
/// As [`mbarrier_arrive_expect`], in every block of the cluster.
#[track_caller]
pub unsafe fn mbarrier_arrive_cluster(barrier: *mut u64, rank: u32) {
    let at = Location::caller();
    arrive(barrier, reach(rank, at), 0, at);
}

/// Comes back when the phase of this parity has ended, always true.
///
/// # Safety
/// As [`mbarrier_arrive_expect`].
#[track_caller]
pub unsafe fn mbarrier_try_wait(barrier: *mut u64, parity: u32) -> bool {
    let at = Location::caller();
    let offset = locate(barrier, with(|block| block.rank), at);
    if parity > 1 {
        fail(Fault::Operand, at, None, format!("waits for parity {parity}, expected 0 or 1, at {}", Line(at)));
    }
    let wait = Wait { operation: Operation::MBarrier { offset: offset as u32, parity }, at };
    // Asked again when woken: two phases may have ended meanwhile, and the device would then go on waiting.
    while !with(|block| {
        let (current, (warp, _)) = (block.current, block.place());
        let Some(barrier) = block.hopper.barriers.get_mut(&offset) else { return false };
        let done = barrier.phase % 2 != parity;
        if done {
            let known = barrier.completed;
            block.acquire(warp, &known);
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
