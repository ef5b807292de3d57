//! Faults within a block: a tile that `cp.async` loads into two stages, and a pipeline of warps with mbarriers.

use crate::faults;
#[cfg(not(target_arch = "nvptx64"))]
use crate::{Memory, Report, Run};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, async_copy, kernel, thread, warp};

const THREADS: usize = 64;
/// Elements of a stage: a packet of four for each thread.
const STAGE: usize = 4 * THREADS;
const CHUNKS: usize = 5;

faults! {
    const PIPELINE = "double-buffered cp.async", run_pipeline;
    Pipeline {
        WaitsForOneTooFew = AsyncCopy "the wait leaves one group too many in flight",
        NoWait = AsyncCopy "no wait",
        LastWaitAsOthers = AsyncCopy "the wait for the last chunk leaves one group in flight",
        NoCommit = AsyncCopy "the copies of the next chunk are committed one iteration too late",
        NoBarrierAfterWait = Race "no barrier between the wait and the reads",
        BarrierBeforeWait = AsyncCopy "the barrier precedes the wait",
        NoBarrierBeforeRefill = Race "no barrier between the reads of a stage and its next copy",
        ReadsOtherStage = AsyncCopy "the other stage is read",
        RefillsCurrentStage = AsyncCopy "the next copy targets the stage that is read",
        BeyondLastChunk = OutOfBounds "a chunk beyond the last is copied",
        WarpSyncAfterWait = Race "warp::sync instead of the barrier after the wait",
        StoresToStageInFlight = AsyncCopy "a thread clears the stage that its copy fills",
        NeverWaitsForLast = AsyncCopy "an extra copy is never waited for",
    }
}

