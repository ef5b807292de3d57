//! Forward pass: 64 queries per consumer, keys and values streamed in stages of 128, from the diagonal down to key 0.
//!
//! The exponentials overlap with wgmma, in one of two orders:
//!
//! * HS = 64: the exponentials of one stage overlap with the scores of the next stage and with the multiplication of the
//!   previous stage's probabilities with V. A stage takes as long in the exponential unit as in the tensor cores, so the
//!   overlap determines the speed. It needs two sets of scores.
//! * HS = 128: the exponentials of one stage overlap with the multiplication of the previous stage's probabilities with
//!   V, and with the wgmma of the other consumer. A stage takes twice as long in the tensor cores as in the exponential
//!   unit. One set of scores leaves registers for the output of 128 channels.
//!
//! The overlap continues across work tiles: the last stage of a tile overlaps with the first scores of the next tile.

use super::epilogue::{OutputRows, scale_rows, store_rows};
use super::mask::{mask_before, mask_diagonal};
use super::panel::{PairFragments, Panel, ScorePair, WidePanel, a_fragments, thread_row};
use super::scheduler::{TileScheduler, WorkTile, work_index};
use super::sizes::Sizes;
use super::softmax::Softmax;
use super::warp_specialized::{self, WarpSpecialized};
use super::{CONSUMER_THREADS, CONSUMERS, Head, Head64, Head128, ROWS, TILE};
use crate::attention::visibility::Visibility;
use crate::quantize::{QuantizedOperands, QuantizedOutput, store_amax};
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{PipelineBarriers, PipelineState, TensorMap, wgmma};
use cuda_std::shared::{Layout, SharedArray};
use cuda_std::{E4m3, Global, GlobalMut, bf16, device, kernel, math, thread, warp};

/// Panels of keys or values in a stage: the keys of both consumers' diagonals.
const PANELS: u32 = CONSUMERS;
/// Work tiles that the producer announces at a time: the tile whose results are being stored, up to two tiles whose
/// queries have arrived, and the tile that the producer continues with.
const WORK_TILES: u32 = 4;

/// Pipeline stages of queries. The next work tile's queries arrive while the current ones are in use.
const Q_STAGES: u32 = 2;
/// Named barrier of the first consumer's turn, followed by that of the second consumer.
const TURN_BARRIER: u32 = 3;

/// Pipeline stages of keys, and of values. For HS = 128, shared memory has space for two.
const fn stages<H: Head>() -> u32 {
    if H::HS == 128 { 2 } else { 5 }
}

#[derive(Clone, Copy)]
struct SharedStorage<H> {
    /// In each stage, one panel for each consumer.
    q: Panel<H>,
    k: WidePanel<H>,
    /// In each stage, [`PANELS`] panels.
    v: Panel<H>,
    /// One buffer for each consumer's stores.
    output: Panel<H>,
    /// The work tile of round i at i % [`WORK_TILES`], valid once its queries have arrived. This saves the consumers
    /// the scheduler's divisions.
    work_tiles: SharedArray<WorkTile>,
    /// The first stage of keys of the same work tiles, if documents or a window hide keys.
    first_stages: SharedArray<u32>,
    q_barriers: PipelineBarriers,
    k_barriers: PipelineBarriers,
    v_barriers: PipelineBarriers,
}

impl<H: Head> SharedStorage<H> {
    fn new<const MASKED: bool>(layout: &mut Layout) -> Self {
        Self {
            q: Panel::take(layout, Q_STAGES * CONSUMERS),
            k: WidePanel::take(layout, stages::<H>()),
            v: Panel::take(layout, stages::<H>() * PANELS),
            output: Panel::take(layout, CONSUMERS),
            work_tiles: layout.array(WORK_TILES as usize),
            first_stages: layout.array(if MASKED { WORK_TILES as usize } else { 0 }),
            q_barriers: PipelineBarriers::new(layout, Q_STAGES as usize),
            k_barriers: PipelineBarriers::new(layout, stages::<H>() as usize),
            v_barriers: PipelineBarriers::new(layout, stages::<H>() as usize),
        }
    }
}

