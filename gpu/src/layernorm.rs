//! Layer normalization over C (Ba et al., 2016, arXiv:1607.06450): normed = (x - mean) * rstd * weight + bias, where
//! rstd = 1 / sqrt(variance + 1e-5) with the biased variance.
//!
//! Shapes: x, normed and the gradients of both (rows, C), mean and rstd (rows) f32, weight and bias (C). C is a
//! multiple of the packet.
//!
//! Each row is read once and kept on chip until its last use, as PACKETS packets per lane of WARPS warps, so C is at
//! most PACKETS * WARPS * 32 * `T::PACKET`. [`Shape`] lists the instantiated combinations, which cover up to 16384
//! channels in bf16 and 8192 in f32.
//!
//! * WARPS is 1 (eight rows per block, no barrier), 4 (two groups of warps, each with its own named barrier), or 8 (one
//!   group).
//! * ROWS is the number of rows that a group processes at a time. It is 2 if each thread holds one packet of a row,
//!   because the reductions of two rows can share their barriers.
//!
//! The forward kernel holds a row in registers. It issues all loads of a row before its first store, since the compiler
//! must assume that they alias. One packet per thread would leave too few loads in flight, so for PACKETS = 1 the next
//! rows are prefetched to shared memory.
//!
//! The backward kernel needs its registers for the sums of dweight and dbias. It holds rows in shared memory, double
//! buffered where two rows fit.
//!
//! The gradients of weight and bias are a two-stage reduction: per-block column sums in `partials` (blocks, 2, C) f32,
//! weight first, which [`layernorm_backward_reduce`] adds up. There are no atomics, and the result is deterministic for
//! a given grid.
//!
//! Shapes with registers for a third sum ([`Shape::sums_columns`]) can also compute the column sums of the updated
//! dinp; `partials` then has shape (blocks, 3, C). If dinp is the gradient of a linear layer's output, its column sums
//! are that layer's bias gradient, and no separate kernel is needed. The values are summed before they are rounded to
//! T, which is more accurate than summing the stored values and saves their conversion.

use crate::column_sum;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, SharedArray, async_copy, block, kernel, math, thread, warp};

/// Threads of a block of [`layernorm_forward`] and [`layernorm_backward`].
const THREADS: u32 = 256;
const BLOCK_WARPS: usize = (THREADS / warp::LANES) as usize;
const LANES: usize = warp::LANES as usize;
const EPSILON: f32 = 1e-5;

/// How the kernels distribute a row over threads: the generic arguments of their instances.
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
    /// Returns the smallest shape that holds rows of `channels`, or `None` if `channels` is too large or not a multiple
    /// of the packet.
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

    /// Returns the number of rows that a block processes at a time.
    const fn rows_per_block(self) -> usize {
        match self {
            Self::Warp2 => BLOCK_WARPS,
            Self::Half1 => 4,
            Self::Block1 => 2,
            Self::Block4 | Self::Block8 => 1,
        }
    }

    /// Returns whether PACKETS is 1.
    const fn is_of_one_packet(self) -> bool {
        matches!(self, Self::Half1 | Self::Block1)
    }

    /// Returns the grid size of [`layernorm_forward`].
    ///
    /// With PACKETS = 1 the kernel is persistent: at most the resident blocks of `sm_count` SMs, each with a
    /// grid-stride loop over rows that prefetches the next ones.
    pub const fn forward_grid(self, rows: usize, sm_count: usize) -> u32 {
        let (useful, resident) = (rows.div_ceil(self.rows_per_block()) as u32, (4 * sm_count) as u32);
        if self.is_of_one_packet() && resident < useful { resident } else { useful }
    }

    /// Returns the shared memory of [`layernorm_forward`] in bytes.
    pub fn forward_shared_bytes<T: Element>(self) -> usize {
        let mut layout = Layout::new();
        scratch(&mut layout, MAX_ROWS);
        if self.is_of_one_packet() {
            forward_pipeline::<T>(&mut layout, MAX_ROWS);
        }
        layout.bytes()
    }

    /// Returns the grid size of [`layernorm_backward`], a persistent kernel: at most the resident blocks of `sm_count`
    /// SMs.
    pub const fn backward_grid(self, rows: usize, sm_count: usize) -> u32 {
        let resident = match self {
            Self::Warp2 => 3 * sm_count,
            Self::Half1 | Self::Block1 => 2 * sm_count,
            Self::Block4 | Self::Block8 => sm_count,
        };
        let useful = rows.div_ceil(self.rows_per_block());
        if resident < useful { resident as u32 } else { useful as u32 }
    }

    /// Returns the shared memory of [`layernorm_backward`] in bytes.
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

    /// Returns whether [`layernorm_backward`] has an instance that computes the column sums of dinp. It has one if the
    /// registers hold a third sum per column.
    pub const fn sums_columns(self) -> bool {
        matches!(self, Self::Half1 | Self::Block1 | Self::Block4)
    }

    /// Returns the number of f32 elements of `partials` for [`layernorm_backward`].
    pub const fn backward_partials(self, rows: usize, channels: usize, sm_count: usize, column_sums: bool) -> usize {
        self.backward_grid(rows, sm_count) as usize * sums_per_column(column_sums) * channels
    }
}

