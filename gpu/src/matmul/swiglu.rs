//! GEMMs with a SwiGLU epilogue, which pairs column j of up with column j of gate.
//!
//! The preactivation (M, 2, F) holds up and gate of each row, and so does its gradient. The activation is (M, F).
//! * Forward: half of a tile's columns are columns of up, the other half the same columns of gate.
//! * Backward: the tile is the activation's gradient.
//!
//! A consumer processes its rows of a tile in subtiles of 64 rows x 32 columns of F. A ping-pong tile of 192 columns has
//! 96 columns of up, which subtiles of 64 columns do not divide. Each subtile has a slot: a buffer for up and one for
//! gate. Two more buffers, used alternately, are for the activation.

use super::epilogue::{EpilogueStore, slot};
use super::kernel::{NO_COLUMN_SUMS, run_persistent};
use super::mainloop::{AB, ABtPair, ConsumerAccumulators};
use super::shared::{SharedStorage, WARPGROUP, is_warpgroup_leader};
use super::tile::{EPILOGUE_TILE, Pingpong128x128, Pingpong128x192, Tile, TileScheduler, WorkTile};
use crate::swiglu;
use core::marker::PhantomData;
use cuda_std::element::{pack_pair, unpack_pair};
use cuda_std::hopper::{self, NarrowTile, TensorMap, tma};
use cuda_std::{Global, kernel, thread, warp};

/// Rows of a subtile.
const ROWS: usize = 64;
/// Columns of F in a subtile.
pub const COLUMNS: u32 = 32;
/// Buffers of a consumer: each of the four epilogue buffers of a ping-pong tile holds two.
const BUFFERS: u32 = 8;
/// Columns of a fragment.
const FRAGMENT_COLUMNS: u32 = 16;

/// The tensors of an epilogue. Those that it does not use may be arbitrary.
#[derive(Clone, Copy)]
pub struct SwiGluOperands {
    /// (M, 2, F): written by the forward epilogue, read by the backward epilogue.
    pub preactivation: Global<TensorMap>,
    /// (M, 2, F): written by the backward epilogue.
    pub gradient: Global<TensorMap>,
    /// (M, F): written if `ACTIVATION`.
    pub activation: Global<TensorMap>,
}

/// Applies the forward epilogue or, if `BACKWARD`, the backward epilogue, and stores through shared memory by TMA.
pub struct SwiGluEpilogue<T, const BACKWARD: bool, const ACTIVATION: bool> {
    shared: SharedStorage,
    operands: SwiGluOperands,
    consumer: u32,
    /// Tiles stored so far.
    stored_tiles: u32,
    tile: PhantomData<T>,
}

/// Returns the packed pairs of up, gate and their activation. SwiGLU reads up and gate after their rounding to bf16, so
/// that the activation can be recomputed from them bit for bit.
#[inline(always)]
fn forward(up: [f32; 2], gate: [f32; 2]) -> [u32; 3] {
    let (up, gate) = (pack_pair(up[0], up[1]), pack_pair(gate[0], gate[1]));
    [up, gate, activation(up, gate)]
}

#[inline(always)]
fn activation(up: u32, gate: u32) -> u32 {
    let (up, gate) = (unpack_pair(up), unpack_pair(gate));
    pack_pair(swiglu::swiglu(up[0], gate[0]), swiglu::swiglu(up[1], gate[1]))
}

/// Returns the packed pairs of the gradients of up and gate, and of their activation.
#[inline(always)]
fn backward(gradient: [f32; 2], up: u32, gate: u32) -> [u32; 3] {
    let (ups, gates) = (unpack_pair(up), unpack_pair(gate));
    let even = swiglu::swiglu_gradients(gradient[0], ups[0], gates[0]);
    let odd = swiglu::swiglu_gradients(gradient[1], ups[1], gates[1]);
    [pack_pair(even[0], odd[0]), pack_pair(even[1], odd[1]), activation(up, gate)]
}

