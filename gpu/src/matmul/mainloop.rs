//! The mainloop: the producer's loads into the pipeline, and a consumer's multiplication of the stages.

use super::gemm::{Batching, EXACT_COLUMNS, GemmLayout, GemmPrecision};
use super::shared::SharedStorage;
use super::tile::{
    BatchScheduler, GroupScheduler, GroupSumScheduler, Scheduler, SplitKScheduler, SymmetricScheduler, TILE_K,
    TILE_K_FP8, Tile, WorkTile,
};
use core::marker::PhantomData;
use cuda_std::hopper::wgmma::{Accumulators, KMajorOperand};
use cuda_std::hopper::{MBarrier, PipelineState, SwizzledTile, TensorMap, is_warpgroup_leader, wgmma};
use cuda_std::{E4m3, Fp8, Global};

/// Rows of a TMA load of a (M, K).
pub const A_BOX_ROWS: u32 = 128;

/// The operands of a GEMM: their layout, their type, and whether they are batches of matrices.
pub trait Operands: 'static {
    /// The layout.
    const LAYOUT: GemmLayout;
    /// The type of the operands.
    const PRECISION: GemmPrecision = GemmPrecision::Bf16;
    /// The kind of batch.
    const BATCHING: Batching = Batching::One;
    /// True if b consists of two matrices (N, K), up and gate. A tile then has the same columns of both outputs.
    const B_PAIR: bool = false;
    /// Assigns the tiles of the output, or of the outputs of a batch, to thread blocks.
    type Scheduler: Scheduler;

    /// True if a is stored as (K, M), false if as (M, K).
    const A_M_MAJOR: bool = matches!(Self::LAYOUT, GemmLayout::Tn);
    /// True if b is stored as (K, N), false if as (N, K).
    const B_N_MAJOR: bool = !matches!(Self::LAYOUT, GemmLayout::Nt);
    /// True if the operands and outputs are batches of matrices with a constant stride.
    const STRIDED: bool = matches!(Self::BATCHING, Batching::Strided | Batching::Symmetric);
    /// True if the groups of a grouped GEMM share an output: each has rows of it.
    const SHARED_OUT: bool = matches!(Self::BATCHING, Batching::Grouped);
    /// True if the groups of a grouped GEMM share b: each has columns of K.
    const SHARED_B: bool = matches!(Self::BATCHING, Batching::GroupedSum);
    /// True if the tensor maps of b have a third dimension for the matrices of a batch.
    const B_BATCHED: bool = Self::STRIDED || Self::SHARED_OUT;
    /// True if the tensor maps of outputs have a third dimension for the matrices of a batch.
    const OUT_BATCHED: bool = Self::STRIDED || Self::SHARED_B;
    /// True if the outputs are symmetric, and subtiles below the diagonal are copies of those above it.
    const SYMMETRIC: bool = matches!(Self::BATCHING, Batching::Symmetric);
    /// True if the operands have scales.
    const SCALED: bool = matches!(Self::PRECISION, GemmPrecision::Fp8 { .. });
    /// True if sums over some columns of K are added to f32 registers. The consumers must have 64 rows each.
    const PROMOTED: bool = matches!(Self::PRECISION, GemmPrecision::Fp8 { columns: Some(_), .. });
    /// Columns of K in a pipeline stage.
    const TILE_K: u32 = if Self::SCALED { TILE_K_FP8 } else { TILE_K };

    /// Issues D = A · B + (D if `accumulate`) with K-major operands.
    #[inline(always)]
    #[track_caller]
    fn mma_k_major<D: Accumulators>(d: &mut D, a: KMajorOperand, b: KMajorOperand, accumulate: bool) {
        d.mma(a, b, accumulate);
    }
}

