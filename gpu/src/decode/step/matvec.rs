//! Linear layers: out (R, OC) = epilogue(norm(inp (R, C)) · weight (OC, C)ᵀ + bias (OC)), R up to 16.
//!
//! All threads wait for the words of inp and copy the values to shared memory. With a norm, they normalize the rows. The block's columns are
//! computed in tiles of eight rows of weight: the rows of inp are the left operand of `mma.m16n8k16`, and the rows of weight the right one.
//! Tensor cores take fewer instructions than FMA even for one row, because weights need no conversion. A stage, a piece of a tile's rows, is
//! multiplied by one consumer warp, and the next stages by the others: a warp that waited for tensor cores in every stage would take longer than
//! memory. The sums over the pieces are added in order, after one barrier for up to [`MAX_TILES`] tiles. Then each thread computes two columns
//! of a row: bias, activation or residual, and the word of the result.
//!
//! A packet of weights in FP8 is converted to two packets of bf16, exactly, and belongs to two packets of the input.
//!
//! Values are rounded to T where the separate kernels store them: after the norm, before an activation, and in the output.

use super::kernel::{Output, Step, Storage, THREADS, sync_consumers};
use super::plan::{CONSUMERS, Linear, TILE, divide, halves};
use super::ring::{Consumer, Ring};
use super::table::{Entry, Field, NONE};
use super::words::Pair;
use crate::activation::value_of;
use crate::decode::matvec::{LAYERNORM, LAYERNORM_EPS, PLAIN};
use cuda_std::fp8::Bf16Scale;
use cuda_std::mma::TensorCore;
use cuda_std::{E4m3, Packet, SharedArray, async_copy, device, math, thread, warp};

/// Number of tiles whose sums are added after the same barrier.
pub const MAX_TILES: u32 = 4;
/// Pairs of columns of these tiles: one for each of 16 threads of a row.
const PAIRS: u32 = MAX_TILES * TILE / 2;
const LANES: u32 = warp::LANES;
/// Rounds of four packets of a row that are loaded before they are multiplied.
const UNROLL: u32 = 4;

/// Computes the block's columns. Every consumer thread calls it.
#[inline(always)]
pub fn compute<T: TensorCore, const FP8: bool>(step: &Step<T>, entry: Entry, cursor: &mut Consumer, half: &mut u32) {
    let linear = Linear::of_block(entry, step.block);
    if linear.count == 0 {
        return;
    }
    let norm = entry.scalar(Field::Norm);
    let (norm_weight, norm_bias) = (entry.index(Field::NormWeight), entry.index(Field::NormBias));
    let eps = entry.float(Field::Eps);
    let epilogue = Epilogue {
        step,
        linear,
        output: step.output(entry),
        bias: entry.index(Field::Bias),
        residual: entry.scalar(Field::Residual),
        activation: entry.scalar(Field::Activation),
        parts: linear.pieces::<T, FP8>().min(CONSUMERS),
    };
    // Values that do not depend on the input are loaded before the wait for it.
    let scale = Bf16Scale::new(if FP8 { step.floats.at(entry.index(Field::Scale)) } else { 1.0 });
    let mut operands = epilogue.operands(0);
    copy_norm(step, linear, norm_weight, step.storage.norm_weight);
    copy_norm(step, linear, norm_bias, step.storage.norm_bias);
    async_copy::commit();
    gather(step, linear, entry.scalar(Field::Input) as usize);
    async_copy::wait::<0>();
    sync_consumers();
    let (mut inputs, mut pitch) = (step.storage.inputs, Storage::<T>::pitch(step.sizes.channels));
    if norm != PLAIN {
        normalize(step, linear, norm, [norm_weight != 0, norm_bias != 0], eps);
        (inputs, pitch) = (step.storage.normed, Storage::<T>::pitch(step.sizes.norm_channels));
    }
    // Rows past the last repeat it: their sums are not stored.
    let row = |row: u32| inputs.skip(row.min(step.sizes.rows - 1) as usize * pitch);
    let g = warp::lane() / 4;
    let rows = [row(g), row(g + 8)];
    let tiles = linear.tiles();
    let mut tile = 0;
    while tile < tiles {
        if tile > 0 {
            operands = epilogue.operands(tile);
        }
        let end = (tile + MAX_TILES).min(tiles);
        multiply::<T, FP8>(step, linear, rows, scale, [tile, end], cursor, *half * MAX_TILES);
        sync_consumers();
        epilogue.store(tile, operands, *half * MAX_TILES);
        // Threads may still read this half while others write the next sums.
        *half ^= 1;
        tile = end;
    }
}

