//! Tile shapes, and the scheduler that assigns output tiles and slices of K to thread blocks.

use crate::experts::{GROUP_BLOCK, Groups};
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::{Global, device, thread};

/// Consumer warpgroups of a thread block.
pub const CONSUMERS: u32 = 2;
/// Columns of K in a pipeline stage of bf16 operands.
pub const TILE_K: u32 = 64;
/// Columns of K in a pipeline stage of FP8 operands, which has as many bytes.
pub const TILE_K_FP8: u32 = 128;
/// Rows of shared memory, of 128 bytes each, for the pipeline stages and the epilogue buffers: 224 KiB.
pub const POOL_ROWS: usize = 1792;
/// The largest number of pipeline stages of any tile.
pub const MAX_STAGES: usize = 5;
/// Rows and columns of an epilogue subtile, and of its buffer in shared memory.
pub const EPILOGUE_TILE: u32 = 64;
/// The largest number of epilogue buffers of a consumer.
pub const MAX_EPILOGUE_BUFFERS: u32 = 4;

/// Rows and columns of an output tile. Large tiles load less per FLOP, small tiles leave fewer SMs idle at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TileShape {
    /// 128 x 128
    T128x128,
    /// 128 x 192
    T128x192,
    /// 256 x 128
    T256x128,
    /// 256 x 192
    T256x192,
    /// 128 x 256
    T128x256,
    /// 128 x 320, which divides N = 1280, 1600 and 2560 without a remainder.
    T128x320,
}

impl TileShape {
    /// All tile shapes.
    pub const ALL: [Self; 6] =
        [Self::T128x128, Self::T128x192, Self::T256x128, Self::T256x192, Self::T128x256, Self::T128x320];

    /// Returns the rows and columns of a tile.
    pub const fn dims(self) -> [u32; 2] {
        match self {
            Self::T128x128 => [128, 128],
            Self::T128x192 => [128, 192],
            Self::T256x128 => [256, 128],
            Self::T256x192 => [256, 192],
            Self::T128x256 => [128, 256],
            Self::T128x320 => [128, 320],
        }
    }

    /// Returns the rows of a TMA load of b (N, K). TMA allows at most 256.
    pub const fn b_box_rows(self) -> u32 {
        let [_, columns] = self.dims();
        if columns > 256 { columns / 2 } else { columns }
    }
}

/// How the two consumers compute an output tile.
pub trait Tile: 'static {
    /// A thread's accumulators for 64 rows of the tile.
    type Accumulator: Accumulators + 'static;
    /// Rows and columns of the tile.
    const SHAPE: TileShape;
    /// True if both consumers compute half of each tile's rows, false if each consumer computes every other tile.
    const COOPERATIVE: bool;

    /// Rows of the tile.
    const TILE_M: u32 = Self::SHAPE.dims()[0];
    /// Columns of the tile.
    const TILE_N: u32 = Self::Accumulator::COLUMNS;
    /// Rows that a consumer computes: 64 or 128.
    const CONSUMER_M: u32 = if Self::COOPERATIVE { Self::TILE_M / CONSUMERS } else { Self::TILE_M };
    /// Rows of shared memory in a pipeline stage: TILE_M for a, then TILE_N for b.
    const STAGE_ROWS: u32 = Self::TILE_M + Self::TILE_N;
    /// Epilogue buffers of each consumer. There is room for all of them beside two sets of accumulators.
    const EPILOGUE_BUFFERS: u32 = match (Self::COOPERATIVE, Self::SHAPE) {
        (false, _) | (true, TileShape::T128x128 | TileShape::T128x192) => MAX_EPILOGUE_BUFFERS,
        (true, TileShape::T256x192 | TileShape::T128x320) => 3,
        (true, TileShape::T256x128 | TileShape::T128x256) => 2,
    };
    /// Pipeline stages: as many as fit beside the epilogue buffers.
    const STAGES: u32 = (POOL_ROWS as u32 - CONSUMERS * Self::EPILOGUE_BUFFERS * EPILOGUE_TILE) / Self::STAGE_ROWS;
    /// Rows of shared memory in all stages. The epilogue buffers follow them.
    const PIPELINE_ROWS: u32 = Self::STAGES * Self::STAGE_ROWS;
}

