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
    Backward, Elementwise, EpilogueOperands, EpilogueStore, Forward, Linear, RoundedBackward, ScaleFactors, Scaled,
    TmaEpilogue,
};
use super::gated::GatedEpilogue;
use super::gemm::{Batching, Bias, GemmEpilogue, GemmLayout, GemmOutput, GemmPrecision, Pass};
use super::mainloop::{
    AB, ABt, AtB, Fp8ABt, Grouped, GroupedSum, Operands, Paired, Strided, Symmetric, load_stage, multiply,
    multiply_promoted,
};
use super::quantized::QuantizedEpilogue;
use super::shared::SharedStorage;
use super::split_k::StorePartials;
use super::tile::{
    CONSUMERS, Cooperative128x128, Cooperative128x192, Cooperative128x256, Cooperative128x320, Cooperative256x128,
    Cooperative256x192, MAX_EPILOGUE_BUFFERS, Pingpong128x128, Pingpong128x192, Scheduler, Tile, TileShape,
};
use crate::activation::{ActivationFunction, GeGlu, Gelu, ReluSquared, SwiGlu};
use core::marker::PhantomData;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{self, MBarrier, PipelineState, TensorMap, WARPGROUP};
use cuda_std::shared::Layout;
use cuda_std::{E4m3, E5m2, Fp8, Global, GlobalMut, bf16, kernel, thread, warp};

/// The result that a kernel computes from the accumulators of a tile, and stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// It applies an epilogue and stores the output.
    Output(GemmEpilogue),
    /// It stores them as partial sums over a slice of K. If `column_sums`, it also stores partial column sums of a.
    Partials { column_sums: bool },
}

/// An epilogue as the type parameter of a kernel.
pub trait Epilogue: 'static {
    /// The result that the kernel stores.
    const STORED: Stored;
    /// Whether the tensor maps of out, aux and second are prefetched: those that are used and differ.
    const MAPS: [bool; 3] = [false; 3];
    /// The code for operands `L` and tiles `T`.
    type Store<L: Operands, T: Tile>: EpilogueStore<T>;

    /// True if K may consist of several slices.
    const SPLIT: bool = matches!(Self::STORED, Stored::Partials { .. });
    /// True if the kernel also computes column sums of a.
    const COLUMN_SUMS: bool = matches!(
        Self::STORED,
        Stored::Partials { column_sums: true } | Stored::Output(GemmEpilogue { bias: Some(Bias::Gradient), .. })
    );
}

/// The epilogue `E`, with bf16 outputs.
pub struct Tma<E>(PhantomData<E>);

impl<E: Elementwise> Epilogue for Tma<E> {
    const STORED: Stored = Stored::Output(E::EPILOGUE);
    const MAPS: [bool; 3] = [true, E::AUX, E::SECOND];
    type Store<L: Operands, T: Tile> = TmaEpilogue<L, E, T>;
}

/// The epilogue `Linear<false, true>`, and column sums of a.
pub struct ResidualAndColumnSums;

impl Epilogue for ResidualAndColumnSums {
    const STORED: Stored = Stored::Output(GemmEpilogue::BIAS_GRADIENT);
    const MAPS: [bool; 3] = [true, false, false];
    type Store<L: Operands, T: Tile> = TmaEpilogue<L, Linear<false, true>, T>;
}

/// The epilogue `E`, with out in the FP8 type `O` and a recomputed activation in E4M3.
pub struct Quantized<E, O>(PhantomData<(E, O)>);

impl<E: Elementwise, O: Fp8> Epilogue for Quantized<E, O> {
    const STORED: Stored = Stored::Output(GemmEpilogue { output: GemmOutput::Fp8, ..E::EPILOGUE });
    const MAPS: [bool; 3] = [true, E::AUX, E::EPILOGUE.writes_preactivation()];
    type Store<L: Operands, T: Tile> = QuantizedEpilogue<E, O, T>;
}

/// The gated function `A`, or its gradient if `BACKWARD`, and then also its value if `VALUE`.
pub struct Gated<A, const BACKWARD: bool, const VALUE: bool>(PhantomData<A>);

