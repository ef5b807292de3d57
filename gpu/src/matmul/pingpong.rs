//! A producer, a warpgroup that only issues TMA loads, and two consumers, which multiply and write.
//!
//! In turns, each consumer has tiles of its own: while one multiplies, the other writes what it has multiplied. Together, each has
//! half of a tile's rows: operands are loaded once for both, a third less of them for each product, but nothing hides what is written.
//!
//! The stages of a block's tiles follow one another in the ring. In turns, a consumer passes over those of the other's
//! tiles, and may wait for its own only once the other has seen its last one full: earlier, the parity it waits for could
//! be that of an older round. Edges need no code: TMA reads zeros and drops writes past the end of a tensor.

use super::column_sums::{SUMMING_WARPS, sum_columns};
use super::epilogue::{
    Accumulate, Bias, BiasGelu, BiasResidual, Epilogue, GeluBackward, GeluBackwardAndGelu, Plain, Target, Writer,
};
use super::mainloop::{AB, ABt, AtB, Operands, Place, Sums, load_stage, multiply};
use super::split::{AddingWriter, PartialWriter};
use super::tiles::{
    CONSUMERS, Item, Items, MOST_STAGES, POOL_ROWS, Tile, Together128, Together192, Together256, Together320, Turns128,
    Turns192,
};
use cuda_std::hopper::mbarrier::MBarriers;
use cuda_std::hopper::{self, MBarrier, SwizzledTile, TensorMap};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, bf16, kernel, thread, warp};

pub const WARPGROUP: u32 = 128;
/// Most boxes of a consumer that an epilogue reads.
const BOXES: u32 = 4;

/// Whether this is the first thread of its warpgroup.
#[inline(always)]
pub fn is_first() -> bool {
    thread::thread_idx_x().is_multiple_of(WARPGROUP)
}

#[derive(Clone, Copy)]
pub struct Shared {
    /// The ring of stages, then boxes.
    pub pool: SwizzledTile<POOL_ROWS>,
    /// Stage i holds operands.
    pub full: MBarriers,
    /// Stage i may be overwritten.
    pub empty: MBarriers,
    /// Consumer i may multiply.
    pub turn: MBarriers,
    /// Box i holds what an epilogue reads.
    pub aux_full: MBarriers,
}

fn shared(layout: &mut Layout) -> Shared {
    Shared {
        pool: layout.swizzled(),
        full: layout.mbarriers(MOST_STAGES),
        empty: layout.mbarriers(MOST_STAGES),
        turn: layout.mbarriers(CONSUMERS as usize),
        aux_full: layout.mbarriers((CONSUMERS * BOXES) as usize),
    }
}

/// Dynamic shared memory of a block.
pub fn pingpong_shared_bytes() -> usize {
    let mut layout = Layout::new();
    shared(&mut layout);
    layout.bytes()
}

/// out (M, N) = epilogue(a · b), all bf16, rows of every matrix multiples of 8. `aux` (M, N) and `bias` (N) are read and `second`
/// (M, N) is written as the epilogue says, else they are not used. The maps' boxes are those of [`super::launch`].
///
/// A 1-D grid of as many blocks as there are multiprocessors.
#[kernel(threads = 384, blocks_per_sm = 1, arch = "sm_90a", instances(
    abt_128 = <ABt, Plain, Turns128>,
    abt_192 = <ABt, Plain, Turns192>,
    abt_256x128 = <ABt, Plain, Together128>,
    abt_256x192 = <ABt, Plain, Together192>,
    abt_128x256 = <ABt, Plain, Together256>,
    abt_128x320 = <ABt, Plain, Together320>,
    abt_bias_128 = <ABt, Bias, Turns128>,
    abt_bias_192 = <ABt, Bias, Turns192>,
    abt_bias_256x128 = <ABt, Bias, Together128>,
    abt_bias_256x192 = <ABt, Bias, Together192>,
    abt_bias_128x256 = <ABt, Bias, Together256>,
    abt_bias_128x320 = <ABt, Bias, Together320>,
    abt_bias_residual_128 = <ABt, BiasResidual, Turns128>,
    abt_bias_residual_192 = <ABt, BiasResidual, Turns192>,
    abt_bias_residual_256x128 = <ABt, BiasResidual, Together128>,
    abt_bias_residual_256x192 = <ABt, BiasResidual, Together192>,
    abt_bias_residual_128x256 = <ABt, BiasResidual, Together256>,
    abt_bias_residual_128x320 = <ABt, BiasResidual, Together320>,
    abt_bias_gelu_128 = <ABt, BiasGelu, Turns128>,
    abt_bias_gelu_192 = <ABt, BiasGelu, Turns192>,
    ab_128 = <AB, Plain, Turns128>,
    ab_192 = <AB, Plain, Turns192>,
    ab_256x128 = <AB, Plain, Together128>,
    ab_256x192 = <AB, Plain, Together192>,
    ab_128x256 = <AB, Plain, Together256>,
    ab_128x320 = <AB, Plain, Together320>,
    ab_gelu_backward_128 = <AB, GeluBackward, Turns128>,
    ab_gelu_backward_192 = <AB, GeluBackward, Turns192>,
    ab_gelu_backward_and_gelu_128 = <AB, GeluBackwardAndGelu, Turns128>,
    ab_gelu_backward_and_gelu_192 = <AB, GeluBackwardAndGelu, Turns192>,
    atb_accumulate_128 = <AtB, Accumulate, Turns128>,
    atb_accumulate_192 = <AtB, Accumulate, Turns192>,
    atb_accumulate_256x128 = <AtB, Accumulate, Together128>,
    atb_accumulate_256x192 = <AtB, Accumulate, Together192>,
    atb_accumulate_128x256 = <AtB, Accumulate, Together256>,
    atb_accumulate_128x320 = <AtB, Accumulate, Together320>))]
