//! FP8 copies of tensors: the largest magnitude of a bf16 tensor, its quantization to FP8, and transposition.
//!
//! A quantized tensor is x / scale in FP8, rounded to nearest even and saturating. NaN becomes NaN. An infinity also does, and so do
//! the numbers that a thread quantizes together with it. The scale is one f32 in device memory.
//! FP8 GEMMs take K-major operands only, so a tensor may be needed as (rows, columns), as (columns, rows), or as both.
//!
//! The largest magnitude ("amax") is the maximum of f32 bits without sign, an integer. It does not depend on the order of
//! threads, and it is a NaN if any element is a NaN.
//!
//! The transposing kernels can also compute column sums of the quantized tensor: the gradient of a bias, if the tensor is the
//! gradient of a linear layer's output. They write one sum per column and tile of rows, in a fixed order. The kernel
//! [`bias_backward_reduce`](crate::bias::bias_backward_reduce) adds them.

use crate::norm::rows::RowOutput;
use cuda_std::element::{larger_magnitudes, unpack_pair};
use cuda_std::fp8::{Bf16Scale, transpose_bytes};
use cuda_std::shared::Layout;
use cuda_std::{
    E4m3, E5m2, Element, Fp8, Global, GlobalMut, Packet, SharedArray, bf16, device, kernel, math, thread, warp,
};

/// Threads of a block.
const THREADS: usize = 256;
/// bf16 packets that a thread of [`amax_bf16`] and [`quantize`] loads.
const PACKETS: usize = 4;
/// Elements that a block of [`amax_bf16`] and [`quantize`] processes.
const BLOCK_ELEMENTS: usize = THREADS * PACKETS * 8;
/// Rows and columns of a tile of the transposing kernels.
pub(crate) const TILE: usize = 128;
/// 32-bit words in a row of a tile.
pub(crate) const ROW_WORDS: usize = TILE / 4;

/// Returns the number of blocks of [`amax_bf16`] and [`quantize`] for n elements.
pub const fn grid(n: usize) -> u32 {
    n.div_ceil(BLOCK_ELEMENTS) as u32
}

/// Returns the grid of the transposing kernels for a tensor (rows, columns).
pub const fn transpose_grid(rows: usize, columns: usize) -> [u32; 3] {
    [columns.div_ceil(TILE) as u32, rows.div_ceil(TILE) as u32, 1]
}

/// Returns the rows of the partial column sums of the transposing kernels.
pub const fn sum_rows(rows: usize) -> usize {
    rows.div_ceil(TILE)
}

/// Warps of a block.
const WARPS: usize = THREADS / warp::LANES as usize;

/// The shared memory of [`amax_bf16`] and [`quantize`]: the largest magnitude of each warp.
pub fn maxima(layout: &mut Layout) -> SharedArray<u32> {
    layout.array(WARPS)
}

/// The shared memory of the transposing kernels: a tile of FP8 numbers, and the largest magnitude of each warp.
pub fn tile_and_maxima(layout: &mut Layout) -> (SharedArray<u32>, SharedArray<u32>) {
    (layout.array(TILE * ROW_WORDS), maxima(layout))
}

/// The largest magnitudes of the even and of the odd numbers of a list of bf16, packed. It takes half an instruction per number to find
/// them, and a few to find the larger one.
#[derive(Clone, Copy)]
pub(crate) struct Magnitudes(u32);

impl Magnitudes {
    /// Those of an empty list.
    pub const NONE: Self = Self(0);

    /// Returns those of a packet.
    #[inline(always)]
    pub fn of(packet: Packet<bf16>) -> Self {
        Self::of_pairs(packet.words())
    }

    /// Returns those of packed pairs.
    #[inline(always)]
    pub fn of_pairs([a, b, c, d]: [u32; 4]) -> Self {
        Self(larger(larger(a, b), larger(c, d)))
    }

    /// Returns those of both lists.
    #[inline(always)]
    pub fn and(self, other: Self) -> Self {
        Self(larger(self.0, other.0))
    }

    /// Returns the bits of the larger one as f32. It is a NaN if the list contains one.
    #[inline(always)]
    pub fn largest(self) -> u32 {
        (self.0 << 16 & 0x7fff_0000).max(self.0 & 0x7fff_0000)
    }

