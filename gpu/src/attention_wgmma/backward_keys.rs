//! Backward of keys and values: 64 keys per consumer, queries streamed in panels of 64.
//!
//! With S, P, dP transposed (rows are keys), everything a consumer makes is a left operand in registers:
//! ```text
//! Sᵀ = K Qᵀ          Pᵀ = 2^(scale Sᵀ - lse)         dV += Pᵀ dout
//! dPᵀ = V doutᵀ      dSᵀ = Pᵀ ∘ (dPᵀ - D)            dK += dSᵀ Q, times scale at the end
//! ```
//! A query's lse and D run along columns here; the producer's first warp copies them into the stage beside the panels.

use super::epilogue::{Target, write_rows};
use super::mask::mask_diagonal_transposed;
use super::panel::{Panel, Square, as_left, place_of};
use super::ring::{Place, Slots};
use super::scheduler::{Shape, Work, piece};
use super::softmax::{probability, shift_of};
use super::{Head, Head64, Head128, ROWS, WARPGROUP};
use core::marker::PhantomData;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{self, MBarrier, TensorMap, wgmma};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, bf16, kernel, thread, warp};

const CONSUMERS: u32 = 2;
/// Keys of a piece of work.
const TILE: u32 = CONSUMERS * ROWS;
/// Registers a thread keeps: 128 * 40 + 256 * 232 are what a multiprocessor has.
const PRODUCER_REGISTERS: u32 = 40;
const CONSUMER_REGISTERS: u32 = 232;
const STAGES: u32 = 4;
/// Floats of a stage's statistics: shift (lse in base 2), then D.
const STATISTICS: usize = 2 * ROWS as usize;

struct Shared<H> {
    /// Of each consumer.
    k: Panel<H>,
    v: Panel<H>,
    q: Panel<H>,
    dout: Panel<H>,
    /// Of each consumer, on the way out.
    out: Panel<H>,
    statistics: SharedArray<f32>,
    kv_slots: Slots,
    slots: Slots,
}

impl<H> Clone for Shared<H> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}
impl<H> Copy for Shared<H> {}

fn shared<H: Head>(layout: &mut Layout) -> Shared<H> {
    Shared {
        k: Panel::take(layout, CONSUMERS),
        v: Panel::take(layout, CONSUMERS),
        q: Panel::take(layout, STAGES),
        dout: Panel::take(layout, STAGES),
        out: Panel::take(layout, CONSUMERS),
        statistics: layout.array(STATISTICS * STAGES as usize),
        kv_slots: Slots::new(layout, 1),
        slots: Slots::new(layout, STAGES),
    }
}

/// Dynamic shared memory of a block.
pub fn backward_keys_shared_bytes<H: Head>() -> usize {
    let mut layout = Layout::new();
    shared::<H>(&mut layout);
    layout.bytes()
}

/// The K and V parts of dqkv (B,T,3,NH,HS). `qkv` maps (B, T, 3 NH HS), `dout` maps (B, T, NH HS), both with [`super::BOX`]; lse
/// and d = rowsum(dout ∘ out) are (B,NH,T). A 1-D grid of as many blocks as there are multiprocessors.
#[kernel(threads = 384, blocks_per_sm = 1, arch = "sm_90a", instances(hs_64 = <Head64>, hs_128 = <Head128>))]
pub fn attention_backward_keys_wgmma<H: Head>(
    dqkv: GlobalMut<bf16>,
    qkv: Global<TensorMap>,
    dout: Global<TensorMap>,
    lse: Global<f32>,
    d: Global<f32>,
    b: u32,
    t: u32,
    nh: u32,
) {
    let shared = shared::<H>(&mut Layout::new());
    let shape = Shape::<H, TILE> { b, t, nh, head: PhantomData };
    if thread::thread_idx_x() == 0 {
        qkv.prefetch();
        dout.prefetch();
        shared.kv_slots.init(1, 1, CONSUMERS);
        shared.slots.init(STAGES, warp::LANES, CONSUMERS);
        MBarrier::fence_init();
        hopper::fence_async_proxy();
    }
    thread::sync_threads();

    let role = warp::shuffle(thread::thread_idx_x() / WARPGROUP, 0);
    if role == 0 {
        hopper::give_registers::<PRODUCER_REGISTERS>();
        let mut round = 0;
        if thread::thread_idx_x() < warp::LANES {
            let mut producer =
                Producer { shared, shape, qkv, dout, lse, d, kv: Place::new(1, 1), ring: Place::new(1, STAGES) };
            while piece(round) < shape.works() {
                producer.load(shape.work::<true>(piece(round)));
                round += 1;
            }
        }
    } else {
        hopper::take_registers::<CONSUMER_REGISTERS>();
        // A constant, as in the forward: ptxas then knows what is the same for a warp.
        if role == 1 {
            Consumer::<H, 0>::new(shared).run(shape, dqkv);
        } else {
            Consumer::<H, 1>::new(shared).run(shape, dqkv);
        }
    }
}

