//! Epilogues: bias, residual, factors, GELU and ReLU², applied to accumulators on their way to global memory.
//!
//! A consumer processes its rows of a tile in subtiles of 64 x 64. TMA loads each subtile of aux into a buffer in
//! shared memory, and stores each subtile of the outputs from one.
//!
//! If the output is symmetric, tiles exist only where they have elements on or above the diagonal. A subtile above the
//! diagonal is stored twice: in its place, and transposed in the mirrored place. A subtile on the diagonal takes its
//! elements below the diagonal from those above it. So elements (i, j) and (j, i) have the same bits, however the
//! tensor cores sum. Subtiles below the diagonal are not stored.

use super::buffers::{Buffering, SubtileBuffers};
use super::gemm::{Bias, GemmEpilogue, Pass, Residual};
use super::mainloop::{ConsumerAccumulators, Operands};
use super::shared::SharedStorage;
use super::tile::{EPILOGUE_TILE, Tile, WorkTile};
use crate::activation::ActivationFunction;
use core::marker::PhantomData;
use cuda_std::element::{pack_pair, unpack_pair};
use cuda_std::hopper::{self, SwizzledTile, TensorMap, WARPGROUP, is_warpgroup_leader, tma};
use cuda_std::{E4m3, Global, GlobalMut, bf16, device, math, thread, warp};

/// The elementwise part of an epilogue: out (M, N) and second (M, N) from the accumulators plus bias (N), and aux (M,
/// N). aux is the residual, or the preactivation of a backward pass. second is the preactivation of a forward pass, or the
/// activation that a backward pass recomputes.
pub trait Elementwise: 'static {
    /// The description.
    const EPILOGUE: GemmEpilogue;

    /// True if the epilogue adds a bias.
    const BIAS: bool = matches!(Self::EPILOGUE.bias, Some(Bias::Add));
    /// True if the epilogue reads aux.
    const AUX: bool = Self::EPILOGUE.residual.is_some()
        || matches!(Self::EPILOGUE.activation, Some((_, Pass::Backward | Pass::BackwardAndValue)));
    /// True if the epilogue writes a second output.
    const SECOND: bool = matches!(Self::EPILOGUE.activation, Some((_, Pass::Forward | Pass::BackwardAndValue)));

    /// Computes two adjacent elements of out before their rounding, and of second if there is one, packed as a bf16 pair.
    fn values(acc: [f32; 2], aux: [f32; 2], factors: ScaleFactors) -> ([f32; 2], u32);
}

/// The factors of [`Residual::Scaled`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ScaleFactors {
    /// Factor of a · b.
    pub alpha: f32,
    /// Factor of the residual.
    pub beta: f32,
}

/// out = a · b, plus a bias if `BIAS`, plus a residual if `RESIDUAL`. The residual may be out.
pub struct Linear<const BIAS: bool, const RESIDUAL: bool>;

impl<const BIAS: bool, const RESIDUAL: bool> Elementwise for Linear<BIAS, RESIDUAL> {
    const EPILOGUE: GemmEpilogue = GemmEpilogue {
        bias: if BIAS { Some(Bias::Add) } else { None },
        residual: if RESIDUAL { Some(Residual::Add) } else { None },
        ..GemmEpilogue::NONE
    };

    #[inline(always)]
    fn values(acc: [f32; 2], aux: [f32; 2], _: ScaleFactors) -> ([f32; 2], u32) {
        (if RESIDUAL { [aux[0] + acc[0], aux[1] + acc[1]] } else { acc }, 0)
    }
}

/// out = beta · residual + alpha · a · b
pub struct Scaled;

impl Elementwise for Scaled {
    const EPILOGUE: GemmEpilogue = GemmEpilogue { residual: Some(Residual::Scaled), ..GemmEpilogue::NONE };

    #[inline(always)]
    fn values(acc: [f32; 2], aux: [f32; 2], ScaleFactors { alpha, beta }: ScaleFactors) -> ([f32; 2], u32) {
        let sum = |acc, aux| math::fma(alpha, acc, beta * aux);
        ([sum(acc[0], aux[0]), sum(acc[1], aux[1])], 0)
    }
}

