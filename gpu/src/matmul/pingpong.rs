//! Two consumers on tiles of their own, in turns: while one multiplies, the other writes what it has multiplied.
//!
//! One warpgroup only issues TMA loads (the producer). The stages of a block's tiles follow one another in the ring; a
//! consumer passes over those of the other's tiles, and may wait for its own only once the other has seen its last one
//! full: earlier, the parity it waits for could be that of an older round. Edges need no code: TMA reads zeros and drops
//! writes past the end of a tensor.

use super::epilogue::{Accumulate, BOXES, Bias, BiasGelu, Epilogue, GeluBackward, Plain, Target, Writer};
use super::mainloop::{AB, ABt, AtB, Operands, Place, RING_ROWS, Sums, load_stage, multiply, stages};
use super::split::PartialWriter;
use super::tiles::{Item, Items};
use cuda_std::hopper::mbarrier::MBarriers;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{self, MBarrier, SwizzledTile, TensorMap};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, bf16, kernel, thread, warp};

/// Rows of a tile.
pub const TILE_M: u32 = 128;
pub const WARPGROUP: u32 = 128;
const CONSUMERS: u32 = 2;
/// Sums of a thread for 64 rows of tiles of so many columns.
pub type Columns128 = [f32; 64];
pub type Columns192 = [f32; 96];

/// Whether this is the first thread of its warpgroup.
#[inline(always)]
pub fn is_first() -> bool {
    thread::thread_idx_x().is_multiple_of(WARPGROUP)
}

#[derive(Clone, Copy)]
pub struct Shared {
    pub ring: SwizzledTile<RING_ROWS>,
    pub boxes: SwizzledTile<{ (CONSUMERS * BOXES * 64) as usize }>,
    /// Stage i holds operands.
    pub full: MBarriers,
    /// Stage i may be overwritten.
    pub empty: MBarriers,
    /// Consumer i may multiply.
    pub turn: MBarriers,
    /// Box i holds what an epilogue reads.
    pub aux_full: MBarriers,
}

/// Most stages of a ring.
const STAGES: usize = 5;

fn shared(layout: &mut Layout) -> Shared {
    Shared {
        ring: layout.swizzled(),
        boxes: layout.swizzled(),
        full: layout.mbarriers(STAGES),
        empty: layout.mbarriers(STAGES),
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

/// out (M, N) = epilogue(a · b), all bf16, rows of every matrix multiples of 8. `aux` (M, N) and `bias` (N) are read or written as
/// the epilogue says, else not used. The maps' boxes are those of [`super::launch`].
///
/// A 1-D grid of as many blocks as there are multiprocessors.
#[kernel(threads = 384, blocks_per_sm = 1, arch = "sm_90a", instances(
    abt_128 = <ABt, Plain, Columns128>,
    abt_192 = <ABt, Plain, Columns192>,
    abt_bias_128 = <ABt, Bias, Columns128>,
    abt_bias_192 = <ABt, Bias, Columns192>,
    abt_bias_gelu_128 = <ABt, BiasGelu, Columns128>,
    abt_bias_gelu_192 = <ABt, BiasGelu, Columns192>,
    ab_128 = <AB, Plain, Columns128>,
    ab_192 = <AB, Plain, Columns192>,
    ab_gelu_backward_128 = <AB, GeluBackward, Columns128>,
    ab_gelu_backward_192 = <AB, GeluBackward, Columns192>,
    atb_accumulate_128 = <AtB, Accumulate, Columns128>,
    atb_accumulate_192 = <AtB, Accumulate, Columns192>))]
pub fn matmul_pingpong<L: Operands, E: Epilogue, A: Accumulators + 'static>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    out: Global<TensorMap>,
    aux: Global<TensorMap>,
    bias: Global<bf16>,
    m: u32,
    n: u32,
    k: u32,
) {
    if thread::thread_idx_x() == 0 {
        out.prefetch();
        if E::READS_AUX || E::WRITES_AUX {
            aux.prefetch();
        }
    }
    let (items, target) = (Items::new::<A>(m, n, k, 1), Target { out, aux, bias, n });
    multiply_tiles::<L, A, _>(a, b, items, |shared, consumer| Writer::<E>::new(shared, target, consumer));
}

/// Sums of a (K, M)ᵀ · b (K, N) over each of `splits` parts of K, for [`super::matmul_add_parts`]; `n` and `m` multiples of 8.
/// `parts` has room for `splits` times the tiles' sums.
///
/// A 1-D grid of as many blocks as there are multiprocessors.
#[kernel(threads = 384, blocks_per_sm = 1, arch = "sm_90a", instances(w128 = <Columns128>, w192 = <Columns192>))]
pub fn matmul_parts<A: Accumulators + 'static>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    parts: GlobalMut<f32>,
    m: u32,
    n: u32,
    k: u32,
    splits: u32,
) {
    multiply_tiles::<AtB, A, _>(a, b, Items::new::<A>(m, n, k, splits), |_, _| PartialWriter { parts });
}

/// What becomes of a consumer's sums.
pub trait Write<A> {
    /// Starts loading what the item's sums will be put together with.
    fn prepare(&self, item: Item);
    fn write(&mut self, d: &Sums<A>, item: Item);
    fn finish(&self);
}

#[inline(always)]
fn multiply_tiles<L: Operands, A: Accumulators, W: Write<A>>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    items: Items,
    writer_of: impl FnOnce(Shared, u32) -> W,
) {
    let shared = shared(&mut Layout::new());
    if thread::thread_idx_x() == 0 {
        a.prefetch();
        b.prefetch();
        for stage in 0..stages::<A>() {
            shared.full.at(stage).init(1);
            shared.empty.at(stage).init(1);
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
        hopper::give_registers::<40>();
        if thread::thread_idx_x() == 0 {
            let mut place = Place { stage: 0, parity: 1 };
            let mut i = 0;
            while items.has(i) {
                let item = items.at(i);
                let mut step = item.first_step;
                while step < item.first_step + item.steps {
                    shared.empty.at(place.stage).wait(place.parity);
                    load_stage::<L, A>(shared, place.stage, a, b, step, item);
                    place.advance::<A>();
                    step += 1;
                }
                i += 1;
            }
        }
    } else {
        hopper::take_registers::<232>();
        let consumer = role - 1;
        let mut writer = writer_of(shared, consumer);
        let mut place = Place { stage: 0, parity: 0 };
        if consumer > 0 {
            place.skip::<A>(items.steps(0));
        }
        // The first consumer begins; a fresh barrier lets it pass.
        let mut turn = 1 - consumer;
        let mut i = consumer;
        while items.has(i) {
            let item = items.at(i);
            writer.prepare(item);
            shared.turn.at(consumer).wait(turn);
            let d = multiply::<L, A>(shared, item.steps, &mut place, shared.turn.at(1 - consumer));
            writer.write(&d, item);
            place.skip::<A>(items.steps(i + 1));
            turn ^= 1;
            i += CONSUMERS;
        }
        writer.finish();
    }
}
