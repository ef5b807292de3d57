//! A ring buffer between two blocks: one producer and one consumer.

use crate::faults;
#[cfg(not(target_arch = "nvptx64"))]
use crate::{Memory, Report, Run};
use cuda_std::{GlobalMut, fence, kernel, thread, warp};

/// Words of a message: one for each lane.
const WORDS: usize = 32;
const SLOTS: usize = 3;
const MESSAGES: usize = 10;

faults! {
    const RING = "ring buffer", run_ring;
    Ring {
        RelaxedTail = Race "the producer publishes the tail without a release",
        RelaxedTailRead = Race "the consumer reads the tail without an acquire",
        RelaxedHead = Race "the consumer publishes the head without a release",
        RelaxedHeadRead = Race "the producer reads the head without an acquire",
        TailAfterBlockFence = Race "the tail follows a fence of block scope",
        PlainTail = Race "the tail is a plain write",
        PlainHead = Race "the head is a plain write",
        NoFullCheck = Race "the producer does not wait for a free slot",
        FullCheckOffByOne = Race "the producer counts one slot too many",
        EmptyCheckOffByOne = Race "the consumer reads one message too early",
        TailBeforeData = Race "the tail is published before the message",
        HeadBeforeRead = Race "the head is published before the message is read",
        NoSyncBeforeTail = Race "no warp::sync between the message and the tail",
        NoSyncAfterTail = Race "no warp::sync between the tail and the reads of the message",
        NoSyncBeforeHead = Race "no warp::sync between the reads of the message and the head",
        NoSyncAfterHead = Race "no warp::sync between the head and the writes of the next message",
        NextSlot = Uninitialized "the consumer reads the next slot",
        TailCountsTwo = Race "the tail is published for two messages",
        HeadOnlyOnce = Livelock "the consumer publishes the head only once",
        ShuffleForSync = Race "a shuffle instead of warp::sync after the tail",
        WrapsTooLate = OutOfBounds "the slot is taken modulo one slot too many",
    }
}

#[kernel(threads = 32)]
fn ring(out: GlobalMut<u32>, slots: GlobalMut<u32>, head: GlobalMut<u32>, tail: GlobalMut<u32>, fault: u32) {
    let is = |planted: Ring| fault == planted as u32;
    let lane = warp::lane() as usize;
    let is_producer = thread::block_idx_x() == 0;
    for message in 0..MESSAGES {
        let next = message as u32 + 1;
        let slot = message % if is(Ring::WrapsTooLate) { SLOTS + 1 } else { SLOTS };
        if is_producer {
            if lane == 0 && !is(Ring::NoFullCheck) {
                let load = || if is(Ring::RelaxedHeadRead) { head.load_relaxed(0) } else { head.load_acquire(0) };
                let free = SLOTS as u32 + u32::from(is(Ring::FullCheckOffByOne));
                while message as u32 - load() >= free {}
            }
            if !is(Ring::NoSyncAfterHead) {
                warp::sync();
            }
            let write = || slots.set(slot * WORDS + lane, (message * WORDS + lane) as u32);
            if !is(Ring::TailBeforeData) {
                write();
            }
            if !is(Ring::NoSyncBeforeTail) {
                warp::sync();
            }
            if lane == 0 {
                let next = next + u32::from(is(Ring::TailCountsTwo));
                match () {
                    () if is(Ring::RelaxedTail) => tail.store_relaxed(0, next),
                    () if is(Ring::TailAfterBlockFence) => {
                        fence::block();
                        tail.store_relaxed(0, next);
                    }
                    () if is(Ring::PlainTail) => tail.set(0, next),
                    () => tail.store_release(0, next),
                }
            }
            if is(Ring::TailBeforeData) {
                write();
            }
        } else {
            if lane == 0 {
                let load = || if is(Ring::RelaxedTailRead) { tail.load_relaxed(0) } else { tail.load_acquire(0) };
                while load() < next - u32::from(is(Ring::EmptyCheckOffByOne)) {}
            }
            if is(Ring::ShuffleForSync) {
                warp::shuffle(next, 0);
            } else if !is(Ring::NoSyncAfterTail) {
                warp::sync();
            }
            let slot = if is(Ring::NextSlot) { (slot + 1) % SLOTS } else { slot };
            let read = || out.set(message * WORDS + lane, slots.at(slot * WORDS + lane));
            if !is(Ring::HeadBeforeRead) {
                read();
            }
            if !is(Ring::NoSyncBeforeHead) {
                warp::sync();
            }
            if lane == 0 && !(is(Ring::HeadOnlyOnce) && message > 0) {
                match () {
                    () if is(Ring::RelaxedHead) => head.store_relaxed(0, next),
                    () if is(Ring::PlainHead) => head.set(0, next),
                    () => head.store_release(0, next),
                }
            }
            if is(Ring::HeadBeforeRead) {
                read();
            }
        }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_ring(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let mut memory = Memory::new();
    let (out, slots) = (memory.zeroed("out", MESSAGES * WORDS), memory.output("slots", SLOTS * WORDS));
    let (head, tail) = (memory.zeroed("head", 1), memory.zeroed("tail", 1));
    run(&ring(out, slots, head, tail, fault), &mut memory, 2, 0)?;
    Ok(memory.read(out).into_iter().eq(0..(MESSAGES * WORDS) as u32))
}