/// Calls the instance of a kernel for a [`Shape`]: `layernorm::dispatch!(shape, layernorm_forward::<bf16>(…))`.
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

/// Calls the instance of [`layernorm_backward`] for a [`Shape`] and a flag that requests column sums:
/// `layernorm::dispatch_backward!(shape, column_sums, <bf16>(…))`. The flag is ignored for shapes without column sums
/// ([`Shape::sums_columns`]).
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

/// Lays out the scratch of [`RowPart::sums`] for `values` values per thread.
fn scratch(layout: &mut Layout, values: usize) -> SharedArray<f32> {
    layout.array(2 * values * BLOCK_WARPS)
}

/// The largest ROWS of any instance. The forward kernel reduces one value per row at a time.
const MAX_ROWS: usize = 2;

/// Lays out the double buffer of [`layernorm_forward`] with PACKETS = 1: the packets of the current and the next rows,
/// (2, ROWS, threads).
fn forward_pipeline<T: Element>(layout: &mut Layout, rows: usize) -> SharedArray<T> {
    layout.array(2 * rows * THREADS as usize * T::PACKET)
}

/// Returns the number of pipeline stages of [`layernorm_backward`]: the current rows and, if they fit, the next ones.
const fn stages(packets: usize) -> usize {
    if packets > 4 { 1 } else { 2 }
}

/// Lays out the shared memory of [`layernorm_backward`].
///
/// It holds the scratch of the row reductions and the packets of dout, inp and dinp, (stages, 3, ROWS, PACKETS,
/// threads). The packets' memory is reused for the column sums of the groups.
fn backward_shared<T: Element>(layout: &mut Layout, packets: usize, rows: usize) -> (SharedArray<f32>, SharedArray<T>) {
    (scratch(layout, 2 * rows), layout.array(stages(packets) * 3 * rows * packets * THREADS as usize * T::PACKET))
}

/// Returns the number of sums per column that [`layernorm_backward`] computes.
const fn sums_per_column(column_sums: bool) -> usize {
    if column_sums { 3 } else { 2 }
}

/// Lays out the column sums of the groups, (groups, 2 or 3, C), in the memory of the pipeline stages. They fit because
/// C is at most PACKETS * WARPS * 32 packets.
fn group_sums(layout: &mut Layout, len: usize, rows: usize) -> SharedArray<f32> {
    scratch(layout, 2 * rows);
    layout.array(len)
}

