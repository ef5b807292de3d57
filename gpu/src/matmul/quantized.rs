//! Epilogues with an out in FP8.
//!
//! Results are rounded to bf16 first, so out has the bits that the kernels of [`quantize`](crate::quantize) would compute from
//! an out in bf16.
//!
//! Buffers, loads of aux and the second output are those of [`TmaEpilogue`](super::epilogue::TmaEpilogue). A subtile of out has rows of 64 bytes. It has
//! its own buffer: aux has elements of another size, so out cannot overwrite it.

use super::buffers::{Buffering, SubtileBuffers};
use super::epilogue::{Elementwise, EpilogueOperands, EpilogueStore};
use super::mainloop::ConsumerAccumulators;
use super::shared::SharedStorage;
use super::tile::{EPILOGUE_TILE, Tile, WorkTile};
use crate::quantize::{magnitude, scaled, store_amax};
use core::marker::PhantomData;
use cuda_std::element::{pack_pair, unpack_pair};
use cuda_std::hopper::{self, NarrowTile, SwizzledTile, WARPGROUP, is_warpgroup_leader, tma};
use cuda_std::{Fp8, device, math, thread, warp};

/// The buffers of the epilogue `E` with an out in FP8.
struct Buffers<E>(PhantomData<E>);

impl<E: Elementwise> Buffering for Buffers<E> {
    const AUX: bool = E::AUX;
    const TWO_BUFFERS: bool = E::SECOND || E::AUX;
    const BATCHED: bool = false;
}

/// Applies the epilogue `E` and stores its result / scale in the FP8 type `O` through shared memory by TMA.
pub struct QuantizedEpilogue<E, O, T> {
    buffers: SubtileBuffers<Buffers<E>, T>,
    operands: EpilogueOperands,
    /// 1 / scale.
    factor: f32,
    /// Bits of the largest magnitude of this thread's results, which is a NaN if any result is one.
    largest: u32,
    element: PhantomData<O>,
}

#[device]
impl<E: Elementwise, O: Fp8, T: Tile> EpilogueStore<T> for QuantizedEpilogue<E, O, T> {
    fn new(shared: SharedStorage, operands: EpilogueOperands, consumer: u32) -> Self {
        let buffers = SubtileBuffers::new(shared, operands.aux, consumer);
        let factor = math::div_rn(1.0, operands.scale_out.at(0));
        Self { buffers, operands, factor, largest: 0, element: PhantomData }
    }

    fn prefetch(&self, tile: WorkTile) {
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
        store_amax(self.operands.amax, self.largest);
    }
}

#[device]
impl<E: Elementwise, O: Fp8, T: Tile> QuantizedEpilogue<E, O, T> {
    /// Returns the buffer of out, and the buffer of second if there is one, of the slot that begins at `first`.
    fn output_buffers(first: SwizzledTile<64>) -> (NarrowTile<64>, SwizzledTile<64>) {
        let next = if Buffers::<E>::TWO_BUFFERS { first.offset_tiles(1) } else { first };
        if E::AUX { (next.narrow(0), next) } else { (first.narrow(0), next) }
    }

    /// Stores the subtiles of columns 64 `BLOCK` .. 64 `BLOCK` + 64 of the tile.
    fn store_columns<const BLOCK: u32>(&mut self, d: &ConsumerAccumulators<T::Accumulator>, tile: WorkTile) {
        self.store_subtile::<BLOCK, 0>(&d.upper, tile);
        if T::CONSUMER_M > EPILOGUE_TILE {
            self.store_subtile::<BLOCK, 1>(&d.lower, tile);
        }
    }

    fn store_subtile<const BLOCK: u32, const HALF: u32>(&mut self, d: &T::Accumulator, tile: WorkTile) {
        assert!(!(E::AUX && E::SECOND), "a slot has two buffers");
        let subtile = BLOCK * (T::CONSUMER_M / EPILOGUE_TILE) + HALF;
        let first = self.buffers.acquire(subtile);
        let (out, second) = Self::output_buffers(first);
        let (column, row) = (tile.column + BLOCK * EPILOGUE_TILE, tile.row + HALF * EPILOGUE_TILE);
        let first_row = thread::thread_idx_x() % WARPGROUP / 32 * 16;
        for quarter in 0..4 {
            // The next load of aux waits for the store of the previous subtile, as in `TmaEpilogue`.
            if Buffers::<E>::TWO_BUFFERS && quarter == 2 {
                self.buffers.load_next_aux::<0>(subtile, tile);
            }
            // Without `opaque`, the addresses of all quarters would be computed before the loop over tiles, and would occupy
            // registers that the accumulators need.
            let lane = thread::opaque(warp::lane());
            let mut x = [0.0; 8];
            for i in 0..8 {
                x[i] = d[(BLOCK as usize * 8 + quarter * 2) * 4 + i];
            }
            // This lane's elements of a word are in row lane / 4 and columns lane % 4 * 2 and + 1 of an 8 x 8 matrix.
            let (lane_row, lane_column) = (first_row + lane / 4, quarter as u32 * 16 + lane % 4 * 2);
            if E::BIAS {
                self.add_bias(&mut x, column + lane_column);
            }
            let aux = if E::AUX { first.load_a_fragment(first_row, quarter as u32) } else { [0; 4] };
            let (mut pairs, mut second_words) = ([0; 4], [0; 4]);
            for i in 0..4 {
                let (values, second) = E::values([x[2 * i], x[2 * i + 1]], unpack_pair(aux[i]), self.operands.factors);
                second_words[i] = second;
                let [even, odd] = unpack_pair(pack_pair(values[0], values[1]));
                self.largest = self.largest.max(magnitude(even)).max(magnitude(odd));
                pairs[i] = O::pack_pair(scaled(even, self.factor), scaled(odd, self.factor));
            }
            for i in 0..4 {
                out.set_fp8_pair(lane_row + i as u32 % 2 * 8, lane_column + i as u32 / 2 * 8, pairs[i]);
            }
            if E::SECOND {
                second.store_matrices(first_row + lane % 16, quarter as u32 * 2 + lane / 16, second_words);
            }
        }
        hopper::fence_async_proxy();
        self.buffers.sync();
        if is_warpgroup_leader() {
            out.store(self.operands.out, column, row);
            if E::SECOND {
                second.store(self.operands.second, column, row);
            }
            tma::commit_stores();
        }
    }

    /// Adds the bias to `x`, this lane's elements of 16 columns, which begin at column `first`.
    ///
    /// Quantization needs the registers that the bias of 64 columns would occupy.
    fn add_bias(&self, x: &mut [f32; 8], first: u32) {
        let (bias, n) = (self.operands.bias, self.operands.n);
        for j in 0..2 {
            let at = first + j * 8;
            let pair = if at < n { bias.pair(at as usize) } else { [0.0; 2] };
            for i in 0..4 {
                x[j as usize * 4 + i] += pair[i % 2];
            }
        }
    }
}
