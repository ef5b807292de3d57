//! `sm_90a`: memory barriers, TMA, warpgroup products, clusters.
//!
//! What is asynchronous on the device happens here as late as it can: a load lands when no thread of its cluster can go
//! on, a product is computed and a store is made when a thread waits for it. Until then the target of a load and the
//! accumulators of a product are NaN, so that what is used too early shows.

mod mbarrier;
mod tma;
mod wgmma;

use super::LANES;
use super::access::check;
use super::block::{Block, fail, suspend, with, with_peer};
use super::checker::Kind;
use super::collective::{Operation, Slot, Slots, Wait, collective};
use super::report::{Fault, Report, Site};
use mbarrier::MBarrier;
use std::array;
use std::collections::{BTreeMap, VecDeque};
use std::panic::Location;
use tma::{Load, Store};
use wgmma::Warpgroup;

pub use super::access::load128 as load_x4;
pub use mbarrier::{
    fence_mbarrier_init, mbarrier_arrive, mbarrier_arrive_cluster, mbarrier_arrive_expect, mbarrier_init,
    mbarrier_try_wait,
};
pub use tma::{
    tensor_map, tma_commit, tma_load_2d, tma_load_2d_multicast, tma_load_3d, tma_prefetch, tma_store_2d, tma_wait,
    tma_wait_read,
};
pub use wgmma::{
    catch_early, left_x4, operand, operand_by_rows, settle_n64, settle_n128, settle_n192, settle_n256, wgmma_commit,
    wgmma_fence, wgmma_n64, wgmma_n128, wgmma_n192, wgmma_n256, wgmma_wait, wgmma_with_n64, wgmma_with_n128,
    wgmma_with_n192, wgmma_with_n256,
};

/// What a block has of all this.
#[derive(Default)]
pub struct State {
    /// By their place in shared memory.
    barriers: BTreeMap<usize, MBarrier>,
    /// Into this block's shared memory, oldest first.
    loads: VecDeque<Load>,
    /// By thread, oldest first.
    stores: BTreeMap<usize, Vec<Store>>,
    /// Groups of stores closed so far, by thread.
    store_groups: BTreeMap<usize, usize>,
    warpgroups: BTreeMap<usize, Warpgroup>,
    /// Threads of this block that wait at the cluster's barrier.
    at_cluster_barrier: Vec<usize>,
}

impl State {
    /// What is wrong with a block that ends in this state.
    fn left_over(&self) -> Option<(Fault, Option<usize>, Site, String)> {
        let load = self.loads.front().map(|load| {
            let text = format!("ends before the TMA load issued at {} has landed", super::report::Line(load.at()));
            (Fault::AsyncCopy, None, load.at(), text)
        });
        let store = || {
            let (thread, store) = self.stores.iter().find_map(|(thread, stores)| Some((*thread, stores.first()?)))?;
            let text = format!("ends without waiting for its TMA store at {}", super::report::Line(store.at()));
            Some((Fault::AsyncCopy, Some(thread), store.at(), text))
        };
        let product = || {
            let (thread, at) = self.warpgroups.iter().find_map(|(group, state)| state.under_way(*group))?;
            let text = format!("ends without waiting for its product at {}", super::report::Line(at));
            Some((Fault::Accumulators, Some(thread), at, text))
        };
        load.or_else(store).or_else(product)
    }

    /// What the barrier at this place in shared memory still needs to end its phase.
    pub fn missing(&self, offset: usize) -> String {
        self.barriers.get(&offset).map_or_else(String::new, MBarrier::missing)
    }
}

/// Lets one load under way into `block`'s shared memory land; false if there is none.
pub fn land_one(block: &mut Block) -> bool {
    tma::land_one(block)
}

/// Offset of `pointer` in the running block's shared memory, if the `bytes` there are in it.
fn shared_offset<T>(pointer: *const T, bytes: usize, align: usize, at: Site, what: &str) -> usize {
    let (start, size) = with(|block| (block.shared_base().addr(), block.shared().len()));
    let offset = pointer.addr().wrapping_sub(start);
    let line = super::report::Line(at);
    if offset >= size || offset + bytes > size {
        let message = format!("out of bounds: {what} of {bytes} bytes outside shared memory, at {line}");
        fail(Fault::OutOfBounds, at, None, message);
    }
    if !offset.is_multiple_of(align) {
        let message = format!("not aligned to {align} bytes: {what} at shared memory + {offset}, at {line}");
        fail(Fault::Misaligned, at, None, message);
    }
    offset
}

