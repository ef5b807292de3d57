//! The warp-specialized persistent kernels and their entry points.
//!
//! Warpgroup 0 is the producer, a single thread of which issues TMA loads. Warpgroups 1 and 2 are the consumers.
//!
//! The stages of a block's work tiles follow each other in the pipeline. A ping-pong consumer skips the stages of the
//! other consumer's tiles. It waits for its own first stage only after the other consumer has seen its last stage full.
//! Any earlier, the parity it waits for could be that of an older phase of the barrier. The order barrier enforces
//! this, and also alternates the mainloops of the consumers.
//!
//! Edges of the matrices need no code: TMA reads zeros and drops writes outside of a tensor.

use super::accumulate::AccumulateF32;
use super::column_sums::{ColumnSums, SUMMING_WARPS, sum_columns};
use super::epilogue::{
    Accumulate, Bias, BiasGelu, BiasResidual, Epilogue, EpilogueOperands, EpilogueStore, GeluBackward,
    GeluBackwardAndGelu, Plain, ReluSquared, ReluSquaredBackward, ReluSquaredBackwardAndReluSquared, Scale,
    TmaEpilogue,
};
use super::mainloop::{AB, ABt, AtB, OperandLayout, load_stage, multiply, multiply_promoted};
use super::shared::{SharedStorage, WARPGROUP};
use super::split_k::StorePartials;
use super::tile::{
    CONSUMERS, Cooperative128x256, Cooperative128x320, Cooperative256x128, Cooperative256x192, MAX_EPILOGUE_BUFFERS,
    Pingpong128x128, Pingpong128x192, Scheduler, Tile, TileScheduler, WorkTile,
};
use cuda_std::hopper::{self, MBarrier, PipelineState, TensorMap};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, bf16, kernel, thread, warp};

/// out (M, N) = epilogue(a · b) in bf16.
///
/// The epilogue may read `aux` (M, N) and `bias` (N), and may write `second` (M, N). Maps that it does not use may be
/// arbitrary. `launch::maps` describes the tensor maps. Rows of all matrices are multiples of 8 elements.
///
/// Grid: (number of SMs).
#[kernel(threads = 384, blocks_per_sm = 1, requires = "wgmma", instances(
    abt_128x128 = <ABt, Plain, Pingpong128x128>,
    abt_128x192 = <ABt, Plain, Pingpong128x192>,
    abt_256x128 = <ABt, Plain, Cooperative256x128>,
    abt_256x192 = <ABt, Plain, Cooperative256x192>,
    abt_128x256 = <ABt, Plain, Cooperative128x256>,
    abt_128x320 = <ABt, Plain, Cooperative128x320>,
    abt_bias_128x128 = <ABt, Bias, Pingpong128x128>,
    abt_bias_128x192 = <ABt, Bias, Pingpong128x192>,
    abt_bias_256x128 = <ABt, Bias, Cooperative256x128>,
    abt_bias_256x192 = <ABt, Bias, Cooperative256x192>,
    abt_bias_128x256 = <ABt, Bias, Cooperative128x256>,
    abt_bias_128x320 = <ABt, Bias, Cooperative128x320>,
    abt_bias_residual_128x128 = <ABt, BiasResidual, Pingpong128x128>,
    abt_bias_residual_128x192 = <ABt, BiasResidual, Pingpong128x192>,
    abt_bias_residual_256x128 = <ABt, BiasResidual, Cooperative256x128>,
    abt_bias_residual_256x192 = <ABt, BiasResidual, Cooperative256x192>,
    abt_bias_residual_128x256 = <ABt, BiasResidual, Cooperative128x256>,
    abt_bias_residual_128x320 = <ABt, BiasResidual, Cooperative128x320>,
    abt_residual_128x128 = <ABt, Accumulate, Pingpong128x128>,
    abt_residual_128x192 = <ABt, Accumulate, Pingpong128x192>,
    abt_residual_256x128 = <ABt, Accumulate, Cooperative256x128>,
    abt_residual_256x192 = <ABt, Accumulate, Cooperative256x192>,
    abt_residual_128x256 = <ABt, Accumulate, Cooperative128x256>,
    abt_residual_128x320 = <ABt, Accumulate, Cooperative128x320>,
    abt_bias_gelu_128x128 = <ABt, BiasGelu, Pingpong128x128>,
    abt_bias_gelu_128x192 = <ABt, BiasGelu, Pingpong128x192>,
    abt_relu_squared_128x128 = <ABt, ReluSquared, Pingpong128x128>,
    abt_relu_squared_128x192 = <ABt, ReluSquared, Pingpong128x192>,
    ab_128x128 = <AB, Plain, Pingpong128x128>,
    ab_128x192 = <AB, Plain, Pingpong128x192>,
    ab_256x128 = <AB, Plain, Cooperative256x128>,
    ab_256x192 = <AB, Plain, Cooperative256x192>,
    ab_128x256 = <AB, Plain, Cooperative128x256>,
    ab_128x320 = <AB, Plain, Cooperative128x320>,
    ab_gelu_backward_128x128 = <AB, GeluBackward, Pingpong128x128>,
    ab_gelu_backward_128x192 = <AB, GeluBackward, Pingpong128x192>,
    ab_gelu_backward_and_gelu_128x128 = <AB, GeluBackwardAndGelu, Pingpong128x128>,
    ab_gelu_backward_and_gelu_128x192 = <AB, GeluBackwardAndGelu, Pingpong128x192>,
    ab_relu_squared_backward_128x128 = <AB, ReluSquaredBackward, Pingpong128x128>,
    ab_relu_squared_backward_128x192 = <AB, ReluSquaredBackward, Pingpong128x192>,
    ab_relu_squared_backward_256x128 = <AB, ReluSquaredBackward, Cooperative256x128>,
    ab_relu_squared_backward_256x192 = <AB, ReluSquaredBackward, Cooperative256x192>,
    ab_relu_squared_backward_128x256 = <AB, ReluSquaredBackward, Cooperative128x256>,
    ab_relu_squared_backward_128x320 = <AB, ReluSquaredBackward, Cooperative128x320>,
    ab_relu_squared_backward_and_relu_squared_128x128 = <AB, ReluSquaredBackwardAndReluSquared, Pingpong128x128>,
    ab_relu_squared_backward_and_relu_squared_128x192 = <AB, ReluSquaredBackwardAndReluSquared, Pingpong128x192>,
    atb_accumulate_128x128 = <AtB, Accumulate, Pingpong128x128>,
    atb_accumulate_128x192 = <AtB, Accumulate, Pingpong128x192>,
    atb_accumulate_256x128 = <AtB, Accumulate, Cooperative256x128>,
    atb_accumulate_256x192 = <AtB, Accumulate, Cooperative256x192>,
    atb_accumulate_128x256 = <AtB, Accumulate, Cooperative128x256>,
    atb_accumulate_128x320 = <AtB, Accumulate, Cooperative128x320>))]
