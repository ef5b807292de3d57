//! A scan and a radix sort that read and write each element as few times as possible: blocks publish prefix sums while they run.
//!
//! Both rely on *decoupled look-back*. The input is divided into tiles. A block publishes the sum of its tile as soon as it knows it, and
//! then adds up what the tiles before it have published, going back until one of them has published the sum of everything up to it. The
//! sums travel while other blocks load, so a single pass over the data suffices.
//!
//! [`scan`] is the simpler one. [`sort`] looks back for each of the 256 values of a digit at once.

#![cfg_attr(target_arch = "nvptx64", no_std, feature(abi_gpu_kernel, asm_experimental_arch))]

pub mod histogram;
pub mod scan;
pub mod sort;

use cuda_std::{GlobalMut, SharedArray, thread};

/// Returns the number of this block's tile.
///
/// Tiles are numbered in the order in which blocks start: the tiles before this one belong to blocks that are running or have finished, so
/// waiting for them ends. CUDA does not promise that blocks start in the order of their index.
#[inline(always)]
fn tile_of_block(tickets: GlobalMut<u32>, word: SharedArray<u32>) -> u32 {
    if thread::thread_idx_x() == 0 {
        word.set(0, tickets.fetch_add(0, 1));
    }
    thread::sync_threads();
    word.at(0)
}
