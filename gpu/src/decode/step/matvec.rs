//! Linear layers: out (R, OC) = epilogue(norm(inp (R, C)) · weight (OC, C)ᵀ + bias (OC)), R up to 16.
//!
//! All threads wait for the words of inp and copy the values to shared memory. With a norm, the warps normalize the rows in place. The
//! block's columns are computed in tiles of eight rows of weight: the rows of inp are the left operand of `mma.m16n8k16`, and the rows of
//! weight the right one. Tensor cores take fewer instructions than FMA even for one row, because weights need no conversion. Each consumer
//! warp multiplies a part of the channels: every eighth block of four packets. The sums of the warps are added in order, after one barrier
//! for up to [`MAX_TILES`] tiles. Then each thread computes two columns of a row: bias, activation or residual, and the word of the result.
//!
//! A packet of weights in FP8 is converted to two packets of bf16, exactly, and belongs to two packets of the input.
//!
//! Values are rounded to T where the separate kernels store them: after the norm, before an activation, and in the output.

use super::kernel::{Output, Step, Storage, THREADS, sync_consumers};
use super::plan::{CONSUMERS, Linear, PIECE, TILE, halves};
use super::ring::Ring;
use super::table::{Entry, Field, NONE};
use super::words::Pair;
use crate::activation::value_of;
use crate::decode::matvec::{LAYERNORM, LAYERNORM_EPS, PLAIN};
use cuda_std::fp8::Bf16Scale;
use cuda_std::hopper::PipelineState;
use cuda_std::mma::TensorCore;
use cuda_std::{E4m3, Packet, SharedArray, async_copy, device, math, thread, warp};

/// Number of tiles whose sums are added after the same barrier.
pub const MAX_TILES: usize = 4;
/// Pairs of columns of these tiles: one for each of 16 threads of a row.
const PAIRS: usize = MAX_TILES * TILE / 2;
const WARPS: usize = CONSUMERS as usize;
const LANES: usize = warp::LANES as usize;
/// Blocks of four packets of a piece that a warp multiplies.
const UNROLL: usize = PIECE / 4 / WARPS;

/// Computes the block's columns. Every consumer thread calls it.
#[inline(always)]
pub fn compute<T: TensorCore, const FP8: bool>(
    step: &Step<T>,
    entry: Entry,
    state: &mut PipelineState,
    half: &mut usize,
) {
    let linear = Linear::of_block(entry, step.block, step.blocks);
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
        residual: entry.word(Field::Residual),
        activation: entry.scalar(Field::Activation),
    };
    // Values that do not depend on the input are loaded before the wait for it.
    let scale = Bf16Scale::new(if FP8 { step.floats.at(entry.index(Field::Scale)) } else { 1.0 });
    let mut operands = epilogue.operands(0);
    copy_norm(step, linear, norm_weight, step.storage.norm_weight);
    copy_norm(step, linear, norm_bias, step.storage.norm_bias);
    async_copy::commit();
    gather(step, linear, entry.index(Field::Input));
    async_copy::wait::<0>();
    sync_consumers();
    if norm != PLAIN {
        normalize(step, linear, norm, [norm_weight != 0, norm_bias != 0], eps);
        sync_consumers();
    }
    let mut tile = 0;
    while tile < linear.tiles() {
        if tile > 0 {
            operands = epilogue.operands(tile);
        }
        let mut i = 0;
        while i < MAX_TILES && tile + i < linear.tiles() {
            multiply::<T, FP8>(step, linear, scale, tile + i, state, (*half * MAX_TILES + i) * WARPS);
            i += 1;
        }
        sync_consumers();
        epilogue.store(tile, operands, *half * MAX_TILES);
        // Threads may still read this half while others write the next sums.
        *half ^= 1;
        tile += MAX_TILES;
    }
}

/// Starts the copy of the norm's weight or bias, if there is one, to shared memory.
#[inline(always)]
fn copy_norm<T: TensorCore>(step: &Step<T>, linear: Linear, from: usize, to: SharedArray<T>) {
    let mut packet = thread::thread_idx_x() as usize;
    while from != 0 && packet < linear.packets::<T>() {
        let channel = packet * T::PACKET;
        to.copy_packet_async(channel, step.elements.reader(), from + channel, true);
        packet += THREADS as usize;
    }
}