/// out (B, T, NH, HS), and lse (B, NH, T), the natural log-sum-exp of the scaled scores.
///
/// `qkv` maps (B, T, (NH + 2 KV) HS) with box [`super::BOX`]. If `FP8`, the kernel also quantizes the output with a given `scale` (1)
/// to `fp8` (B, T, NH, HS). Its bits are those of [`quantize`](crate::quantize::quantize) for `out`, as are those of `amax` (1), which
/// may be null.
///
/// If `MASKED`, `first_keys` (B, T) and `window` are the bounds of [`Visibility`], and `order` (B, ceil(T / 128)) lists the tiles of each
/// sequence, the longest first. It may be null.
///
/// Grid: (number of SMs).
#[kernel(
    threads = 384,
    blocks_per_sm = 1,
    requires = "wgmma",
    instances([hs_64 = Head64, hs_128 = Head128] * [_ = false, fp8 = true] * [_ = false, masked = true]),
    select(H::HS: u32, FP8: bool, MASKED: bool => || crate::launch::shared_bytes(SharedStorage::<H>::new::<MASKED>): fn() -> usize)
)]
pub fn attention_forward_wgmma<H: Head, const FP8: bool, const MASKED: bool>(
    out: GlobalMut<bf16>,
    lse: GlobalMut<f32>,
    qkv: Global<TensorMap>,
    b: u32,
    t: u32,
    kv: u32,
    group: u32,
    fp8: GlobalMut<E4m3>,
    amax: GlobalMut<u32>,
    scale: Global<f32>,
    first_keys: Global<u32>,
    order: Global<u32>,
    window: u32,
) {
    let (shared, sizes) = (SharedStorage::new::<MASKED>(&mut Layout::new()), Sizes::<H>::new(t, kv, group));
    let scheduler = TileScheduler::new(b, t, sizes.nh());
    let quantized = QuantizedOperands { out: fp8, amax, scale };
    let visible = Visibility::new(first_keys, Global::null(), window, t);
    warp_specialized::run(Forward::<H, FP8, MASKED> {
        shared,
        sizes,
        scheduler,
        out,
        quantized,
        lse,
        qkv,
        visible,
        order,
    });
}

#[derive(Clone, Copy)]
struct Forward<H, const FP8: bool, const MASKED: bool> {
    shared: SharedStorage<H>,
    sizes: Sizes<H>,
    scheduler: TileScheduler,
    out: GlobalMut<bf16>,
    /// Written if `FP8`.
    quantized: QuantizedOperands<E4m3>,
    lse: GlobalMut<f32>,
    qkv: Global<TensorMap>,
    visible: Visibility,
    order: Global<u32>,
}

#[device]
impl<H: Head, const FP8: bool, const MASKED: bool> Forward<H, FP8, MASKED> {
    /// Returns the work tile of a round.
    fn work_tile(self, round: u32) -> WorkTile {
        let i = work_index(round);
        if MASKED {
            self.scheduler.work_tile_in_order(i, self.order, false)
        } else {
            self.scheduler.work_tile(i, false)
        }
    }

    /// Returns the first stage of keys of a work tile.
    fn first_stage(self, tile: WorkTile) -> u32 {
        if MASKED { self.visible.first_key(tile.b, tile.tile * TILE) / TILE } else { 0 }
    }
}

#[device]
impl<H: Head, const FP8: bool, const MASKED: bool> WarpSpecialized for Forward<H, FP8, MASKED> {
    fn init(self) {
        self.qkv.prefetch();
        self.shared.q_barriers.init(Q_STAGES, 1, CONSUMER_THREADS / warp::LANES);
        self.shared.k_barriers.init(stages::<H>(), 1, CONSUMERS);
        self.shared.v_barriers.init(stages::<H>(), 1, CONSUMERS);
    }

    fn produce(self) {
        let Self { shared, sizes, scheduler, qkv, .. } = self;
        let (mut round, work_tiles) = (0, scheduler.work_tiles());
        if thread::thread_idx_x() == 0 && work_index(round) < work_tiles {
            let mut producer = Producer {
                shared,
                sizes,
                qkv,
                q: PipelineState::producer(Q_STAGES),
                k: PipelineState::producer(stages::<H>()),
                v: PipelineState::producer(stages::<H>()),
            };
            let mut tile = self.work_tile(round);
            while work_index(round) < work_tiles {
                tile = self.work_tile(round);
                let first_stage = self.first_stage(tile);
                producer.load_queries::<MASKED>(tile, first_stage, round);
                producer.load_panels(tile, first_stage);
                round += 1;
            }
            // After their last work tile, consumers compute the first scores of another tile and discard them. Making
            // that wgmma conditional would cause ptxas to serialize all of them.
            producer.load_queries::<MASKED>(tile, self.first_stage(tile), round);
            producer.load_keys(tile.b, sizes.kv_head(tile.h), tile.tile);
        }
    }

