//! The gradients of K and V for HS = 64: 64 keys per consumer, queries streamed in panels of 64.
//!
//! S, P and dP are transposed (rows are keys), so that the A operands of all multiplications are in registers:
//! ```text
//! Sᵀ = K Qᵀ          Pᵀ = 2^(scale Sᵀ - lse)         dV += Pᵀ dout
//! dPᵀ = V doutᵀ      dSᵀ = Pᵀ ∘ (dPᵀ - D)            dK += dSᵀ Q, scaled at the end
//! ```
//! lse and D of a query vary along the columns. The producer's first warp copies them into the stage of its panels.

use super::backward::{Backward, STAGES, SharedStorage};
use super::mask::mask_diagonal_transposed;
use super::panel::{ScoreSquare, accumulator_column, square_fragments};
use super::pipeline::THREAD_RELEASES;
use super::scheduler::{TileScheduler, WorkTile, work_index};
use super::sizes::Sizes;
use super::softmax::{lse_log2, probability};
use super::warp_specialized::{self, WarpSpecialized};
use super::{CONSUMERS, Head, Head64, ROWS, TILE};
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::hopper::{PipelineState, TensorMap, wgmma};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, bf16, kernel, thread, warp};

type H = Head64;
type Rows = <H as Head>::RowFragments;
type Gradient = <H as Head>::OutputAccumulators;

/// Statistics of a stage: 64 of lse in base 2, then 64 of D.
pub const STATISTICS: usize = 2 * ROWS as usize;

/// Returns the dynamic shared memory of a block, in bytes.
#[cfg(not(target_arch = "nvptx64"))]
pub fn dkdv_shared_bytes() -> usize {
    SharedStorage::bytes(STATISTICS)
}

/// dK and dV in dqkv (B, T, NH + 2 KV, HS).
///
/// `qkv` maps (B, T, (NH + 2 KV) HS) and `dout` maps (B, T, NH HS), both with box [`super::BOX`]. lse and
/// d = rowsum(dout ∘ out) are (B, NH, T).
///
/// Grid: (number of SMs).
#[kernel(threads = 384, blocks_per_sm = 1, requires = "wgmma")]
pub fn attention_backward_dkdv_wgmma_hs_64(
    dqkv: GlobalMut<bf16>,
    qkv: Global<TensorMap>,
    dout: Global<TensorMap>,
    lse: Global<f32>,
    d: Global<f32>,
    b: u32,
    t: u32,
    kv: u32,
    group: u32,
) {
    let shared = SharedStorage::new(&mut Layout::new(), STATISTICS);
    let sizes = Sizes::<H>::new(t, kv, group);
    let scheduler = TileScheduler::new(b, t, kv);
    warp_specialized::run(DkDv(Backward { shared, sizes, scheduler, dqkv, qkv, dout, lse, d }));
}

/// Returns the panels of queries from the work tile's first key on. Each consumer's first panel is its diagonal.
#[inline(always)]
fn query_panels(scheduler: TileScheduler, tile: WorkTile) -> u32 {
    CONSUMERS * (scheduler.tiles() - tile.tile)
}

#[derive(Clone, Copy)]
struct DkDv(Backward);

impl WarpSpecialized for DkDv {
    #[inline(always)]
    fn init(self) {
        self.0.init(warp::LANES, THREAD_RELEASES);
    }

    #[inline(always)]
    fn produce(self) {
        if thread::thread_idx_x() < warp::LANES {
            let (resident, stream) = (PipelineState::producer(1), PipelineState::producer(STAGES));
            let mut producer = Producer { kernel: self.0, resident, stream };
            let (mut round, scheduler) = (0, self.0.scheduler);
            while work_index(round) < scheduler.work_tiles() {
                producer.load(scheduler.work_tile::<true>(work_index(round)));
                round += 1;
            }
        }
    }

    #[inline(always)]
    fn consume<const CONSUMER: u32>(self) {
        let (resident, stream) = (PipelineState::consumer(1), PipelineState::consumer(STAGES));
        Consumer::<CONSUMER> { shared: self.0.shared, resident, stream }.run(self.0);
    }
}

/// The producer: the first warp of warpgroup 0.
struct Producer {
    kernel: Backward,
    resident: PipelineState,
    stream: PipelineState,
}

