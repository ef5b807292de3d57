//! Operands through a ring of stages in shared memory: the producer's loads, a consumer's products.

use super::pingpong::{Shared, TILE_M, is_first};
use super::tiles::Item;
use cuda_std::Global;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{MBarrier, TensorMap, wgmma};

/// Columns of k in a stage.
pub const TILE_K: u32 = 64;

/// How the operands lie, row-major.
pub trait Operands: 'static {
    /// Whether a is stored (K, M).
    const A_BY_ROWS: bool;
    /// Whether b is stored (K, N).
    const B_BY_ROWS: bool;
}

/// a (M, K) · b (K, N)
pub struct AB;
/// a (M, K) · b (N, K)ᵀ
pub struct ABt;
/// a (K, M)ᵀ · b (K, N)
pub struct AtB;

impl Operands for AtB {
    const A_BY_ROWS: bool = true;
    const B_BY_ROWS: bool = true;
}

impl Operands for AB {
    const A_BY_ROWS: bool = false;
    const B_BY_ROWS: bool = true;
}

impl Operands for ABt {
    const A_BY_ROWS: bool = false;
    const B_BY_ROWS: bool = false;
}

/// Rows of 128 bytes in the ring.
pub const RING_ROWS: usize = 1280;

/// Rows of a stage: TILE_M of a, then as many of b as the tile has columns.
pub const fn stage_rows<A: Accumulators>() -> u32 {
    TILE_M + A::COLUMNS
}

pub const fn stages<A: Accumulators>() -> u32 {
    RING_ROWS as u32 / stage_rows::<A>()
}

/// A place in the ring; the parity flips each time round. A consumer starts with parity 0, the producer with 1, for fresh
/// stages count as released.
#[derive(Clone, Copy)]
pub struct Place {
    pub stage: u32,
    pub parity: u32,
}

impl Place {
    #[inline(always)]
    pub fn advance<A: Accumulators>(&mut self) {
        self.stage += 1;
        if self.stage == stages::<A>() {
            self.stage = 0;
            self.parity ^= 1;
        }
    }

    #[inline(always)]
    pub fn skip<A: Accumulators>(&mut self, count: u32) {
        let stage = self.stage + count;
        self.stage = stage % stages::<A>();
        self.parity ^= stage / stages::<A>() % 2;
    }
}

/// Fills one stage with step `step` of K.
#[inline(always)]
pub fn load_stage<L: Operands, A: Accumulators>(
    shared: Shared,
    stage: u32,
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    step: u32,
    Item { row, column, .. }: Item,
) {
    let k = step * TILE_K;
    let full = shared.full.at(stage);
    let at = stage * stage_rows::<A>();
    full.arrive_expecting(stage_rows::<A>() * 128);
    if L::A_BY_ROWS {
        shared.ring.rows::<64>(at).load(a, row, k, full);
        shared.ring.rows::<64>(at + 64).load(a, row + 64, k, full);
    } else {
        shared.ring.rows::<128>(at).load(a, k, row, full);
    }
    let b_tile = shared.ring.rows::<64>(at + TILE_M);
    if L::B_BY_ROWS {
        for i in 0..A::COLUMNS / 64 {
            b_tile.same_shape_after(i).load(b, column + i * 64, k, full);
        }
    } else {
        b_tile.load(b, k, column, full);
    }
}

/// Sums of a tile of 128 rows: of its upper and of its lower 64.
#[derive(Clone, Copy)]
pub struct Sums<A> {
    pub upper: A,
    pub lower: A,
}

/// A tile, over all of K (`steps` >= 1). When the last stage has been seen full, `then` may go on in the ring.
#[inline(always)]
pub fn multiply<L: Operands, A: Accumulators>(
    shared: Shared,
    steps: u32,
    place: &mut Place,
    then: MBarrier,
) -> Sums<A> {
    let mut d = Sums { upper: A::ZERO, lower: A::ZERO };
    let mut previous = place.stage;
    let mut step = 0;
    // Tested at the end: a path around the products would define accumulators outside them, and ptxas would then
    // serialise every product.
    loop {
        shared.full.at(place.stage).wait(place.parity);
        let at = place.stage * stage_rows::<A>();
        wgmma::fence();
        products::<L, A>(&mut d, shared, at, 0, step != 0);
        products::<L, A>(&mut d, shared, at, 1, true);
        products::<L, A>(&mut d, shared, at, 2, true);
        products::<L, A>(&mut d, shared, at, 3, true);
        wgmma::commit();
        // With the newest group still running, the one before it is done with its stage.
        wgmma::wait::<1>();
        if step != 0 {
            release(shared.empty.at(previous));
        }
        previous = place.stage;
        place.advance::<A>();
        step += 1;
        if step == steps {
            break;
        }
    }
    if is_first() {
        then.arrive();
    }
    wgmma::wait::<0>();
    d.upper.settle();
    d.lower.settle();
    release(shared.empty.at(previous));
    d
}

/// Starts the products of 16 k of the stage that begins at row `at`.
#[inline(always)]
fn products<L: Operands, A: Accumulators>(d: &mut Sums<A>, shared: Shared, at: u32, k: u32, accumulate: bool) {
    let (upper, lower) = (shared.ring.rows::<64>(at), shared.ring.rows::<64>(at + 64));
    let b = shared.ring.rows::<64>(at + TILE_M);
    if L::A_BY_ROWS {
        let b = b.operand_by_rows(k);
        d.upper.product(upper.operand_by_rows(k), b, accumulate);
        d.lower.product(lower.operand_by_rows(k), b, accumulate);
    } else if L::B_BY_ROWS {
        let b = b.operand_by_rows(k);
        d.upper.product(upper.operand(k), b, accumulate);
        d.lower.product(lower.operand(k), b, accumulate);
    } else {
        let b = b.operand(k);
        d.upper.product(upper.operand(k), b, accumulate);
        d.lower.product(lower.operand(k), b, accumulate);
    }
}

/// Tells the producer that this consumer, whose products end for all its warps together, is done with a stage.
#[inline(always)]
fn release(empty: MBarrier) {
    if is_first() {
        empty.arrive();
    }
}
