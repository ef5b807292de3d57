//! Data that reaches its reader through a third block.

use crate::faults;
#[cfg(not(target_arch = "nvptx64"))]
use crate::{Memory, Report, Run};
use cuda_std::{GlobalMut, fence, kernel, thread, warp};

const WORDS: usize = 32;

faults! {
    const RELAY = "data through a third block", run_relay;
    Relay {
        FirstRelaxed = Race "the writer does not release",
        MiddleReadsRelaxed = Race "the middle block does not acquire",
        MiddleWritesRelaxed = Race "the middle block does not release",
        LastRelaxed = Race "the reader does not acquire",
        FirstBlockFence = Race "the writer fences at block scope",
        MiddleBlockFence = Race "the middle block fences at block scope",
        LastBlockFence = Race "the reader fences at block scope",
        MiddlePlainFlag = Race "the middle block sets its flag by a plain write",
        MiddleDoesNotWait = Race "the middle block does not wait",
        OtherLaneForwards = Race "another lane of the middle block forwards after a shuffle",
        FirstWithoutSync = Race "no warp::sync between the writes and the release",
        LastWithoutSync = Race "no warp::sync between the acquire and the reads",
        StoreBreaksChain = Race "the middle block replaces the flag by a store instead of an atomic update",
        ReaderTakesFirstFlag = Uninitialized "the reader waits for any value of the flag",
        WritesAfterRelease = Race "the writer writes again after its release",
    }
}

/// Block 0 writes `data` and sets the flag to 1, block 1 advances the flag to 2, and block 2 reads `data`. If `chained` is 1, block 1
/// advances it by a relaxed atomic update, which continues the release sequence of block 0.
#[kernel(threads = 32)]
fn relay(out: GlobalMut<u32>, data: GlobalMut<u32>, flag: GlobalMut<u32>, chained: u32, fault: u32) {
    let is = |planted: Relay| fault == planted as u32;
    let lane = warp::lane() as usize;
    match thread::block_idx_x() {
        0 => {
            data.set(lane, lane as u32 + 1);
            if !is(Relay::FirstWithoutSync) {
                warp::sync();
            }
            if lane == 0 {
                if is(Relay::FirstBlockFence) {
                    fence::block();
                }
                if is(Relay::FirstRelaxed) || is(Relay::FirstBlockFence) {
                    flag.store_relaxed(0, 1);
                } else {
                    flag.store_release(0, 1);
                }
                if is(Relay::WritesAfterRelease) {
                    data.set(0, 1);
                }
            }
        }
        1 => {
            let mut found = 0;
            if lane == 0 && !is(Relay::MiddleDoesNotWait) {
                let relaxed = chained == 1 || is(Relay::MiddleReadsRelaxed) || is(Relay::MiddleBlockFence);
                while found == 0 {
                    found = if relaxed { flag.load_relaxed(0) } else { flag.load_acquire(0) };
                }
            }
            let forwarder = if is(Relay::OtherLaneForwards) { 5 } else { 0 };
            if is(Relay::OtherLaneForwards) {
                warp::shuffle(found, 0);
            }
            if lane == forwarder {
                match () {
                    () if is(Relay::StoreBreaksChain) || is(Relay::MiddleWritesRelaxed) => flag.store_relaxed(0, 2),
                    () if is(Relay::MiddlePlainFlag) => flag.set(0, 2),
                    () if is(Relay::MiddleBlockFence) => {
                        fence::block();
                        flag.store_relaxed(0, 2);
                    }
                    () if chained == 1 => _ = flag.fetch_add(0, 1),
                    () => flag.store_release(0, 2),
                }
            }
        }
        _ => {
            if lane == 0 {
                let relaxed = is(Relay::LastRelaxed) || is(Relay::LastBlockFence);
                let load = || if relaxed { flag.load_relaxed(0) } else { flag.load_acquire(0) };
                let awaited = if is(Relay::ReaderTakesFirstFlag) { 0 } else { 2 };
                while load() < awaited {}
                if is(Relay::LastBlockFence) {
                    fence::block();
                }
            }
            if !is(Relay::LastWithoutSync) {
                warp::sync();
            }
            out.set(lane, data.at(lane ^ 1));
        }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_relay(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let breaks_chain = fault == Relay::StoreBreaksChain as u32;
    let chained = if fault == crate::CORRECT { vec![0, 1] } else { vec![u32::from(breaks_chain)] };
    let mut right = true;
    for chained in chained {
        let mut memory = Memory::new();
        let (out, data) = (memory.zeroed("out", WORDS), memory.output("data", WORDS));
        let flag = memory.zeroed("flag", 1);
        run(&relay(out, data, flag, chained, fault), &mut memory, 3, 0)?;
        right &= memory.read(out).into_iter().eq((0..WORDS as u32).map(|lane| (lane ^ 1) + 1));
    }
    Ok(right)
}

faults! {
    const PEEK = "flag read once", run_peek;
    Peek {
        RelaxedFlag = Race "the flag is set without a release",
        RelaxedPeek = Race "the flag is read without an acquire",
        NoSyncBeforeFlag = Race "no warp::sync between the writes and the flag",
        NoSyncAfterPeek = Race "no warp::sync between the flag and the reads",
        IgnoresFlag = Uninitialized "the data is read in any case",
    }
}

/// Block 0 reads the flag once, and the data if it is set. Block 1 sets it.
#[kernel(threads = 32)]
fn peek(out: GlobalMut<u32>, data: GlobalMut<u32>, flag: GlobalMut<u32>, fault: u32) {
    let is = |planted: Peek| fault == planted as u32;
    let lane = warp::lane() as usize;
    if thread::block_idx_x() == 1 {
        data.set(lane, lane as u32 + 1);
        if !is(Peek::NoSyncBeforeFlag) {
            warp::sync();
        }
        if lane == 0 && is(Peek::RelaxedFlag) {
            flag.store_relaxed(0, 1);
        } else if lane == 0 {
            flag.store_release(0, 1);
        }
        return;
    }
    let mut seen = 0;
    if lane == 0 {
        seen = if is(Peek::RelaxedPeek) { flag.load_relaxed(0) } else { flag.load_acquire(0) };
    }
    if !is(Peek::NoSyncAfterPeek) {
        warp::sync();
    }
    if warp::shuffle(seen, 0) == 1 || is(Peek::IgnoresFlag) {
        out.set(lane, data.at(lane ^ 1));
    }
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_peek(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let mut memory = Memory::new();
    let (out, data) = (memory.zeroed("out", WORDS), memory.output("data", WORDS));
    let flag = memory.zeroed("flag", 1);
    run(&peek(out, data, flag, fault), &mut memory, 2, 0)?;
    let out = memory.read(out);
    Ok(out[0] == 0 || out.into_iter().eq((0..WORDS as u32).map(|lane| (lane ^ 1) + 1)))
}
