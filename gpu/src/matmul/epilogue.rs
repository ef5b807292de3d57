//! Epilogues: bias, residual, factors, GELU and ReLU², applied to accumulators on their way to global memory.
//!
//! A consumer processes its rows of a tile in subtiles of 64 x 64. TMA loads each subtile of aux into a buffer in
//! shared memory, and stores each subtile of the outputs from one.
//!
//! If the output is symmetric, tiles exist only where they have elements on or above the diagonal. A subtile above the
//! diagonal is stored twice: in its place, and transposed in the mirrored place. A subtile on the diagonal takes its
//! elements below the diagonal from those above it. So elements (i, j) and (j, i) have the same bits, however the
//! tensor cores sum. Subtiles below the diagonal are not stored.

use super::mainloop::ConsumerAccumulators;
use super::shared::{SharedStorage, WARPGROUP, is_warpgroup_leader};
use super::tile::{EPILOGUE_TILE, Tile, WorkTile};
use crate::{gelu, relu_squared};
use core::marker::PhantomData;
use cuda_std::element::{pack_pair, unpack_pair};
use cuda_std::hopper::{self, MBarrier, SwizzledTile, TensorMap, tma};
use cuda_std::{Global, bf16, math, thread, warp};

/// The elementwise part of an epilogue: out (M, N) and second (M, N) from the accumulators plus bias (N), and aux (M,
/// N).
pub trait Epilogue: 'static {
    /// True if the epilogue adds a bias.
    const BIAS: bool = false;
    /// True if the epilogue reads aux.
    const AUX: bool = false;
    /// True if the epilogue writes a second output.
    const SECOND: bool = false;
    /// True if the outputs and aux are batches of matrices, with tensor maps of three dimensions.
    const BATCHED: bool = false;
    /// True if the output is symmetric, and its subtiles below the diagonal are copies of those above it.
    const SYMMETRIC: bool = false;

    /// True if a subtile has a second buffer, for the second output or for the mirrored subtile.
    const TWO_BUFFERS: bool = Self::SECOND || Self::SYMMETRIC;

    /// Computes two adjacent elements of out, and of second if there is one, packed as bf16 pairs.
    #[inline(always)]
    fn apply([even, odd]: [f32; 2], _aux: [f32; 2]) -> [u32; 2] {
        [pack_pair(even, odd), 0]
    }

    /// Computes [`apply`](Self::apply), with the factors of an epilogue that has some.
    #[inline(always)]
    fn apply_scaled(acc: [f32; 2], aux: [f32; 2], _scale: Scale) -> [u32; 2] {
        Self::apply(acc, aux)
    }
}

/// The factors of an epilogue: alpha of a · b, beta of aux.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// Factor of a · b.
    pub alpha: f32,
    /// Factor of aux.
    pub beta: f32,
}

impl Scale {
    /// The factors of an epilogue that has none.
    pub const ONE: Self = Self { alpha: 1.0, beta: 1.0 };

    #[inline(always)]
    fn apply(self, acc: [f32; 2], aux: [f32; 2]) -> [u32; 2] {
        let sum = |acc, aux| math::fma(self.alpha, acc, self.beta * aux);
        [pack_pair(sum(acc[0], aux[0]), sum(acc[1], aux[1])), 0]
    }
}

/// out = a · b
pub struct Plain;
/// out = a · b + bias
pub struct Bias;
/// out = aux + a · b + bias
pub struct BiasResidual;
/// second = a · b + bias, out = gelu(second).
///
/// GELU reads second after its rounding to bf16, so that out can be recomputed from second bit for bit.
pub struct BiasGelu;
/// out = a · b ⊙ gelu'(aux)
pub struct GeluBackward;
/// out = a · b ⊙ gelu'(aux), second = gelu(aux)
pub struct GeluBackwardAndGelu;
/// second = a · b, out = max(second, 0)².
///
/// ReLU² reads second after its rounding to bf16, as GELU does.
pub struct ReluSquared;
/// out = a · b ⊙ 2 max(aux, 0)
pub struct ReluSquaredBackward;
/// out = a · b ⊙ 2 max(aux, 0), second = max(aux, 0)²
pub struct ReluSquaredBackwardAndReluSquared;
/// out = aux + a · b. aux may be out.
pub struct Accumulate;
/// out = beta · aux + alpha · a · b, for each matrix of a batch
pub struct Scaled;
/// out = a · b, which is symmetric, for each matrix of a batch
pub struct Symmetric;
/// out = beta · aux + alpha · a · b, where aux and a · b are symmetric, for each matrix of a batch
pub struct SymmetricScaled;