    /// Returns 0, or NaN if the list contains an infinity or a NaN.
    #[inline(always)]
    pub fn zero_or_nan(self) -> f32 {
        let [even, odd] = unpack_pair(self.0).map(f32::abs);
        math::fma(even, 0.0, odd * 0.0)
    }
}

/// Replaces `amax` by the maximum of itself and the magnitudes of all lanes of the warp.
#[inline(always)]
#[track_caller]
pub fn store_amax(amax: GlobalMut<u32>, magnitude: u32) {
    let magnitude = warp::reduce(magnitude, u32::max);
    if warp::lane() == 0 {
        amax.atomic_max(0, magnitude);
    }
}

/// Replaces `amax` by the maximum of itself and the magnitudes of all threads of the block, which all call this.
///
/// One atomic operation per block instead of one per warp: those on one address run one after another.
#[inline(always)]
#[track_caller]
pub(crate) fn store_block_amax(amax: GlobalMut<u32>, maxima: SharedArray<u32>, magnitudes: Magnitudes) {
    let magnitude = warp::reduce(magnitudes.largest(), u32::max);
    let (warp, lane) = (thread::thread_idx_x() as usize / warp::LANES as usize, warp::lane() as usize);
    if lane == 0 {
        maxima.set(warp, magnitude);
    }
    thread::sync_threads();
    if warp == 0 {
        store_amax(amax, if lane < WARPS { maxima.at(lane) } else { 0 });
    }
}

/// The elements of a tensor that a kernel processes. Passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Extent {
    /// The elements of the tensor.
    pub len: u64,
    /// The elements of a row.
    pub columns: u64,
    /// (1) the number of rows to process, or null for all.
    pub rows: Global<u32>,
}

impl Extent {
    /// Returns the extent of all of `len` elements.
    pub const fn all(len: usize) -> Self {
        Self { len: len as u64, columns: 0, rows: Global::null() }
    }
}

#[device]
impl Extent {
    /// Returns the number of elements to process.
    fn elements(self) -> usize {
        if self.rows.is_null() { self.len as usize } else { self.rows.at(0) as usize * self.columns as usize }
    }
}

/// `amax` = max(`amax`, largest magnitude of inp) as f32 bits. Rows are multiples of 8 elements. Grid: [`grid`].
#[kernel(threads = 256)]
pub fn amax_bf16(amax: GlobalMut<u32>, inp: Global<bf16>, extent: Extent) {
    let n = extent.elements();
    let first = thread::block_idx_x() as usize * BLOCK_ELEMENTS + thread::thread_idx_x() as usize * 8;
    let mut magnitudes = Magnitudes::NONE;
    for i in 0..PACKETS {
        let at = first + i * THREADS * 8;
        if at < n {
            magnitudes = magnitudes.and(Magnitudes::of(inp.packet_streaming(at)));
        }
    }
    store_block_amax(amax, maxima(&mut Layout::new()), magnitudes);
}

/// Returns `value` · `factor` as kernels compute it before the conversion of a number alone: NaN for infinity, which would otherwise
/// saturate. Negative zero becomes positive.
#[cfg(not(target_arch = "nvptx64"))]
pub fn scaled(value: f32, factor: f32) -> f32 {
    value.mul_add(factor, value.abs() * 0.0)
}

/// Returns the scale with which `amax` becomes `largest`, the largest number of an FP8 format. Its reciprocal is finite.
///
/// If `amax` is infinite or a NaN, so is the scale, and every number that is multiplied by it becomes one, too.
#[inline(always)]
pub fn scale_of(amax: f32, largest: f32) -> f32 {
    let scale = math::div_rn(amax, largest);
    if amax == 0.0 {
        1.0
    } else if scale < f32::MIN_POSITIVE {
        f32::MIN_POSITIVE
    } else {
        scale
    }
}

/// scale = [`scale_of`] amax, which holds f32 bits. Grid: 1.
#[kernel(threads = 32)]
pub fn current_scale(scale: GlobalMut<f32>, amax: Global<u32>, largest: f32) {
    if thread::thread_idx_x() == 0 {
        scale.set(0, scale_of(f32::from_bits(amax.at(0)), largest));
    }
}

/// Returns the grid of [`delayed_scales`] for n scales.
pub const fn scales_grid(n: usize) -> u32 {
    n.div_ceil(THREADS) as u32
}

