//! The gradient of Q for HS = 64: 64 queries per consumer, keys and values streamed in panels of 64.
//! ```text
//! S = Q Kᵀ      P = 2^(scale S - lse)      dP = dout Vᵀ      dS = P ∘ (dP - D)      dQ += dS K, scaled at the end
//! ```
//! This kernel recomputes S and dP, which [`super::dkdv`] also computes: two of the seven matmuls of the backward pass.
//! In exchange, no block adds to another block's dQ. Such additions take sums in f32 in global memory, and a fixed order in
//! which blocks wait for each other, as in [`super::fused`].

use super::backward::{Backward, Consumer, Gradients, Producer};
use super::mask::{mask_before, mask_diagonal};
use super::panel::{ScoreSquare, SquareFragments, a_fragments, thread_row};
use super::scheduler::WorkTile;
use super::sizes::Sizes;
use super::softmax::{lse_log2, probability};
use super::{CONSUMERS, Head, Head64, ROWS, TILE};
use crate::attention::visibility::Visibility;
use cuda_std::device;
use cuda_std::hopper::wgmma;
use cuda_std::hopper::wgmma::Accumulators;

type H = Head64;
type Gradient = <H as Head>::OutputAccumulators;

/// The gradient of Q.
#[derive(Clone, Copy)]
pub struct Dq<const MASKED: bool>;

/// Returns the first panel of keys that a query of the work tile attends to.
#[inline(always)]
fn first_panel<const MASKED: bool>(visible: Visibility, tile: WorkTile) -> u32 {
    if MASKED { visible.first_key(tile.b, tile.tile * TILE) / ROWS } else { 0 }
}

#[device]
impl<const MASKED: bool> Gradients for Dq<MASKED> {
    // lse and D belong to the queries, which are resident.
    const STATISTICS: usize = 0;
    const PRODUCERS: u32 = 1;
    const RELEASES: u32 = CONSUMERS;
    const LOW_FIRST: bool = false;
    const MASKED: bool = MASKED;

    fn heads(sizes: Sizes<H>) -> u32 {
        sizes.nh()
    }

    /// Loads Q and dout, then K and V from key 0 to the last consumer's diagonal.
    fn load(Producer { kernel, resident, stream }: &mut Producer<Self>, tile: WorkTile) {
        let shared = kernel.shared;
        shared.resident_barriers.wait_empty(*resident);
        resident.advance();
        kernel.load_resident(kernel.queries_and_dout(tile.h), tile);

        let sources = kernel.keys_and_values(kernel.sizes.kv_head(tile.h));
        let mut panel = first_panel::<MASKED>(kernel.visible, tile);
        while panel < CONSUMERS * (tile.tile + 1) {
            shared.streamed_barriers.wait_empty(*stream);
            kernel.load_streamed(sources, tile, panel * ROWS, stream.advance());
            panel += 1;
        }
    }

    fn compute<const INDEX: u32>(consumer: &mut Consumer<INDEX>, kernel: Backward<Self>, tile: WorkTile) {
        let Backward { sizes, lse, d, visible, .. } = kernel;
        let first = tile.tile * TILE + INDEX * ROWS + thread_row();
        let statistics = |query: u32| {
            let at = sizes.statistics(tile.b, tile.h) + query as usize;
            let inside = query < sizes.t;
            Statistics { lse_log2: lse_log2(lse, at, inside), d: if inside { d.at(at) } else { 0.0 } }
        };
        let row = tile.tile * TILE + INDEX * ROWS;
        let cut = if MASKED { visible.first_key(tile.b, row + ROWS - 1) } else { 0 };
        let keys = Keys::<MASKED> {
            visible,
            b: tile.b,
            tile: tile.tile,
            first_panel: first_panel::<MASKED>(visible, tile),
            cut,
        };
        let mut dq = consumer.dq(keys, [statistics(first), statistics(first + 8)]);
        kernel.store_gradient(tile, tile.h, INDEX, &mut dq, H::SCALE);
    }
}

/// The keys that a consumer's queries of a work tile attend to.
#[derive(Clone, Copy)]
struct Keys<const MASKED: bool> {
    visible: Visibility,
    b: u32,
    /// The tile of queries.
    tile: u32,
    /// The first panel of keys.
    first_panel: u32,
    /// Keys before this one are hidden from one of the queries.
    cut: u32,
}

/// lse in base 2, and D, of a query.
#[derive(Clone, Copy)]
struct Statistics {
    lse_log2: f32,
    d: f32,
}

impl<const INDEX: u32> Consumer<INDEX> {
    /// Computes dQ (unscaled) of this consumer's queries. `rows` are the statistics of the thread's two queries.
    #[inline(always)]
    fn dq<const MASKED: bool>(&mut self, keys: Keys<MASKED>, rows: [Statistics; 2]) -> Gradient {
        let shared = self.shared;
        shared.resident_barriers.wait_full(self.resident);
        let q = shared.resident.after(INDEX).first.row_fragments();
        let dout = shared.resident.after(INDEX).second.row_fragments();
        shared.resident_barriers.release_after_reads(self.resident.advance(), 1 + INDEX);

        let mut dq = Gradient::ZERO;
        let (mut s, mut dp) = (ScoreSquare::ZERO, ScoreSquare::ZERO);
        let diagonal = CONSUMERS * keys.tile + INDEX;
        let mut previous = self.stream.stage();
        let mut panel = keys.first_panel;
        loop {
            let stage = self.stream.stage();
            shared.streamed_barriers.full.at(stage).wait(self.stream.parity());
            self.stream.advance();
            let (k, v) = (shared.streamed.after(stage).first, shared.streamed.after(stage).second);
            wgmma::fence();
            k.start_scores(&mut s, &q);
            wgmma::commit();
            v.start_scores(&mut dp, &dout);
            wgmma::commit();
            // The previous panel's gradient and S have finished. dP is still in flight.
            wgmma::wait::<1>();
            s.fence_accumulators();
            if panel > keys.first_panel {
                shared.streamed_barriers.release(previous);
            }
            for i in 0..32 {
                s[i] = probability::<H>(s[i], rows[i / 2 % 2].lse_log2);
            }
            if panel == diagonal {
                mask_diagonal(&mut s, 0, ROWS, 0.0);
            }
            if MASKED && panel * ROWS < keys.cut {
                let row = keys.tile * TILE + INDEX * ROWS + thread_row();
                let first_keys = [row, row + 8].map(|query| keys.visible.first_key(keys.b, query));
                mask_before(&mut s, first_keys, panel * ROWS, ROWS, 0.0);
            }
            wgmma::wait::<0>();
            dp.fence_accumulators();
            for i in 0..32 {
                dp[i] = s[i] * (dp[i] - rows[i / 2 % 2].d);
            }
            let ds: SquareFragments = a_fragments(&dp);
            wgmma::fence();
            k.start_accumulate(&mut dq, &ds, 1);
            wgmma::commit();
            previous = stage;
            panel += 1;
            if panel > diagonal {
                break;
            }
        }
        wgmma::wait::<0>();
        dq.fence_accumulators();
        shared.streamed_barriers.release(previous);
        for _ in INDEX + 1..CONSUMERS {
            // All keys of this panel come after this consumer's queries.
            shared.streamed_barriers.wait_full(self.stream);
            shared.streamed_barriers.release(self.stream.advance());
        }
        dq
    }
}