/// a (M, K) · b (K, N)
pub struct AB;
/// a (M, K) · b (N, K)ᵀ
pub struct ABt;
/// a (M, K) · b (2, N / 2, K)ᵀ with operands `L`: the columns of up, then those of gate
pub struct Paired<L>(PhantomData<L>);
/// a (K, M)ᵀ · b (K, N)
pub struct AtB;
/// The operands `L` of each matrix of a batch.
pub struct Strided<L>(PhantomData<L>);
/// The operands `L` of each matrix of a batch in which b is a, so the outputs are symmetric.
pub struct Symmetric<L>(PhantomData<L>);
/// The operands `L` of a grouped GEMM. b consists of a matrix, or a pair of them, for each group of rows.
pub struct Grouped<L>(PhantomData<L>);
/// The operands `L` of a grouped GEMM that sums over groups of K.
pub struct GroupedSum<L>(PhantomData<L>);
/// a (M, K) · b (N, K)ᵀ with FP8 operands, a of type `A` and b in E4M3.
pub struct Fp8ABt<A, const EXACT: bool>(PhantomData<A>);

impl Operands for AB {
    const LAYOUT: GemmLayout = GemmLayout::Nn;
    type Scheduler = SplitKScheduler;
}

impl Operands for ABt {
    const LAYOUT: GemmLayout = GemmLayout::Nt;
    type Scheduler = SplitKScheduler;
}

impl<L: Operands> Operands for Paired<L> {
    const LAYOUT: GemmLayout = L::LAYOUT;
    const PRECISION: GemmPrecision = L::PRECISION;
    const B_PAIR: bool = true;
    type Scheduler = L::Scheduler;

    #[inline(always)]
    #[track_caller]
    fn mma_k_major<D: Accumulators>(d: &mut D, a: KMajorOperand, b: KMajorOperand, accumulate: bool) {
        L::mma_k_major(d, a, b, accumulate);
    }
}

impl Operands for AtB {
    const LAYOUT: GemmLayout = GemmLayout::Tn;
    type Scheduler = SplitKScheduler;
}

impl<L: Operands> Operands for Strided<L> {
    const LAYOUT: GemmLayout = L::LAYOUT;
    const BATCHING: Batching = Batching::Strided;
    type Scheduler = BatchScheduler;
}

impl<L: Operands> Operands for Symmetric<L> {
    const LAYOUT: GemmLayout = L::LAYOUT;
    const BATCHING: Batching = Batching::Symmetric;
    type Scheduler = SymmetricScheduler;
}

impl<L: Operands> Operands for Grouped<L> {
    const LAYOUT: GemmLayout = L::LAYOUT;
    const PRECISION: GemmPrecision = L::PRECISION;
    const BATCHING: Batching = Batching::Grouped;
    const B_PAIR: bool = L::B_PAIR;
    type Scheduler = GroupScheduler;

    #[inline(always)]
    #[track_caller]
    fn mma_k_major<D: Accumulators>(d: &mut D, a: KMajorOperand, b: KMajorOperand, accumulate: bool) {
        L::mma_k_major(d, a, b, accumulate);
    }
}

impl<L: Operands> Operands for GroupedSum<L> {
    const LAYOUT: GemmLayout = L::LAYOUT;
    const PRECISION: GemmPrecision = L::PRECISION;
    const BATCHING: Batching = Batching::GroupedSum;
    type Scheduler = GroupSumScheduler;

    #[inline(always)]
    #[track_caller]
    fn mma_k_major<D: Accumulators>(d: &mut D, a: KMajorOperand, b: KMajorOperand, accumulate: bool) {
        L::mma_k_major(d, a, b, accumulate);
    }
}

impl<A: Fp8, const EXACT: bool> Operands for Fp8ABt<A, EXACT> {
    const LAYOUT: GemmLayout = GemmLayout::Nt;
    const PRECISION: GemmPrecision =
        GemmPrecision::Fp8 { a: A::FORMAT, columns: if EXACT { Some(EXACT_COLUMNS) } else { None } };
    type Scheduler = SplitKScheduler;

