//! Epilogues: the elementwise part and the quantization are those of the wgmma kernels. Each warp copies its results to global memory
//! through buffers in shared memory, in rows of whole sectors.
//!
//! The buffers of FP8 numbers have half of the warp's rows, and are used twice. As in the wgmma kernels, 16 rows of a column of a transpose
//! have the order 0, 8, 1, 9, …, 7, 15 there, because a thread has the numbers of rows r and r + 8.
//!
//! Strips of 16 rows outside of the output are skipped: their sums are zeros, but a bias would count in the largest magnitude.

use super::mainloop::{Accumulators, BLOCKS, STRIPS, TILE, WARP_COLUMNS, WARP_ROWS};
use crate::matmul::epilogue::{Elementwise, EpilogueOperands, TileBias, sums};
use crate::matmul::gemm::GemmOutput;
use crate::matmul::quantized::Quantizer;
use crate::quantize::Magnitudes;
use cuda_std::element::{pack_pair, unpack_pair};
use cuda_std::fp8::{interleave_pairs, separate_bytes};
use cuda_std::shared::Layout;
use cuda_std::{E4m3, E5m2, Element, Fp8, Global, GlobalMut, Packet, SharedTile, async_copy, bf16, device, warp};

/// The type of the output.
pub trait Output: 'static {
    /// The type, as in the description of a GEMM.
    const OUTPUT: GemmOutput;
    /// The format of an FP8 output.
    type Number: Fp8;
    /// True if the output is FP8.
    const IS_FP8: bool = matches!(Self::OUTPUT, GemmOutput::Fp8);
}

macro_rules! outputs {
    ($($output:ident = $kind:ident, $number:ident;)*) => {$(
        impl Output for $output {
            const OUTPUT: GemmOutput = GemmOutput::$kind;
            type Number = $number;
        }
    )*};
}

outputs! {
    bf16 = Storage, E4m3;
    f32 = F32, E4m3;
    E4m3 = Fp8, E4m3;
    E5m2 = Fp8, E5m2;
}

/// Warps of a block.
const WARPS: usize = TILE * TILE / (WARP_ROWS * WARP_COLUMNS);
/// Rows of the buffers of bf16 numbers of all warps.
const ROWS: usize = WARPS * WARP_ROWS;
/// Rows of the buffers of FP8 numbers of all warps. A warp has as many columns.
const FP8_ROWS: usize = WARPS * WARP_COLUMNS;

/// The buffers of all warps.
#[derive(Clone, Copy)]
pub struct Buffers {
    /// aux, a bf16 out, or a preactivation that the epilogue writes. No instance has two of them, except for an out that replaces aux.
    bf16: SharedTile<bf16, ROWS, WARP_COLUMNS>,
    /// An FP8 out and its transpose.
    rows: SharedTile<E4m3, FP8_ROWS, WARP_COLUMNS>,
    columns: SharedTile<E4m3, FP8_ROWS, WARP_COLUMNS>,
    /// The transpose of an activation that is recomputed.
    activation: SharedTile<E4m3, FP8_ROWS, WARP_COLUMNS>,
}

#[device]
impl Buffers {
    /// Takes the buffers from `layout`.
    pub fn new(layout: &mut Layout) -> Self {
        Self { bf16: layout.tile(), rows: layout.tile(), columns: layout.tile(), activation: layout.tile() }
    }
}

/// The matrices in bf16.
#[derive(Clone, Copy)]
pub struct Bf16Matrices {
    pub out: GlobalMut<bf16>,
    pub aux: Global<bf16>,
    pub second: GlobalMut<bf16>,
}

/// The epilogue of a warp.
pub struct WarpEpilogue<O: Output> {
    buffers: Buffers,
    matrices: Bf16Matrices,
    operands: EpilogueOperands,
    bias: TileBias,
    /// First row and column of the warp in the output.
    position: [u32; 2],
    warp: usize,
    quantizer: Option<Quantizer<O::Number>>,
    /// Set if the epilogue recomputes an activation.
    activation: Option<Quantizer<E4m3>>,
}

#[device]
impl<O: Output> WarpEpilogue<O> {
    /// Creates the epilogue, and loads its bias. The mainloop hides the latency.
    pub fn new<E: Elementwise>(operands: EpilogueOperands, matrices: Bf16Matrices, position: [u32; 2]) -> Self {
        let mut bias = TileBias::zero();
        if E::BIAS {
            bias.load(operands.bias, position[1], 64, operands.n);
        }
        let recomputes = O::IS_FP8 && E::SECOND && !E::EPILOGUE.writes_preactivation();
        Self {
            buffers: Buffers::new(&mut Layout::new()),
            matrices,
            operands,
            bias,
            position,
            warp: warp::index() as usize,
            quantizer: if O::IS_FP8 { Some(Quantizer::new(operands)) } else { None },
            activation: if recomputes { Some(Quantizer::of_activation(operands)) } else { None },
        }
    }

