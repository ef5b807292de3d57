//! Attention of one query per slot over the KV cache, as in [`decode::attention`](crate::decode::attention).
//!
//! A task has up to GROUP query heads of one key-value head, and one split of the slot's positions. Its block waits for the words of the
//! queries, the new key and the new value, normalizes and rotates them, and reads the keys and values of earlier positions from the ring.
//! A consumer warp computes all positions of its stages. The block with the last split adds the new position, and stores it in the cache.
//!
//! Scores come from `mma.m16n8k16`: query heads are the rows of its left operand, and eight positions those of the right one. Weights and
//! weighted values are f32.
//!
//! A slot with one split is complete. Otherwise blocks store partial results (sums, maximum score and weight of a head) as words, and after
//! its own tasks, the block with the first split waits for them and combines them. All orders are fixed.

use super::kernel::{Step, THREADS, sync_consumers};
use super::plan::{CONSUMERS, Heads, MAX_POSITIONS, Task, Tasks, divide};
use super::ring::{Consumer, Ring};
use super::table::{Entry, Field};
use super::words::floats;
use crate::decode::attention::{NO_ROTATION, Preparation, combine, larger, prepare, relative};
use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{Element, Packet, SharedArray, async_copy, device, math, thread, warp};

const WARPS: usize = CONSUMERS as usize;
/// Groups of eight positions of a stage.
const EIGHTS: usize = MAX_POSITIONS as usize / 8;

/// Shared memory of attention.
#[derive(Clone, Copy)]
pub struct Scratch<T> {
    /// (GROUP + 2, HS): queries, new key and new value.
    raw: SharedArray<T>,
    /// (GROUP + 1, HS): queries and the new key, after the rotation.
    heads: SharedArray<T>,
    /// (HS/2, 2): the rotation of the slot's position.
    rotation: SharedArray<f32>,
    /// (2, HS): weights of the norms of queries and keys.
    weights: SharedArray<T>,
    /// (GROUP, 8, HS): sums of weighted values, for each partial result.
    sums: SharedArray<f32>,
    /// (GROUP, 8, 2): maximum score and sum of weights.
    scores: SharedArray<f32>,
}

impl<T: Element> Scratch<T> {
    /// Takes the memory from `layout`, for tasks of up to `group` query heads.
    #[inline(always)]
    pub fn new(layout: &mut Layout, group: usize, head_size: usize) -> Self {
        Self {
            raw: layout.array((group + 2) * head_size),
            heads: layout.array((group + 1) * head_size),
            rotation: layout.array(head_size),
            weights: layout.array(2 * head_size),
            sums: layout.array(group * WARPS * head_size),
            scores: layout.array(group * WARPS * 2),
        }
    }
}

/// An attention.
#[derive(Clone, Copy)]
struct Operation<'a, T, const GROUP: usize> {
    step: &'a Step<T>,
    /// Functions read the fields that they need, because all of them would occupy registers during the loop over positions.
    entry: Entry,
    heads: Heads,
}

/// Computes the block's tasks. Every consumer thread calls it.
#[inline(always)]
pub fn compute<T: TensorCore, const GROUP: usize>(step: &Step<T>, entry: Entry, cursor: &mut Consumer) {
    let heads = step.heads::<GROUP>(entry);
    let operation = Operation::<T, GROUP> { step, entry, heads };
    let mut tasks = Tasks::new(step.block);
    let mut has_splits = false;
    while let Some(task) = tasks.next(heads, step.positions, step.sizes.rows, step.blocks) {
        has_splits |= task.splits > 1;
        if task.position < 0 {
            operation.store_zeros(task);
        } else {
            operation.prepare(task);
            let parts = operation.attend(task, cursor);
            sync_consumers();
            operation.store(task, parts, task.splits == 1);
        }
    }
    if !has_splits {
        return;
    }
    // Partial results of other blocks are needed only now: a block that waits has computed its own.
    let mut tasks = Tasks::new(step.block);
    while let Some(task) = tasks.next(heads, step.positions, step.sizes.rows, step.blocks) {
        if task.position >= 0 && task.split == 0 && task.splits > 1 {
            // Threads may still read the sums of the last task.
            sync_consumers();
            let parts = operation.gather_partials(task);
            sync_consumers();
            operation.store(task, parts, true);
        }
    }
}

