//! Column sums of a (K, M), the gradient of a bias, computed beside aᵀ · b, the gradient of its weight.
//!
//! Two otherwise idle warps of the producer warpgroup read the stages of a that the mainloop loads anyway.
//!
//! All tiles of a row of tiles load the same a, so they share the work. Of c tiles, tile j sums the groups of 16 rows
//! of K whose index modulo c is j. For TILE_M = 256, tiles with even j sum columns 0..128 of their part of a, and those
//! with odd j columns 128..256. Each tile that shares the same columns writes its own row of the result.

use super::shared::SharedStorage;
use super::tile::{Scheduler, Tile, TileShape};
use cuda_std::element::unpack_pair;
use cuda_std::hopper::PipelineState;
use cuda_std::{GlobalMut, warp};

/// Warps that compute column sums, of 64 columns each.
pub const SUMMING_WARPS: u32 = 2;

/// Columns of a that the warps sum together.
const SUMMED_COLUMNS: u32 = SUMMING_WARPS * 64;

/// The output of the column sums, and the shape of the GEMM.
#[derive(Clone, Copy)]
pub struct ColumnSums {
    /// (slices of K · [`partial_rows`], M), to be summed over its rows.
    pub partials: GlobalMut<f32>,
    pub m: u32,
    pub n: u32,
}

/// Returns the rows of partial column sums for each slice of K.
pub const fn partial_rows(tile: TileShape, n: u32) -> u32 {
    let [tile_m, tile_n] = tile.dims();
    let tiles = n.div_ceil(tile_n);
    if tile_m > SUMMED_COLUMNS { tiles.div_ceil(2) } else { tiles }
}

/// Sums columns of a over all of this block's work tiles. `summing_warp` is 0 or 1.
#[inline(always)]
pub fn sum_columns<T: Tile>(shared: SharedStorage, scheduler: impl Scheduler, output: ColumnSums, summing_warp: u32) {
    let ColumnSums { partials, m, n } = output;
    let mut state = PipelineState::consumer(T::STAGES);
    let tiles = n.div_ceil(T::TILE_N);
    let mut i = 0;
    while scheduler.has(i) {
        let work_tile = scheduler.work_tile(i);
        let tile = work_tile.column / T::TILE_N;
        // Half of the columns that this tile sums, the number of tiles that share them, and this tile's index among
        // those.
        let (half, sharers, share) = if T::TILE_M > SUMMED_COLUMNS {
            (tile % 2, (tiles + 1 - tile % 2) / 2, tile / 2)
        } else {
            (0, tiles, tile)
        };
        let first = half * SUMMED_COLUMNS + summing_warp * 64;
        let mut sum = [[0.0; 4]; 4];
        // Next group of 16 rows of K to sum, and first group of the stage.
        let (mut next, mut at) = (share, 0);
        while at < work_tile.steps * 4 {
            shared.pipeline.wait_full(state);
            let rows = shared.pool.rows::<64>(state.stage() * T::STAGE_ROWS + first);
            while next < at + 4 {
                for j in 0..4 {
                    let words = rows.load_a_fragment((next - at) * 16, j).map(unpack_pair);
                    let s = &mut sum[j as usize];
                    for i in 0..2 {
                        s[i] += words[0][i] + words[1][i];
                        s[2 + i] += words[2][i] + words[3][i];
                    }
                }
                next += sharers;
            }
            shared.pipeline.release_by_warp(state.stage());
            state.advance();
            at += 4;
        }
        let partial_row = scheduler.slice(work_tile.index) * partial_rows(T::SHAPE, n) + share;
        let row = work_tile.row + first;
        for j in 0..4 {
            for i in 0..4 {
                let mut total = sum[j][i];
                total += warp::shuffle_xor(total, 4);
                total += warp::shuffle_xor(total, 8);
                total += warp::shuffle_xor(total, 16);
                let column = row + j as u32 * 16 + warp::lane() * 2 + i as u32 / 2 * 8 + i as u32 % 2;
                if warp::lane() < 4 && column < m {
                    partials.set(partial_row as usize * m as usize + column as usize, total);
                }
            }
        }
        // With an odd number of tiles, no tile writes the second half of the last row: it is zeroed here.
        if T::TILE_M > SUMMED_COLUMNS && tiles % 2 == 1 && tile == tiles - 1 {
            let column = work_tile.row + SUMMED_COLUMNS + summing_warp * 64 + warp::lane() * 2;
            // m is a multiple of 8, so both elements of the pair exist.
            if column < m {
                partials.set_pair(partial_row as usize * m as usize + column as usize, [0.0; 2]);
            }
        }
        i += 1;
    }
}