    /// Applies the epilogue to the sums of the warp and stores the result. The buffers are free.
    pub fn store<E: Elementwise>(mut self, d: &Accumulators) {
        if matches!(O::OUTPUT, GemmOutput::F32) {
            self.add_to_f32(d);
            return;
        }
        if E::AUX {
            self.load_aux();
        }
        self.store_half::<E, 0>(d);
        self.store_half::<E, 1>(d);
        let Bf16Matrices { out, second, .. } = self.matrices;
        let (tile, first, shape) = (self.buffers.bf16, self.warp * WARP_ROWS, [self.operands.m, self.operands.n]);
        if E::EPILOGUE.writes_preactivation() {
            warp::sync();
            copy::<_, ROWS, WARP_ROWS>(tile, first, second, self.position, shape, |packet| packet);
        } else if !O::IS_FP8 {
            warp::sync();
            copy::<_, ROWS, WARP_ROWS>(tile, first, out, self.position, shape, |packet| packet);
        }
        if let Some(quantizer) = &self.quantizer {
            quantizer.finish();
        }
    }

    /// Loads aux into the buffer of bf16 numbers.
    fn load_aux(&self) {
        let EpilogueOperands { m, n, .. } = self.operands;
        let (row, column) = lane_packet::<bf16>();
        for pass in 0..WARP_ROWS / 8 {
            let row = row + pass * 8;
            let (at_row, at_column) = (self.position[0] + row as u32, self.position[1] + column as u32);
            let at = at_row as usize * n as usize + at_column as usize;
            let to = self.warp * WARP_ROWS + row;
            self.buffers.bf16.copy_packet_async(to, column, self.matrices.aux, at, at_row < m && at_column < n);
        }
        async_copy::commit();
        async_copy::wait::<0>();
        warp::sync();
    }

    /// Stores half of the warp's rows, except for those in bf16, which remain in the buffer.
    fn store_half<E: Elementwise, const HALF: usize>(&mut self, d: &Accumulators) {
        self.set_strip::<E, 0>(HALF, &d[HALF * STRIPS / 2]);
        self.set_strip::<E, 1>(HALF, &d[HALF * STRIPS / 2 + 1]);
        let Some(quantizer) = &self.quantizer else { return };
        let EpilogueOperands { m, n, fp8_out, transposed, activation, .. } = self.operands;
        let (first, row) = (self.warp * WARP_COLUMNS, self.position[0] + (HALF * WARP_ROWS / 2) as u32);
        let transpose = |packet: Packet<E4m3>| Packet::from_packed(separate_bytes(packet.packed()));
        let copy = |tile, to, position, shape, map: &dyn Fn(Packet<E4m3>) -> Packet<E4m3>| {
            copy::<_, FP8_ROWS, WARP_COLUMNS>(tile, first, to, position, shape, map);
        };
        warp::sync();
        copy(self.buffers.rows, fp8_out, [row, self.position[1]], [m, n], &|packet| packet);
        if quantizer.transposes() {
            copy(self.buffers.columns, transposed, [self.position[1], row], [n, m], &transpose);
        }
        if self.activation.is_some() {
            copy(self.buffers.activation, activation, [self.position[1], row], [n, m], &transpose);
        }
        // The other half overwrites what other lanes have copied.
        warp::sync();
    }

