//! Faults within a block: a radix sort, a compaction with shared atomics, a scan without barriers in a warp, and packed bytes.

use crate::faults;
#[cfg(not(target_arch = "nvptx64"))]
use crate::{Memory, Report, Run};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, fence, kernel, thread, warp};

const THREADS: usize = 64;

#[cfg(not(target_arch = "nvptx64"))]
fn random(count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| i.wrapping_mul(2_654_435_761) >> 16 & 0xff).collect()
}

const DIGITS: u32 = 4;

faults! {
    const RADIX = "radix sort", run_radix;
    Radix {
        NoBarrierAfterLoad = Race "no barrier after the keys are loaded",
        NoBarrierBeforeScatter = Race "no barrier between the reads of the keys and the scatter",
        NoBarrierAfterScatter = Race "no barrier between the scatter and the next pass",
        RankOfDigitOnly = Race "the rank ignores smaller digits",
        BarrierInBranch = Race "the barrier of the scatter is in a branch that one warp skips",
        WarpSyncForBarrier = Race "warp::sync instead of the barrier after the scatter",
        BeyondLastKey = OutOfBounds "the rank starts at 1",
        NamedBarrierOfOneWarp = Race "the barrier before the scatter is a named barrier of 32 threads",
        NamedBarrierOfTwoNumbers = Deadlock "each warp waits at a named barrier of 64 threads of its own",
    }
}

