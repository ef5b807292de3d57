//! 64 rows of a head in shared memory, and what products make of them.

use super::{Head, WARPGROUP};
use core::marker::PhantomData;
use core::ops::Index;
use cuda_std::hopper::wgmma::{Accumulators, Operand, OperandByRows};
use cuda_std::hopper::{MBarrier, SwizzledTile, TensorMap};
use cuda_std::shared::Layout;
use cuda_std::{Global, element, thread, warp};

/// Accumulators of 64 x 64, and the left operand that they become, per thread.
pub type Square = [f32; 32];
pub type Left = [[u32; 4]; 4];

/// 64 rows of HS columns: HS / 64 tiles of 64 columns, one after the other.
pub struct Panel<H> {
    first: SwizzledTile<64>,
    head: PhantomData<H>,
}

impl<H> Clone for Panel<H> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<H> Copy for Panel<H> {}

impl<H: Head> Panel<H> {
    const TILES: u32 = H::HS / 64;
    pub const BYTES: u32 = Self::TILES * SwizzledTile::<64>::BYTES;

    /// Makes room for `count` panels and returns the first.
    pub fn take(layout: &mut Layout, count: u32) -> Self {
        let first = layout.swizzled();
        for _ in 1..count * Self::TILES {
            layout.swizzled::<64>();
        }
        Self { first, head: PhantomData }
    }

    /// The panel `count` further on.
    #[inline(always)]
    pub fn after(self, count: u32) -> Self {
        Self { first: self.first.same_shape_after(count * Self::TILES), ..self }
    }

    /// Its columns from 64 `i` on.
    #[inline(always)]
    pub fn tile(self, i: u32) -> SwizzledTile<64> {
        self.first.same_shape_after(i)
    }

    /// Starts loading columns `x` .., rows `y` .. of sequence `b`.
    #[inline(always)]
    pub fn load(self, map: Global<TensorMap>, x: u32, y: u32, b: u32, full: MBarrier) {
        for i in 0..Self::TILES {
            self.tile(i).load_of(map, x + 64 * i, y, b, full);
        }
    }

    /// Columns 16 `step` .. as k of an operand whose m (or n) are the rows.
    #[inline(always)]
    pub fn operand(self, step: u32) -> Operand {
        self.tile(step / 4).operand(step % 4)
    }

    /// Rows 16 `step` .. as k of an operand whose n are the HS columns.
    #[inline(always)]
    pub fn operand_by_rows(self, step: u32) -> OperandByRows {
        self.first.operand_by_rows(step)
    }

    /// This warp's 16 rows as a left operand.
    #[inline(always)]
    pub fn own(self) -> H::Own {
        let mut own = H::NO_ROWS;
        for step in 0..H::HS / 16 {
            own[step as usize] = self.tile(step / 4).left(warp_row(), step % 4);
        }
        own
    }

    /// Starts d = left · rowsᵀ (+ d), over the HS columns. A `D` of 128 columns takes the rows of the next panel, too, which follow
    /// those of this one if HS = 64.
    #[inline(always)]
    pub fn start_scores<D: Accumulators>(self, d: &mut D, left: &H::Own, accumulate: bool) {
        for step in 0..H::HS / 16 {
            d.product_with(left[step as usize], self.operand(step), accumulate || step > 0);
        }
    }

    /// As [`start_scores`](Self::start_scores), with the left operand in shared memory.
    #[inline(always)]
    pub fn start_scores_of<D: Accumulators>(self, d: &mut D, left: Self, accumulate: bool) {
        for step in 0..H::HS / 16 {
            d.product(left.operand(step), self.operand(step), accumulate || step > 0);
        }
    }

    /// Starts sums += left · rows, over the rows of `panels` panels.
    #[inline(always)]
    pub fn add_products(self, sums: &mut H::Sums, left: &impl Index<usize, Output = [u32; 4]>, panels: u32) {
        for step in 0..4 * panels {
            sums.product_with_rows(left[step as usize], self.after(step / 4).operand_by_rows(step % 4), true);
        }
    }
}

/// Accumulators of columns 16 k .. 16 k + 16 rounded: step k of the left operand of the next product.
#[inline(always)]
pub fn left_step(d: &impl Index<usize, Output = f32>, k: usize) -> [u32; 4] {
    let pair = |i: usize| element::pack_pair(d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
    [pair(0), pair(1), pair(2), pair(3)]
}

/// All steps of 64 x 64.
#[inline(always)]
pub fn as_left(d: &Square) -> Left {
    [left_step(d, 0), left_step(d, 1), left_step(d, 2), left_step(d, 3)]
}

/// This warp's first row of 16 in its warpgroup's 64.
#[inline(always)]
pub fn warp_row() -> u32 {
    thread::thread_idx_x() % WARPGROUP / 32 * 16
}

/// This thread's first row in its warpgroup's 64; the other one is 8 below.
#[inline(always)]
pub fn thread_row() -> u32 {
    warp_row() + warp::lane() / 4
}

/// Row (0 or 1: 8 below) and column of accumulator `i`.
#[inline(always)]
pub fn place_of(i: usize) -> (usize, u32) {
    (i / 2 % 2, (i as u32 / 4) * 8 + 2 * (warp::lane() % 4) + i as u32 % 2)
}