pub fn matmul_wgmma<L: OperandLayout, E: Epilogue, T: Tile>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    out: Global<TensorMap>,
    aux: Global<TensorMap>,
    second: Global<TensorMap>,
    bias: Global<bf16>,
    m: u32,
    n: u32,
    k: u32,
) {
    if thread::thread_idx_x() == 0 {
        out.prefetch();
        if E::AUX {
            aux.prefetch();
        }
        if E::SECOND {
            second.prefetch();
        }
    }
    let scheduler = TileScheduler::new([T::TILE_M, T::TILE_N], m, n, k, 1);
    let operands = EpilogueOperands { out, aux, second, bias, n, scale: Scale::ONE };
    let epilogue = |shared, consumer| TmaEpilogue::<E, T>::new(shared, operands, consumer);
    run_persistent::<L, T, _, false>(a, b, scheduler, NO_COLUMN_SUMS, epilogue);
}

/// out (M, N) f32 += a (K, M)ᵀ · b (K, N). `m` and `n` are multiples of 8.
///
/// Grid: (number of SMs).
#[kernel(threads = 384, blocks_per_sm = 1, requires = "wgmma", instances(
    tile_128x128 = <Pingpong128x128>,
    tile_128x192 = <Pingpong128x192>,
    tile_256x128 = <Cooperative256x128>,
    tile_256x192 = <Cooperative256x192>,
    tile_128x256 = <Cooperative128x256>,
    tile_128x320 = <Cooperative128x320>))]
pub fn matmul_accumulate_f32<T: Tile>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    out: GlobalMut<f32>,
    m: u32,
    n: u32,
    k: u32,
) {
    let scheduler = TileScheduler::new([T::TILE_M, T::TILE_N], m, n, k, 1);
    let epilogue = |_, _| AccumulateF32::<T>::new(out, m, n);
    run_persistent::<AtB, T, _, false>(a, b, scheduler, NO_COLUMN_SUMS, epilogue);
}

