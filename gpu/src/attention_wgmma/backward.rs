//! The parts that [`super::dkdv`] and [`super::dq`] share, the two kernels of the backward pass for HS = 64. [`super::fused`] uses
//! the panel pairs and the statistics.
//!
//! A consumer owns 64 rows of two matrices, its resident panels, and streams over panels of the other two. For dK and
//! dV, K and V of a key-value head are resident, Q and dout of its query heads streamed. For dQ, Q and dout of a query
//! head are resident, K and V of its key-value head streamed.

use super::dkdv::DkDv;
use super::dq::Dq;
use super::epilogue::store_rows;
use super::panel::Panel;
use super::scheduler::{TileScheduler, WorkTile, work_index};
use super::sizes::Sizes;
use super::softmax::lse_log2;
use super::warp_specialized::{self, WarpSpecialized};
use super::{CONSUMERS, Head, Head64, ROWS, TILE};
use crate::attention::visibility::Visibility;
use core::marker::PhantomData;
use cuda_std::hopper::{MBarrier, PipelineBarriers, PipelineState, TensorMap};
use cuda_std::shared::{Layout, SharedArray};
use cuda_std::{Global, GlobalMut, bf16, device, kernel, thread, warp};

type H = Head64;

/// Pipeline stages of the streamed panels.
pub const STAGES: u32 = 4;

/// Panels of two matrices that are loaded and released together: Q and dout, or K and V.
#[derive(Clone, Copy)]
pub struct PanelPair<H> {
    pub first: Panel<H>,
    pub second: Panel<H>,
}

#[device]
impl<H: Head> PanelPair<H> {
    /// The size of a pair in bytes.
    pub const BYTES: u32 = 2 * Panel::<H>::BYTES;

    /// Takes `count` consecutive pairs from `layout` and returns the first.
    pub fn take(layout: &mut Layout, count: u32) -> Self {
        Self { first: Panel::take(layout, count), second: Panel::take(layout, count) }
    }

    /// Returns the pair that is `count` pairs after this one.
    pub fn after(self, count: u32) -> Self {
        Self { first: self.first.after(count), second: self.second.after(count) }
    }

    /// Starts the load of rows `y` .. of sequence `b`.
    pub fn load(self, [first, second]: [PanelSource; 2], y: u32, b: u32, full: MBarrier) {
        self.first.load(first.map, first.column, y, b, full);
        self.second.load(second.map, second.column, y, b, full);
    }

    /// Starts the loads of both consumers' rows of a work tile into this pair and the next one.
    pub fn load_work_tile(self, sources: [PanelSource; 2], tile: WorkTile, full: MBarrier) {
        full.arrive_expect_tx(CONSUMERS * Self::BYTES);
        for i in 0..CONSUMERS {
            self.after(i).load(sources, tile.tile * TILE + i * ROWS, tile.b, full);
        }
    }
}

/// The HS columns of a tensor map from `column` on.
#[derive(Clone, Copy)]
pub struct PanelSource {
    pub map: Global<TensorMap>,
    pub column: u32,
}

/// Statistics of a panel of queries: 64 of lse in base 2, then 64 of D.
pub const STATISTICS: usize = 2 * ROWS as usize;

/// Returns lse in base 2 of queries `first` and `first` + 32, and D of both. `at` is the index of the head's first query in lse and d,
/// and `t` the number of queries.
#[inline(always)]
pub fn load_statistics(lse: Global<f32>, d: Global<f32>, at: usize, first: u32, t: u32) -> [f32; 4] {
    let query = |half: u32| first + half * warp::LANES;
    let lse = |half| lse_log2(lse, at + query(half) as usize, query(half) < t);
    let d = |half| if query(half) < t { d.at(at + query(half) as usize) } else { 0.0 };
    [lse(0), lse(1), d(0), d(1)]
}

/// Stores what [`load_statistics`] returns for each lane to `statistics` ([`STATISTICS`]).
#[inline(always)]
pub fn store_statistics(statistics: SharedArray<f32>, lane: u32, values: [f32; 4]) {
    for i in 0..4 {
        statistics.set(i * 32 + lane as usize, values[i]);
    }
}

