//! Layer normalisation over C: normed = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(variance + 1e-5), biased variance.
//!
//! Shapes: x, normed and gradients (rows, C); mean and rstd (rows) f32; weight and bias (C). C is a multiple of the packet.
//!
//! A row is read once and held until its last use: PACKETS packets in each lane of WARPS warps, so
//! C <= PACKETS * WARPS * 32 * `T::PACKET`. The triples there are instances of are [`Shape`]: up to 16384 channels in bf16 and
//! 8192 in f32. WARPS is 1 (eight rows per block, no barrier), 4 (two groups of ROWS rows, each with a barrier of its own) or
//! 8 (one group). ROWS is 2 where a row is one packet for each thread: the barriers of two sums cost as much as those of one.
//! Forward holds a row in registers and issues all its loads before its first store, since stores may alias them; where a row
//! is one packet for each thread, too little would be under way, and the next rows arrive in shared memory. Backward needs its
//! registers for the sums of dweight and dbias; it holds rows in shared memory, where the next arrives while one is worked on.
//!
//! The gradients of weight and bias are per-block sums in `partials` (blocks, 2, C) f32, weight first, which a second
//! kernel adds up: no atomics, the same on every run with the same grid. Where there are registers for a third sum
//! ([`Shape::sums_columns`]), `partials` may be (blocks, 3, C): the column sums of dinp as it has become. That is what is
//! asked for where dinp is the gradient of a linear layer's output, whose bias needs no pass of its own then. They are
//! sums of the values before those are rounded to T: exacter than sums of what is stored, and without instructions to widen it.

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
    /// PACKETS = 2, WARPS = 1, ROWS = 1
    Warp2,
    /// PACKETS = 1, WARPS = 4, ROWS = 2
    Half1,
    /// PACKETS = 1, WARPS = 8, ROWS = 2
    Block1,
    /// PACKETS = 4, WARPS = 8, ROWS = 1
    Block4,
    /// PACKETS = 8, WARPS = 8, ROWS = 1
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
            1..=2 => Some(Self::Warp2),
            3..=4 => Some(Self::Half1),
            5..=8 => Some(Self::Block1),
            9..=32 => Some(Self::Block4),
            33..=64 => Some(Self::Block8),
            _ => None,
        }
    }

    const fn rows_per_block(self) -> usize {
        match self {
            Self::Warp2 => BLOCK_WARPS,
            Self::Half1 => 4,
            Self::Block1 => 2,
            Self::Block4 | Self::Block8 => 1,
        }
    }

    const fn is_of_one_packet(self) -> bool {
        matches!(self, Self::Half1 | Self::Block1)
    }

    /// Blocks of [`layernorm_forward`]: with PACKETS = 1 as many as stay resident on `multiprocessors`, which take many rows each
    /// and load the next ones while they work.
    pub const fn forward_grid(self, rows: usize, multiprocessors: usize) -> u32 {
        let (useful, resident) = (rows.div_ceil(self.rows_per_block()) as u32, (4 * multiprocessors) as u32);
        if self.is_of_one_packet() && resident < useful { resident } else { useful }
    }

    /// Bytes of shared memory of [`layernorm_forward`].
    pub fn forward_shared_bytes<T: Element>(self) -> usize {
        let mut layout = Layout::new();
        scratch(&mut layout, MOST_ROWS);
        if self.is_of_one_packet() {
            forward_ring::<T>(&mut layout, MOST_ROWS);
        }
        layout.bytes()
    }

    /// Blocks of [`layernorm_backward`], each of which takes many rows: as many as stay resident on `multiprocessors`.
    pub const fn backward_grid(self, rows: usize, multiprocessors: usize) -> u32 {
        let resident = match self {
            Self::Warp2 => 3 * multiprocessors,
            Self::Half1 | Self::Block1 => 2 * multiprocessors,
            Self::Block4 | Self::Block8 => multiprocessors,
        };
        let useful = rows.div_ceil(self.rows_per_block());
        if resident < useful { resident as u32 } else { useful as u32 }
    }

    /// Bytes of shared memory of [`layernorm_backward`].
    pub fn backward_shared_bytes<T: Element>(self) -> usize {
        let (packets, rows) = match self {
            Self::Half1 | Self::Block1 => (1, 2),
            Self::Warp2 => (2, 1),
            Self::Block4 => (4, 1),
            Self::Block8 => (8, 1),
        };
        let mut layout = Layout::new();
        backward_shared::<T>(&mut layout, packets, rows);
        layout.bytes()
    }

    /// Whether [`layernorm_backward`] has instances that sum the columns of dinp: where registers hold a third sum of PACKETS
    /// packets.
    pub const fn sums_columns(self) -> bool {
        matches!(self, Self::Half1 | Self::Block1 | Self::Block4)
    }

    /// f32 elements of `partials` for [`layernorm_backward`].
    pub const fn backward_partials(
        self,
        rows: usize,
        channels: usize,
        multiprocessors: usize,
        column_sums: bool,
    ) -> usize {
        self.backward_grid(rows, multiprocessors) as usize * sums_of_columns(column_sums) * channels
    }
}

