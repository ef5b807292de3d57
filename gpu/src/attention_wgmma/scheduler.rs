//! Work tiles: their assignment to thread blocks, and their addresses in global memory.

use super::{Head, TILE};
use core::marker::PhantomData;
use cuda_std::thread;

/// Work tiles of a group of heads, per thread block. Enough tiles balance the load. Few enough keep keys and values of
/// the group in L2.
const GROUP_ROUNDS: u32 = 8;

/// Rows [`TILE`] `tile` .. [`TILE`] (`tile` + 1), queries or keys, of head `h` of sequence `b`.
#[derive(Clone, Copy)]
pub struct WorkTile {
    pub b: u32,
    pub h: u32,
    pub tile: u32,
}

/// Assigns work tiles to persistent thread blocks.
#[derive(Clone, Copy)]
pub struct TileScheduler<H> {
    pub b: u32,
    pub t: u32,
    pub nh: u32,
    head: PhantomData<H>,
}

impl<H: Head> TileScheduler<H> {
    /// Creates the scheduler of `b` sequences of length `t` with `nh` heads.
    #[inline(always)]
    pub fn new(b: u32, t: u32, nh: u32) -> Self {
        Self { b, t, nh, head: PhantomData }
    }

    /// Returns the number of tiles of a head.
    #[inline(always)]
    pub fn tiles(self) -> u32 {
        self.t.div_ceil(TILE)
    }

    /// Returns the total number of work tiles.
    #[inline(always)]
    pub fn work_tiles(self) -> u32 {
        self.tiles() * self.b * self.nh
    }

    /// Returns work tile `i`.
    ///
    /// Heads are scheduled in groups, so that the operands that their tiles share stay in L2. Within a group, the tiles
    /// that take longest come first: those with high index, or with low index if `LOW_FIRST`.
    #[inline(always)]
    pub fn work_tile<const LOW_FIRST: bool>(self, i: u32) -> WorkTile {
        let (tiles, heads) = (self.tiles(), self.b * self.nh);
        let group = (GROUP_ROUNDS * thread::grid_dim_x() / tiles).clamp(1, heads);
        let first = i / (group * tiles) * group;
        let group = group.min(heads - first);
        let within = i - first * tiles;
        let (head, tile) = (first + within % group, within / group);
        WorkTile { b: head / self.nh, h: head % self.nh, tile: if LOW_FIRST { tile } else { tiles - 1 - tile } }
    }

    /// Returns the first element of row `row` of the sequence for a head in (B, T, NH, HS).
    #[inline(always)]
    pub fn row(self, tile: WorkTile, row: u32) -> usize {
        ((tile.b as usize * self.t as usize + row as usize) * self.nh as usize + tile.h as usize) * H::HS as usize
    }

    /// Returns the first element of row `row` of part 0 (Q), 1 (K) or 2 (V) for a head in (B, T, 3, NH, HS).
    #[inline(always)]
    pub fn packed_row(self, tile: WorkTile, part: u32, row: u32) -> usize {
        let at = tile.b as usize * self.t as usize + row as usize;
        ((at * 3 + part as usize) * self.nh as usize + tile.h as usize) * H::HS as usize
    }

    /// Returns the first column of a part of a head in the tensor map over qkv.
    #[inline(always)]
    pub fn column(self, tile: WorkTile, part: u32) -> u32 {
        (part * self.nh + tile.h) * H::HS
    }

    /// Returns the element of row 0 of a head in (B, NH, T).
    #[inline(always)]
    pub fn statistics(self, tile: WorkTile) -> usize {
        (tile.b as usize * self.nh as usize + tile.h as usize) * self.t as usize
    }
}

/// Returns the index of this block's work tile in a round, which may not exist. The order of the blocks alternates
/// between rounds: a block with a long tile in one round has a shorter one in the next.
#[inline(always)]
pub fn work_index(round: u32) -> u32 {
    let (blocks, block) = (thread::grid_dim_x(), thread::block_idx_x());
    round * blocks + if round.is_multiple_of(2) { block } else { blocks - 1 - block }
}