impl<T: Tile, const BACKWARD: bool, const ACTIVATION: bool> EpilogueStore<T>
    for SwiGluEpilogue<T, BACKWARD, ACTIVATION>
{
    #[inline(always)]
    fn prefetch(&self, tile: WorkTile) {
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

    #[inline(always)]
    fn store(&mut self, d: &ConsumerAccumulators<T::Accumulator>, tile: WorkTile) {
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

    #[inline(always)]
    fn finish(&self) {
        if is_warpgroup_leader() {
            tma::wait_stores();
        }
    }
}

impl<T: Tile, const BACKWARD: bool, const ACTIVATION: bool> SwiGluEpilogue<T, BACKWARD, ACTIVATION> {
    /// Blocks of [`COLUMNS`] columns of F in a tile: 2, 3, 4 or 6.
    const BLOCKS: u32 = if BACKWARD { T::TILE_N } else { T::TILE_N / 2 } / COLUMNS;
    /// Blocks of 64 rows of a consumer.
    const HALVES: u32 = T::CONSUMER_M / EPILOGUE_TILE;
    const SUBTILES: u32 = Self::BLOCKS * Self::HALVES;
    /// Subtiles that have buffers for up and gate at a time. The loads of the backward epilogue use all of them.
    const SLOTS: u32 = match (BACKWARD, ACTIVATION) {
        (false, _) => 2,
        (true, true) => 3,
        (true, false) => 4,
    };
    /// First of the two buffers for the activation.
    const ACTIVATION_BUFFER: u32 = BUFFERS - 2;

    #[inline(always)]
    pub fn new(shared: SharedStorage, operands: SwiGluOperands, consumer: u32) -> Self {
        const {
            assert!(!T::COOPERATIVE && 2 * T::EPILOGUE_BUFFERS == BUFFERS);
            // Each subtile then has the same buffer for its activation in every tile.
            assert!(Self::SUBTILES.is_multiple_of(2));
            assert!(2 * Self::SLOTS <= if ACTIVATION { Self::ACTIVATION_BUFFER } else { BUFFERS });
        }
        Self { shared, operands, consumer, stored_tiles: 0, tile: PhantomData }
    }

    /// Returns the slot of a subtile of the current tile, and how many subtiles used that slot before.
    #[inline(always)]
    fn slot(&self, subtile: u32) -> (u32, u32) {
        slot(subtile, self.stored_tiles, Self::SUBTILES, Self::SLOTS)
    }

    #[inline(always)]
    fn buffer(&self, index: u32) -> NarrowTile<ROWS> {
        let first_row = T::PIPELINE_ROWS + self.consumer * T::EPILOGUE_BUFFERS * EPILOGUE_TILE;
        self.shared.pool.narrow::<ROWS>(first_row).offset_tiles(index)
    }

    /// Starts the loads of a subtile's up and gate.
    #[inline(always)]
    fn load(&self, subtile: u32, WorkTile { row, column, .. }: WorkTile) {
        let (slot, _) = self.slot(subtile);
        let full = self.shared.aux_full.at(self.consumer * T::EPILOGUE_BUFFERS + slot);
        full.arrive_expect_tx(2 * NarrowTile::<ROWS>::BYTES);
        let (x, y) = (column + subtile / Self::HALVES * COLUMNS, row + subtile % Self::HALVES * EPILOGUE_TILE);
        let up = self.buffer(2 * slot);
        up.load_interleaved(self.operands.preactivation, x, 0, y, full);
        up.offset_tiles(1).load_interleaved(self.operands.preactivation, x, 1, y, full);
    }

    #[inline(always)]
    fn store_columns<const BLOCK: u32>(&self, d: &ConsumerAccumulators<T::Accumulator>, tile: WorkTile) {
        self.store_subtile::<BLOCK, 0>(&d.upper, tile);
        if Self::HALVES > 1 {
            self.store_subtile::<BLOCK, 1>(&d.lower, tile);
        }
    }

    #[inline(always)]
    fn store_subtile<const BLOCK: u32, const HALF: u32>(&self, d: &T::Accumulator, tile: WorkTile) {
        let subtile = BLOCK * Self::HALVES + HALF;
        let (slot, uses) = self.slot(subtile);
        let up = self.buffer(2 * slot);
        let (gate, out) = (up.offset_tiles(1), self.buffer(Self::ACTIVATION_BUFFER + subtile % 2));
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
                    [ups[i], gates[i], outs[i]] = backward(pair(i), old_ups[i], old_gates[i]);
                }
            } else {
                let first_gate = at + (T::TILE_N / 4) as usize;
                for i in 0..4 {
                    [ups[i], gates[i], outs[i]] = forward(pair(i), [d[first_gate + 2 * i], d[first_gate + 2 * i + 1]]);
                }
            }
            let chunk = 2 * fragment + lane_chunk;
            up.store_matrices(lane_row, chunk, ups);
            gate.store_matrices(lane_row, chunk, gates);
            if ACTIVATION {
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
            let SwiGluOperands { preactivation, gradient, activation } = self.operands;
            let pairs = if BACKWARD { gradient } else { preactivation };
            up.store_interleaved(pairs, x, 0, y);
            gate.store_interleaved(pairs, x, 1, y);
            if ACTIVATION {
                out.store(activation, x, y);
            }
            tma::commit_stores();
            if BACKWARD && subtile > 0 && subtile - 1 + Self::SLOTS < Self::SUBTILES {
                self.load(subtile - 1 + Self::SLOTS, tile);
            }
        }
    }
}

