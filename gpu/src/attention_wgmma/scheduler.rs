//! Which block works on what, and where that lies in memory.

use super::Head;
use core::marker::PhantomData;
use cuda_std::thread;

/// Rounds of the blocks that the heads taken together are for: enough to even out, few enough for their keys and values to
/// stay in L2.
const ROUNDS: u32 = 8;

/// Rows (queries or keys) TILE `tile` .. of head `h` of sequence `b`.
#[derive(Clone, Copy)]
pub struct Work {
    pub b: u32,
    pub h: u32,
    pub tile: u32,
}

/// The whole problem, in pieces of `TILE` rows of a head.
pub struct Shape<H, const TILE: u32> {
    pub b: u32,
    pub t: u32,
    pub nh: u32,
    pub head: PhantomData<H>,
}

impl<H, const TILE: u32> Clone for Shape<H, TILE> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<H, const TILE: u32> Copy for Shape<H, TILE> {}

impl<H: Head, const TILE: u32> Shape<H, TILE> {
    #[inline(always)]
    pub fn tiles(self) -> u32 {
        self.t.div_ceil(TILE)
    }

    /// Pieces of work.
    #[inline(always)]
    pub fn works(self) -> u32 {
        self.tiles() * self.b * self.nh
    }

    /// The i-th piece. Heads are taken some at a time, so that what their tiles share stays in L2; of those, tiles that take
    /// long come first, whose number is high, or low if `LOW_FIRST`.
    #[inline(always)]
    pub fn work<const LOW_FIRST: bool>(self, i: u32) -> Work {
        let (tiles, heads) = (self.tiles(), self.b * self.nh);
        let together = (ROUNDS * thread::grid_dim_x() / tiles).clamp(1, heads);
        let first = i / (together * tiles) * together;
        let together = together.min(heads - first);
        let within = i - first * tiles;
        let (head, tile) = (first + within % together, within / together);
        Work { b: head / self.nh, h: head % self.nh, tile: if LOW_FIRST { tile } else { tiles - 1 - tile } }
    }

    /// First element of row `row` (of the sequence) of a head in (B,T,NH,HS).
    #[inline(always)]
    pub fn row(self, work: Work, row: u32) -> usize {
        ((work.b as usize * self.t as usize + row as usize) * self.nh as usize + work.h as usize) * H::HS as usize
    }

    /// First element of row `row` of part 0 (Q), 1 (K) or 2 (V) of a head in (B,T,3,NH,HS).
    #[inline(always)]
    pub fn packed_row(self, work: Work, part: u32, row: u32) -> usize {
        let at = work.b as usize * self.t as usize + row as usize;
        ((at * 3 + part as usize) * self.nh as usize + work.h as usize) * H::HS as usize
    }

    /// Column of a part of a head in the map over qkv.
    #[inline(always)]
    pub fn column(self, work: Work, part: u32) -> u32 {
        (part * self.nh + work.h) * H::HS
    }

    /// Element of row 0 of a head in (B,NH,T).
    #[inline(always)]
    pub fn statistics(self, work: Work) -> usize {
        (work.b as usize * self.nh as usize + work.h as usize) * self.t as usize
    }
}

/// The piece of work of this block in a round, if there are so many. Rounds go to and fro, so that what one gives a block
/// more the next gives it less.
#[inline(always)]
pub fn piece(round: u32) -> u32 {
    let (blocks, block) = (thread::grid_dim_x(), thread::block_idx_x());
    round * blocks + if round.is_multiple_of(2) { block } else { blocks - 1 - block }
}
