//! Counters in global memory that order accesses of different blocks: release additions and acquire waits.

use super::access::check;
use super::block::{Block, suspend, with};
use super::checker::Kind;
use super::collective::{Operation, Wait};
use std::panic::Location;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

/// A thread that waits until a counter has a value.
#[derive(Clone, Copy)]
pub struct CounterWait {
    thread: usize,
    counter: *const u32,
    value: u32,
}

impl CounterWait {
    fn found(self) -> u32 {
        // SAFETY: the caller of `acquire_wait_u32` guarantees a valid word, and all concurrent accesses are atomic.
        unsafe { AtomicU32::from_ptr(self.counter.cast_mut()) }.load(Ordering::Acquire)
    }

    fn is_satisfied(self) -> bool {
        self.found() == self.value
    }
}

/// # Safety
/// `pointer` must be valid for reads and writes, and all concurrent accesses must be atomic.
#[track_caller]
pub unsafe fn release_add_u32(pointer: *mut u32, value: u32) {
    check(Kind::Atomic, pointer.addr(), 4, 4, Location::caller());
    with(|block| {
        if let Some(checker) = &mut block.checker {
            checker.counter_released(block.current, pointer.addr());
        }
    });
    // SAFETY: guaranteed by the caller.
    unsafe { AtomicU32::from_ptr(pointer) }.fetch_add(value, Ordering::Release);
    with(|block| {
        wake_satisfied(block);
        if let Some(running) = &block.running {
            running.changed();
        }
    });
}

/// # Safety
/// Same as [`release_add_u32`], until the wait ends.
#[track_caller]
pub unsafe fn acquire_wait_u32(pointer: *const u32, value: u32) {
    let at = Location::caller();
    let operation = Operation::Counter { address: pointer.addr(), value };
    loop {
        check(Kind::Atomic, pointer.addr(), 4, 4, at);
        let satisfied = with(|block| {
            let wait = CounterWait { thread: block.current, counter: pointer, value };
            let satisfied = wait.is_satisfied();
            if !satisfied {
                block.counter_waits.push(wait);
                block.wait(Wait { operation, at });
            } else if let Some(checker) = &mut block.checker {
                checker.counter_acquired(block.current, pointer.addr(), at);
            }
            satisfied
        });
        if satisfied {
            return;
        }
        suspend();
    }
}

/// Wakes each thread of `block` that waits for a counter, if the counter has the awaited value. Returns whether it woke any.
fn wake_satisfied(block: &mut Block) -> bool {
    let (satisfied, waiting): (Vec<_>, Vec<_>) = block.counter_waits.iter().partition(|wait| wait.is_satisfied());
    block.counter_waits = waiting;
    for wait in &satisfied {
        block.wake(wait.thread);
    }
    !satisfied.is_empty()
}

/// Wakes a thread that waits for a counter, when no thread of the running block can continue otherwise. Waits for other
/// blocks that run in parallel. Returns false if no such thread will ever continue.
pub fn wake_one_waiting() -> bool {
    let (waits, running) = with(|block| (block.counter_waits.clone(), block.running.clone()));
    if waits.is_empty() {
        return false;
    }
    if let Some(running) = running {
        running.wait(|| waits.iter().any(|wait| wait.is_satisfied()));
    }
    with(wake_satisfied)
}

impl Block {
    /// Returns the part of a deadlock report that describes the counter at `address`.
    pub fn missing_count(&self, address: usize) -> String {
        let wait = self.counter_waits.iter().find(|wait| wait.counter.addr() == address);
        wait.map_or_else(String::new, |wait| format!("; the counter is {}", wait.found()))
    }
}

/// The blocks of a launch that run in parallel.
#[derive(Default)]
pub struct Running {
    state: Mutex<State>,
    condition: Condvar,
}

#[derive(Default)]
struct State {
    /// Number of blocks that have started and not finished.
    active: usize,
    /// Number of these that have found no satisfied wait since the last change of a counter.
    waiting: usize,
    /// Number of changes.
    changes: u64,
    /// Set when all active blocks wait.
    deadlocked: bool,
}

impl Running {
    fn change(&self, active: impl FnOnce(usize) -> usize) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.active = active(state.active);
        state.waiting = 0;
        state.changes += 1;
        self.condition.notify_all();
    }

    /// Records that a block has started.
    pub fn started(&self) {
        self.change(|active| active + 1);
    }

    /// Records that a block has finished.
    pub fn finished(&self) {
        self.change(|active| active - 1);
    }

    /// Records that a counter has changed.
    fn changed(&self) {
        self.change(|active| active);
    }

    /// Waits until `satisfied` returns true or all active blocks wait.
    fn wait(&self, satisfied: impl Fn() -> bool) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while !satisfied() && !state.deadlocked {
            state.waiting += 1;
            if state.waiting == state.active {
                state.deadlocked = true;
                self.condition.notify_all();
            }
            let changes = state.changes;
            while state.changes == changes && !state.deadlocked {
                state = self.condition.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}
