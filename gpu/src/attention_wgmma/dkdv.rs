//! The gradients of K and V for HS = 64: 64 keys per consumer, queries streamed in panels of 64.
//!
//! S, P and dP are transposed (rows are keys), so that the A operands of all multiplications are in registers:
//! ```text
//! Sᵀ = K Qᵀ          Pᵀ = 2^(scale Sᵀ - lse)         dV += Pᵀ dout
//! dPᵀ = V doutᵀ      dSᵀ = Pᵀ ∘ (dPᵀ - D)            dK += dSᵀ Q, scaled at the end
//! ```
//! lse and D of a query vary along the columns. The producer's first warp copies them into the stage of its panels.

use super::backward::{Backward, Consumer, Gradients, Producer, STATISTICS, load_statistics, store_statistics};
use super::mask::{mask_after, mask_diagonal_transposed};
use super::panel::{ScoreSquare, SquareFragments, a_fragments, accumulator_column, thread_row};
use super::scheduler::{TileScheduler, WorkTile};
use super::sizes::Sizes;
use super::softmax::probability;
use super::{CONSUMER_THREADS, CONSUMERS, Head, Head64, ROWS, TILE};
use crate::attention::visibility::Visibility;
use cuda_std::hopper::wgmma;
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::{SharedArray, device, warp};

type H = Head64;
type Rows = <H as Head>::RowFragments;
type Gradient = <H as Head>::OutputAccumulators;

/// Returns the panels of queries from the work tile's first key to the last query that attends to a key of the tile. Each consumer's
/// first panel is its diagonal.
#[inline(always)]
pub fn query_panels<const MASKED: bool>(scheduler: TileScheduler, visible: Visibility, tile: WorkTile) -> u32 {
    if MASKED {
        let last = visible.last_query(tile.b, tile.tile * TILE + TILE - 1);
        (last / ROWS + 1).saturating_sub(CONSUMERS * tile.tile).max(CONSUMERS)
    } else {
        CONSUMERS * (scheduler.tiles() - tile.tile)
    }
}

/// The queries that do not attend to all of a consumer's keys, because of documents or a window.
#[derive(Clone, Copy)]
pub struct HiddenQueries<const MASKED: bool> {
    visible: Visibility,
    b: u32,
    /// The consumer's first key.
    pub key: u32,
    /// The panels of queries before this one attend to all keys, counted from the work tile's first key.
    pub panels: u32,
}

#[device]
impl<const MASKED: bool> HiddenQueries<MASKED> {
    /// Returns the hidden queries of consumer `index` of a work tile.
    pub fn new(visible: Visibility, tile: WorkTile, index: u32) -> Self {
        let key = tile.tile * TILE + index * ROWS;
        let panels = if MASKED { (visible.last_query(tile.b, key) + 1 - tile.tile * TILE) / ROWS } else { 0 };
        Self { visible, b: tile.b, key, panels }
    }

    /// Masks transposed probabilities of the queries from `query` on.
    pub fn mask(self, p: &mut ScoreSquare, query: u32) {
        let key = self.key + thread_row();
        mask_after(p, [key, key + 8].map(|key| self.visible.last_query(self.b, key)), query);
    }
}

/// The gradients of K and V.
#[derive(Clone, Copy)]
pub struct DkDv<const MASKED: bool>;

#[device]
impl<const MASKED: bool> Gradients for DkDv<MASKED> {
    const STATISTICS: usize = STATISTICS;
    const PRODUCERS: u32 = warp::LANES;
    const RELEASES: u32 = CONSUMER_THREADS;
    const LOW_FIRST: bool = true;
    const MASKED: bool = MASKED;

    fn heads(sizes: Sizes<H>) -> u32 {
        sizes.kv
    }

    /// Loads K and V, then, for each query head of the group, Q, dout and statistics from the work tile's first key on.
    fn load(producer: &mut Producer<Self>, tile: WorkTile) {
        let kernel = producer.kernel;
        kernel.shared.resident_barriers.wait_empty(producer.resident);
        producer.resident.advance();
        if warp::lane() == 0 {
            kernel.load_resident(kernel.keys_and_values(tile.h), tile);
        }
        let group = kernel.sizes.group;
        let mut h = tile.h * group;
        let end = h + group;
        while h < end {
            let (mut panel, panels) = (0, query_panels::<MASKED>(kernel.scheduler, kernel.visible, tile));
            while panel < panels {
                producer.load_queries(tile, h, tile.tile * TILE + panel * ROWS);
                panel += 1;
            }
            h += 1;
        }
    }

    fn compute<const INDEX: u32>(consumer: &mut Consumer<INDEX>, kernel: Backward<Self>, tile: WorkTile) {
        let panels = query_panels::<MASKED>(kernel.scheduler, kernel.visible, tile);
        let hidden = HiddenQueries::<MASKED>::new(kernel.visible, tile, INDEX);
        let (mut dk, mut dv) = consumer.dk_and_dv(kernel.sizes.group, panels, hidden);
        kernel.store_gradient(tile, kernel.sizes.key(tile.h), INDEX, &mut dk, H::SCALE);
        kernel.store_gradient(tile, kernel.sizes.value(tile.h), INDEX, &mut dv, 1.0);
    }
}