/// scales (n) = [`scale_of`] the largest finite number of each column of amaxes (`steps`, n). Then the rows of amaxes move down
/// by one, and the first becomes zero. Grid: [`scales_grid`].
#[kernel(threads = 256)]
pub fn delayed_scales(scales: GlobalMut<f32>, amaxes: GlobalMut<f32>, n: u32, steps: u32, largest: f32) {
    let (i, n) = (thread::block_idx_x() * THREADS as u32 + thread::thread_idx_x(), n as usize);
    let i = i as usize;
    if i >= n {
        return;
    }
    let (mut most, mut newer) = (0.0, 0.0);
    for step in 0..steps as usize {
        let amax = amaxes.at(step * n + i);
        amaxes.set(step * n + i, newer);
        newer = amax;
        if amax < f32::INFINITY && amax > most {
            most = amax;
        }
    }
    scales.set(i, scale_of(most, largest));
}

/// Returns the grid of [`dequantize`] for n numbers.
pub const fn dequantize_grid(n: usize) -> u32 {
    n.div_ceil(THREADS * E4m3::PACKET) as u32
}

/// Converts inp (n), times a scale that [`Bf16Scale`] supports, to bf16, which is exact. `n` is a multiple of 16. Grid: [`dequantize_grid`].
#[kernel(threads = 256)]
pub fn dequantize(out: GlobalMut<bf16>, inp: Global<E4m3>, scale: Global<f32>, n: u64) {
    let i = (thread::block_idx_x() as usize * THREADS + thread::thread_idx_x() as usize) * E4m3::PACKET;
    if i < n as usize {
        let halves = inp.packet_streaming(i).to_bf16(Bf16Scale::new(scale.at(0)));
        for half in 0..2 {
            out.set_packet(i + half * bf16::PACKET, halves[half]);
        }
    }
}

/// Counts the elements of inp that quantization changes completely: counts\[0\] += those with a magnitude above `largest` ·
/// scale, which saturate; counts\[1\] += those other than 0 with a magnitude of at most `smallest` · scale, which become 0. Rows are
/// multiples of 8 elements. Grid: [`grid`].
#[kernel(threads = 256)]
pub fn count_losses(
    counts: GlobalMut<u32>,
    inp: Global<bf16>,
    scale: Global<f32>,
    extent: Extent,
    largest: f32,
    smallest: f32,
) {
    let n = extent.elements();
    let factor = math::div_rn(1.0, scale.at(0));
    let first = thread::block_idx_x() as usize * BLOCK_ELEMENTS + thread::thread_idx_x() as usize * 8;
    let (mut saturated, mut zeroed) = (0, 0);
    for i in 0..PACKETS {
        let at = first + i * THREADS * 8;
        if at < n {
            let packet = inp.packet_streaming(at);
            for j in 0..8 {
                // An infinity becomes NaN, which is neither.
                let value = math::fma(packet.get(j), factor, packet.get(j) * 0.0).abs();
                saturated += u32::from(value > largest);
                zeroed += u32::from(value <= smallest && packet.get(j) != 0.0);
            }
        }
    }
    let [saturated, zeroed] = [saturated, zeroed].map(|count| warp::reduce(count, |a, b| a + b));
    if warp::lane() == 0 {
        counts.atomic_add(0, saturated);
        counts.atomic_add(1, zeroed);
    }
}

/// Whether the GPU has instructions that convert to FP8 and that compare magnitudes. Otherwise integer instructions do, which take less
/// time than memory.
const CONVERTS: bool = cfg!(any(not(target_arch = "nvptx64"), cuda_feature = "fp8"));

/// Returns the larger magnitude of each half of two pairs. The signs have no meaning.
#[inline(always)]
fn larger(a: u32, b: u32) -> u32 {
    if CONVERTS {
        larger_magnitudes(a, b)
    } else {
        (a & 0x7fff).max(b & 0x7fff) | (a & 0x7fff_0000).max(b & 0x7fff_0000)
    }
}

/// Rounds four numbers to FP8 and packs them, the first in the lowest byte.
#[inline(always)]
#[track_caller]
fn pack_four<T: Fp8>(values: [f32; 4]) -> u32 {
    if CONVERTS { T::pack_four(values) } else { u32::from_le_bytes(values.map(|value| T::FORMAT.encode(value))) }
}