/// Declares tiles: their accumulators, shape, and whether the consumers cooperate.
macro_rules! tiles {
    ($($(#[$doc:meta])* $name:ident = [f32; $accumulators:literal], $shape:ident, $cooperative:literal;)*) => {$(
        $(#[$doc])*
        pub struct $name;

        impl Tile for $name {
            type Accumulator = [f32; $accumulators];
            const SHAPE: TileShape = TileShape::$shape;
            const COOPERATIVE: bool = $cooperative;
        }
    )*};
}

tiles! {
    /// A ping-pong tile of 128 x 128.
    Pingpong128x128 = [f32; 64], T128x128, false;
    /// A ping-pong tile of 128 x 192.
    Pingpong128x192 = [f32; 96], T128x192, false;
    /// A cooperative tile of 256 x 128.
    Cooperative256x128 = [f32; 64], T256x128, true;
    /// A cooperative tile of 256 x 192.
    Cooperative256x192 = [f32; 96], T256x192, true;
    /// A cooperative tile of 128 x 256.
    Cooperative128x256 = [f32; 128], T128x256, true;
    /// A cooperative tile of 128 x 320.
    Cooperative128x320 = [f32; 160], T128x320, true;
    /// A cooperative tile of 128 x 128, with registers for two sets of accumulators.
    Cooperative128x128 = [f32; 64], T128x128, true;
    /// A cooperative tile of 128 x 192, with registers for two sets of accumulators.
    Cooperative128x192 = [f32; 96], T128x192, true;
}

/// Rows of a group of tiles. Concurrent blocks work on one group, so that its operands stay in L2.
const GROUP_ROWS: u32 = 2048;

/// Assigns work tiles to persistent thread blocks: block b computes work tiles b, b + grid size, ….
///
/// Work tiles are ordered by slice of K first, so that concurrent blocks read the same part of K.
#[derive(Clone, Copy)]
pub struct SplitKScheduler {
    tile_m: u32,
    tile_n: u32,
    /// Tiles of a column, and of a row, of the output.
    tiles_m: u32,
    tiles_n: u32,
    split_k: u32,
    /// Pipeline stages of K, and of every slice of K but the last.
    k_steps: u32,
    slice_steps: u32,
}

/// An output tile, and the slice of K to compute it over.
#[derive(Clone, Copy)]
pub struct WorkTile {
    /// Index of the matrix in its batch. 0 for a GEMM that is not batched.
    pub matrix: u32,
    /// Index among all work tiles: slice by slice, and tile by tile within a slice.
    pub index: u32,
    /// First row of the output.
    pub row: u32,
    /// First column of the output.
    pub column: u32,
    /// First step of K, in units of a pipeline stage.
    pub first_step: u32,
    /// Steps of K, in units of a pipeline stage.
    pub steps: u32,
}

/// Returns the index of this block's `i`-th work tile.
#[inline(always)]
fn index(i: u32) -> u32 {
    thread::block_idx_x() + i * thread::grid_dim_x()
}

/// Assigns work tiles to persistent thread blocks.
pub trait Scheduler: Copy {
    /// Creates the scheduler of outputs (m, n) in tiles of `tile_m` x `tile_n`, for pipeline stages of `tile_k` columns of K.
    /// `parts` is the number of slices of K (no slice may be empty), of matrices in a batch, or of `groups`.
    fn new(tile: [u32; 3], shape: [u32; 3], parts: u32, groups: Global<u32>) -> Self;
    /// Returns true if this block has an `i`-th work tile.
    fn has(self, i: u32) -> bool;
    /// Returns the steps of this block's `i`-th work tile, or an arbitrary number if there is no such tile.
    fn steps(self, i: u32) -> u32;
    /// Returns this block's `i`-th work tile, which must exist.
    fn work_tile(self, i: u32) -> WorkTile;
    /// Returns the slice of K of the work tile with this index: 0 if K is not split.
    #[inline(always)]
    fn slice(self, _index: u32) -> u32 {
        0
    }
}

#[device]
impl SplitKScheduler {
    /// Returns the number of output tiles.
    pub fn tiles(self) -> u32 {
        self.tiles_m * self.tiles_n
    }

    /// Returns the first row and column of output tile `t`. Tiles run down the rows of a group, then to the next
    /// column.
    pub fn tile(self, t: u32) -> (u32, u32) {
        let group_tiles = GROUP_ROWS / self.tile_m;
        let group = t / (group_tiles * self.tiles_n);
        let within = t - group * group_tiles * self.tiles_n;
        let height = (self.tiles_m - group * group_tiles).min(group_tiles);
        ((group * group_tiles + within % height) * self.tile_m, within / height * self.tile_n)
    }
}

#[device]
impl Scheduler for SplitKScheduler {
    fn new([tile_m, tile_n, tile_k]: [u32; 3], [m, n, k]: [u32; 3], split_k: u32, _: Global<u32>) -> Self {
        let (tiles_m, tiles_n) = (m.div_ceil(tile_m), n.div_ceil(tile_n));
        let k_steps = k.div_ceil(tile_k);
        Self { tile_m, tile_n, tiles_m, tiles_n, split_k, k_steps, slice_steps: k_steps.div_ceil(split_k) }
    }

    fn has(self, i: u32) -> bool {
        index(i) < self.tiles() * self.split_k
    }

    fn steps(self, i: u32) -> u32 {
        let first_step = self.slice(index(i)) * self.slice_steps;
        self.slice_steps.min(self.k_steps.saturating_sub(first_step))
    }

    fn work_tile(self, i: u32) -> WorkTile {
        let index = index(i);
        let slice = self.slice(index);
        let (row, column) = self.tile(index - slice * self.tiles());
        WorkTile { matrix: 0, index, row, column, first_step: slice * self.slice_steps, steps: self.steps(i) }
    }

    fn slice(self, index: u32) -> u32 {
        if self.split_k == 1 { 0 } else { index / self.tiles() }
    }
}

/// Assigns the tiles of a batch of matrices, matrix by matrix.
#[derive(Clone, Copy)]
pub struct BatchScheduler {
    tiles: SplitKScheduler,
    count: u32,
}

#[device]
impl Scheduler for BatchScheduler {
    fn new(tile: [u32; 3], shape: [u32; 3], count: u32, groups: Global<u32>) -> Self {
        Self { tiles: SplitKScheduler::new(tile, shape, 1, groups), count }
    }

    fn has(self, i: u32) -> bool {
        index(i) < self.tiles.tiles() * self.count
    }

    fn steps(self, _: u32) -> u32 {
        self.tiles.k_steps
    }

    fn work_tile(self, i: u32) -> WorkTile {
        let index = index(i);
        let matrix = index / self.tiles.tiles();
        let (row, column) = self.tiles.tile(index - matrix * self.tiles.tiles());
        WorkTile { matrix, index, row, column, first_step: 0, steps: self.tiles.k_steps }
    }
}

/// Assigns the tiles of the rows of all groups of a grouped GEMM. A tile has rows of one group.
#[derive(Clone, Copy)]
pub struct GroupScheduler {
    tiles: SplitKScheduler,
    /// The group of each block of rows.
    blocks: Global<u32>,
}

#[device]
impl Scheduler for GroupScheduler {
    fn new([tile_m, tile_n, tile_k]: [u32; 3], [_, n, k]: [u32; 3], count: u32, groups: Global<u32>) -> Self {
        const BLOCK: u32 = GROUP_BLOCK as u32;
        assert!(tile_m == BLOCK, "a tile has the rows of a block");
        let rows = groups.at(count as usize);
        let tiles = SplitKScheduler::new([tile_m, tile_n, tile_k], [rows, n, k], 1, groups);
        Self { tiles, blocks: groups.skip(Groups { count: count as usize, rows: 0 }.blocks()) }
    }

    fn has(self, i: u32) -> bool {
        self.tiles.has(i)
    }

    fn steps(self, _: u32) -> u32 {
        self.tiles.k_steps
    }

    fn work_tile(self, i: u32) -> WorkTile {
        let tile = self.tiles.work_tile(i);
        WorkTile { matrix: self.blocks.at((tile.row / self.tiles.tile_m) as usize), ..tile }
    }
}

/// Assigns the tiles of the outputs of all groups of a grouped GEMM, each a sum over the rows of a group, group by group.
#[derive(Clone, Copy)]
pub struct GroupSumScheduler {
    outputs: BatchScheduler,
    tile_k: u32,
    /// The first row of each group, and the end of the last.
    starts: Global<u32>,
}

#[device]
impl GroupSumScheduler {
    /// Returns the number of steps before the first row of a group.
    fn first_step(self, group: u32) -> u32 {
        self.starts.at(group as usize) / self.tile_k
    }
}

#[device]
impl Scheduler for GroupSumScheduler {
    fn new(tile: [u32; 3], shape: [u32; 3], count: u32, groups: Global<u32>) -> Self {
        Self { outputs: BatchScheduler::new(tile, shape, count, groups), tile_k: tile[2], starts: groups }
    }

    fn has(self, i: u32) -> bool {
        self.outputs.has(i)
    }

    fn steps(self, i: u32) -> u32 {
        // There may be no such tile.
        let group = (index(i) / self.outputs.tiles.tiles()).min(self.outputs.count - 1);
        self.first_step(group + 1) - self.first_step(group)
    }

    fn work_tile(self, i: u32) -> WorkTile {
        let tile = self.outputs.work_tile(i);
        WorkTile { first_step: self.first_step(tile.matrix), steps: self.steps(i), ..tile }
    }
}

/// Assigns the tiles of a batch of symmetric matrices that have elements on or above the diagonal, matrix by matrix and
/// row of tiles by row of tiles.
#[derive(Clone, Copy)]
pub struct SymmetricScheduler {
    tile_m: u32,
    tile_n: u32,
    /// Tiles of a row of the output.
    tiles_n: u32,
    /// Assigned tiles of a matrix.
    tiles: u32,
    count: u32,
    k_steps: u32,
}

impl SymmetricScheduler {
    /// Returns the index of the first assigned tile of the row of tiles that starts at `row`: the one on the diagonal.
    #[inline(always)]
    fn first_tile(self, row: u32) -> u32 {
        row / self.tile_n
    }
}

#[device]
impl Scheduler for SymmetricScheduler {
    fn new([tile_m, tile_n, tile_k]: [u32; 3], [_, n, k]: [u32; 3], count: u32, _: Global<u32>) -> Self {
        let (tiles_n, k_steps) = (n.div_ceil(tile_n), k.div_ceil(tile_k));
        let mut scheduler = Self { tile_m, tile_n, tiles_n, tiles: 0, count, k_steps };
        let mut row = 0;
        while row < n {
            scheduler.tiles += tiles_n - scheduler.first_tile(row);
            row += tile_m;
        }
        scheduler
    }

    fn has(self, i: u32) -> bool {
        index(i) < self.tiles * self.count
    }

    fn steps(self, _: u32) -> u32 {
        self.k_steps
    }

    fn work_tile(self, i: u32) -> WorkTile {
        let index = index(i);
        let matrix = index / self.tiles;
        let (mut row, mut tile) = (0, index - matrix * self.tiles);
        while tile >= self.tiles_n - self.first_tile(row) {
            tile -= self.tiles_n - self.first_tile(row);
            row += self.tile_m;
        }
        let column = (self.first_tile(row) + tile) * self.tile_n;
        WorkTile { matrix, index, row, column, first_step: 0, steps: self.k_steps }
    }
}
