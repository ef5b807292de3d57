//! The whole backward pass in one kernel, for HS = 128: five matmuls instead of the seven of [`super::dkdv`] and
//! [`super::dq`].
//!
//! A work tile is 128 keys of a key-value head. Each consumer computes dK and dV of 64 keys as in [`super::dkdv`]. Both
//! store dSᵀ to shared memory, and each multiplies all 128 rows of dS with half of the channels of K:
//! ```text
//! Sᵀ = K Qᵀ          Pᵀ = 2^(scale Sᵀ - lse)         dV += Pᵀ dout
//! dPᵀ = V doutᵀ      dSᵀ = Pᵀ ∘ (dPᵀ - D)            dK += dSᵀ Q, scaled at the end
//!                                                    dQ = dS K, added to the sums of the other work tiles
//! ```
//! # Sums of dQ
//!
//! The 64 rows of a query panel receive one addend from each work tile of keys up to the diagonal, in f32 in global memory.
//! A warp for each consumer adds them with bulk additions (TMA). The order of the additions is fixed, so the result is
//! deterministic: work tiles in ascending order. A counter for each panel and consumer counts the work tiles that have
//! added. A work tile waits until all previous ones have. The first one stores, so the memory needs no zeros.
//!
//! Blocks take work tiles from a ticket counter. A work tile depends only on tiles with lower tickets, which have started
//! before it, so there is no deadlock. All work tiles of a head visit the query panels in the same order: from the last
//! panel down to the diagonal. A work tile follows the previous one and waits for it only if both start at the same time.
//!
//! The last work tile of a panel resets the panel's counter, and the last block resets the ticket counter: all counters are
//! zero before and after a launch.
//!
//! With documents or a window, the first work tile of a panel is that of the first key that the panel's first query attends to. Exactly
//! the work tiles from there to the diagonal visit the panel, because both bounds of [`Visibility`] state the same relation.

use super::backward::{PanelPair, PanelSource, STATISTICS, load_statistics, store_statistics};
use super::dkdv::{HiddenQueries, query_panels, score_gradients, scores_to_probabilities};
use super::epilogue::store_rows;
use super::mask::mask_diagonal_transposed;
use super::panel::{Panel, ScoreSquare, SquareFragments, a_fragments, take_tiles};
use super::scheduler::{TileScheduler, WorkTile};
use super::sizes::Sizes;
use super::warp_specialized::{self, WarpSpecialized};
use super::{CONSUMER_THREADS, CONSUMERS, Head, Head128, ROWS, TILE};
use crate::attention::visibility::Visibility;
use cuda_std::hopper::mbarrier::MBarriers;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{self, PipelineBarriers, PipelineState, SwizzledTile, TensorMap, WARPGROUP, tma, wgmma};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, Packet, SharedArray, bf16, device, kernel, thread, warp};

type H = Head128;

/// Pipeline stages of Q and dout.
const STAGES: u32 = 3;
/// Buffers of dSᵀ. With two, one wait in each step suffices: a consumer overwrites a buffer only after the other one has
/// arrived in the next step, and has finished reading the buffer before it arrives.
const DS_BUFFERS: u32 = 2;
/// Work tiles that the producer announces at a time.
const WORK_TILES: u32 = 2;
/// Elements of dQ of a panel that one consumer computes: 64 rows x 64 channels.
const DQ_ELEMENTS: u32 = ROWS * H::HS / CONSUMERS;
/// Elements of dQ of a panel.
pub const PANEL_ELEMENTS: usize = (ROWS * H::HS) as usize;

/// Named barriers of the consumers: the other consumer's dSᵀ is in shared memory.
///
/// A consumer arrives at the other's barrier and waits at its own. With one barrier, both would wait at instructions of
/// their own, which `compute-sanitizer --tool synccheck` reports as divergence.
const DS_READY: u32 = 3;
/// Named barriers of the consumers and their dQ warps: the buffer of dQ is full.
const DQ_FULL: u32 = 5;
/// Named barriers of the consumers and their dQ warps: the buffer of dQ has been read.
const DQ_EMPTY: u32 = 7;
/// Named barriers of the producer and the consumers, one for each stage: the stage has been read.
///
/// An mbarrier for each stage is as fast. But if lane 0 of a warp arrives there for all lanes, compute-sanitizer's racecheck
/// reports a race between their loads of the statistics and the next stores.
const STAGE_READ: u32 = 9;
/// Threads of the producer and the consumers.
const STAGE_THREADS: u32 = warp::LANES + CONSUMER_THREADS;
/// Threads of a consumer and its dQ warp.
const DQ_THREADS: u32 = WARPGROUP + warp::LANES;

