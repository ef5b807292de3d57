//! Forward pass: 64 queries per consumer, keys and values streamed in panels of 64, from the diagonal down to key 0.
//!
//! The exponentials of one panel's scores overlap with two wgmma groups: the scores of the next panel, and the
//! multiplication of the previous panel's probabilities with V. For HS = 64, a panel takes as long in the exponential
//! unit as in the tensor cores, so the overlap determines the speed. It continues across work tiles: the last panel of
//! a tile overlaps with the first scores of the next tile.

use super::epilogue::{OutputRows, store_rows};
use super::mask::mask_diagonal;
use super::panel::{Panel, a_fragment, thread_row};
use super::pipeline::PipelineBarriers;
use super::scheduler::{TileScheduler, WorkTile, work_index};
use super::sizes::Sizes;
use super::softmax::Softmax;
use super::warp_specialized::{self, WarpSpecialized};
use super::{CONSUMERS, Head, Head64, Head128, ROWS, TILE};
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{MBarrier, PipelineState, TensorMap, wgmma};
use cuda_std::shared::{Layout, SharedArray};
use cuda_std::{Global, GlobalMut, bf16, kernel, math, thread, warp};

/// Pipeline stages of keys, and of values.
const STAGES: u32 = 5;
/// Work tiles that the producer announces at a time: the tile whose results are being stored, up to two tiles whose
/// queries have arrived, and the tile that the producer continues with.
const WORK_TILES: u32 = 4;

/// Pipeline stages of queries. The next work tile's queries arrive while the current ones are in use. For HS = 128, one
/// stage suffices, because the current queries are in registers.
const fn q_stages<H: Head>() -> u32 {
    if H::HS == 128 { 1 } else { 2 }
}

/// Panels of keys or values in a stage.
const fn panels<H: Head>() -> u32 {
    H::ScoreAccumulators::COLUMNS / ROWS
}

/// Stages that consumer `index` skips, because all of their keys come after its queries.
const fn skipped_stages<H: Head>(index: u32) -> u32 {
    (CONSUMERS - 1 - index) / panels::<H>()
}

#[derive(Clone, Copy)]
struct SharedStorage<H> {
    /// In each stage, one panel for each consumer.
    q: Panel<H>,
    k: Panel<H>,
    v: Panel<H>,
    /// One buffer for each consumer's stores.
    output: Panel<H>,
    /// The work tile of round i at i % [`WORK_TILES`], valid once its queries have arrived. This saves the consumers
    /// the scheduler's divisions.
    work_tiles: SharedArray<WorkTile>,
    q_barriers: PipelineBarriers,
    k_barriers: PipelineBarriers,
    v_barriers: PipelineBarriers,
}

impl<H: Head> SharedStorage<H> {
    fn new(layout: &mut Layout) -> Self {
        Self {
            q: Panel::take(layout, q_stages::<H>() * CONSUMERS),
            k: Panel::take(layout, STAGES * panels::<H>()),
            v: Panel::take(layout, STAGES * panels::<H>()),
            output: Panel::take(layout, CONSUMERS),
            work_tiles: layout.array(WORK_TILES as usize),
            q_barriers: PipelineBarriers::new(layout, q_stages::<H>()),
            k_barriers: PipelineBarriers::new(layout, STAGES),
            v_barriers: PipelineBarriers::new(layout, STAGES),
        }
    }
}

/// Returns the dynamic shared memory of a block, in bytes.
#[cfg(not(target_arch = "nvptx64"))]
pub fn forward_shared_bytes<H: Head>() -> usize {
    let mut layout = Layout::new();
    SharedStorage::<H>::new(&mut layout);
    layout.bytes()
}

/// out (B, T, NH, HS), and lse (B, NH, T), the natural log-sum-exp of the scaled scores.
///
/// `qkv` maps (B, T, (NH + 2 KV) HS) with box [`super::BOX`].
///
/// Grid: (number of SMs).
#[kernel(threads = 384, blocks_per_sm = 1, arch = "sm_90a", instances(hs_64 = <Head64>, hs_128 = <Head128>))]
pub fn attention_forward_wgmma<H: Head>(
    out: GlobalMut<bf16>,
    lse: GlobalMut<f32>,
    qkv: Global<TensorMap>,
    b: u32,
    t: u32,
    kv: u32,
    group: u32,
) {
    let sizes = Sizes::<H>::new(t, kv, group);
    let scheduler = TileScheduler::new(b, t, sizes.nh());
    let shared = SharedStorage::new(&mut Layout::new());
    warp_specialized::run(Forward { shared, sizes, scheduler, out, lse, qkv });
}