/// Starts the copy of the norm's weight or bias, if there is one, to shared memory.
#[inline(always)]
fn copy_norm<T: TensorCore>(step: &Step<T>, linear: Linear, from: usize, to: SharedArray<T>) {
    let mut packet = thread::thread_idx_x();
    while from != 0 && packet < linear.packets::<T>() {
        let channel = packet as usize * T::PACKET;
        to.copy_packet_async(channel, step.elements.reader(), from + channel, true);
        packet += THREADS;
    }
}

/// Waits for the input, whose first word is `first`, and copies its values to shared memory.
#[inline(always)]
fn gather<T: TensorCore>(step: &Step<T>, linear: Linear, first: usize) {
    let (packets, pitch) = (linear.packets::<T>().max(1), Storage::<T>::pitch(step.sizes.channels));
    let all = step.sizes.rows * packets;
    let place = |i: u32| {
        let (row, packet) = divide(i, packets);
        row as usize * pitch + packet as usize * T::PACKET
    };
    let mut next = thread::thread_idx_x();
    if all <= THREADS {
        // Threads that wait for fewer words leave more of L2 to the weights.
        if next < all {
            let to = place(next);
            step.storage.inputs.set_packet(to, step.words.packet(first + 4 * next as usize));
        }
        return;
    }
    while next < all {
        // Past the last packet, the first of the batch is read again.
        let at = [0, 1, 2, 3].map(|i| if next + i * THREADS < all { next + i * THREADS } else { next });
        let to = at.map(place);
        let packets = step.words.four_packets::<T>(at.map(|i| first + 4 * i as usize));
        for i in 0..4 {
            step.storage.inputs.set_packet(to[i], packets[i]);
        }
        next += 4 * THREADS;
    }
}

/// Computes the statistics of the rows: a warp those of every eighth row. Then the threads normalize the rows.
#[inline(always)]
fn normalize<T: TensorCore>(step: &Step<T>, linear: Linear, norm: u32, [has_weight, has_bias]: [bool; 2], eps: f32) {
    let (storage, lane) = (step.storage, warp::lane());
    let [from, to] = [step.sizes.channels, step.sizes.norm_channels].map(Storage::<T>::pitch);
    let packets = linear.packets::<T>();
    let mut row = warp::index();
    while row < step.sizes.rows {
        let inputs = storage.inputs.skip(row as usize * from);
        // Differences from a value of the row keep the precision of the variance if the mean is large.
        let shift = if norm == LAYERNORM { inputs.at(0).to_f32() } else { 0.0 };
        let (mut sum, mut squares, mut packet) = (0.0, 0.0, lane);
        while packet < packets {
            let x = inputs.packet(packet as usize * T::PACKET);
            for i in 0..T::PACKET {
                let x = x.get(i) - shift;
                sum += x;
                squares = math::fma(x, x, squares);
            }
            packet += LANES;
        }
        // Scales before the reduction, because the sum of squares may overflow although their mean does not.
        let factor = math::recip(linear.channels as f32);
        let [mean, square] = [sum, squares].map(|sum| warp::sum(sum * factor));
        let variance = if norm == LAYERNORM { math::fma(-mean, mean, square) + LAYERNORM_EPS } else { square + eps };
        if lane == 0 {
            storage.statistics.set(2 * row as usize, if norm == LAYERNORM { mean + shift } else { 0.0 });
            storage.statistics.set(2 * row as usize + 1, math::rsqrt(variance));
        }
        row += CONSUMERS;
    }
    sync_consumers();
    let mut i = thread::thread_idx_x();
    while i < step.sizes.rows * packets {
        let (row, packet) = divide(i, packets);
        let row = row as usize;
        let channel = packet as usize * T::PACKET;
        let weight = if has_weight { storage.norm_weight.packet(channel) } else { Packet::from_fn(|_| 1.0) };
        let bias = if has_bias { storage.norm_bias.packet(channel) } else { Packet::zero() };
        let x = storage.inputs.packet(row * from + channel);
        let [mean, rstd] = storage.statistics.pair(2 * row);
        let normalized = Packet::from_fn(|i| math::fma((x.get(i) - mean) * rstd, weight.get(i), bias.get(i)));
        storage.normed.set_packet(row * to + channel, normalized);
        i += THREADS;
    }
    sync_consumers();
}