impl Producer {
    /// Loads K and V, then, for each query head of the group, Q, dout and statistics from the work tile's first key on.
    #[inline(always)]
    fn load(&mut self, tile: WorkTile) {
        self.kernel.shared.resident_barriers.empty.at(0).wait(self.resident.parity());
        self.resident.advance();
        if warp::lane() == 0 {
            self.kernel.load_resident(self.kernel.keys_and_values(tile.h), tile);
        }
        let group = self.kernel.sizes.group;
        let mut h = tile.h * group;
        let end = h + group;
        while h < end {
            let mut panel = 0;
            while panel < query_panels(self.kernel.scheduler, tile) {
                self.load_queries(tile, h, tile.tile * TILE + panel * ROWS);
                panel += 1;
            }
            h += 1;
        }
    }

    /// Loads Q, dout and the statistics of the 64 queries of head `h` from `first` on.
    #[inline(always)]
    fn load_queries(&mut self, tile: WorkTile, h: u32, first: u32) {
        let Backward { shared, sizes, lse, d, .. } = self.kernel;
        let (lane, t) = (warp::lane(), sizes.t);
        let at = sizes.statistics(tile.b, h);
        let query = |half: u32| first + lane + half * warp::LANES;
        let lse = |half| lse_log2(lse, at + query(half) as usize, query(half) < t);
        let d = |half| if query(half) < t { d.at(at + query(half) as usize) } else { 0.0 };
        // Loading the statistics before the wait hides the latency.
        let values = [lse(0), lse(1), d(0), d(1)];

        shared.streamed_barriers.empty.at(self.stream.stage()).wait(self.stream.parity());
        let stage = self.stream.advance();
        let statistics = shared.statistics.skip(stage as usize * STATISTICS);
        for i in 0..4 {
            statistics.set(i * 32 + lane as usize, values[i]);
        }
        if lane == 0 {
            self.kernel.load_streamed(self.kernel.queries_and_dout(h), tile, first, stage);
        } else {
            shared.streamed_barriers.full.at(stage).arrive();
        }
    }
}

/// The consumer of keys 64 `INDEX` .. 64 `INDEX` + 64 of each work tile.
struct Consumer<const INDEX: u32> {
    shared: SharedStorage,
    resident: PipelineState,
    stream: PipelineState,
}

impl<const INDEX: u32> Consumer<INDEX> {
    #[inline(always)]
    fn run(&mut self, kernel: Backward) {
        let (mut round, scheduler) = (0, kernel.scheduler);
        while work_index(round) < scheduler.work_tiles() {
            let tile = scheduler.work_tile::<true>(work_index(round));
            let (mut dk, mut dv) = self.gradients(kernel.sizes.group, query_panels(scheduler, tile));
            kernel.store_gradient(tile, kernel.sizes.key(tile.h), INDEX, &mut dk, H::SCALE);
            kernel.store_gradient(tile, kernel.sizes.value(tile.h), INDEX, &mut dv, 1.0);
            round += 1;
        }
    }

    /// Computes dK (unscaled) and dV of this consumer's keys over `panels` panels of queries of each of `heads` heads.
    #[inline(always)]
    fn gradients(&mut self, mut heads: u32, panels: u32) -> (Gradient, Gradient) {
        let shared = self.shared;
        shared.resident_barriers.full.at(0).wait(self.resident.parity());
        let resident = shared.resident.after(INDEX);
        let (k, v) = (resident.first.row_fragments(), resident.second.row_fragments());
        shared.resident_barriers.release_after_reads(self.resident.stage(), INDEX);
        let mut gradients = (Gradient::ZERO, Gradient::ZERO);
        loop {
            self.add_head(&mut gradients, (&k, &v), panels);
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
    #[inline(always)]
    fn add_head(&mut self, (dk, dv): &mut (Gradient, Gradient), (k, v): (&Rows, &Rows), panels: u32) {
        let shared = self.shared;
        for _ in 0..INDEX {
            // All queries of this panel come before this consumer's keys.
            shared.streamed_barriers.full.at(self.stream.stage()).wait(self.stream.parity());
            shared.streamed_barriers.release_by_thread(self.stream.advance());
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
                shared.streamed_barriers.release_by_thread(previous);
            }
            scores_to_probabilities::<H>(&mut s, statistics);
            if panel == INDEX {
                mask_diagonal_transposed(&mut s, 0.0);
            }
            let p = square_fragments(&s);
            wgmma::wait::<0>();
            dp.fence_accumulators();
            score_gradients(&mut dp, &s, statistics.skip(ROWS as usize));
            let ds = square_fragments(&dp);
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
        shared.streamed_barriers.release_by_thread(previous);
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
