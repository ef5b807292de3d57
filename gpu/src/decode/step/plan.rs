//! The part of an operation that a block computes, and its stages in the ring. Producer and consumers use the same functions.

use super::table::{Entry, Field};
use crate::activation::is_gated;
use crate::decode::{POSITION, WORDS};
use cuda_std::{Element, Global, device, warp};

/// Maximum number of positions of a stage, a multiple of 8.
pub const MAX_POSITIONS: u32 = 32;
/// Minimum number of positions of a split, four stages for each consumer warp. With fewer, blocks would spend more time on the combination of
/// partial results.
const MIN_SPLIT: u32 = 4 * MAX_POSITIONS * CONSUMERS;
/// Consumer warps of a block.
pub const CONSUMERS: u32 = 8;
/// Producer warps of a block. Lanes of a warp start copies one after the other, so one warp would be slower than memory.
pub const PRODUCERS: u32 = 4;
/// Rows of weight in a stage.
pub const TILE: u32 = 8;
/// Maximum number of packets of a row in a stage.
pub const PIECE: u32 = 64;
/// Bytes between two rows in a stage. Rows start 64 bytes apart, modulo 128, so that eight lanes read two rows without bank conflicts.
pub const PITCH: usize = PIECE as usize * 16 + 64;
/// Bytes of a stage.
pub const STAGE: usize = TILE as usize * PITCH;

/// A linear layer and the columns of its output that a block computes.
#[derive(Clone, Copy)]
pub struct Linear {
    /// C.
    pub channels: u32,
    /// Columns of the output.
    pub columns: u32,
    /// Whether the weight has rows of up, then of gate.
    pub is_gated: bool,
    /// First column of the block. It is even.
    pub first: u32,
    /// Number of columns of the block. It is even.
    pub count: u32,
}

#[device]
impl Linear {
    /// Returns the part of block `block`: pairs of columns are divided evenly.
    pub fn of_block(entry: Entry, block: u32) -> Self {
        let columns = entry.scalar(Field::Columns);
        let [first, count] = part(entry, block);
        let (channels, is_gated) = (entry.scalar(Field::Channels), is_gated(entry.scalar(Field::Activation)));
        Self { channels, columns, is_gated, first, count }
    }

    /// Returns log2 of the number of output columns in a tile, which has eight rows of weight.
    pub const fn tile_shift(self) -> u32 {
        if self.is_gated { TILE.trailing_zeros() - 1 } else { TILE.trailing_zeros() }
    }

    /// Returns the number of tiles.
    pub const fn tiles(self) -> u32 {
        (self.count + (1 << self.tile_shift()) - 1) >> self.tile_shift()
    }

    /// Returns the number of output columns in tile `tile`: fewer in the last tile of the block.
    pub fn tile_columns(self, tile: u32) -> u32 {
        (self.count - (tile << self.tile_shift())).min(1 << self.tile_shift())
    }

    /// Returns the place in a stage of row `i` of tile `tile`, where a row past the last of up or gate repeats it.
    pub fn tile_place(self, tile: u32, i: u32) -> u32 {
        let (gate, column) = (i >> self.tile_shift(), i & ((1 << self.tile_shift()) - 1));
        (gate << self.tile_shift()) + column.min(self.tile_columns(tile) - 1)
    }

    /// Returns the packets of a row of the input.
    pub const fn packets<T: Element>(self) -> u32 {
        self.channels / T::PACKET as u32
    }

    /// Returns the packets of a row of weight: half as many if it is in FP8.
    pub const fn weight_packets<T: Element, const FP8: bool>(self) -> u32 {
        self.packets::<T>() / halves::<FP8>()
    }

    /// Returns the number of pieces into which stages divide the rows of weight.
    pub const fn pieces<T: Element, const FP8: bool>(self) -> u32 {
        self.weight_packets::<T, FP8>().div_ceil(PIECE)
    }

