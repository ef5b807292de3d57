//! Forward: 128 queries per block, keys and values streamed in tiles of 128.
//!
//! While the tensor cores work on P V of one tile and Q Kᵀ of the next, the softmax of the former is done: for HS = 64 a
//! tile takes as long in the exponential unit as in the tensor cores, so that overlap is what there is to win. Keys go from
//! the diagonal down to 0; only the diagonal tile is masked. Q is double buffered, so that the next piece of work can begin
//! while this one ends.

use super::{
    CONSUMER_REGISTERS, HALF, Left, PRODUCER_REGISTERS, Place, SCALE, SCALE_LOG2, Shape, Slots, Square, TILE,
    WARPGROUP, Work, load_tile, place_of, thread_row, write_row,
};
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{self, MBarrier, SwizzledTile, TensorMap, wgmma};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, bf16, element, kernel, math, thread, warp};

const STAGES: u32 = 4;
const TILE_BYTES: u32 = SwizzledTile::<128>::BYTES;

#[derive(Clone, Copy)]
struct Shared {
    q: SwizzledTile<128>,
    ring: SwizzledTile<128>,
    q_slots: Slots,
    slots: Slots,
}

fn shared(layout: &mut Layout) -> Shared {
    let q = layout.swizzled::<256>().rows(0);
    let ring = layout.swizzled::<{ 128 * STAGES as usize }>().rows(0);
    Shared { q, ring, q_slots: Slots::new(layout, 2), slots: Slots::new(layout, STAGES) }
}

/// Dynamic shared memory of a block.
pub fn forward_shared_bytes() -> usize {
    let mut layout = Layout::new();
    shared(&mut layout);
    layout.bytes()
}

/// out (B,T,NH,64) and lse (B,NH,T), the natural log-sum-exp of the scaled scores; `qkv` maps (B, T, 3 NH 64) with [`super::BOX`].
/// A 1-D grid of as many blocks as there are multiprocessors.
#[kernel(threads = 384, blocks_per_sm = 1, arch = "sm_90a")]
pub fn attention_forward_wgmma(
    out: GlobalMut<bf16>,
    lse: GlobalMut<f32>,
    qkv: Global<TensorMap>,
    b: u32,
    t: u32,
    nh: u32,
) {
    let shared = shared(&mut Layout::new());
    let shape = Shape { b, t, nh };
    if thread::thread_idx_x() == 0 {
        qkv.prefetch();
        shared.q_slots.init(2, 1);
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
            let mut producer = Producer { shared, qkv, q: Place::new(1), ring: Place::new(1) };
            while i < shape.works() {
                producer.load(shape, shape.work(i));
                i += thread::grid_dim_x();
            }
        }
    } else {
        hopper::take_registers::<CONSUMER_REGISTERS>();
        let mut consumer = Consumer { shared, index: role - 1, q: Place::new(0), ring: Place::new(0) };
        while i < shape.works() {
            let work = shape.work(i);
            let (o, rows) = consumer.attend(work.tile);
            consumer.write(&o, rows, shape, work, out, lse);
            i += thread::grid_dim_x();
        }
    }
}

struct Producer {
    shared: Shared,
    qkv: Global<TensorMap>,
    q: Place<2>,
    ring: Place<STAGES>,
}

impl Producer {
    /// Q, then K of the diagonal tile, then K and V of one tile less each, V one step behind K.
    #[inline(always)]
    fn load(&mut self, shape: Shape, work: Work) {
        self.shared.q_slots.empty.at(self.q.slot).wait(self.q.parity);
        let full = self.shared.q_slots.full.at(self.q.slot);
        full.arrive_expecting(TILE_BYTES);
        let q = self.shared.q.same_shape_after(self.q.advance());
        load_tile(q, self.qkv, shape.column(work, 0), work.tile * TILE, work.b, full);

        let (keys, values) = (shape.column(work, 1), shape.column(work, 2));
        self.load_next(keys, work.tile * TILE, work.b);
        let mut tile = work.tile;
        while tile > 0 {
            self.load_next(keys, (tile - 1) * TILE, work.b);
            self.load_next(values, tile * TILE, work.b);
            tile -= 1;
        }
        self.load_next(values, 0, work.b);
    }

    #[inline(always)]
    fn load_next(&mut self, x: u32, y: u32, b: u32) {
        self.shared.slots.empty.at(self.ring.slot).wait(self.ring.parity);
        let full = self.shared.slots.full.at(self.ring.slot);
        full.arrive_expecting(TILE_BYTES);
        load_tile(self.shared.ring.same_shape_after(self.ring.advance()), self.qkv, x, y, b, full);
    }
}

struct Consumer {
    shared: Shared,
    /// Which 64 queries of the tile.
    index: u32,
    q: Place<2>,
    ring: Place<STAGES>,
}

/// Scores of 64 queries and 128 keys.
type Scores = [f32; 64];

/// Softmax state of the two rows a thread shares with three others: running maximum (of raw scores), and its own part of
/// the running sum.
#[derive(Clone, Copy)]
struct Rows {
    max: [f32; 2],
    sum: [f32; 2],
}