/// out (M, N) += a (K, M)ᵀ · b (K, N) in bf16, and partial column sums of a in `column_sums`
/// (`partial_rows`, M) f32. `m` and `n` are multiples of 8.
///
/// Grid: (number of SMs).
#[kernel(threads = 384, blocks_per_sm = 1, requires = "wgmma", instances(
    tile_128x128 = <Pingpong128x128>,
    tile_128x192 = <Pingpong128x192>,
    tile_256x128 = <Cooperative256x128>,
    tile_256x192 = <Cooperative256x192>,
    tile_128x256 = <Cooperative128x256>,
    tile_128x320 = <Cooperative128x320>))]
pub fn matmul_accumulate_column_sums<T: Tile>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    out: Global<TensorMap>,
    column_sums: GlobalMut<f32>,
    m: u32,
    n: u32,
    k: u32,
) {
    if thread::thread_idx_x() == 0 {
        out.prefetch();
    }
    let scheduler = TileScheduler::new([T::TILE_M, T::TILE_N], m, n, k, 1);
    let bias = Global::null();
    let operands = EpilogueOperands { out, aux: out, second: out, bias, n, scale: Scale::ONE };
    let epilogue = |shared, consumer| TmaEpilogue::<Accumulate, T>::new(shared, operands, consumer);
    run_persistent::<AtB, T, _, true>(a, b, scheduler, ColumnSums { partials: column_sums, m, n }, epilogue);
}

/// Partial sums of a (K, M)ᵀ · b (K, N) over `split_k` slices of K, for
/// [`matmul_split_k_reduce`](super::matmul_split_k_reduce). `m` and `n` are multiples of 8.
///
/// `partials` has `split_k` · tiles · `TILE_M` · `TILE_N` elements. With `COLUMN_SUMS`, also writes partial column sums
/// of a to `column_sums` (`split_k` · `partial_rows`, M).
///
/// Grid: (number of SMs).
#[kernel(threads = 384, blocks_per_sm = 1, requires = "wgmma", instances(
    tile_128x128 = <Pingpong128x128, false>,
    tile_128x192 = <Pingpong128x192, false>,
    tile_256x128 = <Cooperative256x128, false>,
    tile_256x192 = <Cooperative256x192, false>,
    tile_128x256 = <Cooperative128x256, false>,
    tile_128x320 = <Cooperative128x320, false>,
    column_sums_128x128 = <Pingpong128x128, true>,
    column_sums_128x192 = <Pingpong128x192, true>,
    column_sums_256x128 = <Cooperative256x128, true>,
    column_sums_256x192 = <Cooperative256x192, true>,
    column_sums_128x256 = <Cooperative128x256, true>,
    column_sums_128x320 = <Cooperative128x320, true>))]
pub fn matmul_split_k<T: Tile, const COLUMN_SUMS: bool>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    partials: GlobalMut<f32>,
    column_sums: GlobalMut<f32>,
    m: u32,
    n: u32,
    k: u32,
    split_k: u32,
) {
    let scheduler = TileScheduler::new([T::TILE_M, T::TILE_N], m, n, k, split_k);
    let epilogue = |_, consumer| StorePartials::<T>::new(partials, consumer);
    run_persistent::<AtB, T, _, COLUMN_SUMS>(a, b, scheduler, ColumnSums { partials: column_sums, m, n }, epilogue);
}

pub const NO_COLUMN_SUMS: ColumnSums = ColumnSums { partials: GlobalMut::null(), m: 0, n: 0 };

/// Initializes the barriers, assigns roles to the warpgroups, and computes all work tiles of this block.
///
/// `epilogue` creates a consumer's epilogue. `column_sums` is used with `COLUMN_SUMS` only.
#[inline(always)]
pub fn run_persistent<L: OperandLayout, T: Tile, E: EpilogueStore<T>, const COLUMN_SUMS: bool>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    scheduler: impl Scheduler,
    column_sums: ColumnSums,
    epilogue: impl FnOnce(SharedStorage, u32) -> E,
) {
    let shared = SharedStorage::new(&mut Layout::new());
    if thread::thread_idx_x() == 0 {
        a.prefetch();
        b.prefetch();
        init_barriers::<T, COLUMN_SUMS>(shared);
    }
    thread::sync_threads();

    let role = warp::shuffle(thread::thread_idx_x() / WARPGROUP, 0);
    // The block starts with 168 registers per thread. The producer gives registers to the consumers. The total stays
    // 384 · 168 = 128 · 24 + 256 · 240 = 128 · 40 + 256 · 232 = 128 · 56 + 256 · 224.
    if role == 0 {
        if COLUMN_SUMS {
            hopper::decrease_registers::<56>();
        } else if L::A_M_MAJOR {
            hopper::decrease_registers::<40>();
        } else {
            hopper::decrease_registers::<24>();
        }
        if thread::thread_idx_x() == 0 {
            produce::<L, T>(shared, a, b, scheduler);
        }
        let warp = warp::shuffle(warp::index(), 0);
        if COLUMN_SUMS && (1..=SUMMING_WARPS).contains(&warp) {
            sum_columns::<T>(shared, scheduler, column_sums, warp - 1);
        }
    } else {
        if COLUMN_SUMS {
            hopper::increase_registers::<224>();
        } else if L::A_M_MAJOR {
            hopper::increase_registers::<232>();
        } else {
            hopper::increase_registers::<240>();
        }
        let consumer = role - 1;
        let mut epilogue = epilogue(shared, consumer);
        if T::COOPERATIVE {
            consume_cooperative::<L, T, _>(shared, scheduler, consumer, &mut epilogue);
        } else {
            consume_pingpong::<L, T, _>(shared, scheduler, consumer, &mut epilogue);
        }
        epilogue.finish();
    }
}

