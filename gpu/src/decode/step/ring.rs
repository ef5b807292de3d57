//! The ring of stages in shared memory, and the producer warps, which fill it with the weights, keys and values of all operations.
//!
//! A stage holds a piece of up to eight rows of weight, or keys and values of consecutive positions. Stages are numbered over all operations.
//! Stage n is filled by producer warp n mod 4 and used by consumer warp n mod 8, so that warps do not wait for each other. The ring has a
//! multiple of eight stages, so that each of its slots has one producer and one consumer, which synchronize through two barriers.

use super::kernel::Step;
use super::plan::{CONSUMERS, Linear, PITCH, PRODUCERS, STAGE, TILE, Tasks, halves};
use super::table::{ATTENTION, Entry, Field, MATVEC};
use cuda_std::hopper::{MBarrier, PipelineBarriers, PipelineState};
use cuda_std::mma::TensorCore;
use cuda_std::{CachePolicy, Element, SharedArray, device, warp};

/// The stages: an array of elements.
#[derive(Clone, Copy)]
pub struct Ring<T>(pub SharedArray<T>);

#[device]
impl<T: Element> Ring<T> {
    /// Returns a stage.
    pub fn stage(self, stage: u32) -> SharedArray<T> {
        self.0.skip(stage as usize * Self::ELEMENTS)
    }

    /// Elements of a stage.
    pub const ELEMENTS: usize = STAGE / size_of::<T>();
    /// Elements between two rows of weight in a stage.
    pub const PITCH: usize = PITCH / size_of::<T>();
    /// The first element of the values in a stage with keys and values.
    pub const VALUES: usize = Self::ELEMENTS / 2;
}

/// A warp's view of the sequence of stages: every WARPS-th is its own.
#[derive(Clone, Copy)]
pub struct Cursor<const WARPS: u32> {
    /// The slot of the warp's next own stage, counted among its slots.
    state: PipelineState,
    warp: u32,
    /// The number of the next stage of any warp, modulo WARPS.
    next: u32,
}

/// The position of a producer warp.
pub type Producer = Cursor<PRODUCERS>;
/// The position of a consumer warp.
pub type Consumer = Cursor<CONSUMERS>;

#[device]
impl<const WARPS: u32> Cursor<WARPS> {
    /// Returns the start of producer warp `warp`, for a ring of `stages` stages.
    pub const fn producer(stages: u32, warp: u32) -> Self {
        Self { state: PipelineState::producer(stages / WARPS), warp, next: 0 }
    }

    /// Returns the start of consumer warp `warp`.
    pub const fn consumer(stages: u32, warp: u32) -> Self {
        Self { state: PipelineState::consumer(stages / WARPS), warp, next: 0 }
    }

    /// Returns how many stages of other warps are before the warp's next own one.
    pub const fn others(self) -> u32 {
        self.warp.wrapping_sub(self.next) % WARPS
    }

    /// Passes `count` stages, the warp's own among them, which it has visited.
    pub const fn pass(&mut self, count: u32) {
        self.next = (self.next + count) % WARPS;
    }

    /// Waits until the warp's next own stage is full.
    pub fn wait_full(self, barriers: PipelineBarriers) {
        barriers.full.at(self.stage()).wait(self.state.parity());
    }

    /// Waits until the warp's next own stage is empty.
    pub fn wait_empty(self, barriers: PipelineBarriers) {
        barriers.empty.at(self.stage()).wait(self.state.parity());
    }

    /// Returns the slot in the ring of the warp's next own stage.
    pub const fn stage(self) -> u32 {
        self.state.stage() * WARPS + self.warp
    }

    /// Advances to the warp's own stage after this one. Returns this one.
    pub const fn advance(&mut self) -> u32 {
        let stage = self.stage();
        self.state.advance();
        stage
    }
}

/// Loads the stages of all operations. Every lane of the producer warps calls it. `producer` is the number of the warp among them.
#[inline(always)]
pub fn produce<T: TensorCore, const FP8: bool, const GROUP: usize>(step: &Step<T>, producer: u32) {
    let mut cursor = Producer::producer(step.sizes.stages, producer);
    let mut next = Entry::load(step.table, 0);
    let mut i = 0;
    while i < step.sizes.operations {
        let entry = next;
        i += 1;
        next = Entry::load(step.table, i.min(step.sizes.operations - 1));
        let kind = entry.scalar(Field::Kind);
        if kind == MATVEC as u32 {
            load_weights::<T, FP8>(step, entry, &mut cursor);
        } else if kind == ATTENTION as u32 {
            load_cache::<T, GROUP>(step, entry, &mut cursor);
        }
    }
}