/// second = a · b, plus a bias if `BIAS`; out = activation(second).
///
/// The function reads second after its rounding to bf16, so that out can be recomputed from second bit for bit.
pub struct Forward<A, const BIAS: bool>(PhantomData<A>);

impl<A: ActivationFunction, const BIAS: bool> Elementwise for Forward<A, BIAS> {
    const EPILOGUE: GemmEpilogue = Linear::<BIAS, false>::EPILOGUE.with(A::ACTIVATION, Pass::Forward);

    #[inline(always)]
    fn values([even, odd]: [f32; 2], _: [f32; 2], _: ScaleFactors) -> ([f32; 2], u32) {
        let stored = pack_pair(even, odd);
        (unpack_pair(stored).map(|x| A::value([x, 0.0])), stored)
    }
}

/// out = a · b ⊙ activation'(aux); if `VALUE`, second = activation(aux).
pub struct Backward<A, const VALUE: bool>(PhantomData<A>);

impl<A: ActivationFunction, const VALUE: bool> Elementwise for Backward<A, VALUE> {
    const EPILOGUE: GemmEpilogue =
        GemmEpilogue::NONE.with(A::ACTIVATION, if VALUE { Pass::BackwardAndValue } else { Pass::Backward });

    #[inline(always)]
    fn values(acc: [f32; 2], aux: [f32; 2], _: ScaleFactors) -> ([f32; 2], u32) {
        if VALUE {
            let ([even_gradient, _], even) = A::gradients_and_value(acc[0], [aux[0], 0.0]);
            let ([odd_gradient, _], odd) = A::gradients_and_value(acc[1], [aux[1], 0.0]);
            ([even_gradient, odd_gradient], pack_pair(even, odd))
        } else {
            ([A::gradients(acc[0], [aux[0], 0.0])[0], A::gradients(acc[1], [aux[1], 0.0])[0]], 0)
        }
    }
}

/// Computes the same as [`Backward`], from a · b after its rounding to bf16: the bits of a separate kernel.
pub struct RoundedBackward<A, const VALUE: bool>(PhantomData<A>);

impl<A: ActivationFunction, const VALUE: bool> Elementwise for RoundedBackward<A, VALUE> {
    const EPILOGUE: GemmEpilogue = Backward::<A, VALUE>::EPILOGUE;

    #[inline(always)]
    fn values([even, odd]: [f32; 2], aux: [f32; 2], factors: ScaleFactors) -> ([f32; 2], u32) {
        Backward::<A, VALUE>::values(unpack_pair(pack_pair(even, odd)), aux, factors)
    }
}

/// Moves a consumer's accumulators to global memory.
#[device]
pub trait EpilogueStore<T: Tile> {
    /// True if `store` multiplies FP8 accumulators by their scale. If false, the caller does.
    const SCALES: bool = false;

    /// Creates the epilogue of a consumer.
    fn new(shared: SharedStorage, operands: EpilogueOperands, consumer: u32) -> Self;
    /// Starts the loads that the epilogue of `tile` needs, before the mainloop.
    fn prefetch(&mut self, _tile: WorkTile) {}
    /// Applies the epilogue to the accumulators of `tile` and stores the result.
    fn store(&mut self, d: &ConsumerAccumulators<T::Accumulator>, tile: WorkTile);
    /// Waits until all asynchronous stores have completed.
    fn finish(&self) {}
}