/// Multiplies the warp's stages of tiles `tile` .. `end` by the lane's two rows of the input. Stores the sums over every eighth piece, from piece
/// l on, as (R, 8) at place 8 (`first` + i) + l of the sums, for tile `tile` + i.
#[inline(always)]
fn multiply<T: TensorCore, const FP8: bool>(
    step: &Step<T>,
    linear: Linear,
    inputs: [SharedArray<T>; 2],
    scale: Bf16Scale,
    [tile, end]: [u32; 2],
    cursor: &mut Consumer,
    first: u32,
) {
    let storage = step.storage;
    let (lane, rows) = (warp::lane(), step.sizes.rows);
    let (g, t) = (lane / 4, lane % 4);
    let (all, pieces, len) = (linear.weight_packets::<T, FP8>(), linear.pieces::<T, FP8>(), linear.piece::<T, FP8>());
    let (mut i, mut piece) = (0, cursor.others());
    cursor.pass((end - tile) * pieces);
    loop {
        while piece >= pieces {
            piece -= pieces;
            i += 1;
        }
        if tile + i >= end {
            return;
        }
        let place = linear.tile_place(tile + i, g);
        let mut d = [[[0.0; 4]; 2]; 2];
        while piece < pieces {
            cursor.wait_full(storage.barriers);
            let weights = storage.ring.stage(cursor.stage()).skip(place as usize * Ring::<T>::PITCH);
            let start = piece * len;
            let (packets, mut packet) = ((all - start).min(len), 0);
            while packet + 4 * UNROLL <= packets {
                if rows > 8 {
                    rounds::<T, FP8, true, { UNROLL as usize }>(&mut d, weights, inputs, [start, packet], scale);
                } else {
                    rounds::<T, FP8, false, { UNROLL as usize }>(&mut d, weights, inputs, [start, packet], scale);
                }
                packet += 4 * UNROLL;
            }
            while packet < packets {
                rounds::<T, FP8, true, 1>(&mut d, weights, inputs, [start, packet], scale);
                packet += 4;
            }
            storage.barriers.release_by_lane(cursor.advance());
            piece += CONSUMERS;
        }
        let sums = storage.sums.skip((((first + i) * CONSUMERS + piece % CONSUMERS) * rows * TILE) as usize);
        for k in 0..2 {
            let row = g + 8 * k as u32;
            if row < rows {
                let at = (row * TILE + 2 * t) as usize;
                for k in 2 * k..2 * k + 2 {
                    sums.set(at + k % 2, (d[0][0][k] + d[0][1][k]) + (d[1][0][k] + d[1][1][k]));
                }
            }
        }
    }
}

/// Multiplies N times four packets of the rows of weight, from packet `packet` of the stage on, which begins with packet `start` of the rows.
/// Only with LOWER, rows 8 to 15 of the input are used.
#[inline(always)]
fn rounds<T: TensorCore, const FP8: bool, const LOWER: bool, const N: usize>(
    d: &mut [[[f32; 4]; 2]; 2],
    weights: SharedArray<T>,
    inputs: [SharedArray<T>; 2],
    [start, packet]: [u32; 2],
    scale: Bf16Scale,
) {
    let (halves, t) = (halves::<FP8>() as usize, warp::lane() % 4);
    let channel = |u: usize, i: usize| ((start + packet + 4 * u as u32 + t) as usize * halves + i) * T::PACKET;
    let (mut w, mut x) = ([Packet::<T>::zero(); N], [[Packet::<T>::zero(); 2]; N]);
    // All loads are issued before the first is used.
    for u in 0..N {
        w[u] = weights.packet((packet + 4 * u as u32 + t) as usize * T::PACKET);
        for i in 0..halves {
            x[u][i] = inputs[0].packet(channel(u, i));
        }
    }
    for u in 0..N {
        let mut weights = [w[u]; 2];
        if FP8 {
            let packet = Packet::<E4m3>::from_packed(w[u].words());
            weights = packet.to_bf16(scale).map(|half| Packet::from_words(half.words()));
        }
        for i in 0..halves {
            let lower = if LOWER { inputs[1].packet(channel(u, i)) } else { Packet::zero() };
            // Neighbors have separate sums, so that fewer instructions wait for each other.
            T::mma_packets(&mut d[(u + i) % 2], [x[u][i], lower], weights[i]);
        }
    }
}