impl<A: ActivationFunction, const BACKWARD: bool, const VALUE: bool> Epilogue for Gated<A, BACKWARD, VALUE> {
    const STORED: Stored = Stored::Output(GemmEpilogue::NONE.with(
        A::ACTIVATION,
        match (BACKWARD, VALUE) {
            (false, _) => Pass::Forward,
            (true, false) => Pass::Backward,
            (true, true) => Pass::BackwardAndValue,
        },
    ));
    const MAPS: [bool; 3] = [true, BACKWARD, !BACKWARD || VALUE];
    type Store<L: Operands, T: Tile> = GatedEpilogue<A, T, BACKWARD, VALUE, false>;
}

/// The gated function `A`, with its value in E4M3.
pub struct QuantizedGated<A>(PhantomData<A>);

impl<A: ActivationFunction> Epilogue for QuantizedGated<A> {
    const STORED: Stored = Stored::Output(GemmEpilogue {
        output: GemmOutput::Fp8,
        ..GemmEpilogue::NONE.with(A::ACTIVATION, Pass::Forward)
    });
    const MAPS: [bool; 3] = [false, false, true];
    type Store<L: Operands, T: Tile> = GatedEpilogue<A, T, false, true, true>;
}

/// Adds to an f32 output.
pub struct ToF32;

impl Epilogue for ToF32 {
    const STORED: Stored = Stored::Output(GemmEpilogue { output: GemmOutput::F32, ..GemmEpilogue::RESIDUAL });
    type Store<L: Operands, T: Tile> = AccumulateF32<T>;
}

/// Stores partial sums, and partial column sums of a if `COLUMN_SUMS`.
pub struct Partials<const COLUMN_SUMS: bool>;

impl<const COLUMN_SUMS: bool> Epilogue for Partials<COLUMN_SUMS> {
    const STORED: Stored = Stored::Partials { column_sums: COLUMN_SUMS };
    type Store<L: Operands, T: Tile> = StorePartials<T>;
}