/// The operands of an epilogue. Those that it does not use may be arbitrary.
#[derive(Clone, Copy)]
pub struct EpilogueOperands {
    pub out: Global<TensorMap>,
    pub aux: Global<TensorMap>,
    pub second: Global<TensorMap>,
    pub bias: Global<bf16>,
    /// The scale of FP8 sums.
    pub scale: f32,
    /// Partial sums, or an f32 output.
    pub sums: GlobalMut<f32>,
    /// Rows of the output.
    pub m: u32,
    /// Columns of the output.
    pub n: u32,
    pub factors: ScaleFactors,
    /// The scale of an FP8 output, and the address of its largest magnitude.
    pub scale_out: Global<f32>,
    pub amax: GlobalMut<u32>,
    /// An FP8 output (M, N), and its transpose (N, M), unless null. They have the format of the output.
    pub fp8_out: GlobalMut<E4m3>,
    pub transposed: GlobalMut<E4m3>,
    /// The transpose (N, M) of an activation that is recomputed beside an FP8 output, and its scale.
    pub activation: GlobalMut<E4m3>,
    pub scale_activation: Global<f32>,
}

/// The bias of a tile, distributed over the lanes of a warp.
///
/// It is loaded before the mainloop, which hides the latency. A lane has every 32nd pair of columns.
pub struct TileBias {
    pairs: [u32; 5],
}

#[device]
impl TileBias {
    /// Returns a bias of zeros.
    pub fn zero() -> Self {
        Self { pairs: [0; 5] }
    }

    /// Loads the bias of the `columns` columns from `first` on. Those from `n` on are zeros.
    #[track_caller]
    pub fn load(&mut self, bias: Global<bf16>, first: u32, columns: u32, n: u32) {
        for i in 0..columns / 64 {
            let at = first + i * 64 + warp::lane() * 2;
            self.pairs[i as usize] = if at < n { bias.pair_bits(at as usize) } else { 0 };
        }
    }

    /// Returns the bias of this lane's accumulators in columns 8 `block` .. 8 `block` + 8 of the tile.
    pub fn of(&self, block: u32) -> [f32; 2] {
        unpack_pair(warp::shuffle(self.pairs[block as usize / 8], block % 8 * 4 + warp::lane() % 4))
    }
}

/// The buffers of [`TmaEpilogue`]: one for out, which is also that of aux, and one for second or the mirrored subtile.
pub struct Buffers<L, E>(PhantomData<(L, E)>);

impl<L: Operands, E: Elementwise> Buffering for Buffers<L, E> {
    const AUX: bool = E::AUX;
    const TWO_BUFFERS: bool = E::SECOND || L::SYMMETRIC;
    const BATCHED: bool = L::OUT_BATCHED;
}

/// Applies the epilogue `E` and stores through shared memory by TMA.
pub struct TmaEpilogue<L, E, T> {
    buffers: SubtileBuffers<Buffers<L, E>, T>,
    operands: EpilogueOperands,
    bias: TileBias,
}

#[device]
impl<L: Operands, E: Elementwise, T: Tile> EpilogueStore<T> for TmaEpilogue<L, E, T> {
    const SCALES: bool = true;

    fn new(shared: SharedStorage, operands: EpilogueOperands, consumer: u32) -> Self {
        Self { buffers: SubtileBuffers::new(shared, operands.aux, consumer), operands, bias: TileBias::zero() }
    }

    fn prefetch(&mut self, tile: WorkTile) {
        if E::BIAS {
            self.bias.load(self.operands.bias, tile.column, T::TILE_N, self.operands.n);
        }
        self.buffers.prefetch(tile);
    }

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
        self.buffers.stored_tiles += 1;
    }

    fn finish(&self) {
        SubtileBuffers::<Buffers<L, E>, T>::finish();
    }
}

#[device]
impl<L: Operands, E: Elementwise, T: Tile> TmaEpilogue<L, E, T> {
    /// Stores the subtiles of columns 64 `BLOCK` .. 64 `BLOCK` + 64 of the tile.
    fn store_columns<const BLOCK: u32>(&self, d: &ConsumerAccumulators<T::Accumulator>, tile: WorkTile) {
        self.store_subtile::<BLOCK, 0>(&d.upper, tile);
        if T::CONSUMER_M > EPILOGUE_TILE {
            self.store_subtile::<BLOCK, 1>(&d.lower, tile);
        }
    }

