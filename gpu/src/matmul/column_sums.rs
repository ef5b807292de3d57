//! Column sums of a (K, M) beside aᵀ · b: of what is in the ring anyway, by two warps of the producer's warpgroup.
//!
//! The tiles beside each other all load the same a, so each sums some of it: of 16 rows of k at a time, tile j of c beside each
//! other sums those whose number modulo c is j. Where a tile has 256 rows, tiles of even j sum its upper 128 and those of odd j
//! its lower 128.

use super::mainloop::Place;
use super::pingpong::Shared;
use super::tiles::{Items, Tile};
use cuda_std::element::unpack_pair;
use cuda_std::{GlobalMut, warp};

/// Warps that sum, 64 columns each.
pub const SUMMING_WARPS: u32 = 2;

/// Columns of a that the two sum.
const SUMMED: u32 = SUMMING_WARPS * 64;

/// Rows of sums for each part of K.
pub const fn slices<T: Tile>(n: u32) -> u32 {
    let tiles = n.div_ceil(T::COLUMNS);
    if T::ROWS > SUMMED { tiles.div_ceil(2) } else { tiles }
}

/// Sums over all of a block's items, to `sums` (parts of K · [`slices`], M).
#[inline(always)]
pub fn sum_columns<T: Tile>(shared: Shared, items: Items, sums: GlobalMut<f32>, m: u32, n: u32, which: u32) {
    let mut place = Place { stage: 0, parity: 0 };
    let tiles = n.div_ceil(T::COLUMNS);
    let mut i = 0;
    while items.has(i) {
        let item = items.at(i);
        let tile = item.column / T::COLUMNS;
        // Which half of the rows this tile sums, how many tiles share them, and which of those this is.
        let (half, sharers, share) =
            if T::ROWS > SUMMED { (tile % 2, (tiles + 1 - tile % 2) / 2, tile / 2) } else { (0, tiles, tile) };
        let first = half * SUMMED + which * 64;
        let mut sum = [[0.0; 4]; 4];
        // In units of 16 rows of k: the next to sum, and the first of the stage.
        let (mut next, mut at) = (share, 0);
        while at < item.steps * 4 {
            shared.full.at(place.stage).wait(place.parity);
            let rows = shared.pool.rows::<64>(place.stage * T::STAGE_ROWS + first);
            while next < at + 4 {
                for j in 0..4 {
                    let words = rows.left((next - at) * 16, j).map(unpack_pair);
                    let s = &mut sum[j as usize];
                    for i in 0..2 {
                        s[i] += words[0][i] + words[1][i];
                        s[2 + i] += words[2][i] + words[3][i];
                    }
                }
                next += sharers;
            }
            warp::sync();
            if warp::lane() == 0 {
                shared.empty.at(place.stage).arrive();
            }
            place.advance::<T>();
            at += 4;
        }
        let slice = items.part(item.index) * slices::<T>(n) + share;
        let row = item.row + first;
        for j in 0..4 {
            for i in 0..4 {
                let mut total = sum[j][i];
                total += warp::shuffle_xor(total, 4);
                total += warp::shuffle_xor(total, 8);
                total += warp::shuffle_xor(total, 16);
                let column = row + j as u32 * 16 + warp::lane() * 2 + i as u32 / 2 * 8 + i as u32 % 2;
                if warp::lane() < 4 && column < m {
                    sums.set(slice as usize * m as usize + column as usize, total);
                }
            }
        }
        // Where tiles are odd in number, one slice has no tile for the lower half.
        if T::ROWS > SUMMED && tiles % 2 == 1 && tile == tiles - 1 {
            let column = item.row + SUMMED + which * 64 + warp::lane() * 2;
            // m is a multiple of 8.
            if column < m {
                sums.set_pair(slice as usize * m as usize + column as usize, [0.0; 2]);
            }
        }
        i += 1;
    }
}
