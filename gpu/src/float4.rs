//! Index mapping of elementwise kernels that access arrays of the storage type and of f32 together.
//!
//! One 16-byte vector of bf16 corresponds to two 16-byte vectors of f32. If each thread took eight consecutive
//! elements, neighbouring threads would access f32 arrays 32 bytes apart. Each access would use half of a 32-byte
//! sector, and every sector would be transferred twice. Here the threads of a block take four consecutive elements
//! each, so every access is coalesced. In bf16 each thread then takes four more.

use core::marker::PhantomData;
use core::ops::Range;
use cuda_std::{Element, device, thread};

/// Threads of a block.
const THREADS: usize = 256;

/// Returns the number of blocks for n elements.
pub const fn grid<T: Element>(n: usize) -> u32 {
    n.div_ceil(THREADS * T::PACKET) as u32
}

/// The elements of one thread in its block's tile of `THREADS * T::PACKET` elements.
#[derive(Clone, Copy)]
pub struct Float4Tile<T> {
    /// Index of the tile's first element.
    start: usize,
    thread: usize,
    element: PhantomData<T>,
}

#[device]
impl<T: Element> Float4Tile<T> {
    /// Number of 4-element vectors of a thread: 2 in bf16, 1 in f32.
    pub const VECTORS: usize = T::PACKET / 4;
    /// Elements of a tile.
    const LEN: usize = THREADS * T::PACKET;

    /// Returns the calling thread's elements if tile i belongs to block i.
    pub fn of_thread() -> Self {
        Self::of_block(thread::block_idx_x())
    }

    /// Returns the calling thread's elements in tile number `block`.
    pub fn of_block(block: u32) -> Self {
        Self { start: block as usize * Self::LEN, thread: thread::thread_idx_x() as usize, element: PhantomData }
    }

    /// Returns whether all elements of the tile are below n.
    pub fn is_full(self, n: usize) -> bool {
        self.start + Self::LEN <= n
    }

    /// Returns the index of the first element of vector `k` of the thread, in a full tile.
    pub fn vector(self, k: usize) -> usize {
        self.start + (k * THREADS + self.thread) * 4
    }

    /// Returns the thread's elements in a partial tile: at most `T::PACKET`, all below n.
    pub fn tail(self, n: usize) -> Range<usize> {
        let first = self.start + self.thread * T::PACKET;
        first..n.min(first + T::PACKET)
    }

    /// Processes the thread's elements below n: in a full tile, vectors of four elements of N arrays, and otherwise one element after
    /// the other.
    ///
    /// All vectors are loaded before the first store, because the compiler must assume that the arrays alias.
    pub fn process<const N: usize>(
        self,
        n: usize,
        load_four: impl Fn(usize) -> [[f32; 4]; N],
        store_four: impl Fn(usize, [[f32; 4]; N]),
        process_one: impl Fn(usize),
    ) {
        if self.is_full(n) {
            let mut vectors = [[[0.0; 4]; N]; 2];
            for k in 0..Self::VECTORS {
                vectors[k] = load_four(self.vector(k));
            }
            for k in 0..Self::VECTORS {
                store_four(self.vector(k), vectors[k]);
            }
        } else {
            for i in self.tail(n) {
                process_one(i);
            }
        }
    }
}