/// Waits for the input, whose first word is `first`, and copies its values to shared memory.
#[inline(always)]
fn gather<T: TensorCore>(step: &Step<T>, linear: Linear, first: usize) {
    let (packets, pitch) = ((linear.packets::<T>() as u32).max(1), Storage::<T>::pitch(step.sizes));
    let all = step.sizes.rows * packets;
    let store = |i: u32, packet: Packet<T>| {
        let (row, column) = ((i / packets) as usize, (i % packets) as usize);
        step.storage.inputs.set_packet(row * pitch + column * T::PACKET, packet);
    };
    let mut next = thread::thread_idx_x();
    if all <= THREADS {
        // Threads that wait for fewer words leave more of L2 to the weights.
        if next < all {
            store(next, step.words.packet(first + 4 * next as usize));
        }
        return;
    }
    while next < all {
        // Past the last packet, the first of the batch is read again.
        let at = [next, if next + THREADS < all { next + THREADS } else { next }];
        let packets = step.words.two_packets::<T>(at.map(|i| first + 4 * i as usize));
        for i in 0..2 {
            store(at[i], packets[i]);
        }
        next += 2 * THREADS;
    }
}

/// Normalizes the input in shared memory. With up to eight rows, each warp computes the statistics of one row, and the warps of a row
/// normalize a part of it. Otherwise, a warp computes every eighth row.
#[inline(always)]
fn normalize<T: TensorCore>(step: &Step<T>, linear: Linear, norm: u32, [has_weight, has_bias]: [bool; 2], eps: f32) {
    let (storage, rows) = (step.storage, step.sizes.rows);
    // log2 of the rows that the warps compute at a time.
    let shift = rows.min(CONSUMERS).next_power_of_two().trailing_zeros();
    let (parts, part) = (CONSUMERS >> shift, warp::index() >> shift);
    let mut row = warp::index() & ((1 << shift) - 1);
    // All warps take part in the barrier, also those that have no row.
    let mut waits = parts > 1;
    while waits || row < rows {
        let inputs = storage.inputs.skip(row.min(rows - 1) as usize * Storage::<T>::pitch(step.sizes));
        let (mean, square) = if norm == LAYERNORM {
            let mean = mean(inputs, linear.channels, |x| x);
            (mean, self::mean(inputs, linear.channels, |x| (x - mean) * (x - mean)) + LAYERNORM_EPS)
        } else {
            (0.0, mean(inputs, linear.channels, |x| x * x) + eps)
        };
        if waits {
            // Other warps of the row read it until they have its statistics.
            sync_consumers();
            waits = false;
        }
        let rstd = math::rsqrt(square);
        let mut channel = (part as usize * LANES + warp::lane() as usize) * T::PACKET;
        while row < rows && channel < linear.channels {
            let x = inputs.packet(channel);
            let weight = if has_weight { storage.norm_weight.packet(channel) } else { Packet::from_fn(|_| 1.0) };
            let bias = if has_bias { storage.norm_bias.packet(channel) } else { Packet::zero() };
            let normalized = Packet::from_fn(|i| math::fma((x.get(i) - mean) * rstd, weight.get(i), bias.get(i)));
            inputs.set_packet(channel, normalized);
            channel += parts as usize * LANES * T::PACKET;
        }
        row += CONSUMERS;
    }
}

/// Returns the mean of `f(x)` over a row, in every lane.
#[inline(always)]
fn mean<T: TensorCore>(row: SharedArray<T>, channels: usize, f: impl Fn(f32) -> f32) -> f32 {
    let (mut sum, mut channel) = (0.0, warp::lane() as usize * T::PACKET);
    while channel < channels {
        let x = row.packet(channel);
        for i in 0..T::PACKET {
            sum += f(x.get(i));
        }
        channel += LANES * T::PACKET;
    }
    // Scales before the reduction, because the sum of squares may overflow although their mean does not.
    warp::sum(sum * math::recip(channels as u32 as f32))
}

