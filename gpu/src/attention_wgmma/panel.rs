//! Panels of 64 rows of a head in shared memory, and the wgmma operands made of them.

use super::{Head, ROWS, WARPGROUP};
use core::marker::PhantomData;
use core::ops::Index;
use cuda_std::hopper::wgmma::{Accumulators, KMajorOperand, MnMajorOperand};
use cuda_std::hopper::{MBarrier, SwizzledTile, TensorMap};
use cuda_std::shared::Layout;
use cuda_std::{Global, element, thread, warp};

/// A thread's accumulators of 64 x 64 scores.
pub type ScoreSquare = [f32; 32];
/// 64 x 64 scores, rounded to bf16, as A fragments.
pub type SquareFragments = [[u32; 4]; 4];
/// A thread's accumulators of 64 x 128 scores: 64 queries and the keys of two panels.
pub type ScorePair = [f32; 64];
/// 64 x 128 scores, rounded to bf16, as A fragments.
pub type PairFragments = [[u32; 4]; 8];

/// 64 rows of HS columns in shared memory: HS / 64 consecutive tiles of 64 columns.
#[derive(Clone, Copy)]
pub struct Panel<H> {
    first: SwizzledTile<64>,
    head: PhantomData<H>,
}

/// Takes `count` consecutive tiles from `layout` and returns the first.
fn take_tiles(layout: &mut Layout, count: u32) -> SwizzledTile<64> {
    let first = layout.swizzled();
    for _ in 1..count {
        layout.swizzled::<64>();
    }
    first
}

impl<H: Head> Panel<H> {
    const TILES: u32 = H::HS / 64;
    /// The size of a panel in bytes.
    pub const BYTES: u32 = Self::TILES * SwizzledTile::<64>::BYTES;

    /// Takes `count` consecutive panels from `layout` and returns the first.
    pub fn take(layout: &mut Layout, count: u32) -> Self {
        Self { first: take_tiles(layout, count * Self::TILES), head: PhantomData }
    }

    /// Returns the panel that is `count` panels after this one.
    #[inline(always)]
    pub fn after(self, count: u32) -> Self {
        Self { first: self.first.offset_tiles(count * Self::TILES), ..self }
    }

    /// Returns the panel unchanged, but hides its address from the compiler. See [`SwizzledTile::opaque`].
    #[inline(always)]
    pub fn opaque(self) -> Self {
        Self { first: self.first.opaque(), ..self }
    }

    /// Returns the tile of columns 64 `i` .. 64 `i` + 64.
    #[inline(always)]
    pub fn tile(self, i: u32) -> SwizzledTile<64> {
        self.first.offset_tiles(i)
    }

    /// Starts the load of columns `x` .., rows `y` .. of sequence `b`.
    #[inline(always)]
    pub fn load(self, map: Global<TensorMap>, x: u32, y: u32, b: u32, full: MBarrier) {
        for i in 0..Self::TILES {
            self.tile(i).load_3d(map, x + 64 * i, y, b, full);
        }
    }

    /// Returns columns 16 `step` .. as the K dimension of an operand whose M (or N) dimension are the rows.
    #[inline(always)]
    pub fn k_major_operand(self, step: u32) -> KMajorOperand {
        self.tile(step / 4).k_major_operand(step % 4)
    }

    /// Returns rows 16 `step` .. as the K dimension of an operand whose N dimension are the HS columns.
    #[inline(always)]
    pub fn mn_major_operand(self, step: u32) -> MnMajorOperand {
        self.first.mn_major_operand(step)
    }

    /// Loads this warp's 16 rows as A fragments.
    #[inline(always)]
    pub fn row_fragments(self) -> H::RowFragments {
        let mut rows = H::ZERO_ROWS;
        for step in 0..H::HS / 16 {
            rows[step as usize] = self.tile(step / 4).load_a_fragment(warp_row(), step % 4);
        }
        rows
    }

    /// Starts d = a · rowsᵀ, summed over the HS columns.
    #[inline(always)]
    pub fn start_scores(self, d: &mut ScoreSquare, a: &H::RowFragments) {
        for step in 0..H::HS / 16 {
            d.mma_with_a_registers(a[step as usize], self.k_major_operand(step), step > 0);
        }
    }

    /// Same as [`start_scores`](Self::start_scores), with a in shared memory.
    #[inline(always)]
    pub fn start_scores_from_shared(self, d: &mut ScoreSquare, a: Self) {
        for step in 0..H::HS / 16 {
            d.mma(a.k_major_operand(step), self.k_major_operand(step), step > 0);
        }
    }

    /// Starts d += a · rows, summed over the rows of `panels` panels.
    #[inline(always)]
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

/// 128 rows of HS columns in shared memory. One wgmma reads all rows as its N dimension, so the two tiles of each 64
/// columns are consecutive, unlike those of two panels.
#[derive(Clone, Copy)]
pub struct WidePanel<H> {
    first: SwizzledTile<64>,
    head: PhantomData<H>,
}

impl<H: Head> WidePanel<H> {
    const TILES: u32 = 2 * H::HS / 64;

    /// Takes `count` consecutive panels from `layout` and returns the first.
    pub fn take(layout: &mut Layout, count: u32) -> Self {
        Self { first: take_tiles(layout, count * Self::TILES), head: PhantomData }
    }

    /// Returns the panel that is `count` panels after this one.
    #[inline(always)]
    pub fn after(self, count: u32) -> Self {
        Self { first: self.first.offset_tiles(count * Self::TILES), ..self }
    }

    /// Starts the load of columns `x` .., rows `y` .. of sequence `b`.
    #[inline(always)]
    pub fn load(self, map: Global<TensorMap>, x: u32, y: u32, b: u32, full: MBarrier) {
        for half in 0..2 {
            for i in 0..H::HS / 64 {
                self.first.offset_tiles(2 * i + half).load_3d(map, x + 64 * i, y + half * ROWS, b, full);
            }
        }
    }

    /// Starts d = a · rowsᵀ, summed over the HS columns.
    #[inline(always)]
    pub fn start_scores(self, d: &mut ScorePair, a: Panel<H>) {
        for step in 0..H::HS / 16 {
            d.mma(a.k_major_operand(step), self.k_major_operand(step), step > 0);
        }
    }

    /// Returns columns 16 `step` .. as the K dimension of an operand with the 128 rows as N dimension.
    #[inline(always)]
    fn k_major_operand(self, step: u32) -> KMajorOperand {
        self.first.offset_tiles(step / 4 * 2).k_major_operand(step % 4)
    }
}

/// Rounds the accumulators of columns 16 `step` .. 16 `step` + 16 to bf16, as an A fragment of the next multiplication.
#[inline(always)]
pub fn a_fragment(d: &impl Index<usize, Output = f32>, step: usize) -> [u32; 4] {
    let pair = |i: usize| element::pack_pair(d[8 * step + 2 * i], d[8 * step + 2 * i + 1]);
    [pair(0), pair(1), pair(2), pair(3)]
}

/// Rounds 64 x 64 accumulators to bf16, as A fragments.
#[inline(always)]
pub fn square_fragments(d: &ScoreSquare) -> SquareFragments {
    [a_fragment(d, 0), a_fragment(d, 1), a_fragment(d, 2), a_fragment(d, 3)]
}

/// Rounds 64 x 128 accumulators to bf16, as A fragments.
#[inline(always)]
pub fn pair_fragments(d: &ScorePair) -> PairFragments {
    let mut fragments = [[0; 4]; 8];
    for step in 0..8 {
        fragments[step] = a_fragment(d, step);
    }
    fragments
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