/// out (M, N) = epilogue(a · b), or partial sums of it.
///
/// Operands that the instance does not use may be arbitrary. [`launch::maps`](super::launch::maps) describes the tensor maps.
/// Rows of all matrices are multiples of 16 bytes. With `Paired` operands, `n` is the number of columns of up.
/// * `bias` (N) is added to the sums. `scale_a`, `scale_b` and `scale_out` are the factors that restore FP8 tensors.
/// * `amax` = max(`amax`, largest magnitude of an FP8 out before it is divided by its scale) as f32 bits.
/// * `fp8_out` (M, N): an FP8 out. `transposed` (N, M): its transpose, or null. M is a multiple of 16.
/// * `activation` (N, M): the transpose of the activation that is recomputed beside an FP8 out, divided by `scale_activation`.
/// * `sums`: an f32 out, or partial sums of `parts` slices of K for [`matmul_split_k_reduce`](super::matmul_split_k_reduce):
///   `parts` · tiles · `TILE_M` · `TILE_N` elements.
/// * `column_sums` (slices · `partial_rows`, M) receives partial column sums of a.
/// * `alpha` and `beta` are the factors of [`Residual::Scaled`](super::gemm::Residual::Scaled).
/// * `parts` is the number of slices of K, or of matrices of a batch, or of groups.
/// * `groups` describes the groups of a grouped GEMM ([`Groups`](crate::experts::Groups)).
///
/// Grid: (number of SMs).
#[kernel(
    threads = 384,
    blocks_per_sm = 1,
    requires = "wgmma",
    axes(
        pingpong = [t128x128 = Pingpong128x128, t128x192 = Pingpong128x192],
        cooperative = [
            t256x128 = Cooperative256x128, t256x192 = Cooperative256x192,
            t128x256 = Cooperative128x256, t128x320 = Cooperative128x320
        ],
        exact_tile = [t128x128 = Cooperative128x128, t128x192 = Cooperative128x192],
        linear = [
            _ = Tma<Linear<false, false>>, bias = Tma<Linear<true, false>>,
            residual = Tma<Linear<false, true>>, bias_residual = Tma<Linear<true, true>>
        ],
        gradient = [_ = Tma<Linear<false, false>>, residual = Tma<Linear<false, true>>],
        weight_gradient = [to_f32 = ToF32, partials = Partials<false>],
        forward = [bias_gelu = Tma<Forward<Gelu, true>>, relu_squared = Tma<Forward<ReluSquared, false>>],
        backward = [
            gelu_backward = Tma<Backward<Gelu, false>>, gelu_backward_and_value = Tma<Backward<Gelu, true>>,
            relu_squared_backward = Tma<Backward<ReluSquared, false>>,
            relu_squared_backward_and_value = Tma<Backward<ReluSquared, true>>
        ],
        gated_backward = [
            swiglu_backward = Gated<SwiGlu, true, false>, swiglu_backward_and_value = Gated<SwiGlu, true, true>,
            geglu_backward = Gated<GeGlu, true, false>, geglu_backward_and_value = Gated<GeGlu, true, true>
        ],
        gated_gradient = [swiglu_backward = Gated<SwiGlu, true, false>, geglu_backward = Gated<GeGlu, true, false>],
        gated = [swiglu = Gated<SwiGlu, false, true>, geglu = Gated<GeGlu, false, true>],
        gated_to_fp8 = [swiglu_to_fp8 = QuantizedGated<SwiGlu>, geglu_to_fp8 = QuantizedGated<GeGlu>],
        fp8_forward = [
            bias_gelu = Tma<Forward<Gelu, true>>, bias_gelu_to_fp8 = Quantized<Forward<Gelu, true>, E4m3>,
            relu_squared_to_fp8 = Quantized<Forward<ReluSquared, false>, E4m3>
        ],
        fp8_backward = [
            gelu_backward = Tma<Backward<Gelu, false>>, gelu_backward_to_fp8 = Quantized<Backward<Gelu, false>, E5m2>,
            gelu_backward_and_value_to_fp8 = Quantized<Backward<Gelu, true>, E5m2>,
            relu_squared_backward_to_fp8 = Quantized<RoundedBackward<ReluSquared, false>, E5m2>,
            relu_squared_backward_and_value_to_fp8 = Quantized<RoundedBackward<ReluSquared, true>, E5m2>
        ],
        e4m3 = [e4m3 = Fp8ABt<E4m3, false>],
        e4m3_exact = [e4m3_exact = Fp8ABt<E4m3, true>],
        e5m2 = [e5m2 = Fp8ABt<E5m2, false>],
        e5m2_exact = [e5m2_exact = Fp8ABt<E5m2, true>]
    ),
    instances(
        abt = ABt * linear * pingpong,
        abt = ABt * linear * cooperative,
        abt = ABt * forward * pingpong,
        abt = Paired<ABt> * gated * pingpong,
        ab = AB * [_ = Tma<Linear<false, false>>] * pingpong,
        ab = AB * [_ = Tma<Linear<false, false>>] * cooperative,
        ab = AB * backward * pingpong,
        ab = AB * gated_backward * pingpong,
        ab = AB * [relu_squared_backward = Tma<Backward<ReluSquared, false>>] * cooperative,
        atb = AtB * [residual = Tma<Linear<false, true>>, column_sums = ResidualAndColumnSums] * pingpong,
        atb = AtB * [residual = Tma<Linear<false, true>>, column_sums = ResidualAndColumnSums] * cooperative,
        atb = AtB * weight_gradient * pingpong,
        atb = AtB * weight_gradient * cooperative,
        atb = AtB * [partials_column_sums = Partials<true>] * pingpong,
        atb = AtB * [partials_column_sums = Partials<true>] * cooperative,
        batched_ab = Strided<AB> * [scaled = Tma<Scaled>] * pingpong,
        batched_ab = Strided<AB> * [scaled = Tma<Scaled>] * cooperative,
        symmetric_abt = Symmetric<ABt> * [_ = Tma<Linear<false, false>>, scaled = Tma<Scaled>] * pingpong,
        symmetric_atb = Symmetric<AtB> * [_ = Tma<Linear<false, false>>] * pingpong,
        grouped_abt = Grouped<ABt> * [_ = Tma<Linear<false, false>>] * pingpong,
        grouped_abt = Grouped<ABt> * [_ = Tma<Linear<false, false>>] * [t128x256 = Cooperative128x256],
        grouped_abt = Grouped<Paired<ABt>> * gated * pingpong,
        grouped_ab = Grouped<AB> * [_ = Tma<Linear<false, false>>] * pingpong,
        grouped_ab = Grouped<AB> * [_ = Tma<Linear<false, false>>] * [t128x256 = Cooperative128x256],
        grouped_ab = Grouped<AB> * gated_backward * pingpong,
        grouped_atb = GroupedSum<AtB> * [residual = Tma<Linear<false, true>>] * pingpong,
        grouped_atb = GroupedSum<AtB> * [residual = Tma<Linear<false, true>>] * cooperative,
        e4m3 * linear * pingpong,
        e4m3 * linear * cooperative,
        e4m3 * fp8_forward * pingpong,
        e4m3 = Paired<Fp8ABt<E4m3, false>> * gated_to_fp8 * pingpong,
        e5m2 * gradient * pingpong,
        e5m2 * gradient * cooperative,
        e5m2 * weight_gradient * pingpong,
        e5m2 * weight_gradient * cooperative,
        e5m2 * fp8_backward * pingpong,
        e4m3_exact * linear * exact_tile,
        e4m3_exact * fp8_forward * exact_tile,
        e5m2_exact * gradient * exact_tile,
        e5m2_exact * weight_gradient * exact_tile,
        e5m2_exact * fp8_backward * exact_tile,
        grouped_e4m3 = Grouped<Fp8ABt<E4m3, false>> * [_ = Tma<Linear<false, false>>] * pingpong,
        grouped_e4m3 = Grouped<Fp8ABt<E4m3, false>> * [_ = Tma<Linear<false, false>>] * [t128x256 = Cooperative128x256],
        grouped_e4m3 = Grouped<Paired<Fp8ABt<E4m3, false>>> * gated * pingpong,
        grouped_e4m3 = Grouped<Paired<Fp8ABt<E4m3, false>>> * gated_to_fp8 * pingpong,
        grouped_e5m2 = Grouped<Fp8ABt<E5m2, false>> * [_ = Tma<Linear<false, false>>] * pingpong,
        grouped_e5m2 = Grouped<Fp8ABt<E5m2, false>> * [_ = Tma<Linear<false, false>>] * [t128x256 = Cooperative128x256],
        grouped_e5m2 = Grouped<Fp8ABt<E5m2, false>> * gated_gradient * pingpong,
        grouped_sum_e5m2 = GroupedSum<Fp8ABt<E5m2, false>> * [residual = Tma<Linear<false, true>>] * pingpong,
        grouped_sum_e5m2 = GroupedSum<Fp8ABt<E5m2, false>> * [residual = Tma<Linear<false, true>>] * cooperative,
        grouped_sum_e5m2_exact = GroupedSum<Fp8ABt<E5m2, true>> * [residual = Tma<Linear<false, true>>] * exact_tile
    ),
    select(
        L::LAYOUT: GemmLayout,
        L::PRECISION: GemmPrecision,
        L::BATCHING: Batching,
        E::STORED: Stored,
        T::SHAPE: TileShape
    )
)]
pub fn matmul<L: Operands, E: Epilogue, T: Tile>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    out: Global<TensorMap>,
    aux: Global<TensorMap>,
    second: Global<TensorMap>,
    bias: Global<bf16>,
    scale_a: Global<f32>,
    scale_b: Global<f32>,
    scale_out: Global<f32>,
    amax: GlobalMut<u32>,
    fp8_out: GlobalMut<E4m3>,
    transposed: GlobalMut<E4m3>,
    activation: GlobalMut<E4m3>,
    scale_activation: Global<f32>,
    sums: GlobalMut<f32>,
    column_sums: GlobalMut<f32>,
    alpha: f32,
    beta: f32,
    m: u32,
    n: u32,
    k: u32,
    parts: u32,
    columns: u32,
    groups: Global<u32>,
) {
    if thread::thread_idx_x() == 0 {
        if E::MAPS[0] {
            out.prefetch();
        }
        if E::MAPS[1] {
            aux.prefetch();
        }
        if E::MAPS[2] {
            second.prefetch();
        }
    }
    let tile_n = if L::B_PAIR { T::TILE_N / 2 } else { T::TILE_N };
    let parts = if E::SPLIT || !matches!(L::BATCHING, Batching::One) { parts } else { 1 };
    let scheduler = L::Scheduler::new([T::TILE_M, tile_n, L::TILE_K], [m, n, k], parts, groups);
    let factors = ScaleFactors { alpha, beta };
    let scale = if L::SCALED { scale_a.at(0) * scale_b.at(0) } else { 1.0 };
    let operands = EpilogueOperands {
        out,
        aux,
        second,
        bias,
        scale,
        sums,
        m,
        n,
        factors,
        scale_out,
        amax,
        fp8_out,
        transposed,
        activation,
        scale_activation,
    };
    let column_sums = ColumnSums { partials: column_sums, m, n };

    let shared = SharedStorage::new(&mut Layout::new());
    if thread::thread_idx_x() == 0 {
        a.prefetch();
        b.prefetch();
        init_barriers::<E, T>(shared);
    }
    thread::sync_threads();

    let role = warp::shuffle(thread::thread_idx_x() / WARPGROUP, 0);
    // The block starts with 168 registers per thread. The producer gives registers to the consumers. The total stays
    // 384 · 168 = 128 · 24 + 256 · 240 = 128 · 40 + 256 · 232 = 128 · 56 + 256 · 224.
    if role == 0 {
        if E::COLUMN_SUMS {
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
        if E::COLUMN_SUMS && (1..=SUMMING_WARPS).contains(&warp) {
            sum_columns::<T>(shared, scheduler, column_sums, warp - 1);
        }
    } else {
        if E::COLUMN_SUMS {
            hopper::increase_registers::<224>();
        } else if L::A_M_MAJOR {
            hopper::increase_registers::<232>();
        } else {
            hopper::increase_registers::<240>();
        }
        let consumer = role - 1;
        let mut epilogue = E::Store::<L, T>::new(shared, operands, consumer);
        consume::<L, T, _>(shared, scheduler, consumer, (scale, columns), &mut epilogue);
        epilogue.finish();
    }
}

#[inline(always)]
fn init_barriers<E: Epilogue, T: Tile>(shared: SharedStorage) {
    let consumers = if T::COOPERATIVE { CONSUMERS } else { 1 };
    shared.pipeline.init(T::STAGES, 1, consumers + if E::COLUMN_SUMS { SUMMING_WARPS } else { 0 });
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
fn produce<L: Operands, T: Tile>(
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
            shared.pipeline.wait_empty(state);
            load_stage::<L, T>(shared, state.stage(), a, b, step, tile);
            state.advance();
            step += 1;
        }
        i += 1;
    }
}