impl Consumer {
    /// Unnormalised output of this consumer's queries of a tile.
    #[inline(always)]
    fn attend(&mut self, tile: u32) -> (Square, Rows) {
        self.shared.q_slots.full.at(self.q.slot).wait(self.q.parity);
        let q = self.shared.q.same_shape_after(self.q.slot).rows::<64>(self.index * HALF);
        let mut rows = Rows { max: [f32::NEG_INFINITY; 2], sum: [0.0; 2] };
        let mut o = Square::ZERO;
        let mut s = Scores::ZERO;
        wgmma::fence();
        let keys = self.start_scores(&mut s, q);
        wgmma::commit();
        wgmma::wait::<0>();
        s.settle();
        self.shared.slots.release(keys);
        mask_diagonal(&mut s, self.index);
        rows.soften(&mut s);
        let mut p = probabilities(&s);

        let mut left = tile;
        while left > 0 {
            wgmma::fence();
            let keys = self.start_scores(&mut s, q);
            wgmma::commit();
            let values = self.start_values(&mut o, &p);
            wgmma::commit();
            wgmma::wait::<1>();
            s.settle();
            self.shared.slots.release(keys);
            let factors = rows.soften(&mut s);
            wgmma::wait::<0>();
            o.settle();
            self.shared.slots.release(values);
            for i in 0..32 {
                o[i] *= factors[i / 2 % 2];
            }
            p = probabilities(&s);
            left -= 1;
        }
        wgmma::fence();
        let values = self.start_values(&mut o, &p);
        wgmma::commit();
        wgmma::wait::<0>();
        o.settle();
        self.shared.slots.release(values);
        self.shared.q_slots.release(self.q.advance());
        (o, rows)
    }

    /// s = Q Kᵀ of the next tile of keys, whose slot is returned.
    #[inline(always)]
    fn start_scores(&mut self, s: &mut Scores, q: SwizzledTile<64>) -> u32 {
        let k = self.next_tile();
        for step in 0..4 {
            s.product(q.operand(step), k.operand(step), step > 0);
        }
        self.ring.advance()
    }

    /// o += P V with the next tile of values, whose slot is returned.
    #[inline(always)]
    fn start_values(&mut self, o: &mut Square, p: &[Left; 2]) -> u32 {
        let v = self.next_tile();
        for step in 0..8 {
            o.product_with_rows(p[step / 4][step % 4], v.operand_by_rows(step as u32), true);
        }
        self.ring.advance()
    }

    #[inline(always)]
    fn next_tile(&self) -> SwizzledTile<128> {
        self.shared.slots.full.at(self.ring.slot).wait(self.ring.parity);
        self.shared.ring.same_shape_after(self.ring.slot)
    }

    #[inline(always)]
    fn write(&self, o: &Square, rows: Rows, shape: Shape, work: Work, out: GlobalMut<bf16>, lse: GlobalMut<f32>) {
        let first = work.tile * TILE + self.index * HALF + thread_row();
        let sums = [rows.total(0), rows.total(1)];
        if first < shape.t {
            write_row::<0>(out, shape.row(work, first), o, math::recip(sums[0]));
        }
        if first + 8 < shape.t {
            write_row::<1>(out, shape.row(work, first + 8), o, math::recip(sums[1]));
        }
        // The four lanes of a row have the same statistics; the first two write those of the two rows.
        let lane = (warp::lane() % 4) as usize;
        let query = first + 8 * lane as u32;
        if lane < 2 && query < shape.t {
            let (max, sum) = if lane == 0 { (rows.max[0], sums[0]) } else { (rows.max[1], sums[1]) };
            lse.set(shape.statistics(work) + query as usize, max * SCALE + math::ln(sum));
        }
    }
}

impl Rows {
    /// s = exp(scale (s - max)) with the new maximum; returns what earlier sums and outputs must be multiplied by.
    #[inline(always)]
    fn soften(&mut self, s: &mut Scores) -> [f32; 2] {
        [self.soften_row::<0>(s), self.soften_row::<1>(s)]
    }

    #[inline(always)]
    fn soften_row<const ROW: usize>(&mut self, s: &mut Scores) -> f32 {
        let old = self.max[ROW];
        let mut max = old;
        for j in 0..16 {
            max = math::max(max, math::max(s[4 * j + 2 * ROW], s[4 * j + 2 * ROW + 1]));
        }
        max = math::max(max, warp::shuffle_xor(max, 1));
        max = math::max(max, warp::shuffle_xor(max, 2));
        let shift = max * SCALE_LOG2;
        let mut sum = 0.0;
        for j in 0..16 {
            let i = 4 * j + 2 * ROW;
            s[i] = math::exp2(math::fma(s[i], SCALE_LOG2, -shift));
            s[i + 1] = math::exp2(math::fma(s[i + 1], SCALE_LOG2, -shift));
            sum += s[i] + s[i + 1];
        }
        let factor = math::exp2(math::fma(old, SCALE_LOG2, -shift));
        self.max[ROW] = max;
        self.sum[ROW] = self.sum[ROW] * factor + sum;
        factor
    }

    /// Sum over the whole row.
    #[inline(always)]
    fn total(&self, row: usize) -> f32 {
        let sum = self.sum[row];
        let sum = sum + warp::shuffle_xor(sum, 1);
        sum + warp::shuffle_xor(sum, 2)
    }
}

/// Scores of the diagonal tile whose key comes after the query.
#[inline(always)]
fn mask_diagonal(s: &mut Scores, index: u32) {
    let query = index * HALF + thread_row();
    for i in 0..64 {
        let (row, key) = place_of(i);
        if key > query + 8 * row as u32 {
            s[i] = f32::NEG_INFINITY;
        }
    }
}

/// S rounded, as the left operand of eight products over 16 keys each.
#[inline(always)]
fn probabilities(s: &Scores) -> [Left; 2] {
    let step = |k: usize| {
        let pair = |i: usize| element::pack_pair(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
        [pair(0), pair(1), pair(2), pair(3)]
    };
    [[step(0), step(1), step(2), step(3)], [step(4), step(5), step(6), step(7)]]
}
