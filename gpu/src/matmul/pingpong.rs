//! Two consumers on tiles of their own, in turns: while one multiplies, the other writes what it has multiplied.
//!
//! One warpgroup only issues TMA loads (the producer). The stages of a block's tiles follow one another in the ring; a
//! consumer passes over those of the other's tiles, and may wait for its own only once the other has seen its last one
//! full: earlier, the parity it waits for could be that of an older round. Edges need no code: TMA reads zeros and drops
//! writes past the end of a tensor.

use super::epilogue::{BOXES, Bias, BiasGelu, Epilogue, GeluBackward, Plain, Target, Writer};
use super::mainloop::{AB, ABt, Operands, Place, RING_ROWS, TILE_K, load_stage, multiply, stages};
use cuda_std::hopper::mbarrier::MBarriers;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{self, MBarrier, SwizzledTile, TensorMap, tma};
use cuda_std::shared::Layout;
use cuda_std::{Global, bf16, kernel, thread, warp};

/// Rows of a tile.
pub const TILE_M: u32 = 128;
pub const WARPGROUP: u32 = 128;
const CONSUMERS: u32 = 2;
/// Sums of a thread for 64 rows of tiles of so many columns.
pub type Columns128 = [f32; 64];
pub type Columns192 = [f32; 96];
/// Tiles above each other that are worked on before moving to the next columns, so that operands stay in L2.
const GROUP: u32 = 16;

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

/// The output's tiles.
#[derive(Clone, Copy)]
struct Tiles {
    /// Tiles above each other, and beside each other.
    rows: u32,
    columns: u32,
    /// Columns of a tile.
    width: u32,
}

impl Tiles {
    #[inline(always)]
    fn count(self) -> u32 {
        self.rows * self.columns
    }

    /// First row and column of tile `t`: down a group of tiles, then to the next column.
    #[inline(always)]
    fn place(self, t: u32) -> (u32, u32) {
        let group = t / (GROUP * self.columns);
        let within = t - group * GROUP * self.columns;
        let height = (self.rows - group * GROUP).min(GROUP);
        ((group * GROUP + within % height) * TILE_M, within / height * self.width)
    }
}

/// out (M, N) = epilogue(a · b), all bf16, `n` and `k` multiples of 8. `aux` (M, N) and `bias` (N) are read or written as
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
    ab_gelu_backward_192 = <AB, GeluBackward, Columns192>))]
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
    let shared = shared(&mut Layout::new());
    if thread::thread_idx_x() == 0 {
        a.prefetch();
        b.prefetch();
        out.prefetch();
        if E::READS_AUX || E::WRITES_AUX {
            aux.prefetch();
        }
        for stage in 0..stages::<A>() {
            shared.full.at(stage).init(1);
            shared.empty.at(stage).init(1);
        }
        for consumer in 0..CONSUMERS {
            shared.turn.at(consumer).init(1);
        }
        if E::READS_AUX {
            for i in 0..CONSUMERS * BOXES {
                shared.aux_full.at(i).init(1);
            }
        }
        MBarrier::fence_init();
        hopper::fence_async_proxy();
    }
    thread::sync_threads();

    let tiles = Tiles { rows: m.div_ceil(TILE_M), columns: n.div_ceil(A::COLUMNS), width: A::COLUMNS };
    let steps = k.div_ceil(TILE_K);
    let (first, stride) = (thread::block_idx_x(), thread::grid_dim_x());

    let role = warp::shuffle(thread::thread_idx_x() / WARPGROUP, 0);
    if role == 0 {
        hopper::give_registers::<24>();
        if thread::thread_idx_x() == 0 {
            let mut place = Place { stage: 0, parity: 1 };
            let mut t = first;
            while t < tiles.count() {
                let (row, column) = tiles.place(t);
                let mut step = 0;
                while step < steps {
                    shared.empty.at(place.stage).wait(place.parity);
                    load_stage::<L, A>(shared, place.stage, a, b, step * TILE_K, row, column);
                    place.advance::<A>();
                    step += 1;
                }
                t += stride;
            }
        }
    } else {
        hopper::take_registers::<240>();
        let consumer = role - 1;
        let mut writer = Writer { shared, target: Target { out, aux, bias, n }, consumer, round: 0 };
        let mut place = Place { stage: 0, parity: 0 };
        place.skip::<A>(consumer * steps);
        // The first consumer begins; a fresh barrier lets it pass.
        let mut turn = 1 - consumer;
        let mut t = first + consumer * stride;
        while t < tiles.count() {
            let (row, column) = tiles.place(t);
            writer.prepare::<A, E>(row, column);
            shared.turn.at(consumer).wait(turn);
            let d = multiply::<L, A>(shared, steps, &mut place, shared.turn.at(1 - consumer));
            writer.write::<A, E>(&d, row, column);
            place.skip::<A>(steps);
            turn ^= 1;
            t += CONSUMERS * stride;
        }
        if is_first() {
            tma::wait_stores();
        }
    }
}