/// Calls a kernel's instance for a [`Shape`]: `layernorm::dispatch!(shape, layernorm_forward::<bf16>(…))`.
#[macro_export]
macro_rules! layernorm_dispatch {
    ($shape:expr, $kernel:ident::<$element:ty>($($argument:expr),* $(,)?)) => {
        match $shape {
            $crate::layernorm::Shape::Warp2 => $crate::layernorm::$kernel::<$element, 2, 1, 1>($($argument),*),
            $crate::layernorm::Shape::Half1 => $crate::layernorm::$kernel::<$element, 1, 4, 2>($($argument),*),
            $crate::layernorm::Shape::Block1 => $crate::layernorm::$kernel::<$element, 1, 8, 2>($($argument),*),
            $crate::layernorm::Shape::Block4 => $crate::layernorm::$kernel::<$element, 4, 8, 1>($($argument),*),
            $crate::layernorm::Shape::Block8 => $crate::layernorm::$kernel::<$element, 8, 8, 1>($($argument),*),
        }
    };
}
pub use layernorm_dispatch as dispatch;

/// Calls the instance of [`layernorm_backward`] for a [`Shape`], with column sums or, always where the shape has none
/// ([`Shape::sums_columns`]), without: `layernorm::dispatch_backward!(shape, column_sums, <bf16>(…))`.
#[macro_export]
macro_rules! layernorm_dispatch_backward {
    ($shape:expr, $column_sums:expr, <$element:ty>($($argument:expr),* $(,)?)) => {{
        use $crate::layernorm::{Shape, layernorm_backward};
        match ($shape, $column_sums) {
            (Shape::Warp2, _) => layernorm_backward::<$element, 2, 1, 1, false>($($argument),*),
            (Shape::Half1, false) => layernorm_backward::<$element, 1, 4, 2, false>($($argument),*),
            (Shape::Half1, true) => layernorm_backward::<$element, 1, 4, 2, true>($($argument),*),
            (Shape::Block1, false) => layernorm_backward::<$element, 1, 8, 2, false>($($argument),*),
            (Shape::Block1, true) => layernorm_backward::<$element, 1, 8, 2, true>($($argument),*),
            (Shape::Block4, false) => layernorm_backward::<$element, 4, 8, 1, false>($($argument),*),
            (Shape::Block4, true) => layernorm_backward::<$element, 4, 8, 1, true>($($argument),*),
            (Shape::Block8, _) => layernorm_backward::<$element, 8, 8, 1, false>($($argument),*),
        }
    }};
}
pub use layernorm_dispatch_backward as dispatch_backward;

/// Scratch of [`Place::sums`] of so many values at a time.
fn scratch(layout: &mut Layout, values: usize) -> SharedArray<f32> {
    layout.array(2 * values * BLOCK_WARPS)
}