/// Index of the sequence of a work tile that does not exist.
const NO_SEQUENCE: u32 = u32::MAX;

/// Shared memory of the kernel.
#[derive(Clone, Copy)]
pub struct SharedStorage {
    /// One buffer for each consumer's stores of dK and dV.
    output: Panel<H>,
    /// One buffer for each consumer's dQ, in the same memory.
    dq: SharedArray<f32>,
    /// K and V: one pair for each consumer.
    resident: PanelPair<H>,
    /// Q and dout: one pair for each stage.
    streamed: PanelPair<H>,
    /// dSᵀ: one tile of 64 keys x 64 queries for each consumer and buffer.
    ds: SwizzledTile<64>,
    statistics: SharedArray<f32>,
    /// The work tile of round i at i % [`WORK_TILES`], valid once its keys and values have arrived.
    work_tiles: SharedArray<WorkTile>,
    resident_barriers: PipelineBarriers,
    /// Full barriers of the stages. [`STAGE_READ`] takes the place of the empty ones.
    streamed_full: MBarriers,
}

impl SharedStorage {
    #[inline(always)]
    pub fn new(layout: &mut Layout) -> Self {
        let dq = Layout::new().array((CONSUMERS * DQ_ELEMENTS) as usize);
        let output = Panel::take(layout, CONSUMERS);
        let (resident, streamed) = (PanelPair::take(layout, CONSUMERS), PanelPair::take(layout, STAGES));
        Self {
            output,
            dq,
            resident,
            streamed,
            ds: take_tiles(layout, CONSUMERS * DS_BUFFERS),
            statistics: layout.array(STATISTICS * STAGES as usize),
            work_tiles: layout.array(WORK_TILES as usize),
            resident_barriers: PipelineBarriers::new(layout, 1),
            streamed_full: layout.mbarriers(STAGES as usize),
        }
    }
}

/// dK and dV in dqkv (B, T, NH + 2 KV, HS), and the sums of dQ, unscaled, in f32.
///
/// `qkv` maps (B, T, (NH + 2 KV) HS) and `dout` maps (B, T, NH HS), both with box [`super::BOX`]. lse and
/// d = rowsum(dout ∘ out) are (B, NH, T). `dq` is (B, NH, 2 ceil(T / 128), 64 · HS): for each panel of 64
/// queries, each consumer's accumulators. `counters` are (B, NH, 2 ceil(T / 128), 2), then the ticket counter. All of them
/// are zero before and after the launch. If `MASKED`, `first_keys` and `last_queries` (B, T) and `window` are the bounds of
/// [`Visibility`]. The work tiles of `chunk_heads` key-value heads at a time alternate between these heads.
///
/// Grid: any number of blocks.
#[kernel(threads = 384, blocks_per_sm = 1, requires = "wgmma", instances(causal = false, masked = true), select(MASKED: bool))]
pub fn attention_backward_fused_wgmma<const MASKED: bool>(
    dqkv: GlobalMut<bf16>,
    dq: GlobalMut<f32>,
    counters: GlobalMut<u32>,
    qkv: Global<TensorMap>,
    dout: Global<TensorMap>,
    lse: Global<f32>,
    d: Global<f32>,
    b: u32,
    t: u32,
    kv: u32,
    group: u32,
    first_keys: Global<u32>,
    last_queries: Global<u32>,
    window: u32,
    chunk_heads: u32,
) {
    let shared = SharedStorage::new(&mut Layout::new());
    let sizes = Sizes::<H>::new(t, kv, group);
    let scheduler = TileScheduler::new(b, t, kv);
    let visible = Visibility::new(first_keys, last_queries, window, t);
    warp_specialized::run(Fused::<MASKED> {
        shared,
        sizes,
        scheduler,
        dqkv,
        dq,
        counters,
        qkv,
        dout,
        lse,
        d,
        visible,
        chunk_heads,
    });
}