/// Multiplies tile `tile` by the input, and stores the sums over the warp's channels as (R, 8) at place `first` + warp of the sums.
#[inline(always)]
fn multiply<T: TensorCore, const FP8: bool>(
    step: &Step<T>,
    linear: Linear,
    scale: Bf16Scale,
    tile: usize,
    state: &mut PipelineState,
    first: usize,
) {
    let (storage, pitch) = (step.storage, Storage::<T>::pitch(step.sizes));
    let (warp, lane, rows) = (warp::index() as usize, warp::lane() as usize, step.sizes.rows as usize);
    let (g, t) = (lane / 4, lane % 4);
    let (all, halves) = (linear.weight_packets::<T, FP8>(), halves::<FP8>());
    // Rows past the last repeat it: their sums are not stored.
    let inputs = [g, g + 8].map(|row| storage.inputs.skip(row.min(rows - 1) * pitch));
    let place = linear.tile_place(tile, g);
    let mut d = [[0.0; 4]; 2];
    let mut piece = 0;
    while piece < all {
        storage.barriers.wait_full(*state);
        let weights = storage.ring.stage(state.stage()).skip(place * Ring::<T>::PITCH);
        let packets = (all - piece).min(PIECE);
        let (mut w, mut x) = ([Packet::<T>::zero(); UNROLL], [[[Packet::<T>::zero(); 2]; 2]; UNROLL]);
        for u in 0..UNROLL {
            let packet = (u * WARPS + warp) * 4 + t;
            // Loads past the end repeat the last packet: with a condition per load, ptxas would interleave loads and uses.
            let packet = packet.min(packets - 1);
            w[u] = weights.packet(packet * T::PACKET);
            for i in 0..halves {
                x[u][i] = inputs.map(|row| row.packet(((piece + packet) * halves + i) * T::PACKET));
            }
        }
        for u in 0..UNROLL {
            let block = (u * WARPS + warp) * 4;
            if block < packets {
                if block + t >= packets {
                    (w[u], x[u]) = (Packet::zero(), [[Packet::zero(); 2]; 2]);
                }
                let mut weights = [w[u]; 2];
                if FP8 {
                    let packet = Packet::<E4m3>::from_packed(w[u].words());
                    weights = packet.to_bf16(scale).map(|half| Packet::from_words(half.words()));
                }
                for i in 0..halves {
                    T::mma_packets(&mut d, x[u][i], weights[i]);
                }
            }
        }
        storage.barriers.release_by_warp(state.advance());
        piece += PIECE;
    }
    let sums = storage.sums.skip((first + warp) * rows * TILE);
    for i in 0..4 {
        let (row, column) = (g + i / 2 * 8, 2 * t + i % 2);
        if row < rows {
            sums.set(row * TILE + column, d[0][i] + d[1][i]);
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
    residual: u64,
    activation: u32,
}

/// The operands of a thread's two columns: the bias of up and gate, and the words of the residual.
#[derive(Clone, Copy)]
struct Operands {
    bias: [[f32; 2]; 2],
    residual: Pair,
}

#[device]
impl<T: TensorCore> Epilogue<'_, T> {
    /// Returns the row and the first column of the thread for the tiles from `tile` on, if it has one. The column is counted from the
    /// first of the block.
    fn place(self, tile: usize) -> Option<(usize, usize)> {
        let thread = thread::thread_idx_x() as usize;
        let (row, pair) = (thread / PAIRS, thread % PAIRS);
        let (column, end) = ((tile << self.linear.tile_shift()) + 2 * pair, MAX_TILES << self.linear.tile_shift());
        let exists = row < self.step.sizes.rows as usize && 2 * pair < end && column < self.linear.count;
        if exists { Some((row, column)) } else { None }
    }

    /// Returns the index in the output of a column of the block.
    fn index(self, row: usize, column: usize) -> usize {
        row * self.linear.columns + self.linear.first + column
    }

    /// Loads the thread's operands for the tiles from `tile` on.
    fn operands(self, tile: usize) -> Operands {
        let mut operands = Operands { bias: [[0.0; 2]; 2], residual: [0; 2] };
        if let Some((row, column)) = self.place(tile) {
            if self.bias != 0 {
                for gate in 0..2 {
                    for i in 0..2 {
                        if gate == 0 || self.linear.is_gated {
                            let at = self.bias + self.linear.row(column + i, gate);
                            operands.bias[gate][i] = self.step.elements.at(at).to_f32();
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

    /// Adds the sums of the warps for a column of a tile.
    fn sum(self, row: usize, tile: usize, column: usize) -> f32 {
        let (sums, rows) = (self.step.storage.sums, self.step.sizes.rows as usize);
        let mut sum = 0.0;
        for warp in 0..WARPS {
            sum += sums.at(((tile * WARPS + warp) * rows + row) * TILE + column);
        }
        sum
    }

    /// Stores the thread's columns of the tiles from `tile` on, whose sums begin at place `first` of the sums.
    fn store(self, tile: usize, operands: Operands, first: usize) {
        let Some((row, column)) = self.place(tile) else { return };
        let (own, width) = (column - (tile << self.linear.tile_shift()), 1 << self.linear.tile_shift());
        let mut values = [0.0; 2];
        for i in 0..2 {
            let (tile, place) = (first + (own >> self.linear.tile_shift()), (own & (width - 1)) + i);
            let value = self.sum(row, tile, place) + operands.bias[0][i];
            values[i] = value;
            if self.activation != 0 {
                let gate =
                    if self.linear.is_gated { self.sum(row, tile, width + place) + operands.bias[1][i] } else { 0.0 };
                values[i] = value_of(self.activation, [value, gate].map(|x| T::from_f32(x).to_f32()));
            }
        }
        let at = self.index(row, column);
        if self.residual != NONE {
            let residual = self.step.words.two::<T>(operands.residual, self.residual as usize, at);
            values = [values[0] + residual[0], values[1] + residual[1]];
        }
        self.output.set_two(at, values);
    }
}