    fn consume<const CONSUMER: u32>(self) {
        let (q, k) = (PipelineState::consumer(Q_STAGES), PipelineState::consumer(stages::<H>()));
        let v = PipelineState::consumer(stages::<H>());
        Consumer::<H, CONSUMER> { shared: self.shared, q, k, v }.run(self);
    }
}

/// The producer: one thread.
struct Producer<H> {
    shared: SharedStorage<H>,
    sizes: Sizes<H>,
    qkv: Global<TensorMap>,
    q: PipelineState,
    k: PipelineState,
    v: PipelineState,
}

#[device]
impl<H: Head> Producer<H> {
    /// Announces a work tile and its first stage of keys, and loads its queries.
    fn load_queries<const MASKED: bool>(&mut self, tile: WorkTile, first_stage: u32, round: u32) {
        self.shared.q_barriers.wait_empty(self.q);
        self.shared.work_tiles.set((round % WORK_TILES) as usize, tile);
        if MASKED {
            self.shared.first_stages.set((round % WORK_TILES) as usize, first_stage);
        }
        let full = self.shared.q_barriers.full.at(self.q.stage());
        let to = self.shared.q.after(self.q.advance() * CONSUMERS);
        full.arrive_expect_tx(CONSUMERS * Panel::<H>::BYTES);
        for i in 0..CONSUMERS {
            let y = tile.tile * TILE + i * ROWS;
            to.after(i).load(self.qkv, tile.h * H::HS, y, tile.b, full);
        }
    }

    /// Loads keys and values from the last consumer's diagonal down to stage `first_stage`.
    fn load_panels(&mut self, tile: WorkTile, first_stage: u32) {
        let kv_head = self.sizes.kv_head(tile.h);
        let mut i = tile.tile + 1;
        while i > first_stage {
            i -= 1;
            self.load_keys(tile.b, kv_head, i);
            self.load_values(tile.b, kv_head, i);
        }
    }

    /// Loads the `i`-th stage of the keys of a key-value head of sequence `b`.
    fn load_keys(&mut self, b: u32, kv_head: u32, i: u32) {
        let (stage, full) = self.shared.k_barriers.acquire(&mut self.k);
        let to = self.shared.k.after(stage);
        full.arrive_expect_tx(PANELS * Panel::<H>::BYTES);
        to.load(self.qkv, self.sizes.key(kv_head) * H::HS, i * PANELS * ROWS, b, full);
    }

    /// Loads the `i`-th stage of the values of a key-value head of sequence `b`.
    fn load_values(&mut self, b: u32, kv_head: u32, i: u32) {
        let (stage, full) = self.shared.v_barriers.acquire(&mut self.v);
        let to = self.shared.v.after(stage * PANELS);
        full.arrive_expect_tx(PANELS * Panel::<H>::BYTES);
        for panel in 0..PANELS {
            let y = (i * PANELS + panel) * ROWS;
            to.after(panel).load(self.qkv, self.sizes.value(kv_head) * H::HS, y, b, full);
        }
    }
}

/// The keys that documents and a window hide from a consumer's queries of a work tile.
#[derive(Clone, Copy)]
struct Hidden<const MASKED: bool> {
    visible: Visibility,
    b: u32,
    /// The consumer's first query.
    row: u32,
    /// The first stage of keys of the work tile.
    first_stage: u32,
    /// The stage of keys on the diagonal.
    diagonal: u32,
    /// Keys before this one are hidden from one of the queries.
    cut: u32,
}

#[device]
impl<const MASKED: bool> Hidden<MASKED> {
    /// Returns the number of stages before the diagonal.
    fn stages(self) -> u32 {
        self.diagonal - self.first_stage
    }