/// Sorts 64 keys of 8 bits. Each pass scatters the keys in shared memory by two bits.
#[kernel(threads = 64)]
fn radix(out: GlobalMut<u32>, inp: Global<u32>, fault: u32) {
    let is = |planted: Radix| fault == planted as u32;
    let keys: SharedArray<u32> = Layout::new().array(THREADS);
    let t = thread::thread_idx_x() as usize;
    keys.set(t, inp.at(t));
    if !is(Radix::NoBarrierAfterLoad) {
        thread::sync_threads();
    }
    for shift in [0, 2, 4, 6] {
        let digit_of = |key: u32| key >> shift & (DIGITS - 1);
        let key = keys.at(t);
        let mut rank = usize::from(is(Radix::BeyondLastKey));
        for i in 0..THREADS {
            let (digit, other) = (digit_of(key), digit_of(keys.at(i)));
            let is_before = other < digit && !is(Radix::RankOfDigitOnly) || other == digit && i < t;
            rank += usize::from(is_before);
        }
        match () {
            () if is(Radix::NoBarrierBeforeScatter) => (),
            () if is(Radix::BarrierInBranch) && t >= 32 => (),
            () if is(Radix::NamedBarrierOfOneWarp) => thread::sync_named(1 + t as u32 / 32, 32),
            () if is(Radix::NamedBarrierOfTwoNumbers) => thread::sync_named(1 + t as u32 / 32, 64),
            () => thread::sync_threads(),
        }
        keys.set(rank, key);
        if is(Radix::WarpSyncForBarrier) {
            warp::sync();
        } else if !is(Radix::NoBarrierAfterScatter) {
            thread::sync_threads();
        }
    }
    out.set(t, keys.at(t));
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_radix(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let mut values = random(THREADS);
    let mut memory = Memory::new();
    let (out, inp) = (memory.zeroed("out", THREADS), memory.input("inp", &values));
    run(&radix(out, inp, fault), &mut memory, 1, 4 * THREADS)?;
    values.sort_unstable();
    Ok(memory.read(out) == values)
}

faults! {
    const COMPACTION = "compaction with a shared atomic counter", run_compaction;
    Compaction {
        NoBarrierAfterReset = Race "no barrier after the counter is reset",
        NoBarrierBeforeRead = Race "the counter is read without a barrier after the atomics",
        PlainCounter = Race "the counter is a plain read and write",
        NotReset = Uninitialized "the counter is not reset",
        ResetByEachThread = Race "each thread resets the counter",
        ReadsBeyondCount = Uninitialized "one element beyond the count is read",
        NoBarrierBeforeElements = Race "only warp::sync between the writes of the elements and their reads",
        TwoWordsOneAtomic = Race "an atomic for the count, a plain write for the sum",
        ResetAgainEarly = Race "the counter is reset for the next round before all threads have read it",
        CountOfOneWarp = Wrong "the count is broadcast by a shuffle in each warp before the other warp has counted",
    }
}

/// Keeps the odd values. An atomic counter in shared memory allocates their positions.
#[kernel(threads = 64)]
fn compaction(out: GlobalMut<u32>, inp: Global<u32>, fault: u32) {
    let is = |planted: Compaction| fault == planted as u32;
    let mut layout = Layout::new();
    let (counter, kept): (SharedArray<u32>, SharedArray<u32>) = (layout.array(2), layout.array(THREADS));
    let t = thread::thread_idx_x() as usize;
    if !is(Compaction::NotReset) && (t == 0 || is(Compaction::ResetByEachThread)) {
        counter.set(0, 0);
        counter.set(1, 0);
    }
    if !is(Compaction::NoBarrierAfterReset) {
        thread::sync_threads();
    }
    let value = inp.at(t);
    if value % 2 == 1 {
        let position = if is(Compaction::PlainCounter) {
            let position = counter.at(0);
            counter.set(0, position + 1);
            position
        } else {
            counter.fetch_add(0, 1)
        };
        if is(Compaction::TwoWordsOneAtomic) {
            counter.set(1, counter.at(1) + value);
        } else {
            counter.fetch_add(1, value);
        }
        kept.set(position as usize, value);
    }
    let mut count = 0;
    match () {
        () if is(Compaction::NoBarrierBeforeRead) => count = counter.at(0),
        () if is(Compaction::CountOfOneWarp) => {
            let found = if t.is_multiple_of(32) { counter.fetch_add(0, 0) } else { 0 };
            count = warp::shuffle(found, 0);
        }
        () => (),
    }
    if is(Compaction::NoBarrierBeforeElements) {
        warp::sync();
    } else {
        thread::sync_threads();
    }
    if !is(Compaction::NoBarrierBeforeRead) && !is(Compaction::CountOfOneWarp) {
        count = counter.at(0);
    }
    count += u32::from(is(Compaction::ReadsBeyondCount));
    if is(Compaction::ResetAgainEarly) && t == 0 {
        counter.set(0, 0);
    }
    // Each thread counts the smaller kept values, so that the order of the atomics has no effect.
    if value % 2 == 1 {
        out.set(t, (0..count as usize).fold(0, |sum, i| sum + u32::from(kept.at(i) < value)));
    }
    if t == 0 {
        out.set(THREADS, counter.at(1));
    }
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_compaction(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let values = random(THREADS);
    let mut memory = Memory::new();
    let (out, inp) = (memory.zeroed("out", THREADS + 1), memory.input("inp", &values));
    run(&compaction(out, inp, fault), &mut memory, 1, 8 * THREADS)?;
    let odd = || values.iter().filter(|value| **value % 2 == 1);
    let rank = |value: &u32| if value % 2 == 1 { odd().filter(|other| *other < value).count() as u32 } else { 0 };
    let expected: Vec<u32> = values.iter().map(rank).chain([odd().sum()]).collect();
    Ok(memory.read(out) == expected)
}

faults! {
    const WARP_SCAN = "warp-synchronous scan", run_warp_scan;
    WarpScan {
        NoSyncAfterWrite = Race "no warp::sync between the writes and the reads of a step",
        NoSyncBeforeWrite = Race "no warp::sync between the reads of a step and the next writes",
        NoSyncAtAll = Race "no warp::sync",
        SyncOfHalf = Race "each half of the warp synchronizes alone",
        BallotForSync = Race "a vote instead of warp::sync",
        SyncOfActiveLanes = Divergence "only the lanes that add call warp::sync",
        OtherWarpEarly = Race "the second warp reads the sum of the first without a barrier",
        MaskWithoutLane = Operand "the mask lacks the calling lane",
    }
}

/// An inclusive scan of 64 values in shared memory. The lanes of a warp synchronize by `warp::sync` after each step.
#[kernel(threads = 64)]
fn warp_scan(out: GlobalMut<u32>, inp: Global<u32>, fault: u32) {
    let is = |planted: WarpScan| fault == planted as u32;
    let sums: SharedArray<u32> = Layout::new().array(THREADS);
    let t = thread::thread_idx_x() as usize;
    let lane = t % 32;
    let sync = || match () {
        () if is(WarpScan::NoSyncAtAll) => (),
        () if is(WarpScan::SyncOfHalf) => warp::sync_masked(if lane < 16 { 0xffff } else { 0xffff_0000 }),
        () if is(WarpScan::MaskWithoutLane) => warp::sync_masked(0x7fff_ffff),
        () if is(WarpScan::BallotForSync) => _ = warp::ballot(true),
        () => warp::sync(),
    };
    sums.set(t, inp.at(t));
    sync();
    for step in [1, 2, 4, 8, 16] {
        let adds = lane >= step;
        let other = if adds { sums.at(t - step) } else { 0 };
        if is(WarpScan::SyncOfActiveLanes) {
            if adds {
                warp::sync();
            } else {
                warp::ballot(true);
            }
        } else if !is(WarpScan::NoSyncBeforeWrite) {
            sync();
        }
        if adds {
            sums.set(t, sums.at(t) + other);
        }
        if !is(WarpScan::NoSyncAfterWrite) {
            sync();
        }
    }
    if !is(WarpScan::OtherWarpEarly) {
        thread::sync_threads();
    }
    out.set(t, sums.at(t) + if t >= 32 { sums.at(31) } else { 0 });
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_warp_scan(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let values = random(THREADS);
    let mut memory = Memory::new();
    let (out, inp) = (memory.zeroed("out", THREADS), memory.input("inp", &values));
    run(&warp_scan(out, inp, fault), &mut memory, 1, 4 * THREADS)?;
    let sum = |t: usize| values[..=t].iter().sum::<u32>();
    Ok(memory.read(out).into_iter().eq((0..THREADS).map(sum)))
}

faults! {
    const BYTES = "bytes", run_bytes;
    Bytes {
        NoBarrier = Race "no barrier between the bytes and the reads of the other warp's bytes",
        NoSyncOfLanes = Race "no barrier, and only bytes of the own warp are read",
        TwoThreadsOneByte = Race "two threads write one byte",
        WordOfFourLanes = Race "each lane updates its byte by reading and writing the word",
        GlobalByteTwice = Race "two warps write one byte of global memory",
        BeyondLastByte = OutOfBounds "one byte beyond the end",
        UnwrittenByte = Uninitialized "the last byte of a word is never written",
        OverwritesBytes = Race "bytes are overwritten before all threads have read them",
    }
}

/// Quantizes values to bytes in shared memory, and writes each byte at the mirrored position.
#[kernel(threads = 64)]
fn quantized(out: GlobalMut<u8>, inp: Global<u32>, fault: u32) {
    let is = |planted: Bytes| fault == planted as u32;
    let mut layout = Layout::new();
    let bytes: SharedArray<u8> = layout.array(THREADS);
    let words: SharedArray<u32> = layout.array(THREADS / 4);
    let t = thread::thread_idx_x() as usize;
    let byte = (inp.at(t) / 2) as u8;
    if t.is_multiple_of(4) {
        words.set(t / 4, 0);
    }
    warp::sync();
    match () {
        () if is(Bytes::WordOfFourLanes) => {
            words.set(t / 4, words.at(t / 4) | u32::from(byte) << (8 * (t % 4)));
            bytes.set(t, byte);
        }
        () if is(Bytes::TwoThreadsOneByte) => bytes.set(t / 2 * 2 + usize::from(t == 63), byte),
        () if is(Bytes::BeyondLastByte) => bytes.set(t + 1, byte),
        () if is(Bytes::UnwrittenByte) && t == 63 => (),
        () => bytes.set(t, byte),
    }
    if !is(Bytes::NoBarrier) && !is(Bytes::NoSyncOfLanes) {
        thread::sync_threads();
    }
    let at = if is(Bytes::NoSyncOfLanes) { t ^ 31 } else { THREADS - 1 - t };
    let other = bytes.at(at);
    if is(Bytes::OverwritesBytes) {
        bytes.set(t, 0);
    }
    out.set(if is(Bytes::GlobalByteTwice) { t % 63 } else { t }, other);
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_bytes(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let values = random(THREADS);
    let mut memory = Memory::new();
    let (out, inp) = (memory.zeroed("out", THREADS), memory.input("inp", &values));
    run(&quantized(out, inp, fault), &mut memory, 1, 2 * THREADS)?;
    Ok(memory.read(out).into_iter().eq(values.iter().rev().map(|value| (value / 2) as u8)))
}

faults! {
    const EXCHANGE = "exchange between lanes", run_exchange;
    Exchange {
        HalfMasks = Race "each half of the warp synchronizes alone, and the halves exchange values",
        HalfMasksAfterVote = Race "each half of the warp synchronizes alone after a vote of the warp, and the halves exchange values",
        PairMasks = Race "pairs of lanes synchronize, and neighbors of pairs exchange values",
        NoSync = Race "no warp::sync",
        MaskOfOtherLanes = Race "the even lanes synchronize, then the odd ones",
    }
}

/// Each lane reads the value of another lane, which all lanes have written before one synchronization.
#[kernel(threads = 32)]
fn exchange(out: GlobalMut<u32>, inp: Global<u32>, fault: u32) {
    let is = |planted: Exchange| fault == planted as u32;
    let values: SharedArray<u32> = Layout::new().array(32);
    let lane = warp::lane() as usize;
    values.set(lane, inp.at(lane));
    match () {
        () if is(Exchange::NoSync) => (),
        () if is(Exchange::HalfMasks) => warp::sync_masked(0xffff << (lane / 16 * 16)),
        () if is(Exchange::HalfMasksAfterVote) => {
            warp::ballot(true);
            warp::sync_masked(0xffff << (lane / 16 * 16));
        }
        () if is(Exchange::PairMasks) => warp::sync_masked(3 << (lane / 2 * 2)),
        () if is(Exchange::MaskOfOtherLanes) => warp::sync_masked(0x5555_5555 << (lane % 2)),
        () => warp::sync(),
    }
    out.set(lane, values.at(31 - lane));
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_exchange(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let values = random(32);
    let mut memory = Memory::new();
    let (out, inp) = (memory.zeroed("out", 32), memory.input("inp", &values));
    run(&exchange(out, inp, fault), &mut memory, 1, 128)?;
    Ok(memory.read(out).iter().eq(values.iter().rev()))
}

faults! {
    const FLAG = "flag in shared memory", run_flag;
    Flag {
        NoWriterFence = Race "no fence before the flag is set",
        NoReaderFence = Race "no fence after the flag is seen",
        FlagBeforeData = Race "the flag is set before the values are written",
        NoSyncBeforeFlag = Race "no warp::sync between the values and the flag",
        NoSyncAfterFlag = Race "no warp::sync between the flag and the reads",
        PlainFlag = Race "the flag is a plain write",
        PlainPoll = Livelock "the flag is a plain read",
        NeverSet = Livelock "the flag is never set",
        FlagNotCleared = Uninitialized "the flag is not cleared",
        NoBarrierAfterClear = Race "no barrier after the flag is cleared",
    }
}

/// The first warp passes values to the second warp with a flag in shared memory.
#[kernel(threads = 64)]
fn flag(out: GlobalMut<u32>, inp: Global<u32>, fault: u32) {
    let is = |planted: Flag| fault == planted as u32;
    let mut layout = Layout::new();
    let (values, flag): (SharedArray<u32>, SharedArray<u32>) = (layout.array(32), layout.array(1));
    let (t, lane) = (thread::thread_idx_x(), warp::lane() as usize);
    if t == 0 && !is(Flag::FlagNotCleared) {
        flag.set(0, 0);
    }
    if !is(Flag::NoBarrierAfterClear) {
        thread::sync_threads();
    }
    if t < 32 {
        if !is(Flag::FlagBeforeData) {
            values.set(lane, inp.at(lane));
        }
        if !is(Flag::NoSyncBeforeFlag) {
            warp::sync();
        }
        if lane == 0 && !is(Flag::NeverSet) {
            if !is(Flag::NoWriterFence) {
                fence::block();
            }
            if is(Flag::PlainFlag) {
                flag.set(0, 1);
            } else {
                flag.exchange(0, 1);
            }
        }
        if is(Flag::FlagBeforeData) {
            values.set(lane, inp.at(lane));
        }
    } else {
        if lane == 0 {
            let load = || if is(Flag::PlainPoll) { flag.at(0) } else { flag.fetch_or(0, 0) };
            while load() == 0 {}
            if !is(Flag::NoReaderFence) {
                fence::block();
            }
        }
        if !is(Flag::NoSyncAfterFlag) {
            warp::sync();
        }
        out.set(lane, values.at(31 - lane));
    }
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_flag(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let values = random(32);
    let mut memory = Memory::new();
    let (out, inp) = (memory.zeroed("out", 32), memory.input("inp", &values));
    run(&flag(out, inp, fault), &mut memory, 1, 256)?;
    Ok(memory.read(out).iter().eq(values.iter().rev()))
}
