//! Causal self-attention for `sm_90a` and head size 64, forward and backward: TMA, wgmma, and warpgroups with roles.
//!
//! Every kernel here is persistent, one block of 384 threads per multiprocessor. Warpgroup 0 is the producer: it loads
//! tiles by TMA into a ring of stages and keeps few registers. Warpgroups 1 and 2 are consumers of 64 rows (queries or
//! keys) each; what they own stays in registers, as left operands and accumulators, and what streams by is the right
//! operand in shared memory. So no probability is ever written to shared memory.
//!
//! qkv (B,T,3,NH,HS) is read in place through a map over (B, T, 3 NH HS). Rows past the end of a sequence are read as
//! zeros: as keys they lie above the diagonal, as queries they are not stored or their probabilities are made zero. NaN
//! and infinity go as far as [`crate::attention`] says.

mod backward_keys;
mod backward_queries;
mod forward;
#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;

pub use backward_keys::*;
pub use backward_queries::*;
pub use forward::*;

use cuda_std::hopper::mbarrier::MBarriers;
use cuda_std::hopper::{MBarrier, SwizzledTile, TensorMap};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, bf16, element, math, thread, warp};

/// Head size.
const HS: u32 = 64;
/// Rows of a block's work: 64 for each consumer.
pub const TILE: u32 = 128;
/// Rows of a consumer, of a box, and of a streaming tile in the backward.
const HALF: u32 = 64;
/// Box (rows, columns) of the tensor maps over qkv (B, T, 3 NH HS) and dout (B, T, NH HS).
pub const BOX: (u32, u32) = (HALF, HS);
const WARPGROUP: u32 = 128;
const CONSUMERS: u32 = 2;

/// Registers a thread keeps: 128 * 40 + 256 * 232 are what a multiprocessor has.
const PRODUCER_REGISTERS: u32 = 40;
const CONSUMER_REGISTERS: u32 = 232;

/// Accumulators of 64 x 64 and the left operand of 64 x 64 (four steps of 16) per thread.
type Square = [f32; 32];
type Left = [[u32; 4]; 4];

/// Queries (or keys) TILE `tile` .. of head `h` of sequence `b`.
#[derive(Clone, Copy)]
struct Work {
    b: u32,
    h: u32,
    tile: u32,
}

/// Shape of the whole problem.
#[derive(Clone, Copy)]
struct Shape {
    b: u32,
    t: u32,
    nh: u32,
}

impl Shape {
    #[inline(always)]
    fn tiles(self) -> u32 {
        self.t.div_ceil(TILE)
    }

    /// Pieces of work.
    #[inline(always)]
    fn works(self) -> u32 {
        self.tiles() * self.b * self.nh
    }

    /// The i-th piece. Blocks run side by side on the tiles of few heads, so that what those share stays in L2; the tiles
    /// of a head are rotated from round to round, so that no block gets only long ones.
    #[inline(always)]
    fn work(self, i: u32) -> Work {
        let tiles = self.tiles();
        let head = i / tiles;
        let round = head * tiles / thread::grid_dim_x();
        Work { b: head / self.nh, h: head % self.nh, tile: (i - head * tiles + round) % tiles }
    }

    /// First element of row `row` (of the sequence) of a head in (B,T,NH,HS).
    #[inline(always)]
    fn row(self, work: Work, row: u32) -> usize {
        ((work.b as usize * self.t as usize + row as usize) * self.nh as usize + work.h as usize) * HS as usize
    }

    /// First element of row `row` of part 0 (Q), 1 (K) or 2 (V) of a head in (B,T,3,NH,HS).
    #[inline(always)]
    fn packed_row(self, work: Work, part: u32, row: u32) -> usize {
        let at = work.b as usize * self.t as usize + row as usize;
        ((at * 3 + part as usize) * self.nh as usize + work.h as usize) * HS as usize
    }

    /// Column of a part of a head in the map over qkv.
    #[inline(always)]
    fn column(self, work: Work, part: u32) -> u32 {
        (part * self.nh + work.h) * HS
    }

    /// Element of row 0 of a head in (B,NH,T).
    #[inline(always)]
    fn statistics(self, work: Work) -> usize {
        (work.b as usize * self.nh as usize + work.h as usize) * self.t as usize
    }
}

/// A place in a ring of `N` slots; the parity flips each time round. A consumer starts with parity 0, a producer with 1,
/// for fresh slots count as released.
#[derive(Clone, Copy)]
struct Place<const N: u32> {
    slot: u32,
    parity: u32,
}

