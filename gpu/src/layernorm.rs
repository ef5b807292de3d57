//! Layer normalisation over C: normed = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(variance + 1e-5), biased variance.
//!
//! Shapes: x, normed and gradients (rows, C); mean and rstd (rows) f32; weight and bias (C). C is a multiple of the packet.
//!
//! A row is read once and held until its last use: PACKETS packets in each lane of WARPS warps, so
//! C <= PACKETS * WARPS * 32 * `T::PACKET`. The pairs there are instances of are [`Shape`]: up to 16384 channels in bf16 and
//! 8192 in f32. WARPS is 1 (eight rows per block, no barrier) or 8 (one row per block). Forward holds a row in registers
//! and issues all its loads before its first store, since stores may alias them. Backward needs its registers for the
//! sums of dweight and dbias; it holds rows in shared memory, where the next arrives while one is worked on.
//!
//! The gradients of weight and bias are per-block sums in `partials` (blocks, 2, C) f32, weight first, which a second
//! kernel adds up: no atomics, the same on every run with the same grid.

use crate::column_sum;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, SharedArray, async_copy, block, kernel, math, thread, warp};

const THREADS: u32 = 256;
const BLOCK_WARPS: usize = (THREADS / warp::LANES) as usize;
const LANES: usize = warp::LANES as usize;
const EPSILON: f32 = 1e-5;

/// How the kernels hold a row; the generic arguments of their instances.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    /// PACKETS = 3, WARPS = 1
    Warp3,
    /// PACKETS = 4, WARPS = 1
    Warp4,
    /// PACKETS = 1, WARPS = 8
    Block1,
    /// PACKETS = 4, WARPS = 8
    Block4,
    /// PACKETS = 8, WARPS = 8
    Block8,
}

impl Shape {
    /// The narrowest shape that holds rows of `channels`; `None` if `channels` is no multiple of the packet or too many.
    pub const fn of<T: Element>(channels: usize) -> Option<Self> {
        let packets = channels / T::PACKET;
        if !channels.is_multiple_of(T::PACKET) {
            return None;
        }
        match packets.div_ceil(LANES) {
            1..=3 => Some(Self::Warp3),
            4 => Some(Self::Warp4),
            5..=8 => Some(Self::Block1),
            9..=32 => Some(Self::Block4),
            33..=64 => Some(Self::Block8),
            _ => None,
        }
    }

    const fn rows_per_block(self) -> usize {
        match self {
            Self::Warp3 | Self::Warp4 => BLOCK_WARPS,
            Self::Block1 | Self::Block4 | Self::Block8 => 1,
        }
    }

    /// Blocks of the forward kernels.
    pub const fn forward_grid(self, rows: usize) -> u32 {
        rows.div_ceil(self.rows_per_block()) as u32
    }

    /// Blocks of [`layernorm_backward`], each of which takes many rows: as many as stay resident on `multiprocessors`.
    pub const fn backward_grid(self, rows: usize, multiprocessors: usize) -> u32 {
        let resident = match self {
            Self::Warp3 | Self::Warp4 => 2 * multiprocessors,
            Self::Block1 => 4 * multiprocessors,
            Self::Block4 | Self::Block8 => multiprocessors,
        };
        let useful = rows.div_ceil(self.rows_per_block());
        if resident < useful { resident as u32 } else { useful as u32 }
    }

    /// Bytes of shared memory of [`layernorm_backward`].
    pub fn backward_shared_bytes<T: Element>(self) -> usize {
        let packets = match self {
            Self::Block1 => 1,
            Self::Warp3 => 3,
            Self::Warp4 | Self::Block4 => 4,
            Self::Block8 => 8,
        };
        let mut layout = Layout::new();
        backward_shared::<T>(&mut layout, packets);
        layout.bytes()
    }

    /// f32 elements of `partials` for [`layernorm_backward`].
    pub const fn backward_partials(self, rows: usize, channels: usize, multiprocessors: usize) -> usize {
        self.backward_grid(rows, multiprocessors) as usize * 2 * channels
    }
}