    /// Masks the first `columns` columns of the scores of a stage, which `stages` stages of the work tile precede.
    fn mask(self, scores: &mut ScorePair, stages: u32, columns: u32) {
        let key = (self.first_stage + stages) * TILE;
        if MASKED && key < self.cut {
            let row = self.row + thread_row();
            let first_keys = [row, row + 8].map(|query| self.visible.first_key(self.b, query));
            mask_before(scores, first_keys, key, columns, f32::NEG_INFINITY);
        }
    }
}

/// The consumer of queries 64 `INDEX` .. 64 `INDEX` + 64 of each work tile.
struct Consumer<H, const INDEX: u32> {
    shared: SharedStorage<H>,
    q: PipelineState,
    k: PipelineState,
    v: PipelineState,
}

#[device]
impl<H: Head, const INDEX: u32> Consumer<H, INDEX> {
    /// True if the second of the two panels on this consumer's diagonal contains only keys after its queries.
    const SECOND_PANEL_MASKED: bool = INDEX == 0;
    /// Columns of the first scores that contain a visible key.
    const FIRST_COLUMNS: u32 = if Self::SECOND_PANEL_MASKED { ROWS } else { PANELS * ROWS };

    /// Computes this consumer's queries of all work tiles of this block.
    fn run<const FP8: bool, const MASKED: bool>(&mut self, kernel: Forward<H, FP8, MASKED>) {
        let (mut round, work_tiles) = (0, kernel.scheduler.work_tiles());
        if work_index(round) >= work_tiles {
            return;
        }
        let mut scores = ScorePair::ZERO;
        if H::HS == 128 && INDEX == 1 {
            Self::pass_turn();
        }
        self.compute_first_scores(&mut scores);
        let mut largest = 0;
        loop {
            let hidden = self.hidden(kernel, round);
            let (mut o, softmax) = if H::HS == 128 {
                self.attend_with_one_set(&mut scores, hidden)
            } else {
                self.attend_with_two_sets(&mut scores, hidden)
            };
            let stored = self.store(kernel, &mut o, &softmax, self.work_tile(round));
            largest = largest.max(stored);
            round += 1;
            if work_index(round) >= work_tiles {
                break;
            }
        }
        if H::HS == 128 && INDEX == 0 {
            // The other consumer has passed its last turn. No arrival stays pending.
            Self::wait_for_turn();
        }
        if FP8 && !kernel.quantized.amax.is_null() {
            store_amax(kernel.quantized.amax, largest);
        }
    }

    /// Reads the work tile of a round from shared memory. Callers read it again instead of keeping it in registers.
    fn work_tile(&self, round: u32) -> WorkTile {
        self.shared.work_tiles.at((round % WORK_TILES) as usize)
    }

    /// Returns what is hidden from this consumer's queries of a round.
    fn hidden<const FP8: bool, const MASKED: bool>(
        &self,
        Forward { visible, .. }: Forward<H, FP8, MASKED>,
        round: u32,
    ) -> Hidden<MASKED> {
        let tile = self.work_tile(round);
        let mut hidden = Hidden { visible, b: tile.b, row: 0, first_stage: 0, diagonal: tile.tile, cut: 0 };
        if MASKED {
            hidden.row = tile.tile * TILE + INDEX * ROWS;
            hidden.first_stage = self.shared.first_stages.at((round % WORK_TILES) as usize);
            hidden.cut = visible.first_key(tile.b, hidden.row + ROWS - 1);
        }
        hidden
    }

    /// Acquires the queries of the first work tile and computes their first scores.
    fn compute_first_scores(&mut self, scores: &mut ScorePair) {
        self.shared.q_barriers.wait_full(self.q);
        self.shared.k_barriers.wait_full(self.k);
        let keys = self.start_scores(scores);
        wgmma::wait::<0>();
        scores.fence_accumulators();
        self.shared.k_barriers.release(keys);
    }

    /// Releases the current queries, and the work tile that was announced with the previous ones.
    fn release_queries(&mut self) {
        self.shared.q_barriers.release_by_warp(self.q.advance());
    }

    /// Starts s = Q Kᵀ for the next stage of keys, which has arrived, and returns that stage.
    fn start_scores(&mut self, s: &mut ScorePair) -> u32 {
        wgmma::fence();
        let queries = self.shared.q.after(self.q.stage() * CONSUMERS + INDEX);
        self.shared.k.after(self.k.stage()).start_scores_from_shared(s, queries);
        wgmma::commit();
        self.k.advance()
    }

