//! Epilogues with a gated activation function, which pair column j of up with column j of gate.
//!
//! The preactivation (M, 2, F) holds up and gate of each row, and so does its gradient. The activation is (M, F).
//! * Forward: half of a tile's columns are columns of up, the other half the same columns of gate.
//! * Backward: the tile is the activation's gradient.
//!
//! A consumer processes its rows of a tile in subtiles of 64 rows x 32 columns of F. A ping-pong tile of 192 columns has
//! 96 columns of up, which subtiles of 64 columns do not divide. Each subtile has a slot: a buffer for up and one for
//! gate. Two more buffers, used alternately, are for the activation.
//!
//! The forward epilogue can quantize the activation to FP8 ([`Quantizer`]). A subtile of FP8 numbers has up to 64 columns, and takes two
//! buffers with its transpose. It is complete after one or two subtiles of the preactivation, which have the same rows.

use super::buffers::slot;
use super::epilogue::{EpilogueOperands, EpilogueStore};
use super::mainloop::ConsumerAccumulators;
use super::quantized::{Quantizer, SubtileTiles};
use super::shared::SharedStorage;
use super::tile::{EPILOGUE_TILE, Tile, WorkTile};
use crate::activation::ActivationFunction;
use core::marker::PhantomData;
use cuda_std::element::{pack_pair, unpack_pair};
use cuda_std::hopper::{self, NarrowTile, WARPGROUP, is_warpgroup_leader, tma};
use cuda_std::{E4m3, device, thread, warp};

/// Rows of a subtile.
const ROWS: usize = 64;
/// Columns of F in a subtile.
pub const COLUMNS: u32 = 32;
/// Buffers of a consumer: each of the four epilogue buffers of a ping-pong tile holds two.
const BUFFERS: u32 = 8;
/// Columns of a fragment.
const FRAGMENT_COLUMNS: u32 = 16;

/// Applies the forward epilogue or, if `BACKWARD`, the backward epilogue, and stores through shared memory by TMA.
///
/// Forward, out is the activation (M, F) and second the preactivation (M, 2, F). Backward, aux is the preactivation, out its
/// gradient and, if `VALUE`, second the activation. If `FP8`, the activation is in E4M3, and its transpose is stored if required.
pub struct GatedEpilogue<A, T, const BACKWARD: bool, const VALUE: bool, const FP8: bool> {
    shared: SharedStorage,
    operands: EpilogueOperands,
    consumer: u32,
    /// Tiles stored so far.
    stored_tiles: u32,
    quantizer: Option<Quantizer<E4m3>>,
    kind: PhantomData<(A, T)>,
}

/// Returns the packed pairs of up, gate and their activation. The function reads up and gate after their rounding to bf16, so
/// that the activation can be recomputed from them bit for bit.
#[inline(always)]
fn forward<A: ActivationFunction>(up: [f32; 2], gate: [f32; 2]) -> [u32; 3] {
    let (up, gate) = (pack_pair(up[0], up[1]), pack_pair(gate[0], gate[1]));
    [up, gate, activation::<A>(up, gate)]
}

#[inline(always)]
fn activation<A: ActivationFunction>(up: u32, gate: u32) -> u32 {
    let (up, gate) = (unpack_pair(up), unpack_pair(gate));
    pack_pair(A::value([up[0], gate[0]]), A::value([up[1], gate[1]]))
}

/// Returns the packed pairs of the gradients of up and gate, and of their activation.
#[inline(always)]
fn backward<A: ActivationFunction>(gradient: [f32; 2], up: u32, gate: u32) -> [u32; 3] {
    let (ups, gates) = (unpack_pair(up), unpack_pair(gate));
    let even = A::gradients(gradient[0], [ups[0], gates[0]]);
    let odd = A::gradients(gradient[1], [ups[1], gates[1]]);
    [pack_pair(even[0], odd[0]), pack_pair(even[1], odd[1]), activation::<A>(up, gate)]
}

