//! Softmax, version 4: one block for each row.
//!
//! Problem: as in version 1.
//! Idea: 1024 threads share a row, so many more loads are in flight. `block::max` and `block::sum` combine first the lanes of
//! each warp with shuffles, then the warps through shared memory.
//! Limit: loads of 2 bytes.

use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedArray, bf16, block, kernel, math, thread};

/// Lays out the shared memory of the reductions.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(32)
}

/// Computes the softmax of each row. Grid: rows.
#[kernel(threads = 1024)]
pub fn softmax_block(out: GlobalMut<bf16>, inp: Global<bf16>, n: u32) {
    let scratch = shared(&mut Layout::new());
    let (row, t, n) = (thread::block_idx_x() as usize, thread::thread_idx_x() as usize, n as usize);
    let (inp, out) = (inp.skip(row * n), out.skip(row * n));
    let (mut max, mut sum) = (f32::MIN, 0.0);
    for i in (t..n).step_by(1024) {
        let x = inp.at(i).to_f32();
        if x > max {
            sum *= math::exp(max - x);
            max = x;
        }
        sum += math::exp(x - max);
    }
    let row_max = block::max(max, scratch);
    let scale = 1.0 / block::sum(sum * math::exp(max - row_max), scratch);
    for i in (t..n).step_by(1024) {
        out.set(i, bf16::from_f32(math::exp(inp.at(i).to_f32() - row_max) * scale));
    }
}