#[derive(Clone, Copy)]
struct Forward<H> {
    shared: SharedStorage<H>,
    sizes: Sizes<H>,
    scheduler: TileScheduler,
    out: GlobalMut<bf16>,
    lse: GlobalMut<f32>,
    qkv: Global<TensorMap>,
}

impl<H: Head> WarpSpecialized for Forward<H> {
    #[inline(always)]
    fn init(self) {
        self.qkv.prefetch();
        self.shared.q_barriers.init(q_stages::<H>(), 1, CONSUMERS);
        self.shared.k_barriers.init(STAGES, 1, CONSUMERS);
        self.shared.v_barriers.init(STAGES, 1, CONSUMERS);
    }

    #[inline(always)]
    fn produce(self) {
        let Self { shared, sizes, scheduler, qkv, .. } = self;
        let (mut round, work_tiles) = (0, scheduler.work_tiles());
        if thread::thread_idx_x() == 0 && work_index(round) < work_tiles {
            let mut producer = Producer {
                shared,
                sizes,
                qkv,
                q: PipelineState::producer(q_stages::<H>()),
                k: PipelineState::producer(STAGES),
                v: PipelineState::producer(STAGES),
            };
            let mut tile = scheduler.work_tile::<false>(work_index(round));
            while work_index(round) < work_tiles {
                tile = scheduler.work_tile::<false>(work_index(round));
                producer.load_queries(tile, round);
                producer.load_panels(tile);
                round += 1;
            }
            // After their last work tile, consumers compute the first scores of another tile and discard them. Making
            // that wgmma conditional would cause ptxas to serialize all of them.
            producer.load_queries(tile, round);
            producer.load_diagonal_keys(tile);
        }
    }