    fn store_subtile<const BLOCK: u32, const HALF: u32>(&self, d: &T::Accumulator, tile: WorkTile) {
        let subtile = BLOCK * (T::CONSUMER_M / EPILOGUE_TILE) + HALF;
        // out overwrites aux: each warp overwrites only elements that it has read itself.
        let out = self.buffers.acquire(subtile);
        let second = if Buffers::<L, E>::TWO_BUFFERS { out.offset_tiles(1) } else { out };
        // The first column and row of the subtile.
        let (column, row) = (|| tile.column + BLOCK * EPILOGUE_TILE, || tile.row + HALF * EPILOGUE_TILE);
        if L::SYMMETRIC && column() < row() {
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
            if Buffers::<L, E>::TWO_BUFFERS && quarter == 2 {
                self.buffers.load_next_aux::<0>(subtile, tile);
            }
            let block = BLOCK * 8 + quarter as u32 * 2;
            let x = sums::<E>(|i| d[block as usize * 4 + i], block, L::SCALED, self.operands.scale, &self.bias);
            let aux = if E::AUX { out.load_a_fragment(first_row, quarter as u32) } else { [0; 4] };
            let (mut words, mut second_words) = ([0; 4], [0; 4]);
            for i in 0..4 {
                let acc = [x[2 * i], x[2 * i + 1]];
                let (values, second) = E::values(acc, unpack_pair(aux[i]), self.operands.factors);
                (words[i], second_words[i]) = (pack_pair(values[0], values[1]), second);
            }
            let at = quarter as u32 * 2 + lane_column;
            out.store_matrices(lane_row, at, words);
            if E::SECOND {
                second.store_matrices(lane_row, at, second_words);
            }
            if L::SYMMETRIC {
                // Transposed, matrices 0 and 1 are columns 0..8 and 8..16 of rows 0..8.
                let lane_row = quarter as u32 * 16 + warp::lane() / 16 * 8 + warp::lane() % 8;
                second.store_transposed_matrices(lane_row, (first_row + warp::lane() % 16) / 8, words);
            }
        }
        if L::SYMMETRIC && column() == row() {
            self.buffers.sync();
            copy_upper_triangle(out, second, first_row);
        }
        hopper::fence_async_proxy();
        self.buffers.sync();
        if is_warpgroup_leader() {
            let (x, y) = (column(), row());
            if L::OUT_BATCHED {
                out.store_3d(self.operands.out, x, y, tile.matrix);
            } else {
                out.store(self.operands.out, x, y);
            }
            if E::SECOND {
                second.store(self.operands.second, x, y);
            }
            if L::SYMMETRIC && x != y {
                second.store_3d(self.operands.out, y, x, tile.matrix);
            }
            tma::commit_stores();
        }
        if !Buffers::<L, E>::TWO_BUFFERS {
            self.buffers.load_next_aux::<1>(subtile, tile);
        }
    }

    /// Skips a subtile below the diagonal. All warps of this consumer must call it.
    fn skip_subtile(&self, subtile: u32, tile: WorkTile) {
        if E::AUX {
            // All warps have seen the phase of this aux buffer before its next phase can begin.
            self.buffers.sync();
            self.buffers.load_next_aux::<0>(subtile, tile);
        }
        if is_warpgroup_leader() {
            // An empty group: `SubtileBuffers` counts one for each subtile.
            tma::commit_stores();
        }
    }
}

/// Returns the sums `d` of this lane in blocks `block` and `block` + 1 of 8 columns of a tile, times `scale` if `scaled`, plus the bias of `E`.
#[inline(always)]
pub fn sums<E: Elementwise>(
    d: impl Fn(usize) -> f32,
    block: u32,
    scaled: bool,
    scale: f32,
    bias: &TileBias,
) -> [f32; 8] {
    let bias = if E::BIAS { [bias.of(block), bias.of(block + 1)] } else { [[0.0; 2]; 2] };
    core::array::from_fn(|i| {
        let (sum, bias) = (d(i), bias[i / 4][i % 2]);
        match (scaled, E::BIAS) {
            (true, true) => math::fma(sum, scale, bias),
            (true, false) => sum * scale,
            (false, true) => sum + bias,
            (false, false) => sum,
        }
    })
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