impl<const N: u32> Place<N> {
    #[inline(always)]
    fn new(parity: u32) -> Self {
        Self { slot: 0, parity }
    }

    /// Moves on and returns the slot left behind.
    #[inline(always)]
    fn advance(&mut self) -> u32 {
        let slot = self.slot;
        self.slot += 1;
        if self.slot == N {
            self.slot = 0;
            self.parity ^= 1;
        }
        slot
    }
}

/// The two barriers of each of a ring's slots.
#[derive(Clone, Copy)]
struct Slots {
    full: MBarriers,
    empty: MBarriers,
}

impl Slots {
    fn new(layout: &mut Layout, count: u32) -> Self {
        Self { full: layout.mbarriers(count as usize), empty: layout.mbarriers(count as usize) }
    }

    /// A slot is full after `arrivals` (and the bytes they announce), empty when both consumers have released it.
    #[inline(always)]
    fn init(self, count: u32, arrivals: u32) {
        for slot in 0..count {
            self.full.at(slot).init(arrivals);
            self.empty.at(slot).init(CONSUMERS);
        }
    }

    /// A consumer warpgroup has read a slot with ordinary loads: each warp must be done before one thread says so.
    #[inline(always)]
    fn release_read(self, slot: u32, consumer: u32) {
        thread::sync_named(1 + consumer, WARPGROUP);
        self.release(slot);
    }

    /// A consumer warpgroup has waited for the products that read a slot, which end for all its warps together.
    #[inline(always)]
    fn release(self, slot: u32) {
        if thread::thread_idx_x().is_multiple_of(WARPGROUP) {
            self.empty.at(slot).arrive();
        }
    }
}

/// Loads 128 rows of 64 columns of sequence `b`: two boxes.
#[inline(always)]
fn load_tile(tile: SwizzledTile<128>, map: Global<TensorMap>, x: u32, y: u32, b: u32, full: MBarrier) {
    tile.rows::<64>(0).load_of(map, x, y, b, full);
    tile.rows::<64>(HALF).load_of(map, x, y + HALF, b, full);
}

/// This warp's 16 rows of a consumer's 64 x 64 as a left operand.
#[inline(always)]
fn left(tile: SwizzledTile<64>) -> Left {
    let row = thread::thread_idx_x() % WARPGROUP / 32 * 16;
    [tile.left(row, 0), tile.left(row, 1), tile.left(row, 2), tile.left(row, 3)]
}

/// Accumulators rounded, as the left operand of the next product: accumulators of columns 16 k .. 16 k + 16 are step k.
#[inline(always)]
fn as_left(d: &Square) -> Left {
    let step = |k: usize| {
        let pair = |i: usize| element::pack_pair(d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
        [pair(0), pair(1), pair(2), pair(3)]
    };
    [step(0), step(1), step(2), step(3)]
}

/// This thread's first row in its consumer's 64; the other one is 8 below.
#[inline(always)]
fn thread_row() -> u32 {
    thread::thread_idx_x() % WARPGROUP / 32 * 16 + warp::lane() / 4
}

/// Row (0 or 1: 8 below) and column of accumulator `i`.
#[inline(always)]
fn place_of(i: usize) -> (usize, u32) {
    (i / 2 % 2, (i as u32 / 4) * 8 + 2 * (warp::lane() % 4) + i as u32 % 2)
}

/// Writes a row of accumulators times `scale` to the 64 elements at `at`.
#[inline(always)]
fn write_row<const ROW: usize>(out: GlobalMut<bf16>, at: usize, d: &Square, scale: f32) {
    for j in 0..8 {
        let i = 4 * j + 2 * ROW;
        let pair = element::pack_pair(d[i] * scale, d[i + 1] * scale);
        out.set_pair(at + 8 * j + 2 * (warp::lane() % 4) as usize, pair);
    }
}

/// 1 / sqrt(HS), exact for 64.
const SCALE: f32 = 0.125;
/// Scores are raised to powers of 2: exp(x) = 2^(x log2 e).
const SCALE_LOG2: f32 = SCALE * core::f32::consts::LOG2_E;

/// What a probability is 2 to the power of minus: lse in base 2. Infinite past the end of a sequence: probability 0.
#[inline(always)]
fn shift_of(lse: Global<f32>, at: usize, inside: bool) -> f32 {
    if inside { lse.at(at) * core::f32::consts::LOG2_E } else { f32::INFINITY }
}

#[inline(always)]
fn probability(score: f32, shift: f32) -> f32 {
    math::exp2(math::fma(score, SCALE_LOG2, -shift))
}
