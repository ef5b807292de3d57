//! Forward: 64 queries per consumer, keys and values streamed in panels of 64, from the diagonal down to 0.
//!
//! While a consumer makes probabilities of one panel's scores, the tensor cores work on the next panel's scores and on the
//! product of the panel before with its values: for HS = 64 a panel takes as long in the exponential unit as in the tensor
//! cores, so that overlap is what there is to win. It runs across pieces of work: the last panel of one overlaps with the
//! first scores of the next.

use super::epilogue::{Target, write_rows};
use super::mask::mask_diagonal;
use super::panel::{Panel, left_step, thread_row};
use super::ring::{Place, Slots};
use super::scheduler::{Shape, Work, piece};
use super::softmax::Softmax;
use super::{Head, Head64, Head128, ROWS, WARPGROUP};
use core::marker::PhantomData;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{self, MBarrier, TensorMap, wgmma};
use cuda_std::shared::{Layout, SharedArray};
use cuda_std::{Global, GlobalMut, bf16, kernel, math, thread, warp};

const CONSUMERS: u32 = 2;
/// Queries of a piece of work.
const TILE: u32 = CONSUMERS * ROWS;
/// Registers a thread keeps: 128 * 40 + 256 * 232 are what a multiprocessor has.
const PRODUCER_REGISTERS: u32 = 40;
const CONSUMER_REGISTERS: u32 = 232;
/// Slots of each ring.
const STAGES: u32 = 5;
/// Pieces of work that are told of at a time: one whose results are being written, up to two whose queries are there, one more
/// that the producer goes on to.
const WORKS: u32 = 4;

/// Slots for queries: those of the next piece of work arrive while this one's are in use, in registers for HS = 128.
const fn q_stages<H: Head>() -> u32 {
    if H::HS == 128 { 1 } else { 2 }
}

/// Panels of a slot.
const fn panels<H: Head>() -> u32 {
    H::Scores::COLUMNS / ROWS
}

/// Slots that hold nothing for consumer `index`, because all of their keys come after its queries.
const fn slots_after<H: Head>(index: u32) -> u32 {
    (CONSUMERS - 1 - index) / panels::<H>()
}

struct Shared<H> {
    /// In each slot one panel for each consumer.
    q: Panel<H>,
    k: Panel<H>,
    v: Panel<H>,
    /// Of each consumer, on the way out.
    out: Panel<H>,
    /// The piece of work of round i at i % [`WORKS`], from when its queries have arrived: consumers need not divide for it.
    works: SharedArray<Work>,
    q_slots: Slots,
    k_slots: Slots,
    v_slots: Slots,
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
        q: Panel::take(layout, q_stages::<H>() * CONSUMERS),
        k: Panel::take(layout, STAGES * panels::<H>()),
        v: Panel::take(layout, STAGES * panels::<H>()),
        out: Panel::take(layout, CONSUMERS),
        works: layout.array(WORKS as usize),
        q_slots: Slots::new(layout, q_stages::<H>()),
        k_slots: Slots::new(layout, STAGES),
        v_slots: Slots::new(layout, STAGES),
    }
}

/// Dynamic shared memory of a block.
pub fn forward_shared_bytes<H: Head>() -> usize {
    let mut layout = Layout::new();
    shared::<H>(&mut layout);
    layout.bytes()
}

