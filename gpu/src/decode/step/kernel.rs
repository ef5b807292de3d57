//! The kernel, and the layout of its shared memory.

use super::attention::{self, Scratch};
use super::matvec::{self, MAX_TILES};
use super::plan::{self, CONSUMERS, Heads, Positions, TILE};
use super::ring::{self, Consumer, Ring};
use super::table::{ATTENTION, EMBED, Entry, Field, INPUT, NONE};
use super::words::Words;
use crate::decode::{POSITION, TOKEN, WORDS};
use cuda_std::hopper::{self, MBarrier, PipelineBarriers};
use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, SharedArray, device, kernel, thread, warp};

/// Consumer threads of a block.
pub const THREADS: u32 = CONSUMERS * warp::LANES;
/// The number of stages is a multiple of this one.
pub const MIN_STAGES: u32 = CONSUMERS;
/// Maximum number of stages.
pub const MAX_STAGES: u32 = 32;

/// The scalars of [`decode_step`]. Passed by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Sizes {
    /// R, the number of slots: 1 to 16.
    pub rows: u32,
    /// Entries of the table.
    pub operations: u32,
    /// Stages of the ring.
    pub stages: u32,
    /// Most channels of an input of a linear layer.
    pub channels: u32,
    /// Most channels of a normalized input.
    pub norm_channels: u32,
    /// Largest HS.
    pub head_size: u32,
}

/// Shared memory of a block.
#[derive(Clone, Copy)]
pub struct Storage<T> {
    /// The stages.
    pub ring: Ring<T>,
    /// Barriers of the stages.
    pub barriers: PipelineBarriers,
    /// (R, [`Storage::pitch`]): the input of a linear layer.
    pub inputs: SharedArray<T>,
    /// (R, [`Storage::pitch`]): the normalized input.
    pub normed: SharedArray<T>,
    /// (R, 2): mean and reciprocal standard deviation of a row of the input.
    pub statistics: SharedArray<f32>,
    /// Weight of the norm.
    pub norm_weight: SharedArray<T>,
    /// Bias of the norm.
    pub norm_bias: SharedArray<T>,
    /// (2, [`MAX_TILES`], 8, R, 8): sums over every eighth piece of the channels. The two halves alternate.
    pub sums: SharedArray<f32>,
    /// Memory of attention.
    pub attention: Scratch<T>,
}

impl<T: Element> Storage<T> {
    /// Takes the storage from `layout`, for tasks of up to `group` query heads.
    #[inline(always)]
    pub fn new(layout: &mut Layout, sizes: Sizes, group: usize) -> Self {
        let [stages, rows, norm_channels] = [sizes.stages, sizes.rows, sizes.norm_channels].map(|size| size as usize);
        Self {
            ring: Ring(layout.array(stages * Ring::<T>::ELEMENTS)),
            barriers: PipelineBarriers { full: layout.mbarriers(stages), empty: layout.mbarriers(stages) },
            inputs: layout.array(rows * Self::pitch(sizes.channels)),
            normed: layout.array(rows * Self::pitch(sizes.norm_channels)),
            statistics: layout.array(2 * rows),
            norm_weight: layout.array(norm_channels),
            norm_bias: layout.array(norm_channels),
            sums: layout.array((2 * MAX_TILES * CONSUMERS * TILE) as usize * rows),
            attention: Scratch::new(layout, group, sizes.head_size as usize),
        }
    }

    /// Returns the elements between two rows of up to `channels` channels. Like rows in a stage, they start 64 bytes apart, modulo 128.
    #[inline(always)]
    pub const fn pitch(channels: u32) -> usize {
        let bytes = (channels as usize * size_of::<T>()).next_multiple_of(128) + 64;
        bytes / size_of::<T>()
    }
}

/// The values that all operations of a step use.
#[derive(Clone, Copy)]
pub struct Step<T> {
    /// Shared memory.
    pub storage: Storage<T>,
    /// Scratch memory.
    pub words: Words,
    /// The table.
    pub table: Global<u64>,
    /// The elements of global memory, from address 0 on.
    pub elements: GlobalMut<T>,
    /// The f32 of global memory, from address 0 on.
    pub floats: Global<f32>,
    /// (R, 8)
    pub slots: Global<i32>,
    /// The positions of the slots.
    pub positions: Positions,
    /// The scalars of the kernel.
    pub sizes: Sizes,
    /// The number of this block.
    pub block: u32,
    /// The number of blocks.
    pub blocks: u32,
}

#[device]
impl<T: TensorCore> Step<T> {
    /// Returns the sizes of an attention whose tasks have up to GROUP query heads.
    pub fn heads<const GROUP: usize>(&self, entry: Entry) -> Heads {
        Heads::new(entry, GROUP as u32)
    }

    /// Returns the output of an operation.
    pub fn output(&self, entry: Entry) -> Output<T> {
        let (place, out) = (entry.scalar(Field::OutWords), entry.index(Field::Out));
        Output { words: self.words, is_kept: place != NONE, first: place as usize, out: self.elements.skip(out) }
    }
}

