//! Backward of keys and values: 128 keys per block, queries streamed in tiles of 64.
//!
//! With S, P, dP transposed (rows are keys), everything a consumer makes is a left operand in registers:
//! ```text
//! Sᵀ = K Qᵀ          Pᵀ = 2^(scale Sᵀ - lse)         dV += Pᵀ dout
//! dPᵀ = V doutᵀ      dSᵀ = Pᵀ ∘ (dPᵀ - D)            dK += dSᵀ Q, times scale at the end
//! ```
//! A query's lse and D run along columns here; the producer's first warp copies them into the stage beside the tiles.

use super::{
    CONSUMER_REGISTERS, HALF, HS, Left, PRODUCER_REGISTERS, Place, SCALE, Shape, Slots, Square, TILE, WARPGROUP, Work,
    as_left, left, load_tile, place_of, probability, shift_of, thread_row, write_row,
};
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{self, MBarrier, SwizzledTile, TensorMap, wgmma};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, bf16, kernel, thread, warp};

const STAGES: u32 = 4;
/// Floats of a stage's statistics: shift (lse in base 2), then D.
const STATISTICS: usize = 2 * HALF as usize;

#[derive(Clone, Copy)]
struct Shared {
    /// K, then V of the block's keys.
    kv: SwizzledTile<128>,
    q: SwizzledTile<64>,
    dout: SwizzledTile<64>,
    statistics: SharedArray<f32>,
    kv_slots: Slots,
    slots: Slots,
}

fn shared(layout: &mut Layout) -> Shared {
    Shared {
        kv: layout.swizzled::<256>().rows(0),
        q: layout.swizzled::<{ 64 * STAGES as usize }>().rows(0),
        dout: layout.swizzled::<{ 64 * STAGES as usize }>().rows(0),
        statistics: layout.array(STATISTICS * STAGES as usize),
        kv_slots: Slots::new(layout, 1),
        slots: Slots::new(layout, STAGES),
    }
}

/// Dynamic shared memory of a block.
pub fn backward_keys_shared_bytes() -> usize {
    let mut layout = Layout::new();
    shared(&mut layout);
    layout.bytes()
}

/// The K and V parts of dqkv (B,T,3,NH,64). `qkv` maps (B, T, 3 NH 64), `dout` maps (B, T, NH 64), both with [`super::BOX`]; lse
/// and d = rowsum(dout ∘ out) are (B,NH,T). A 1-D grid of as many blocks as there are multiprocessors.
#[kernel(threads = 384, blocks_per_sm = 1, arch = "sm_90a")]
pub fn attention_backward_keys_wgmma(
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
        shared.kv_slots.init(1, 1);
        shared.slots.init(STAGES, warp::LANES);
        MBarrier::fence_init();
        hopper::fence_async_proxy();
    }
    thread::sync_threads();

    let role = warp::shuffle(thread::thread_idx_x() / WARPGROUP, 0);
    let mut i = thread::block_idx_x();
    if role == 0 {
        hopper::give_registers::<PRODUCER_REGISTERS>();
        if thread::thread_idx_x() < warp::LANES {
            let mut producer = Producer { shared, qkv, dout, lse, d, kv: Place::new(1), ring: Place::new(1) };
            while i < shape.works() {
                producer.load(shape, shape.work(i));
                i += thread::grid_dim_x();
            }
        }
    } else {
        hopper::take_registers::<CONSUMER_REGISTERS>();
        let mut consumer = Consumer { shared, index: role - 1, kv: Place::new(0), ring: Place::new(0) };
        while i < shape.works() {
            let work = shape.work(i);
            let (dk, dv) = consumer.differentiate(queries_of(shape, work));
            let first = work.tile * TILE + consumer.index * HALF + thread_row();
            if first < shape.t {
                write_row::<0>(dqkv, shape.packed_row(work, 1, first), &dk, SCALE);
                write_row::<0>(dqkv, shape.packed_row(work, 2, first), &dv, 1.0);
            }
            if first + 8 < shape.t {
                write_row::<1>(dqkv, shape.packed_row(work, 1, first + 8), &dk, SCALE);
                write_row::<1>(dqkv, shape.packed_row(work, 2, first + 8), &dv, 1.0);
            }
            i += thread::grid_dim_x();
        }
    }
}

/// Tiles of 64 queries from the block's first key on; at least two, one for each consumer's diagonal.
#[inline(always)]
fn queries_of(shape: Shape, work: Work) -> u32 {
    2 * (shape.tiles() - work.tile)
}

/// The first warp of warpgroup 0.
struct Producer {
    shared: Shared,
    qkv: Global<TensorMap>,
    dout: Global<TensorMap>,
    lse: Global<f32>,
    d: Global<f32>,
    kv: Place<1>,
    ring: Place<STAGES>,
}

impl Producer {
    #[inline(always)]
    fn load(&mut self, shape: Shape, work: Work) {
        self.shared.kv_slots.empty.at(0).wait(self.kv.parity);
        self.kv.advance();
        if warp::lane() == 0 {
            let full = self.shared.kv_slots.full.at(0);
            full.arrive_expecting(2 * SwizzledTile::<128>::BYTES);
            let (y, v) = (work.tile * TILE, self.shared.kv.same_shape_after(1));
            load_tile(self.shared.kv, self.qkv, shape.column(work, 1), y, work.b, full);
            load_tile(v, self.qkv, shape.column(work, 2), y, work.b, full);
        }
        let mut tile = 0;
        while tile < queries_of(shape, work) {
            self.load_queries(shape, work, work.tile * TILE + tile * HALF);
            tile += 1;
        }
    }

