//! A reduction by the last block to arrive, and a split-K GEMM.

use crate::faults;
#[cfg(not(target_arch = "nvptx64"))]
use crate::{Memory, Report, Run};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, fence, kernel, thread, warp};

/// Columns of the input: one for each thread.
const COLUMNS: usize = 64;
const ROWS_PER_BLOCK: usize = 2;
const BLOCKS: usize = 6;

faults! {
    const LAST_BLOCK = "reduction by the last block", run_last_block;
    LastBlock {
        NoBarrierBeforeTicket = Race "no barrier between the partial sums and the ticket",
        NoWriterFence = Race "no fence before the ticket",
        NoReaderFence = Race "no fence after the ticket",
        WriterFenceOfBlock = Race "fence of block scope before the ticket",
        ReaderFenceOfBlock = Race "fence of block scope after the ticket",
        TicketBeforeData = Race "the ticket is taken before the partial sums are written",
        TicketOfEachThread = Missed "each thread takes a ticket",
        TicketOfEachWarp = Uninitialized "each warp takes a ticket",
        LastIsNumberOfBlocks = Wrong "the last ticket is taken for the number of blocks",
        LastIsOneTooEarly = Uninitialized "the block before the last adds the sums",
        NoBarrierAfterTicket = Race "the ticket is read from shared memory without a barrier",
        CounterNotReset = Wrong "the counter is not reset for the next launch",
        ResetByFirst = Missed "the first block resets the counter",
        ResetBeforeTicket = Wrong "block 0 clears the counter at its start",
        PlainCounter = Race "the counter is a plain read and write",
        FencesBeforeBarrier = Missed "all threads fence before the barrier, but not the thread that takes the ticket",
        FencesAfterBarrier = Missed "all threads fence after the barrier, but not the thread that has taken the ticket",
        FenceOfOtherThread = Race "another thread fences after the barrier",
        LastBlockByNumber = Uninitialized "the block with the highest number adds the sums",
    }
}

/// Sums the columns of a matrix. Each block sums some rows, and the last block to arrive adds the partial sums.
#[kernel(threads = 64)]
fn last_block(out: GlobalMut<u32>, partial: GlobalMut<u32>, arrived: GlobalMut<u32>, inp: Global<u32>, fault: u32) {
    let is = |planted: LastBlock| fault == planted as u32;
    let mut layout = Layout::new();
    let is_last: SharedArray<u32> = layout.array(1);
    let t = thread::thread_idx_x() as usize;
    let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
    let take = || {
        if is(LastBlock::PlainCounter) {
            let ticket = arrived.at(0);
            arrived.set(0, ticket + 1);
            ticket
        } else {
            arrived.fetch_add(0, 1)
        }
    };
    if is(LastBlock::ResetBeforeTicket) && block == 0 && t == 0 {
        arrived.store_relaxed(0, 0);
    }
    let first = block as usize * ROWS_PER_BLOCK;
    let sum = (first..first + ROWS_PER_BLOCK).fold(0, |sum, row| sum + inp.at(row * COLUMNS + t));
    let write = || partial.set(block as usize * COLUMNS + t, sum);
    if !is(LastBlock::TicketBeforeData) {
        write();
    }
    if is(LastBlock::FencesBeforeBarrier) {
        fence::device();
    }
    if !is(LastBlock::NoBarrierBeforeTicket) {
        thread::sync_threads();
    }
    if is(LastBlock::FenceOfOtherThread) && t == 1 {
        fence::device();
    }
    if t == 0 {
        let fences =
            !is(LastBlock::NoWriterFence) && !is(LastBlock::FencesBeforeBarrier) && !is(LastBlock::FenceOfOtherThread);
        if is(LastBlock::WriterFenceOfBlock) {
            fence::block();
        } else if fences {
            fence::device();
        }
        let ticket = take();
        if is(LastBlock::ReaderFenceOfBlock) {
            fence::block();
        } else if !is(LastBlock::NoReaderFence) && !is(LastBlock::FencesAfterBarrier) {
            fence::device();
        }
        let last = match () {
            () if is(LastBlock::LastIsNumberOfBlocks) => ticket == blocks,
            () if is(LastBlock::LastIsOneTooEarly) => ticket == blocks - 2,
            () if is(LastBlock::LastBlockByNumber) => block == blocks - 1,
            () => ticket == blocks - 1,
        };
        if is(LastBlock::ResetByFirst) && ticket == 0 {
            arrived.store_relaxed(0, 0);
        }
        is_last.set(0, u32::from(last));
    } else if is(LastBlock::TicketOfEachThread) || is(LastBlock::TicketOfEachWarp) && t == 32 {
        take();
    }
    if is(LastBlock::TicketBeforeData) {
        write();
    }
    if !is(LastBlock::NoBarrierAfterTicket) {
        thread::sync_threads();
    }
    if is(LastBlock::FencesAfterBarrier) {
        fence::device();
    }
    if is_last.at(0) == 1 {
        out.set(t, (0..blocks as usize).fold(0, |sum, b| sum + partial.at(b * COLUMNS + t)));
        let resets = !is(LastBlock::CounterNotReset) && !is(LastBlock::ResetByFirst);
        if t == 0 && resets {
            arrived.store_relaxed(0, 0);
        }
    }
}