/// Most rows that a group of warps takes at a time, each with a sum in the forward kernels.
const MOST_ROWS: usize = 2;

/// Each thread's packets of the rows that [`layernorm_forward`] works on and of the next with PACKETS = 1, (2, ROWS, threads)
/// packets.
fn forward_ring<T: Element>(layout: &mut Layout, rows: usize) -> SharedArray<T> {
    layout.array(2 * rows * THREADS as usize * T::PACKET)
}

/// Rows that [`layernorm_backward`] has in shared memory for each that is worked on: that one and the next, if they fit.
const fn stages(packets: usize) -> usize {
    if packets > 4 { 1 } else { 2 }
}

/// Shared memory of [`layernorm_backward`]: scratch of the rows' sums, and per stage each thread's packets of dout, inp and
/// dinp, (stages, 3, ROWS, PACKETS, threads) packets. The latter is used again for the warps' sums.
fn backward_shared<T: Element>(layout: &mut Layout, packets: usize, rows: usize) -> (SharedArray<f32>, SharedArray<T>) {
    (scratch(layout, 2 * rows), layout.array(stages(packets) * 3 * rows * packets * THREADS as usize * T::PACKET))
}

/// Sums that [`layernorm_backward`] has of each column.
const fn sums_of_columns(column_sums: bool) -> usize {
    if column_sums { 3 } else { 2 }
}

/// Each group's sums of columns, (groups, 2 or 3, C), over the memory of the stages: C is at most PACKETS * WARPS * 32 packets, and
/// they fit.
fn sums_of_groups(layout: &mut Layout, len: usize, rows: usize) -> SharedArray<f32> {
    scratch(layout, 2 * rows);
    layout.array(len)
}

/// A thread's place in its rows.
#[derive(Clone, Copy)]
struct Place<T, const PACKETS: usize, const WARPS: usize, const ROWS: usize> {
    /// Of the block's groups of warps.
    group: usize,
    first: usize,
    channels: usize,
    scratch: SharedArray<f32>,
    element: core::marker::PhantomData<T>,
}

impl<T: Element, const PACKETS: usize, const WARPS: usize, const ROWS: usize> Place<T, PACKETS, WARPS, ROWS> {
    const GROUPS: usize = BLOCK_WARPS / WARPS;
    const PER_BLOCK: usize = Self::GROUPS * ROWS;

    #[inline(always)]
    fn new(channels: u32, scratch: SharedArray<f32>) -> Self {
        let (group, first) = if WARPS == 1 {
            (warp::index() as usize, warp::lane() as usize)
        } else {
            // The group is computed even where there is but one: a row that is each thread's own, to ptxas, makes it take twice the
            // registers for the backward pass and load early, which is 7 to 12 % faster (docs/performance/row-wise.md).
            let thread = thread::thread_idx_x() as usize;
            (thread / (WARPS * LANES), thread % (WARPS * LANES))
        };
        Self {
            group,
            first: first * T::PACKET,
            channels: channels as usize,
            scratch,
            element: core::marker::PhantomData,
        }
    }

    /// The first of the ROWS rows that the thread's group begins with.
    #[inline(always)]
    fn row(&self) -> usize {
        thread::block_idx_x() as usize * Self::PER_BLOCK + self.group * ROWS
    }

    /// First channel of the thread's packet `k`, if the row has one.
    #[inline(always)]
    fn column(&self, k: usize) -> Option<usize> {
        let column = self.first + k * WARPS * LANES * T::PACKET;
        (column < self.channels).then_some(column)
    }

    /// The thread's packets of the rows from `row` on, zeros past their ends and past the last of `rows`.
    #[inline(always)]
    fn load(&self, from: Global<T>, row: usize, rows: usize) -> [[Packet<T>; PACKETS]; ROWS] {
        let mut packets = [[Packet::zero(); PACKETS]; ROWS];
        for r in 0..ROWS {
            for k in 0..PACKETS {
                if let Some(column) = self.column(k)
                    && (ROWS == 1 || row + r < rows)
                {
                    packets[r][k] = from.packet_streaming((row + r) * self.channels + column);
                }
            }
        }
        packets
    }

