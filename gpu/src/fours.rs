//! Which elements a thread takes where arrays of the storage type and of f32 go side by side.
//!
//! A packet of bf16 is two of f32. If a thread took eight elements in a row, its two accesses to each array of f32 would be 32
//! bytes from its neighbour's: half a sector each, so that every sector travels twice. Hence fours: the threads of a block
//! take four elements each, one next to the other, and then, in bf16, four more each.

use core::marker::PhantomData;
use core::ops::Range;
use cuda_std::{Element, thread};

/// Of a block.
const THREADS: usize = 256;

/// Blocks for n elements.
pub const fn grid<T: Element>(n: usize) -> u32 {
    n.div_ceil(THREADS * T::PACKET) as u32
}

/// A thread's share of its block's `THREADS * T::PACKET` elements.
#[derive(Clone, Copy)]
pub struct Fours<T> {
    block: usize,
    thread: usize,
    element: PhantomData<T>,
}

impl<T: Element> Fours<T> {
    /// Fours of a thread: 2 in bf16, 1 in f32.
    pub const PARTS: usize = T::PACKET / 4;
    const BLOCK: usize = THREADS * T::PACKET;

    #[inline(always)]
    pub fn of_thread() -> Self {
        Self::in_block(thread::block_idx_x())
    }

    /// As the thread of block number `block` of those that share the elements.
    #[inline(always)]
    pub fn in_block(block: u32) -> Self {
        Self { block: block as usize * Self::BLOCK, thread: thread::thread_idx_x() as usize, element: PhantomData }
    }

    /// Whether all of the block's elements are below n.
    #[inline(always)]
    pub fn is_whole(self, n: usize) -> bool {
        self.block + Self::BLOCK <= n
    }

    /// First element of four number `part`, in a block that is whole.
    #[inline(always)]
    pub fn first(self, part: usize) -> usize {
        self.block + (part * THREADS + self.thread) * 4
    }

    /// The thread's elements in a block that is not: `T::PACKET` of them, as far as they are below n.
    #[inline(always)]
    pub fn rest(self, n: usize) -> Range<usize> {
        let first = self.block + self.thread * T::PACKET;
        first..n.min(first + T::PACKET)
    }
}
