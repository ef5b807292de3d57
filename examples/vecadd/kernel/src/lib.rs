//! out = a + b, and the sum of each block's part of it: elements by thread, a sum through shared memory.
#![cfg_attr(target_arch = "nvptx64", no_std, feature(abi_gpu_kernel, asm_experimental_arch))]

use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, block, kernel, thread};

pub const THREADS: usize = 256;

/// Blocks for `n` elements.
pub const fn grid(n: usize) -> [u32; 3] {
    [n.div_ceil(THREADS) as u32, 1, 1]
}

/// What a block keeps in shared memory: called by the kernel, and by whoever launches it for its size.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(32)
}

/// out (n) = a (n) + b (n); sums (blocks): of each block's elements of out.
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