impl Epilogue for Plain {}

impl Epilogue for Bias {
    const BIAS: bool = true;
}

impl Epilogue for BiasGelu {
    const BIAS: bool = true;
    const SECOND: bool = true;

    #[inline(always)]
    fn apply([even, odd]: [f32; 2], _: [f32; 2]) -> [u32; 2] {
        let rounded = pack_pair(even, odd);
        let [even, odd] = unpack_pair(rounded);
        [pack_pair(gelu::gelu(even), gelu::gelu(odd)), rounded]
    }
}

impl Epilogue for Accumulate {
    const AUX: bool = true;

    #[inline(always)]
    fn apply(acc: [f32; 2], aux: [f32; 2]) -> [u32; 2] {
        [pack_pair(aux[0] + acc[0], aux[1] + acc[1]), 0]
    }
}

impl Epilogue for BiasResidual {
    const BIAS: bool = true;
    const AUX: bool = true;

    #[inline(always)]
    fn apply(acc: [f32; 2], aux: [f32; 2]) -> [u32; 2] {
        Accumulate::apply(acc, aux)
    }
}

impl Epilogue for GeluBackward {
    const AUX: bool = true;

    #[inline(always)]
    fn apply(acc: [f32; 2], aux: [f32; 2]) -> [u32; 2] {
        [pack_pair(acc[0] * gelu::slope(aux[0]), acc[1] * gelu::slope(aux[1])), 0]
    }
}

impl Epilogue for GeluBackwardAndGelu {
    const AUX: bool = true;
    const SECOND: bool = true;

    #[inline(always)]
    fn apply(acc: [f32; 2], aux: [f32; 2]) -> [u32; 2] {
        let [even, even_slope] = gelu::gelu_and_slope(aux[0]);
        let [odd, odd_slope] = gelu::gelu_and_slope(aux[1]);
        [pack_pair(acc[0] * even_slope, acc[1] * odd_slope), pack_pair(even, odd)]
    }
}

impl Epilogue for ReluSquared {
    const SECOND: bool = true;

    #[inline(always)]
    fn apply([even, odd]: [f32; 2], _: [f32; 2]) -> [u32; 2] {
        let stored = pack_pair(even, odd);
        let x = unpack_pair(stored);
        [pack_pair(relu_squared::relu_squared(x[0]), relu_squared::relu_squared(x[1])), stored]
    }
}

impl Epilogue for ReluSquaredBackward {
    const AUX: bool = true;

    #[inline(always)]
    fn apply(acc: [f32; 2], aux: [f32; 2]) -> [u32; 2] {
        [pack_pair(acc[0] * relu_squared::slope(aux[0]), acc[1] * relu_squared::slope(aux[1])), 0]
    }
}

impl Epilogue for ReluSquaredBackwardAndReluSquared {
    const AUX: bool = true;
    const SECOND: bool = true;

    #[inline(always)]
    fn apply(acc: [f32; 2], aux: [f32; 2]) -> [u32; 2] {
        let [out, _] = ReluSquaredBackward::apply(acc, aux);
        [out, pack_pair(relu_squared::relu_squared(aux[0]), relu_squared::relu_squared(aux[1]))]
    }
}

impl Epilogue for Scaled {
    const AUX: bool = true;
    const BATCHED: bool = true;

    #[inline(always)]
    fn apply_scaled(acc: [f32; 2], aux: [f32; 2], scale: Scale) -> [u32; 2] {
        scale.apply(acc, aux)
    }
}

impl Epilogue for Symmetric {
    const BATCHED: bool = true;
    const SYMMETRIC: bool = true;
}

impl Epilogue for SymmetricScaled {
    const AUX: bool = true;
    const BATCHED: bool = true;
    const SYMMETRIC: bool = true;

    #[inline(always)]
    fn apply_scaled(acc: [f32; 2], aux: [f32; 2], scale: Scale) -> [u32; 2] {
        scale.apply(acc, aux)
    }
}