#[device]
impl<T: TensorCore, const GROUP: usize> Operation<'_, T, GROUP> {
    /// Returns HS.
    fn head_size(self) -> usize {
        self.heads.head_size as usize
    }

    /// Returns the index of the task's query head `g` in (R, NH), or of the last one of its key-value head.
    fn head(self, task: Task, g: usize) -> usize {
        let own = (task.first + g as u32).min(self.heads.group - 1);
        (task.slot * self.heads.heads + task.kv * self.heads.group + own) as usize
    }

    /// Returns whether the task has a query head `g`.
    fn has(self, task: Task, g: usize) -> bool {
        g < GROUP && task.first + (g as u32) < self.heads.group
    }

    /// Returns the query head and the first of two channels of a thread, among the threads from `first` on.
    fn place(self, first: u32) -> (usize, usize) {
        let (g, pair) = divide(thread::thread_idx_x().wrapping_sub(first), self.heads.head_size / 2);
        (g as usize, 2 * pair as usize)
    }

    /// Waits for queries, new key and value. Normalizes and rotates queries and key.
    fn prepare(self, task: Task) {
        let (scratch, hs, thread) = (self.step.storage.attention, self.head_size(), thread::thread_idx_x() as usize);
        let (entry, heads, elements) = (self.entry, self.heads, self.step.elements.reader());
        let (input, rotations) = (entry.scalar(Field::Input) as usize, entry.index(Field::Rotations));
        let weights = [entry.index(Field::QueryWeight), entry.index(Field::KeyWeight)];
        let preparation = Preparation {
            head_size: heads.head_size,
            rotation: entry.scalar(Field::Rotation),
            is_normed: entry.scalar(Field::QkNorm) != 0,
            eps: entry.float(Field::Eps),
            gain: entry.float(Field::Gain),
        };
        if preparation.rotation != NO_ROTATION && thread < hs / 4 {
            let from = rotations + task.position as usize * hs + 4 * thread;
            scratch.rotation.copy_packet_async(4 * thread, self.step.floats, from, true);
        }
        for i in 0..2 {
            let channel = thread * T::PACKET;
            if preparation.is_normed && weights[i] != 0 && channel < hs {
                scratch.weights.copy_packet_async(i * hs + channel, elements, weights[i] + channel, true);
            }
        }
        async_copy::commit();
        let packets = (heads.head_size / T::PACKET as u32).max(1);
        let (h, packet) = divide(thread as u32, packets);
        if h < GROUP as u32 + 2 {
            let row = task.slot * (heads.heads + 2 * heads.kv_heads);
            let head = if h < GROUP as u32 {
                task.kv * heads.group + (task.first + h).min(heads.group - 1)
            } else {
                heads.heads + (h - GROUP as u32) * heads.kv_heads + task.kv
            };
            let at = input + 4 * ((row + head) * packets + packet) as usize;
            scratch.raw.set_packet(h as usize * hs + packet as usize * T::PACKET, self.step.words.packet::<T>(at));
        }
        async_copy::wait::<0>();
        sync_consumers();
        let mut h = warp::index() as usize;
        while h <= GROUP {
            let is_key = usize::from(h == GROUP);
            let has_weight = if h == GROUP { weights[1] != 0 } else { weights[0] != 0 };
            let (raw, weight) = (scratch.raw.skip(h * hs), scratch.weights.skip(is_key * hs));
            let to = scratch.heads.skip(h * hs);
            prepare::<T>(
                |i, x| to.set(i, x),
                preparation,
                |i| raw.at(i).to_f32(),
                |i| if has_weight { weight.at(i).to_f32() } else { 1.0 },
                |i| scratch.rotation.pair(2 * i),
            );
            h += WARPS;
        }
        sync_consumers();
    }

    /// Computes the warp's sums over the split, and stores them in shared memory: number i of stages i, i + 8, and so on. Stores the new
    /// position in the cache. Returns the number of partial results.
    fn attend(self, task: Task, cursor: &mut Consumer) -> usize {
        let (storage, heads, hs) = (self.step.storage, self.heads, self.head_size());
        let (scratch, thread) = (storage.attention, thread::thread_idx_x() as usize);
        let (keys, values) = (self.entry.index(Field::Keys), self.entry.index(Field::Values));
        let (new_key, new_value) = (scratch.heads.skip(GROUP * hs), scratch.raw.skip((GROUP + 1) * hs));
        if task.is_last() && task.first == 0 && thread < hs {
            let row = (task.slot * heads.kv_heads + task.kv) as usize * heads.capacity as usize;
            let at = (row + task.place(task.end, heads) as usize) * hs + thread;
            self.step.elements.set(keys + at, new_key.at(thread));
            self.step.elements.set(values + at, new_value.at(thread));
        }
        let mut sums = Sums::<T, GROUP>::new(heads, scratch.heads);
        let positions = heads.positions;
        // The order of the partial results does not depend on the warps, which depend on other slots.
        let (stages, number) = (task.stages(heads), cursor.others());
        cursor.pass(stages);
        let mut start = task.start + number * positions;
        while start < task.end {
            cursor.wait_full(storage.barriers);
            let stage = storage.ring.stage(cursor.stage());
            sums.add(stage, stage.skip(Ring::<T>::VALUES), (task.end - start).min(positions));
            storage.barriers.release_by_lane(cursor.advance());
            start += CONSUMERS * positions;
        }
        if task.is_last() && number == stages % CONSUMERS {
            sums.add(new_key, new_value, 1);
        }
        let parts = (stages + u32::from(task.is_last())).min(CONSUMERS);
        if number < parts {
            sums.store(&scratch, number as usize);
        }
        parts as usize
    }

    /// Combines `parts` partial results in shared memory, and stores the output, or the partial result of the split.
    fn store(self, task: Task, parts: usize, is_complete: bool) {
        let (scratch, hs, (g, channel)) = (self.step.storage.attention, self.head_size(), self.place(0));
        let (output, partials) = (self.step.output(self.entry), self.entry.scalar(Field::Partials) as usize);
        if !self.has(task, g) {
            return;
        }
        let head = self.head(task, g);
        let [most, weight, first, second] = combine(parts, |i| {
            let at = g * WARPS + i;
            let [[most, weight], sums] = [scratch.scores.pair(at * 2), scratch.sums.pair(at * hs + channel)];
            [most, weight, sums[0], sums[1]]
        });
        if is_complete {
            let factor = math::recip(weight);
            output.set_two(head * hs + channel, [first * factor, second * factor]);
        } else {
            let words = self.step.words;
            let at = partials + self.partial(head, task.split);
            words.store(at + channel, first.to_bits());
            words.store(at + channel + 1, second.to_bits());
            if channel == 0 {
                words.store(at + hs, most.to_bits());
                words.store(at + hs + 1, weight.to_bits());
            }
        }
    }

    /// Returns the first word of the partial result of a split, counted from that of the first: HS sums, the maximum score, and the sum of
    /// weights.
    fn partial(self, head: usize, split: u32) -> usize {
        (head * self.heads.splits as usize + split as usize) * (self.head_size() + 2)
    }

    /// Waits for the partial results of a slot's splits, and stores up to eight combinations of them in shared memory: number i of splits
    /// i, i + parts, and so on. Returns `parts`.
    fn gather_partials(self, task: Task) -> usize {
        let (scratch, hs, words) = (self.step.storage.attention, self.head_size(), self.step.words);
        let partials = self.entry.scalar(Field::Partials) as usize;
        let threads = (GROUP as u32 * self.heads.head_size / 2).max(1);
        let parts = (THREADS / threads).min(CONSUMERS);
        let own = thread::thread_idx_x() / threads;
        let (g, channel) = self.place(own * threads);
        if own < parts {
            let head = self.head(task, g);
            let (mut most, mut weight, mut sums) = (f32::NEG_INFINITY, 0.0, [0.0; 2]);
            let mut split = own;
            while split < task.splits {
                let at = partials + self.partial(head, split);
                let [sum, score] = words.pairs([at + channel, at + hs]).map(floats);
                let new = if score[0] > most || score[0].is_nan() { score[0] } else { most };
                let (old, factor) = (relative(most, new), relative(score[0], new));
                most = new;
                weight = weight * old + score[1] * factor;
                sums = [sums[0] * old + sum[0] * factor, sums[1] * old + sum[1] * factor];
                split += parts;
            }
            let at = g * WARPS + own as usize;
            scratch.sums.set(at * hs + channel, sums[0]);
            scratch.sums.set(at * hs + channel + 1, sums[1]);
            if channel == 0 {
                scratch.scores.set(at * 2, most);
                scratch.scores.set(at * 2 + 1, weight);
            }
        }
        parts as usize
    }

    /// Stores the output of an idle slot.
    fn store_zeros(self, task: Task) {
        let (output, (g, channel)) = (self.step.output(self.entry), self.place(0));
        if self.has(task, g) {
            output.set_two(self.head(task, g) * self.head_size() + channel, [0.0; 2]);
        }
    }
}