/// The output of an operation: words of scratch memory, or an array that no operation reads.
#[derive(Clone, Copy)]
pub struct Output<T> {
    words: Words,
    is_kept: bool,
    first: usize,
    out: GlobalMut<T>,
}

#[device]
impl<T: TensorCore> Output<T> {
    /// Stores values `i` and `i` + 1, rounded to T. `i` is even.
    pub fn set_two(self, i: usize, values: [f32; 2]) {
        if self.is_kept {
            self.words.store_two::<T>(self.first, i, values);
        } else {
            self.out.set(i, T::from_f32(values[0]));
            self.out.set(i + 1, T::from_f32(values[1]));
        }
    }
}

/// Waits for the consumer threads of the block.
#[inline(always)]
#[track_caller]
pub fn sync_consumers() {
    thread::sync_named(1, THREADS);
}

/// Computes the operations of `table`. See the invariants of the [module](super).
///
/// `scratch` holds the words of [`Program::scratch`](super::launch::Program::scratch). `elements` and `floats` start at address 0. `slots`
/// (R, 8) does not change during the launch. GROUP is the number of query heads of a task of attention. With FP8, the weights of all linear
/// layers are in FP8.
///
/// Grid: the number of SMs. Shared memory: [`Storage`].
#[kernel(
    threads = 384,
    blocks_per_sm = 1,
    requires = "wgmma",
    instances([bf16 = <cuda_std::bf16, false>, fp8 = <cuda_std::bf16, true>, f32 = <f32, false>] * [g1 = 1, g4 = 4]),
    select(FP8: bool, GROUP: usize)
)]
pub fn decode_step<T: TensorCore, const FP8: bool, const GROUP: usize>(
    scratch: GlobalMut<u64>,
    table: Global<u64>,
    elements: GlobalMut<T>,
    floats: Global<f32>,
    slots: Global<i32>,
    sizes: Sizes,
) {
    let (warp, blocks) = (warp::index(), thread::grid_dim_x());
    let step = Step {
        storage: Storage::<T>::new(&mut Layout::new(), sizes, GROUP),
        words: Words::new(scratch, blocks),
        table,
        elements,
        floats,
        slots,
        positions: Positions::load(slots, sizes.rows),
        sizes,
        block: thread::block_idx_x(),
        blocks,
    };
    if thread::thread_idx_x() == 0 {
        step.storage.barriers.init(sizes.stages, 1, warp::LANES);
        MBarrier::fence_init();
        hopper::fence_async_proxy();
    }
    // All threads have read the counter of launches before this block adds to it.
    thread::sync_threads();
    if warp >= CONSUMERS {
        ring::produce::<T, FP8, GROUP>(&step, warp - CONSUMERS);
    } else {
        consume::<T, FP8, GROUP>(&step);
        if thread::thread_idx_x() == 0 {
            step.words.end_block();
        }
    }
}

/// Computes the block's part of all operations.
#[inline(always)]
fn consume<T: TensorCore, const FP8: bool, const GROUP: usize>(step: &Step<T>) {
    let mut cursor = Consumer::consumer(step.sizes.stages, warp::index());
    let mut half = 0u32;
    // The next entry is loaded while an operation runs.
    let mut next = Entry::load(step.table, 0);
    let mut i = 0;
    while i < step.sizes.operations {
        let entry = next;
        i += 1;
        next = Entry::load(step.table, i.min(step.sizes.operations - 1));
        let kind = entry.scalar(Field::Kind);
        if kind == EMBED as u32 || kind == INPUT as u32 {
            embed(step, entry, kind == EMBED as u32);
        } else if kind == ATTENTION as u32 {
            attention::compute::<T, GROUP>(step, entry, &mut cursor);
        } else {
            matvec::compute::<T, FP8>(step, entry, &mut cursor, &mut half);
        }
    }
}

/// Computes out (R, C) = `wte[token] + wpe[position]`, or reads the rows of an array. Pairs of columns are divided between the blocks, and
/// (row, pair) between threads.
#[inline(always)]
fn embed<T: TensorCore>(step: &Step<T>, entry: Entry, has_tokens: bool) {
    let columns = entry.scalar(Field::Columns);
    let [first, count] = plan::part(entry, step.block);
    let (wte, wpe) = (entry.index(Field::Weight), entry.index(Field::Bias));
    let (columns, pairs, output) = (columns as usize, (count / 2).max(1), step.output(entry));
    let mut i = thread::thread_idx_x();
    while count > 0 && i < step.sizes.rows * pairs {
        let (row, column) = ((i / pairs) as usize, (first + 2 * (i % pairs)) as usize);
        let token = if has_tokens { step.slots.at(row * WORDS + TOKEN) as usize } else { row };
        let position = step.slots.at(row * WORDS + POSITION).max(0) as usize;
        let mut values = [0.0; 2];
        for k in 0..2 {
            values[k] = step.elements.at(wte + token * columns + column + k).to_f32();
            if wpe != 0 {
                values[k] += step.elements.at(wpe + position * columns + column + k).to_f32();
            }
        }
        output.set_two(row * columns + column, values);
        i += THREADS;
    }
}