/// Moves a consumer's accumulators to global memory.
pub trait EpilogueStore<T: Tile> {
    /// Starts the loads that the epilogue of `tile` needs, before the mainloop.
    fn prefetch(&self, tile: WorkTile);
    /// Applies the epilogue to the accumulators of `tile` and stores the result.
    fn store(&mut self, d: &ConsumerAccumulators<T::Accumulator>, tile: WorkTile);
    /// Waits until all stores have completed.
    fn finish(&self);
}

/// Buffers of a subtile: one for out, which is also that of aux, and one for second or the mirrored subtile.
const fn buffers_per_subtile<E: Epilogue>() -> u32 {
    1 + E::TWO_BUFFERS as u32
}

/// Subtiles of a consumer's rows of a tile.
const fn subtiles<T: Tile>() -> u32 {
    T::CONSUMER_M / EPILOGUE_TILE * (T::TILE_N / EPILOGUE_TILE)
}

/// Subtiles that have buffers at a time.
///
/// If possible, this number divides the number of subtiles of a tile: each subtile then has the same slot in every
/// tile.
const fn slots<E: Epilogue, T: Tile>() -> u32 {
    let fit = T::EPILOGUE_BUFFERS / buffers_per_subtile::<E>();
    let most = if fit < subtiles::<T>() { fit } else { subtiles::<T>() };
    let whole = subtiles::<T>().is_multiple_of(most);
    // One slot would make each subtile wait for the stores of the one before.
    if most > 2 && !whole && subtiles::<T>().is_multiple_of(most - 1) { most - 1 } else { most }
}

/// The tensors of an epilogue. Tensors that it does not use may be arbitrary.
#[derive(Clone, Copy)]
pub struct EpilogueOperands {
    pub out: Global<TensorMap>,
    pub aux: Global<TensorMap>,
    pub second: Global<TensorMap>,
    pub bias: Global<bf16>,
    /// Columns of the output.
    pub n: u32,
    pub scale: Scale,
}

/// Applies the epilogue `E` and stores through shared memory by TMA.
pub struct TmaEpilogue<E, T> {
    shared: SharedStorage,
    pub(super) operands: EpilogueOperands,
    consumer: u32,
    /// Tiles stored so far.
    pub(super) stored_tiles: u32,
    kind: PhantomData<(E, T)>,
}

impl<E: Epilogue, T: Tile> EpilogueStore<T> for TmaEpilogue<E, T> {
    #[inline(always)]
    fn prefetch(&self, tile: WorkTile) {
        if E::AUX && is_warpgroup_leader() {
            tma::wait_stores_read();
            for subtile in 0..slots::<E, T>() {
                self.load_aux(subtile, tile);
            }
        }
    }