/// Shared memory of a backward kernel.
#[derive(Clone, Copy)]
pub struct SharedStorage {
    /// One pair for each consumer.
    pub resident: PanelPair<H>,
    /// One pair for each stage.
    pub streamed: PanelPair<H>,
    /// One buffer for each consumer's stores.
    output: Panel<H>,
    /// Statistics of the streamed rows.
    pub statistics: SharedArray<f32>,
    pub resident_barriers: PipelineBarriers,
    pub streamed_barriers: PipelineBarriers,
}

impl SharedStorage {
    /// Takes the storage from `layout`.
    ///
    /// Always inlined: as a function that both kernels call, it made dK and dV for HS = 64 10 % slower on an H100.
    #[inline(always)]
    pub fn new<G: Gradients>(layout: &mut Layout) -> Self {
        Self {
            resident: PanelPair::take(layout, CONSUMERS),
            streamed: PanelPair::take(layout, STAGES),
            output: Panel::take(layout, CONSUMERS),
            statistics: layout.array(G::STATISTICS * STAGES as usize),
            resident_barriers: PipelineBarriers::new(layout, 1),
            streamed_barriers: PipelineBarriers::new(layout, STAGES as usize),
        }
    }
}

/// The gradients `G` in dqkv (B, T, NH + 2 KV, HS): those of K and V, or that of Q.
///
/// `qkv` maps (B, T, (NH + 2 KV) HS) and `dout` maps (B, T, NH HS), both with box [`super::BOX`]. lse and
/// d = rowsum(dout ∘ out) are (B, NH, T).
///
/// If `G::MASKED`, `first_keys` and `last_queries` (B, T) and `window` are the bounds of [`Visibility`], and `order` (B, ceil(T / 128))
/// lists the tiles of each sequence, the longest first. It may be null.
///
/// Grid: (number of SMs).
#[kernel(
    threads = 384,
    blocks_per_sm = 1,
    requires = "wgmma",
    instances(
        dkdv_wgmma_hs_64 = DkDv<false>,
        dq_wgmma_hs_64 = Dq<false>,
        dkdv_wgmma_hs_64_masked = DkDv<true>,
        dq_wgmma_hs_64_masked = Dq<true>
    )
)]
pub fn attention_backward<G: Gradients>(
    dqkv: GlobalMut<bf16>,
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
    order: Global<u32>,
    window: u32,
) {
    let (shared, sizes) = (SharedStorage::new::<G>(&mut Layout::new()), Sizes::new(t, kv, group));
    let scheduler = TileScheduler::new(b, t, G::heads(sizes));
    let gradients = PhantomData::<G>;
    let visible = Visibility::new(first_keys, last_queries, window, t);
    warp_specialized::run(Backward { shared, sizes, scheduler, dqkv, qkv, dout, lse, d, visible, order, gradients });
}

/// The gradients that a kernel computes.
pub trait Gradients: Copy + 'static {
    /// Elements of statistics for each stage.
    const STATISTICS: usize;
    /// Threads of the producer. All of them arrive when they have loaded a stage of streamed panels.
    const PRODUCERS: u32;
    /// Releases of a stage of streamed panels.
    const RELEASES: u32;
    /// True if work tiles with a low index take longer than those with a high index.
    const LOW_FIRST: bool;
    /// True if documents or a window hide keys.
    const MASKED: bool;

    /// Returns the number of heads whose rows are work tiles.
    fn heads(sizes: Sizes<H>) -> u32;
    /// Loads the resident and the streamed panels of a work tile.
    fn load(producer: &mut Producer<Self>, tile: WorkTile);
    /// Computes and stores the gradients of a consumer's rows of a work tile.
    fn compute<const INDEX: u32>(consumer: &mut Consumer<INDEX>, kernel: Backward<Self>, tile: WorkTile);
}