    #[inline(always)]
    #[track_caller]
    fn mma_k_major<D: Accumulators>(d: &mut D, a: KMajorOperand, b: KMajorOperand, accumulate: bool) {
        d.mma_fp8::<A, E4m3>(a, b, accumulate);
    }
}

/// Starts the load of a box at column `x` and row `y`, of matrix `matrix` if `batched`.
#[inline(always)]
fn load_box<const R: usize>(
    to: SwizzledTile<R>,
    map: Global<TensorMap>,
    batched: bool,
    [x, y, matrix]: [u32; 3],
    full: MBarrier,
) {
    if batched {
        to.load_3d(map, x, y, matrix, full);
    } else {
        to.load(map, x, y, full);
    }
}

/// Starts the loads of step `step` of K into a stage.
#[inline(always)]
pub fn load_stage<L: Operands, T: Tile>(
    shared: SharedStorage,
    stage: u32,
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    step: u32,
    WorkTile { matrix, row, column, .. }: WorkTile,
) {
    let k = step * L::TILE_K;
    let full = shared.pipeline.full.at(stage);
    let first_row = stage * T::STAGE_ROWS;
    full.arrive_expect_tx(T::STAGE_ROWS * 128);
    if L::A_M_MAJOR {
        for i in 0..T::TILE_M / 64 {
            load_box::<64>(shared.pool.rows(first_row + i * 64), a, L::STRIDED, [row + i * 64, k, matrix], full);
        }
    } else {
        for i in 0..T::TILE_M / A_BOX_ROWS {
            let a_rows = shared.pool.rows(first_row + i * A_BOX_ROWS);
            load_box::<128>(a_rows, a, L::STRIDED, [k, row + i * A_BOX_ROWS, matrix], full);
        }
    }
    let b_tile = shared.pool.rows::<64>(first_row + T::TILE_M);
    if L::B_N_MAJOR {
        for i in 0..T::TILE_N / 64 {
            load_box::<64>(b_tile.offset_tiles(i), b, L::B_BATCHED, [column + i * 64, k, matrix], full);
        }
    } else if L::B_PAIR {
        for i in 0..2 {
            let b_rows = shared.pool.rows::<64>(first_row + T::TILE_M + i * (T::TILE_N / 2));
            b_rows.load_3d(b, k, column, 2 * matrix + i, full);
        }
    } else {
        for i in 0..T::TILE_N / T::SHAPE.b_box_rows() {
            let b_rows = shared.pool.rows::<64>(first_row + T::TILE_M + i * T::SHAPE.b_box_rows());
            load_box::<64>(b_rows, b, L::B_BATCHED, [k, column + i * T::SHAPE.b_box_rows(), matrix], full);
        }
    }
}

/// Accumulators of a consumer's rows of a tile: rows 0..64 in `upper`, rows 64..128 in `lower`, which is unused if
/// the consumer has 64 rows.
#[derive(Clone, Copy)]
pub struct ConsumerAccumulators<A> {
    pub upper: A,
    pub lower: A,
}

/// Computes a consumer's rows of a tile over `steps` >= 1 steps of K.
///
/// A ping-pong consumer arrives at the barrier of the other consumer as soon as its last stage is full: the other consumer may
/// then wait for the stages that follow.
#[inline(always)]
pub fn multiply<L: Operands, T: Tile>(
    shared: SharedStorage,
    consumer: u32,
    steps: u32,
    state: &mut PipelineState,
) -> ConsumerAccumulators<T::Accumulator> {
    let mut d = ConsumerAccumulators { upper: T::Accumulator::ZERO, lower: T::Accumulator::ZERO };
    let mut previous = state.stage();
    let mut step = 0;
    // The loop tests its condition at the end. A path around the loop would define the accumulators outside of it, and
    // ptxas would serialize every wgmma.
    loop {
        shared.pipeline.wait_full(*state);
        let first_row = state.stage() * T::STAGE_ROWS;
        wgmma::fence();
        start_stage::<L, T>(&mut d, shared, consumer, first_row, step != 0);
        // One group stays in flight. The group before it has finished, so its stage is free.
        wgmma::wait::<1>();
        if step != 0 {
            shared.pipeline.release(previous);
        }
        previous = state.advance();
        step += 1;
        if step == steps {
            break;
        }
    }
    if !T::COOPERATIVE && is_warpgroup_leader() {
        shared.order_barrier.at(1 - consumer).arrive();
    }
    wgmma::wait::<0>();
    d.upper.fence_accumulators();
    if T::CONSUMER_M > 64 {
        d.lower.fence_accumulators();
    }
    shared.pipeline.release(previous);
    d
}