/// Calls a kernel's instance for a [`Shape`]: `layernorm::dispatch!(shape, layernorm_forward::<bf16>(…))`.
#[macro_export]
macro_rules! layernorm_dispatch {
    ($shape:expr, $kernel:ident::<$element:ty>($($argument:expr),* $(,)?)) => {
        match $shape {
            $crate::layernorm::Shape::Warp3 => $crate::layernorm::$kernel::<$element, 3, 1>($($argument),*),
            $crate::layernorm::Shape::Warp4 => $crate::layernorm::$kernel::<$element, 4, 1>($($argument),*),
            $crate::layernorm::Shape::Block1 => $crate::layernorm::$kernel::<$element, 1, 8>($($argument),*),
            $crate::layernorm::Shape::Block4 => $crate::layernorm::$kernel::<$element, 4, 8>($($argument),*),
            $crate::layernorm::Shape::Block8 => $crate::layernorm::$kernel::<$element, 8, 8>($($argument),*),
        }
    };
}
pub use layernorm_dispatch as dispatch;

/// Shared memory of the forward kernels.
pub fn forward_shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(LANES)
}

/// Rows that [`layernorm_backward`] has in shared memory per group of warps: the current one and the next, if they fit.
const fn stages(packets: usize) -> usize {
    if packets > 4 { 1 } else { 2 }
}

/// Shared memory of [`layernorm_backward`]: scratch of the row sums, and per stage each thread's packets of dout, inp and
/// dinp, (stages, 3, PACKETS, threads) packets. The latter is used again for the block's sums.
fn backward_shared<T: Element>(layout: &mut Layout, packets: usize) -> (SharedArray<f32>, SharedArray<T>) {
    (layout.array(2 * LANES), layout.array(stages(packets) * 3 * packets * THREADS as usize * T::PACKET))
}

/// The block's sums of dweight and dbias, (2, C), over the memory of the stages: with one warp per row, C is at most
/// PACKETS * 32 packets and they fit.
fn block_sums(layout: &mut Layout, channels: usize) -> SharedArray<f32> {
    layout.array::<f32>(2 * LANES);
    layout.array(2 * channels)
}

/// A thread's place in its row.
#[derive(Clone, Copy)]
struct Place<T, const PACKETS: usize, const WARPS: usize> {
    /// Row of the block.
    row: usize,
    first: usize,
    channels: usize,
    scratch: SharedArray<f32>,
    element: core::marker::PhantomData<T>,
}

impl<T: Element, const PACKETS: usize, const WARPS: usize> Place<T, PACKETS, WARPS> {
    const ROWS: usize = BLOCK_WARPS / WARPS;

    #[inline(always)]
    fn new(channels: u32, scratch: SharedArray<f32>) -> Self {
        let (row, first) = if WARPS == 1 {
            (warp::index() as usize, warp::lane() as usize)
        } else {
            (0, thread::thread_idx_x() as usize)
        };
        Self { row, first: first * T::PACKET, channels: channels as usize, scratch, element: core::marker::PhantomData }
    }

    /// First channel of the thread's packet `k`, if the row has one.
    #[inline(always)]
    fn column(&self, k: usize) -> Option<usize> {
        let column = self.first + k * WARPS * LANES * T::PACKET;
        (column < self.channels).then_some(column)
    }

    /// The thread's packets of the row that starts at `row`, zeros past its end.
    #[inline(always)]
    fn load(&self, row: Global<T>) -> [Packet<T>; PACKETS] {
        let mut packets = [Packet::zero(); PACKETS];
        for k in 0..PACKETS {
            if let Some(column) = self.column(k) {
                packets[k] = row.packet_streaming(column);
            }
        }
        packets
    }

    /// Sum over the threads of the row.
    #[inline(always)]
    fn sum(&self, value: f32) -> f32 {
        if WARPS == 1 { warp::sum(value) } else { block::sum(value, self.scratch) }
    }

    /// As [`sum`](Self::sum) of each, at the price of one.
    #[inline(always)]
    fn sums(&self, values: [f32; 2]) -> [f32; 2] {
        if WARPS == 1 { values.map(warp::sum) } else { block::sums(values, self.scratch) }
    }

