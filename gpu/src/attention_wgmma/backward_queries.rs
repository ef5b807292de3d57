//! Backward of queries: 64 queries per consumer, keys and values streamed in panels of 64.
//! ```text
//! S = Q Kᵀ      P = 2^(scale S - lse)      dP = dout Vᵀ      dS = P ∘ (dP - D)      dQ += dS K, times scale at the end
//! ```
//! Making S and dP a second time costs two of seven products, and spares adding up dQ from the blocks of all keys, which
//! would need atomics (an order that varies) or a turn for each block.

use super::epilogue::{Target, write_rows};
use super::mask::mask_diagonal;
use super::panel::{Panel, Square, as_left, thread_row};
use super::ring::{Place, Slots};
use super::scheduler::{Shape, Work, piece};
use super::softmax::{probability, shift_of};
use super::{Head, Head64, Head128, ROWS, WARPGROUP};
use core::marker::PhantomData;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{self, MBarrier, TensorMap, wgmma};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, bf16, kernel, thread, warp};

const CONSUMERS: u32 = 2;
/// Queries of a piece of work.
const TILE: u32 = CONSUMERS * ROWS;
/// Registers a thread keeps: 128 * 40 + 256 * 232 are what a multiprocessor has.
const PRODUCER_REGISTERS: u32 = 40;
const CONSUMER_REGISTERS: u32 = 232;
const STAGES: u32 = 4;

struct Shared<H> {
    /// Of each consumer.
    q: Panel<H>,
    dout: Panel<H>,
    k: Panel<H>,
    v: Panel<H>,
    /// Of each consumer, on the way out.
    out: Panel<H>,
    own_slots: Slots,
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
        q: Panel::take(layout, CONSUMERS),
        dout: Panel::take(layout, CONSUMERS),
        k: Panel::take(layout, STAGES),
        v: Panel::take(layout, STAGES),
        out: Panel::take(layout, CONSUMERS),
        own_slots: Slots::new(layout, 1),
        slots: Slots::new(layout, STAGES),
    }
}

/// Dynamic shared memory of a block.
pub fn backward_queries_shared_bytes<H: Head>() -> usize {
    let mut layout = Layout::new();
    shared::<H>(&mut layout);
    layout.bytes()
}

/// The Q part of dqkv (B,T,3,NH,HS). `qkv` maps (B, T, 3 NH HS), `dout` maps (B, T, NH HS), both with [`super::BOX`]; lse and
/// d = rowsum(dout ∘ out) are (B,NH,T). A 1-D grid of as many blocks as there are multiprocessors.
#[kernel(threads = 384, blocks_per_sm = 1, arch = "sm_90a", instances(hs_64 = <Head64>, hs_128 = <Head128>))]
pub fn attention_backward_queries_wgmma<H: Head>(
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
        shared.own_slots.init(1, 1, CONSUMERS);
        shared.slots.init(STAGES, 1, CONSUMERS);
        MBarrier::fence_init();
        hopper::fence_async_proxy();
    }
    thread::sync_threads();

    let role = warp::shuffle(thread::thread_idx_x() / WARPGROUP, 0);
    if role == 0 {
        hopper::give_registers::<PRODUCER_REGISTERS>();
        let mut round = 0;
        if thread::thread_idx_x() == 0 {
            let mut producer =
                Producer { shared, shape, qkv, dout, own: Place::new(1, 1), ring: Place::new(1, STAGES) };
            while piece(round) < shape.works() {
                producer.load(shape.work::<false>(piece(round)));
                round += 1;
            }
        }
    } else {
        hopper::take_registers::<CONSUMER_REGISTERS>();
        // A constant, as in the forward: ptxas then knows what is the same for a warp.
        if role == 1 {
            Consumer::<H, 0>::new(shared).run(shape, dqkv, lse, d);
        } else {
            Consumer::<H, 1>::new(shared).run(shape, dqkv, lse, d);
        }
    }
}

struct Producer<H> {
    shared: Shared<H>,
    shape: Shape<H, TILE>,
    qkv: Global<TensorMap>,
    dout: Global<TensorMap>,
    own: Place,
    ring: Place,
}