/// Sums of a warp over positions, with scores relative to the largest one.
struct Sums<T, const GROUP: usize> {
    heads: Heads,
    /// Packets 4 b + t of query head g, where g = lane / 4 and t = lane % 4: 0 past the last channel or head.
    queries: [Packet<T>; MAX_BLOCKS],
    /// The largest score of head g, times log2 e. NEG_INFINITY without positions.
    most: f32,
    /// The sum of the softmax weights of head g over the positions of this lane.
    weight: f32,
    /// The lane's channels of the weighted values of each head, over some of the positions.
    weighted: [[f32; 8]; GROUP],
}

/// Maximum number of blocks of four packets of a head: 128 channels of f32.
const MAX_BLOCKS: usize = 8;

#[device]
impl<T: TensorCore, const GROUP: usize> Sums<T, GROUP> {
    /// Starts without positions, for queries (GROUP, HS).
    fn new(heads: Heads, queries: SharedArray<T>) -> Self {
        let (g, t) = (warp::lane() / 4, warp::lane() % 4);
        let packets = heads.head_size / T::PACKET as u32;
        let mut own = [Packet::zero(); MAX_BLOCKS];
        for b in 0..Self::BLOCKS {
            let packet = 4 * b as u32 + t;
            if g < GROUP as u32 && packet < packets {
                own[b] = queries.packet((g * heads.head_size) as usize + packet as usize * T::PACKET);
            }
        }
        Self { heads, queries: own, most: f32::NEG_INFINITY, weight: 0.0, weighted: [[0.0; 8]; GROUP] }
    }

