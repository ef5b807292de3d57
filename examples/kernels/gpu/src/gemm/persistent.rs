//! GEMM, version 13: a persistent kernel.
//!
//! Problem: as in version 6.
//! Idea: one block for each SM stays there and computes tile after tile. The producer goes on with the copies of the next tile while
//! the consumers still store the previous one, and blocks no longer start and end. Tiles are numbered in bands of 16 rows of tiles:
//! blocks that run at the same time share rows of a and columns of b, which L2 then supplies.
//! Limit: with a long K, little time passes between tiles, so little is gained. The consumers both store at the same time, and the
//! tensor cores wait. The kernels in `gpu/` either alternate two consumers with a tile each (ping-pong), so that one multiplies
//! while the other stores, or store large tiles through shared memory with TMA.

use super::tma_pipeline::STAGES;
use super::warp_specialized::shared;
use super::wgmma::{TILE_M, TILE_N, store};
use cuda_std::hopper::{self, PipelineState, TensorMap};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, bf16, kernel, thread};

/// Rows of tiles in a band.
const BAND: usize = 16;

/// Returns the first row and column of tile `i`. Tiles run down a band, then to the next column.
#[inline(always)]
fn tile(i: usize, m: usize, n: usize) -> [usize; 2] {
    let (tiles_m, tiles_n) = (m.div_ceil(TILE_M), n.div_ceil(TILE_N));
    let first = i / (BAND * tiles_n) * BAND;
    let (within, height) = (i - first * tiles_n, (tiles_m - first).min(BAND));
    [(first + within % height) * TILE_M, within / height * TILE_N]
}

/// Computes out. `a` and `b` are tensor maps. Grid: the number of SMs.
#[kernel(threads = 384, blocks_per_sm = 1, requires = "wgmma")]
pub fn gemm_persistent(out: GlobalMut<bf16>, a: Global<TensorMap>, b: Global<TensorMap>, m: u32, n: u32, k: u32) {
    let pipeline = shared(&mut Layout::new());
    let (m, n, k) = (m as usize, n as usize, k as usize);
    pipeline.init();
    let (warpgroup, tiles) = (thread::thread_idx_x() / 128, m.div_ceil(TILE_M) * n.div_ceil(TILE_N));
    let mine = (thread::block_idx_x() as usize..tiles).step_by(thread::grid_dim_x() as usize);
    if warpgroup == 0 {
        hopper::decrease_registers::<40>();
        if thread::thread_idx_x() == 0 {
            let mut state = PipelineState::producer(STAGES as u32);
            for i in mine {
                pipeline.produce(&mut state, [a, b], tile(i, m, n), k);
            }
        }
    } else {
        hopper::increase_registers::<232>();
        let (consumer, mut state) = (warpgroup - 1, PipelineState::consumer(STAGES as u32));
        for i in mine {
            let [row, column] = tile(i, m, n);
            let sums = pipeline.consume(&mut state, consumer, k);
            store(&sums, out, [row + 64 * consumer as usize, column], [m, n]);
        }
    }
}
