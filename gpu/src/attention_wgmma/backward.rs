//! The structure of the backward pass for HS = 64: two kernels, [`super::dkdv`] and [`super::dq`].
//!
//! A consumer owns 64 rows of two matrices, its resident panels, and streams over panels of the other two. For dK and
//! dV, K and V of a key-value head are resident, Q and dout of its query heads streamed. For dQ, Q and dout of a query
//! head are resident, K and V of its key-value head streamed.

use super::epilogue::{OutputRows, store_rows};
use super::panel::Panel;
use super::pipeline::PipelineBarriers;
use super::scheduler::{TileScheduler, WorkTile};
use super::sizes::Sizes;
use super::{CONSUMERS, Head, Head64, ROWS, TILE};
use cuda_std::hopper::{MBarrier, TensorMap};
use cuda_std::shared::{Layout, SharedArray};
use cuda_std::{Global, GlobalMut, bf16};

type H = Head64;

/// Pipeline stages of the streamed panels.
pub const STAGES: u32 = 4;

/// Panels of two matrices that are loaded and released together: Q and dout, or K and V.
#[derive(Clone, Copy)]
pub struct PanelPair<H> {
    pub first: Panel<H>,
    pub second: Panel<H>,
}

impl<H: Head> PanelPair<H> {
    /// The size of a pair in bytes.
    pub const BYTES: u32 = 2 * Panel::<H>::BYTES;

    /// Takes `count` consecutive pairs from `layout` and returns the first.
    #[inline(always)]
    pub fn take(layout: &mut Layout, count: u32) -> Self {
        Self { first: Panel::take(layout, count), second: Panel::take(layout, count) }
    }

    /// Returns the pair that is `count` pairs after this one.
    #[inline(always)]
    pub fn after(self, count: u32) -> Self {
        Self { first: self.first.after(count), second: self.second.after(count) }
    }

    /// Starts the load of rows `y` .. of sequence `b`.
    #[inline(always)]
    pub fn load(self, [first, second]: [PanelSource; 2], y: u32, b: u32, full: MBarrier) {
        self.first.load(first.map, first.column, y, b, full);
        self.second.load(second.map, second.column, y, b, full);
    }
}

/// The columns of a head in a tensor map.
#[derive(Clone, Copy)]
pub struct PanelSource {
    map: Global<TensorMap>,
    column: u32,
}

impl PanelSource {
    /// Returns the HS columns of `map` from `column` on.
    #[inline(always)]
    pub fn new(map: Global<TensorMap>, column: u32) -> Self {
        Self { map, column }
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
    /// Takes the storage from `layout`, with `statistics` elements of statistics for each stage.
    ///
    /// Always inlined: as a function that both kernels call, it made dK and dV for HS = 64 10 % slower on an H100.
    #[inline(always)]
    pub fn new(layout: &mut Layout, statistics: usize) -> Self {
        Self {
            resident: PanelPair::take(layout, CONSUMERS),
            streamed: PanelPair::take(layout, STAGES),
            output: Panel::take(layout, CONSUMERS),
            statistics: layout.array(statistics * STAGES as usize),
            resident_barriers: PipelineBarriers::new(layout, 1),
            streamed_barriers: PipelineBarriers::new(layout, STAGES),
        }
    }

    /// Returns the dynamic shared memory of a block, in bytes.
    #[cfg(not(target_arch = "nvptx64"))]
    pub fn bytes(statistics: usize) -> usize {
        let mut layout = Layout::new();
        Self::new(&mut layout, statistics);
        layout.bytes()
    }
}

/// A backward kernel's arguments and shared memory.
#[derive(Clone, Copy)]
pub struct Backward {
    pub shared: SharedStorage,
    pub sizes: Sizes<H>,
    pub scheduler: TileScheduler,
    pub dqkv: GlobalMut<bf16>,
    pub qkv: Global<TensorMap>,
    pub dout: Global<TensorMap>,
    pub lse: Global<f32>,
    pub d: Global<f32>,
}

impl Backward {
    /// Prefetches the tensor maps and initializes the barriers. A stage of streamed panels is full after `arrivals` and
    /// empty after `releases`.
    #[inline(always)]
    pub fn init(self, arrivals: u32, releases: u32) {
        self.qkv.prefetch();
        self.dout.prefetch();
        self.shared.resident_barriers.init(1, 1, CONSUMERS);
        self.shared.streamed_barriers.init(STAGES, arrivals, releases);
    }

    /// Returns K and V of a key-value head.
    #[inline(always)]
    pub fn keys_and_values(self, kv_head: u32) -> [PanelSource; 2] {
        [self.sizes.key(kv_head), self.sizes.value(kv_head)].map(|index| PanelSource::new(self.qkv, index * H::HS))
    }

    /// Returns Q and dout of a query head.
    #[inline(always)]
    pub fn queries_and_dout(self, h: u32) -> [PanelSource; 2] {
        [self.qkv, self.dout].map(|map| PanelSource::new(map, h * H::HS))
    }

    /// Starts the loads of both consumers' resident panels.
    #[inline(always)]
    pub fn load_resident(self, sources: [PanelSource; 2], tile: WorkTile) {
        let full = self.shared.resident_barriers.full.at(0);
        full.arrive_expect_tx(CONSUMERS * PanelPair::<H>::BYTES);
        for i in 0..CONSUMERS {
            self.shared.resident.after(i).load(sources, tile.tile * TILE + i * ROWS, tile.b, full);
        }
    }

    /// Starts the loads of rows `row` .. of the streamed matrices into `stage`.
    #[inline(always)]
    pub fn load_streamed(self, sources: [PanelSource; 2], tile: WorkTile, row: u32, stage: u32) {
        let full = self.shared.streamed_barriers.full.at(stage);
        full.arrive_expect_tx(PanelPair::<H>::BYTES);
        self.shared.streamed.after(stage).load(sources, row, tile.b, full);
    }

    /// Stores the gradient of a consumer's rows of head `index` of qkv, multiplied by `scale`.
    #[inline(always)]
    pub fn store_gradient(
        self,
        tile: WorkTile,
        index: u32,
        consumer: u32,
        gradient: &mut <H as Head>::OutputAccumulators,
        scale: f32,
    ) {
        let row = tile.tile * TILE + consumer * ROWS;
        let rows = OutputRows {
            out: self.dqkv,
            first: self.sizes.packed_row(tile.b, index, row),
            stride: self.sizes.packed_stride(),
            rows: self.sizes.t.saturating_sub(row),
        };
        store_rows::<H>(rows, gradient, [scale; 2], self.shared.output.after(consumer));
    }
}
