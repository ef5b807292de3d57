//! Attention of one query per slot over the KV cache, as in [`decode::attention`](crate::decode::attention).
//!
//! A task has up to GROUP query heads of one key-value head, and one split of the slot's positions. Its block waits for the words of the
//! queries, the new key and the new value, normalizes and rotates them, and reads the keys and values of earlier positions from the ring.
//! The block with the last split adds the new position, and stores it in the cache.
//!
//! A slot with one split is complete. Otherwise blocks store partial results (sums, maximum score and weight of a head) as words, and after
//! its own tasks, the block with the first split waits for them and combines them. All orders are fixed.

use super::kernel::{Step, THREADS, sync_consumers};
use super::plan::{CONSUMERS, Heads, Task, Tasks};
use super::ring::Ring;
use super::table::{Entry, Field};
use super::words::floats;
use crate::decode::attention::{NO_ROTATION, Preparation, Softmax, combine, prepare, relative};
use cuda_std::hopper::PipelineState;
use cuda_std::mma::TensorCore;
use cuda_std::shared::Layout;
use cuda_std::{Element, Packet, SharedArray, async_copy, device, math, thread, warp};

const WARPS: usize = CONSUMERS as usize;

/// Shared memory of attention.
#[derive(Clone, Copy)]
pub struct Scratch<T> {
    /// (GROUP + 2, HS): queries, new key and new value.
    raw: SharedArray<T>,
    /// (GROUP + 1, HS): queries and the new key, after the rotation.
    heads: SharedArray<f32>,
    /// (HS/2, 2): the rotation of the slot's position.
    rotation: SharedArray<f32>,
    /// (2, HS): weights of the norms of queries and keys.
    weights: SharedArray<T>,
    /// (GROUP, consumer warps, HS): sums of weighted values.
    sums: SharedArray<f32>,
    /// (GROUP, consumer warps, 2): maximum score and sum of weights.
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
pub fn compute<T: TensorCore, const GROUP: usize>(step: &Step<T>, entry: Entry, state: &mut PipelineState) {
    let heads = step.heads::<GROUP>(entry);
    let operation = Operation::<T, GROUP> { step, entry, heads };
    let mut tasks = Tasks::new(step.block);
    while let Some(task) = tasks.next::<T>(heads, step.positions, step.sizes.rows, step.blocks) {
        if task.position < 0 {
            operation.store_zeros(task);
        } else {
            operation.prepare(task);
            operation.attend(task, state);
            sync_consumers();
            operation.store(task, WARPS, task.splits == 1);
        }
    }
    // Partial results of other blocks are needed only now: a block that waits has computed its own.
    let mut tasks = Tasks::new(step.block);
    while let Some(task) = tasks.next::<T>(heads, step.positions, step.sizes.rows, step.blocks) {
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
        let pairs = (self.heads.head_size / 2).max(1);
        let thread = thread::thread_idx_x().wrapping_sub(first);
        ((thread / pairs) as usize, 2 * (thread % pairs) as usize)
    }

    /// Waits for queries, new key and value. Normalizes and rotates queries and key.
    fn prepare(self, task: Task) {
        let (scratch, hs, thread) = (self.step.storage.attention, self.head_size(), thread::thread_idx_x() as usize);
        let (entry, heads, elements) = (self.entry, self.heads, self.step.elements.reader());
        let (input, rotations) = (entry.index(Field::Input), entry.index(Field::Rotations));
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
        let (h, packet) = ((thread as u32 / packets), thread as u32 % packets);
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
            prepare::<T>(
                scratch.heads.skip(h * hs),
                preparation,
                |i| raw.at(i).to_f32(),
                |i| if has_weight { weight.at(i).to_f32() } else { 1.0 },
                |i| scratch.rotation.pair(2 * i),
            );
            h += WARPS;
        }
        sync_consumers();
    }

    /// Computes the warp's sums over the split, and stores them in shared memory. Stores the new position in the cache.
    fn attend(self, task: Task, state: &mut PipelineState) {
        let (storage, heads, hs) = (self.step.storage, self.heads, self.head_size());
        let (scratch, thread) = (storage.attention, thread::thread_idx_x() as usize);
        let (keys, values) = (self.entry.index(Field::Keys), self.entry.index(Field::Values));
        let (new_key, new_value) = (scratch.heads.skip(GROUP * hs), scratch.raw.skip((GROUP + 1) * hs));
        if task.is_last() && task.first == 0 && thread < hs {
            let row = (task.slot * heads.kv_heads + task.kv) as usize * heads.capacity as usize;
            let at = (row + task.place(task.end, heads) as usize) * hs + thread;
            self.step.elements.set(keys + at, T::from_f32(new_key.at(thread)));
            self.step.elements.set(values + at, new_value.at(thread));
        }
        let lane_shift = heads.lane_shift::<T>();
        let (lane, warp) = (warp::lane(), warp::index());
        let channel = (lane & ((1 << lane_shift) - 1)) as usize * T::PACKET;
        let holds = channel < hs;
        let channel = if holds { channel } else { 0 };
        let scale = math::rsqrt(hs as f32) * core::f32::consts::LOG2_E;
        let mut softmax = Softmax::<GROUP>::new(lane_shift, holds);
        for g in 0..GROUP {
            for i in 0..T::PACKET {
                softmax.queries[g][i] = scratch.heads.at(g * hs + channel + i) * scale;
            }
        }
        let own = (warp << (5 - lane_shift)) + (lane >> lane_shift);
        let mut start = task.start;
        while start < task.end {
            let count = (task.end - start).min(heads.stage_positions::<T>());
            storage.barriers.wait_full(*state);
            let stage = storage.ring.stage(state.stage());
            // Lanes past the last position repeat it.
            let at = own.min(count - 1) as usize * hs + channel;
            let (key, value) = (stage.packet(at), stage.packet(at + Ring::<T>::VALUES));
            softmax.add(&[key], &[value], [own < count]);
            storage.barriers.release_by_warp(state.advance());
            start += count;
        }
        if task.is_last() && warp == 0 {
            let key = Packet::<T>::from_fn(|i| new_key.at(channel + i));
            softmax.add(&[key], &[new_value.packet(channel)], [lane >> lane_shift == 0]);
        }
        softmax.combine_positions::<T>();
        for g in 0..GROUP {
            let at = g * WARPS + warp as usize;
            if lane >> lane_shift == 0 && holds {
                for i in 0..T::PACKET {
                    scratch.sums.set(at * hs + channel + i, softmax.sums[g][i]);
                }
            }
            if lane == 0 {
                scratch.scores.set(at * 2, softmax.most[g]);
                scratch.scores.set(at * 2 + 1, softmax.weight[g]);
            }
        }
    }

    /// Combines `parts` partial results in shared memory, and stores the output, or the partial result of the split.
    fn store(self, task: Task, parts: usize, is_complete: bool) {
        let (scratch, hs, (g, channel)) = (self.step.storage.attention, self.head_size(), self.place(0));
        let (output, partials) = (self.step.output(self.entry), self.entry.index(Field::Partials));
        if !self.has(task, g) {
            return;
        }
        let head = self.head(task, g);
        let part = |i: usize, channel: usize| {
            let at = g * WARPS + i;
            [scratch.scores.at(at * 2), scratch.scores.at(at * 2 + 1), scratch.sums.at(at * hs + channel)]
        };
        let [most, weight, first] = combine(parts, |i| part(i, channel));
        let [_, _, second] = combine(parts, |i| part(i, channel + 1));
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
        let partials = self.entry.index(Field::Partials);
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