#[device]
impl<A: ActivationFunction, T: Tile, const BACKWARD: bool, const VALUE: bool, const FP8: bool> EpilogueStore<T>
    for GatedEpilogue<A, T, BACKWARD, VALUE, FP8>
{
    fn new(shared: SharedStorage, operands: EpilogueOperands, consumer: u32) -> Self {
        const {
            assert!(!T::COOPERATIVE && 2 * T::EPILOGUE_BUFFERS == BUFFERS);
            // Each subtile then has the same buffer for its activation in every tile.
            assert!(Self::SUBTILES.is_multiple_of(2));
            assert!(2 * Self::SLOTS <= if Self::STORES_VALUE { Self::VALUE_BUFFER } else { BUFFERS });
            assert!(!FP8 || !BACKWARD && Self::BLOCKS <= 3);
        }
        let quantizer = if FP8 { Some(Quantizer::new(operands)) } else { None };
        Self { shared, operands, consumer, stored_tiles: 0, quantizer, kind: PhantomData }
    }

    fn prefetch(&mut self, tile: WorkTile) {
        if BACKWARD && is_warpgroup_leader() {
            tma::wait_stores_read();
            for subtile in 0..Self::SLOTS {
                self.load(subtile, tile);
            }
        }
        if !BACKWARD {
            // Otherwise the compiler computes the position after the mainloop, where the accumulators need the registers.
            thread::opaque(tile.row);
            thread::opaque(tile.column);
        }
    }

    fn store(&mut self, d: &ConsumerAccumulators<T::Accumulator>, tile: WorkTile) {
        if FP8 {
            self.store_rows::<0>(&d.upper, tile);
            self.store_rows::<1>(&d.lower, tile);
            self.stored_tiles += 1;
            return;
        }
        self.store_columns::<0>(d, tile);
        self.store_columns::<1>(d, tile);
        if Self::BLOCKS > 2 {
            self.store_columns::<2>(d, tile);
        }
        if Self::BLOCKS > 3 {
            self.store_columns::<3>(d, tile);
        }
        if Self::BLOCKS > 4 {
            self.store_columns::<4>(d, tile);
            self.store_columns::<5>(d, tile);
        }
        self.stored_tiles += 1;
    }

    fn finish(&self) {
        if is_warpgroup_leader() {
            tma::wait_stores();
        }
        if let Some(quantizer) = &self.quantizer {
            quantizer.finish();
        }
    }
}

