//! Backward of queries: 128 queries per block, keys streamed in tiles of 64.
//! ```text
//! S = Q Kᵀ      P = 2^(scale S - lse)      dP = dout Vᵀ      dS = P ∘ (dP - D)      dQ += dS K, times scale at the end
//! ```
//! Making S and dP a second time costs two of seven products, and spares adding up dQ from the blocks of all keys, which
//! would need atomics (an order that varies) or a turn for each block.

use super::{
    CONSUMER_REGISTERS, HALF, HS, PRODUCER_REGISTERS, Place, SCALE, Shape, Slots, Square, TILE, WARPGROUP, Work,
    as_left, left, load_tile, place_of, probability, shift_of, thread_row, write_row,
};
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{self, MBarrier, SwizzledTile, TensorMap, wgmma};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, bf16, kernel, thread, warp};

const STAGES: u32 = 4;

#[derive(Clone, Copy)]
struct Shared {
    /// Q, then dout of the block's queries.
    own: SwizzledTile<128>,
    k: SwizzledTile<64>,
    v: SwizzledTile<64>,
    own_slots: Slots,
    slots: Slots,
}

fn shared(layout: &mut Layout) -> Shared {
    Shared {
        own: layout.swizzled::<256>().rows(0),
        k: layout.swizzled::<{ 64 * STAGES as usize }>().rows(0),
        v: layout.swizzled::<{ 64 * STAGES as usize }>().rows(0),
        own_slots: Slots::new(layout, 1),
        slots: Slots::new(layout, STAGES),
    }
}

/// Dynamic shared memory of a block.
pub fn backward_queries_shared_bytes() -> usize {
    let mut layout = Layout::new();
    shared(&mut layout);
    layout.bytes()
}

/// The Q part of dqkv (B,T,3,NH,64). `qkv` maps (B, T, 3 NH 64), `dout` maps (B, T, NH 64), both with [`super::BOX`]; lse and
/// d = rowsum(dout ∘ out) are (B,NH,T). A 1-D grid of as many blocks as there are multiprocessors.
#[kernel(threads = 384, blocks_per_sm = 1, arch = "sm_90a")]
pub fn attention_backward_queries_wgmma(
    dqkv: GlobalMut<bf16>,
    qkv: Global<TensorMap>,
    dout: Global<TensorMap>,
    lse: Global<f32>,
    d: Global<f32>,
    b: u32,
    t: u32,
    nh: u32,
) {
    let shared = shared(&mut Layout::new());
    let shape = Shape { b, t, nh };
    if thread::thread_idx_x() == 0 {
        qkv.prefetch();
        dout.prefetch();
        shared.own_slots.init(1, 1);
        shared.slots.init(STAGES, 1);
        MBarrier::fence_init();
        hopper::fence_async_proxy();
    }
    thread::sync_threads();

    let role = warp::shuffle(thread::thread_idx_x() / WARPGROUP, 0);
    let mut i = thread::block_idx_x();
    if role == 0 {
        hopper::give_registers::<PRODUCER_REGISTERS>();
        if thread::thread_idx_x() == 0 {
            let mut producer = Producer { shared, qkv, dout, own: Place::new(1), ring: Place::new(1) };
            while i < shape.works() {
                producer.load(shape, shape.work(i));
                i += thread::grid_dim_x();
            }
        }
    } else {
        hopper::take_registers::<CONSUMER_REGISTERS>();
        let mut consumer = Consumer { shared, index: role - 1, own: Place::new(0), ring: Place::new(0) };
        while i < shape.works() {
            let work = shape.work(i);
            let first = work.tile * TILE + consumer.index * HALF + thread_row();
            let row = |query: u32| {
                let at = shape.statistics(work) + query as usize;
                let inside = query < t;
                (shift_of(lse, at, inside), if inside { d.at(at) } else { 0.0 })
            };
            let dq = consumer.differentiate(work.tile, [row(first), row(first + 8)]);
            if first < t {
                write_row::<0>(dqkv, shape.packed_row(work, 0, first), &dq, SCALE);
            }
            if first + 8 < t {
                write_row::<1>(dqkv, shape.packed_row(work, 0, first + 8), &dq, SCALE);
            }
            i += thread::grid_dim_x();
        }
    }
}

struct Producer {
    shared: Shared,
    qkv: Global<TensorMap>,
    dout: Global<TensorMap>,
    own: Place<1>,
    ring: Place<STAGES>,
}