    /// Starts o += P V for the next stage of values. The caller has executed [`wgmma::fence`].
    fn start_output(&self, o: &mut H::OutputAccumulators, p: &PairFragments) {
        self.shared.v.after(self.v.stage() * PANELS).start_accumulate(o, p, PANELS);
        wgmma::commit();
    }

    /// Waits for o += P V and releases its values.
    fn finish_output(&mut self, o: &mut H::OutputAccumulators) {
        wgmma::wait::<0>();
        o.fence_accumulators();
        self.shared.v_barriers.release(self.v.advance());
    }

    /// Computes the unnormalized output of the current queries, in the order for HS = 128: one set of scores.
    ///
    /// `scores` are the scores of the diagonal. On return, the queries and `scores` are those of the next work tile.
    fn attend_with_one_set<const MASKED: bool>(
        &mut self,
        scores: &mut ScorePair,
        hidden: Hidden<MASKED>,
    ) -> (H::OutputAccumulators, Softmax<H>) {
        let mut stages = hidden.stages();
        mask_diagonal(scores, INDEX * ROWS, Self::FIRST_COLUMNS, f32::NEG_INFINITY);
        hidden.mask(scores, stages, Self::FIRST_COLUMNS);
        scores.fence_accumulators();
        let mut softmax = Softmax::new(scores, Self::FIRST_COLUMNS);
        softmax.exponentiate::<0>(scores);
        if Self::SECOND_PANEL_MASKED {
            Softmax::<H>::zero_masked::<1>(scores);
        } else {
            softmax.exponentiate::<1>(scores);
        }
        let mut p: PairFragments = a_fragments(scores);
        let mut o = H::OutputAccumulators::ZERO;
        while stages > 0 {
            self.start_scores_and_output(scores, &mut o, &p);
            hidden.mask(scores, stages - 1, ScorePair::COLUMNS);
            let max = softmax.maximum_with(scores);
            softmax.raise(max);
            softmax.exponentiate::<0>(scores);
            softmax.exponentiate::<1>(scores);
            self.finish_output(&mut o);
            scale_rows::<H>(&mut o, softmax.factor);
            p = a_fragments(scores);
            stages -= 1;
        }
        self.release_queries();
        self.shared.q_barriers.wait_full(self.q);
        self.start_scores_and_output(scores, &mut o, &p);
        self.finish_output(&mut o);
        (o, softmax)
    }

    /// Waits until the other consumer has started its wgmma of this step.
    fn wait_for_turn() {
        thread::sync_named(TURN_BARRIER + INDEX, CONSUMER_THREADS);
    }

    /// Lets the other consumer start its wgmma.
    fn pass_turn() {
        thread::arrive_named(TURN_BARRIER + 1 - INDEX, CONSUMER_THREADS);
    }

    /// Computes the next scores and starts o += P V, which is in flight on return.
    ///
    /// The consumers take turns (ping-pong): the exponentials of one run while the tensor cores compute the wgmma of the
    /// other.
    fn start_scores_and_output(&mut self, scores: &mut ScorePair, o: &mut H::OutputAccumulators, p: &PairFragments) {
        // These waits precede the turn, so that they do not delay the other consumer.
        self.shared.k_barriers.wait_full(self.k);
        self.shared.v_barriers.wait_full(self.v);
        Self::wait_for_turn();
        let keys = self.start_scores(scores);
        self.start_output(o, p);
        Self::pass_turn();
        wgmma::wait::<1>();
        scores.fence_accumulators();
        self.shared.k_barriers.release(keys);
    }