#[derive(Clone, Copy)]
struct Fused<const MASKED: bool> {
    shared: SharedStorage,
    sizes: Sizes<H>,
    scheduler: TileScheduler,
    dqkv: GlobalMut<bf16>,
    dq: GlobalMut<f32>,
    counters: GlobalMut<u32>,
    qkv: Global<TensorMap>,
    dout: Global<TensorMap>,
    lse: Global<f32>,
    d: Global<f32>,
    visible: Visibility,
    chunk_heads: u32,
}

#[device]
impl<const MASKED: bool> WarpSpecialized for Fused<MASKED> {
    // With smaller consumers, ptxas serializes wgmma (C7512).
    const LARGE_CONSUMERS: bool = true;

    fn init(self) {
        self.qkv.prefetch();
        self.dout.prefetch();
        self.shared.resident_barriers.init(1, 1, CONSUMERS);
        for stage in 0..STAGES {
            self.shared.streamed_full.at(stage).init(warp::LANES);
        }
    }

    fn produce(self) {
        let warp = warp::shuffle(warp::index(), 0);
        if warp == 0 {
            let (resident, stream) = (PipelineState::producer(1), PipelineState::producer(STAGES));
            Producer { kernel: self, resident, stream }.run();
        } else if warp <= CONSUMERS {
            DqWriter { kernel: self, resident: PipelineState::consumer(1), consumer: warp - 1 }.run();
        }
    }

    fn consume<const CONSUMER: u32>(self) {
        let (resident, stream) = (PipelineState::consumer(1), PipelineState::consumer(STAGES));
        Consumer::<CONSUMER, MASKED> { kernel: self, resident, stream }.run();
    }
}

#[device]
impl<const MASKED: bool> Fused<MASKED> {
    /// Returns the number of panels of queries of a sequence.
    fn panels(self) -> u32 {
        CONSUMERS * self.scheduler.tiles()
    }

    /// Returns the index of panel `panel` of head `h` of sequence `b` among all panels.
    fn panel_index(self, b: u32, h: u32, panel: u32) -> u32 {
        (b * self.sizes.nh() + h) * self.panels() + panel
    }

    /// Returns the first work tile of keys that visits a panel of queries.
    fn first_tile(self, b: u32, panel: u32) -> u32 {
        if !MASKED {
            0
        } else if panel * ROWS < self.sizes.t {
            self.visible.first_key(b, panel * ROWS) / TILE
        } else {
            panel / CONSUMERS
        }
    }

    /// Calls `f` with each query head and panel of a work tile: from the last panel down to the diagonal, and for each panel all
    /// heads of the group.
    fn for_each_step(self, tile: WorkTile, mut f: impl FnMut(u32, u32)) {
        let group = self.sizes.group;
        let first = CONSUMERS * tile.tile;
        let mut panel = first + query_panels::<MASKED>(self.scheduler, self.visible, tile);
        while panel > first {
            panel -= 1;
            let mut h = tile.h * group;
            let end = h + group;
            while h < end {
                f(h, panel);
                h += 1;
            }
        }
    }
}

/// Releases a stage for the calling thread, which has read it. All threads of the consumers release all stages at the
/// beginning, and each stage after they have read it.
#[inline(always)]
fn release_stage(stage: u32) {
    thread::arrive_named(STAGE_READ + stage, STAGE_THREADS);
}

/// Waits until all consumers have released a stage. The producer waits before each load, and for all stages at the end.
#[inline(always)]
fn wait_for_release(stage: u32) {
    thread::sync_named(STAGE_READ + stage, STAGE_THREADS);
}

/// The producer: the first warp of warpgroup 0.
struct Producer<const MASKED: bool> {
    kernel: Fused<MASKED>,
    resident: PipelineState,
    stream: PipelineState,
}

