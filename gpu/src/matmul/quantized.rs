//! Epilogues with an out in FP8.
//!
//! Results are rounded to bf16 first, so out has the bits that the kernels of [`quantize`](crate::quantize) would compute from
//! an out in bf16, unless it is infinite or a NaN. Then the results that the same thread has in the same 16 columns become NaN, too.
//!
//! Buffers, loads of aux and the second output are those of [`TmaEpilogue`](super::epilogue::TmaEpilogue). A subtile of out has rows of 64 bytes. It has
//! its own buffer: aux has elements of another size, so out cannot overwrite it.
//!
//! The transpose of a subtile is in the same buffer as the subtile. `stmatrix` transposes matrices of 16-bit elements. An element holds
//! the FP8 numbers of rows r and r + 8, which belong to one thread. In shared memory, 16 rows of a column therefore have the order 0, 8,
//! 1, 9, …, 7, 15. The threads that copy them to global memory restore the order.
//!
//! A backward epilogue can also recompute the activation from aux and store the transpose of its E4M3 copy, for the gradient of a weight.
//! The transposes of out and of the activation then have one buffer each, which all subtiles use.

use super::buffers::{Buffering, SubtileBuffers};
use super::epilogue::{Elementwise, EpilogueOperands, EpilogueStore, TileBias, sums};
use super::mainloop::ConsumerAccumulators;
use super::shared::SharedStorage;
use super::tile::{EPILOGUE_TILE, Tile, WorkTile};
use crate::quantize::{Magnitudes, store_amax};
use core::marker::PhantomData;
use cuda_std::element::{pack_pair, unpack_pair};
use cuda_std::fp8::{interleave_pairs, separate_bytes};
use cuda_std::hopper::{self, NarrowTile, SwizzledTile, WARPGROUP, is_warpgroup_leader, tma};
use cuda_std::{E4m3, Fp8, Packet, device, math, thread, warp};

/// The buffers of the epilogue `E` with an out in FP8.
struct Buffers<E>(PhantomData<E>);

impl<E: Elementwise> Buffering for Buffers<E> {
    const AUX: bool = E::AUX;
    const TWO_BUFFERS: bool = E::SECOND || E::AUX;
    const BATCHED: bool = false;
}

/// Quantizes subtiles of 64 x 64 results of a consumer to the FP8 type `O`.
pub struct Quantizer<O> {
    operands: EpilogueOperands,
    /// 1 / scale.
    factor: f32,
    /// Those of this thread's results.
    magnitudes: Magnitudes,
    element: PhantomData<O>,
}

#[device]
impl<O: Fp8> Quantizer<O> {
    pub fn new(operands: EpilogueOperands) -> Self {
        let factor = math::div_rn(1.0, operands.scale_out.at(0));
        Self { operands, factor, magnitudes: Magnitudes::NONE, element: PhantomData }
    }

    /// Creates the quantizer of a recomputed activation, of which only the transpose is stored.
    pub fn of_activation(operands: EpilogueOperands) -> Self {
        let EpilogueOperands { activation, scale_activation, .. } = operands;
        Self::new(EpilogueOperands { transposed: activation, scale_out: scale_activation, ..operands })
    }

    /// Returns true if the transpose is required.
    pub fn transposes(&self) -> bool {
        !self.operands.transposed.is_null()
    }

    /// Quantizes 16 columns of a subtile, from column 16 `quarter` on, and stores them in `out`. `rounded` has packed pairs in the
    /// accumulator layout. `matrices` are those of [`set_columns`](Self::set_columns). `quarter` is a constant.
    pub fn set(&mut self, out: SubtileTiles, quarter: u32, rounded: [u32; 4], matrices: &mut [u32; 4]) {
        // Without `opaque`, the addresses of all quarters would be computed before the loop over tiles, and would occupy
        // registers that the accumulators need.
        let lane = thread::opaque(warp::lane());
        // This lane's elements of a word are in row lane / 4 and columns lane % 4 * 2 and + 1 of an 8 x 8 matrix.
        let (row, column) = (Self::first_row() + lane / 4, quarter * 16 + lane % 4 * 2);
        let pairs = self.pairs(rounded);
        for i in 0..4 {
            out.rows.set_fp8_pair(row + i as u32 % 2 * 8, column + i as u32 / 2 * 8, pairs[i]);
        }
        if self.transposes() {
            Self::set_columns(out.columns, quarter, pairs, matrices);
        }
    }

    /// Does the same as [`set`](Self::set), but stores only the transpose, in `columns`, and leaves the largest magnitude unchanged.
    fn set_transposed(&self, columns: NarrowTile<64>, quarter: u32, rounded: [u32; 4], matrices: &mut [u32; 4]) {
        Self::set_columns(columns, quarter, self.quantize(rounded, Magnitudes::of_pairs(rounded)), matrices);
    }

    /// Returns the FP8 pairs of packed pairs, and takes these into account in the largest magnitude.
    pub fn pairs(&mut self, rounded: [u32; 4]) -> [u16; 4] {
        let magnitudes = Magnitudes::of_pairs(rounded);
        self.magnitudes = self.magnitudes.and(magnitudes);
        self.quantize(rounded, magnitudes)
    }