#[inline(always)]
fn init_barriers<T: Tile, const COLUMN_SUMS: bool>(shared: SharedStorage) {
    for stage in 0..T::STAGES {
        shared.full.at(stage).init(1);
        let consumers = if T::COOPERATIVE { CONSUMERS } else { 1 };
        shared.empty.at(stage).init(consumers + if COLUMN_SUMS { SUMMING_WARPS } else { 0 });
    }
    for consumer in 0..CONSUMERS {
        shared.order_barrier.at(consumer).init(1);
    }
    for i in 0..CONSUMERS * MAX_EPILOGUE_BUFFERS {
        shared.aux_full.at(i).init(1);
    }
    MBarrier::fence_init();
    hopper::fence_async_proxy();
}

/// Loads the operands of all work tiles of this block.
#[inline(always)]
fn produce<L: OperandLayout, T: Tile>(
    shared: SharedStorage,
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    scheduler: impl Scheduler,
) {
    let mut state = PipelineState::producer(T::STAGES);
    let mut i = 0;
    while scheduler.has(i) {
        let tile = scheduler.work_tile(i);
        let mut step = tile.first_step;
        while step < tile.first_step + tile.steps {
            shared.empty.at(state.stage()).wait(state.parity());
            load_stage::<L, T>(shared, state.stage(), a, b, step, tile);
            state.advance();
            step += 1;
        }
        i += 1;
    }
}

/// Computes this consumer's half of all work tiles.
#[inline(always)]
fn consume_cooperative<L: OperandLayout, T: Tile, E: EpilogueStore<T>>(
    shared: SharedStorage,
    scheduler: impl Scheduler,
    consumer: u32,
    epilogue: &mut E,
) {
    let mut state = PipelineState::consumer(T::STAGES);
    let mut i = 0;
    while scheduler.has(i) {
        let tile = scheduler.work_tile(i);
        let tile = WorkTile { row: tile.row + consumer * T::CONSUMER_M, ..tile };
        epilogue.prefetch(tile);
        let d = if L::PROMOTED {
            multiply_promoted::<L, T>(shared, consumer, tile.steps, &mut state)
        } else {
            multiply::<L, T>(shared, consumer, tile.steps, &mut state, shared.order_barrier.at(0))
        };
        epilogue.store(&d, tile);
        i += 1;
    }
}

/// Computes every other work tile, from that with the consumer's own index on.
#[inline(always)]
fn consume_pingpong<L: OperandLayout, T: Tile, E: EpilogueStore<T>>(
    shared: SharedStorage,
    scheduler: impl Scheduler,
    consumer: u32,
    epilogue: &mut E,
) {
    let mut state = PipelineState::consumer(T::STAGES);
    if consumer > 0 {
        state.skip(scheduler.steps(0));
    }
    // Consumer 0 runs first: a wait for parity 1 on a new barrier returns at once.
    let mut parity = 1 - consumer;
    let mut i = consumer;
    while scheduler.has(i) {
        let tile = scheduler.work_tile(i);
        epilogue.prefetch(tile);
        shared.order_barrier.at(consumer).wait(parity);
        let d = multiply::<L, T>(shared, consumer, tile.steps, &mut state, shared.order_barrier.at(1 - consumer));
        epilogue.store(&d, tile);
        state.skip(scheduler.steps(i + 1));
        parity ^= 1;
        i += CONSUMERS;
    }
}