#[device]
impl<const MASKED: bool> Producer<MASKED> {
    fn run(&mut self) {
        let Fused { shared, scheduler, .. } = self.kernel;
        let mut round = 0;
        loop {
            let ticket = self.take_ticket();
            let exists = ticket < scheduler.work_tiles();
            let mut tile = WorkTile { b: NO_SEQUENCE, h: 0, tile: 0 };
            if exists {
                tile = scheduler.work_tile_of_ticket(ticket, self.kernel.chunk_heads);
            }
            shared.resident_barriers.wait_empty(self.resident);
            self.resident.advance();
            if warp::lane() == 0 {
                shared.work_tiles.set((round % WORK_TILES) as usize, tile);
                if exists {
                    self.load_resident(tile);
                } else {
                    shared.resident_barriers.full.at(0).arrive();
                }
            }
            if !exists {
                break;
            }
            self.kernel.for_each_step(tile, |h, panel| self.load_queries(tile.b, h, panel * ROWS));
            round += 1;
        }
        // A barrier must not be in use at the end.
        for stage in 0..STAGES {
            wait_for_release(stage);
        }
    }

    /// Takes a ticket for the whole warp. The last ticket of the launch resets the counter.
    fn take_ticket(&self) -> u32 {
        let Fused { scheduler, counters, sizes, .. } = self.kernel;
        let at = CONSUMERS as usize * (scheduler.b * sizes.nh() * self.kernel.panels()) as usize;
        let mut ticket = 0;
        if warp::lane() == 0 {
            ticket = counters.atomic_add(at, 1);
            // Each block takes one ticket that does not exist.
            let last = scheduler.work_tiles() + thread::grid_dim_x() - 1;
            if ticket == last {
                counters.atomic_add(at, 0u32.wrapping_sub(last + 1));
            }
        }
        warp::shuffle(ticket, 0)
    }

    /// Starts the loads of both consumers' keys and values.
    fn load_resident(&self, tile: WorkTile) {
        let Fused { shared, sizes, qkv, .. } = self.kernel;
        let heads = [sizes.key(tile.h), sizes.value(tile.h)];
        let sources = heads.map(|index| PanelSource { map: qkv, column: index * H::HS });
        shared.resident.load_work_tile(sources, tile, shared.resident_barriers.full.at(0));
    }

    /// Loads Q, dout and the statistics of the 64 queries of head `h` from `first` on.
    fn load_queries(&mut self, b: u32, h: u32, first: u32) {
        let Fused { shared, sizes, lse, d, .. } = self.kernel;
        let lane = warp::lane();
        // Loading the statistics before the wait hides the latency.
        let statistics = load_statistics(lse, d, sizes.statistics(b, h), first + lane, sizes.t);

        let stage = self.stream.advance();
        wait_for_release(stage);
        store_statistics(shared.statistics.skip(stage as usize * STATISTICS), lane, statistics);
        let full = shared.streamed_full.at(stage);
        if lane == 0 {
            let sources = [self.kernel.qkv, self.kernel.dout].map(|map| PanelSource { map, column: h * H::HS });
            full.arrive_expect_tx(PanelPair::<H>::BYTES);
            shared.streamed.after(stage).load(sources, first, b, full);
        } else {
            full.arrive();
        }
    }
}

/// The warp that adds a consumer's dQ to the sums in global memory.
struct DqWriter<const MASKED: bool> {
    kernel: Fused<MASKED>,
    resident: PipelineState,
    consumer: u32,
}

#[device]
impl<const MASKED: bool> DqWriter<MASKED> {
    fn run(&mut self) {
        let shared = self.kernel.shared;
        let mut round = 0;
        loop {
            shared.resident_barriers.wait_full(self.resident);
            self.resident.advance();
            let tile = shared.work_tiles.at((round % WORK_TILES) as usize);
            if tile.b == NO_SEQUENCE {
                break;
            }
            // The buffer is free for TMA. The barrier also orders the consumer's own warps.
            thread::arrive_named(DQ_EMPTY + self.consumer, DQ_THREADS);
            self.kernel.for_each_step(tile, |h, panel| self.add(tile, h, panel));
            round += 1;
        }
    }