impl Producer {
    /// Q and dout, then K and V from key 0 to the diagonal.
    #[inline(always)]
    fn load(&mut self, shape: Shape, work: Work) {
        self.shared.own_slots.empty.at(0).wait(self.own.parity);
        self.own.advance();
        let full = self.shared.own_slots.full.at(0);
        full.arrive_expecting(2 * SwizzledTile::<128>::BYTES);
        load_tile(self.shared.own, self.qkv, shape.column(work, 0), work.tile * TILE, work.b, full);
        load_tile(self.shared.own.same_shape_after(1), self.dout, work.h * HS, work.tile * TILE, work.b, full);

        let mut tile = 0;
        while tile < 2 * work.tile + 2 {
            self.shared.slots.empty.at(self.ring.slot).wait(self.ring.parity);
            let full = self.shared.slots.full.at(self.ring.slot);
            let slot = self.ring.advance();
            full.arrive_expecting(2 * SwizzledTile::<64>::BYTES);
            let y = tile * HALF;
            self.shared.k.same_shape_after(slot).load_of(self.qkv, shape.column(work, 1), y, work.b, full);
            self.shared.v.same_shape_after(slot).load_of(self.qkv, shape.column(work, 2), y, work.b, full);
            tile += 1;
        }
    }
}

struct Consumer {
    shared: Shared,
    /// Which 64 queries of the tile.
    index: u32,
    own: Place<1>,
    ring: Place<STAGES>,
}

impl Consumer {
    /// dQ (to be scaled) of this consumer's queries, whose two rows have (shift, D) `rows`.
    #[inline(always)]
    fn differentiate(&mut self, tile: u32, rows: [(f32, f32); 2]) -> Square {
        self.shared.own_slots.full.at(0).wait(self.own.parity);
        let q = left(self.shared.own.rows(self.index * HALF));
        let dout = left(self.shared.own.same_shape_after(1).rows(self.index * HALF));
        self.shared.own_slots.release_read(self.own.advance(), self.index);

        let mut dq = Square::ZERO;
        let (mut s, mut dp) = (Square::ZERO, Square::ZERO);
        let diagonal = 2 * tile + self.index;
        let mut previous = self.ring.slot;
        let mut keys = 0;
        loop {
            let slot = self.ring.slot;
            self.shared.slots.full.at(slot).wait(self.ring.parity);
            self.ring.advance();
            let (k, v) = (self.shared.k.same_shape_after(slot), self.shared.v.same_shape_after(slot));
            wgmma::fence();
            for step in 0..4 {
                s.product_with(q[step], k.operand(step as u32), step > 0);
            }
            wgmma::commit();
            for step in 0..4 {
                dp.product_with(dout[step], v.operand(step as u32), step > 0);
            }
            wgmma::commit();
            // Done: the previous tile's product and S.
            wgmma::wait::<1>();
            s.settle();
            if keys > 0 {
                self.shared.slots.release(previous);
            }
            for i in 0..32 {
                s[i] = probability(s[i], rows[i / 2 % 2].0);
            }
            if keys == diagonal {
                mask_diagonal(&mut s);
            }
            wgmma::wait::<0>();
            dp.settle();
            for i in 0..32 {
                dp[i] = s[i] * (dp[i] - rows[i / 2 % 2].1);
            }
            let ds = as_left(&dp);
            wgmma::fence();
            for step in 0..4 {
                dq.product_with_rows(ds[step], k.operand_by_rows(step as u32), true);
            }
            wgmma::commit();
            previous = slot;
            keys += 1;
            if keys > diagonal {
                break;
            }
        }
        wgmma::wait::<0>();
        dq.settle();
        self.shared.slots.release(previous);
        if self.index == 0 {
            // All of the last tile's keys come after these queries.
            self.shared.slots.full.at(self.ring.slot).wait(self.ring.parity);
            self.shared.slots.release(self.ring.advance());
        }
        dq
    }
}

/// Probability 0 where the key comes after the query, in the tile where both begin at the same position.
#[inline(always)]
fn mask_diagonal(p: &mut Square) {
    let query = thread_row();
    for i in 0..32 {
        let (row, key) = place_of(i);
        if key > query + 8 * row as u32 {
            p[i] = 0.0;
        }
    }
}