impl<H: Head> Producer<H> {
    /// Q and dout, then K and V from key 0 to the last consumer's diagonal.
    #[inline(always)]
    fn load(&mut self, work: Work) {
        self.shared.own_slots.empty.at(0).wait(self.own.parity);
        self.own.advance();
        let full = self.shared.own_slots.full.at(0);
        full.arrive_expecting(2 * CONSUMERS * Panel::<H>::BYTES);
        for i in 0..CONSUMERS {
            let y = work.tile * TILE + i * ROWS;
            self.shared.q.after(i).load(self.qkv, self.shape.column(work, 0), y, work.b, full);
            self.shared.dout.after(i).load(self.dout, work.h * H::HS, y, work.b, full);
        }

        let mut panel = 0;
        while panel < CONSUMERS * (work.tile + 1) {
            self.shared.slots.empty.at(self.ring.slot).wait(self.ring.parity);
            let full = self.shared.slots.full.at(self.ring.slot);
            let slot = self.ring.advance();
            full.arrive_expecting(2 * Panel::<H>::BYTES);
            let y = panel * ROWS;
            self.shared.k.after(slot).load(self.qkv, self.shape.column(work, 1), y, work.b, full);
            self.shared.v.after(slot).load(self.qkv, self.shape.column(work, 2), y, work.b, full);
            panel += 1;
        }
    }
}

/// The consumer of the 64 queries `INDEX` of a tile.
struct Consumer<H, const INDEX: u32> {
    shared: Shared<H>,
    own: Place,
    ring: Place,
}

impl<H: Head, const INDEX: u32> Consumer<H, INDEX> {
    #[inline(always)]
    fn new(shared: Shared<H>) -> Self {
        Self { shared, own: Place::new(0, 1), ring: Place::new(0, STAGES) }
    }

    #[inline(always)]
    fn run(&mut self, shape: Shape<H, TILE>, dqkv: GlobalMut<bf16>, lse: Global<f32>, d: Global<f32>) {
        let mut round = 0;
        while piece(round) < shape.works() {
            let work = shape.work::<false>(piece(round));
            let first = work.tile * TILE + INDEX * ROWS + thread_row();
            let row = |query: u32| {
                let at = shape.statistics(work) + query as usize;
                let inside = query < shape.t;
                (shift_of(lse, at, inside), if inside { d.at(at) } else { 0.0 })
            };
            let mut dq = self.differentiate(work.tile, [row(first), row(first + 8)]);
            let row = work.tile * TILE + INDEX * ROWS;
            let target = Target {
                out: dqkv,
                first: shape.packed_row(work, 0, row),
                stride: (3 * shape.nh * H::HS) as usize,
                rows: shape.t.saturating_sub(row),
            };
            write_rows::<H>(target, &mut dq, [H::SCALE; 2], self.shared.out.after(INDEX));
            round += 1;
        }
    }

    /// dQ (to be scaled) of this consumer's queries, whose two rows have (shift, D) `rows`.
    #[inline(always)]
    fn differentiate(&mut self, tile: u32, rows: [(f32, f32); 2]) -> H::Sums {
        self.shared.own_slots.full.at(0).wait(self.own.parity);
        let q = self.shared.q.after(INDEX).own();
        let dout = self.shared.dout.after(INDEX).own();
        self.shared.own_slots.release_read(self.own.advance(), INDEX);

        let mut dq = H::Sums::ZERO;
        let (mut s, mut dp) = (Square::ZERO, Square::ZERO);
        let diagonal = CONSUMERS * tile + INDEX;
        let mut previous = self.ring.slot;
        let mut panel = 0;
        loop {
            let slot = self.ring.slot;
            self.shared.slots.full.at(slot).wait(self.ring.parity);
            self.ring.advance();
            let (k, v) = (self.shared.k.after(slot), self.shared.v.after(slot));
            wgmma::fence();
            k.start_scores(&mut s, &q, false);
            wgmma::commit();
            if H::HS == 128 {
                // The previous panel's product is done: its left operand leaves room for dP.
                wgmma::wait::<1>();
                wgmma::fence();
            }
            v.start_scores(&mut dp, &dout, false);
            wgmma::commit();
            // Done: the previous panel's product and S.
            wgmma::wait::<1>();
            s.settle();
            if panel > 0 {
                self.shared.slots.release(previous);
            }
            for i in 0..32 {
                s[i] = probability::<H>(s[i], rows[i / 2 % 2].0);
            }
            if panel == diagonal {
                mask_diagonal(&mut s, 0, ROWS, 0.0);
            }
            wgmma::wait::<0>();
            dp.settle();
            for i in 0..32 {
                dp[i] = s[i] * (dp[i] - rows[i / 2 % 2].1);
            }
            let ds = as_left(&dp);
            wgmma::fence();
            k.add_products(&mut dq, &ds, 1);
            wgmma::commit();
            previous = slot;
            panel += 1;
            if panel > diagonal {
                break;
            }
        }
        wgmma::wait::<0>();
        dq.settle();
        self.shared.slots.release(previous);
        for _ in INDEX + 1..CONSUMERS {
            // All of these keys come after these queries.
            self.shared.slots.skip(&mut self.ring);
        }
        dq
    }
}
