//! A histogram of each block in shared memory, merged by atomics. The last block to arrive turns it into offsets.

use crate::faults;
#[cfg(not(target_arch = "nvptx64"))]
use crate::{Memory, Report, Run};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, fence, kernel, thread};

const THREADS: usize = 64;
const BINS: usize = 64;
const BLOCKS: usize = 4;
const PER_THREAD: usize = 4;
const COUNT: usize = BLOCKS * THREADS * PER_THREAD;

faults! {
    const HISTOGRAM = "histogram merged by atomics", run_histogram;
    Histogram {
        NoBarrierAfterClear = Race "no barrier after the bins in shared memory are cleared",
        NoBarrierBeforeMerge = Race "no barrier between the counts and the merge",
        NotCleared = Uninitialized "the bins in shared memory are not cleared",
        PlainCount = Race "the bins in shared memory are plain",
        PlainMerge = Race "the merge is a plain read and write",
        NonatomicMerge = Wrong "the merge is an atomic read and an atomic write",
        BeyondLastBin = OutOfBounds "a value beyond the last bin",
        NoBarrierBeforeTicket = Wrong "no barrier between the merge and the ticket",
        NoWriterFence = Wrong "no fence before the ticket",
        NoReaderFence = Wrong "no fence after the ticket",
        BlockFences = Wrong "fences of block scope around the ticket",
        ClearedByBlockZero = Race "block 0 clears the merged bins without an order",
        MergesHalf = Wrong "only the first warp merges",
        MergesTwice = Wrong "two threads merge a bin",
        PlainOffsets = Race "the last block reads the merged bins by plain reads without a fence",
        TicketOfEachWarp = Wrong "each warp takes a ticket",
    }
}

#[kernel(threads = 64)]
fn histogram(offsets: GlobalMut<u32>, bins: GlobalMut<u32>, arrived: GlobalMut<u32>, inp: Global<u32>, fault: u32) {
    let is = |planted: Histogram| fault == planted as u32;
    let mut layout = Layout::new();
    let counts: SharedArray<u32> = layout.array(BINS);
    let is_last: SharedArray<u32> = layout.array(1);
    let t = thread::thread_idx_x() as usize;
    if !is(Histogram::NotCleared) {
        counts.set(t, 0);
    }
    if is(Histogram::ClearedByBlockZero) && thread::block_idx_x() == 0 {
        bins.set(t, 0);
    }
    if !is(Histogram::NoBarrierAfterClear) {
        thread::sync_threads();
    }
    for i in 0..PER_THREAD {
        let bin = inp.at(thread::index_1d() * PER_THREAD + i) as usize + usize::from(is(Histogram::BeyondLastBin));
        if is(Histogram::PlainCount) {
            counts.set(bin, counts.at(bin) + 1);
        } else {
            counts.fetch_add(bin, 1);
        }
    }
    if !is(Histogram::NoBarrierBeforeMerge) {
        thread::sync_threads();
    }
    let count = counts.at(t);
    match () {
        () if is(Histogram::PlainMerge) => bins.set(t, bins.at(t) + count),
        () if is(Histogram::NonatomicMerge) => bins.store_relaxed(t, bins.load_relaxed(t) + count),
        () if is(Histogram::MergesHalf) && t >= 32 => (),
        () if is(Histogram::MergesTwice) => {
            bins.fetch_add(t, count);
            bins.fetch_add(t & !1, if t % 2 == 1 { counts.at(t & !1) } else { 0 });
        }
        () => _ = bins.fetch_add(t, count),
    }
    if !is(Histogram::NoBarrierBeforeTicket) {
        thread::sync_threads();
    }
    let fence_of = || if is(Histogram::BlockFences) { fence::block() } else { fence::device() };
    if t == 0 {
        if !is(Histogram::NoWriterFence) {
            fence_of();
        }
        let ticket = arrived.fetch_add(0, 1);
        if !is(Histogram::NoReaderFence) && !is(Histogram::PlainOffsets) {
            fence_of();
        }
        is_last.set(0, u32::from(ticket == thread::grid_dim_x() - 1));
    } else if is(Histogram::TicketOfEachWarp) && t == 32 {
        arrived.fetch_add(0, 1);
    }
    thread::sync_threads();
    if is_last.at(0) == 1 {
        let read = |bin| if is(Histogram::PlainOffsets) { bins.at(bin) } else { bins.load_relaxed(bin) };
        offsets.set(t, (0..t).fold(0, |sum, bin| sum + read(bin)));
    }
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_histogram(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let values: Vec<u32> = (0..COUNT).map(|i| (i * 7919 % 4093 % BINS) as u32).collect();
    let mut memory = Memory::new();
    let (offsets, bins) = (memory.zeroed("offsets", BINS), memory.zeroed("bins", BINS));
    let arrived = memory.zeroed("arrived", 1);
    let inp = memory.input("inp", &values);
    run(&histogram(offsets, bins, arrived, inp, fault), &mut memory, BLOCKS as u32, 512)?;
    let below = |bin: usize| values.iter().filter(|value| (**value as usize) < bin).count() as u32;
    Ok(memory.read(offsets).into_iter().eq((0..BINS).map(below)))
}