    /// Adds dQ of a panel of head `h` as soon as the consumer has computed it and the previous work tile has added its own.
    fn add(&self, tile: WorkTile, h: u32, panel: u32) {
        let Fused { shared, dq, counters, .. } = self.kernel;
        let counter = (self.kernel.panel_index(tile.b, h, panel) * CONSUMERS + self.consumer) as usize;
        let leader = warp::lane() == 0;
        let previous = tile.tile - self.kernel.first_tile(tile.b, panel);
        if leader && previous > 0 {
            counters.acquire_wait(counter, previous);
            hopper::fence_async_proxy_global();
        }
        warp::sync();
        thread::sync_named(DQ_FULL + self.consumer, DQ_THREADS);
        if leader {
            let (from, to) = ((self.consumer * DQ_ELEMENTS) as usize, counter * DQ_ELEMENTS as usize);
            if previous == 0 {
                shared.dq.store_bulk(from, DQ_ELEMENTS, dq, to);
            } else {
                shared.dq.add_bulk(from, DQ_ELEMENTS, dq, to);
            }
            tma::commit_stores();
            tma::wait_stores_read();
        }
        warp::sync();
        thread::arrive_named(DQ_EMPTY + self.consumer, DQ_THREADS);
        if leader {
            tma::wait_stores();
            // On the diagonal, this work tile is the last one.
            let last = panel / CONSUMERS == tile.tile;
            counters.release_add(counter, if last { 0u32.wrapping_sub(previous) } else { 1 });
        }
    }
}

/// The consumer of keys 64 `INDEX` .. 64 `INDEX` + 64 of each work tile.
struct Consumer<const INDEX: u32, const MASKED: bool> {
    kernel: Fused<MASKED>,
    resident: PipelineState,
    stream: PipelineState,
}

type Gradient = <H as Head>::OutputAccumulators;

#[device]
impl<const INDEX: u32, const MASKED: bool> Consumer<INDEX, MASKED> {
    fn run(&mut self) {
        let Fused { shared, sizes, scheduler, visible, .. } = self.kernel;
        // All stages are empty.
        for stage in 0..STAGES {
            release_stage(stage);
        }
        let mut round = 0;
        loop {
            shared.resident_barriers.wait_full(self.resident);
            let tile = self.work_tile(round);
            if tile.b == NO_SEQUENCE {
                break;
            }
            let steps = query_panels::<MASKED>(scheduler, visible, tile) * sizes.group;
            let hidden = HiddenQueries::<MASKED>::new(visible, tile, INDEX);
            let (mut dk, mut dv) = self.gradients(steps, hidden);
            // The last dQ has left the buffer that the stores use.
            thread::sync_named(DQ_EMPTY + INDEX, DQ_THREADS);
            shared.resident_barriers.release(self.resident.advance());
            let tile = self.work_tile(round);
            self.store_gradient(tile, sizes.key(tile.h), &mut dk, H::SCALE);
            self.store_gradient(tile, sizes.value(tile.h), &mut dv, 1.0);
            round += 1;
        }
    }

    /// Reads the work tile of a round from shared memory. Callers read it again instead of keeping it in registers.
    fn work_tile(&self, round: u32) -> WorkTile {
        self.kernel.shared.work_tiles.at((round % WORK_TILES) as usize)
    }

    /// Stores the gradient of this consumer's rows of head `index` of qkv, multiplied by `scale`.
    fn store_gradient(&self, tile: WorkTile, index: u32, gradient: &mut Gradient, scale: f32) {
        let Fused { shared, sizes, dqkv, .. } = self.kernel;
        store_rows::<H>(sizes.packed_rows(dqkv, tile, index, INDEX), gradient, [scale; 2], shared.output.after(INDEX));
    }

    /// Waits for the next panel and returns its stage.
    fn acquire(&mut self) -> u32 {
        self.kernel.shared.streamed_full.at(self.stream.stage()).wait(self.stream.parity());
        self.stream.advance()
    }