impl<const MASKED: bool> Producer<DkDv<MASKED>> {
    /// Loads Q, dout and the statistics of the 64 queries of head `h` from `first` on.
    #[inline(always)]
    fn load_queries(&mut self, tile: WorkTile, h: u32, first: u32) {
        let Backward { shared, sizes, lse, d, .. } = self.kernel;
        let lane = warp::lane();
        // Loading the statistics before the wait hides the latency.
        let statistics = load_statistics(lse, d, sizes.statistics(tile.b, h), first + lane, sizes.t);

        shared.streamed_barriers.wait_empty(self.stream);
        let stage = self.stream.advance();
        store_statistics(shared.statistics.skip(stage as usize * STATISTICS), lane, statistics);
        if lane == 0 {
            self.kernel.load_streamed(self.kernel.queries_and_dout(h), tile, first, stage);
        } else {
            shared.streamed_barriers.full.at(stage).arrive();
        }
    }
}

#[device]
impl<const INDEX: u32> Consumer<INDEX> {
    /// Computes dK (unscaled) and dV of this consumer's keys over `panels` panels of queries of each of `heads` heads.
    fn dk_and_dv<const MASKED: bool>(
        &mut self,
        mut heads: u32,
        panels: u32,
        hidden: HiddenQueries<MASKED>,
    ) -> (Gradient, Gradient) {
        let shared = self.shared;
        shared.resident_barriers.wait_full(self.resident);
        let resident = shared.resident.after(INDEX);
        let (k, v) = (resident.first.row_fragments(), resident.second.row_fragments());
        shared.resident_barriers.release_after_reads(self.resident.stage(), 1 + INDEX);
        let mut gradients = (Gradient::ZERO, Gradient::ZERO);
        loop {
            self.add_head(&mut gradients, (&k, &v), panels, hidden);
            heads -= 1;
            if heads == 0 {
                break;
            }
        }
        self.resident.advance();
        gradients
    }

    /// Adds the gradients from the `panels` panels of a query head.
    ///
    /// All wgmma have finished on return. A loop over the panels of all heads would save this wait, one per head, but
    /// its inner part was longer by 2 to 5 % of its instructions.
    fn add_head<const MASKED: bool>(
        &mut self,
        (dk, dv): &mut (Gradient, Gradient),
        (k, v): (&Rows, &Rows),
        panels: u32,
        hidden: HiddenQueries<MASKED>,
    ) {
        let shared = self.shared;
        for _ in 0..INDEX {
            // All queries of this panel come before this consumer's keys.
            shared.streamed_barriers.wait_full(self.stream);
            shared.streamed_barriers.empty.at(self.stream.advance()).arrive();
        }

        let (mut s, mut dp) = (ScoreSquare::ZERO, ScoreSquare::ZERO);
        let mut previous = self.stream.stage();
        let mut panel = INDEX;
        loop {
            let stage = self.stream.stage();
            shared.streamed_barriers.full.at(stage).wait(self.stream.parity());
            self.stream.advance();
            let (q, dout) = (shared.streamed.after(stage).first, shared.streamed.after(stage).second);
            let statistics = shared.statistics.skip(stage as usize * STATISTICS);
            wgmma::fence();
            q.start_scores(&mut s, k);
            wgmma::commit();
            dout.start_scores(&mut dp, v);
            wgmma::commit();
            // The previous panel's gradients and S have finished. dP is still in flight.
            wgmma::wait::<1>();
            s.fence_accumulators();
            if panel != INDEX {
                shared.streamed_barriers.empty.at(previous).arrive();
            }
            scores_to_probabilities::<H>(&mut s, statistics);
            if panel == INDEX {
                mask_diagonal_transposed(&mut s, 0.0);
            }
            if MASKED && panel >= hidden.panels {
                hidden.mask(&mut s, hidden.key - INDEX * ROWS + panel * ROWS);
            }
            let p: SquareFragments = a_fragments(&s);
            wgmma::wait::<0>();
            dp.fence_accumulators();
            score_gradients(&mut dp, &s, statistics.skip(ROWS as usize));
            let ds: SquareFragments = a_fragments(&dp);
            wgmma::fence();
            dout.start_accumulate(dv, &p, 1);
            q.start_accumulate(dk, &ds, 1);
            wgmma::commit();
            previous = stage;
            panel += 1;
            if panel == panels {
                break;
            }
        }
        wgmma::wait::<0>();
        dk.fence_accumulators();
        dv.fence_accumulators();
        shared.streamed_barriers.empty.at(previous).arrive();
    }
}

/// Replaces Sᵀ by Pᵀ.
#[inline(always)]
pub fn scores_to_probabilities<H: Head>(s: &mut ScoreSquare, lse_log2: SharedArray<f32>) {
    for i in 0..16 {
        let i = i / 2 * 4 + i % 2;
        let lse = lse_log2.at(accumulator_column(i) as usize);
        s[i] = probability::<H>(s[i], lse);
        s[i + 2] = probability::<H>(s[i + 2], lse);
    }
}

/// Replaces dPᵀ by dSᵀ.
#[inline(always)]
pub fn score_gradients(dp: &mut ScoreSquare, p: &ScoreSquare, d: SharedArray<f32>) {
    for i in 0..16 {
        let i = i / 2 * 4 + i % 2;
        let d = d.at(accumulator_column(i) as usize);
        dp[i] = p[i] * (dp[i] - d);
        dp[i + 2] = p[i + 2] * (dp[i + 2] - d);
    }
}