#[device]
impl<A: ActivationFunction, T: Tile, const BACKWARD: bool, const VALUE: bool, const FP8: bool>
    GatedEpilogue<A, T, BACKWARD, VALUE, FP8>
{
    /// True if the activation is stored.
    const STORES_VALUE: bool = !BACKWARD || VALUE;
    /// Blocks of [`COLUMNS`] columns of F in a tile: 2, 3, 4 or 6.
    const BLOCKS: u32 = if BACKWARD { T::TILE_N } else { T::TILE_N / 2 } / COLUMNS;
    /// Blocks of 64 rows of a consumer.
    const HALVES: u32 = T::CONSUMER_M / EPILOGUE_TILE;
    const SUBTILES: u32 = Self::BLOCKS * Self::HALVES;
    /// Subtiles that have buffers for up and gate at a time. The loads of the backward epilogue use all of them.
    const SLOTS: u32 = match (BACKWARD, VALUE) {
        (false, _) => 2,
        (true, true) => 3,
        (true, false) => 4,
    };
    /// First of the two, or in FP8 four, buffers for the activation.
    const VALUE_BUFFER: u32 = BUFFERS - if FP8 { 4 } else { 2 };

    /// Returns the slot of a subtile of the current tile, and how many subtiles used that slot before.
    fn slot(&self, subtile: u32) -> (u32, u32) {
        slot(subtile, self.stored_tiles, Self::SUBTILES, Self::SLOTS)
    }

    fn buffer(&self, index: u32) -> NarrowTile<ROWS> {
        let first_row = T::PIPELINE_ROWS + self.consumer * T::EPILOGUE_BUFFERS * EPILOGUE_TILE;
        self.shared.pool.narrow::<ROWS>(first_row).offset_tiles(index)
    }

    /// Starts the loads of a subtile's up and gate.
    fn load(&self, subtile: u32, WorkTile { row, column, .. }: WorkTile) {
        let (slot, _) = self.slot(subtile);
        let full = self.shared.aux_full.at(self.consumer * T::EPILOGUE_BUFFERS + slot);
        full.arrive_expect_tx(2 * NarrowTile::<ROWS>::BYTES);
        let (x, y) = (column + subtile / Self::HALVES * COLUMNS, row + subtile % Self::HALVES * EPILOGUE_TILE);
        let up = self.buffer(2 * slot);
        up.load_interleaved(self.operands.aux, x, 0, y, full);
        up.offset_tiles(1).load_interleaved(self.operands.aux, x, 1, y, full);
    }

    /// Stores rows 64 `HALF` .. 64 `HALF` + 64 of the tile, and their activation in FP8.
    fn store_rows<const HALF: u32>(&mut self, d: &T::Accumulator, tile: WorkTile) {
        let mut matrices = [0; 4];
        self.store_subtile::<0, HALF>(d, tile, &mut matrices);
        self.store_subtile::<1, HALF>(d, tile, &mut matrices);
        self.copy_activation::<2>(0, HALF, tile);
        if Self::BLOCKS > 2 {
            self.store_subtile::<2, HALF>(d, tile, &mut matrices);
            self.copy_activation::<1>(2, HALF, tile);
        }
    }

    /// Copies the activation of `COUNT` blocks of [`COLUMNS`] columns from block `block` on in FP8 to global memory.
    fn copy_activation<const COUNT: u32>(&self, block: u32, half: u32, tile: WorkTile) {
        let (out, column, row) =
            (self.activation_in_fp8(block, half), tile.column + block * COLUMNS, tile.row + half * EPILOGUE_TILE);
        if let Some(quantizer) = &self.quantizer {
            quantizer.copy_rows::<COUNT>(out, column, row);
            if quantizer.transposes() {
                quantizer.copy_columns::<COUNT>(out.columns, column, row);
            }
        }
    }

    /// Returns the buffers for the activation of a block and of that with which it forms a pair. Two pairs use them in turn: the copy of
    /// one ends before the barrier of the next.
    fn activation_in_fp8(&self, block: u32, half: u32) -> SubtileTiles {
        let pair = if Self::BLOCKS > 2 { block / 2 } else { half };
        SubtileTiles::new(self.buffer(Self::VALUE_BUFFER + 2 * pair))
    }

    fn store_columns<const BLOCK: u32>(&mut self, d: &ConsumerAccumulators<T::Accumulator>, tile: WorkTile) {
        let mut unused = [0; 4];
        self.store_subtile::<BLOCK, 0>(&d.upper, tile, &mut unused);
        if Self::HALVES > 1 {
            self.store_subtile::<BLOCK, 1>(&d.lower, tile, &mut unused);
        }
    }

    fn store_subtile<const BLOCK: u32, const HALF: u32>(
        &mut self,
        d: &T::Accumulator,
        tile: WorkTile,
        matrices: &mut [u32; 4],
    ) {
        let subtile = if FP8 { HALF * Self::BLOCKS + BLOCK } else { BLOCK * Self::HALVES + HALF };
        let out_in_fp8 = self.activation_in_fp8(BLOCK, HALF);
        let (slot, uses) = self.slot(subtile);
        let up = self.buffer(2 * slot);
        let (gate, out) = (up.offset_tiles(1), self.buffer(Self::VALUE_BUFFER + subtile % 2));
        if BACKWARD {
            self.shared.aux_full.at(self.consumer * T::EPILOGUE_BUFFERS + slot).wait(uses % 2);
        }
        // Forward, addresses that are computed early would occupy registers during the mainloop, and others would spill.
        let thread = thread::thread_idx_x() % WARPGROUP;
        let thread = if BACKWARD { thread } else { thread::opaque(thread) };
        let lane = if BACKWARD { warp::lane() } else { thread % warp::LANES };
        let first_row = thread / warp::LANES * 16;
        // See `TmaEpilogue`: a warp overwrites only elements that it has read itself.
        let (lane_row, lane_chunk) = (first_row + lane % 16, lane / 16);
        for fragment in 0..COLUMNS / FRAGMENT_COLUMNS {
            // A thread has four accumulators of eight columns.
            let column = BLOCK * COLUMNS + fragment * FRAGMENT_COLUMNS;
            let at = (column / 8 * 4) as usize;
            let pair = |i: usize| [d[at + 2 * i], d[at + 2 * i + 1]];
            let (mut ups, mut gates, mut outs) = ([0; 4], [0; 4], [0; 4]);
            if BACKWARD {
                let (old_ups, old_gates) =
                    (up.load_a_fragment(first_row, fragment), gate.load_a_fragment(first_row, fragment));
                for i in 0..4 {
                    [ups[i], gates[i], outs[i]] = backward::<A>(pair(i), old_ups[i], old_gates[i]);
                }
            } else {
                let first_gate = at + (T::TILE_N / 4) as usize;
                for i in 0..4 {
                    [ups[i], gates[i], outs[i]] =
                        forward::<A>(pair(i), [d[first_gate + 2 * i], d[first_gate + 2 * i + 1]]);
                }
            }
            let chunk = 2 * fragment + lane_chunk;
            up.store_matrices(lane_row, chunk, ups);
            gate.store_matrices(lane_row, chunk, gates);
            if let Some(quantizer) = &mut self.quantizer {
                quantizer.set(out_in_fp8, BLOCK % 2 * 2 + fragment, outs, matrices);
            } else if Self::STORES_VALUE {
                out.store_matrices(lane_row, chunk, outs);
            }
        }
        hopper::fence_async_proxy();
        // After the barrier, the buffers of all earlier subtiles are free.
        if is_warpgroup_leader() {
            tma::wait_stores_read();
        }
        thread::sync_named(1 + self.consumer, WARPGROUP);
        if is_warpgroup_leader() {
            let (x, y) = (tile.column + BLOCK * COLUMNS, tile.row + HALF * EPILOGUE_TILE);
            let EpilogueOperands { out: first, second, .. } = self.operands;
            let (pairs, activation) = if BACKWARD { (first, second) } else { (second, first) };
            up.store_interleaved(pairs, x, 0, y);
            gate.store_interleaved(pairs, x, 1, y);
            if Self::STORES_VALUE && !FP8 {
                out.store(activation, x, y);
            }
            tma::commit_stores();
            if BACKWARD && subtile > 0 && subtile - 1 + Self::SLOTS < Self::SUBTILES {
                self.load(subtile - 1 + Self::SLOTS, tile);
            }
        }
    }
}
