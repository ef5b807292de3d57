//! The parts that the kernels of LayerNorm and RMSNorm share: the distribution of a row of C channels over threads, the
//! shared memory of the pipelines that read rows, and the first stage of the column sums.
//!
//! C is a multiple of the packet. Each row is read once and kept on chip until its last use, as PACKETS packets per lane
//! of WARPS warps, so C is at most PACKETS * WARPS * 32 * `T::PACKET`. [`RowShape::ALL`] and [`RowShape::ALL_FP8`] list the combinations,
//! which cover up to 16384 channels in bf16 and 8192 in f32.
//!
//! * WARPS is 1 (eight rows per block, no barrier), 4 (two groups of warps, each with its own named barrier), or 8 (one
//!   group).
//! * ROWS is the number of rows that a group processes at a time. It is 2 if each thread holds one packet of a row,
//!   because the reductions of two rows can share their barriers.
//!
//! A forward kernel holds a row in registers. It issues all loads of a row before its first store, since the compiler
//! must assume that they alias. One packet per thread would leave too few loads in flight, so for PACKETS = 1 the next
//! rows are prefetched to shared memory.
//!
//! A backward kernel needs its registers for the sums of the parameters' gradients. It holds rows in shared memory,
//! double buffered where two rows fit.
//!
//! Arithmetic does not belong here. Neither do the loops over rows: in a shared function that calls a closure, LLVM
//! schedules the LayerNorm kernels differently and uses up to 60 % more registers.

use crate::quantize;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, SharedArray, bf16, block, device, thread, warp};

/// Threads of a block of a forward or backward kernel.
pub(crate) const THREADS: u32 = 256;
const BLOCK_WARPS: usize = (THREADS / warp::LANES) as usize;
const LANES: usize = warp::LANES as usize;

/// How the kernels distribute a row over threads: the generic arguments PACKETS, WARPS and ROWS of their instances.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RowShape(pub usize, pub usize, pub usize);

impl RowShape {
    /// All shapes, from the smallest to the largest.
    pub const ALL: [Self; 5] = [Self(2, 1, 1), Self(1, 4, 2), Self(1, 8, 2), Self(4, 8, 1), Self(8, 8, 1)];

    /// The shapes of forward kernels with an FP8 output. One warp has a row of up to 2048 channels. These kernels store half as much, so
    /// barriers would take a larger part of their time.
    pub const ALL_FP8: [Self; 7] =
        [Self(2, 1, 1), Self(3, 1, 1), Self(4, 1, 1), Self(6, 1, 1), Self(8, 1, 1), Self(4, 8, 1), Self(8, 8, 1)];

    /// Returns the smallest shape that holds rows of `channels`, or `None` if `channels` is too large or not a multiple
    /// of the packet.
    pub fn of<T: Element>(channels: usize) -> Option<Self> {
        Self::smallest::<T>(&Self::ALL, channels)
    }

    /// Does the same for a forward kernel with an FP8 output.
    pub fn of_fp8(channels: usize) -> Option<Self> {
        Self::smallest::<bf16>(&Self::ALL_FP8, channels)
    }

    fn smallest<T: Element>(shapes: &[Self], channels: usize) -> Option<Self> {
        let fits = |shape: &&Self| (1..=shape.packets_of_a_row()).contains(&channels.div_ceil(T::PACKET));
        shapes.iter().find(fits).copied().filter(|_| channels.is_multiple_of(T::PACKET))
    }

    /// Returns the packets of a row that a group of WARPS warps holds.
    const fn packets_of_a_row(self) -> usize {
        self.0 * self.1 * LANES
    }

    /// Returns the largest number of channels that a shape holds.
    pub const fn max_channels<T: Element>() -> usize {
        Self::ALL[4].packets_of_a_row() * T::PACKET
    }

    /// Returns the number of rows that a block processes at a time.
    const fn rows_per_block(self) -> usize {
        BLOCK_WARPS / self.1 * self.2
    }

    /// Returns whether PACKETS is 1.
    const fn is_of_one_packet(self) -> bool {
        self.0 == 1
    }

    /// Returns the grid size of a forward kernel.
    ///
    /// With PACKETS = 1 the kernel is persistent: at most the resident blocks of `sm_count` SMs, each with a
    /// grid-stride loop over rows that prefetches the next ones.
    pub fn forward_grid(self, rows: usize, sm_count: usize) -> u32 {
        let resident = if self.is_of_one_packet() { 4 * sm_count } else { usize::MAX };
        rows.div_ceil(self.rows_per_block()).min(resident) as u32
    }