    /// Normalises the row held in `x`.
    #[inline(always)]
    fn normalize(
        &self,
        x: &[Packet<T>; PACKETS],
        row: usize,
        normed: GlobalMut<T>,
        mean: GlobalMut<f32>,
        rstd: GlobalMut<f32>,
        weight: Global<T>,
        bias: Global<T>,
    ) {
        let scale = math::recip(self.channels as f32);
        let mut sum = 0.0;
        for packet in x {
            for i in 0..T::PACKET {
                sum += packet.get(i);
            }
        }
        let sum = self.sum(sum);
        // The quotient to its last bit: a constant row, whose variance is 0, shows the least error 316-fold.
        let m = sum * scale;
        let m = math::fma(math::fma(-m, self.channels as f32, sum), scale, m);
        let mut squares = 0.0;
        for k in 0..PACKETS {
            if self.column(k).is_some() {
                for i in 0..T::PACKET {
                    let d = x[k].get(i) - m;
                    squares = math::fma(d, d, squares);
                }
            }
        }
        // Scaled before the sum over threads, which may overflow where the variance does not.
        let r = math::rsqrt(self.sum(squares * scale) + EPSILON);
        if self.first == 0 {
            mean.set(row, m);
            rstd.set(row, r);
        }
        let out = normed.skip(row * self.channels);
        for k in 0..PACKETS {
            if let Some(column) = self.column(k) {
                let (w, b) = (weight.packet(column), bias.packet(column));
                let y = Packet::from_fn(|i| math::fma((x[k].get(i) - m) * r, w.get(i), b.get(i)));
                out.set_packet(column, y);
            }
        }
    }
}

/// normed, mean, rstd = layernorm of inp. Grid [`Shape::forward_grid`], shared memory [`forward_shared`].
#[kernel(threads = 256, instances(
    bf16_3 = <cuda_std::bf16, 3, 1>, bf16_4 = <cuda_std::bf16, 4, 1>, bf16_1x8 = <cuda_std::bf16, 1, 8>,
    bf16_4x8 = <cuda_std::bf16, 4, 8>, bf16_8x8 = <cuda_std::bf16, 8, 8>,
    f32_3 = <f32, 3, 1>, f32_4 = <f32, 4, 1>, f32_1x8 = <f32, 1, 8>, f32_4x8 = <f32, 4, 8>, f32_8x8 = <f32, 8, 8>,
))]
pub fn layernorm_forward<T: Element, const PACKETS: usize, const WARPS: usize>(
    normed: GlobalMut<T>,
    mean: GlobalMut<f32>,
    rstd: GlobalMut<f32>,
    inp: Global<T>,
    weight: Global<T>,
    bias: Global<T>,
    rows: u32,
    channels: u32,
) {
    let place = Place::<T, PACKETS, WARPS>::new(channels, forward_shared(&mut Layout::new()));
    let row = thread::block_idx_x() as usize * Place::<T, PACKETS, WARPS>::ROWS + place.row;
    if row >= rows as usize {
        return;
    }
    let x = place.load(inp.skip(row * place.channels));
    place.normalize(&x, row, normed, mean, rstd, weight, bias);
}