/// Adds elements of chunks of the input. The next chunk is copied while the current one is read.
#[kernel(threads = 64)]
fn pipeline(out: GlobalMut<f32>, inp: Global<f32>, fault: u32) {
    let is = |planted: Pipeline| fault == planted as u32;
    let mut layout = Layout::new();
    let stages: SharedArray<f32> = layout.array(2 * STAGE);
    let t = thread::thread_idx_x() as usize;
    let copy = |chunk: usize| {
        let stage = if is(Pipeline::RefillsCurrentStage) { chunk.saturating_sub(1) % 2 } else { chunk % 2 };
        let valid = chunk < CHUNKS || is(Pipeline::BeyondLastChunk);
        if is(Pipeline::NoCommit) && chunk > 0 {
            async_copy::commit();
        }
        stages.copy_packet_async(stage * STAGE + 4 * t, inp, chunk * STAGE + 4 * t, valid);
        if !is(Pipeline::NoCommit) || chunk == 0 {
            async_copy::commit();
        }
        if is(Pipeline::StoresToStageInFlight) {
            stages.set(stage * STAGE + 4 * t, 0.0);
        }
    };
    let mut sum = 0.0;
    copy(0);
    for chunk in 0..CHUNKS {
        let has_next = chunk + 1 < CHUNKS || is(Pipeline::BeyondLastChunk) || is(Pipeline::NeverWaitsForLast);
        if has_next {
            copy(chunk + 1);
        }
        if is(Pipeline::BarrierBeforeWait) {
            thread::sync_threads();
        }
        match () {
            () if is(Pipeline::NoWait) => (),
            () if is(Pipeline::WaitsForOneTooFew) => async_copy::wait::<2>(),
            () if has_next || is(Pipeline::LastWaitAsOthers) => async_copy::wait::<1>(),
            () => async_copy::wait::<0>(),
        }
        if is(Pipeline::WarpSyncAfterWait) {
            warp::sync();
        } else if !is(Pipeline::NoBarrierAfterWait) && !is(Pipeline::BarrierBeforeWait) {
            thread::sync_threads();
        }
        let stage = (chunk + usize::from(is(Pipeline::ReadsOtherStage))) % 2;
        // Another thread has copied the elements.
        for i in 0..4 {
            sum += stages.at(stage * STAGE + (4 * t + i + 130) % STAGE);
        }
        if !is(Pipeline::NoBarrierBeforeRefill) {
            thread::sync_threads();
        }
    }
    out.set(t, sum);
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_pipeline(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let values: Vec<f32> = (0..CHUNKS * STAGE).map(|i| (i * 7919 % 101) as f32).collect();
    let mut memory = Memory::new();
    let (out, inp) = (memory.zeroed("out", THREADS), memory.input("inp", &values));
    run(&pipeline(out, inp, fault), &mut memory, 1, 8 * STAGE)?;
    let element = |t: usize, i: usize| values[i / 4 * STAGE + (4 * t + i % 4 + 130) % STAGE];
    let sum = |t: usize| (0..4 * CHUNKS).fold(0.0, |sum, i| sum + element(t, i));
    Ok(memory.read(out).into_iter().eq((0..THREADS).map(sum)))
}

const SLOTS: usize = 2;
const ROUNDS: usize = 6;

faults! {
    const MBARRIER = "pipeline with mbarriers", run_mbarriers;
    Barriers {
        OneLaneWaits = Race "one lane waits for the full barrier, and the others read",
        OneLaneWaitsEmpty = Deadlock "one lane waits for the empty barrier, and the others write",
        NoWaitForEmpty = Deadlock "the producer does not wait for an empty slot",
        ArrivesBeforeWrite = Race "the producer arrives before it writes",
        ArrivesBeforeRead = Race "the consumer arrives before it reads",
        ParityNotFlipped = Deadlock "the parity of the full barrier stays 0",
        ParityOfRound = Deadlock "the parity alternates in each round instead of each pass over the slots",
        EmptyParityWrong = Deadlock "the parity of the empty barrier is the other one",
        OneArrivalTooMany = Deadlock "the barrier expects one arrival more",
        OneArrivalTooFew = Race "the barrier expects one arrival less",
        OneLaneArrives = Race "one lane arrives for its warp without warp::sync",
        NoBarrierAfterInit = Race "no barrier after the initialization",
    }
}

/// The first warp writes values to slots, and the second warp reads them. All lanes arrive.
#[kernel(threads = 64)]
fn mbarriers(out: GlobalMut<u32>, inp: Global<u32>, fault: u32) {
    let is = |planted: Barriers| fault == planted as u32;
    let mut layout = Layout::new();
    let values: SharedArray<u32> = layout.array(SLOTS * 32);
    let (full, empty) = (layout.mbarriers(SLOTS), layout.mbarriers(SLOTS));
    let (t, lane) = (thread::thread_idx_x(), warp::lane() as usize);
    if t == 0 {
        for slot in 0..SLOTS as u32 {
            let arrivals = match () {
                () if is(Barriers::OneArrivalTooMany) => 33,
                () if is(Barriers::OneArrivalTooFew) => 31,
                () if is(Barriers::OneLaneArrives) => 1,
                () => 32,
            };
            full.at(slot).init(arrivals);
            empty.at(slot).init(32);
        }
    }
    if !is(Barriers::NoBarrierAfterInit) {
        thread::sync_threads();
    }
    for round in 0..ROUNDS {
        let slot = (round % SLOTS) as u32;
        let parity = (round / SLOTS % 2) as u32;
        let i = slot as usize * 32 + (lane ^ 1);
        if t < 32 {
            let empty_parity = if is(Barriers::EmptyParityWrong) { parity } else { parity ^ 1 };
            let waits = !(is(Barriers::NoWaitForEmpty) || is(Barriers::OneLaneWaitsEmpty) && lane > 0);
            if round >= SLOTS && waits {
                empty.at(slot).wait(empty_parity);
            }
            if is(Barriers::ArrivesBeforeWrite) {
                full.at(slot).arrive();
            }
            values.set(slot as usize * 32 + lane, inp.at(round * 32 + lane));
            if !(is(Barriers::ArrivesBeforeWrite) || is(Barriers::OneLaneArrives) && lane > 0) {
                full.at(slot).arrive();
            }
        } else {
            let full_parity = match () {
                () if is(Barriers::ParityNotFlipped) => 0,
                () if is(Barriers::ParityOfRound) => round as u32 % 2,
                () => parity,
            };
            if !(is(Barriers::OneLaneWaits) && lane > 0) {
                full.at(slot).wait(full_parity);
            }
            if is(Barriers::ArrivesBeforeRead) {
                empty.at(slot).arrive();
            }
            out.set(round * 32 + lane, values.at(i));
            if !is(Barriers::ArrivesBeforeRead) {
                empty.at(slot).arrive();
            }
        }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_mbarriers(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let values: Vec<u32> = (0..ROUNDS as u32 * 32).map(|i| i * 3).collect();
    let mut memory = Memory::new();
    let (out, inp) = (memory.zeroed("out", ROUNDS * 32), memory.input("inp", &values));
    run(&mbarriers(out, inp, fault), &mut memory, 1, 1 << 10)?;
    Ok(memory.read(out).into_iter().eq((0..ROUNDS * 32).map(|i| values[i ^ 1])))
}
