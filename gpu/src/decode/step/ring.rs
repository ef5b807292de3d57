//! The ring of stages in shared memory, and the producer warps, which fill it with the weights, keys and values of all operations.
//!
//! A stage holds a piece of up to eight rows of weight, or keys and values of consecutive positions. It is full when its bytes have been
//! copied, and empty when each consumer warp has released it.

use super::kernel::Step;
use super::plan::{Linear, PIECE, PITCH, PRODUCERS, STAGE, TILE, Tasks, halves};
use super::table::{ATTENTION, Entry, Field, MATVEC};
use cuda_std::hopper::{MBarrier, PipelineState};
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

/// Loads the stages of all operations. Every lane of the producer warps calls it. `producer` is the number of the warp among them.
#[inline(always)]
pub fn produce<T: TensorCore, const FP8: bool, const GROUP: usize>(step: &Step<T>, producer: u32) {
    let mut state = PipelineState::producer(step.sizes.stages);
    let mut next = Entry::load(step.table, 0);
    let mut i = 0;
    while i < step.sizes.operations {
        let entry = next;
        i += 1;
        next = Entry::load(step.table, i.min(step.sizes.operations - 1));
        let kind = entry.scalar(Field::Kind);
        if kind == MATVEC as u32 {
            load_weights::<T, FP8>(step, entry, &mut state, producer);
        } else if kind == ATTENTION as u32 {
            load_cache::<T, GROUP>(step, entry, &mut state, producer);
        }
    }
}

/// Waits until a stage is empty, and announces the bytes that the warp will copy to it. Returns the stage and its full barrier.
#[inline(always)]
fn acquire<T: TensorCore>(step: &Step<T>, state: &mut PipelineState, elements: u32) -> (SharedArray<T>, MBarrier) {
    let (stage, full) = step.storage.barriers.acquire(state);
    if warp::lane() == 0 {
        full.arrive_expect_tx(elements * size_of::<T>() as u32);
    }
    // No copy starts before its bytes are announced.
    warp::sync();
    (step.storage.ring.stage(stage), full)
}

/// Loads the block's rows of weight in the order of tiles, and within a tile in the order of channels. Two FP8 numbers are copied as one
/// element.
#[inline(always)]
fn load_weights<T: TensorCore, const FP8: bool>(
    step: &Step<T>,
    entry: Entry,
    state: &mut PipelineState,
    producer: u32,
) {
    let linear = Linear::of_block(entry, step.block);
    let weight = step.elements.reader().skip(entry.index(Field::Weight));
    // Each weight is read once per step.
    let policy = CachePolicy::evict_first();
    // A warp copies every fourth row: a lane copies a row.
    let (i, packets) = (producer + PRODUCERS * warp::lane(), linear.weight_packets::<T, FP8>());
    let mut tile = 0;
    while tile < linear.tiles() {
        let (is_row, row) = (i < TILE && linear.tile_place(tile, i) == i, linear.tile_row(tile, i) as usize);
        let rows = warp::ballot(is_row).count_ones();
        let mut first = 0;
        while first < packets {
            let elements = (packets - first).min(PIECE) * T::PACKET as u32;
            let (stage, full) = acquire(step, state, rows * elements);
            if is_row {
                let from = row * (linear.channels / halves::<FP8>()) as usize + first as usize * T::PACKET;
                stage.load_bulk_with(i as usize * Ring::<T>::PITCH, elements, weight, from, full, policy);
            }
            first += PIECE;
        }
        tile += 1;
    }
}

/// Loads the keys and values of the block's tasks at positions that earlier launches have stored. Two warps copy the keys and values before
/// the end of the cache's ring, and two those after it.
#[inline(always)]
fn load_cache<T: TensorCore, const GROUP: usize>(
    step: &Step<T>,
    entry: Entry,
    state: &mut PipelineState,
    producer: u32,
) {
    let heads = step.heads::<GROUP>(entry);
    let head_size = heads.head_size;
    let cache = entry.index(if producer.is_multiple_of(2) { Field::Keys } else { Field::Values });
    let mut tasks = Tasks::new(step.block);
    while let Some(task) = tasks.next::<T>(heads, step.positions, step.sizes.rows, step.blocks) {
        let row = (task.slot * heads.kv_heads + task.kv) as usize * heads.capacity as usize;
        let mut start = task.start;
        while start < task.end {
            let count = (task.end - start).min(heads.stage_positions::<T>());
            let place = task.place(start, heads);
            let before_end = count.min(heads.capacity - place);
            let (from, to, own) =
                if producer < 2 { (place, 0, before_end) } else { (0, before_end, count - before_end) };
            let (stage, full) = acquire(step, state, own * head_size);
            if warp::lane() == 0 && own > 0 {
                let to = (to * head_size) as usize + producer as usize % 2 * Ring::<T>::VALUES;
                let from = cache + (row + from as usize) * head_size as usize;
                stage.load_bulk(to, own * head_size, step.elements.reader(), from, full);
            }
            start += count;
        }
    }
}