/// out (B,T,NH,HS) and lse (B,NH,T), the natural log-sum-exp of the scaled scores; `qkv` maps (B, T, 3 NH HS) with [`super::BOX`].
/// A 1-D grid of as many blocks as there are multiprocessors.
#[kernel(threads = 384, blocks_per_sm = 1, arch = "sm_90a", instances(hs_64 = <Head64>, hs_128 = <Head128>))]
pub fn attention_forward_wgmma<H: Head>(
    out: GlobalMut<bf16>,
    lse: GlobalMut<f32>,
    qkv: Global<TensorMap>,
    b: u32,
    t: u32,
    nh: u32,
) {
    let shared = shared::<H>(&mut Layout::new());
    let shape = Shape::<H, TILE> { b, t, nh, head: PhantomData };
    if thread::thread_idx_x() == 0 {
        qkv.prefetch();
        shared.q_slots.init(q_stages::<H>(), 1, CONSUMERS);
        shared.k_slots.init(STAGES, 1, CONSUMERS);
        shared.v_slots.init(STAGES, 1, CONSUMERS);
        MBarrier::fence_init();
        hopper::fence_async_proxy();
    }
    thread::sync_threads();

    let role = warp::shuffle(thread::thread_idx_x() / WARPGROUP, 0);
    if role == 0 {
        hopper::give_registers::<PRODUCER_REGISTERS>();
        let (mut round, works) = (0, shape.works());
        if thread::thread_idx_x() == 0 && piece(round) < works {
            let mut producer = Producer {
                shared,
                shape,
                qkv,
                q: Place::new(1, q_stages::<H>()),
                k: Place::new(1, STAGES),
                v: Place::new(1, STAGES),
            };
            let mut work = shape.work::<false>(piece(round));
            while piece(round) < works {
                work = shape.work::<false>(piece(round));
                producer.load_queries(work, round);
                producer.load_panels(work);
                round += 1;
            }
            // Consumers start the scores of the piece after their last one, too, which nobody uses: were that product
            // conditional, ptxas would serialise all.
            producer.load_queries(work, round);
            producer.load_diagonal_keys(work);
        }
    } else {
        hopper::take_registers::<CONSUMER_REGISTERS>();
        // Which consumer this is decides how many panels it takes. As a constant it leaves ptxas sure that a warp's threads
        // take the same ones, so that addresses are computed once for a warp.
        if role == 1 {
            Consumer::<H, 0>::new(shared).run(shape, out, lse);
        } else {
            Consumer::<H, 1>::new(shared).run(shape, out, lse);
        }
    }
}

struct Producer<H> {
    shared: Shared<H>,
    shape: Shape<H, TILE>,
    qkv: Global<TensorMap>,
    q: Place,
    k: Place,
    v: Place,
}

impl<H: Head> Producer<H> {
    #[inline(always)]
    fn load_queries(&mut self, work: Work, round: u32) {
        self.shared.q_slots.empty.at(self.q.slot).wait(self.q.parity);
        self.shared.works.set((round % WORKS) as usize, work);
        let full = self.shared.q_slots.full.at(self.q.slot);
        let to = self.shared.q.after(self.q.advance() * CONSUMERS);
        full.arrive_expecting(CONSUMERS * Panel::<H>::BYTES);
        for i in 0..CONSUMERS {
            let y = work.tile * TILE + i * ROWS;
            to.after(i).load(self.qkv, self.shape.column(work, 0), y, work.b, full);
        }
    }

    /// Keys and values from the last consumer's diagonal down to 0.
    #[inline(always)]
    fn load_panels(&mut self, work: Work) {
        let mut slot = Self::slots(work);
        while slot > 0 {
            slot -= 1;
            self.load_keys(work, slot);
            self.shared.v_slots.empty.at(self.v.slot).wait(self.v.parity);
            let full = self.shared.v_slots.full.at(self.v.slot);
            let to = self.shared.v.after(self.v.advance() * panels::<H>());
            self.load(to, 2, work, slot, full);
        }
    }

    /// The keys of every consumer's diagonal.
    #[inline(always)]
    fn load_diagonal_keys(&mut self, work: Work) {
        for i in 0..=slots_after::<H>(0) {
            self.load_keys(work, Self::slots(work) - 1 - i);
        }
    }

    #[inline(always)]
    fn load_keys(&mut self, work: Work, slot: u32) {
        self.shared.k_slots.empty.at(self.k.slot).wait(self.k.parity);
        let full = self.shared.k_slots.full.at(self.k.slot);
        let to = self.shared.k.after(self.k.advance() * panels::<H>());
        self.load(to, 1, work, slot, full);
    }

    /// Slots of keys up to the last consumer's diagonal.
    #[inline(always)]
    fn slots(work: Work) -> u32 {
        (work.tile + 1) * CONSUMERS / panels::<H>()
    }

