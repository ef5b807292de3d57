//! Barriers of all blocks in persistent kernels: a counter with a generation, a counter with a sense bit, and a counter alone.

use crate::faults;
#[cfg(not(target_arch = "nvptx64"))]
use crate::{Memory, Report, Run};
use cuda_std::{GlobalMut, fence, kernel, thread, warp};

const THREADS: usize = 64;
const BLOCKS: usize = 4;
const PHASES: usize = 4;
const COUNT: usize = THREADS * BLOCKS;

faults! {
    const GENERATION = "grid barrier with a generation", run_generation;
    Generation {
        NoReleaseFence = Race "no fence before the arrival",
        NoAcquireFence = Race "no fence after the wait",
        NoFenceOfLast = Race "the last block does not fence between the counter and the generation",
        ReleaseFenceOfBlock = Race "fence of block scope before the arrival",
        AcquireFenceOfBlock = Race "fence of block scope after the wait",
        GenerationReadLate = Missed "the generation is read after the arrival",
        CountNotReset = Livelock "the counter is not reset",
        CountResetLate = Livelock "the counter is reset after the generation is advanced",
        NoBarrierBefore = Race "no barrier of the block before the arrival",
        NoBarrierAfter = Race "no barrier of the block after the wait",
        SingleBuffer = Race "a phase reads and writes one buffer",
        PlainGeneration = Race "the generation is advanced by a plain write",
        OneBlockTooFew = Race "the barrier expects one block too few",
        OneBlockTooMany = Livelock "the barrier expects one block too many",
        SkipsOnePhase = Race "one phase has no barrier",
        EachThreadArrives = Race "each thread arrives",
        WaitsForNonzero = Race "the wait is for any generation but the first",
        OneBlockReturns = Livelock "a block returns before the last phase",
    }
}

/// Stores in each phase the neighbor's value plus one.
fn phase(from: GlobalMut<u32>, to: GlobalMut<u32>) {
    let i = thread::index_1d();
    to.set(i, from.at((i + THREADS + 1) % COUNT) + 1);
}