    /// The thread's packets of a parameter: held where they are few, as they are and not widened; else loaded when they are used.
    #[inline(always)]
    fn parameter(&self, of: Global<T>) -> impl Fn(usize) -> Packet<T> {
        let held = if PACKETS == 1 { self.column(0).map(|column| of.packet(column)) } else { None };
        move |column| held.map_or_else(|| of.packet(column), Packet::opaque)
    }

    /// Sums over the threads of a group, all at the price of one. `turn`: 0 and 1 by turns.
    #[inline(always)]
    fn sums<const N: usize>(&self, values: [[f32; N]; ROWS], turn: usize) -> [[f32; N]; ROWS] {
        let scratch = self.scratch.skip((turn * Self::GROUPS + self.group) * N * ROWS * WARPS);
        if Self::GROUPS == 1 {
            block::sums::<WARPS, _, _>(values, scratch)
        } else {
            block::sums_of_group::<WARPS, _, _>(values, scratch, self.group as u32)
        }
    }

    /// Hands sums of the thread's columns to `set`, a packet at a time, with its place after `start`.
    #[inline(always)]
    fn set_sums(&self, start: usize, sums: &[[f32; 8]; PACKETS], set: impl Fn(usize, Packet<f32>)) {
        for k in 0..PACKETS {
            if let Some(column) = self.column(k) {
                for part in 0..T::PACKET / f32::PACKET {
                    let first = part * f32::PACKET;
                    set(start + column + first, Packet::from_fn(|i| sums[k][first + i]));
                }
            }
        }
    }

    /// Normalises the rows from `row` on, held in `x`.
    #[inline(always)]
    fn normalize(
        &self,
        x: &[[Packet<T>; PACKETS]; ROWS],
        row: usize,
        rows: usize,
        normed: GlobalMut<T>,
        mean: GlobalMut<f32>,
        rstd: GlobalMut<f32>,
        weight: impl Fn(usize) -> Packet<T>,
        bias: impl Fn(usize) -> Packet<T>,
    ) {
        let scale = math::recip(self.channels as f32);
        let mut sums = [[0.0]; ROWS];
        for r in 0..ROWS {
            for packet in &x[r] {
                for i in 0..T::PACKET {
                    sums[r][0] += packet.get(i);
                }
            }
        }
        // The quotient to its last bit: a constant row, whose variance is 0, shows the least error 316-fold.
        let means = self.sums(sums, 0).map(|[sum]| {
            let m = sum * scale;
            math::fma(math::fma(-m, self.channels as f32, sum), scale, m)
        });
        let mut squares = [[0.0]; ROWS];
        for r in 0..ROWS {
            for k in 0..PACKETS {
                if self.column(k).is_some() {
                    for i in 0..T::PACKET {
                        let d = x[r][k].get(i) - means[r];
                        squares[r][0] = math::fma(d, d, squares[r][0]);
                    }
                }
            }
        }
        // Scaled before the sum over threads, which may overflow where the variance does not.
        let rstds = self.sums(squares.map(|[sum]| [sum * scale]), 1).map(|[variance]| math::rsqrt(variance + EPSILON));
        for r in 0..ROWS {
            let row = row + r;
            if ROWS > 1 && row >= rows {
                return;
            }
            if self.first == 0 {
                mean.set(row, means[r]);
                rstd.set(row, rstds[r]);
            }
            for k in 0..PACKETS {
                if let Some(column) = self.column(k) {
                    let (w, b) = (weight(column), bias(column));
                    let y = Packet::from_fn(|i| math::fma((x[r][k].get(i) - means[r]) * rstds[r], w.get(i), b.get(i)));
                    normed.set_packet(row * self.channels + column, y);
                }
            }
        }
    }
}

