//! Activations and their gradients, quantized to FP8 by the kernel that computes them.
//!
//! Values are rounded to bf16 before they are quantized. Therefore the results have the bits of the activation's own kernel,
//! followed by those of [`quantize`](crate::quantize).
//!
//! A block computes a tile of the activation's output. A function of I inputs moves 2 I + 1 bytes per element of its output, or
//! 2 I + 2 for both layouts, in [`quantize_activation`], and 2 + 4 I in [`quantize_activation_gradient`].

use crate::activation::{Activation, ActivationFunction, GeGlu, Gelu, ReluSquared, SwiGlu};
use crate::quantize::{
    ColumnSums, Magnitudes, ROW_WORDS, TILE, maxima, place, quantized, store_block_amax, store_transposed,
    tile_and_maxima,
};
use cuda_std::shared::Layout;
use cuda_std::{E4m3, E5m2, Global, GlobalMut, Packet, SharedArray, bf16, device, kernel, math, thread};

/// Packets of each tensor that a thread loads before it computes.
const BATCH: usize = 4;
/// Packets of each tensor that a thread processes.
pub(crate) const PACKETS: usize = 8;

/// Returns the row and the 32-bit word of the thread's packet `i` in a tile of FP8 numbers.
#[inline(always)]
pub(crate) fn in_tile(i: usize) -> [usize; 2] {
    let thread = thread::thread_idx_x() as usize;
    [thread / 16 + i * 16, thread % 16 * 2]
}

/// The packets of a tile of the output (rows, columns) that a thread computes. Sixteen threads take a row of the tile.
#[derive(Clone, Copy)]
pub(crate) struct TilePart {
    /// First row and first column of the tile.
    pub first: [usize; 2],
    pub rows: usize,
    pub columns: usize,
}

#[device]
impl TilePart {
    pub fn new(rows: u32, columns: u32) -> Self {
        let first = [thread::block_idx_y() as usize * TILE, thread::block_idx_x() as usize * TILE];
        Self { first, rows: rows as usize, columns: columns as usize }
    }

    /// Returns row and column of packet `i` in the output, or `None` outside of it.
    pub fn in_output(self, i: usize) -> Option<[usize; 2]> {
        let [row, word] = in_tile(i);
        let (row, column) = (self.first[0] + row, self.first[1] + word * 4);
        (row < self.rows && column < self.columns).then_some([row, column])
    }

    /// Loads packet `i` of each input of a tensor (rows, inputs · columns). Packets outside of it are zero.
    #[track_caller]
    fn load(self, from: Global<bf16>, inputs: usize, i: usize) -> [Packet<bf16>; 2] {
        let mut packets = [Packet::zero(); 2];
        if let Some([row, column]) = self.in_output(i) {
            let at = row * self.columns * inputs + column;
            packets[0] = from.packet(at);
            if inputs == 2 {
                packets[1] = from.packet(at + self.columns);
            }
        }
        packets
    }
}

/// out (rows, columns) = activation(inp (rows, I · columns)) / scale in E4M3, if `OUT`, and `transposed` (columns, rows), its
/// transpose, if `TRANSPOSED`. I is [`ActivationFunction::INPUTS`].
///
/// `amax` becomes the maximum of itself and the largest magnitude of the activation in bf16, unless it is null. `rows` and
/// `columns` are multiples of 16. Rows from `end[0]` on, a multiple of 128, are neither read nor written, unless `end` is null. Grid:
/// [`transpose_grid`](crate::quantize::transpose_grid) of out. Shared memory: [`tile_and_maxima`].
#[kernel(
    threads = 256,
    instances(
        [gelu = Gelu, relu_squared = ReluSquared, swiglu = SwiGlu, geglu = GeGlu]
            * [_ = <true, false>, transposed = <false, true>, both = <true, true>]
    ),
    select(A::ACTIVATION: Activation, OUT: bool, TRANSPOSED: bool)
)]
pub fn quantize_activation<A: ActivationFunction, const OUT: bool, const TRANSPOSED: bool>(
    out: GlobalMut<E4m3>,
    transposed: GlobalMut<E4m3>,
    amax: GlobalMut<u32>,
    inp: Global<bf16>,
    scale: Global<f32>,
    rows: u32,
    columns: u32,
    end: Global<u32>,
) {
    let (tile, maxima) = tile_and_maxima(&mut Layout::new());
    let part = TilePart::new(rows, columns);
    if !end.is_null() && part.first[0] >= end.at(0) as usize {
        return;
    }
    let factor = math::div_rn(1.0, scale.at(0));
    let mut all = Magnitudes::NONE;
    for batch in 0..PACKETS / BATCH {
        let first = batch * BATCH;
        let mut inputs = [[Packet::zero(); 2]; BATCH];
        for i in 0..BATCH {
            inputs[i] = part.load(inp, A::INPUTS, first + i);
        }
        for i in 0..BATCH {
            let [x, y] = inputs[i];
            let activated = Packet::from_fn(|j| A::value([x.get(j), y.get(j)]));
            let magnitudes = Magnitudes::of(activated);
            all = all.and(magnitudes);
            let words = quantized::<E4m3>(activated, magnitudes, factor);
            if TRANSPOSED {
                let [row, word] = in_tile(first + i);
                tile.set_two(place(row, word), words);
            }
            if OUT && let Some([row, column]) = part.in_output(first + i) {
                out.set_eight(row * part.columns + column, words);
            }
        }
    }
    if !amax.is_null() {
        store_block_amax(amax, maxima, all);
    }
    if TRANSPOSED {
        thread::sync_threads();
        let no_sums = ColumnSums { partials: GlobalMut::null(), columns: 0, scale: 1.0 };
        store_transposed::<E4m3, false>(transposed, tile, part.first, [part.rows, part.columns], no_sums);
    }
}