/// Quantizes a packet with these magnitudes. If it contains an infinity, which would otherwise saturate, all of it becomes NaN. Negative
/// zero becomes positive.
#[inline(always)]
pub(crate) fn quantized<T: Fp8>(packet: Packet<bf16>, magnitudes: Magnitudes, factor: f32) -> [u32; 2] {
    let addend = magnitudes.zero_or_nan();
    pack_eight::<T>(core::array::from_fn(|i| math::fma(packet.get(i), factor, addend)))
}

/// Rounds eight numbers to FP8 and packs them, the first in the lowest byte.
#[inline(always)]
#[track_caller]
pub(crate) fn pack_eight<T: Fp8>([a, b, c, d, e, f, g, h]: [f32; 8]) -> [u32; 2] {
    [pack_four::<T>([a, b, c, d]), pack_four::<T>([e, f, g, h])]
}

/// Receives a tensor that the kernel which computes it quantizes.
#[derive(Clone, Copy)]
pub struct QuantizedOperands<T> {
    /// The tensor.
    pub out: GlobalMut<T>,
    /// (1): the largest magnitude, as f32 bits, or null.
    pub amax: GlobalMut<u32>,
    /// (1): the scale.
    pub scale: Global<f32>,
}

/// Memory for a quantized tensor. A thread computes some of its packets in bf16.
pub(crate) struct QuantizedOutput<T> {
    out: GlobalMut<T>,
    /// 1 / scale.
    factor: f32,
    /// Those of the thread's elements.
    pub magnitudes: Magnitudes,
}

impl<T: Fp8> QuantizedOutput<T> {
    #[inline(always)]
    #[track_caller]
    pub fn new(out: GlobalMut<T>, scale: Global<f32>) -> Self {
        Self { out, factor: math::div_rn(1.0, scale.at(0)), magnitudes: Magnitudes::NONE }
    }
}

impl<T: Fp8> RowOutput<bf16> for QuantizedOutput<T> {
    #[inline(always)]
    #[track_caller]
    fn set_packet(&mut self, i: usize, packet: Packet<bf16>) {
        let magnitudes = Magnitudes::of(packet);
        self.out.set_eight(i, quantized::<T>(packet, magnitudes, self.factor));
        self.magnitudes = self.magnitudes.and(magnitudes);
    }
}

/// out = inp / scale in FP8. With `AMAX`, also does what [`amax_bf16`] does. Rows are multiples of 8 elements. Grid: [`grid`].
#[kernel(threads = 256, instances(
    e4m3 = <E4m3, false>, e4m3_amax = <E4m3, true>, e5m2 = <E5m2, false>, e5m2_amax = <E5m2, true>))]
pub fn quantize<T: Fp8, const AMAX: bool>(
    out: GlobalMut<T>,
    amax: GlobalMut<u32>,
    inp: Global<bf16>,
    scale: Global<f32>,
    extent: Extent,
) {
    let n = extent.elements();
    let factor = math::div_rn(1.0, scale.at(0));
    let first = thread::block_idx_x() as usize * BLOCK_ELEMENTS + thread::thread_idx_x() as usize * 8;
    let mut packets = [Packet::zero(); PACKETS];
    for i in 0..PACKETS {
        let at = first + i * THREADS * 8;
        if at < n {
            packets[i] = inp.packet(at);
        }
    }
    let mut all = Magnitudes::NONE;
    for i in 0..PACKETS {
        let (at, magnitudes) = (first + i * THREADS * 8, Magnitudes::of(packets[i]));
        if at < n {
            out.set_eight(at, quantized::<T>(packets[i], magnitudes, factor));
        }
        all = all.and(magnitudes);
    }
    if AMAX {
        store_block_amax(amax, maxima(&mut Layout::new()), all);
    }
}

/// Returns the index of 32-bit word `word` of `row` in a tile.
///
/// The permutation by groups of 16 rows lets a warp read four adjacent words of eight such groups, and write whole rows,
/// without bank conflicts. It keeps aligned groups of four words together.
#[inline(always)]
pub(crate) fn place(row: usize, word: usize) -> usize {
    row * ROW_WORDS + (word ^ (row / 16 % 8 * 4))
}