/// normed, mean, rstd = layernorm of inp. Grid [`Shape::forward_grid`], shared memory [`Shape::forward_shared_bytes`].
#[kernel(threads = 256, instances(
    bf16_2 = <cuda_std::bf16, 2, 1, 1>, bf16_1x4 = <cuda_std::bf16, 1, 4, 2>, bf16_1x8 = <cuda_std::bf16, 1, 8, 2>,
    bf16_4x8 = <cuda_std::bf16, 4, 8, 1>, bf16_8x8 = <cuda_std::bf16, 8, 8, 1>, f32_2 = <f32, 2, 1, 1>,
    f32_1x4 = <f32, 1, 4, 2>, f32_1x8 = <f32, 1, 8, 2>, f32_4x8 = <f32, 4, 8, 1>, f32_8x8 = <f32, 8, 8, 1>,
))]
pub fn layernorm_forward<T: Element, const PACKETS: usize, const WARPS: usize, const ROWS: usize>(
    normed: GlobalMut<T>,
    mean: GlobalMut<f32>,
    rstd: GlobalMut<f32>,
    inp: Global<T>,
    weight: Global<T>,
    bias: Global<T>,
    rows: u32,
    channels: u32,
) {
    let mut layout = Layout::new();
    let place = Place::<T, PACKETS, WARPS, ROWS>::new(channels, scratch(&mut layout, MOST_ROWS));
    let (mut row, rows) = (place.row(), rows as usize);
    let (weight, bias) = (place.parameter(weight), place.parameter(bias));
    if PACKETS > 1 {
        if row < rows {
            place.normalize(&place.load(inp, row, rows), row, rows, normed, mean, rstd, weight, bias);
        }
        return;
    }
    // A thread reads back only what it copied itself, so no barrier is needed.
    let ring = forward_ring::<T>(&mut layout, ROWS);
    let slot =
        |stage: usize, r: usize| ((stage * ROWS + r) * THREADS as usize + thread::thread_idx_x() as usize) * T::PACKET;
    let fetch = |stage: usize, row: usize| {
        for r in 0..ROWS {
            if row + r < rows
                && let Some(column) = place.column(0)
            {
                ring.copy_packet_async(slot(stage, r), inp, (row + r) * place.channels + column, true);
            }
        }
        async_copy::commit();
    };
    let step = thread::grid_dim_x() as usize * Place::<T, PACKETS, WARPS, ROWS>::PER_BLOCK;
    let mut stage = 0;
    fetch(stage, row);
    while row < rows {
        fetch(1 - stage, row + step);
        async_copy::wait::<1>();
        let mut x = [[Packet::zero(); PACKETS]; ROWS];
        for r in 0..ROWS {
            if row + r < rows && place.column(0).is_some() {
                x[r][0] = ring.packet(slot(stage, r));
            }
        }
        place.normalize(&x, row, rows, normed, mean, rstd, &weight, &bias);
        row += step;
        stage = 1 - stage;
    }
}

/// dinp += the gradient of inp, where dout is that of normed; partials = the block's sums of dweight and dbias and, with
/// COLUMN_SUMS, of the columns of the new dinp, any content before ([`Shape::backward_partials`] elements). Grid
/// [`Shape::backward_grid`], shared memory [`Shape::backward_shared_bytes`]; then [`layernorm_backward_reduce`].
#[kernel(threads = 256, instances(
    bf16_2 = <cuda_std::bf16, 2, 1, 1, false>,
    bf16_1x4 = <cuda_std::bf16, 1, 4, 2, false>, bf16_1x4_sums = <cuda_std::bf16, 1, 4, 2, true>,
    bf16_1x8 = <cuda_std::bf16, 1, 8, 2, false>, bf16_1x8_sums = <cuda_std::bf16, 1, 8, 2, true>,
    bf16_4x8 = <cuda_std::bf16, 4, 8, 1, false>, bf16_4x8_sums = <cuda_std::bf16, 4, 8, 1, true>,
    bf16_8x8 = <cuda_std::bf16, 8, 8, 1, false>,
    f32_2 = <f32, 2, 1, 1, false>,
    f32_1x4 = <f32, 1, 4, 2, false>, f32_1x4_sums = <f32, 1, 4, 2, true>,
    f32_1x8 = <f32, 1, 8, 2, false>, f32_1x8_sums = <f32, 1, 8, 2, true>,
    f32_4x8 = <f32, 4, 8, 1, false>, f32_4x8_sums = <f32, 4, 8, 1, true>,
    f32_8x8 = <f32, 8, 8, 1, false>,
))]
pub fn layernorm_backward<
    T: Element,
    const PACKETS: usize,
    const WARPS: usize,
    const ROWS: usize,
    const COLUMN_SUMS: bool,
