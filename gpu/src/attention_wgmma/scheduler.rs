//! Work tiles, and their assignment to thread blocks.

use super::TILE;
use cuda_std::{Global, device, thread};

/// Work tiles of a chunk of heads, per thread block. Enough tiles balance the load. Few enough keep keys and values of
/// the chunk in L2.
const CHUNK_ROUNDS: u32 = 8;

/// Rows [`TILE`] `tile` .. [`TILE`] (`tile` + 1) of head `h` of sequence `b`: queries of a query head, or keys of a
/// key-value head.
#[derive(Clone, Copy)]
pub struct WorkTile {
    pub b: u32,
    pub h: u32,
    pub tile: u32,
}

/// Assigns work tiles to persistent thread blocks.
#[derive(Clone, Copy)]
pub struct TileScheduler {
    /// B, the number of sequences.
    pub b: u32,
    t: u32,
    heads: u32,
}

#[device]
impl TileScheduler {
    /// Creates the scheduler of `b` sequences of length `t` with `heads` heads: query heads or key-value heads.
    pub fn new(b: u32, t: u32, heads: u32) -> Self {
        Self { b, t, heads }
    }

    /// Returns the number of tiles of a head.
    pub fn tiles(self) -> u32 {
        self.t.div_ceil(TILE)
    }

    /// Returns the total number of work tiles.
    pub fn work_tiles(self) -> u32 {
        self.tiles() * self.b * self.heads
    }

    /// Returns work tile `i`.
    ///
    /// Heads are scheduled in chunks, so that the operands that their tiles share stay in L2. Within a chunk, the tiles
    /// that take longest come first: those with high index, or with low index if `low_first`. Query heads that share
    /// keys and values are neighbours, so their tiles run at the same time.
    pub fn work_tile(self, i: u32, low_first: bool) -> WorkTile {
        let (tiles, heads) = (self.tiles(), self.b * self.heads);
        let chunk = (CHUNK_ROUNDS * thread::grid_dim_x() / tiles).clamp(1, heads);
        let first = i / (chunk * tiles) * chunk;
        let chunk = chunk.min(heads - first);
        let within = i - first * tiles;
        let (head, tile) = (first + within % chunk, within / chunk);
        WorkTile { b: head / self.heads, h: head % self.heads, tile: if low_first { tile } else { tiles - 1 - tile } }
    }

    /// Returns work tile `i`, where the tiles of sequence `b` are in the order `order[b]` (B, tiles), or high first if it is null.
    pub fn work_tile_in_order(self, i: u32, order: Global<u32>, low_first: bool) -> WorkTile {
        let mut tile = self.work_tile(i, low_first || !order.is_null());
        if !order.is_null() {
            tile.tile = order.at((tile.b * self.tiles() + tile.tile) as usize);
        }
        tile
    }

    /// Returns the work tile of a ticket, in chunks of `chunk` heads. The tiles of each head are in ascending order, for any
    /// number of blocks.
    pub fn work_tile_of_ticket(self, ticket: u32, chunk: u32) -> WorkTile {
        let tiles = self.tiles();
        let first = ticket / (chunk * tiles) * chunk;
        let chunk = chunk.min(self.b * self.heads - first);
        let within = ticket - first * tiles;
        let head = first + within % chunk;
        WorkTile { b: head / self.heads, h: head % self.heads, tile: within / chunk }
    }
}

/// Returns the index of this block's work tile in a round, which may not exist. The order of the blocks alternates
/// between rounds: a block with a long tile in one round has a shorter one in the next.
#[inline(always)]
pub fn work_index(round: u32) -> u32 {
    let (blocks, block) = (thread::grid_dim_x(), thread::block_idx_x());
    round * blocks + if round.is_multiple_of(2) { block } else { blocks - 1 - block }
}
