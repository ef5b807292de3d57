//! A table that the first block initializes, and a pool of nodes that blocks take and give back.

use crate::faults;
#[cfg(not(target_arch = "nvptx64"))]
use crate::{Memory, Report, Run};
use cuda_std::{GlobalMut, fence, kernel, thread, warp};

const WORDS: usize = 32;
const BLOCKS: usize = 4;
/// States of the table after 0.
const BUSY: u32 = 1;
const READY: u32 = 2;

faults! {
    const ONCE = "table initialized once", run_once;
    Once {
        UsesWhileBusy = Race "blocks use the table while it is initialized",
        RelaxedReady = Race "the table is published without a release",
        RelaxedWait = Race "the wait for the table does not acquire",
        RelaxedFastPath = Race "a first relaxed read of the state skips the wait",
        NoSyncBeforeReady = Race "no warp::sync between the table and its state",
        NoSyncAfterWait = Race "no warp::sync between the wait and the reads",
        EachBlockInitializes = Race "each block initializes the table",
        TestThenSet = Race "the state is read, then written, by two accesses",
        PlainReady = Race "the state is a plain write",
        ReadyBeforeTable = Race "the table is published before it is written",
        NeverReady = Livelock "the table is never published",
    }
}

#[kernel(threads = 32)]
fn once(out: GlobalMut<u32>, table: GlobalMut<u32>, state: GlobalMut<u32>, fault: u32) {
    let is = |planted: Once| fault == planted as u32;
    let lane = warp::lane() as usize;
    let mut is_first = 0;
    if lane == 0 {
        let old = if is(Once::TestThenSet) {
            let old = state.load_relaxed(0);
            if old == 0 {
                state.store_relaxed(0, BUSY);
            }
            old
        } else {
            state.compare_exchange(0, 0, BUSY)
        };
        is_first = u32::from(old == 0 || is(Once::EachBlockInitializes));
    }
    let is_first = warp::shuffle(is_first, 0) == 1;
    if is_first {
        let write = || table.set(lane, lane as u32 * 3);
        if !is(Once::ReadyBeforeTable) {
            write();
        }
        if !is(Once::NoSyncBeforeReady) {
            warp::sync();
        }
        if lane == 0 {
            match () {
                () if is(Once::NeverReady) => (),
                () if is(Once::RelaxedReady) => state.store_relaxed(0, READY),
                () if is(Once::PlainReady) => state.set(0, READY),
                () => state.store_release(0, READY),
            }
        }
        if is(Once::ReadyBeforeTable) {
            write();
        }
    } else if lane == 0 && !(is(Once::RelaxedFastPath) && state.load_relaxed(0) == READY) {
        let load = || if is(Once::RelaxedWait) { state.load_relaxed(0) } else { state.load_acquire(0) };
        let awaited = if is(Once::UsesWhileBusy) { BUSY } else { READY };
        while load() < awaited {}
    }
    if !is(Once::NoSyncAfterWait) {
        warp::sync();
    }
    out.set(thread::block_idx_x() as usize * WORDS + lane, table.at(lane ^ 1));
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_once(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let mut memory = Memory::new();
    let (out, table) = (memory.zeroed("out", BLOCKS * WORDS), memory.output("table", WORDS));
    let state = memory.zeroed("state", 1);
    run(&once(out, table, state, fault), &mut memory, BLOCKS as u32, 0)?;
    let expected = (0..BLOCKS * WORDS).map(|i| ((i as u32 % WORDS as u32) ^ 1) * 3);
    Ok(memory.read(out).into_iter().eq(expected))
}

/// Each block holds two nodes. One node more than blocks rules out a deadlock.
const NODES: usize = BLOCKS + 1;
const ROUNDS: usize = 3;

faults! {
    const POOL = "pool of nodes", run_pool;
    Pool {
        NoTag = Race "the head has no tag, so that a node taken and given back is not noticed (ABA)",
        RelaxedHead = Race "the head is read without an acquire before the next node",
        NoFenceBeforePush = Race "no fence before a node is given back",
        BlockFence = Race "fence of block scope before a node is given back",
        NextAfterPush = Race "the next node is written after the node is given back",
        IgnoresFailure = Race "a failed compare_exchange is taken for a success",
        PushesTwice = Race "a node is given back twice",
        UsesAfterPush = Race "a node is used after it is given back",
        PlainNext = Race "the next node is a plain read and write",
        HoldsTooMany = Livelock "blocks hold three nodes each, more than the pool has",
    }
}

/// Nodes are a stack: `head` is a tag and the number of the first node plus one, `next` the number of the node below plus one.
#[kernel(threads = 32)]
fn pool(data: GlobalMut<u32>, head: GlobalMut<u64>, next: GlobalMut<u32>, fault: u32) {
    let is = |planted: Pool| fault == planted as u32;
    if warp::lane() != 0 {
        return;
    }
    let below = |i: usize| if is(Pool::PlainNext) { next.at(i) } else { next.load_relaxed(i) };
    let set_below = |i: usize, node: u32| {
        if is(Pool::PlainNext) {
            next.set(i, node);
        } else {
            next.store_relaxed(i, node);
        }
    };
    let tagged = |old: u64, node: u32| u64::from(node) | if is(Pool::NoTag) { 0 } else { ((old >> 32) + 1) << 32 };
    let pop = || loop {
        let old = if is(Pool::RelaxedHead) { head.load_relaxed(0) } else { head.load_acquire(0) };
        let node = old as u32 as usize;
        if node == 0 {
            continue;
        }
        let new = tagged(old, below(node - 1));
        if head.compare_exchange(0, old, new) == old || is(Pool::IgnoresFailure) {
            return node - 1;
        }
    };
    let push = |node: usize| loop {
        let old = head.load_relaxed(0);
        if !is(Pool::NextAfterPush) {
            set_below(node, old as u32);
        }
        if is(Pool::BlockFence) {
            fence::block();
        } else if !is(Pool::NoFenceBeforePush) {
            fence::device();
        }
        if head.compare_exchange(0, old, tagged(old, node as u32 + 1)) == old {
            if is(Pool::NextAfterPush) {
                set_below(node, old as u32);
            }
            return;
        }
    };
    let add = |node: usize| data.set(node, data.at(node) + 1);
    for _ in 0..ROUNDS {
        let (first, second) = (pop(), pop());
        let third = is(Pool::HoldsTooMany).then(pop);
        add(first);
        add(second);
        push(first);
        if is(Pool::PushesTwice) {
            push(first);
        }
        push(second);
        if is(Pool::UsesAfterPush) {
            add(first);
        }
        if let Some(third) = third {
            push(third);
        }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_pool(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let mut memory = Memory::new();
    let (data, head) = (memory.zeroed("data", NODES), memory.buffer("head", &[1u64]));
    let below: Vec<u32> = (0..NODES as u32).map(|i| (i + 2) % (NODES as u32 + 1)).collect();
    let next = memory.buffer("next", &below);
    run(&pool(data, head, next, fault), &mut memory, BLOCKS as u32, 0)?;
    // The pool must have each node again, and each use must have counted.
    let (next, mut node) = (memory.read(next), memory.read(head)[0] as u32);
    let mut found = Vec::new();
    while node != 0 && found.len() <= NODES {
        found.push(node);
        node = next[node as usize - 1];
    }
    found.sort_unstable();
    let uses = memory.read(data).into_iter().sum::<u32>();
    Ok(found.into_iter().eq(1..=NODES as u32) && uses == (2 * BLOCKS * ROUNDS) as u32)
}
