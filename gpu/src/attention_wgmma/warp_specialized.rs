//! Setup and warpgroup roles that all kernels of this module share.

use cuda_std::hopper::{self, MBarrier, WARPGROUP};
use cuda_std::{thread, warp};

/// A kernel with a producer warpgroup and two consumer warpgroups.
pub trait WarpSpecialized: Copy {
    /// True if a thread of a consumer has 240 registers and one of the producer 24, instead of 232 and 40. The block starts with 168
    /// per thread: 384 · 168 = 128 · 24 + 256 · 240 = 128 · 40 + 256 · 232.
    const LARGE_CONSUMERS: bool = false;

    /// Prefetches the tensor maps and initializes the barriers. One thread runs this.
    fn init(self);
    /// Issues all loads of this block. All threads of the producer warpgroup run this.
    fn produce(self);
    /// Computes the rows of consumer `CONSUMER`, 0 or 1. All threads of that warpgroup run this.
    fn consume<const CONSUMER: u32>(self);
}

/// Runs a kernel: initializes its barriers, reallocates registers, and starts the role of each warpgroup.
#[inline(always)]
pub fn run<K: WarpSpecialized>(kernel: K) {
    if thread::thread_idx_x() == 0 {
        kernel.init();
        MBarrier::fence_init();
        hopper::fence_async_proxy();
    }
    thread::sync_threads();

    let role = warp::shuffle(thread::thread_idx_x() / WARPGROUP, 0);
    if role == 0 {
        if K::LARGE_CONSUMERS {
            hopper::decrease_registers::<24>();
        } else {
            hopper::decrease_registers::<40>();
        }
        kernel.produce();
    } else {
        if K::LARGE_CONSUMERS {
            hopper::increase_registers::<240>();
        } else {
            hopper::increase_registers::<232>();
        }
        // The number of panels depends on the consumer. With a constant index, ptxas knows that loop bounds are uniform
        // within a warp, and computes addresses once per warp.
        if role == 1 {
            kernel.consume::<0>();
        } else {
            kernel.consume::<1>();
        }
    }
}
