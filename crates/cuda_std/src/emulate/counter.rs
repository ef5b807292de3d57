//! Counters in global memory that order accesses of different blocks: release additions and acquire waits.

use super::access::check;
use super::block::{Block, suspend, with};
use super::checker::Kind;
use super::wait::{CounterWait, Operation, Wait};
use std::panic::Location;
use std::sync::atomic::{AtomicU32, Ordering};

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