/// residual = a + b, rounded to T; normed, mean, rstd = layernorm of the rounded residual. Grid [`Shape::forward_grid`],
/// shared memory [`forward_shared`].
#[kernel(threads = 256, instances(
    bf16_3 = <cuda_std::bf16, 3, 1>, bf16_4 = <cuda_std::bf16, 4, 1>, bf16_1x8 = <cuda_std::bf16, 1, 8>,
    bf16_4x8 = <cuda_std::bf16, 4, 8>, bf16_8x8 = <cuda_std::bf16, 8, 8>,
    f32_3 = <f32, 3, 1>, f32_4 = <f32, 4, 1>, f32_1x8 = <f32, 1, 8>, f32_4x8 = <f32, 4, 8>, f32_8x8 = <f32, 8, 8>,
))]
pub fn residual_layernorm_forward<T: Element, const PACKETS: usize, const WARPS: usize>(
    residual: GlobalMut<T>,
    normed: GlobalMut<T>,
    mean: GlobalMut<f32>,
    rstd: GlobalMut<f32>,
    a: Global<T>,
    b: Global<T>,
    weight: Global<T>,
    bias: Global<T>,
    rows: u32,
    channels: u32,
) {
    let place = Place::<T, PACKETS, WARPS>::new(channels, forward_shared(&mut Layout::new()));
    let row = thread::block_idx_x() as usize * Place::<T, PACKETS, WARPS>::ROWS + place.row;
    if row >= rows as usize {
        return;
    }
    let start = row * place.channels;
    let mut x = place.load(a.skip(start));
    let y = place.load(b.skip(start));
    let out = residual.skip(start);
    for k in 0..PACKETS {
        x[k] = Packet::from_fn(|i| x[k].get(i) + y[k].get(i));
        if let Some(column) = place.column(k) {
            out.set_packet(column, x[k]);
        }
    }
    place.normalize(&x, row, normed, mean, rstd, weight, bias);
}