    /// Returns the FP8 pairs of packed pairs with these magnitudes.
    pub fn quantize(&self, rounded: [u32; 4], magnitudes: Magnitudes) -> [u16; 4] {
        let addend = magnitudes.zero_or_nan();
        rounded.map(|pair| {
            let [even, odd] = unpack_pair(pair).map(|x| math::fma(x, self.factor, addend));
            O::pack_pair(even, odd)
        })
    }

    /// Stores the transpose of a quarter. One `stmatrix` transposes 32 columns, so `matrices` keeps the results of an even quarter for the odd
    /// quarter that follows.
    fn set_columns(columns: NarrowTile<64>, quarter: u32, pairs: [u16; 4], matrices: &mut [u32; 4]) {
        let (lane, first) = (thread::opaque(warp::lane()), quarter as usize % 2 * 2);
        matrices[first] = interleave_pairs(pairs[0], pairs[1]);
        matrices[first + 1] = interleave_pairs(pairs[2], pairs[3]);
        if quarter % 2 == 1 {
            columns.store_transposed_matrices(quarter / 2 * 32 + lane, Self::first_row() / 16, *matrices);
        }
    }

    /// Returns the first row of this warp in a subtile.
    fn first_row() -> u32 {
        thread::thread_idx_x() % WARPGROUP / warp::LANES * 16
    }

    /// Copies `columns`, the transpose of the subtile of 64 rows x 32 `BLOCKS` columns that begins at `column` and `row`, to global memory. All
    /// threads of the consumer must have reached a barrier after [`set`](Self::set), and reach another one before the buffer changes.
    pub fn copy_columns<const BLOCKS: u32>(&self, columns: NarrowTile<64>, column: u32, row: u32) {
        let EpilogueOperands { transposed, m, n, .. } = self.operands;
        // Four threads have the rows of a column.
        let thread = thread::opaque(thread::thread_idx_x() % WARPGROUP);
        let row = row + thread % 4 * 16;
        for i in 0..BLOCKS {
            let subtile_column = thread / 4 + i * 32;
            let words = separate_bytes(columns.chunk_words(subtile_column, thread % 4));
            let column = column + subtile_column;
            if row < m && column < n {
                transposed.set_packet(column as usize * m as usize + row as usize, Packet::from_packed(words));
            }
        }
    }

    /// Copies the subtile itself. Otherwise as [`copy_columns`](Self::copy_columns).
    pub fn copy_rows<const BLOCKS: u32>(&self, out: SubtileTiles, column: u32, row: u32) {
        let EpilogueOperands { fp8_out, m, n, .. } = self.operands;
        let (thread, chunks) = (thread::opaque(thread::thread_idx_x() % WARPGROUP), 2 * BLOCKS);
        for i in 0..BLOCKS {
            let (subtile_row, chunk) = ((thread + i * WARPGROUP) / chunks, (thread + i * WARPGROUP) % chunks);
            let (row, column) = (row + subtile_row, column + chunk * 16);
            if row < m && column < n {
                let words = out.rows.chunk_words(subtile_row, chunk);
                fp8_out.set_packet(row as usize * n as usize + column as usize, Packet::from_packed(words));
            }
        }
    }

    /// Stores the largest magnitude of all results.
    pub fn finish(&self) {
        store_amax(self.operands.amax, self.magnitudes.largest());
    }
}

/// A subtile of 64 x 64 FP8 numbers in shared memory, and its transpose, which follows it.
#[derive(Clone, Copy)]
pub struct SubtileTiles {
    pub rows: NarrowTile<64>,
    pub columns: NarrowTile<64>,
}

#[device]
impl SubtileTiles {
    pub fn new(rows: NarrowTile<64>) -> Self {
        Self { rows, columns: rows.offset_tiles(1) }
    }
}

/// Applies the epilogue `E` and stores its result / scale in the FP8 type `O` through shared memory by TMA.
pub struct QuantizedEpilogue<E, O, T> {
    buffers: SubtileBuffers<Buffers<E>, T>,
    operands: EpilogueOperands,
    bias: TileBias,
    quantizer: Quantizer<O>,
    /// Set if the epilogue recomputes an activation.
    activation: Option<Quantizer<E4m3>>,
}

#[device]
impl<E: Elementwise, O: Fp8, T: Tile> EpilogueStore<T> for QuantizedEpilogue<E, O, T> {
    const SCALES: bool = true;

    fn new(shared: SharedStorage, operands: EpilogueOperands, consumer: u32) -> Self {
        let buffers = SubtileBuffers::new(shared, operands.aux, consumer);
        let activation = if Self::RECOMPUTES { Some(Quantizer::of_activation(operands)) } else { None };
        Self { buffers, operands, bias: TileBias::zero(), quantizer: Quantizer::new(operands), activation }
    }

    fn prefetch(&mut self, tile: WorkTile) {
        if E::BIAS {
            self.bias.load(self.operands.bias, tile.column, T::TILE_N, self.operands.n);
        }
        self.buffers.prefetch(tile);
    }