/// Computes this consumer's work tiles: half of the rows of every tile if cooperative, otherwise every other tile, from that with the consumer's
/// own index on. In FP8, the sums are multiplied by `scale`, and in the exact mode added in f32 after `columns` of K.
#[inline(always)]
fn consume<L: Operands, T: Tile, E: EpilogueStore<T>>(
    shared: SharedStorage,
    scheduler: impl Scheduler,
    consumer: u32,
    (scale, columns): (f32, u32),
    epilogue: &mut E,
) {
    let mut state = PipelineState::consumer(T::STAGES);
    let (mut i, step) = if T::COOPERATIVE { (0, 1) } else { (consumer, CONSUMERS) };
    if !T::COOPERATIVE && consumer > 0 {
        state.skip(scheduler.steps(0));
    }
    // Consumer 0 runs first: a wait for parity 1 on a new barrier returns at once.
    let mut parity = 1 - consumer;
    while scheduler.has(i) {
        let mut tile = scheduler.work_tile(i);
        if T::COOPERATIVE {
            tile.row += consumer * T::CONSUMER_M;
        }
        epilogue.prefetch(tile);
        if !T::COOPERATIVE {
            shared.order_barrier.at(consumer).wait(parity);
        }
        let mut d = if L::PROMOTED {
            multiply_promoted::<L, T>(shared, consumer, [tile.steps, columns], &mut state)
        } else {
            multiply::<L, T>(shared, consumer, tile.steps, &mut state)
        };
        if L::SCALED && !E::SCALES {
            for i in 0..T::Accumulator::COLUMNS as usize / 2 {
                d.upper[i] *= scale;
                if T::CONSUMER_M > 64 {
                    d.lower[i] *= scale;
                }
            }
        }
        epilogue.store(&d, tile);
        if !T::COOPERATIVE {
            state.skip(scheduler.steps(i + 1));
            parity ^= 1;
        }
        i += step;
    }
}