/// A backward kernel's arguments and shared memory.
#[derive(Clone, Copy)]
pub struct Backward<G> {
    pub shared: SharedStorage,
    pub sizes: Sizes<H>,
    pub scheduler: TileScheduler,
    pub dqkv: GlobalMut<bf16>,
    pub qkv: Global<TensorMap>,
    pub dout: Global<TensorMap>,
    pub lse: Global<f32>,
    pub d: Global<f32>,
    pub visible: Visibility,
    order: Global<u32>,
    pub gradients: PhantomData<G>,
}

/// The producer: the first threads of warpgroup 0.
pub struct Producer<G> {
    pub kernel: Backward<G>,
    pub resident: PipelineState,
    pub stream: PipelineState,
}

/// The consumer of rows 64 `INDEX` .. 64 `INDEX` + 64 of each work tile: of keys for dK and dV, of queries for dQ.
pub struct Consumer<const INDEX: u32> {
    pub shared: SharedStorage,
    pub resident: PipelineState,
    pub stream: PipelineState,
}

#[device]
impl<G: Gradients> WarpSpecialized for Backward<G> {
    fn init(self) {
        self.qkv.prefetch();
        self.dout.prefetch();
        self.shared.resident_barriers.init(1, 1, CONSUMERS);
        self.shared.streamed_barriers.init(STAGES, G::PRODUCERS, G::RELEASES);
    }

    fn produce(self) {
        if thread::thread_idx_x() < G::PRODUCERS {
            let (resident, stream) = (PipelineState::producer(1), PipelineState::producer(STAGES));
            let mut producer = Producer { kernel: self, resident, stream };
            let mut round = 0;
            while work_index(round) < self.scheduler.work_tiles() {
                G::load(&mut producer, self.work_tile(round));
                round += 1;
            }
        }
    }

    fn consume<const CONSUMER: u32>(self) {
        let (resident, stream) = (PipelineState::consumer(1), PipelineState::consumer(STAGES));
        let mut consumer = Consumer::<CONSUMER> { shared: self.shared, resident, stream };
        let mut round = 0;
        while work_index(round) < self.scheduler.work_tiles() {
            G::compute(&mut consumer, self, self.work_tile(round));
            round += 1;
        }
    }
}

#[device]
impl<G: Gradients> Backward<G> {
    /// Returns the work tile of a round.
    fn work_tile(self, round: u32) -> WorkTile {
        let i = work_index(round);
        if G::MASKED {
            self.scheduler.work_tile_in_order(i, self.order, G::LOW_FIRST)
        } else {
            self.scheduler.work_tile(i, G::LOW_FIRST)
        }
    }

    /// Returns K and V of a key-value head.
    pub fn keys_and_values(self, kv_head: u32) -> [PanelSource; 2] {
        [self.sizes.key(kv_head), self.sizes.value(kv_head)]
            .map(|index| PanelSource { map: self.qkv, column: index * H::HS })
    }

    /// Returns Q and dout of a query head.
    pub fn queries_and_dout(self, h: u32) -> [PanelSource; 2] {
        [self.qkv, self.dout].map(|map| PanelSource { map, column: h * H::HS })
    }

    /// Starts the loads of both consumers' resident panels.
    pub fn load_resident(self, sources: [PanelSource; 2], tile: WorkTile) {
        self.shared.resident.load_work_tile(sources, tile, self.shared.resident_barriers.full.at(0));
    }

    /// Starts the loads of rows `row` .. of the streamed matrices into `stage`.
    pub fn load_streamed(self, sources: [PanelSource; 2], tile: WorkTile, row: u32, stage: u32) {
        let full = self.shared.streamed_barriers.full.at(stage);
        full.arrive_expect_tx(PanelPair::<H>::BYTES);
        self.shared.streamed.after(stage).load(sources, row, tile.b, full);
    }

    /// Stores the gradient of a consumer's rows of head `index` of qkv, multiplied by `scale`.
    pub fn store_gradient(
        self,
        tile: WorkTile,
        index: u32,
        consumer: u32,
        gradient: &mut <H as Head>::OutputAccumulators,
        scale: f32,
    ) {
        let rows = self.sizes.packed_rows(self.dqkv, tile, index, consumer);
        store_rows::<H>(rows, gradient, [scale; 2], self.shared.output.after(consumer));
    }
}