pub fn matmul_pingpong<L: Operands, E: Epilogue, T: Tile>(
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
    let (items, target) = (Items::new([T::ROWS, T::COLUMNS], m, n, k, 1), Target { out, aux, second, bias, n });
    let writer = |shared, consumer| Writer::<E, T>::new(shared, target, consumer);
    multiply_tiles::<L, T, _, false>(a, b, items, NO_SUMS, writer);
}

const NO_SUMS: ColumnSums = ColumnSums { sums: GlobalMut::new(core::ptr::null_mut()), m: 0, n: 0 };

/// out (M, N) f32 += a (K, M)ᵀ · b (K, N); `n` and `m` multiples of 8.
///
/// A 1-D grid of as many blocks as there are multiprocessors.
#[kernel(threads = 384, blocks_per_sm = 1, arch = "sm_90a", instances(
    w128 = <Turns128>,
    w192 = <Turns192>,
    w256x128 = <Together128>,
    w256x192 = <Together192>,
    w128x256 = <Together256>,
    w128x320 = <Together320>))]
pub fn matmul_add_f32<T: Tile>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    out: GlobalMut<f32>,
    m: u32,
    n: u32,
    k: u32,
) {
    let items = Items::new([T::ROWS, T::COLUMNS], m, n, k, 1);
    multiply_tiles::<AtB, T, _, false>(a, b, items, NO_SUMS, |_, _| AddingWriter::<T>::new(out, m, n));
}

/// out (M, N) += a (K, M)ᵀ · b (K, N), and `sums` ([`slices`](super::column_sums::slices), M) = column sums of a, which are to
/// be added up. `n` and `m` multiples of 8.
///
/// A 1-D grid of as many blocks as there are multiprocessors.
#[kernel(threads = 384, blocks_per_sm = 1, arch = "sm_90a", instances(
    w128 = <Turns128>,
    w192 = <Turns192>,
    w256x128 = <Together128>,
    w256x192 = <Together192>,
    w128x256 = <Together256>,
    w128x320 = <Together320>))]
pub fn matmul_with_column_sums<T: Tile>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    out: Global<TensorMap>,
    sums: GlobalMut<f32>,
    m: u32,
    n: u32,
    k: u32,
) {
    if thread::thread_idx_x() == 0 {
        out.prefetch();
    }
    let items = Items::new([T::ROWS, T::COLUMNS], m, n, k, 1);
    let target = Target { out, aux: out, second: out, bias: Global::new(core::ptr::null()), n };
    let writer = |shared, consumer| Writer::<Accumulate, T>::new(shared, target, consumer);
    multiply_tiles::<AtB, T, _, true>(a, b, items, ColumnSums { sums, m, n }, writer);
}

/// Sums of a (K, M)ᵀ · b (K, N) over each of `splits` parts of K, for [`super::matmul_add_parts`]; `n` and `m` multiples of 8.
/// `parts` has room for `splits` times the tiles' sums. With SUMS, `sums` (`splits` · [`slices`](super::column_sums::slices), M)
/// = column sums of a, which are to be added up.
///
/// A 1-D grid of as many blocks as there are multiprocessors.
#[kernel(threads = 384, blocks_per_sm = 1, arch = "sm_90a", instances(
    w128 = <Turns128, false>,
    w192 = <Turns192, false>,
    w256x128 = <Together128, false>,
    w256x192 = <Together192, false>,
    w128x256 = <Together256, false>,
    w128x320 = <Together320, false>,
    sums_128 = <Turns128, true>,
    sums_192 = <Turns192, true>,
    sums_256x128 = <Together128, true>,
    sums_256x192 = <Together192, true>,
    sums_128x256 = <Together256, true>,
    sums_128x320 = <Together320, true>))]