    /// Returns the packets of a piece, a multiple of four. The last piece may have fewer.
    pub fn piece<T: Element, const FP8: bool>(self) -> u32 {
        self.weight_packets::<T, FP8>().div_ceil(self.pieces::<T, FP8>().max(1)).next_multiple_of(4)
    }

    /// Returns the row of weight of column `column` of the block, for up (0) or gate (1).
    pub const fn row(self, column: u32, gate: u32) -> u32 {
        self.first + column + gate * self.columns
    }

    /// Returns the row of weight at place `i` of a stage of tile `tile`.
    pub const fn tile_row(self, tile: u32, i: u32) -> u32 {
        let (gate, column) = (i >> self.tile_shift(), i & ((1 << self.tile_shift()) - 1));
        self.row((tile << self.tile_shift()) + column, gate)
    }
}

/// Returns the packets of the input to which a packet of weight belongs.
pub const fn halves<const FP8: bool>() -> u32 {
    if FP8 { 2 } else { 1 }
}

/// Returns the first column of block `block`, and the number of its columns. Pairs of columns are divided evenly, by the host.
#[inline(always)]
pub fn part(entry: Entry, block: u32) -> [u32; 2] {
    let [share, rest] = [Field::Share, Field::Rest].map(|field| entry.scalar(field));
    [2 * (share * block + block.min(rest)), 2 * if block < rest { share + 1 } else { share }]
}

/// The positions of the slots, one in each lane of a warp.
#[derive(Clone, Copy)]
pub struct Positions(i32);

#[device]
impl Positions {
    /// Reads the positions of the first `rows` slots.
    pub fn load(slots: Global<i32>, rows: u32) -> Self {
        let lane = warp::lane().min(rows - 1) as usize;
        Self(slots.at(lane * WORDS + POSITION))
    }

    /// Returns the position of a slot: negative if it is idle. Every lane of the warp must call it.
    pub fn of(self, slot: u32) -> i32 {
        warp::shuffle(self.0, slot)
    }
}

/// Returns quotient and remainder. Small numerators and powers of two need no division, which would take more than a hundred cycles.
#[inline(always)]
pub fn divide(n: u32, d: u32) -> (u32, u32) {
    if n < d {
        (0, n)
    } else if d.is_power_of_two() {
        (n >> d.trailing_zeros(), n & (d - 1))
    } else {
        (n / d.max(1), n % d.max(1))
    }
}

/// The sizes of an attention.
#[derive(Clone, Copy)]
pub struct Heads {
    /// NH.
    pub heads: u32,
    /// KV.
    pub kv_heads: u32,
    /// NH / KV.
    pub group: u32,
    /// HS.
    pub head_size: u32,
    /// Positions of the ring of the cache.
    pub capacity: u32,
    /// Maximum number of splits.
    pub splits: u32,
    /// Positions of a stage.
    pub positions: u32,
    /// Maximum number of query heads of a task.
    per_task: u32,
    /// Tasks for the query heads of a key-value head.
    chunks: u32,
}

/// Returns the positions of a stage for heads of HS elements of T.
#[cfg(not(target_arch = "nvptx64"))]
pub fn stage_positions<T: Element>(head_size: u32) -> u32 {
    (STAGE as u32 / 2 / (head_size * size_of::<T>() as u32) / 8 * 8).min(MAX_POSITIONS)
}

#[device]
impl Heads {
    /// Returns the sizes of an operation whose tasks have up to `per_task` query heads.
    pub fn new(entry: Entry, per_task: u32) -> Self {
        let [group, kv_heads] = [Field::Group, Field::KvHeads].map(|field| entry.scalar(field));
        Self {
            heads: group * kv_heads,
            kv_heads,
            group,
            head_size: entry.scalar(Field::HeadSize),
            capacity: entry.scalar(Field::Capacity).max(1),
            splits: entry.scalar(Field::Splits).max(1),
            positions: entry.scalar(Field::Positions).max(1),
            per_task,
            chunks: group.div_ceil(per_task).max(1),
        }
    }