    /// Computes dK (unscaled) and dV of this consumer's keys, and dQ of half of the channels, over `steps` panels of
    /// queries. There are at least two: a work tile of keys has two panels on its diagonal.
    ///
    /// The multiplications of consecutive panels overlap. While a panel's dQ is in flight, S of the next panel starts. While
    /// its dK is in flight, the exponentials of the next panel are computed.
    fn gradients(&mut self, mut steps: u32, hidden: HiddenQueries<MASKED>) -> (Gradient, Gradient) {
        let shared = self.kernel.shared;
        let (mut dk, mut dv) = (Gradient::ZERO, Gradient::ZERO);
        let (mut s, mut dp) = (ScoreSquare::ZERO, ScoreSquare::ZERO);
        let mut stage = self.acquire();
        wgmma::fence();
        shared.streamed.after(stage).first.start_scores_from_shared(&mut s, self.keys());
        wgmma::commit();
        wgmma::fence();
        shared.streamed.after(stage).second.start_scores_from_shared(&mut dp, self.values());
        wgmma::commit();
        wgmma::wait::<0>();
        s.fence_accumulators();
        dp.fence_accumulators();
        self.probabilities(&mut s, stage, steps, hidden);
        // The loop ends where nothing is in flight. If it ended while other instructions' accumulators are in flight, ptxas
        // would serialize all wgmma.
        loop {
            let next = self.acquire();
            self.start_dv_and_dq(&mut dv, &mut dp, &s, stage, steps);
            let (next_q, next_dout) = (shared.streamed.after(next).first, shared.streamed.after(next).second);
            // dV has finished: the registers of its A fragments are free for S. dQ is in flight.
            wgmma::wait::<1>();
            wgmma::fence();
            next_q.start_scores_from_shared(&mut s, self.keys());
            wgmma::commit();
            // dV and dQ have finished. S is in flight.
            wgmma::wait::<1>();
            dp.fence_accumulators();
            self.pass_dq(&dp);
            wgmma::fence();
            next_dout.start_scores_from_shared(&mut dp, self.values());
            self.start_dk(&mut dk, stage, steps);
            // S has finished. dP and dK are in flight.
            wgmma::wait::<1>();
            s.fence_accumulators();
            steps -= 1;
            self.probabilities(&mut s, next, steps, hidden);
            wgmma::wait::<0>();
            dp.fence_accumulators();
            release_stage(stage);
            stage = next;
            if steps == 1 {
                break;
            }
        }
        self.start_dv_and_dq(&mut dv, &mut dp, &s, stage, steps);
        wgmma::wait::<0>();
        dp.fence_accumulators();
        wgmma::fence();
        self.start_dk(&mut dk, stage, steps);
        self.pass_dq(&dp);
        wgmma::wait::<0>();
        dk.fence_accumulators();
        dv.fence_accumulators();
        release_stage(stage);
        (dk, dv)
    }

    /// Returns this consumer's keys. Opaque: the addresses of the resident operands would take too many registers.
    fn keys(&self) -> Panel<H> {
        self.kernel.shared.resident.first.opaque().after(INDEX)
    }

    /// Returns this consumer's values.
    fn values(&self) -> Panel<H> {
        self.kernel.shared.resident.second.opaque().after(INDEX)
    }

    /// Replaces Sᵀ by Pᵀ.
    fn probabilities(&self, s: &mut ScoreSquare, stage: u32, steps: u32, hidden: HiddenQueries<MASKED>) {
        scores_to_probabilities::<H>(s, self.kernel.shared.statistics.skip(stage as usize * STATISTICS));
        self.mask(s, steps);
        let group = self.kernel.sizes.group;
        if MASKED && steps > hidden.panels * group {
            hidden.mask(s, hidden.key - INDEX * ROWS + (steps - 1) / group * ROWS);
        }
    }

    /// Starts dV += Pᵀ dout. Replaces dPᵀ by dSᵀ, shares it with the other consumer, and starts dQ = dS K in the same
    /// registers.
    fn start_dv_and_dq(&self, dv: &mut Gradient, dp: &mut ScoreSquare, p: &ScoreSquare, stage: u32, step: u32) {
        let shared = self.kernel.shared;
        score_gradients(dp, p, shared.statistics.skip(stage as usize * STATISTICS + ROWS as usize));
        self.ds_tile(step).store_fragments(&a_fragments(dp));
        let p: SquareFragments = a_fragments(p);
        wgmma::fence();
        shared.streamed.after(stage).second.start_accumulate(dv, &p, 1);
        wgmma::commit();
        hopper::fence_async_proxy();
        thread::arrive_named(DS_READY + 1 - INDEX, CONSUMER_THREADS);
        thread::sync_named(DS_READY + INDEX, CONSUMER_THREADS);
        wgmma::fence();
        self.multiply_scores(dp, step);
        wgmma::commit();
    }

    /// Masks Pᵀ in the last panels. The last panel of each head is on the diagonal of the first consumer, the one before it
    /// on that of the second consumer.
    fn mask(&self, p: &mut ScoreSquare, steps: u32) {
        let group = self.kernel.sizes.group;
        if steps <= (INDEX + 1) * group {
            if INDEX == 1 && steps <= group {
                // All keys come after the queries.
                *p = ScoreSquare::ZERO;
            } else {
                mask_diagonal_transposed(p, 0.0);
            }
        }
    }