/// The shared memory of [`quantize_activation_gradient`]: a tile of FP8 numbers for each input, and the largest magnitude of each
/// warp.
pub fn tiles_and_maxima(layout: &mut Layout) -> ([SharedArray<u32>; 2], SharedArray<u32>) {
    ([layout.array(TILE * ROW_WORDS), layout.array(TILE * ROW_WORDS)], maxima(layout))
}

/// out (rows, I · columns) = the gradient of inp / scale in FP8, given dout (rows, columns), that of activation(inp), and
/// `transposed` (I · columns, rows), its transpose. I is [`ActivationFunction::INPUTS`].
///
/// `amax` becomes the maximum of itself and the largest magnitude of the gradient in bf16, unless it is null. With `SUMS`, the
/// kernel also computes `partials` as [`quantize_transpose`](crate::quantize::quantize_transpose) does. `rows` and `columns` are
/// multiples of 16. Grid: [`transpose_grid`](crate::quantize::transpose_grid) of dout. Shared memory: [`tiles_and_maxima`].
#[kernel(
    threads = 256,
    instances(
        [gelu = Gelu, relu_squared = ReluSquared, swiglu = SwiGlu, geglu = GeGlu]
            * [_ = false, sums = true]
    ),
    select(A::ACTIVATION: Activation, SUMS: bool)
)]
pub fn quantize_activation_gradient<A: ActivationFunction, const SUMS: bool>(
    out: GlobalMut<E5m2>,
    transposed: GlobalMut<E5m2>,
    amax: GlobalMut<u32>,
    partials: GlobalMut<f32>,
    dout: Global<bf16>,
    inp: Global<bf16>,
    scale: Global<f32>,
    rows: u32,
    columns: u32,
) {
    let (tiles, maxima) = tiles_and_maxima(&mut Layout::new());
    let factor = math::div_rn(1.0, scale.at(0));
    let part = TilePart::new(rows, columns);
    let stride = A::INPUTS * part.columns;
    let mut all = Magnitudes::NONE;
    for batch in 0..PACKETS / BATCH {
        let first = batch * BATCH;
        let (mut douts, mut inputs) = ([Packet::zero(); BATCH], [[Packet::zero(); 2]; BATCH]);
        for i in 0..BATCH {
            [douts[i], _] = part.load(dout, 1, first + i);
            inputs[i] = part.load(inp, A::INPUTS, first + i);
        }
        for i in 0..BATCH {
            let [x, y] = inputs[i];
            let mut gradients = [[0.0; 2]; 8];
            for j in 0..8 {
                gradients[j] = A::gradients(douts[i].get(j), [x.get(j), y.get(j)]);
            }
            for input in 0..A::INPUTS {
                let gradient = Packet::from_fn(|j| gradients[j][input]);
                let magnitudes = Magnitudes::of(gradient);
                all = all.and(magnitudes);
                let words = quantized::<E5m2>(gradient, magnitudes, factor);
                let [row, word] = in_tile(first + i);
                tiles[input].set_two(place(row, word), words);
                if let Some([row, column]) = part.in_output(first + i) {
                    out.set_eight(row * stride + input * part.columns + column, words);
                }
            }
        }
    }
    if !amax.is_null() {
        store_block_amax(amax, maxima, all);
    }
    thread::sync_threads();
    for input in 0..A::INPUTS {
        let first = input * part.columns;
        let partials = if SUMS { partials.skip(first) } else { partials };
        let sums = ColumnSums { partials, columns: stride, scale: if SUMS { scale.at(0) } else { 1.0 } };
        let (transposed, shape) = (transposed.skip(first * part.rows), [part.rows, part.columns]);
        store_transposed::<E5m2, SUMS>(transposed, tiles[input], part.first, shape, sums);
    }
}