/// Returns the sum of 16 FP8 numbers. The bits of a NaN are those that conversion gives it, and infinities do not occur.
#[inline(always)]
fn sum_of<T: Fp8>(words: [u32; 4]) -> f32 {
    // A number's bits at the top of an f32 are the number times a power of two, also if it is subnormal. A word shifted
    // right by the difference of the exponents' widths, as a signed number, keeps its sign.
    let shift = 1 + T::FORMAT.mantissa_bits();
    let mask = 0x8000_0000 | (0x7f00_0000 >> shift);
    let value = |word: u32| f32::from_bits((word as i32 >> shift) as u32 & mask);
    let of_word = |word: u32| (value(word << 24) + value(word << 16)) + (value(word << 8) + value(word));
    // Only the magnitude of a NaN is 0x7f.
    let carries = |word: u32| (word & 0x7f7f_7f7f) + 0x0101_0101;
    let [a, b, c, d] = words;
    let sum = (of_word(a) + of_word(b)) + (of_word(c) + of_word(d));
    let factor = f32::from_bits(((253 + T::FORMAT.min_exponent()) as u32) << 23);
    let has_nan = (carries(a) | carries(b) | carries(c) | carries(d)) & 0x8080_8080 != 0;
    if has_nan { f32::NAN } else { sum * factor }
}

/// Column sums of a quantized tensor (rows, columns).
#[derive(Clone, Copy)]
pub(crate) struct ColumnSums {
    /// (tiles of rows, columns): receives the sums of each tile.
    pub partials: GlobalMut<f32>,
    /// Elements from a row of `partials` to the next.
    pub columns: usize,
    /// The tensor's scale.
    pub scale: f32,
}

/// Stores a tile of FP8 numbers, transposed, to out (columns, rows). `row` and `column` are the tile's first. Elements outside
/// of the matrix are zeros in the tile. With `SUMS`, also stores the sums of the tile's columns.
#[inline(always)]
#[track_caller]
pub(crate) fn store_transposed<T: Fp8, const SUMS: bool>(
    out: GlobalMut<T>,
    tile: SharedArray<u32>,
    [row, column]: [usize; 2],
    [rows, columns]: [usize; 2],
    sums: ColumnSums,
) {
    // A thread takes 16 rows and four columns. Eight neighboring threads store 128 adjacent bytes.
    let thread = thread::thread_idx_x() as usize;
    let (first_row, word) = (thread % 8 * 16, thread / 8);
    let (tile_row, row, column) = (row / TILE, row + first_row, column + word * 4);
    let mut transposed = [[0; 4]; 4];
    for i in 0..4 {
        let mut words = [0; 4];
        for j in 0..4 {
            words[j] = tile.at(place(first_row + i * 4 + j, word));
        }
        let words = transpose_bytes(words);
        for j in 0..4 {
            transposed[j][i] = words[j];
        }
    }
    if SUMS {
        let of_column = |words| {
            let sum = sum_of::<T>(words);
            let sum = sum + warp::shuffle_xor(sum, 4);
            let sum = sum + warp::shuffle_xor(sum, 2);
            sums.scale * (sum + warp::shuffle_xor(sum, 1))
        };
        let [a, b, c, d] = transposed;
        let of_columns = [of_column(a), of_column(b), of_column(c), of_column(d)];
        if thread.is_multiple_of(8) && column < columns {
            sums.partials.set_four(tile_row * sums.columns + column, of_columns);
        }
    }
    if row >= rows || column >= columns {
        return;
    }
    for j in 0..4 {
        out.set_packet((column + j) * rows + row, Packet::from_packed(transposed[j]));
    }
}

/// `transposed` (columns, rows) = inp (rows, columns)ᵀ / scale in FP8. With `BOTH`, also out (rows, columns) = inp / scale.
/// With `AMAX`, also does what [`amax_bf16`] does. With `SUMS`, also computes `partials` ([`sum_rows`], columns), the sums of
/// the quantized values of each tile's columns, times the scale. `rows` and `columns` are multiples of 16.
///
/// Rows from `end[0]` on, a multiple of 128, are neither read nor written, unless `end` is null. There may be a batch of matrices
/// with equal shapes, without `SUMS`. Grid: [`transpose_grid`], times the matrices.
#[kernel(threads = 256, instances(
    e4m3 = <E4m3, false, false, false>, e4m3_amax = <E4m3, false, true, false>,
    e5m2 = <E5m2, false, false, false>, e5m2_amax = <E5m2, false, true, false>,
    both_e4m3 = <E4m3, true, false, false>, both_e4m3_amax = <E4m3, true, true, false>,
    both_e5m2 = <E5m2, true, false, false>, both_e5m2_amax = <E5m2, true, true, false>,
    both_e4m3_sums = <E4m3, true, false, true>, both_e4m3_amax_sums = <E4m3, true, true, true>,
    both_e5m2_sums = <E5m2, true, false, true>, both_e5m2_amax_sums = <E5m2, true, true, true>))]