pub fn matmul_parts<T: Tile, const SUMS: bool>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    parts: GlobalMut<f32>,
    sums: GlobalMut<f32>,
    m: u32,
    n: u32,
    k: u32,
    splits: u32,
) {
    let items = Items::new([T::ROWS, T::COLUMNS], m, n, k, splits);
    let writer = |_, consumer| PartialWriter::<T>::new(parts, consumer);
    multiply_tiles::<AtB, T, _, SUMS>(a, b, items, ColumnSums { sums, m, n }, writer);
}

/// Where column sums of a go, and the output's extents.
#[derive(Clone, Copy)]
struct ColumnSums {
    sums: GlobalMut<f32>,
    m: u32,
    n: u32,
}

/// What becomes of a consumer's sums.
pub trait Write<T: Tile> {
    /// Starts loading what the item's sums will be put together with.
    fn prepare(&self, item: Item);
    fn write(&mut self, d: &Sums<T::Sums>, item: Item);
    fn finish(&self);
}

#[inline(always)]
fn multiply_tiles<L: Operands, T: Tile, W: Write<T>, const SUMS: bool>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    items: Items,
    ColumnSums { sums, m, n }: ColumnSums,
    writer_of: impl FnOnce(Shared, u32) -> W,
) {
    let shared = shared(&mut Layout::new());
    if thread::thread_idx_x() == 0 {
        a.prefetch();
        b.prefetch();
        for stage in 0..T::STAGES {
            shared.full.at(stage).init(1);
            let consumers = if T::TOGETHER { CONSUMERS } else { 1 };
            shared.empty.at(stage).init(consumers + if SUMS { SUMMING_WARPS } else { 0 });
        }
        for consumer in 0..CONSUMERS {
            shared.turn.at(consumer).init(1);
        }
        for i in 0..CONSUMERS * BOXES {
            shared.aux_full.at(i).init(1);
        }
        MBarrier::fence_init();
        hopper::fence_async_proxy();
    }
    thread::sync_threads();

    let role = warp::shuffle(thread::thread_idx_x() / WARPGROUP, 0);
    if role == 0 {
        // 128 times these and 256 times the consumers' are what the block has.
        if SUMS {
            hopper::give_registers::<56>();
        } else if L::A_BY_ROWS {
            hopper::give_registers::<40>();
        } else {
            hopper::give_registers::<24>();
        }
        if thread::thread_idx_x() == 0 {
            let mut place = Place { stage: 0, parity: 1 };
            let mut i = 0;
            while items.has(i) {
                let item = items.at(i);
                let mut step = item.first_step;
                while step < item.first_step + item.steps {
                    shared.empty.at(place.stage).wait(place.parity);
                    load_stage::<L, T>(shared, place.stage, a, b, step, item);
                    place.advance::<T>();
                    step += 1;
                }
                i += 1;
            }
        }
        let warp = warp::shuffle(warp::index(), 0);
        if SUMS && (1..=SUMMING_WARPS).contains(&warp) {
            sum_columns::<T>(shared, items, sums, m, n, warp - 1);
        }
    } else {
        if SUMS {
            hopper::take_registers::<224>();
        } else if L::A_BY_ROWS {
            hopper::take_registers::<232>();
        } else {
            hopper::take_registers::<240>();
        }
        let consumer = role - 1;
        let mut writer = writer_of(shared, consumer);
        let mut place = Place { stage: 0, parity: 0 };
        if T::TOGETHER {
            let mut i = 0;
            while items.has(i) {
                let item = items.at(i);
                let item = Item { row: item.row + consumer * T::CONSUMER_ROWS, ..item };
                writer.prepare(item);
                let d = multiply::<L, T>(shared, consumer, item.steps, &mut place, shared.turn.at(0));
                writer.write(&d, item);
                i += 1;
            }
        } else {
            if consumer > 0 {
                place.skip::<T>(items.steps(0));
            }
            // The first consumer begins; a fresh barrier lets it pass.
            let mut turn = 1 - consumer;
            let mut i = consumer;
            while items.has(i) {
                let item = items.at(i);
                writer.prepare(item);
                shared.turn.at(consumer).wait(turn);
                let d = multiply::<L, T>(shared, consumer, item.steps, &mut place, shared.turn.at(1 - consumer));
                writer.write(&d, item);
                place.skip::<T>(items.steps(i + 1));
                turn ^= 1;
                i += CONSUMERS;
            }
        }
        writer.finish();
    }
}
