//! The GPU kernels. This crate is compiled twice: for the GPU, and for the host, where the emulator runs it.
#![cfg_attr(target_arch = "nvptx64", no_std, feature(abi_gpu_kernel, asm_experimental_arch))]

use cuda_std::shared::Layout;
use cuda_std::{GlobalSlice, GlobalSliceMut, SharedArray, block, kernel, thread};

/// Threads per block.
pub const THREADS: usize = 256;

/// Returns the grid in which each of `n` elements has a thread.
pub const fn grid(n: usize) -> [u32; 3] {
    [n.div_ceil(THREADS) as u32, 1, 1]
}

/// Computes y (n) = a x (n) + y (n).
#[kernel(threads = 256, checked)]
pub fn saxpy(y: GlobalSliceMut<f32>, x: GlobalSlice<f32>, a: f32) {
    let i = thread::index_1d();
    if i < y.len() {
        y.set(i, a * x.at(i) + y.at(i));
    }
}

/// Defines the shared memory of `block_sums`: one element for each warp.
pub fn block_sums_shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(32)
}

/// Computes the sum of each block's elements of x (n) in sums (number of blocks).
#[kernel(threads = 256, shared = block_sums_shared, checked)]
pub fn block_sums(sums: GlobalSliceMut<f32>, x: GlobalSlice<f32>) {
    let scratch = block_sums_shared(&mut Layout::new());
    let sum = block::sum(x.get(thread::index_1d()).unwrap_or(0.0), scratch);
    if thread::thread_idx_x() == 0 {
        sums.set(thread::block_idx_x() as usize, sum);
    }
}