#[kernel(threads = 64)]
fn generation(values: GlobalMut<u32>, words: GlobalMut<u32>, fault: u32) {
    let is = |planted: Generation| fault == planted as u32;
    let t = thread::thread_idx_x();
    let (count, generation) = (0, 1);
    let expected = match () {
        () if is(Generation::OneBlockTooFew) => thread::grid_dim_x() - 1,
        () if is(Generation::OneBlockTooMany) => thread::grid_dim_x() + 1,
        () => thread::grid_dim_x(),
    };
    let barrier = || {
        let mut current = words.load_relaxed(generation);
        if is(Generation::ReleaseFenceOfBlock) {
            fence::block();
        } else if !is(Generation::NoReleaseFence) {
            fence::device();
        }
        let ticket = words.fetch_add(count, 1);
        if is(Generation::GenerationReadLate) {
            current = words.load_relaxed(generation);
        }
        if is(Generation::WaitsForNonzero) {
            current = 0;
        }
        if ticket == expected - 1 {
            if !is(Generation::CountNotReset) && !is(Generation::CountResetLate) {
                words.store_relaxed(count, 0);
            }
            if !is(Generation::NoFenceOfLast) {
                fence::device();
            }
            let next = words.load_relaxed(generation) + 1;
            if is(Generation::PlainGeneration) {
                words.set(generation, next);
            } else {
                words.store_relaxed(generation, next);
            }
            if is(Generation::CountResetLate) {
                words.store_relaxed(count, 0);
            }
        } else {
            while words.load_relaxed(generation) == current {}
        }
        if is(Generation::AcquireFenceOfBlock) {
            fence::block();
        } else if !is(Generation::NoAcquireFence) {
            fence::device();
        }
    };
    for p in 0..PHASES {
        let (from, to) = if is(Generation::SingleBuffer) { (0, 0) } else { (p % 2 * COUNT, (p + 1) % 2 * COUNT) };
        phase(values.skip(from), values.skip(to));
        if is(Generation::SkipsOnePhase) && p == 1 {
            continue;
        }
        if is(Generation::OneBlockReturns) && p == 2 && thread::block_idx_x() == 1 {
            return;
        }
        if !is(Generation::NoBarrierBefore) {
            thread::sync_threads();
        }
        if t == 0 || is(Generation::EachThreadArrives) {
            barrier();
        }
        if !is(Generation::NoBarrierAfter) {
            thread::sync_threads();
        }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
fn is_right(values: &[u32]) -> bool {
    let mut expected: Vec<u32> = (0..COUNT as u32).collect();
    for _ in 0..PHASES {
        expected = (0..COUNT).map(|i| expected[(i + THREADS + 1) % COUNT] + 1).collect();
    }
    values[..COUNT] == expected
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_generation(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let mut memory = Memory::new();
    let values: Vec<u32> = (0..2 * COUNT as u32).collect();
    let (values, words) = (memory.buffer("values", &values), memory.zeroed("words", 2));
    run(&generation(values, words, fault), &mut memory, BLOCKS as u32, 0)?;
    Ok(is_right(&memory.read(values)))
}

faults! {
    const SENSE = "grid barrier with a sense bit", run_sense;
    Sense {
        NoReleaseFence = Race "no fence before the arrival",
        NoAcquireFence = Race "no fence after the wait",
        MasterAddsOneMore = Livelock "block 0 adds one more than the missing arrivals",
        MasterAddsOneLess = Race "block 0 adds one less than the missing arrivals",
        TwoMasters = Race "two blocks flip the sense",
        SenseReadAfterArrival = Livelock "the sense is read after the arrival",
        SenseReadOnce = Livelock "the sense of the first phase is used in all phases",
        WaitsForAnyChange = Race "the wait ends at any change of the counter",
        PlainWait = Livelock "the counter is read by a plain read",
        BlockFences = Race "both fences have block scope",
        OneBarrierOfBlock = Race "no barrier of the block before the arrival",
    }
}

/// The sense is bit 31 of the counter. Block 0 adds what flips it once all other blocks have added 1, as in cooperative groups.
#[kernel(threads = 64)]
fn sense(values: GlobalMut<u32>, word: GlobalMut<u32>, fault: u32) {
    let is = |planted: Sense| fault == planted as u32;
    let bit = 1 << 31;
    let (t, block, blocks) = (thread::thread_idx_x(), thread::block_idx_x(), thread::grid_dim_x());
    let mut first = None;
    let mut barrier = || {
        let fence_of = || if is(Sense::BlockFences) { fence::block() } else { fence::device() };
        let missing = match () {
            () if is(Sense::MasterAddsOneMore) => blocks,
            () if is(Sense::MasterAddsOneLess) => blocks - 2,
            () => blocks - 1,
        };
        let is_master = block == 0 || is(Sense::TwoMasters) && block == 1;
        if !is(Sense::NoReleaseFence) {
            fence_of();
        }
        let mut before = word.fetch_add(0, if is_master { bit - missing } else { 1 });
        if is(Sense::SenseReadAfterArrival) {
            before = word.load_relaxed(0);
        }
        if is(Sense::SenseReadOnce) {
            before = *first.get_or_insert(before);
        }
        let mask = if is(Sense::WaitsForAnyChange) { u32::MAX } else { bit };
        let load = || if is(Sense::PlainWait) { word.at(0) } else { word.load_relaxed(0) };
        while (load() ^ before) & mask == 0 {}
        if !is(Sense::NoAcquireFence) {
            fence_of();
        }
    };
    for p in 0..PHASES {
        phase(values.skip(p % 2 * COUNT), values.skip((p + 1) % 2 * COUNT));
        if !is(Sense::OneBarrierOfBlock) {
            thread::sync_threads();
        }
        if t == 0 {
            barrier();
        }
        thread::sync_threads();
    }
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_sense(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let mut memory = Memory::new();
    let values: Vec<u32> = (0..2 * COUNT as u32).collect();
    let (values, word) = (memory.buffer("values", &values), memory.zeroed("word", 1));
    run(&sense(values, word, fault), &mut memory, BLOCKS as u32, 0)?;
    Ok(is_right(&memory.read(values)))
}

faults! {
    const MONOTONIC = "grid barrier that counts", run_monotonic;
    Monotonic {
        WaitsForEquality = Deadlock "the wait is for one value, which blocks of the next phase exceed",
        WaitsForOneTooFew = Race "the wait ends one block too early",
        CountsOnePhase = Race "the wait in each phase is for the value of the first phase",
        RelaxedAdd = Race "the arrival does not release",
        NoBarrierBefore = Race "no barrier of the block before the arrival",
        NoBarrierAfter = Race "no barrier of the block after the wait",
        OtherThreadWaits = Race "one thread arrives and another one of a different warp waits, with only a warp::sync",
        ResetByLast = Deadlock "the last block resets the counter",
    }
}

/// A barrier that only counts: phase p ends when the counter is at least p + 1 times the number of blocks.
#[kernel(threads = 64)]
fn monotonic(values: GlobalMut<u32>, counter: GlobalMut<u32>, fault: u32) {
    let is = |planted: Monotonic| fault == planted as u32;
    let (t, blocks) = (thread::thread_idx_x(), thread::grid_dim_x());
    for p in 0..PHASES {
        phase(values.skip(p % 2 * COUNT), values.skip((p + 1) % 2 * COUNT));
        if !is(Monotonic::NoBarrierBefore) {
            thread::sync_threads();
        }
        let end = match () {
            () if is(Monotonic::CountsOnePhase) => blocks,
            () if is(Monotonic::WaitsForOneTooFew) => (p as u32 + 1) * blocks - 1,
            () => (p as u32 + 1) * blocks,
        };
        if t == 0 {
            if is(Monotonic::RelaxedAdd) {
                counter.fetch_add(0, 1);
            } else if is(Monotonic::ResetByLast) {
                fence::device();
                if counter.fetch_add(0, 1) == end - 1 {
                    counter.store_relaxed(0, 0);
                }
            } else {
                counter.release_add(0, 1);
            }
        }
        if t == if is(Monotonic::OtherThreadWaits) { 32 } else { 0 } {
            if is(Monotonic::WaitsForEquality) {
                counter.acquire_wait(0, end);
            } else {
                counter.acquire_wait_until(0, |count| count >= end);
            }
        }
        if is(Monotonic::OtherThreadWaits) {
            warp::sync();
        } else if !is(Monotonic::NoBarrierAfter) {
            thread::sync_threads();
        }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_monotonic(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let mut memory = Memory::new();
    let values: Vec<u32> = (0..2 * COUNT as u32).collect();
    let (values, counter) = (memory.buffer("values", &values), memory.zeroed("counter", 1));
    run(&monotonic(values, counter, fault), &mut memory, BLOCKS as u32, 0)?;
    Ok(is_right(&memory.read(values)))
}
