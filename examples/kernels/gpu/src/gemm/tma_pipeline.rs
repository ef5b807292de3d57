//! GEMM, version 11: a pipeline of four stages.
//!
//! Problem: as in version 6.
//! Idea: four pairs of tiles, each with its own mbarrier. The copies run up to three stages ahead of the multiplication. As soon as
//! all warps have finished with a stage, thread 0 starts the copy of the pair that is needed four stages later.
//! Limit: thread 0 is one of those that multiply. The barrier after each stage makes all warps wait for the slowest, and the tensor
//! cores are idle between two stages.

use super::tma::start_copy;
use super::wgmma::{DEPTH, ROWS, TILE_M, TILE_N, Tiles, start_product, store};
use cuda_std::hopper::mbarrier::MBarriers;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{MBarrier, PipelineState, SwizzledTile, TensorMap, wgmma};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, bf16, kernel, thread};

/// Stages of the pipeline.
pub const STAGES: usize = 4;

/// Lays out the shared memory: the stages, and an mbarrier for each.
pub fn shared(layout: &mut Layout) -> (SwizzledTile<{ STAGES * ROWS }>, MBarriers) {
    (layout.swizzled(), layout.mbarriers(STAGES))
}

/// Computes out. `a` and `b` are tensor maps. Grid: (N / 256, M / 128), rounded up.
#[kernel(threads = 256, requires = "wgmma")]
pub fn gemm_tma_pipeline(out: GlobalMut<bf16>, a: Global<TensorMap>, b: Global<TensorMap>, m: u32, n: u32, k: u32) {
    let (pool, full) = shared(&mut Layout::new());
    let (m, n, k) = (m as usize, n as usize, k as usize);
    let at = [thread::block_idx_y() as usize * TILE_M, thread::block_idx_x() as usize * TILE_N];
    let (warpgroup, is_first) = (thread::thread_idx_x() / 128, thread::thread_idx_x() == 0);
    if is_first {
        for stage in 0..STAGES as u32 {
            full.at(stage).init(1);
        }
        MBarrier::fence_init();
        for stage in 0..STAGES as u32 {
            if (stage as usize) * DEPTH < k {
                start_copy(Tiles::of_stage(pool, stage), full.at(stage), [a, b], at, stage as usize * DEPTH);
            }
        }
    }
    thread::sync_threads();
    let mut sums = [0.0; 128];
    let (mut first, mut state) = (0, PipelineState::consumer(STAGES as u32));
    loop {
        full.at(state.stage()).wait(state.parity());
        start_product(&mut sums, Tiles::of_stage(pool, state.stage()), warpgroup, first > 0);
        wgmma::wait::<0>();
        thread::sync_threads();
        let free = state.advance();
        if is_first && first + STAGES * DEPTH < k {
            start_copy(Tiles::of_stage(pool, free), full.at(free), [a, b], at, first + STAGES * DEPTH);
        }
        first += DEPTH;
        if first >= k {
            break;
        }
    }
    sums.fence_accumulators();
    store(&sums, out, [at[0] + 64 * warpgroup as usize, at[1]], [m, n]);
}