    /// Returns the shared memory of a forward kernel in bytes, with or without an FP8 output.
    pub fn forward_shared_bytes<T: Element>(self, fp8: bool) -> usize {
        let mut layout = Layout::new();
        if fp8 {
            quantize::maxima(&mut layout);
        }
        scratch(&mut layout, MAX_ROWS);
        if self.is_of_one_packet() {
            forward_pipeline::<T>(&mut layout, MAX_ROWS);
        }
        layout.bytes()
    }

    /// Returns the grid size of a backward kernel, which is persistent: at most the resident blocks of `sm_count` SMs.
    pub fn backward_grid(self, rows: usize, sm_count: usize) -> u32 {
        let blocks_per_sm = match self.0 {
            2 => 3,
            1 => 2,
            _ => 1,
        };
        rows.div_ceil(self.rows_per_block()).min(blocks_per_sm * sm_count) as u32
    }

    /// Returns the shared memory of a backward kernel in bytes.
    pub fn backward_shared_bytes<T: Element>(self) -> usize {
        let mut layout = Layout::new();
        backward_shared::<T>(&mut layout, self.0, self.2);
        layout.bytes()
    }
}

/// Lays out the scratch of [`RowPart::sums`] for `values` values per thread.
pub(crate) fn scratch(layout: &mut Layout, values: usize) -> SharedArray<f32> {
    layout.array(2 * values * BLOCK_WARPS)
}

/// The largest ROWS of any instance. The forward kernels reduce one value per row at a time.
pub(crate) const MAX_ROWS: usize = 2;

/// Lays out the double buffer of a forward kernel with PACKETS = 1: the packets of the current and the next rows, (2,
/// ROWS, threads).
pub(crate) fn forward_pipeline<T: Element>(layout: &mut Layout, rows: usize) -> SharedArray<T> {
    layout.array(2 * rows * THREADS as usize * T::PACKET)
}

/// Returns the number of pipeline stages of a backward kernel: the current rows and, if they fit, the next ones.
pub(crate) const fn stages(packets: usize) -> usize {
    if packets > 4 { 1 } else { 2 }
}

/// Lays out the shared memory of a backward kernel.
///
/// It holds the scratch of the row reductions, of at most two values per row, and the packets of dout, inp and dinp,
/// (stages, 3, ROWS, PACKETS, threads). The packets' memory is reused for the column sums of the groups.
pub(crate) fn backward_shared<T: Element>(
    layout: &mut Layout,
    packets: usize,
    rows: usize,
) -> (SharedArray<f32>, SharedArray<T>) {
    (scratch(layout, 2 * rows), layout.array(stages(packets) * 3 * rows * packets * THREADS as usize * T::PACKET))
}

/// Lays out the column sums of the groups, (groups, at most 3, C), in the memory of the pipeline stages. They fit
/// because C is at most PACKETS * WARPS * 32 packets.
fn group_sums(layout: &mut Layout, len: usize, rows: usize) -> SharedArray<f32> {
    scratch(layout, 2 * rows);
    layout.array(len)
}

/// The memory for the output of a kernel.
pub(crate) trait RowOutput<T> {
    /// Stores the elements from `i` on.
    fn set_packet(&mut self, i: usize, packet: Packet<T>);
}

impl<T: Element> RowOutput<T> for GlobalMut<T> {
    #[inline(always)]
    fn set_packet(&mut self, i: usize, packet: Packet<T>) {
        GlobalMut::set_packet(*self, i, packet);
    }
}

/// Stores the same elements in both.
impl<A: RowOutput<bf16>, B: RowOutput<bf16>> RowOutput<bf16> for (A, B) {
    #[inline(always)]
    fn set_packet(&mut self, i: usize, packet: Packet<bf16>) {
        self.0.set_packet(i, packet);
        self.1.set_packet(i, packet);
    }
}

/// Stores the elements if there is an output.
impl<T, O: RowOutput<T>> RowOutput<T> for Option<&mut O> {
    #[inline(always)]
    fn set_packet(&mut self, i: usize, packet: Packet<T>) {
        if let Some(output) = self {
            output.set_packet(i, packet);
        }
    }
}

/// The part of each row that the calling thread holds.
#[derive(Clone, Copy)]
pub(crate) struct RowPart<T, const PACKETS: usize, const WARPS: usize, const ROWS: usize> {
    /// Index of the thread's group of WARPS warps in the block.
    group: usize,
    /// First channel of the thread's first packet.
    pub first: usize,
    pub channels: usize,
    scratch: SharedArray<f32>,
    element: core::marker::PhantomData<T>,
}