    #[inline(always)]
    fn load(&self, to: Panel<H>, part: u32, work: Work, slot: u32, full: MBarrier) {
        full.arrive_expecting(panels::<H>() * Panel::<H>::BYTES);
        for i in 0..panels::<H>() {
            let y = (slot * panels::<H>() + i) * ROWS;
            to.after(i).load(self.qkv, self.shape.column(work, part), y, work.b, full);
        }
    }
}

/// The consumer of the 64 queries `INDEX` of a tile.
struct Consumer<H, const INDEX: u32> {
    shared: Shared<H>,
    q: Place,
    k: Place,
    v: Place,
}

impl<H: Head, const INDEX: u32> Consumer<H, INDEX> {
    /// For HS = 64 scores leave no registers for queries; for HS = 128 products of 64 columns would read as much of a left
    /// operand in shared memory as of the right one, and wait for both.
    const IN_REGISTERS: bool = H::HS == 128;
    /// Of two panels in a slot the second holds, on the diagonal of the first consumer, nothing but keys after its queries.
    const HALF_FIRST: bool = panels::<H>() == 2 && INDEX == 0;
    /// Columns of the first scores that are of any use.
    const FIRST_COLUMNS: u32 = if Self::HALF_FIRST { ROWS } else { H::Scores::COLUMNS };

    #[inline(always)]
    fn new(shared: Shared<H>) -> Self {
        Self { shared, q: Place::new(0, q_stages::<H>()), k: Place::new(0, STAGES), v: Place::new(0, STAGES) }
    }

    #[inline(always)]
    fn run(&mut self, shape: Shape<H, TILE>, out: GlobalMut<bf16>, lse: GlobalMut<f32>) {
        let (mut round, works) = (0, shape.works());
        if piece(round) >= works {
            return;
        }
        let mut own = H::NO_ROWS;
        let mut scores = H::Scores::ZERO;
        self.take_first_scores(&mut scores, &mut own);
        loop {
            let slots = (self.work(round).tile * CONSUMERS + INDEX) / panels::<H>();
            let (mut o, softmax) = self.attend(&mut scores, &mut own, slots);
            self.write(&mut o, &softmax, shape, self.work(round), out, lse);
            round += 1;
            if piece(round) >= works {
                break;
            }
        }
    }

    /// To be read anew where it is needed: kept from step to step it would take up registers.
    #[inline(always)]
    fn work(&self, round: u32) -> Work {
        self.shared.works.at((round % WORKS) as usize)
    }

    /// The queries of the first piece of work and their first scores.
    #[inline(always)]
    fn take_first_scores(&mut self, scores: &mut H::Scores, own: &mut H::Own) {
        self.take_queries(own);
        let keys = self.start_scores(scores, own);
        wgmma::wait::<0>();
        scores.settle();
        self.shared.k_slots.release(keys);
    }

    /// Goes on to queries that have arrived in the slot `self.q`, whose first keys are the next in the ring.
    #[inline(always)]
    fn take_queries(&mut self, own: &mut H::Own) {
        self.shared.q_slots.full.at(self.q.slot).wait(self.q.parity);
        if Self::IN_REGISTERS {
            *own = self.queries().own();
            self.shared.q_slots.release_read(self.q.slot, INDEX);
        }
        for _ in 0..slots_after::<H>(INDEX) {
            self.shared.k_slots.skip(&mut self.k);
        }
    }

    #[inline(always)]
    fn leave_queries(&mut self) {
        let slot = self.q.advance();
        if !Self::IN_REGISTERS {
            self.shared.q_slots.release(slot);
        }
    }

    #[inline(always)]
    fn queries(&self) -> Panel<H> {
        self.shared.q.after(self.q.slot * CONSUMERS + INDEX)
    }

    /// s = Q Kᵀ of the next keys, whose slot is returned.
    #[inline(always)]
    fn start_scores(&mut self, s: &mut H::Scores, own: &H::Own) -> u32 {
        self.shared.k_slots.full.at(self.k.slot).wait(self.k.parity);
        wgmma::fence();
        let k = self.shared.k.after(self.k.slot * panels::<H>());
        if Self::IN_REGISTERS {
            k.start_scores(s, own, false);
        } else {
            k.start_scores_of(s, self.queries(), false);
        }
        wgmma::commit();
        self.k.advance()
    }