    /// Q, dout and the statistics of 64 queries.
    #[inline(always)]
    fn load_queries(&mut self, shape: Shape, work: Work, first: u32) {
        let lane = warp::lane();
        let at = shape.statistics(work);
        let query = |half: u32| first + lane + half * warp::LANES;
        let shift = |half| shift_of(self.lse, at + query(half) as usize, query(half) < shape.t);
        let d = |half| if query(half) < shape.t { self.d.at(at + query(half) as usize) } else { 0.0 };
        // Loaded before the wait, which hides their latency.
        let values = [shift(0), shift(1), d(0), d(1)];

        self.shared.slots.empty.at(self.ring.slot).wait(self.ring.parity);
        let full = self.shared.slots.full.at(self.ring.slot);
        let slot = self.ring.advance();
        let statistics = self.shared.statistics.skip(slot as usize * STATISTICS);
        for i in 0..4 {
            statistics.set(i * 32 + lane as usize, values[i]);
        }
        if lane == 0 {
            full.arrive_expecting(2 * SwizzledTile::<64>::BYTES);
            self.shared.q.same_shape_after(slot).load_of(self.qkv, shape.column(work, 0), first, work.b, full);
            self.shared.dout.same_shape_after(slot).load_of(self.dout, work.h * HS, first, work.b, full);
        } else {
            full.arrive();
        }
    }
}

struct Consumer {
    shared: Shared,
    /// Which 64 keys of the tile.
    index: u32,
    kv: Place<1>,
    ring: Place<STAGES>,
}

impl Consumer {
    /// dK (to be scaled) and dV of this consumer's keys, over `queries` tiles that begin at the block's first key.
    #[inline(always)]
    fn differentiate(&mut self, queries: u32) -> (Square, Square) {
        self.shared.kv_slots.full.at(0).wait(self.kv.parity);
        let k = left(self.shared.kv.rows(self.index * HALF));
        let v = left(self.shared.kv.same_shape_after(1).rows(self.index * HALF));
        self.shared.kv_slots.release_read(self.kv.advance(), self.index);
        if self.index == 1 {
            // All of the first tile's queries come before these keys.
            self.shared.slots.full.at(self.ring.slot).wait(self.ring.parity);
            self.shared.slots.release(self.ring.advance());
        }

        let (mut dk, mut dv) = (Square::ZERO, Square::ZERO);
        let (mut s, mut dp) = (Square::ZERO, Square::ZERO);
        let mut previous = self.ring.slot;
        let mut tile = self.index;
        loop {
            let slot = self.ring.slot;
            self.shared.slots.full.at(slot).wait(self.ring.parity);
            self.ring.advance();
            let (q, dout) = (self.shared.q.same_shape_after(slot), self.shared.dout.same_shape_after(slot));
            wgmma::fence();
            for step in 0..4 {
                s.product_with(k[step], q.operand(step as u32), step > 0);
            }
            wgmma::commit();
            for step in 0..4 {
                dp.product_with(v[step], dout.operand(step as u32), step > 0);
            }
            wgmma::commit();
            // Done: the previous tile's products and S.
            wgmma::wait::<1>();
            s.settle();
            if tile != self.index {
                self.shared.slots.release(previous);
            }
            let statistics = self.shared.statistics.skip(slot as usize * STATISTICS);
            probabilities(&mut s, statistics);
            if tile == self.index {
                mask_diagonal(&mut s);
            }
            let p = as_left(&s);
            wgmma::wait::<0>();
            dp.settle();
            for i in 0..32 {
                let (_, query) = place_of(i);
                dp[i] = s[i] * (dp[i] - statistics.at((HALF + query) as usize));
            }
            let ds = as_left(&dp);
            wgmma::fence();
            add_products(&mut dv, &p, dout);
            add_products(&mut dk, &ds, q);
            wgmma::commit();
            previous = slot;
            tile += 1;
            if tile == queries {
                break;
            }
        }
        wgmma::wait::<0>();
        dk.settle();
        dv.settle();
        self.shared.slots.release(previous);
        (dk, dv)
    }
}

/// out += left · rows, over 64 rows.
#[inline(always)]
fn add_products(out: &mut Square, left: &Left, rows: SwizzledTile<64>) {
    for step in 0..4 {
        out.product_with_rows(left[step], rows.operand_by_rows(step as u32), true);
    }
}

/// Sᵀ becomes Pᵀ.
#[inline(always)]
fn probabilities(s: &mut Square, statistics: SharedArray<f32>) {
    for i in 0..32 {
        let (_, query) = place_of(i);
        s[i] = probability(s[i], statistics.at(query as usize));
    }
}

/// Probability 0 where the key comes after the query, in the tile where both begin at the same position.
#[inline(always)]
fn mask_diagonal(p: &mut Square) {
    let key = thread_row();
    for i in 0..32 {
        let (row, query) = place_of(i);
        if key + 8 * row as u32 > query {
            p[i] = 0.0;
        }
    }
}