/// Panels of queries from the block's first key on; at least one for each consumer's diagonal.
#[inline(always)]
fn queries_of<H: Head>(shape: Shape<H, TILE>, work: Work) -> u32 {
    CONSUMERS * (shape.tiles() - work.tile)
}

/// The first warp of warpgroup 0.
struct Producer<H> {
    shared: Shared<H>,
    shape: Shape<H, TILE>,
    qkv: Global<TensorMap>,
    dout: Global<TensorMap>,
    lse: Global<f32>,
    d: Global<f32>,
    kv: Place,
    ring: Place,
}

impl<H: Head> Producer<H> {
    #[inline(always)]
    fn load(&mut self, work: Work) {
        self.shared.kv_slots.empty.at(0).wait(self.kv.parity);
        self.kv.advance();
        if warp::lane() == 0 {
            let full = self.shared.kv_slots.full.at(0);
            full.arrive_expecting(2 * CONSUMERS * Panel::<H>::BYTES);
            for i in 0..CONSUMERS {
                let y = work.tile * TILE + i * ROWS;
                self.shared.k.after(i).load(self.qkv, self.shape.column(work, 1), y, work.b, full);
                self.shared.v.after(i).load(self.qkv, self.shape.column(work, 2), y, work.b, full);
            }
        }
        let mut panel = 0;
        while panel < queries_of(self.shape, work) {
            self.load_queries(work, work.tile * TILE + panel * ROWS);
            panel += 1;
        }
    }

    /// Q, dout and the statistics of 64 queries.
    #[inline(always)]
    fn load_queries(&mut self, work: Work, first: u32) {
        let (lane, t) = (warp::lane(), self.shape.t);
        let at = self.shape.statistics(work);
        let query = |half: u32| first + lane + half * warp::LANES;
        let shift = |half| shift_of(self.lse, at + query(half) as usize, query(half) < t);
        let d = |half| if query(half) < t { self.d.at(at + query(half) as usize) } else { 0.0 };
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
            full.arrive_expecting(2 * Panel::<H>::BYTES);
            self.shared.q.after(slot).load(self.qkv, self.shape.column(work, 0), first, work.b, full);
            self.shared.dout.after(slot).load(self.dout, work.h * H::HS, first, work.b, full);
        } else {
            full.arrive();
        }
    }
}

/// The consumer of the 64 keys `INDEX` of a tile.
struct Consumer<H, const INDEX: u32> {
    shared: Shared<H>,
    kv: Place,
    ring: Place,
}

impl<H: Head, const INDEX: u32> Consumer<H, INDEX> {
    /// For HS = 128 the sums leave no registers for keys and values: they are left operands in shared memory.
    const IN_REGISTERS: bool = H::HS == 64;

    #[inline(always)]
    fn new(shared: Shared<H>) -> Self {
        Self { shared, kv: Place::new(0, 1), ring: Place::new(0, STAGES) }
    }

    #[inline(always)]
    fn run(&mut self, shape: Shape<H, TILE>, dqkv: GlobalMut<bf16>) {
        let mut round = 0;
        while piece(round) < shape.works() {
            let work = shape.work::<true>(piece(round));
            let (mut dk, mut dv) = self.differentiate(queries_of(shape, work));
            let row = work.tile * TILE + INDEX * ROWS;
            let through = self.shared.out.after(INDEX);
            let target = |part| Target {
                out: dqkv,
                first: shape.packed_row(work, part, row),
                stride: (3 * shape.nh * H::HS) as usize,
                rows: shape.t.saturating_sub(row),
            };
            write_rows::<H>(target(1), &mut dk, [H::SCALE; 2], through);
            write_rows::<H>(target(2), &mut dv, [1.0; 2], through);
            round += 1;
        }
    }