/// Waits until the warp's next stage is empty, and announces the bytes that it will copy to it. Returns the stage and its full barrier.
#[inline(always)]
fn acquire<T: TensorCore>(step: &Step<T>, cursor: &mut Producer, elements: u32) -> (SharedArray<T>, MBarrier) {
    let barriers = step.storage.barriers;
    cursor.wait_empty(barriers);
    let stage = cursor.advance();
    let full = barriers.full.at(stage);
    if warp::lane() == 0 {
        full.arrive_expect_tx(elements * size_of::<T>() as u32);
    }
    // No copy starts before its bytes are announced.
    warp::sync();
    (step.storage.ring.stage(stage), full)
}

/// Loads the warp's stages of the block's rows of weight, in the order of tiles, and within a tile in the order of channels. Two FP8 numbers
/// are copied as one element.
#[inline(always)]
fn load_weights<T: TensorCore, const FP8: bool>(step: &Step<T>, entry: Entry, cursor: &mut Producer) {
    let linear = Linear::of_block(entry, step.block);
    let weight = step.elements.reader().skip(entry.index(Field::Weight));
    // Each weight is read once per step.
    let policy = CachePolicy::evict_first();
    let (packets, piece, pieces) =
        (linear.weight_packets::<T, FP8>(), linear.piece::<T, FP8>(), linear.pieces::<T, FP8>());
    // A lane copies a row.
    let i = warp::lane();
    let (mut tile, mut place, tiles) = (0, cursor.others(), linear.tiles());
    cursor.pass(tiles * pieces);
    loop {
        while place >= pieces && tile < tiles {
            place -= pieces;
            tile += 1;
        }
        if tile >= tiles {
            return;
        }
        let first = place * piece;
        let is_row = i < TILE && linear.tile_place(tile, i) == i;
        let rows = warp::ballot(is_row).count_ones();
        let elements = (packets - first).min(piece) * T::PACKET as u32;
        let (stage, full) = acquire(step, cursor, rows * elements);
        if is_row {
            let row = linear.tile_row(tile, i) as usize;
            let from = row * (linear.channels / halves::<FP8>()) as usize + first as usize * T::PACKET;
            stage.load_bulk_with(i as usize * Ring::<T>::PITCH, elements, weight, from, full, policy);
        }
        place += PRODUCERS;
    }
}

/// Loads the warp's stages of keys and values of the block's tasks, at positions that earlier launches have stored. Two lanes copy the keys and
/// values before the end of the cache's ring, and two those after it.
#[inline(always)]
fn load_cache<T: TensorCore, const GROUP: usize>(step: &Step<T>, entry: Entry, cursor: &mut Producer) {
    let heads = step.heads::<GROUP>(entry);
    let (head_size, lane, positions) = (heads.head_size, warp::lane(), heads.positions);
    let (keys, values) = (entry.index(Field::Keys), entry.index(Field::Values));
    let cache = if lane.is_multiple_of(2) { keys } else { values };
    let mut tasks = Tasks::new(step.block);
    while let Some(task) = tasks.next(heads, step.positions, step.sizes.rows, step.blocks) {
        let row = (task.slot * heads.kv_heads + task.kv) as usize * heads.capacity as usize;
        let mut start = task.start + cursor.others() * positions;
        cursor.pass(task.stages(heads));
        while start < task.end {
            let count = (task.end - start).min(positions);
            let place = task.place(start, heads);
            let before_end = count.min(heads.capacity - place);
            let (from, to, own) = if lane < 2 { (place, 0, before_end) } else { (0, before_end, count - before_end) };
            let (stage, full) = acquire(step, cursor, 2 * count * head_size);
            if lane < 4 && own > 0 {
                let to = (to * head_size) as usize + lane as usize % 2 * Ring::<T>::VALUES;
                let from = cache + (row + from as usize) * head_size as usize;
                stage.load_bulk(to, own * head_size, step.elements.reader(), from, full);
            }
            start += PRODUCERS * positions;
        }
    }
}