    fn store(&mut self, d: &ConsumerAccumulators<T::Accumulator>, tile: WorkTile) {
        assert!(T::TILE_N <= 192, "an FP8 out needs tiles of at most 192 columns");
        self.store_columns::<0>(d, tile);
        self.store_columns::<1>(d, tile);
        if T::TILE_N > 128 {
            self.store_columns::<2>(d, tile);
        }
        self.buffers.stored_tiles += 1;
    }

    fn finish(&self) {
        SubtileBuffers::<Buffers<E>, T>::finish();
        self.quantizer.finish();
    }
}

#[device]
impl<E: Elementwise, O: Fp8, T: Tile> QuantizedEpilogue<E, O, T> {
    /// True if second is a preactivation, stored in bf16.
    const PREACTIVATION: bool = E::EPILOGUE.writes_preactivation();
    /// True if second is an activation that is recomputed. It is quantized.
    const RECOMPUTES: bool = E::SECOND && !Self::PREACTIVATION;

    /// Returns the buffer of out, and the buffer of second if there is one, of the slot that begins at `first`.
    fn output_buffers(&self, first: SwizzledTile<64>) -> (SubtileTiles, SwizzledTile<64>) {
        let next = if Buffers::<E>::TWO_BUFFERS { first.offset_tiles(1) } else { first };
        let mut out = SubtileTiles::new(if E::AUX { next } else { first }.narrow(0));
        if Self::RECOMPUTES {
            out.columns = self.shared_columns(0);
        }
        (out, next)
    }

    /// Returns the buffer that the transposes of all subtiles use if there is an activation: of out (0) or of the activation (1).
    fn shared_columns(&self, slot: u32) -> NarrowTile<64> {
        SubtileTiles::new(self.buffers.buffer(slot).offset_tiles(1).narrow(0)).columns
    }

    /// Stores the subtiles of columns 64 `BLOCK` .. 64 `BLOCK` + 64 of the tile.
    fn store_columns<const BLOCK: u32>(&mut self, d: &ConsumerAccumulators<T::Accumulator>, tile: WorkTile) {
        self.store_subtile::<BLOCK, 0>(&d.upper, tile);
        if T::CONSUMER_M > EPILOGUE_TILE {
            self.store_subtile::<BLOCK, 1>(&d.lower, tile);
        }
    }

    fn store_subtile<const BLOCK: u32, const HALF: u32>(&mut self, d: &T::Accumulator, tile: WorkTile) {
        assert!(!(E::AUX && Self::PREACTIVATION), "a slot has two buffers");
        let subtile = BLOCK * (T::CONSUMER_M / EPILOGUE_TILE) + HALF;
        let first = self.buffers.acquire(subtile);
        if Self::RECOMPUTES {
            // All threads have copied the transposes of the previous subtile.
            self.buffers.sync();
        }
        let (out, second) = self.output_buffers(first);
        let (column, row) = (tile.column + BLOCK * EPILOGUE_TILE, tile.row + HALF * EPILOGUE_TILE);
        let first_row = thread::thread_idx_x() % WARPGROUP / 32 * 16;
        let (mut matrices, mut activation_matrices) = ([0; 4], [0; 4]);
        for quarter in 0..4 {
            // The next load of aux waits for the store of the previous subtile, as in `TmaEpilogue`.
            if Buffers::<E>::TWO_BUFFERS && quarter == 2 {
                self.buffers.load_next_aux::<0>(subtile, tile);
            }
            let block = BLOCK * 8 + quarter * 2;
            let x = sums::<E>(|i| d[block as usize * 4 + i], block, true, self.operands.scale, &self.bias);
            let aux = if E::AUX { first.load_a_fragment(first_row, quarter) } else { [0; 4] };
            let (mut rounded, mut second_words) = ([0; 4], [0; 4]);
            for i in 0..4 {
                let (values, second) = E::values([x[2 * i], x[2 * i + 1]], unpack_pair(aux[i]), self.operands.factors);
                second_words[i] = second;
                rounded[i] = pack_pair(values[0], values[1]);
            }
            self.quantizer.set(out, quarter, rounded, &mut matrices);
            if let Some(activation) = &self.activation {
                activation.set_transposed(self.shared_columns(1), quarter, second_words, &mut activation_matrices);
            }
            if Self::PREACTIVATION {
                let lane = thread::opaque(warp::lane());
                second.store_matrices(first_row + lane % 16, quarter * 2 + lane / 16, second_words);
            }
        }
        hopper::fence_async_proxy();
        self.buffers.sync();
        if is_warpgroup_leader() {
            out.rows.store(self.operands.out, column, row);
            if Self::PREACTIVATION {
                second.store(self.operands.second, column, row);
            }
            tma::commit_stores();
        }
        if self.quantizer.transposes() {
            self.quantizer.copy_columns::<2>(out.columns, column, row);
        }
        if let Some(activation) = &self.activation {
            activation.copy_columns::<2>(self.shared_columns(1), column, row);
        }
    }
}