    /// Unnormalised output of the queries `own`, whose first scores (of the diagonal) are `scores`; they come after `slots`
    /// slots of keys. Leaves the queries and the first scores of the next piece of work in their place.
    #[inline(always)]
    fn attend(&mut self, scores: &mut H::Scores, own: &mut H::Own, slots: u32) -> (H::Sums, Softmax<H>) {
        for _ in 0..slots_after::<H>(INDEX) {
            self.shared.v_slots.skip(&mut self.v);
        }
        mask_diagonal(scores, INDEX % panels::<H>() * ROWS, Self::FIRST_COLUMNS, f32::NEG_INFINITY);
        // All in registers of their own: with some still where the product left them, ptxas would serialise.
        scores.settle();
        let mut softmax = Softmax::new(scores, Self::FIRST_COLUMNS);
        let mut o = H::Sums::ZERO;
        let mut others = H::Scores::ZERO;
        let mut left = slots;
        loop {
            let max = self.step(scores, &mut others, &mut o, &mut softmax, own, left, left < slots);
            if left == 0 {
                *scores = others;
                break;
            }
            left -= 1;
            softmax.raise(max);
            let max = self.step(&mut others, scores, &mut o, &mut softmax, own, left, true);
            if left == 0 {
                break;
            }
            left -= 1;
            softmax.raise(max);
        }
        wgmma::wait::<0>();
        o.settle();
        self.shared.v_slots.release(self.v.advance());
        (o, softmax)
    }

    /// Adds the product of this slot's probabilities and values to `o`, which is left under way, and makes the next scores.
    /// Returns the maxima with those. `left` slots follow; of none, the next scores are those of the next piece of work.
    #[inline(always)]
    fn step(
        &mut self,
        scores: &mut H::Scores,
        next: &mut H::Scores,
        o: &mut H::Sums,
        softmax: &mut Softmax<H>,
        own: &mut H::Own,
        left: u32,
        under_way: bool,
    ) -> [f32; 2] {
        if left == 0 {
            self.leave_queries();
            self.take_queries(own);
        }
        let keys = self.start_scores(next, own);
        softmax.exponentiate::<0>(scores);
        let half = Self::HALF_FIRST && !under_way;
        if half {
            Softmax::<H>::hide::<1>(scores);
        }
        wgmma::wait::<0>();
        next.settle();
        o.settle();
        self.shared.k_slots.release(keys);
        if under_way {
            self.shared.v_slots.release(self.v.advance());
        }
        let max = softmax.maximum_with(next);
        if !half {
            softmax.exponentiate::<1>(scores);
        }
        for i in 0..H::HS as usize / 2 {
            o[i] *= softmax.factor(i / 2 % 2);
        }
        let mut p = H::NO_PROBABILITIES;
        for k in 0..4 * panels::<H>() as usize {
            p[k] = left_step(scores, k);
        }
        self.shared.v_slots.full.at(self.v.slot).wait(self.v.parity);
        wgmma::fence();
        let values = self.shared.v.after(self.v.slot * panels::<H>());
        values.add_products(o, &p, panels::<H>());
        wgmma::commit();
        max
    }

    #[inline(always)]
    fn write(
        &self,
        o: &mut H::Sums,
        softmax: &Softmax<H>,
        shape: Shape<H, TILE>,
        work: Work,
        out: GlobalMut<bf16>,
        lse: GlobalMut<f32>,
    ) {
        let row = work.tile * TILE + INDEX * ROWS;
        let (first, stride) = (shape.row(work, row), (shape.nh * H::HS) as usize);
        let sums = [softmax.total(0), softmax.total(1)];
        let target = Target { out, first, stride, rows: shape.t.saturating_sub(row) };
        write_rows::<H>(target, o, [math::recip(sums[0]), math::recip(sums[1])], self.shared.out.after(INDEX));
        // The four lanes of a row have the same statistics; the first two write those of the two rows.
        let lane = warp::lane() % 4;
        let query = row + thread_row() + 8 * lane;
        if lane < 2 && query < shape.t {
            let value = if lane == 0 { softmax.log_sum_exp(0, sums[0]) } else { softmax.log_sum_exp(1, sums[1]) };
            lse.set(shape.statistics(work) + query as usize, value);
        }
    }
}
