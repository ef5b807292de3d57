//! Vector addition: each thread adds one pair of elements, and each block sums its results through shared memory.
#![cfg_attr(target_arch = "nvptx64", no_std, feature(abi_gpu_kernel, asm_experimental_arch))]

use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, block, kernel, thread};

/// Threads per block.
pub const THREADS: usize = 256;

/// Returns the grid for `n` elements.
pub const fn grid(n: usize) -> [u32; 3] {
    [n.div_ceil(THREADS) as u32, 1, 1]
}

/// Defines the shared memory layout. The kernel calls it for the array, the host for the size.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(32)
}

/// Computes out (n) = a (n) + b (n) and stores the sum of each block's elements in sums (number of blocks).
#[kernel(threads = 256)]
pub fn vecadd(out: GlobalMut<f32>, sums: GlobalMut<f32>, a: Global<f32>, b: Global<f32>, n: u64) {
    let scratch = shared(&mut Layout::new());
    let i = thread::index_1d();
    let mut element = 0.0;
    if i < n as usize {
        element = a.at(i) + b.at(i);
        out.set(i, element);
    }
    let sum = block::sum(element, scratch);
    if thread::thread_idx_x() == 0 {
        sums.set(thread::block_idx_x() as usize, sum);
    }
}