    /// Computes the results of a strip of a half of the warp's rows, and writes them to the buffers.
    fn set_strip<E: Elementwise, const STRIP: usize>(&mut self, half: usize, d: &[[f32; 4]; BLOCKS]) {
        assert!(!(E::AUX && E::EPILOGUE.writes_preactivation()), "there is one buffer of bf16 numbers");
        let first_row = half * WARP_ROWS / 2 + STRIP * 16;
        if self.position[0] + first_row as u32 >= self.operands.m {
            return;
        }
        let lane_row = warp::lane() as usize / 4;
        for quarter in 0..BLOCKS / 2 {
            let x =
                sums::<E>(|i| d[2 * quarter + i / 4][i % 4], 2 * quarter as u32, true, self.operands.scale, &self.bias);
            let (row, column) = (self.warp * WARP_ROWS + first_row, quarter * 16);
            let aux = if E::AUX { self.buffers.bf16.a(row, column) } else { [0; 4] };
            let (mut rounded, mut second_words) = ([0; 4], [0; 4]);
            for i in 0..4 {
                let (values, second) = E::values([x[2 * i], x[2 * i + 1]], unpack_pair(aux[i]), self.operands.factors);
                second_words[i] = second;
                rounded[i] = pack_pair(values[0], values[1]);
            }
            if E::EPILOGUE.writes_preactivation() {
                self.buffers.bf16.set_a(row, column, second_words);
            }
            let Some(quantizer) = &mut self.quantizer else {
                self.buffers.bf16.set_a(row, column, rounded);
                continue;
            };
            let pairs = quantizer.pairs(rounded);
            let first = self.warp * WARP_COLUMNS;
            for i in 0..4 {
                let (row, column) = (STRIP * 16 + lane_row + i % 2 * 8, column + lane_column() + i / 2 * 8);
                self.buffers.rows.set_fp8_pair(first + row, column, pairs[i]);
            }
            if quantizer.transposes() {
                set_columns(self.buffers.columns, first + column, STRIP * 16, pairs);
            }
            if let Some(activation) = &self.activation {
                let pairs = activation.quantize(second_words, Magnitudes::of_pairs(second_words));
                set_columns(self.buffers.activation, first + column, STRIP * 16, pairs);
            }
        }
    }

    /// Adds the sums to an f32 output. All loads of a strip precede its stores: the compiler cannot reorder them.
    fn add_to_f32(&self, d: &Accumulators) {
        let EpilogueOperands { sums, m, n, scale, .. } = self.operands;
        let (row, column) = (self.position[0] + warp::lane() / 4, self.position[1] as usize + lane_column());
        for strip in 0..STRIPS {
            let mut old = [[[0.0; 2]; BLOCKS]; 2];
            let row = |i: usize| row + (strip * 16 + i * 8) as u32;
            let is_inside = |i: usize, block: usize| row(i) < m && column + block * 8 < n as usize;
            let at = |i: usize, block: usize| row(i) as usize * n as usize + column + block * 8;
            for i in 0..2 {
                for block in 0..BLOCKS {
                    if is_inside(i, block) {
                        old[i][block] = sums.reader().pair(at(i, block));
                    }
                }
            }
            for i in 0..2 {
                for block in 0..BLOCKS {
                    let ([low, high], d) = (old[i][block], &d[strip][block]);
                    if is_inside(i, block) {
                        sums.set_pair(at(i, block), [low + d[2 * i] * scale, high + d[2 * i + 1] * scale]);
                    }
                }
            }
        }
    }
}

/// Returns the first column of this lane in a block of 8 columns.
#[inline(always)]
fn lane_column() -> usize {
    warp::lane() as usize % 4 * 2
}

/// Returns the row and the first column of this lane's packet of a buffer.
#[inline(always)]
fn lane_packet<T: Element>() -> (usize, usize) {
    let (lane, packets) = (warp::lane() as usize, WARP_COLUMNS / T::PACKET);
    (lane / packets, lane % packets * T::PACKET)
}

/// Writes the transpose of 16 x 16 FP8 numbers: rows `column` to `column` + 16 of `tile`, and columns `row` to `row` + 16.
#[inline(always)]
fn set_columns(tile: SharedTile<E4m3, FP8_ROWS, WARP_COLUMNS>, column: usize, row: usize, pairs: [u16; 4]) {
    let row = row + warp::lane() as usize / 4 * 2;
    for i in 0..2 {
        let column = column + i * 8 + lane_column();
        let columns = interleave_pairs(pairs[2 * i], pairs[2 * i + 1]);
        tile.set_fp8_pair(column, row, columns as u16);
        tile.set_fp8_pair(column + 1, row, (columns >> 16) as u16);
    }
}

/// Copies `COUNT` rows of `tile` from row `first` on to position (row, column) of a matrix of this shape.
#[inline(always)]
fn copy<T: Element, const R: usize, const COUNT: usize>(
    tile: SharedTile<T, R, WARP_COLUMNS>,
    first: usize,
    to: GlobalMut<T>,
    [to_row, to_column]: [u32; 2],
    [rows, columns]: [u32; 2],
    map: impl Fn(Packet<T>) -> Packet<T>,
) {
    let (row, column) = lane_packet::<T>();
    let rows_per_pass = warp::LANES as usize * T::PACKET / WARP_COLUMNS;
    for pass in 0..COUNT / rows_per_pass {
        let row = row + pass * rows_per_pass;
        let (at_row, at_column) = (to_row + row as u32, to_column + column as u32);
        if at_row < rows && at_column < columns {
            to.set_packet(
                at_row as usize * columns as usize + at_column as usize,
                map(tile.packet(first + row, column)),
            );
        }
    }
}
