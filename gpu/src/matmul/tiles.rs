//! Which block multiplies which tile, over which part of K.

use super::mainloop::TILE_K;
use super::pingpong::TILE_M;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::thread;

/// Tiles above each other that are worked on before moving to the next columns, so that operands stay in L2.
const GROUP: u32 = 16;

/// The tiles of the output, for each part of K: part after part, so that blocks that run side by side read the same k.
#[derive(Clone, Copy)]
pub struct Items {
    /// Tiles above each other, and beside each other.
    rows: u32,
    columns: u32,
    /// Columns of a tile.
    width: u32,
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
    /// `splits` parts of K, each of which must have a step.
    #[inline(always)]
    pub fn new<A: Accumulators>(m: u32, n: u32, k: u32, splits: u32) -> Self {
        let steps = k.div_ceil(TILE_K);
        let (rows, columns) = (m.div_ceil(TILE_M), n.div_ceil(A::COLUMNS));
        Self { rows, columns, width: A::COLUMNS, splits, steps, part_steps: steps.div_ceil(splits) }
    }

    /// Tiles of a part.
    #[inline(always)]
    pub fn count(self) -> u32 {
        self.rows * self.columns
    }

    /// First row and column of a tile: down a group of tiles, then to the next column.
    #[inline(always)]
    pub fn tile(self, t: u32) -> (u32, u32) {
        let group = t / (GROUP * self.columns);
        let within = t - group * GROUP * self.columns;
        let height = (self.rows - group * GROUP).min(GROUP);
        ((group * GROUP + within % height) * TILE_M, within / height * self.width)
    }

    #[inline(always)]
    fn part(self, index: u32) -> u32 {
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