/// The part of each row that the calling thread holds.
#[derive(Clone, Copy)]
struct RowPart<T, const PACKETS: usize, const WARPS: usize, const ROWS: usize> {
    /// Index of the thread's group of WARPS warps in the block.
    group: usize,
    /// First channel of the thread's first packet.
    first: usize,
    channels: usize,
    scratch: SharedArray<f32>,
    element: core::marker::PhantomData<T>,
}

impl<T: Element, const PACKETS: usize, const WARPS: usize, const ROWS: usize> RowPart<T, PACKETS, WARPS, ROWS> {
    /// Groups of warps of a block.
    const GROUPS: usize = BLOCK_WARPS / WARPS;
    /// Rows that a block processes at a time.
    const PER_BLOCK: usize = Self::GROUPS * ROWS;

    #[inline(always)]
    fn new(channels: u32, scratch: SharedArray<f32>) -> Self {
        let (group, first) = if WARPS == 1 {
            (warp::index() as usize, warp::lane() as usize)
        } else {
            // Even for a single group, the group is computed from the thread index. ptxas then treats the row as
            // thread-dependent, allocates twice the registers in the backward kernel, and schedules its loads earlier.
            // This makes it 7 to 12 % faster (docs/performance/memory-bound.md).
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

    /// Returns the first of the ROWS rows that the thread's group processes first.
    #[inline(always)]
    fn row(&self) -> usize {
        thread::block_idx_x() as usize * Self::PER_BLOCK + self.group * ROWS
    }

    /// Returns the first channel of the thread's packet `k`, or `None` if it is past the end of the row.
    #[inline(always)]
    fn column(&self, k: usize) -> Option<usize> {
        let column = self.first + k * WARPS * LANES * T::PACKET;
        (column < self.channels).then_some(column)
    }

    /// Loads the thread's packets of ROWS rows from `row` on. Packets past the end of a row or past the last of `rows`
    /// rows are zero.
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

    /// Returns a function from a column to the packet of parameter `of` there.
    ///
    /// For PACKETS = 1 the packet stays in registers, in the storage type. Otherwise each call loads it.
    #[inline(always)]
    fn parameter(&self, of: Global<T>) -> impl Fn(usize) -> Packet<T> {
        let held = if PACKETS == 1 { self.column(0).map(|column| of.packet(column)) } else { None };
        move |column| held.map_or_else(|| of.packet(column), Packet::opaque)
    }

    /// Reduces N values per row over the threads of a group. All reductions share one barrier.
    ///
    /// Consecutive calls alternate `parity` between 0 and 1, which selects one of two scratch buffers.
    #[inline(always)]
    fn sums<const N: usize>(&self, values: [[f32; N]; ROWS], parity: usize) -> [[f32; N]; ROWS] {
        let scratch = self.scratch.skip((parity * Self::GROUPS + self.group) * N * ROWS * WARPS);
        if Self::GROUPS == 1 {
            block::sums::<WARPS, _, _>(values, scratch)
        } else {
            block::sums_of_group::<WARPS, _, _>(values, scratch, self.group as u32)
        }
    }

    /// Passes the sums of the thread's columns to `set`, one packet at a time, with its index: `start` plus the column.
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

    /// Normalizes ROWS rows from `row` on, whose packets are `x`.
    #[inline(always)]
    fn normalize(
        &self,
        x: &[[Packet<T>; PACKETS]; ROWS],
        row: usize,
        rows: usize,
        outputs: Outputs<T>,
        weight: impl Fn(usize) -> Packet<T>,
        bias: impl Fn(usize) -> Packet<T>,
    ) {
        let Outputs { normed, mean, rstd } = outputs;
        let scale = math::recip(self.channels as f32);
        let mut sums = [[0.0]; ROWS];
        for r in 0..ROWS {
            for packet in &x[r] {
                for i in 0..T::PACKET {
                    sums[r][0] += packet.get(i);
                }
            }
        }
        // Refines the quotient to a correctly rounded one: in a constant row, whose variance is 0, rstd = 316 amplifies
        // any error of the mean.
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
        // Scales before the reduction, because the unscaled sum of squares may overflow although the variance does not.
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

/// Outputs of [`layernorm_forward`].
#[derive(Clone, Copy)]
struct Outputs<T> {
    normed: GlobalMut<T>,
    mean: GlobalMut<f32>,
    rstd: GlobalMut<f32>,
}

/// Computes normed (rows, C), mean (rows) and rstd (rows) from inp (rows, C), weight (C) and bias (C).
///
/// Grid: [`Shape::forward_grid`]. Shared memory: [`Shape::forward_shared_bytes`].
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
    let outputs = Outputs { normed, mean, rstd };
    let mut layout = Layout::new();
    let part = RowPart::<T, PACKETS, WARPS, ROWS>::new(channels, scratch(&mut layout, MAX_ROWS));
    let (mut row, rows) = (part.row(), rows as usize);
    let (weight, bias) = (part.parameter(weight), part.parameter(bias));
    if PACKETS > 1 {
        if row < rows {
            part.normalize(&part.load(inp, row, rows), row, rows, outputs, weight, bias);
        }
        return;
    }
    // No barrier is needed: each thread reads only the data it copied.
    let pipeline = forward_pipeline::<T>(&mut layout, ROWS);
    let slot =
        |stage: usize, r: usize| ((stage * ROWS + r) * THREADS as usize + thread::thread_idx_x() as usize) * T::PACKET;
    let fetch = |stage: usize, row: usize| {
        for r in 0..ROWS {
            if row + r < rows
                && let Some(column) = part.column(0)
            {
                pipeline.copy_packet_async(slot(stage, r), inp, (row + r) * part.channels + column, true);
            }
        }
        async_copy::commit();
    };
    let step = thread::grid_dim_x() as usize * RowPart::<T, PACKETS, WARPS, ROWS>::PER_BLOCK;
    let mut stage = 0;
    fetch(stage, row);
    while row < rows {
        fetch(1 - stage, row + step);
        async_copy::wait::<1>();
        let mut x = [[Packet::zero(); PACKETS]; ROWS];
        for r in 0..ROWS {
            if row + r < rows && part.column(0).is_some() {
                x[r][0] = pipeline.packet(slot(stage, r));
            }
        }
        part.normalize(&x, row, rows, outputs, &weight, &bias);
        row += step;
        stage = 1 - stage;
    }
}

/// Adds the gradient of inp to dinp (rows, C), given dout (rows, C), the gradient of normed.
///
/// With xhat = (inp - mean) * rstd and g = dout * weight, the gradient is rstd * (g - mean over C of g - xhat * (mean
/// over C of g * xhat)). The kernel also writes the block's sums of dweight and dbias and, with COLUMN_SUMS, of the
/// columns of the updated dinp to `partials` ([`Shape::backward_partials`] elements, which may be uninitialized).
/// [`layernorm_backward_reduce`] must follow. Grid: [`Shape::backward_grid`]. Shared memory:
/// [`Shape::backward_shared_bytes`].
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
    let part = RowPart::<T, PACKETS, WARPS, ROWS>::new(channels, scratch);
    let (rows, channels) = (rows as usize, part.channels);
    let scale = math::recip(channels as f32);
    let step = thread::grid_dim_x() as usize * RowPart::<T, PACKETS, WARPS, ROWS>::PER_BLOCK;
    // No barrier is needed: each thread reads only the data it copied.
    let slot = |buffer: usize, array: usize, r: usize, k: usize| {
        let packet = ((buffer * 3 + array) * ROWS + r) * PACKETS + k;
        (packet * THREADS as usize + thread::thread_idx_x() as usize) * T::PACKET
    };
    let fetch = |buffer: usize, row: usize| {
        for r in 0..ROWS {
            if row + r < rows {
                for k in 0..PACKETS {
                    if let Some(column) = part.column(k) {
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
        let mut stats = [(0.0, 0.0); ROWS];
        for r in 0..ROWS {
            if row + r < rows {
                stats[r] = (mean.at(row + r), rstd.at(row + r));
            }
        }
        stats
    };
    let weight = part.parameter(weight);
    let mut dweight = [[0.0; 8]; PACKETS];
    let mut dbias = [[0.0; 8]; PACKETS];
    let mut columns = [[0.0; 8]; PACKETS];

    let mut row = part.row();
    let (mut buffer, mut parity) = (0, 0);
    fetch(buffer, row);
    let mut stats = statistics(row);
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
            let (m, rstd) = stats[r];
            for k in 0..PACKETS {
                if let Some(column) = part.column(k)
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
        let sums = part.sums(sums, parity).map(|of_row| of_row.map(|sum| sum * scale));
        // The memory ordering makes the compiler reload the row from shared memory instead of spilling registers.
        warp::sync();
        for r in 0..ROWS {
            let ((m, rstd), [sum, projection]) = (stats[r], sums[r]);
            let slope = rstd * projection;
            for k in 0..PACKETS {
                if let Some(column) = part.column(k)
                    && (ROWS == 1 || row + r < rows)
                {
                    let (dy, x) = (stage.packet(slot(buffer, 0, r, k)), stage.packet(slot(buffer, 1, r, k)));
                    let (dx, w) = (stage.packet(slot(buffer, 2, r, k)), weight(column));
                    let new = Packet::from_fn(|i| {
                        // dnormed - sum - normed * projection, in the fewest instructions.
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
        stats = next;
        row += step;
        parity = 1 - parity;
        if stages(PACKETS) == 2 {
            buffer = 1 - buffer;
        } else {
            fetch(buffer, row);
        }
    }

    let len = sums_per_column(COLUMN_SUMS) * channels;
    let partials = partials.skip(thread::block_idx_x() as usize * len);
    let groups = RowPart::<T, PACKETS, WARPS, ROWS>::GROUPS;
    if groups == 1 {
        let set = |i, x| partials.set_packet(i, x);
        part.set_sums(0, &dweight, set);
        part.set_sums(channels, &dbias, set);
        if COLUMN_SUMS {
            part.set_sums(2 * channels, &columns, set);
        }
        return;
    }
    let group_sums = group_sums(&mut Layout::new(), groups * len, ROWS);
    let set = |i, x| group_sums.set_packet(part.group * len + i, x);
    thread::sync_threads();
    part.set_sums(0, &dweight, set);
    part.set_sums(channels, &dbias, set);
    if COLUMN_SUMS {
        part.set_sums(2 * channels, &columns, set);
    }
    thread::sync_threads();
    let mut i = thread::thread_idx_x() as usize * f32::PACKET;
    while i < len {
        let mut sum = [0.0; 4];
        for group in 0..groups {
            let of_group = group_sums.packet(group * len + i);
            for k in 0..4 {
                sum[k] += of_group.get(k);
            }
        }
        partials.set_packet(i, Packet::from_fn(|k| sum[k]));
        i += THREADS as usize * f32::PACKET;
    }
}

/// Adds the sums over blocks of `partials` to dweight (C), dbias (C) and column_sums (C), rounded to nearest even.
///
/// `column_sums` may be null. `partials` has shape (blocks, 2, C), or (blocks, 3, C) with column sums, where `blocks`
/// is the grid size of [`layernorm_backward`]. Grid: [`reduce_grid`]. Shared memory: [`column_sum::shared`].
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
    let sums = sums_per_column(!column_sums.is_null());
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

/// Returns the grid size of [`layernorm_backward_reduce`].
pub const fn reduce_grid(channels: usize, column_sums: bool) -> u32 {
    column_sum::grid(sums_per_column(column_sums) * channels)
}