    /// dK (to be scaled) and dV of this consumer's keys, over `queries` panels that begin at the block's first key.
    #[inline(always)]
    fn differentiate(&mut self, queries: u32) -> (H::Sums, H::Sums) {
        self.shared.kv_slots.full.at(0).wait(self.kv.parity);
        let (keys, values) = (self.shared.k.after(INDEX), self.shared.v.after(INDEX));
        let (mut k, mut v) = (H::NO_ROWS, H::NO_ROWS);
        if Self::IN_REGISTERS {
            (k, v) = (keys.own(), values.own());
            self.shared.kv_slots.release_read(self.kv.slot, INDEX);
        }
        for _ in 0..INDEX {
            // All of these queries come before these keys.
            self.shared.slots.skip(&mut self.ring);
        }

        let (mut dk, mut dv) = (H::Sums::ZERO, H::Sums::ZERO);
        let (mut s, mut dp) = (Square::ZERO, Square::ZERO);
        let mut previous = self.ring.slot;
        let mut panel = INDEX;
        loop {
            let slot = self.ring.slot;
            self.shared.slots.full.at(slot).wait(self.ring.parity);
            self.ring.advance();
            let (q, dout) = (self.shared.q.after(slot), self.shared.dout.after(slot));
            let statistics = self.shared.statistics.skip(slot as usize * STATISTICS);
            wgmma::fence();
            if Self::IN_REGISTERS {
                q.start_scores(&mut s, &k, false);
            } else {
                q.start_scores_of(&mut s, keys, false);
            }
            wgmma::commit();
            if !Self::IN_REGISTERS {
                // The previous panel's products are done: their left operands leave room for dP.
                wgmma::wait::<1>();
                wgmma::fence();
            }
            if Self::IN_REGISTERS {
                dout.start_scores(&mut dp, &v, false);
            } else {
                dout.start_scores_of(&mut dp, values, false);
            }
            wgmma::commit();
            // Done: the previous panel's products and S.
            wgmma::wait::<1>();
            s.settle();
            if panel != INDEX {
                self.shared.slots.release(previous);
            }
            probabilities::<H>(&mut s, statistics);
            if panel == INDEX {
                mask_diagonal_transposed(&mut s, 0.0);
            }
            let p = as_left(&s);
            wgmma::wait::<0>();
            dp.settle();
            gradients(&mut dp, &s, statistics.skip(ROWS as usize));
            let ds = as_left(&dp);
            wgmma::fence();
            dout.add_products(&mut dv, &p, 1);
            q.add_products(&mut dk, &ds, 1);
            wgmma::commit();
            previous = slot;
            panel += 1;
            if panel == queries {
                break;
            }
        }
        wgmma::wait::<0>();
        dk.settle();
        dv.settle();
        self.shared.slots.release(previous);
        let own = self.kv.advance();
        if !Self::IN_REGISTERS {
            self.shared.kv_slots.release(own);
        }
        (dk, dv)
    }
}

/// Sᵀ becomes Pᵀ.
#[inline(always)]
fn probabilities<H: Head>(s: &mut Square, shifts: SharedArray<f32>) {
    for i in 0..16 {
        let i = i / 2 * 4 + i % 2;
        let shift = shifts.at(place_of(i).1 as usize);
        s[i] = probability::<H>(s[i], shift);
        s[i + 2] = probability::<H>(s[i + 2], shift);
    }
}

/// dPᵀ becomes dSᵀ.
#[inline(always)]
fn gradients(dp: &mut Square, p: &Square, d: SharedArray<f32>) {
    for i in 0..16 {
        let i = i / 2 * 4 + i % 2;
        let d = d.at(place_of(i).1 as usize);
        dp[i] = p[i] * (dp[i] - d);
        dp[i + 2] = p[i + 2] * (dp[i + 2] - d);
    }
}
