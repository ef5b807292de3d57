//! The mainloop: loads of the operands into the pipeline, and the multiplication of its stages.

use cuda_std::mma::mma_fp8;
use cuda_std::shared::Layout;
use cuda_std::{E4m3, Element, Fp8, Global, SharedTile, async_copy, device, thread, warp};

/// Rows and columns of the tile of a block.
pub const TILE: usize = 128;
/// Columns of K in a stage.
pub const TILE_K: usize = 64;
/// Stages of the pipeline, a power of two.
const STAGES: usize = 4;
/// Rows of all stages of an operand.
const STAGES_ROWS: usize = STAGES * TILE;
/// Columns of K that an instruction multiplies.
const MMA_K: usize = 32;
/// Rows and columns of a warp.
pub const WARP_ROWS: usize = 64;
pub const WARP_COLUMNS: usize = 32;
/// Strips of 16 rows of a warp.
pub const STRIPS: usize = WARP_ROWS / 16;
/// Blocks of 8 columns of a warp.
pub const BLOCKS: usize = WARP_COLUMNS / 8;

/// A warp's accumulators: those of each block of 8 columns, in each strip. [`cuda_std::mma`] documents the elements of a block.
pub type Accumulators = [[[f32; 4]; BLOCKS]; STRIPS];

const ZERO: Accumulators = [[[0.0; 4]; BLOCKS]; STRIPS];

/// Returns the first row and column of this warp in the tile.
#[inline(always)]
pub fn warp_position() -> [usize; 2] {
    let warp = warp::index() as usize;
    let columns = TILE / WARP_COLUMNS;
    [warp / columns * WARP_ROWS, warp % columns * WARP_COLUMNS]
}

/// An operand (rows, K), and the stages of its rows in the tile.
#[derive(Clone, Copy)]
pub struct Operand {
    stages: SharedTile<E4m3, STAGES_ROWS, TILE_K>,
    from: Global<E4m3>,
    /// First row of the tile.
    first: u32,
    rows: u32,
    k: u32,
}

#[device]
impl Operand {
    /// Creates the operand with stages from `layout`.
    pub fn new(layout: &mut Layout, from: Global<E4m3>, first: u32, rows: u32, k: u32) -> Self {
        Self { stages: layout.tile(), from, first, rows, k }
    }

    /// Returns the first row of the stage of step `step` of K.
    fn stage(step: u32) -> usize {
        step as usize % STAGES * TILE
    }

    /// Starts the load of step `step` of K.
    fn load(self, step: u32) {
        let (thread, packets) = (thread::thread_idx_x() as usize, TILE_K / E4m3::PACKET);
        let (row, column) = (thread / packets, thread % packets * E4m3::PACKET);
        let k = step * TILE_K as u32 + column as u32;
        for pass in 0..2 {
            let row = row + pass * TILE / 2;
            let from_row = self.first + row as u32;
            let at = from_row as usize * self.k as usize + k as usize;
            let is_inside = from_row < self.rows && k < self.k;
            self.stages.copy_packet_async(Self::stage(step) + row, column, self.from, at, is_inside);
        }
    }
}

/// Computes a warp's sums over all of K. `T` is the format of a. The sums over every `columns` of K, a multiple of [`TILE_K`], are added in
/// f32, unless `columns` is 0.
#[inline(always)]
pub fn multiply<T: Fp8>(a: Operand, b: Operand, columns: u32) -> Accumulators {
    let steps = a.k.div_ceil(TILE_K as u32);
    for step in 0..STAGES as u32 - 1 {
        if step < steps {
            a.load(step);
            b.load(step);
        }
        async_copy::commit();
    }
    let [row, column] = warp_position();
    let group = if columns == 0 { steps } else { columns / TILE_K as u32 };
    let (mut sums, mut d, mut left, mut step) = (ZERO, ZERO, group, 0);
    while step < steps {
        async_copy::wait::<{ STAGES as u32 - 2 }>();
        thread::sync_threads();
        let next = step + STAGES as u32 - 1;
        if next < steps {
            a.load(next);
            b.load(next);
        }
        async_copy::commit();
        let first = Operand::stage(step);
        for k in 0..TILE_K / MMA_K {
            multiply_slice::<T>(&mut d, [a, b], [first + row, first + column], k * MMA_K);
        }
        step += 1;
        left -= 1;
        if left == 0 || step == steps {
            add(&mut sums, &d);
            (d, left) = (ZERO, group);
        }
    }
    sums
}

/// Adds the products of [`MMA_K`] columns of K to `d`. They start at column `k` of the stage, and the rows of this warp start at `a_row` and
/// `b_row`.
#[inline(always)]
fn multiply_slice<T: Fp8>(d: &mut Accumulators, [a, b]: [Operand; 2], [a_row, b_row]: [usize; 2], k: usize) {
    let right: [_; BLOCKS / 2] = core::array::from_fn(|n| b.stages.fp8_b_transposed(b_row + 16 * n, k));
    for strip in 0..STRIPS {
        let left = a.stages.fp8_a(a_row + 16 * strip, k);
        for block in 0..BLOCKS {
            mma_fp8::<T>(&mut d[strip][block], left, right[block / 2][block % 2]);
        }
    }
}

#[inline(always)]
fn add(sums: &mut Accumulators, d: &Accumulators) {
    for strip in 0..STRIPS {
        for block in 0..BLOCKS {
            for i in 0..4 {
                sums[strip][block][i] += d[strip][block][i];
            }
        }
    }
}