    /// Blocks of four packets of the largest head.
    const BLOCKS: usize = 128 / (4 * T::PACKET);

    /// Adds `count` positions, at most [`MAX_POSITIONS`], with keys and values (count, HS). All lanes of a warp call it.
    fn add(&mut self, keys: SharedArray<T>, values: SharedArray<T>, count: u32) {
        let (hs, lane) = (self.heads.head_size, warp::lane());
        let (g, t, packets) = (lane / 4, lane % 4, (hs / T::PACKET as u32).max(1));
        let scale = math::rsqrt(hs as f32) * core::f32::consts::LOG2_E;
        // The scores of head g at positions 8 u + 2 t and 8 u + 2 t + 1.
        let mut scores = [[f32::NEG_INFINITY; 2]; EIGHTS];
        for u in 0..EIGHTS {
            let first = 8 * u as u32;
            if first < count {
                let row = keys.skip(((first + g).min(count - 1) * hs) as usize);
                let mut d = [[0.0; 4]; 2];
                for b in 0..Self::BLOCKS {
                    if 4 * (b as u32) < packets {
                        // Past the last packet, the query is 0.
                        let packet = (4 * b as u32 + t).min(packets - 1);
                        T::mma_packets(
                            &mut d,
                            [self.queries[b], Packet::zero()],
                            row.packet(packet as usize * T::PACKET),
                        );
                    }
                }
                for i in 0..2 {
                    if first + 2 * t + (i as u32) < count {
                        scores[u][i] = (d[0][i] + d[1][i]) * scale;
                    }
                }
            }
        }
        let mut most = self.most;
        for u in 0..EIGHTS {
            for i in 0..2 {
                most = larger(most, scores[u][i]);
            }
        }
        most = larger(most, warp::shuffle_xor(most, 1));
        most = larger(most, warp::shuffle_xor(most, 2));
        let correction = relative(self.most, most);
        self.most = most;
        self.weight *= correction;
        for u in 0..EIGHTS {
            for i in 0..2 {
                scores[u][i] = relative(scores[u][i], most);
                self.weight += scores[u][i];
            }
        }
        for h in 0..GROUP {
            let correction = warp::shuffle(correction, 4 * h as u32);
            for i in 0..T::PACKET {
                self.weighted[h][i] *= correction;
            }
        }
        // A group of lanes holds the channels of a position. The groups add different pairs of positions.
        let lane_shift = self.heads.lane_shift::<T>();
        let (pairs, own, channel) = (32 >> lane_shift, lane >> lane_shift, self.channel());
        for u in 0..EIGHTS {
            let first = 8 * u as u32;
            let mut pair = own;
            while first < count && pair - own < 4 {
                for i in 0..2 {
                    let position = (first + 2 * pair + i as u32).min(count - 1);
                    let value = values.packet((position * hs) as usize + channel);
                    for h in 0..GROUP {
                        let weight = warp::shuffle(scores[u][i], 4 * h as u32 + pair % 4);
                        let weight = if pair < 4 { weight } else { 0.0 };
                        for c in 0..T::PACKET {
                            self.weighted[h][c] = math::fma(weight, value.get(c), self.weighted[h][c]);
                        }
                    }
                }
                pair += pairs;
            }
        }
    }

