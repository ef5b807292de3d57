//! Memory fences.
//!
//! A fence orders nothing by itself. It orders this thread's earlier memory accesses before its later ones for the threads that it
//! exchanges values with by atomics:
//! * An atomic write after a fence releases everything before the fence.
//! * A fence after an atomic read acquires what the write of the value has released.
//!
//! The scope names the threads that it orders. [`device`] suits communication between blocks:
//! ```
//! # use cuda_std::{GlobalMut, fence, kernel, thread};
//! /// The last block to arrive adds the results of all blocks.
//! #[kernel(threads = 32)]
//! fn sums(results: GlobalMut<f32>, total: GlobalMut<f32>, arrived: GlobalMut<u32>) {
//!     if thread::thread_idx_x() == 0 {
//!         results.set(thread::block_idx_x() as usize, 1.0);
//!         fence::device(); // releases the result with the next atomic
//!         if arrived.fetch_add(0, 1) == thread::grid_dim_x() - 1 {
//!             fence::device(); // acquires the results of the blocks that arrived before
//!             total.set(0, (0..thread::grid_dim_x() as usize).fold(0.0, |sum, i| sum + results.at(i)));
//!         }
//!     }
//! }
//! # use cuda_std::emulate::Memory;
//! # let mut memory = Memory::new();
//! # let (results, total) = (memory.output("results", 4), memory.output("total", 1));
//! # let arrived = memory.zeroed("arrived", 1);
//! # sums(results, total, arrived).emulate_checked(&mut memory, [4, 1, 1], 0).unwrap();
//! # assert_eq!(memory.read(total), [4.0]);
//! ```

use crate::backend;

macro_rules! fences {
    ($($(#[$doc:meta])* $name:ident = $backend:ident;)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name() {
            backend::$backend();
        }
    )*};
}

fences! {
    /// Orders accesses for the threads of this block (`fence.acq_rel.cta`).
    block = fence_block;
    /// Orders accesses for all threads of this GPU (`fence.acq_rel.gpu`).
    device = fence_device;
    /// Orders accesses for all threads, also those of other GPUs and of the host (`fence.acq_rel.sys`).
    system = fence_system;
    /// Same as [`block`](fn@block), and all such fences have one order (`fence.sc.cta`): a fence acquires what precedes the earlier ones.
    block_seq_cst = fence_sc_block;
    /// Same as [`device`], and all such fences have one order (`fence.sc.gpu`): a fence acquires what precedes the earlier ones. It is
    /// the `__threadfence` of CUDA.
    device_seq_cst = fence_sc_device;
    /// Same as [`system`], and all such fences have one order (`fence.sc.sys`): a fence acquires what precedes the earlier ones.
    system_seq_cst = fence_sc_system;
}