pub fn quantize_transpose<T: Fp8, const BOTH: bool, const AMAX: bool, const SUMS: bool>(
    out: GlobalMut<T>,
    transposed: GlobalMut<T>,
    amax: GlobalMut<u32>,
    partials: GlobalMut<f32>,
    inp: Global<bf16>,
    scale: Global<f32>,
    rows: u32,
    columns: u32,
    end: Global<u32>,
) {
    let (tile, maxima) = tile_and_maxima(&mut Layout::new());
    let (rows, columns) = (rows as usize, columns as usize);
    let [row, column] = [thread::block_idx_y() as usize * TILE, thread::block_idx_x() as usize * TILE];
    if !end.is_null() && row >= end.at(0) as usize {
        return;
    }
    let factor = math::div_rn(1.0, scale.at(0));
    let first = thread::block_idx_z() as usize * rows * columns;
    let (inp, transposed) = (inp.skip(first), transposed.skip(first));
    let out = if BOTH { out.skip(first) } else { out };
    // Sixteen threads load a row of the tile: 256 adjacent bytes.
    let thread = thread::thread_idx_x() as usize;
    let (first_row, packet) = (thread / 16, thread % 16);
    let at = |i: usize| (row + first_row + i * 16, column + packet * 8);
    let inside = |i: usize| at(i).0 < rows && at(i).1 < columns;
    let mut packets = [Packet::zero(); 8];
    for i in 0..8 {
        if inside(i) {
            packets[i] = inp.packet(at(i).0 * columns + at(i).1);
        }
    }
    let mut all = Magnitudes::NONE;
    for i in 0..8 {
        let magnitudes = Magnitudes::of(packets[i]);
        let words = quantized::<T>(packets[i], magnitudes, factor);
        tile.set_two(place(first_row + i * 16, packet * 2), words);
        if BOTH && inside(i) {
            out.set_eight(at(i).0 * columns + at(i).1, words);
        }
        all = all.and(magnitudes);
    }
    if AMAX {
        store_block_amax(amax, maxima, all);
    }
    thread::sync_threads();
    let sums = ColumnSums { partials, columns, scale: if SUMS { scale.at(0) } else { 1.0 } };
    store_transposed::<T, SUMS>(transposed, tile, [row, column], [rows, columns], sums);
}

/// out (columns, rows) = inp (rows, columns)ᵀ of FP8 numbers. With `SUMS`, also computes `partials` as [`quantize_transpose`]
/// does; otherwise the format and the scale have no effect. `rows` and `columns` are multiples of 16. Grid: [`transpose_grid`].
#[kernel(threads = 256, instances(fp8 = <E4m3, false>, e4m3_sums = <E4m3, true>, e5m2_sums = <E5m2, true>))]
pub fn transpose_fp8<T: Fp8, const SUMS: bool>(
    out: GlobalMut<T>,
    partials: GlobalMut<f32>,
    inp: Global<T>,
    scale: Global<f32>,
    rows: u32,
    columns: u32,
) {
    let (tile, _) = tile_and_maxima(&mut Layout::new());
    let (rows, columns) = (rows as usize, columns as usize);
    let [row, column] = [thread::block_idx_y() as usize * TILE, thread::block_idx_x() as usize * TILE];
    // Eight threads load a row of the tile: 128 adjacent bytes.
    let thread = thread::thread_idx_x() as usize;
    let (first_row, packet) = (thread / 8, thread % 8);
    let mut packets = [Packet::zero(); 4];
    for i in 0..4 {
        let (row, column) = (row + first_row + i * 32, column + packet * 16);
        if row < rows && column < columns {
            packets[i] = inp.packet(row * columns + column);
        }
    }
    for i in 0..4 {
        tile.set_four(place(first_row + i * 32, packet * 4), packets[i].packed());
    }
    thread::sync_threads();
    let sums = ColumnSums { partials, columns, scale: if SUMS { scale.at(0) } else { 1.0 } };
    store_transposed::<T, SUMS>(out, tile, [row, column], [rows, columns], sums);
}
