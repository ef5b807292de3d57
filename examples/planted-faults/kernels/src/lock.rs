//! A spin lock that protects plain data, and a lock that one thread takes for its block.

use crate::faults;
#[cfg(not(target_arch = "nvptx64"))]
use crate::{Memory, Report, Run};
use cuda_std::{GlobalMut, fence, kernel, thread};

const THREADS: usize = 64;
const BLOCKS: usize = 4;
const ROUNDS: usize = 2;

faults! {
    const LOCK = "spin lock", run_lock;
    Lock {
        NoAcquireFence = Race "no fence after the lock is taken",
        NoReleaseFence = Race "no fence before the lock is released",
        AcquireFenceOfBlock = Race "fence of block scope after the lock is taken",
        ReleaseFenceOfBlock = Race "fence of block scope before the lock is released",
        FenceAfterUnlock = Race "the fence follows the release of the lock",
        FenceBeforeLock = Race "the fence precedes the loop that takes the lock",
        UnlockBeforeWrite = Race "the lock is released before the write",
        ReadBeforeLock = Race "the old value is read before the lock is taken",
        PlainUnlock = Race "the lock is released by a plain write",
        TestThenSet = Race "the lock is read, then written, by two accesses",
        TriesOnce = Race "the lock is tried once, and its data is used in any case",
        LockOfParity = Race "blocks take one of two locks for the same data",
        ExpectsLocked = Race "compare_exchange expects the taken state",
        NeverUnlocks = Livelock "the lock is never released",
        UnlocksTwice = Race "the lock is released a second time",
        NoBarrierAfterLock = Race "no barrier of the block after the lock is taken",
        NoBarrierBeforeUnlock = Race "no barrier of the block before the lock is released",
        LocksTwice = Livelock "the lock is taken again by its owner",
        ReadWithoutLock = Race "the sum is read without the lock",
    }
}

/// Thread 0 takes the lock for all threads of the block, which add to a sum each.
#[kernel(threads = 64)]
fn locked(sums: GlobalMut<u32>, seen: GlobalMut<u32>, lock: GlobalMut<u32>, fault: u32) {
    let is = |planted: Lock| fault == planted as u32;
    let (t, block) = (thread::thread_idx_x() as usize, thread::block_idx_x() as usize);
    let word = if is(Lock::LockOfParity) { block % 2 } else { 0 };
    let take = || {
        if is(Lock::FenceBeforeLock) {
            fence::device();
        }
        match () {
            () if is(Lock::TestThenSet) => {
                while lock.load_relaxed(word) != 0 {}
                lock.store_relaxed(word, 1);
            }
            () if is(Lock::TriesOnce) => _ = lock.compare_exchange(word, 0, 1),
            () => while lock.compare_exchange(word, u32::from(is(Lock::ExpectsLocked)), 1) != 0 {},
        }
        if is(Lock::AcquireFenceOfBlock) {
            fence::block();
        } else if !is(Lock::NoAcquireFence) && !is(Lock::FenceBeforeLock) {
            fence::device();
        }
    };
    let release = || {
        if is(Lock::ReleaseFenceOfBlock) {
            fence::block();
        } else if !is(Lock::NoReleaseFence) && !is(Lock::FenceAfterUnlock) {
            fence::device();
        }
        if is(Lock::PlainUnlock) {
            lock.set(word, 0);
        } else {
            lock.store_relaxed(word, 0);
        }
        if is(Lock::FenceAfterUnlock) {
            fence::device();
        }
    };
    for round in 0..ROUNDS {
        let mut old = if is(Lock::ReadBeforeLock) { sums.at(t) } else { 0 };
        if t == 0 {
            take();
            if is(Lock::LocksTwice) && round == 1 {
                take();
            }
        }
        if !is(Lock::NoBarrierAfterLock) {
            thread::sync_threads();
        }
        if !is(Lock::ReadBeforeLock) {
            old = sums.at(t);
        }
        if is(Lock::UnlockBeforeWrite) {
            thread::sync_threads();
            if t == 0 {
                release();
            }
        }
        sums.set(t, old + block as u32 + 1);
        if !is(Lock::NoBarrierBeforeUnlock) {
            thread::sync_threads();
        }
        if t == 0 && !is(Lock::NeverUnlocks) && !is(Lock::UnlockBeforeWrite) {
            release();
            if is(Lock::UnlocksTwice) {
                release();
            }
        }
    }
    if is(Lock::ReadWithoutLock) {
        seen.set(block * THREADS + t, sums.at(t));
    }
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_lock(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let mut memory = Memory::new();
    let (sums, lock) = (memory.zeroed("sums", THREADS), memory.zeroed("lock", 2));
    let seen = memory.output("seen", BLOCKS * THREADS);
    run(&locked(sums, seen, lock, fault), &mut memory, BLOCKS as u32, 0)?;
    let expected = (1..=BLOCKS as u32).sum::<u32>() * ROUNDS as u32;
    Ok(memory.read(sums) == [expected; THREADS])
}