>(
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
    let (scratch, stage) = backward_shared::<T>(&mut Layout::new(), PACKETS, ROWS);
    let place = Place::<T, PACKETS, WARPS, ROWS>::new(channels, scratch);
    let (rows, channels) = (rows as usize, place.channels);
    let scale = math::recip(channels as f32);
    let step = thread::grid_dim_x() as usize * Place::<T, PACKETS, WARPS, ROWS>::PER_BLOCK;
    // A thread reads back only what it copied itself, so no barrier is needed.
    let slot = |buffer: usize, array: usize, r: usize, k: usize| {
        let packet = ((buffer * 3 + array) * ROWS + r) * PACKETS + k;
        (packet * THREADS as usize + thread::thread_idx_x() as usize) * T::PACKET
    };
    let fetch = |buffer: usize, row: usize| {
        for r in 0..ROWS {
            if row + r < rows {
                for k in 0..PACKETS {
                    if let Some(column) = place.column(k) {
                        let i = (row + r) * channels + column;
                        stage.copy_packet_async(slot(buffer, 0, r, k), dout, i, true);
                        stage.copy_packet_async(slot(buffer, 1, r, k), inp, i, true);
                        stage.copy_packet_async(slot(buffer, 2, r, k), dinp.reader(), i, true);
                    }
                }
            }
        }
        async_copy::commit();
    };
    let statistics = |row: usize| {
        let mut of_rows = [(0.0, 0.0); ROWS];
        for r in 0..ROWS {
            if row + r < rows {
                of_rows[r] = (mean.at(row + r), rstd.at(row + r));
            }
        }
        of_rows
    };
    let weight = place.parameter(weight);
    let mut dweight = [[0.0; 8]; PACKETS];
    let mut dbias = [[0.0; 8]; PACKETS];
    let mut columns = [[0.0; 8]; PACKETS];

    let mut row = place.row();
    let (mut buffer, mut turn) = (0, 0);
    fetch(buffer, row);
    let mut of_rows = statistics(row);
    while row < rows {
        let next = statistics(row + step);
        if stages(PACKETS) == 2 {
            fetch(1 - buffer, row + step);
            async_copy::wait::<1>();
        } else {
            async_copy::wait::<0>();
        }

        let mut sums = [[0.0; 2]; ROWS];
        for r in 0..ROWS {
            let (m, rstd) = of_rows[r];
            for k in 0..PACKETS {
                if let Some(column) = place.column(k)
                    && (ROWS == 1 || row + r < rows)
                {
                    let (dy, x) = (stage.packet(slot(buffer, 0, r, k)), stage.packet(slot(buffer, 1, r, k)));
                    let w = weight(column);
                    for i in 0..T::PACKET {
                        let (g, normed) = (dy.get(i), (x.get(i) - m) * rstd);
                        let dnormed = g * w.get(i);
                        sums[r][0] += dnormed;
                        sums[r][1] = math::fma(dnormed, normed, sums[r][1]);
                        dbias[k][i] += g;
                        dweight[k][i] = math::fma(g, normed, dweight[k][i]);
                    }
                }
            }
        }
        let sums = place.sums(sums, turn).map(|of_row| of_row.map(|sum| sum * scale));
        // Orders memory, so the compiler reads the row again rather than keep it in registers it does not have.
        warp::sync();
        for r in 0..ROWS {
            let ((m, rstd), [sum, projection]) = (of_rows[r], sums[r]);
            let slope = rstd * projection;
            for k in 0..PACKETS {
                if let Some(column) = place.column(k)
                    && (ROWS == 1 || row + r < rows)
                {
                    let (dy, x) = (stage.packet(slot(buffer, 0, r, k)), stage.packet(slot(buffer, 1, r, k)));
                    let (dx, w) = (stage.packet(slot(buffer, 2, r, k)), weight(column));
                    let new = Packet::from_fn(|i| {
                        // dnormed - sum - normed projection, in as few instructions as there can be.
                        let rest = math::fma(m - x.get(i), slope, -sum);
                        let value = math::fma(math::fma(dy.get(i), w.get(i), rest), rstd, dx.get(i));
                        if COLUMN_SUMS {
                            columns[k][i] += value;
                        }
                        value
                    });
                    dinp.set_packet((row + r) * channels + column, new);
                }
            }
        }
        of_rows = next;
        row += step;
        turn = 1 - turn;
        if stages(PACKETS) == 2 {
            buffer = 1 - buffer;
        } else {
            fetch(buffer, row);
        }
    }

    let len = sums_of_columns(COLUMN_SUMS) * channels;
    let partials = partials.skip(thread::block_idx_x() as usize * len);
    let groups = Place::<T, PACKETS, WARPS, ROWS>::GROUPS;
    if groups == 1 {
        let set = |i, x| partials.set_packet(i, x);
        place.set_sums(0, &dweight, set);
        place.set_sums(channels, &dbias, set);
        if COLUMN_SUMS {
            place.set_sums(2 * channels, &columns, set);
        }
        return;
    }
    let of_groups = sums_of_groups(&mut Layout::new(), groups * len, ROWS);
    let set = |i, x| of_groups.set_packet(place.group * len + i, x);
    thread::sync_threads();
    place.set_sums(0, &dweight, set);
    place.set_sums(channels, &dbias, set);
    if COLUMN_SUMS {
        place.set_sums(2 * channels, &columns, set);
    }
    thread::sync_threads();
    let mut i = thread::thread_idx_x() as usize * f32::PACKET;
    while i < len {
        let mut sum = [0.0; 4];
        for group in 0..groups {
            let of_group = of_groups.packet(group * len + i);
            for k in 0..4 {
                sum[k] += of_group.get(k);
            }
        }
        partials.set_packet(i, Packet::from_fn(|k| sum[k]));
        i += THREADS as usize * f32::PACKET;
    }
}

/// dweight (C), dbias (C) and column_sums (C; null for none) += sums over blocks of partials (blocks, 2, C), (blocks, 3, C) with
/// column sums, rounded to nearest. Grid [`reduce_grid`], shared memory [`column_sum::shared`]; `blocks` is
/// [`layernorm_backward`]'s grid.
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn layernorm_backward_reduce<T: Element>(
    dweight: GlobalMut<T>,
    dbias: GlobalMut<T>,
    column_sums: GlobalMut<T>,
    partials: Global<f32>,
    blocks: u32,
    channels: u32,
) {
    let channels = channels as usize;
    let sums = sums_of_columns(!column_sums.is_null());
    if let Some((column, sum)) = column_sum::column_sum(partials, blocks as usize, sums * channels) {
        let (to, column) = if column < channels {
            (dweight, column)
        } else if column < 2 * channels {
            (dbias, column - channels)
        } else {
            (column_sums, column - 2 * channels)
        };
        to.set(column, T::from_f32(to.at(column).to_f32() + sum));
    }
}

/// Blocks of [`layernorm_backward_reduce`].
pub const fn reduce_grid(channels: usize, column_sums: bool) -> u32 {
    column_sum::grid(sums_of_columns(column_sums) * channels)
}
