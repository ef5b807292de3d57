//! Products over parts of K: sums of parts to memory, and their sum, in the parts' order, to the output.
//!
//! Parts lie in memory as threads have them, tile after tile: 16 bytes of thread 0, of thread 1, ….

use super::mainloop::{Sums, TILE_K};
use super::pingpong::{Columns128, Columns192, TILE_M, WARPGROUP, Write};
use super::tiles::{Item, Items};
use cuda_std::hopper::wgmma::Accumulators;
use cuda_std::{Global, GlobalMut, Packet, bf16, element, kernel, thread};

/// Stores sums of parts.
pub struct PartialWriter {
    pub parts: GlobalMut<f32>,
}

/// Packets of four sums of a thread for 64 rows of a tile.
const fn packets<A: Accumulators>() -> u32 {
    A::COLUMNS / 8
}

/// Where packet `packet` of a thread's for tile `index` lies; those of the lower 64 rows follow those of the upper.
#[inline(always)]
fn place<A: Accumulators>(index: u32, packet: u32) -> usize {
    let thread = thread::thread_idx_x() % WARPGROUP;
    ((index as usize * 2 * packets::<A>() as usize + packet as usize) * WARPGROUP as usize + thread as usize) * 4
}

impl<A: Accumulators> Write<A> for PartialWriter {
    #[inline(always)]
    fn prepare(&self, _: Item) {}

    #[inline(always)]
    fn write(&mut self, d: &Sums<A>, item: Item) {
        for packet in 0..packets::<A>() {
            let at = |d: &A| Packet::from_fn(|i| d[packet as usize * 4 + i]);
            self.parts.set_packet(place::<A>(item.index, packet), at(&d.upper));
            self.parts.set_packet(place::<A>(item.index, packets::<A>() + packet), at(&d.lower));
        }
    }

    #[inline(always)]
    fn finish(&self) {}
}

/// Packets of a tile that a block adds up.
const BATCH: u32 = 4;

/// Blocks of [`matmul_add_parts`]: of each tile, and tiles.
pub fn add_parts_grid<A: Accumulators>(m: usize, n: usize) -> [u32; 3] {
    let tiles = m.div_ceil(TILE_M as usize) * n.div_ceil(A::COLUMNS as usize);
    [2 * packets::<A>() / BATCH, tiles as u32, 1]
}

/// out (M, N) += the sum of `splits` parts. Grid: [`add_parts_grid`].
#[kernel(threads = 128, blocks_per_sm = 8, arch = "sm_90a", instances(w128 = <Columns128>, w192 = <Columns192>))]
pub fn matmul_add_parts<A: Accumulators + 'static>(
    out: GlobalMut<bf16>,
    parts: Global<f32>,
    m: u32,
    n: u32,
    splits: u32,
) {
    let items = Items::new::<A>(m, n, TILE_K, 1);
    let (tiles, tile) = (items.count(), thread::block_idx_y());
    let (row, column) = items.tile(tile);
    let thread = thread::thread_idx_x();
    let (warp, g, c) = (thread / 32, thread % 32 / 4, thread % 4);
    for i in 0..BATCH {
        let packet = thread::block_idx_x() * BATCH + i;
        let mut sums = [0.0; 4];
        let mut part = 0;
        while part < splits {
            let more = parts.packet(place::<A>(part * tiles + tile, packet));
            for j in 0..4 {
                sums[j] += more.get(j);
            }
            part += 1;
        }
        let row = row + packet / packets::<A>() * 64 + warp * 16 + g;
        let column = column + packet % packets::<A>() * 8 + c * 2;
        for (row, low, high) in [(row, sums[0], sums[1]), (row + 8, sums[2], sums[3])] {
            if row < m && column < n {
                let at = row as usize * n as usize + column as usize;
                let [old_low, old_high] = out.reader().pair(at);
                out.set_pair(at, element::pack_pair(old_low + low, old_high + high));
            }
        }
    }
}