    /// Computes the unnormalized output of the current queries, in the order for HS = 64: two sets of scores.
    ///
    /// See [`attend_with_one_set`](Self::attend_with_one_set).
    fn attend_with_two_sets<const MASKED: bool>(
        &mut self,
        scores: &mut ScorePair,
        hidden: Hidden<MASKED>,
    ) -> (H::OutputAccumulators, Softmax<H>) {
        let stages = hidden.stages();
        mask_diagonal(scores, INDEX * ROWS, Self::FIRST_COLUMNS, f32::NEG_INFINITY);
        hidden.mask(scores, stages, Self::FIRST_COLUMNS);
        // Moves all scores to registers of their own. If some stayed in the registers of the wgmma, ptxas would
        // serialize it.
        scores.fence_accumulators();
        let mut softmax = Softmax::new(scores, Self::FIRST_COLUMNS);
        let mut o = H::OutputAccumulators::ZERO;
        // Two sets of score accumulators alternate.
        let mut others = ScorePair::ZERO;
        let mut remaining = stages;
        loop {
            let max = self.step(scores, &mut others, &mut o, &mut softmax, (remaining, hidden), remaining < stages);
            if remaining == 0 {
                *scores = others;
                break;
            }
            remaining -= 1;
            softmax.raise(max);
            let max = self.step(&mut others, scores, &mut o, &mut softmax, (remaining, hidden), true);
            if remaining == 0 {
                break;
            }
            remaining -= 1;
            softmax.raise(max);
        }
        self.finish_output(&mut o);
        (o, softmax)
    }

    /// Computes the next scores, and starts o += P V for the current stage, with P computed from `scores`.
    ///
    /// `remaining` stages of keys follow the current one. If `pv_in_flight`, the multiplication of the previous stage's probabilities
    /// with V is in flight. Returns the running maxima including the next scores. After a work tile's last stage, the next scores are
    /// the first of the next work tile.
    fn step<const MASKED: bool>(
        &mut self,
        scores: &mut ScorePair,
        next: &mut ScorePair,
        o: &mut H::OutputAccumulators,
        softmax: &mut Softmax<H>,
        (remaining, hidden): (u32, Hidden<MASKED>),
        pv_in_flight: bool,
    ) -> [f32; 2] {
        if remaining == 0 {
            self.release_queries();
            self.shared.q_barriers.wait_full(self.q);
        }
        self.shared.k_barriers.wait_full(self.k);
        let keys = self.start_scores(next);
        softmax.exponentiate::<0>(scores);
        let second_masked = Self::SECOND_PANEL_MASKED && !pv_in_flight;
        if second_masked {
            Softmax::<H>::zero_masked::<1>(scores);
        }
        wgmma::wait::<0>();
        next.fence_accumulators();
        o.fence_accumulators();
        self.shared.k_barriers.release(keys);
        if pv_in_flight {
            self.shared.v_barriers.release(self.v.advance());
        }
        if MASKED && remaining > 0 {
            hidden.mask(next, remaining - 1, ScorePair::COLUMNS);
        }
        let max = softmax.maximum_with(next);
        if !second_masked {
            softmax.exponentiate::<1>(scores);
        }
        scale_rows::<H>(o, softmax.factor);
        let p: PairFragments = a_fragments(scores);
        self.shared.v_barriers.wait_full(self.v);
        wgmma::fence();
        self.start_output(o, &p);
        max
    }

    /// Normalizes and stores the output, and stores lse. Returns the bits of the largest magnitude that this thread has
    /// quantized.
    fn store<const FP8: bool, const MASKED: bool>(
        &self,
        kernel: Forward<H, FP8, MASKED>,
        o: &mut H::OutputAccumulators,
        softmax: &Softmax<H>,
        tile: WorkTile,
    ) -> u32 {
        let Forward { sizes, out, quantized, lse, .. } = kernel;
        let row = tile.tile * TILE + INDEX * ROWS;
        let (first, stride) = (sizes.row(tile.b, tile.h, row), sizes.stride());
        let sums = [softmax.row_sum(0), softmax.row_sum(1)];
        let (rows, buffer) = (sizes.t.saturating_sub(row), self.shared.output.after(INDEX));
        let normalizers = [math::recip(sums[0]), math::recip(sums[1])];
        let mut quantized = if FP8 { Some(QuantizedOutput::new(quantized.out, quantized.scale)) } else { None };
        let out = (out, quantized.as_mut());
        store_rows::<H>(OutputRows { out, first, stride, rows }, o, normalizers, buffer);
        // The four lanes of a row have the same statistics. The first two lanes store those of the two rows.
        let lane = warp::lane() % 4;
        let query = row + thread_row() + 8 * lane;
        if lane < 2 && query < sizes.t {
            let value = if lane == 0 { softmax.log_sum_exp(0, sums[0]) } else { softmax.log_sum_exp(1, sums[1]) };
            lse.set(sizes.statistics(tile.b, tile.h) + query as usize, value);
        }
        quantized.map_or(0, |quantized| quantized.magnitudes.largest())
    }
}