    #[inline(always)]
    fn store(&mut self, d: &ConsumerAccumulators<T::Accumulator>, tile: WorkTile) {
        self.store_columns::<0>(d, tile);
        self.store_columns::<1>(d, tile);
        if T::TILE_N > 128 {
            self.store_columns::<2>(d, tile);
        }
        if T::TILE_N > 192 {
            self.store_columns::<3>(d, tile);
        }
        if T::TILE_N > 256 {
            self.store_columns::<4>(d, tile);
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

/// Returns the slot of a subtile, and how many subtiles used that slot before. Each of the `tiles` tiles before had
/// `subtiles` subtiles, which use `slots` slots in turn.
#[inline(always)]
pub fn slot(subtile: u32, tiles: u32, subtiles: u32, slots: u32) -> (u32, u32) {
    if subtiles.is_multiple_of(slots) {
        (subtile % slots, tiles * (subtiles / slots) + subtile / slots)
    } else {
        let before = tiles * subtiles + subtile;
        (before % slots, before / slots)
    }
}

impl<E: Epilogue, T: Tile> TmaEpilogue<E, T> {
    #[inline(always)]
    pub fn new(shared: SharedStorage, operands: EpilogueOperands, consumer: u32) -> Self {
        Self { shared, operands, consumer, stored_tiles: 0, kind: PhantomData }
    }

    /// Synchronizes the warps of this consumer.
    #[inline(always)]
    pub(super) fn sync(&self) {
        thread::sync_named(1 + self.consumer, WARPGROUP);
    }

    /// Returns the slot of a subtile of the current tile, and how many subtiles used that slot before.
    #[inline(always)]
    pub(super) fn slot(&self, subtile: u32) -> (u32, u32) {
        slot(subtile, self.stored_tiles, subtiles::<T>(), slots::<E, T>())
    }

    /// Returns the first buffer of a slot.
    #[inline(always)]
    pub(super) fn buffer(&self, slot: u32) -> SwizzledTile<64> {
        let buffer = self.consumer * T::EPILOGUE_BUFFERS + slot * buffers_per_subtile::<E>();
        self.shared.pool.rows::<64>(T::PIPELINE_ROWS + buffer * EPILOGUE_TILE)
    }

    /// Returns the barrier of the load of aux into a slot.
    #[inline(always)]
    pub(super) fn aux_full(&self, slot: u32) -> MBarrier {
        self.shared.aux_full.at(self.consumer * T::EPILOGUE_BUFFERS + slot)
    }

    #[inline(always)]
    fn load_aux(&self, subtile: u32, WorkTile { matrix, row, column, .. }: WorkTile) {
        let ((slot, _), halves) = (self.slot(subtile), T::CONSUMER_M / EPILOGUE_TILE);
        let full = self.aux_full(slot);
        full.arrive_expect_tx(SwizzledTile::<64>::BYTES);
        let (x, y) = (column + subtile / halves * EPILOGUE_TILE, row + subtile % halves * EPILOGUE_TILE);
        if E::BATCHED {
            self.buffer(slot).load_3d(self.operands.aux, x, y, matrix, full);
        } else {
            self.buffer(slot).load(self.operands.aux, x, y, full);
        }
    }

    /// Stores the subtiles of columns 64 `BLOCK` .. 64 `BLOCK` + 64 of the tile.
    #[inline(always)]
    fn store_columns<const BLOCK: u32>(&self, d: &ConsumerAccumulators<T::Accumulator>, tile: WorkTile) {
        let mut bias = [[0.0; 2]; 8];
        if E::BIAS {
            let first = tile.column + BLOCK * EPILOGUE_TILE + warp::lane() % 4 * 2;
            for j in 0..8 {
                let at = first + j as u32 * 8;
                if at < self.operands.n {
                    bias[j] = self.operands.bias.pair(at as usize);
                }
            }
        }
        self.store_subtile::<BLOCK, 0>(&d.upper, &bias, tile);
        if T::CONSUMER_M > EPILOGUE_TILE {
            self.store_subtile::<BLOCK, 1>(&d.lower, &bias, tile);
        }
    }

    #[inline(always)]
    fn store_subtile<const BLOCK: u32, const HALF: u32>(
        &self,
        d: &T::Accumulator,
        bias: &[[f32; 2]; 8],
        tile: WorkTile,
    ) {
        let subtile = BLOCK * (T::CONSUMER_M / EPILOGUE_TILE) + HALF;
        let (slot, uses) = self.slot(subtile);
        // out overwrites aux: each warp overwrites only elements that it has read itself.
        let out = self.buffer(slot);
        let second = if E::TWO_BUFFERS { out.offset_tiles(1) } else { out };
        if E::AUX {
            self.aux_full(slot).wait(uses % 2);
        } else {
            if is_warpgroup_leader() {
                wait_for_free_slot::<E, T>();
            }
            self.sync();
        }
        // The first column and row of the subtile.
        let (column, row) = (|| tile.column + BLOCK * EPILOGUE_TILE, || tile.row + HALF * EPILOGUE_TILE);
        if E::SYMMETRIC && column() < row() {
            self.skip_subtile(subtile, tile);
            return;
        }
        let first_row = thread::thread_idx_x() % WARPGROUP / 32 * 16;
        // This lane's row address for stmatrix. Matrices 0 and 1 are rows 0..8 and 8..16 of columns 0..8, matrices 2
        // and 3 those rows of columns 8..16.
        let (lane_row, lane_column) = (first_row + warp::lane() % 16, warp::lane() / 16);
        for quarter in 0..4 {
            // With two buffers there are only two slots. The next load of aux waits for the store of the previous
            // subtile, so it is issued in the middle of this one.
            if E::TWO_BUFFERS && quarter == 2 {
                self.load_next_aux::<0>(subtile, tile);
            }
            let mut x = [0.0; 8];
            for i in 0..8 {
                x[i] = d[(BLOCK as usize * 8 + quarter * 2) * 4 + i];
                if E::BIAS {
                    x[i] += bias[quarter * 2 + i / 4][i % 2];
                }
            }
            let aux = if E::AUX { out.load_a_fragment(first_row, quarter as u32) } else { [0; 4] };
            let (mut words, mut second_words) = ([0; 4], [0; 4]);
            for i in 0..4 {
                [words[i], second_words[i]] =
                    E::apply_scaled([x[2 * i], x[2 * i + 1]], unpack_pair(aux[i]), self.operands.scale);
            }
            let at = quarter as u32 * 2 + lane_column;
            out.store_matrices(lane_row, at, words);
            if E::SECOND {
                second.store_matrices(lane_row, at, second_words);
            }
            if E::SYMMETRIC {
                // Transposed, matrices 0 and 1 are columns 0..8 and 8..16 of rows 0..8.
                let lane_row = quarter as u32 * 16 + warp::lane() / 16 * 8 + warp::lane() % 8;
                second.store_transposed_matrices(lane_row, (first_row + warp::lane() % 16) / 8, words);
            }
        }
        if E::SYMMETRIC && column() == row() {
            self.sync();
            copy_upper_triangle(out, second, first_row);
        }
        hopper::fence_async_proxy();
        self.sync();
        if is_warpgroup_leader() {
            let (x, y) = (column(), row());
            if E::BATCHED {
                out.store_3d(self.operands.out, x, y, tile.matrix);
            } else {
                out.store(self.operands.out, x, y);
            }
            if E::SECOND {
                second.store(self.operands.second, x, y);
            }
            if E::SYMMETRIC && x != y {
                second.store_3d(self.operands.out, y, x, tile.matrix);
            }
            tma::commit_stores();
        }
        if !E::TWO_BUFFERS {
            self.load_next_aux::<1>(subtile, tile);
        }
    }

    /// Skips a subtile below the diagonal. All warps of this consumer must call it.
    #[inline(always)]
    fn skip_subtile(&self, subtile: u32, tile: WorkTile) {
        if E::AUX {
            // All warps have seen the phase of this aux buffer before its next phase can begin.
            self.sync();
            self.load_next_aux::<0>(subtile, tile);
        }
        if is_warpgroup_leader() {
            // An empty group: `wait_for_free_slot` counts one for each subtile.
            tma::commit_stores();
        }
    }

    /// Starts the next load of aux into the slot of the subtile before `subtile`. All stores but the `PENDING` newest
    /// must have read their buffers before.
    #[inline(always)]
    pub(super) fn load_next_aux<const PENDING: u32>(&self, subtile: u32, tile: WorkTile) {
        if E::AUX && subtile > 0 && subtile - 1 + slots::<E, T>() < subtiles::<T>() && is_warpgroup_leader() {
            tma::wait_stores_read_all_but::<PENDING>();
            self.load_aux(subtile - 1 + slots::<E, T>(), tile);
        }
    }
}

/// Replaces the elements below the diagonal of `tile` by those of its transpose `transposed`, in this warp's rows
/// `first_row` .. `first_row` + 16.
#[inline(always)]
fn copy_upper_triangle(tile: SwizzledTile<64>, transposed: SwizzledTile<64>, first_row: u32) {
    let lane = warp::lane();
    for quarter in 0..4 {
        let (mut words, mirrored) =
            (tile.load_a_fragment(first_row, quarter), transposed.load_a_fragment(first_row, quarter));
        for i in 0..4 {
            // Words 0 and 1 are rows 0..8 and 8..16 of columns 0..8, words 2 and 3 those rows of columns 8..16.
            let (row, column) = (first_row + lane / 4 + i % 2 * 8, quarter * 16 + lane % 4 * 2 + i / 2 * 8);
            let below = |column: u32, half: u32| if column < row { half } else { 0 };
            let mask = below(column, 0xffff) | below(column + 1, 0xffff_0000);
            words[i as usize] = words[i as usize] & !mask | mirrored[i as usize] & mask;
        }
        tile.store_matrices(first_row + lane % 16, quarter * 2 + lane / 16, words);
    }
}

/// Waits until the TMA stores have read the buffers of the next slot.
#[inline(always)]
pub(super) fn wait_for_free_slot<E: Epilogue, T: Tile>() {
    match slots::<E, T>() {
        2 => tma::wait_stores_read_all_but::<1>(),
        3 => tma::wait_stores_read_all_but::<2>(),
        _ => tma::wait_stores_read_all_but::<3>(),
    }
}
