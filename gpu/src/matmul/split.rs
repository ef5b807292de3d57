//! Sums to memory without TMA: added to an f32 output, or of parts of K, which are added up in the parts' order.
//!
//! Parts lie in memory as threads have them, 64 rows of a tile after another: 16 bytes of thread 0, of thread 1, ….

use super::mainloop::{Sums, TILE_K};
use super::pingpong::{WARPGROUP, Write};
use super::tiles::{CONSUMERS, Item, Items, Tile};
use core::marker::PhantomData;
use cuda_std::{Global, GlobalMut, Packet, bf16, element, kernel, thread};

/// What a weight's gradient is added to.
pub trait Sum: Copy + 'static {
    /// Adds to elements `i` and `i` + 1 of `out`, `i` even.
    fn add(out: GlobalMut<Self>, i: usize, pair: [f32; 2]);
}

impl Sum for bf16 {
    #[inline(always)]
    fn add(out: GlobalMut<Self>, i: usize, [low, high]: [f32; 2]) {
        let [old_low, old_high] = out.reader().pair(i);
        out.set_pair(i, element::pack_pair(old_low + low, old_high + high));
    }
}

impl Sum for f32 {
    #[inline(always)]
    fn add(out: GlobalMut<Self>, i: usize, [low, high]: [f32; 2]) {
        let [old_low, old_high] = out.reader().pair(i);
        out.set_pair(i, [old_low + low, old_high + high]);
    }
}

/// Adds sums to an f32 output (M, N).
pub struct AddingWriter<T> {
    out: GlobalMut<f32>,
    m: u32,
    n: u32,
    tile: PhantomData<T>,
}

impl<T> AddingWriter<T> {
    #[inline(always)]
    pub fn new(out: GlobalMut<f32>, m: u32, n: u32) -> Self {
        Self { out, m, n, tile: PhantomData }
    }
}

impl<T: Tile> AddingWriter<T> {
    /// 64 rows from `row`.
    #[inline(always)]
    fn add(&self, d: &T::Sums, row: u32, column: u32) {
        let thread = thread::thread_idx_x() % WARPGROUP;
        let (row, column) = (row + thread / 32 * 16 + thread % 32 / 4, column + thread % 4 * 2);
        for half in 0..2 {
            let row = row + half * 8;
            if row < self.m {
                for j in 0..T::COLUMNS / 8 {
                    let (column, i) = (column + j * 8, (j * 4 + half * 2) as usize);
                    if column < self.n {
                        f32::add(self.out, row as usize * self.n as usize + column as usize, [d[i], d[i + 1]]);
                    }
                }
            }
        }
    }
}

impl<T: Tile> Write<T> for AddingWriter<T> {
    #[inline(always)]
    fn prepare(&self, _: Item) {}

    #[inline(always)]
    fn write(&mut self, d: &Sums<T::Sums>, Item { row, column, .. }: Item) {
        self.add(&d.upper, row, column);
        if T::CONSUMER_ROWS > 64 {
            self.add(&d.lower, row + 64, column);
        }
    }

    #[inline(always)]
    fn finish(&self) {}
}

/// Stores sums of parts.
pub struct PartialWriter<T> {
    parts: GlobalMut<f32>,
    consumer: u32,
    tile: PhantomData<T>,
}

impl<T> PartialWriter<T> {
    #[inline(always)]
    pub fn new(parts: GlobalMut<f32>, consumer: u32) -> Self {
        Self { parts, consumer, tile: PhantomData }
    }
}

/// Packets of four sums of a thread for 64 rows of so many columns.
const fn packets(columns: u32) -> u32 {
    columns / 8
}

/// Where packet `packet` of a thread's lies. `index`: of which 64 rows.
#[inline(always)]
fn place(columns: u32, index: u32, packet: u32) -> usize {
    let thread = thread::thread_idx_x() % WARPGROUP;
    ((index as usize * packets(columns) as usize + packet as usize) * WARPGROUP as usize + thread as usize) * 4
}

impl<T: Tile> Write<T> for PartialWriter<T> {
    #[inline(always)]
    fn prepare(&self, _: Item) {}

    #[inline(always)]
    fn write(&mut self, d: &Sums<T::Sums>, item: Item) {
        let halves = T::CONSUMER_ROWS / 64;
        let index = if T::TOGETHER { item.index * CONSUMERS + self.consumer } else { item.index } * halves;
        for packet in 0..packets(T::COLUMNS) {
            let at = |d: &T::Sums| Packet::from_fn(|i| d[packet as usize * 4 + i]);
            self.parts.set_packet(place(T::COLUMNS, index, packet), at(&d.upper));
            if halves > 1 {
                self.parts.set_packet(place(T::COLUMNS, index + 1, packet), at(&d.lower));
            }
        }
    }

    #[inline(always)]
    fn finish(&self) {}
}

/// Packets of 64 rows of a tile that a block adds up.
const BATCH: u32 = 4;

/// Blocks of [`matmul_add_parts`]: for 64 rows of a tile, and of those.
#[cfg(not(target_arch = "nvptx64"))]
pub fn add_parts_grid([tile_rows, tile_columns]: [u32; 2], tiles: usize) -> [u32; 3] {
    [packets(tile_columns) / BATCH, tiles as u32 * (tile_rows / 64), 1]
}

/// out (M, N) += the sum of `splits` parts, of tiles of `tile_rows` x `tile_columns`. Grid: [`add_parts_grid`].
#[kernel(threads = 128, blocks_per_sm = 8, arch = "sm_90a", instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn matmul_add_parts<O: Sum>(
    out: GlobalMut<O>,
    parts: Global<f32>,
    tile_rows: u32,
    tile_columns: u32,
    m: u32,
    n: u32,
    splits: u32,
) {
    let items = Items::new([tile_rows, tile_columns], m, n, TILE_K, 1);
    let pieces = tile_rows / 64;
    let (count, index) = (items.count() * pieces, thread::block_idx_y());
    let (row, column) = items.tile(index / pieces);
    let row = row + index % pieces * 64;
    let thread = thread::thread_idx_x();
    let (warp, g, c) = (thread / 32, thread % 32 / 4, thread % 4);
    for i in 0..BATCH {
        let packet = thread::block_idx_x() * BATCH + i;
        let mut sums = [0.0; 4];
        let mut part = 0;
        while part < splits {
            let more = parts.packet(place(tile_columns, part * count + index, packet));
            for j in 0..4 {
                sums[j] += more.get(j);
            }
            part += 1;
        }
        let row = row + warp * 16 + g;
        let column = column + packet * 8 + c * 2;
        for (row, low, high) in [(row, sums[0], sums[1]), (row + 8, sums[2], sums[3])] {
            if row < m && column < n {
                O::add(out, row as usize * n as usize + column as usize, [low, high]);
            }
        }
    }
}