/// Where the bytes at `address` (of 128-byte rows) lie in 128-byte swizzle, as TMA and wgmma compute it.
#[inline(always)]
fn swizzle(address: usize) -> usize {
    address ^ (address >> 7 & 7) << 4
}

/// Pointers to tiles and barriers are what they are.
pub fn window<T>(pointer: *mut T) -> *mut T {
    pointer
}

pub fn fence_async_proxy() {
    with(|block| {
        if let Some(checker) = &mut block.checker {
            checker.proxy_fenced(block.current);
        }
    });
}

/// N within what `setmaxnreg` takes.
const fn registers<const N: u32>() {
    const { assert!(N.is_multiple_of(8) && N >= 24 && N <= 256, "setmaxnreg takes multiples of 8 in 24..=256") };
}

pub fn take_registers<const N: u32>() {
    registers::<N>();
}

pub fn give_registers<const N: u32>() {
    registers::<N>();
}

pub fn cluster_rank() -> u32 {
    with(|block| block.rank as u32)
}

#[track_caller]
pub fn cluster_sync() {
    let wait = Wait { operation: Operation::ClusterSync, at: Location::caller() };
    let (blocks, thread) = with(|block| {
        block.hopper.at_cluster_barrier.push(block.current);
        block.wait(wait);
        (block.cluster.len(), block.current)
    });
    let everyone = (0..blocks).all(|rank| {
        with_peer(rank, |block| block.hopper.at_cluster_barrier.len() == block.threads as usize).unwrap_or(false)
    });
    if !everyone {
        return suspend();
    }
    let own = with(|block| block.rank);
    with(Block::cluster_synced);
    for rank in 0..blocks {
        with_peer(rank, |block| {
            for waiting in std::mem::take(&mut block.hopper.at_cluster_barrier) {
                if (rank, waiting) != (own, thread) {
                    block.wake(waiting);
                }
            }
        });
    }
}

/// # Safety
/// `row` must be valid for writes of 16 bytes and 16-byte aligned.
#[track_caller]
pub unsafe fn stmatrix_x4(row: *mut u32, words: [u32; 4]) {
    let wait = Wait { operation: Operation::StMatrix, at: Location::caller() };
    check(Kind::Write, row.addr(), 16, 16, wait.at);
    let deposit = |slot: &mut Slot| slot.0[..4].copy_from_slice(&words);
    let deal = |slots: &mut Slots| {
        let words: [[u32; 4]; LANES] = array::from_fn(|lane| array::from_fn(|i| slots[lane].0[i]));
        for (lane, slot) in slots.iter_mut().enumerate() {
            for i in 0..4 {
                slot.0[i] = words[lane % 8 * 4 + i][lane / 8];
            }
        }
    };
    let row_words = collective(wait, deposit, deal, |slots, lane| array::from_fn::<u32, 4, _>(|i| slots[lane].0[i]));
    // SAFETY: the caller's.
    unsafe { row.cast::<[u32; 4]>().write_unaligned(row_words) };
}

/// Stops the kernel if the cluster has no block `rank`; notes that the running thread reaches into it.
fn reach(rank: u32, at: Site) -> usize {
    let blocks = with(|block| block.cluster.len());
    if rank as usize >= blocks {
        let message = format!("names block {rank} of a cluster of {blocks}, at {}", super::report::Line(at));
        fail(Fault::Operand, at, None, message);
    }
    with(|block| {
        if let (true, Some(checker)) = (rank as usize != block.rank, &mut block.checker) {
            checker.reaches_into(rank as usize, block.current, at);
        }
    });
    rank as usize
}

impl Block {
    /// The report of a block that ended with something under way.
    pub fn left_over(&self) -> Option<Report> {
        let copy = || {
            let (thread, at) =
                self.copies.iter().enumerate().find_map(|(thread, copies)| Some((thread, copies.oldest()?)))?;
            let text = format!("ends without waiting for its asynchronous copy at {}", super::report::Line(at));
            Some((Fault::AsyncCopy, Some(thread), at, text))
        };
        let (fault, thread, at, message) = self.hopper.left_over().or_else(copy)?;
        let report = self.report_of(fault, Some(at), None, message);
        Some(Report { thread: thread.map(|thread| thread as u32), ..report })
    }
}