/// Sums two matrices, one after the other.
#[cfg(not(target_arch = "nvptx64"))]
fn run_last_block(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let mut memory = Memory::new();
    let (out, arrived) = (memory.zeroed("out", COLUMNS), memory.zeroed("arrived", 1));
    for launch in 0..2 {
        let partial = memory.output("partial", BLOCKS * COLUMNS);
        let rows = BLOCKS * ROWS_PER_BLOCK;
        let values: Vec<u32> = (0..rows * COLUMNS).map(|i| (i * 7919 % 101 + launch) as u32).collect();
        let inp = memory.input("inp", &values);
        run(&last_block(out, partial, arrived, inp, fault), &mut memory, BLOCKS as u32, 16)?;
        let sum = |t| values.iter().skip(t).step_by(COLUMNS).sum::<u32>();
        if !memory.read(out).into_iter().eq((0..COLUMNS).map(sum)) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Side of a tile of the result.
const TILE: usize = 8;
const TILES: usize = 3;
const SPLITS: usize = 4;
/// Terms of a sum that a block adds.
const DEPTH: usize = 4;

faults! {
    const SPLIT_K = "split-K GEMM", run_split_k;
    SplitK {
        RelaxedAdd = Race "the counter is increased without a release",
        AddAfterBlockFence = Race "the counter is increased after a fence of block scope",
        RelaxedWait = Race "the counter is read without an acquire",
        WaitThenBlockFence = Race "the counter is read before a fence of block scope",
        NoBarrierBeforeRelease = Race "no barrier between the partial tile and the counter",
        NoBarrierAfterWait = Race "no barrier between the wait and the reads of the partial tiles",
        WarpSyncAfterWait = Race "warp::sync instead of a barrier after the wait",
        CounterOfNextTile = Race "the counter of another tile is increased",
        WaitsForOneTooFew = Uninitialized "the wait ends one block too early",
        WaitsForOneTooMany = Deadlock "the wait is for one block too many",
        ReleaseOfEachThread = Uninitialized "each thread increases the counter",
        ReleaseBeforeData = Race "the counter is increased before the partial tile is written",
        SharedPartialTile = Race "all splits write one partial tile",
        AddsToOut = Race "each split adds to the result without a wait",
        CounterNotReset = Uninitialized "the counter is not reset for the next launch",
        ResetBeforeWait = Deadlock "the counter is reset before the wait",
        NoWait = Race "no wait",
        ReadsTileOfOtherSplit = Wrong "a partial tile is added twice, and another one never",
    }
}

/// Computes the tiles of a · b. Block (tile, split) adds the products of one part of k. The last split of a tile waits for the others.
#[kernel(threads = 64)]
fn split_k(
    out: GlobalMut<u32>,
    partial: GlobalMut<u32>,
    counters: GlobalMut<u32>,
    a: Global<u32>,
    b: Global<u32>,
    fault: u32,
) {
    let is = |planted: SplitK| fault == planted as u32;
    let t = thread::thread_idx_x() as usize;
    let (tile, split) = (thread::block_idx_x() as usize / SPLITS, thread::block_idx_x() as usize % SPLITS);
    let (row, column) = (t / TILE, t % TILE);
    let k = SPLITS * DEPTH;
    let sum = (split * DEPTH..(split + 1) * DEPTH)
        .fold(0, |sum, i| sum + a.at((tile * TILE + row) * k + i) * b.at(i * TILE + column));
    let at =
        |split: usize| (if is(SplitK::SharedPartialTile) { tile } else { tile * SPLITS + split }) * TILE * TILE + t;
    if is(SplitK::AddsToOut) {
        let i = tile * TILE * TILE + t;
        out.set(i, out.at(i) + sum);
        return;
    }
    if split < SPLITS - 1 {
        let counter = if is(SplitK::CounterOfNextTile) { (tile + 1) % TILES } else { tile };
        if !is(SplitK::ReleaseBeforeData) {
            partial.set(at(split), sum);
        }
        if !is(SplitK::NoBarrierBeforeRelease) {
            thread::sync_threads();
        }
        if t == 0 && (is(SplitK::RelaxedAdd) || is(SplitK::AddAfterBlockFence)) {
            if is(SplitK::AddAfterBlockFence) {
                fence::block();
            }
            counters.fetch_add(counter, 1);
        } else if t == 0 || is(SplitK::ReleaseOfEachThread) {
            counters.release_add(counter, 1);
        }
        if is(SplitK::ReleaseBeforeData) {
            partial.set(at(split), sum);
        }
        return;
    }
    if t == 0 && !is(SplitK::NoWait) {
        let others = SPLITS as u32 - 1;
        if is(SplitK::ResetBeforeWait) {
            counters.store_relaxed(tile, 0);
        }
        if is(SplitK::RelaxedWait) || is(SplitK::WaitThenBlockFence) {
            while counters.load_relaxed(tile) != others {}
            if is(SplitK::WaitThenBlockFence) {
                fence::block();
            }
        } else {
            let few = u32::from(is(SplitK::WaitsForOneTooFew));
            let many = u32::from(is(SplitK::WaitsForOneTooMany));
            counters.acquire_wait_until(tile, |count| count >= others - few + many);
        }
        if !is(SplitK::CounterNotReset) {
            counters.store_relaxed(tile, 0);
        }
    }
    if is(SplitK::WarpSyncAfterWait) {
        warp::sync();
    } else if !is(SplitK::NoBarrierAfterWait) {
        thread::sync_threads();
    }
    let splits = 0..SPLITS - 1;
    let read = |split| partial.at(at(if is(SplitK::ReadsTileOfOtherSplit) { split / 2 } else { split }));
    out.set(tile * TILE * TILE + t, splits.fold(sum, |sum, split| sum + read(split)));
}

/// Multiplies two pairs of matrices, one after the other.
#[cfg(not(target_arch = "nvptx64"))]
fn run_split_k(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let mut memory = Memory::new();
    let (out, counters) = (memory.zeroed("out", TILES * TILE * TILE), memory.zeroed("counters", TILES));
    let k = SPLITS * DEPTH;
    for launch in 0..2 {
        let partial = memory.output("partial", TILES * SPLITS * TILE * TILE);
        let values = |count: usize, factor: usize| -> Vec<u32> {
            (0..count).map(|i| (i * factor % 17 + launch) as u32).collect()
        };
        let (left, right) = (values(TILES * TILE * k, 7919), values(k * TILE, 104_729));
        let (a, b) = (memory.input("a", &left), memory.input("b", &right));
        memory.write(out, &[0; TILES * TILE * TILE]).expect("the size of the buffer");
        let blocks = (TILES * SPLITS) as u32;
        run(&split_k(out, partial, counters, a, b, fault), &mut memory, blocks, 0)?;
        let expected = (0..TILES * TILE * TILE)
            .map(|i| (0..k).map(|j| left[i / TILE * k + j] * right[j * TILE + i % TILE]).sum::<u32>());
        if !memory.read(out).into_iter().eq(expected) {
            return Ok(false);
        }
    }
    Ok(true)
}
