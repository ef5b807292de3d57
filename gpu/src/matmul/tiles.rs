//! Tiles of the output: how a block's consumers share them, and which block multiplies which, over which part of K.

use super::mainloop::TILE_K;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::thread;

pub const CONSUMERS: u32 = 2;
/// Rows of 128 bytes of shared memory, for operands and for what is written.
pub const POOL_ROWS: usize = 1792;
/// Most stages of a ring.
pub const MOST_STAGES: usize = 5;

/// A tile of the output, and who multiplies it.
pub trait Tile: 'static {
    /// Of a thread, for 64 rows.
    type Sums: Accumulators + 'static;
    /// Whether a tile is of both consumers, a half of its rows each, and not theirs in turns.
    const TOGETHER: bool;
    /// Of a tile.
    const ROWS: u32;

    /// Rows that a consumer multiplies: 64 or 128.
    const CONSUMER_ROWS: u32 = if Self::TOGETHER { Self::ROWS / CONSUMERS } else { Self::ROWS };
    const COLUMNS: u32 = Self::Sums::COLUMNS;
    /// Rows of b (N, K) that a load takes: at most 256.
    const B_BOX: u32 = if Self::COLUMNS > 256 { Self::COLUMNS / 2 } else { Self::COLUMNS };
    /// Rows of a stage: the tile's of a, then as many of b as the tile has columns.
    const STAGE_ROWS: u32 = Self::ROWS + Self::COLUMNS;
    /// Boxes of 64 x 64 in shared memory for each consumer's epilogue.
    const BOXES: u32 = match (Self::TOGETHER, Self::COLUMNS) {
        (false, _) => 4,
        (true, 192 | 320) => 3,
        (true, _) => 2,
    };
    /// The boxes follow the ring.
    const STAGES: u32 = (POOL_ROWS as u32 - CONSUMERS * Self::BOXES * 64) / Self::STAGE_ROWS;
    const RING_ROWS: u32 = Self::STAGES * Self::STAGE_ROWS;
}

/// 128 x 128, in turns
pub struct Turns128;
/// 128 x 192, in turns
pub struct Turns192;
/// 256 x 128, together
pub struct Together128;
/// 256 x 192, together
pub struct Together192;
/// 128 x 256, together
pub struct Together256;
/// 128 x 320, together: what leaves no column over where C is 1280, 1600 or 2560
pub struct Together320;

impl Tile for Turns128 {
    type Sums = [f32; 64];
    const TOGETHER: bool = false;
    const ROWS: u32 = 128;
}

impl Tile for Turns192 {
    type Sums = [f32; 96];
    const TOGETHER: bool = false;
    const ROWS: u32 = 128;
}

impl Tile for Together128 {
    type Sums = [f32; 64];
    const TOGETHER: bool = true;
    const ROWS: u32 = 256;
}

impl Tile for Together256 {
    type Sums = [f32; 128];
    const TOGETHER: bool = true;
    const ROWS: u32 = 128;
}

impl Tile for Together320 {
    type Sums = [f32; 160];
    const TOGETHER: bool = true;
    const ROWS: u32 = 128;
}

impl Tile for Together192 {
    type Sums = [f32; 96];
    const TOGETHER: bool = true;
    const ROWS: u32 = 256;
}

/// Rows that are worked on before moving to the next columns, so that operands stay in L2.
const GROUP_ROWS: u32 = 2048;

/// The tiles of the output, for each part of K: part after part, so that blocks that run side by side read the same k.
#[derive(Clone, Copy)]
pub struct Items {
    tile_rows: u32,
    tile_columns: u32,
    /// Tiles above each other, and beside each other.
    rows: u32,
    columns: u32,
    splits: u32,
    /// Of all of K, and of a part but the last.
    steps: u32,
    part_steps: u32,
}

/// A tile over a part of K.
#[derive(Clone, Copy)]
pub struct Item {
    /// Its number: part by part, and within a part tile by tile.
    pub index: u32,
    /// The tile's first row and column.
    pub row: u32,
    pub column: u32,
    /// In units of [`TILE_K`].
    pub first_step: u32,
    pub steps: u32,
}

/// Of this block's `i`-th item.
#[inline(always)]
fn index(i: u32) -> u32 {
    thread::block_idx_x() + i * thread::grid_dim_x()
}

impl Items {
    /// Tiles of `tile_rows` x `tile_columns`; `splits` parts of K, each of which must have a step.
    #[inline(always)]
    pub fn new([tile_rows, tile_columns]: [u32; 2], m: u32, n: u32, k: u32, splits: u32) -> Self {
        let (rows, columns) = (m.div_ceil(tile_rows), n.div_ceil(tile_columns));
        let steps = k.div_ceil(TILE_K);
        Self { tile_rows, tile_columns, rows, columns, splits, steps, part_steps: steps.div_ceil(splits) }
    }

    /// Tiles of a part.
    #[inline(always)]
    pub fn count(self) -> u32 {
        self.rows * self.columns
    }

    /// First row and column of a tile: down a group of tiles, then to the next column.
    #[inline(always)]
    pub fn tile(self, t: u32) -> (u32, u32) {
        let most = GROUP_ROWS / self.tile_rows;
        let group = t / (most * self.columns);
        let within = t - group * most * self.columns;
        let height = (self.rows - group * most).min(most);
        ((group * most + within % height) * self.tile_rows, within / height * self.tile_columns)
    }

    /// Which part of K the item of this number is of.
    #[inline(always)]
    pub fn part(self, index: u32) -> u32 {
        if self.splits == 1 { 0 } else { index / self.count() }
    }

    /// Whether this block has an `i`-th item.
    #[inline(always)]
    pub fn has(self, i: u32) -> bool {
        index(i) < self.count() * self.splits
    }

    /// Steps of this block's `i`-th item, which need not exist: then any number.
    #[inline(always)]
    pub fn steps(self, i: u32) -> u32 {
        let first_step = self.part(index(i)) * self.part_steps;
        self.part_steps.min(self.steps.saturating_sub(first_step))
    }

    /// This block's `i`-th item, from 0, which it must have.
    #[inline(always)]
    pub fn at(self, i: u32) -> Item {
        let index = index(i);
        let part = self.part(index);
        let (row, column) = self.tile(index - part * self.count());
        Item { index, row, column, first_step: part * self.part_steps, steps: self.steps(i) }
    }
}
