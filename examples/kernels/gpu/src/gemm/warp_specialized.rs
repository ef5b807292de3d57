//! GEMM, version 12: warp specialization.
//!
//! Problem: as in version 6.
//! Idea: a third warpgroup, the producer, only starts copies. The two consumers only multiply. Each stage has two mbarriers: `full`
//! completes when its copies have arrived, `empty` when both consumers have read it. No barrier of the whole block remains, so a
//! consumer can run ahead, and it keeps one group of wgmma in flight while it starts the next. The producer needs few registers and
//! gives them to the consumers.
//! Limit: the end of a tile. While the consumers store their results, and while the next block starts, the tensor cores are idle.

use super::tma::start_copy;
use super::tma_pipeline::STAGES;
use super::wgmma::{DEPTH, ROWS, TILE_M, TILE_N, Tiles, start_product, store};
use cuda_std::hopper::mbarrier::MBarriers;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{self, MBarrier, PipelineState, SwizzledTile, TensorMap, wgmma};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, bf16, kernel, thread};

/// The pipeline in shared memory.
#[derive(Clone, Copy)]
pub struct Pipeline {
    /// The tiles of the stages.
    pub pool: SwizzledTile<{ STAGES * ROWS }>,
    /// Mbarrier i completes when stage i holds its tiles.
    pub full: MBarriers,
    /// Mbarrier i completes when stage i may be overwritten.
    pub empty: MBarriers,
}

/// Lays out the shared memory.
pub fn shared(layout: &mut Layout) -> Pipeline {
    Pipeline { pool: layout.swizzled(), full: layout.mbarriers(STAGES), empty: layout.mbarriers(STAGES) }
}

impl Pipeline {
    /// Initializes the mbarriers. All threads of the block must call it.
    #[inline(always)]
    pub fn init(self) {
        if thread::thread_idx_x() == 0 {
            for stage in 0..STAGES as u32 {
                self.full.at(stage).init(1);
                self.empty.at(stage).init(2);
            }
            MBarrier::fence_init();
        }
        thread::sync_threads();
    }

    /// Copies the tiles of all of K through the pipeline. One thread calls it.
    #[inline(always)]
    pub fn produce(self, state: &mut PipelineState, maps: [Global<TensorMap>; 2], at: [usize; 2], k: usize) {
        for first in (0..k).step_by(DEPTH) {
            let stage = state.stage();
            self.empty.at(stage).wait(state.parity());
            start_copy(Tiles::of_stage(self.pool, stage), self.full.at(stage), maps, at, first);
            state.advance();
        }
    }

    /// Returns the sums of a consumer's 64 rows over all of K.
    #[inline(always)]
    pub fn consume(self, state: &mut PipelineState, consumer: u32, k: usize) -> [f32; 128] {
        let (mut sums, mut first, mut previous) = ([0.0; 128], 0, state.stage());
        loop {
            self.full.at(state.stage()).wait(state.parity());
            start_product(&mut sums, Tiles::of_stage(self.pool, state.stage()), consumer, first > 0);
            // One group stays in flight. The group before it has finished, so its stage is free.
            wgmma::wait::<1>();
            if first > 0 {
                self.release(previous);
            }
            previous = state.advance();
            first += DEPTH;
            if first >= k {
                break;
            }
        }
        wgmma::wait::<0>();
        sums.fence_accumulators();
        self.release(previous);
        sums
    }

    /// Releases a stage to the producer. A wgmma finishes for all warps of a warpgroup together, so one arrival suffices.
    #[inline(always)]
    fn release(self, stage: u32) {
        if thread::thread_idx_x().is_multiple_of(128) {
            self.empty.at(stage).arrive();
        }
    }
}

/// Computes out. `a` and `b` are tensor maps. Grid: (N / 256, M / 128), rounded up.
#[kernel(threads = 384, blocks_per_sm = 1, requires = "wgmma")]
pub fn gemm_warp_specialized(out: GlobalMut<bf16>, a: Global<TensorMap>, b: Global<TensorMap>, m: u32, n: u32, k: u32) {
    let pipeline = shared(&mut Layout::new());
    let (m, n, k) = (m as usize, n as usize, k as usize);
    let [row, column] = [thread::block_idx_y() as usize * TILE_M, thread::block_idx_x() as usize * TILE_N];
    pipeline.init();
    let warpgroup = thread::thread_idx_x() / 128;
    if warpgroup == 0 {
        hopper::decrease_registers::<40>();
        if thread::thread_idx_x() == 0 {
            pipeline.produce(&mut PipelineState::producer(STAGES as u32), [a, b], [row, column], k);
        }
    } else {
        hopper::increase_registers::<232>();
        let consumer = warpgroup - 1;
        let sums = pipeline.consume(&mut PipelineState::consumer(STAGES as u32), consumer, k);
        store(&sums, out, [row + 64 * consumer as usize, column], [m, n]);
    }
}