    /// Returns log2 of the lanes that hold a head.
    pub const fn lane_shift<T: Element>(self) -> u32 {
        self.head_size.div_ceil(T::PACKET as u32).next_power_of_two().trailing_zeros()
    }

    /// Returns the positions of a split of `len` positions, and the number of splits.
    fn splits_of(self, len: u32) -> (u32, u32) {
        if self.splits == 1 || len <= MIN_SPLIT {
            return (len, 1);
        }
        let per_split = len.div_ceil(self.splits).max(MIN_SPLIT).next_multiple_of(self.positions);
        (per_split, len.div_ceil(per_split.max(1)))
    }
}

/// Query heads of one key-value head over one split of a slot's positions.
#[derive(Clone, Copy)]
pub struct Task {
    /// The slot.
    pub slot: u32,
    /// Its position, or a negative number if it is idle.
    pub position: i32,
    /// The key-value head.
    pub kv: u32,
    /// The first query head, counted from the first of the key-value head.
    pub first: u32,
    /// The split.
    pub split: u32,
    /// Number of splits of the slot.
    pub splits: u32,
    /// First position of the split, counted from the oldest visible one.
    pub start: u32,
    /// End of the split's positions in the cache: without the new position. An idle slot has none.
    pub end: u32,
    /// The place of the oldest visible position in the ring of the cache.
    pub oldest: u32,
}

#[device]
impl Task {
    /// Returns whether the split contains the new position.
    pub fn is_last(self) -> bool {
        self.split + 1 == self.splits
    }

    /// Returns the stages with its positions.
    pub fn stages(self, heads: Heads) -> u32 {
        divide(self.end - self.start + heads.positions - 1, heads.positions).0
    }

    /// Returns the place in the ring of the cache of position `i`, counted from the oldest visible one.
    pub fn place(self, i: u32, heads: Heads) -> u32 {
        let place = self.oldest + i;
        if place < heads.capacity { place } else { place - heads.capacity }
    }
}

/// The tasks of a block: every `blocks`-th of the tasks of all slots.
#[derive(Clone, Copy)]
pub struct Tasks {
    next: u32,
    slot: u32,
    /// Tasks of the slots before.
    before: u32,
}

#[device]
impl Tasks {
    /// Starts with the first task of block `block`.
    pub const fn new(block: u32) -> Self {
        Self { next: block, slot: 0, before: 0 }
    }

    /// Returns the next task of one of `blocks` blocks. Every lane of the warp must call it.
    pub fn next(&mut self, heads: Heads, positions: Positions, rows: u32, blocks: u32) -> Option<Task> {
        while self.slot < rows {
            let position = positions.of(self.slot);
            let newest = position.max(0) as u32;
            let len = if newest < heads.capacity { newest + 1 } else { heads.capacity };
            let (per_split, splits) = if position < 0 { (len, 1) } else { heads.splits_of(len) };
            let count = heads.kv_heads * heads.chunks * splits;
            let i = self.next - self.before;
            if i < count {
                self.next += blocks;
                let (head, split) = if splits == 1 { (i, 0) } else { divide(i, splits) };
                let (kv, chunk) = if heads.chunks == 1 { (head, 0) } else { divide(head, heads.chunks) };
                let (_, place) = divide(newest, heads.capacity);
                let is_full = newest >= heads.capacity && place + 1 < heads.capacity;
                let start = split * per_split;
                return Some(Task {
                    slot: self.slot,
                    position,
                    kv,
                    first: chunk * heads.per_task,
                    split,
                    splits,
                    start,
                    end: if split + 1 == splits { len - 1 } else { start + per_split },
                    oldest: if is_full { place + 1 } else { 0 },
                });
            }
            self.before += count;
            self.slot += 1;
        }
        None
    }
}
