//! Panels of 64 rows of a head in shared memory, and the wgmma operands made of them.

use super::{Head, ROWS};
use core::marker::PhantomData;
use core::ops::Index;
use cuda_std::hopper::wgmma::{Accumulators, KMajorOperand, MnMajorOperand};
use cuda_std::hopper::{MBarrier, SwizzledTile, TensorMap, WARPGROUP};
use cuda_std::shared::Layout;
use cuda_std::{Global, device, element, thread, warp};

/// A thread's accumulators of 64 x 64 scores.
pub type ScoreSquare = [f32; 32];
/// 64 x 64 scores, rounded to bf16, as A fragments.
pub type SquareFragments = [[u32; 4]; 4];
/// A thread's accumulators of 64 x 128 scores: 64 queries and the keys of two panels.
pub type ScorePair = [f32; 64];
/// 64 x 128 scores, rounded to bf16, as A fragments.
pub type PairFragments = [[u32; 4]; 8];

/// 64 `N` rows of HS columns in shared memory: `N` HS / 64 consecutive tiles of 64 rows x 64 columns. One wgmma reads all rows as
/// its M or N dimension, so the tiles of the same columns are consecutive.
#[derive(Clone, Copy)]
pub struct Panels<H, const N: u32> {
    first: SwizzledTile<64>,
    head: PhantomData<H>,
}

/// 64 rows of HS columns in shared memory.
pub type Panel<H> = Panels<H, 1>;
/// 128 rows of HS columns in shared memory.
pub type WidePanel<H> = Panels<H, 2>;

/// Takes `count` consecutive tiles from `layout` and returns the first.
pub fn take_tiles(layout: &mut Layout, count: u32) -> SwizzledTile<64> {
    let first = layout.swizzled();
    for _ in 1..count {
        layout.swizzled::<64>();
    }
    first
}

#[device]
impl<H: Head, const N: u32> Panels<H, N> {
    const TILES: u32 = N * H::HS / 64;
    /// The size in bytes.
    pub const BYTES: u32 = Self::TILES * SwizzledTile::<64>::BYTES;

    /// Takes `count` consecutive panels from `layout` and returns the first.
    pub fn take(layout: &mut Layout, count: u32) -> Self {
        Self { first: take_tiles(layout, count * Self::TILES), head: PhantomData }
    }

    /// Returns the panel that is `count` panels after this one.
    pub fn after(self, count: u32) -> Self {
        Self { first: self.first.offset_tiles(count * Self::TILES), ..self }
    }

    /// Starts the load of columns `x` .., rows `y` .. of sequence `b`.
    pub fn load(self, map: Global<TensorMap>, x: u32, y: u32, b: u32, full: MBarrier) {
        for half in 0..N {
            for i in 0..H::HS / 64 {
                self.first.offset_tiles(N * i + half).load_3d(map, x + 64 * i, y + half * ROWS, b, full);
            }
        }
    }

    /// Returns columns 16 `step` .. as the K dimension of an operand whose M (or N) dimension are the rows.
    fn k_major_operand(self, step: u32) -> KMajorOperand {
        self.first.offset_tiles(step / 4 * N).k_major_operand(step % 4)
    }

    /// Starts d = a · rowsᵀ, summed over the HS columns, with a in shared memory.
    pub fn start_scores_from_shared<D: Accumulators>(self, d: &mut D, a: Panel<H>) {
        for step in 0..H::HS / 16 {
            d.mma(a.k_major_operand(step), self.k_major_operand(step), step > 0);
        }
    }
}

#[device]
impl<H: Head> Panel<H> {
    /// Returns the panel unchanged, but hides its address from the compiler. See [`SwizzledTile::opaque`].
    pub fn opaque(self) -> Self {
        Self { first: self.first.opaque(), ..self }
    }

    /// Returns the tile of columns 64 `i` .. 64 `i` + 64.
    pub fn tile(self, i: u32) -> SwizzledTile<64> {
        self.first.offset_tiles(i)
    }

    /// Returns rows 16 `step` .. as the K dimension of an operand whose N dimension are the HS columns.
    pub fn mn_major_operand(self, step: u32) -> MnMajorOperand {
        self.first.mn_major_operand(step)
    }

    /// Loads this warp's 16 rows as A fragments.
    pub fn row_fragments(self) -> H::RowFragments {
        let mut rows = H::ZERO_ROWS;
        for step in 0..H::HS / 16 {
            rows[step as usize] = self.tile(step / 4).load_a_fragment(warp_row(), step % 4);
        }
        rows
    }

    /// Starts d = a · rowsᵀ, summed over the HS columns.
    pub fn start_scores(self, d: &mut ScoreSquare, a: &H::RowFragments) {
        for step in 0..H::HS / 16 {
            d.mma_with_a_registers(a[step as usize], self.k_major_operand(step), step > 0);
        }
    }

    /// Starts d += a · rows, summed over the rows of `panels` panels.
    pub fn start_accumulate(
        self,
        d: &mut H::OutputAccumulators,
        a: &impl Index<usize, Output = [u32; 4]>,
        panels: u32,
    ) {
        for step in 0..4 * panels {
            d.mma_with_a_registers(a[step as usize], self.after(step / 4).mn_major_operand(step % 4), true);
        }
    }
}

/// Rounds the accumulators of columns 16 `step` .. 16 `step` + 16 to bf16, as an A fragment of the next multiplication.
#[inline(always)]
pub fn a_fragment(d: &impl Index<usize, Output = f32>, step: usize) -> [u32; 4] {
    let pair = |i: usize| element::pack_pair(d[8 * step + 2 * i], d[8 * step + 2 * i + 1]);
    [pair(0), pair(1), pair(2), pair(3)]
}

/// Rounds accumulators of 64 rows x 16 `N` columns to bf16, as A fragments.
#[inline(always)]
pub fn a_fragments<const N: usize>(d: &impl Index<usize, Output = f32>) -> [[u32; 4]; N] {
    core::array::from_fn(|step| a_fragment(d, step))
}

/// Returns this warp's first row of 16 among its warpgroup's 64 rows.
#[inline(always)]
pub fn warp_row() -> u32 {
    thread::thread_idx_x() % WARPGROUP / 32 * 16
}

/// Returns this thread's first row among its warpgroup's 64 rows. Its second row is 8 rows below.
#[inline(always)]
pub fn thread_row() -> u32 {
    warp_row() + warp::lane() / 4
}

/// Returns the column of accumulator `i`.
#[inline(always)]
pub fn accumulator_column(i: usize) -> u32 {
    (i as u32 / 4) * 8 + 2 * (warp::lane() % 4) + i as u32 % 2
}
