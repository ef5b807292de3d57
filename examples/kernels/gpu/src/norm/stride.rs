//! Norm, version 4: a grid-stride loop over packets.
//!
//! Problem: as in version 2. n is a multiple of 8.
//! Idea: the grid has as many blocks as the GPU can hold, and each thread adds up many packets before the one reduction of its
//! block. The cost of the reduction disappears, and a 16-byte load keeps more bytes in flight.
//! Limit: memory bandwidth. The version in `gpu/` writes the sums of the blocks to memory and adds them in a second kernel: the
//! order is then fixed, and the result is the same in every run.

use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedArray, bf16, block, kernel, math, thread};

/// Lays out the shared memory of `block::sum`.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(32)
}

/// Adds the sum of squares to sum (1). Grid: any, for example 4 blocks for each SM.
#[kernel(threads = 512)]
pub fn norm_stride(sum: GlobalMut<f32>, values: Global<bf16>, n: u64) {
    let scratch = shared(&mut Layout::new());
    let (mut of_thread, mut i) = (0.0, thread::index_1d() * bf16::PACKET);
    while i < n as usize {
        let x = values.packet(i);
        for k in 0..bf16::PACKET {
            of_thread = math::fma(x.get(k), x.get(k), of_thread);
        }
        i += thread::count_1d() * bf16::PACKET;
    }
    let of_block = block::sum(of_thread, scratch);
    if thread::thread_idx_x() == 0 {
        sum.atomic_add(0, of_block);
    }
}
