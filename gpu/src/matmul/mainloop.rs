//! Operands through a ring of stages in shared memory: the producer's loads, a consumer's products.

use super::pingpong::{Shared, is_first};
use super::tiles::{Item, Tile};
use cuda_std::Global;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{MBarrier, TensorMap, wgmma};

/// Columns of k in a stage.
pub const TILE_K: u32 = 64;

/// Rows of a (M, K) that a load takes.
pub const A_BOX: u32 = 128;

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

/// A place in the ring; the parity flips each time round. A consumer starts with parity 0, the producer with 1, for fresh
/// stages count as released.
#[derive(Clone, Copy)]
pub struct Place {
    pub stage: u32,
    pub parity: u32,
}

impl Place {
    #[inline(always)]
    pub fn advance<T: Tile>(&mut self) {
        self.stage += 1;
        if self.stage == T::STAGES {
            self.stage = 0;
            self.parity ^= 1;
        }
    }

    #[inline(always)]
    pub fn skip<T: Tile>(&mut self, count: u32) {
        let stage = self.stage + count;
        self.stage = stage % T::STAGES;
        self.parity ^= stage / T::STAGES % 2;
    }
}

/// Fills one stage with step `step` of K.
#[inline(always)]
pub fn load_stage<L: Operands, T: Tile>(
    shared: Shared,
    stage: u32,
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    step: u32,
    Item { row, column, .. }: Item,
) {
    let k = step * TILE_K;
    let full = shared.full.at(stage);
    let at = stage * T::STAGE_ROWS;
    full.arrive_expecting(T::STAGE_ROWS * 128);
    if L::A_BY_ROWS {
        for i in 0..T::ROWS / 64 {
            shared.pool.rows::<64>(at + i * 64).load(a, row + i * 64, k, full);
        }
    } else {
        for i in 0..T::ROWS / A_BOX {
            shared.pool.rows::<128>(at + i * A_BOX).load(a, k, row + i * A_BOX, full);
        }
    }
    let b_tile = shared.pool.rows::<64>(at + T::ROWS);
    if L::B_BY_ROWS {
        for i in 0..T::COLUMNS / 64 {
            b_tile.same_shape_after(i).load(b, column + i * 64, k, full);
        }
    } else {
        for i in 0..T::COLUMNS / T::B_BOX {
            shared.pool.rows::<64>(at + T::ROWS + i * T::B_BOX).load(b, k, column + i * T::B_BOX, full);
        }
    }
}

/// Sums of a consumer's rows of a tile: of the upper 64, and of the lower if there are more.
#[derive(Clone, Copy)]
pub struct Sums<A> {
    pub upper: A,
    pub lower: A,
}

/// A consumer's rows of a tile, over all of K (`steps` >= 1). When the last stage has been seen full, `then` may go on in
/// the ring, if the consumers take turns.
#[inline(always)]
pub fn multiply<L: Operands, T: Tile>(
    shared: Shared,
    consumer: u32,
    steps: u32,
    place: &mut Place,
    then: MBarrier,
) -> Sums<T::Sums> {
    let mut d = Sums { upper: T::Sums::ZERO, lower: T::Sums::ZERO };
    let mut previous = place.stage;
    let mut step = 0;
    // Tested at the end: a path around the products would define accumulators outside them, and ptxas would then
    // serialise every product.
    loop {
        shared.full.at(place.stage).wait(place.parity);
        let at = place.stage * T::STAGE_ROWS;
        wgmma::fence();
        products::<L, T>(&mut d, shared, consumer, at, 0, step != 0);
        products::<L, T>(&mut d, shared, consumer, at, 1, true);
        products::<L, T>(&mut d, shared, consumer, at, 2, true);
        products::<L, T>(&mut d, shared, consumer, at, 3, true);
        wgmma::commit();
        // With the newest group still running, the one before it is done with its stage.
        wgmma::wait::<1>();
        if step != 0 {
            release(shared.empty.at(previous));
        }
        previous = place.stage;
        place.advance::<T>();
        step += 1;
        if step == steps {
            break;
        }
    }
    if !T::TOGETHER && is_first() {
        then.arrive();
    }
    wgmma::wait::<0>();
    d.upper.settle();
    if T::CONSUMER_ROWS > 64 {
        d.lower.settle();
    }
    release(shared.empty.at(previous));
    d
}

/// Starts the products of 16 k of the stage that begins at row `at`.
#[inline(always)]
fn products<L: Operands, T: Tile>(
    d: &mut Sums<T::Sums>,
    shared: Shared,
    consumer: u32,
    at: u32,
    k: u32,
    accumulate: bool,
) {
    let a = if T::TOGETHER { at + consumer * T::CONSUMER_ROWS } else { at };
    let (upper, lower) = (shared.pool.rows::<64>(a), shared.pool.rows::<64>(a + 64));
    let b = shared.pool.rows::<64>(at + T::ROWS);
    let both = T::CONSUMER_ROWS > 64;
    if L::A_BY_ROWS {
        let b = b.operand_by_rows(k);
        d.upper.product(upper.operand_by_rows(k), b, accumulate);
        if both {
            d.lower.product(lower.operand_by_rows(k), b, accumulate);
        }
    } else if L::B_BY_ROWS {
        let b = b.operand_by_rows(k);
        d.upper.product(upper.operand(k), b, accumulate);
        if both {
            d.lower.product(lower.operand(k), b, accumulate);
        }
    } else {
        let b = b.operand(k);
        d.upper.product(upper.operand(k), b, accumulate);
        if both {
            d.lower.product(lower.operand(k), b, accumulate);
        }
    }
}

/// Tells the producer that this consumer, whose products end for all its warps together, is done with a stage.
#[inline(always)]
fn release(empty: MBarrier) {
    if is_first() {
        empty.arrive();
    }
}