/// dinp += the gradient of inp, where dout is that of normed; partials = the block's sums of dweight and dbias, any
/// content before ([`Shape::backward_partials`] elements). Grid [`Shape::backward_grid`],
/// shared memory [`Shape::backward_shared_bytes`]; then [`layernorm_backward_reduce`].
#[kernel(threads = 256, instances(
    bf16_3 = <cuda_std::bf16, 3, 1>, bf16_4 = <cuda_std::bf16, 4, 1>, bf16_1x8 = <cuda_std::bf16, 1, 8>,
    bf16_4x8 = <cuda_std::bf16, 4, 8>, bf16_8x8 = <cuda_std::bf16, 8, 8>,
    f32_3 = <f32, 3, 1>, f32_4 = <f32, 4, 1>, f32_1x8 = <f32, 1, 8>, f32_4x8 = <f32, 4, 8>, f32_8x8 = <f32, 8, 8>,
))]
pub fn layernorm_backward<T: Element, const PACKETS: usize, const WARPS: usize>(
    dinp: GlobalMut<T>,
    partials: GlobalMut<f32>,
    dout: Global<T>,
    inp: Global<T>,
    weight: Global<T>,
    mean: Global<f32>,
    rstd: Global<f32>,
    rows: u32,
    channels: u32,
) {
    let (scratch, stage) = backward_shared::<T>(&mut Layout::new(), PACKETS);
    let place = Place::<T, PACKETS, WARPS>::new(channels, scratch);
    let (rows, channels) = (rows as usize, place.channels);
    let scale = math::recip(channels as f32);
    let step = thread::grid_dim_x() as usize * Place::<T, PACKETS, WARPS>::ROWS;
    // A thread reads back only what it copied itself, so no barrier is needed.
    let slot = |buffer: usize, array: usize, k: usize| {
        (((buffer * 3 + array) * PACKETS + k) * THREADS as usize + thread::thread_idx_x() as usize) * T::PACKET
    };
    let fetch = |buffer: usize, row: usize| {
        if row < rows {
            for k in 0..PACKETS {
                if let Some(column) = place.column(k) {
                    let i = row * channels + column;
                    stage.copy_packet_async(slot(buffer, 0, k), dout, i, true);
                    stage.copy_packet_async(slot(buffer, 1, k), inp, i, true);
                    stage.copy_packet_async(slot(buffer, 2, k), dinp.reader(), i, true);
                }
            }
        }
        async_copy::commit();
    };
    let mut dweight = [[0.0; 8]; PACKETS];
    let mut dbias = [[0.0; 8]; PACKETS];

    let mut row = thread::block_idx_x() as usize * Place::<T, PACKETS, WARPS>::ROWS + place.row;
    let mut buffer = 0;
    fetch(buffer, row);
    while row < rows {
        let (m, r) = (mean.at(row), rstd.at(row));
        if stages(PACKETS) == 2 {
            fetch(1 - buffer, row + step);
            async_copy::wait::<1>();
        } else {
            async_copy::wait::<0>();
        }

        let (mut sum, mut projection) = (0.0, 0.0);
        for k in 0..PACKETS {
            if let Some(column) = place.column(k) {
                let (dy, x) = (stage.packet(slot(buffer, 0, k)), stage.packet(slot(buffer, 1, k)));
                let w = weight.packet(column);
                for i in 0..T::PACKET {
                    let (g, normed) = (dy.get(i), (x.get(i) - m) * r);
                    let dnormed = g * w.get(i);
                    sum += dnormed;
                    projection = math::fma(dnormed, normed, projection);
                    dbias[k][i] += g;
                    dweight[k][i] = math::fma(g, normed, dweight[k][i]);
                }
            }
        }
        let [sum, projection] = place.sums([sum, projection]).map(|sum| sum * scale);
        // Orders memory, so the compiler reads the row again rather than keep it in registers it does not have.
        warp::sync();
        for k in 0..PACKETS {
            if let Some(column) = place.column(k) {
                let (dy, x) = (stage.packet(slot(buffer, 0, k)), stage.packet(slot(buffer, 1, k)));
                let (dx, w) = (stage.packet(slot(buffer, 2, k)), weight.packet(column));
                let new = Packet::from_fn(|i| {
                    let normed = (x.get(i) - m) * r;
                    let dnormed = dy.get(i) * w.get(i);
                    math::fma(dnormed - sum - normed * projection, r, dx.get(i))
                });
                dinp.set_packet(row * channels + column, new);
            }
        }
        row += step;
        if stages(PACKETS) == 2 {
            buffer = 1 - buffer;
        } else {
            fetch(buffer, row);
        }
    }

    let partials = partials.skip(thread::block_idx_x() as usize * 2 * channels);
    if WARPS > 1 {
        for k in 0..PACKETS {
            if let Some(column) = place.column(k) {
                for part in 0..T::PACKET / f32::PACKET {
                    let offset = part * f32::PACKET;
                    partials.set_packet(column + offset, Packet::from_fn(|i| dweight[k][offset + i]));
                    partials.set_packet(channels + column + offset, Packet::from_fn(|i| dbias[k][offset + i]));
                }
            }
        }
        return;
    }
    // The warps add their sums to the block's one after the other.
    let sums = block_sums(&mut Layout::new(), channels);
    thread::sync_threads();
    for turn in 0..BLOCK_WARPS {
        if turn == place.row {
            for k in 0..PACKETS {
                if let Some(column) = place.column(k) {
                    add(sums, column, &dweight[k], T::PACKET, turn == 0);
                    add(sums, channels + column, &dbias[k], T::PACKET, turn == 0);
                }
            }
        }
        thread::sync_threads();
    }
    let mut i = thread::thread_idx_x() as usize * f32::PACKET;
    while i < 2 * channels {
        partials.set_packet(i, sums.packet(i));
        i += THREADS as usize * f32::PACKET;
    }
}

/// sums[at ..] = (`first`) or += the first `count` of `values`, in packets.
#[inline(always)]
fn add(sums: SharedArray<f32>, at: usize, values: &[f32; 8], count: usize, first: bool) {
    for part in 0..count / f32::PACKET {
        let offset = part * f32::PACKET;
        let old = if first { Packet::zero() } else { sums.packet(at + offset) };
        sums.set_packet(at + offset, Packet::from_fn(|i| old.get(i) + values[offset + i]));
    }
}

/// dweight (C) and dbias (C) += sums over blocks of partials (blocks, 2, C), rounded to nearest. Grid
/// [`column_sum::grid`] of 2 C, shared memory [`column_sum::shared`]; `blocks` is [`layernorm_backward`]'s grid.
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn layernorm_backward_reduce<T: Element>(
    dweight: GlobalMut<T>,
    dbias: GlobalMut<T>,
    partials: Global<f32>,
    blocks: u32,
    channels: u32,
) {
    let channels = channels as usize;
    if let Some((column, sum)) = column_sum::column_sum(partials, blocks as usize, 2 * channels) {
        let (to, column) = if column < channels { (dweight, column) } else { (dbias, column - channels) };
        to.set(column, T::from_f32(to.at(column).to_f32() + sum));
    }
}