    /// Returns the first channel of the lane in sums, or 0 if it has none.
    fn channel(&self) -> usize {
        let channel = (warp::lane() & ((1 << self.heads.lane_shift::<T>()) - 1)) as usize * T::PACKET;
        if channel < self.heads.head_size as usize { channel } else { 0 }
    }

    /// Stores the warp's sums, maximum scores and weights in shared memory, as partial result `number`.
    fn store(&mut self, scratch: &Scratch<T>, number: usize) {
        let (hs, lane, lane_shift) = (self.heads.head_size as usize, warp::lane(), self.heads.lane_shift::<T>());
        let channel = self.channel();
        self.weight += warp::shuffle_xor(self.weight, 1);
        self.weight += warp::shuffle_xor(self.weight, 2);
        if lane.is_multiple_of(4) && lane < 4 * GROUP as u32 {
            let at = (lane as usize / 4 * WARPS + number) * 2;
            scratch.scores.set(at, self.most);
            scratch.scores.set(at + 1, self.weight);
        }
        let mut offset = 1 << lane_shift;
        while offset < warp::LANES {
            for h in 0..GROUP {
                for c in 0..T::PACKET {
                    self.weighted[h][c] += warp::shuffle_xor(self.weighted[h][c], offset);
                }
            }
            offset *= 2;
        }
        if lane >> lane_shift == 0 && (channel > 0 || lane == 0) {
            for h in 0..GROUP {
                for c in 0..T::PACKET {
                    scratch.sums.set((h * WARPS + number) * hs + channel + c, self.weighted[h][c]);
                }
            }
        }
    }
}
