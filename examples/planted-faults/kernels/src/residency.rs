//! Waits for blocks that start only when other blocks have ended.

use crate::faults;
#[cfg(not(target_arch = "nvptx64"))]
use crate::{Memory, Report, Run};
use cuda_std::{GlobalMut, kernel, thread, warp};

/// An H100 holds one block of this much shared memory on each of its 132 SMs.
const SHARED: usize = 200 << 10;
const RESIDENT: usize = 132;

faults! {
    const RESIDENCY = "more blocks than the GPU holds", run_residency;
    Residency {
        BarrierOfAll = Deadlock "a barrier of one block more than the GPU holds",
        StaticOrder = Deadlock "each block waits for the next one",
        SpinsForLast = Livelock "each block polls until the last one has set a flag",
    }
}

#[kernel(threads = 32)]
fn residency(counter: GlobalMut<u32>, fault: u32) {
    let is = |planted: Residency| fault == planted as u32;
    let (block, blocks) = (thread::block_idx_x(), thread::grid_dim_x());
    if warp::lane() != 0 {
        return;
    }
    match () {
        () if is(Residency::BarrierOfAll) => {
            counter.release_add(0, 1);
            counter.acquire_wait(0, blocks);
        }
        () if is(Residency::StaticOrder) => {
            counter.acquire_wait(0, blocks - 1 - block);
            counter.release_add(0, 1);
        }
        () if is(Residency::SpinsForLast) => {
            if block == blocks - 1 {
                counter.store_release(0, 1);
            }
            while counter.load_acquire(0) == 0 {}
        }
        // Each block waits for the one before.
        () => {
            counter.acquire_wait(0, block);
            counter.release_add(0, 1);
        }
    }
}

#[cfg(not(target_arch = "nvptx64"))]
fn run_residency(fault: u32, run: Run<'_>) -> Result<bool, Report> {
    let mut memory = Memory::new();
    let counter = memory.zeroed("counter", 1);
    run(&residency(counter, fault), &mut memory, RESIDENT as u32 + 1, SHARED)?;
    Ok(memory.read(counter) == [RESIDENT as u32 + 1])
}
