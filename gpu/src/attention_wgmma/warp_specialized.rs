//! Setup and warpgroup roles that all kernels of this module share.

use super::WARPGROUP;
use cuda_std::hopper::{self, MBarrier};
use cuda_std::{thread, warp};

/// Registers per thread of each role. The block starts with 168 per thread: 384 · 168 = 128 · 40 + 256 · 232.
const PRODUCER_REGISTERS: u32 = 40;
const CONSUMER_REGISTERS: u32 = 232;

/// A kernel with a producer warpgroup and two consumer warpgroups.
pub trait WarpSpecialized: Copy {
    /// Decreases the register limit of the producer warpgroup.
    #[inline(always)]
    fn set_producer_registers() {
        hopper::decrease_registers::<PRODUCER_REGISTERS>();
    }

    /// Increases the register limit of a consumer warpgroup.
    #[inline(always)]
    fn set_consumer_registers() {
        hopper::increase_registers::<CONSUMER_REGISTERS>();
    }

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
        K::set_producer_registers();
        kernel.produce();
    } else {
        K::set_consumer_registers();
        // The number of panels depends on the consumer. With a constant index, ptxas knows that loop bounds are uniform
        // within a warp, and computes addresses once per warp.
        if role == 1 {
            kernel.consume::<0>();
        } else {
            kernel.consume::<1>();
        }
    }
}