/// The last part of a linear layer: from the sums to the output.
#[derive(Clone, Copy)]
struct Epilogue<'a, T> {
    step: &'a Step<T>,
    linear: Linear,
    output: Output<T>,
    bias: usize,
    residual: u32,
    activation: u32,
    /// Sums of a tile.
    parts: u32,
}

/// The operands of a thread's two columns: the bias of up and gate, and the words of the residual. They are as in memory, because a conversion
/// would wait for the loads.
#[derive(Clone, Copy)]
struct Operands<T> {
    bias: [[T; 2]; 2],
    residual: Pair,
}

#[device]
impl<T: TensorCore> Epilogue<'_, T> {
    /// Returns the row and the first column of the thread for the tiles from `tile` on, if it has one. The column is counted from the
    /// first of the block.
    fn place(self, tile: u32) -> Option<(u32, u32)> {
        let thread = thread::thread_idx_x();
        let (row, pair) = (thread / PAIRS, thread % PAIRS);
        let (column, end) = ((tile << self.linear.tile_shift()) + 2 * pair, MAX_TILES << self.linear.tile_shift());
        let exists = row < self.step.sizes.rows && 2 * pair < end && column < self.linear.count;
        if exists { Some((row, column)) } else { None }
    }

    /// Returns the index in the output of a column of the block.
    fn index(self, row: u32, column: u32) -> usize {
        (row * self.linear.columns + self.linear.first + column) as usize
    }

    /// Loads the thread's operands for the tiles from `tile` on.
    fn operands(self, tile: u32) -> Operands<T> {
        let mut operands = Operands { bias: [[T::from_f32(0.0); 2]; 2], residual: [0; 2] };
        if let Some((row, column)) = self.place(tile) {
            if self.bias != 0 {
                for gate in 0..2 {
                    for i in 0..2 {
                        if gate == 0 || self.linear.is_gated {
                            let at = self.bias + self.linear.row(column + i as u32, gate as u32) as usize;
                            operands.bias[gate][i] = self.step.elements.at(at);
                        }
                    }
                }
            }
            if self.residual != NONE {
                operands.residual = self.step.words.pair_of::<T>(self.residual as usize, self.index(row, column));
            }
        }
        operands
    }

    /// Adds the sums of the pieces for columns `column` and `column` + 1 of a tile. `column` is even.
    fn sum(self, row: u32, tile: u32, column: u32) -> [f32; 2] {
        let rows = self.step.sizes.rows;
        let sums = self.step.storage.sums.skip((((tile * CONSUMERS) * rows + row) * TILE + column) as usize);
        let mut sum = [0.0; 2];
        for part in 0..CONSUMERS {
            if part < self.parts {
                let [a, b] = sums.pair((part * rows * TILE) as usize);
                sum = [sum[0] + a, sum[1] + b];
            }
        }
        sum
    }

    /// Stores the thread's columns of the tiles from `tile` on, whose sums begin at place `first` of the sums.
    fn store(self, tile: u32, operands: Operands<T>, first: u32) {
        let Some((row, column)) = self.place(tile) else { return };
        let (own, width) = (column - (tile << self.linear.tile_shift()), 1 << self.linear.tile_shift());
        let (tile, place) = (first + (own >> self.linear.tile_shift()), own & (width - 1));
        let add = |sums: [f32; 2], other: [f32; 2]| [sums[0] + other[0], sums[1] + other[1]];
        let bias = operands.bias.map(|pair| pair.map(T::to_f32));
        let mut values = add(self.sum(row, tile, place), bias[0]);
        if self.activation != 0 {
            let gates = if self.linear.is_gated { add(self.sum(row, tile, width + place), bias[1]) } else { [0.0; 2] };
            for i in 0..2 {
                values[i] = value_of(self.activation, [values[i], gates[i]].map(|x| T::from_f32(x).to_f32()));
            }
        }
        let at = self.index(row, column);
        if self.residual != NONE {
            values = add(values, self.step.words.two::<T>(operands.residual, self.residual as usize, at));
        }
        self.output.set_two(at, values);
    }
}