    #[inline(always)]
    fn consume<const CONSUMER: u32>(self) {
        Consumer::<H, CONSUMER>::new(self.shared).run(self);
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

impl<H: Head> Producer<H> {
    /// Announces a work tile and loads its queries.
    #[inline(always)]
    fn load_queries(&mut self, tile: WorkTile, round: u32) {
        self.shared.q_barriers.empty.at(self.q.stage()).wait(self.q.parity());
        self.shared.work_tiles.set((round % WORK_TILES) as usize, tile);
        let full = self.shared.q_barriers.full.at(self.q.stage());
        let to = self.shared.q.after(self.q.advance() * CONSUMERS);
        full.arrive_expect_tx(CONSUMERS * Panel::<H>::BYTES);
        for i in 0..CONSUMERS {
            let y = tile.tile * TILE + i * ROWS;
            to.after(i).load(self.qkv, tile.h * H::HS, y, tile.b, full);
        }
    }

    /// Loads keys and values from the last consumer's diagonal down to key 0.
    #[inline(always)]
    fn load_panels(&mut self, tile: WorkTile) {
        let kv_head = self.sizes.kv_head(tile.h);
        let mut i = Self::stages_of(tile);
        while i > 0 {
            i -= 1;
            self.load_keys(tile.b, kv_head, i);
            self.shared.v_barriers.empty.at(self.v.stage()).wait(self.v.parity());
            let full = self.shared.v_barriers.full.at(self.v.stage());
            let to = self.shared.v.after(self.v.advance() * panels::<H>());
            self.load(to, self.sizes.value(kv_head), tile.b, i, full);
        }
    }

    /// Loads the keys of both consumers' diagonals.
    #[inline(always)]
    fn load_diagonal_keys(&mut self, tile: WorkTile) {
        let kv_head = self.sizes.kv_head(tile.h);
        for i in 0..=skipped_stages::<H>(0) {
            self.load_keys(tile.b, kv_head, Self::stages_of(tile) - 1 - i);
        }
    }

    /// Loads the `i`-th stage of the keys of a key-value head of sequence `b`.
    #[inline(always)]
    fn load_keys(&mut self, b: u32, kv_head: u32, i: u32) {
        self.shared.k_barriers.empty.at(self.k.stage()).wait(self.k.parity());
        let full = self.shared.k_barriers.full.at(self.k.stage());
        let to = self.shared.k.after(self.k.advance() * panels::<H>());
        self.load(to, self.sizes.key(kv_head), b, i, full);
    }

    /// Returns the stages of keys up to the last consumer's diagonal.
    #[inline(always)]
    fn stages_of(tile: WorkTile) -> u32 {
        (tile.tile + 1) * CONSUMERS / panels::<H>()
    }

    /// Starts the loads of the `stage`-th stage of head `index` of qkv, K or V of sequence `b`.
    #[inline(always)]
    fn load(&self, to: Panel<H>, index: u32, b: u32, stage: u32, full: MBarrier) {
        full.arrive_expect_tx(panels::<H>() * Panel::<H>::BYTES);
        for i in 0..panels::<H>() {
            let y = (stage * panels::<H>() + i) * ROWS;
            to.after(i).load(self.qkv, index * H::HS, y, b, full);
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

/// The progress of a consumer within a work tile.
#[derive(Clone, Copy)]
struct Progress {
    /// Stages of keys that follow the current one.
    remaining: u32,
    /// True if the multiplication of the previous stage's probabilities with V is in flight.
    pv_in_flight: bool,
}

impl<H: Head, const INDEX: u32> Consumer<H, INDEX> {
    /// True if the queries are A fragments in registers.
    ///
    /// For HS = 64, the scores leave no registers for them. For HS = 128, wgmma has only 64 columns: reading A from
    /// shared memory would double its shared-memory traffic.
    const IN_REGISTERS: bool = H::HS == 128;
    /// True if the second of the two panels on this consumer's diagonal contains only keys after its queries.
    const SECOND_PANEL_MASKED: bool = panels::<H>() == 2 && INDEX == 0;
    /// Columns of the first scores that contain a visible key.
    const FIRST_COLUMNS: u32 = if Self::SECOND_PANEL_MASKED { ROWS } else { H::ScoreAccumulators::COLUMNS };

    #[inline(always)]
    fn new(shared: SharedStorage<H>) -> Self {
        let q = PipelineState::consumer(q_stages::<H>());
        Self { shared, q, k: PipelineState::consumer(STAGES), v: PipelineState::consumer(STAGES) }
    }

    /// Computes this consumer's queries of all work tiles of this block.
    #[inline(always)]
    fn run(&mut self, kernel: Forward<H>) {
        let (mut round, work_tiles) = (0, kernel.scheduler.work_tiles());
        if work_index(round) >= work_tiles {
            return;
        }
        let mut queries = H::ZERO_ROWS;
        let mut scores = H::ScoreAccumulators::ZERO;
        self.compute_first_scores(&mut scores, &mut queries);
        loop {
            let stages = (self.work_tile(round).tile * CONSUMERS + INDEX) / panels::<H>();
            let (mut o, softmax) = self.attend(&mut scores, &mut queries, stages);
            self.store(kernel, &mut o, &softmax, self.work_tile(round));
            round += 1;
            if work_index(round) >= work_tiles {
                break;
            }
        }
    }

    /// Reads the work tile of a round from shared memory. Callers read it again instead of keeping it in registers.
    #[inline(always)]
    fn work_tile(&self, round: u32) -> WorkTile {
        self.shared.work_tiles.at((round % WORK_TILES) as usize)
    }

    /// Acquires the queries of the first work tile and computes their first scores.
    #[inline(always)]
    fn compute_first_scores(&mut self, scores: &mut H::ScoreAccumulators, queries: &mut H::RowFragments) {
        self.acquire_queries(queries);
        let keys = self.start_scores(scores, queries);
        wgmma::wait::<0>();
        scores.fence_accumulators();
        self.shared.k_barriers.release(keys);
    }

    /// Waits for the queries of the next work tile, and skips the stages of keys after them.
    #[inline(always)]
    fn acquire_queries(&mut self, queries: &mut H::RowFragments) {
        self.shared.q_barriers.full.at(self.q.stage()).wait(self.q.parity());
        if Self::IN_REGISTERS {
            *queries = self.query_panel().row_fragments();
            self.shared.q_barriers.release_after_reads(self.q.stage(), INDEX);
        }
        for _ in 0..skipped_stages::<H>(INDEX) {
            self.shared.k_barriers.skip(&mut self.k);
        }
    }

    /// Releases the current queries, unless that was done when they were loaded into registers.
    #[inline(always)]
    fn release_queries(&mut self) {
        let stage = self.q.advance();
        if !Self::IN_REGISTERS {
            self.shared.q_barriers.release(stage);
        }
    }

    #[inline(always)]
    fn query_panel(&self) -> Panel<H> {
        self.shared.q.after(self.q.stage() * CONSUMERS + INDEX)
    }

    /// Starts s = Q Kᵀ for the next stage of keys and returns that stage.
    #[inline(always)]
    fn start_scores(&mut self, s: &mut H::ScoreAccumulators, queries: &H::RowFragments) -> u32 {
        self.shared.k_barriers.full.at(self.k.stage()).wait(self.k.parity());
        wgmma::fence();
        let k = self.shared.k.after(self.k.stage() * panels::<H>());
        if Self::IN_REGISTERS {
            k.start_scores(s, queries, false);
        } else {
            k.start_scores_from_shared(s, self.query_panel(), false);
        }
        wgmma::commit();
        self.k.advance()
    }

    /// Computes the unnormalized output of the queries `queries`.
    ///
    /// `scores` are the scores of the diagonal, which `stages` stages of keys precede. On return, `queries` and
    /// `scores` are those of the next work tile.
    #[inline(always)]
    fn attend(
        &mut self,
        scores: &mut H::ScoreAccumulators,
        queries: &mut H::RowFragments,
        stages: u32,
    ) -> (H::OutputAccumulators, Softmax<H>) {
        for _ in 0..skipped_stages::<H>(INDEX) {
            self.shared.v_barriers.skip(&mut self.v);
        }
        mask_diagonal(scores, INDEX % panels::<H>() * ROWS, Self::FIRST_COLUMNS, f32::NEG_INFINITY);
        // Moves all scores to registers of their own. If some stayed in the registers of the wgmma, ptxas would
        // serialize it.
        scores.fence_accumulators();
        let mut softmax = Softmax::new(scores, Self::FIRST_COLUMNS);
        let mut o = H::OutputAccumulators::ZERO;
        // Two sets of score accumulators alternate.
        let mut others = H::ScoreAccumulators::ZERO;
        let mut remaining = stages;
        loop {
            let progress = Progress { remaining, pv_in_flight: remaining < stages };
            let max = self.step(scores, &mut others, &mut o, &mut softmax, queries, progress);
            if remaining == 0 {
                *scores = others;
                break;
            }
            remaining -= 1;
            softmax.raise(max);
            let progress = Progress { remaining, pv_in_flight: true };
            let max = self.step(&mut others, scores, &mut o, &mut softmax, queries, progress);
            if remaining == 0 {
                break;
            }
            remaining -= 1;
            softmax.raise(max);
        }
        wgmma::wait::<0>();
        o.fence_accumulators();
        self.shared.v_barriers.release(self.v.advance());
        (o, softmax)
    }

    /// Computes the next scores, and starts o += P V for the current stage, with P computed from `scores`.
    ///
    /// Returns the running maxima including the next scores. After a work tile's last stage, the next scores are the
    /// first of the next work tile.
    #[inline(always)]
    fn step(
        &mut self,
        scores: &mut H::ScoreAccumulators,
        next: &mut H::ScoreAccumulators,
        o: &mut H::OutputAccumulators,
        softmax: &mut Softmax<H>,
        queries: &mut H::RowFragments,
        Progress { remaining, pv_in_flight }: Progress,
    ) -> [f32; 2] {
        if remaining == 0 {
            self.release_queries();
            self.acquire_queries(queries);
        }
        let keys = self.start_scores(next, queries);
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
        let max = softmax.maximum_with(next);
        if !second_masked {
            softmax.exponentiate::<1>(scores);
        }
        for i in 0..H::HS as usize / 2 {
            o[i] *= softmax.factor(i / 2 % 2);
        }
        let mut p = H::ZERO_PROBABILITIES;
        for k in 0..4 * panels::<H>() as usize {
            p[k] = a_fragment(scores, k);
        }
        self.shared.v_barriers.full.at(self.v.stage()).wait(self.v.parity());
        wgmma::fence();
        let values = self.shared.v.after(self.v.stage() * panels::<H>());
        values.start_accumulate(o, &p, panels::<H>());
        wgmma::commit();
        max
    }

    /// Normalizes and stores the output, and stores lse.
    #[inline(always)]
    fn store(&self, kernel: Forward<H>, o: &mut H::OutputAccumulators, softmax: &Softmax<H>, tile: WorkTile) {
        let Forward { sizes, out, lse, .. } = kernel;
        let row = tile.tile * TILE + INDEX * ROWS;
        let (first, stride) = (sizes.row(tile.b, tile.h, row), sizes.stride());
        let sums = [softmax.row_sum(0), softmax.row_sum(1)];
        let rows = OutputRows { out, first, stride, rows: sizes.t.saturating_sub(row) };
        store_rows::<H>(rows, o, [math::recip(sums[0]), math::recip(sums[1])], self.shared.output.after(INDEX));
        // The four lanes of a row have the same statistics. The first two lanes store those of the two rows.
        let lane = warp::lane() % 4;
        let query = row + thread_row() + 8 * lane;
        if lane < 2 && query < sizes.t {
            let value = if lane == 0 { softmax.log_sum_exp(0, sums[0]) } else { softmax.log_sum_exp(1, sums[1]) };
            lse.set(sizes.statistics(tile.b, tile.h) + query as usize, value);
        }
    }
}