#[device]
impl<T: Element, const PACKETS: usize, const WARPS: usize, const ROWS: usize> RowPart<T, PACKETS, WARPS, ROWS> {
    /// Groups of warps of a block.
    const GROUPS: usize = BLOCK_WARPS / WARPS;
    /// Rows that a block processes at a time.
    pub const PER_BLOCK: usize = Self::GROUPS * ROWS;

    pub fn new(channels: u32, scratch: SharedArray<f32>) -> Self {
        let (group, first) = if WARPS == 1 {
            (warp::index() as usize, warp::lane() as usize)
        } else {
            // Even for a single group, the group is computed from the thread index. ptxas then treats the row as
            // thread-dependent, allocates twice the registers in the backward kernel, and schedules its loads earlier.
            // This makes it 7 to 12 % faster (docs/internals/performance/memory-bound.md).
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
    pub fn row(&self) -> usize {
        thread::block_idx_x() as usize * Self::PER_BLOCK + self.group * ROWS
    }

    /// Returns the first channel of the thread's packet `k`, or `None` if it is past the end of the row.
    pub fn column(&self, k: usize) -> Option<usize> {
        let column = self.first + k * WARPS * LANES * T::PACKET;
        (column < self.channels).then_some(column)
    }

    /// Loads the thread's packets of ROWS rows from `row` on. Packets past the end of a row or past the last of `rows`
    /// rows are zero.
    pub fn load(&self, from: Global<T>, row: usize, rows: usize) -> [[Packet<T>; PACKETS]; ROWS] {
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
    pub fn parameter(&self, of: Global<T>) -> impl Fn(usize) -> Packet<T> {
        let held = if PACKETS == 1 { self.column(0).map(|column| of.packet(column)) } else { None };
        move |column| held.map_or_else(|| of.packet(column), Packet::opaque)
    }

    /// Reduces N values per row over the threads of a group. All reductions share one barrier.
    ///
    /// Consecutive calls alternate `parity` between 0 and 1, which selects one of two scratch buffers.
    pub fn sums<const N: usize>(&self, values: [[f32; N]; ROWS], parity: usize) -> [[f32; N]; ROWS] {
        let scratch = self.scratch.skip((parity * Self::GROUPS + self.group) * N * ROWS * WARPS);
        if Self::GROUPS == 1 {
            block::sums::<WARPS, _, _>(values, scratch)
        } else {
            block::sums_of_group::<WARPS, _, _>(values, scratch, self.group as u32)
        }
    }

    /// Passes the sums of the thread's columns to `set`, one packet at a time, with its index: `start` plus the column.
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

    /// Passes the thread's N sums per column (N, C), N at most 3, to `set`.
    ///
    /// There is no loop over N, because it would change the machine code of the LayerNorm kernels.
    fn set_all_sums<const N: usize>(&self, sums: [&[[f32; 8]; PACKETS]; N], set: impl Fn(usize, Packet<f32>) + Copy) {
        self.set_sums(0, sums[0], set);
        if N > 1 {
            self.set_sums(self.channels, sums[1], set);
        }
        if N > 2 {
            self.set_sums(2 * self.channels, sums[2], set);
        }
    }

    /// Writes the block's N sums per column to `to` (N, C), given the sums of each thread. N is at most 3. Overwrites the
    /// packets of the pipeline.
    pub fn write_sums<const N: usize>(&self, to: GlobalMut<f32>, sums: [&[[f32; 8]; PACKETS]; N]) {
        if Self::GROUPS == 1 {
            self.set_all_sums(sums, |i, x| to.set_packet(i, x));
            return;
        }
        let len = N * self.channels;
        let group_sums = group_sums(&mut Layout::new(), Self::GROUPS * len, ROWS);
        thread::sync_threads();
        self.set_all_sums(sums, |i, x| group_sums.set_packet(self.group * len + i, x));
        thread::sync_threads();
        let mut i = thread::thread_idx_x() as usize * f32::PACKET;
        while i < len {
            let mut sum = [0.0; 4];
            for group in 0..Self::GROUPS {
                let of_group = group_sums.packet(group * len + i);
                for k in 0..4 {
                    sum[k] += of_group.get(k);
                }
            }
            to.set_packet(i, Packet::from_fn(|k| sum[k]));
            i += THREADS as usize * f32::PACKET;
        }
    }
}