/// preactivation (M, 2, F) = a (M, K) · b (2, F, K)ᵀ, out (M, F) = up · silu(gate), where up and gate are the two
/// matrices of the preactivation. `f` and `k` are multiples of 8.
///
/// Grid: (number of SMs).
#[kernel(threads = 384, blocks_per_sm = 1, requires = "wgmma", instances(
    tile_128x128 = <Pingpong128x128>,
    tile_128x192 = <Pingpong128x192>))]
pub fn matmul_swiglu_forward<T: Tile>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    out: Global<TensorMap>,
    preactivation: Global<TensorMap>,
    m: u32,
    f: u32,
    k: u32,
) {
    if thread::thread_idx_x() == 0 {
        out.prefetch();
        preactivation.prefetch();
    }
    let scheduler = TileScheduler::new([T::TILE_M, T::TILE_N / 2], m, f, k, 1);
    let operands = SwiGluOperands { preactivation, gradient: preactivation, activation: out };
    let epilogue = |shared, consumer| SwiGluEpilogue::<T, false, true>::new(shared, operands, consumer);
    run_persistent::<ABtPair, T, _, false>(a, b, scheduler, NO_COLUMN_SUMS, epilogue);
}

/// out (M, 2, F) = the gradient of preactivation (M, 2, F), where that of up · silu(gate) is a (M, K) · b (K, F). With
/// `ACTIVATION`, also activation (M, F) = up · silu(gate). `f` and `k` are multiples of 8.
///
/// Grid: (number of SMs).
#[kernel(threads = 384, blocks_per_sm = 1, requires = "wgmma", instances(
    tile_128x128 = <Pingpong128x128, false>,
    tile_128x192 = <Pingpong128x192, false>,
    activation_128x128 = <Pingpong128x128, true>,
    activation_128x192 = <Pingpong128x192, true>))]
pub fn matmul_swiglu_backward<T: Tile, const ACTIVATION: bool>(
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    out: Global<TensorMap>,
    preactivation: Global<TensorMap>,
    activation: Global<TensorMap>,
    m: u32,
    f: u32,
    k: u32,
) {
    if thread::thread_idx_x() == 0 {
        out.prefetch();
        preactivation.prefetch();
        if ACTIVATION {
            activation.prefetch();
        }
    }
    let scheduler = TileScheduler::new([T::TILE_M, T::TILE_N], m, f, k, 1);
    let operands = SwiGluOperands { preactivation, gradient: out, activation };
    let epilogue = |shared, consumer| SwiGluEpilogue::<T, true, ACTIVATION>::new(shared, operands, consumer);
    run_persistent::<AB, T, _, false>(a, b, scheduler, NO_COLUMN_SUMS, epilogue);
}