/// Computes a consumer's 64 rows of a tile like [`multiply`], but adds the sums over every `columns` of K to f32 registers.
#[inline(always)]
pub fn multiply_promoted<L: Operands, T: Tile>(
    shared: SharedStorage,
    consumer: u32,
    [steps, columns]: [u32; 2],
    state: &mut PipelineState,
) -> ConsumerAccumulators<T::Accumulator> {
    assert!(T::COOPERATIVE && T::CONSUMER_M == 64, "two sets of accumulators need consumers of 64 rows");
    let mut sums = T::Accumulator::ZERO;
    let mut left = steps;
    // As in `multiply`, no path may lead around the loop.
    loop {
        let group = left.min(columns / L::TILE_K);
        let d = multiply::<L, T>(shared, consumer, group, state);
        for i in 0..T::TILE_N as usize / 2 {
            sums[i] += d.upper[i];
        }
        left -= group;
        if left == 0 {
            break;
        }
    }
    ConsumerAccumulators { upper: sums, lower: T::Accumulator::ZERO }
}

/// Starts a wgmma group: D = A · B + (D if `accumulate`) for the stage that begins at row `first_row`. The caller has executed
/// [`wgmma::fence`].
#[inline(always)]
fn start_stage<L: Operands, T: Tile>(
    d: &mut ConsumerAccumulators<T::Accumulator>,
    shared: SharedStorage,
    consumer: u32,
    first_row: u32,
    accumulate: bool,
) {
    start_wgmma::<L, T>(d, shared, consumer, first_row, 0, accumulate);
    start_wgmma::<L, T>(d, shared, consumer, first_row, 1, true);
    start_wgmma::<L, T>(d, shared, consumer, first_row, 2, true);
    start_wgmma::<L, T>(d, shared, consumer, first_row, 3, true);
    wgmma::commit();
}

/// Starts the wgmma instructions for bytes 32 `k` .. 32 `k` + 32 of the rows of the stage that begins at row `first_row`.
#[inline(always)]
fn start_wgmma<L: Operands, T: Tile>(
    d: &mut ConsumerAccumulators<T::Accumulator>,
    shared: SharedStorage,
    consumer: u32,
    first_row: u32,
    k: u32,
    accumulate: bool,
) {
    let a = if T::COOPERATIVE { first_row + consumer * T::CONSUMER_M } else { first_row };
    let (upper, lower) = (shared.pool.rows::<64>(a), shared.pool.rows::<64>(a + 64));
    let b = shared.pool.rows::<64>(first_row + T::TILE_M);
    let has_lower = T::CONSUMER_M > 64;
    if L::A_M_MAJOR {
        let b = b.mn_major_operand(k);
        d.upper.mma(upper.mn_major_operand(k), b, accumulate);
        if has_lower {
            d.lower.mma(lower.mn_major_operand(k), b, accumulate);
        }
    } else if L::B_N_MAJOR {
        let b = b.mn_major_operand(k);
        d.upper.mma(upper.k_major_operand(k), b, accumulate);
        if has_lower {
            d.lower.mma(lower.k_major_operand(k), b, accumulate);
        }
    } else {
        let b = b.k_major_operand(k);
        L::mma_k_major(&mut d.upper, upper.k_major_operand(k), b, accumulate);
        if has_lower {
            L::mma_k_major(&mut d.lower, lower.k_major_operand(k), b, accumulate);
        }
    }
}