    /// Starts dK += dSᵀ Q of this consumer's keys.
    fn start_dk(&self, dk: &mut Gradient, stage: u32, step: u32) {
        let shared = self.kernel.shared;
        let ds = self.ds_tile(step);
        let q = shared.streamed.after(stage).first;
        for i in 0..4 {
            dk.mma(ds.k_major_operand(i), q.mn_major_operand(i), true);
        }
        wgmma::commit();
    }

    /// Returns the tile of dSᵀ of this consumer's keys.
    fn ds_tile(&self, step: u32) -> SwizzledTile<64> {
        self.kernel.shared.ds.offset_tiles(CONSUMERS * (step % DS_BUFFERS) + INDEX)
    }

    /// Starts dQ = dS K of 64 queries and channels 64 `INDEX` .. of the work tile's 128 keys.
    fn multiply_scores(&self, dq: &mut ScoreSquare, step: u32) {
        let shared = self.kernel.shared;
        let resident = shared.resident.first.opaque();
        for i in 0..4 * CONSUMERS {
            let (panel, step_of_panel) = (i / 4, i % 4);
            let ds = shared.ds.offset_tiles(CONSUMERS * (step % DS_BUFFERS) + panel);
            let keys = resident.after(panel).tile(INDEX);
            dq.mma(ds.mn_major_operand(step_of_panel), keys.mn_major_operand(step_of_panel), i > 0);
        }
    }

    /// Stores dQ for the warp that adds it to the sums in global memory: accumulators 4 i .. of thread t at 4 (128 i + t).
    fn pass_dq(&self, dq: &ScoreSquare) {
        // The previous dQ has left the buffer, and all warps have finished the stores of the previous work tile.
        thread::sync_named(DQ_EMPTY + INDEX, DQ_THREADS);
        let thread = thread::thread_idx_x() % WARPGROUP;
        let buffer = self.kernel.shared.dq.skip((INDEX * DQ_ELEMENTS + 4 * thread) as usize);
        for i in 0..8 {
            buffer.set_packet(4 * WARPGROUP as usize * i, Packet::from_fn(|j| dq[4 * i + j]));
        }
        hopper::fence_async_proxy();
        thread::arrive_named(DQ_FULL + INDEX, DQ_THREADS);
    }
}

/// dQ in dqkv (B, T, NH + 2 KV, HS): the sums `dq` of [`attention_backward_fused_wgmma`], scaled and rounded to bf16.
///
/// Grid: (panels of 64 queries, NH, B).
#[kernel(threads = 256, requires = "wgmma")]
pub fn attention_backward_convert_dq(dqkv: GlobalMut<bf16>, dq: Global<f32>, t: u32, kv: u32, group: u32) {
    let sizes = Sizes::<H>::new(t, kv, group);
    let (panel, h, b) = (thread::block_idx_x(), thread::block_idx_y(), thread::block_idx_z());
    let panels = CONSUMERS * t.div_ceil(TILE);
    let first = ((b * sizes.nh() + h) * panels + panel) as usize * PANEL_ELEMENTS;
    // A thread converts 8 columns of two rows: the accumulators of four threads.
    let thread = thread::thread_idx_x();
    let (chunk, row) = (thread % 8, thread / 8 % 8 + thread / 64 * 16);
    for half in 0..CONSUMERS {
        let quad = (thread / 64 * 32 + thread / 8 % 8 * 4) as usize;
        let from = first + (half * DQ_ELEMENTS) as usize + 4 * (chunk as usize * WARPGROUP as usize + quad);
        let sums = [dq.packet(from), dq.packet(from + 4), dq.packet(from + 8), dq.packet(from + 12)];
        for i in 0..2 {
            let row = panel * ROWS + row + 8 * i as u32;
            if row < t {
                let packet = Packet::from_fn(|column| sums[column / 2].get(2 * i + column % 2) * H::SCALE);
                dqkv.set_packet(sizes.packed_row(b, h, row) + (half * 64 + chunk * 8) as usize, packet);
            }
        }
    }
}
