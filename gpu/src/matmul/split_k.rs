//! Split-K: partial sums over slices of K in scratch memory, and the kernel that adds them to the output.
//!
//! The reduction adds the partial sums in the order of the slices, so results are deterministic.
//!
//! Layout of the partial sums: work tiles in the order of their index, 64 rows of a tile at a time. For 64 rows,
//! packets of four accumulators: the first packet of threads 0 to 127, then the second packet of threads 0 to 127, ….

use super::accumulate::AccumulateInto;
use super::epilogue::{EpilogueOperands, EpilogueStore};
use super::mainloop::ConsumerAccumulators;
use super::shared::SharedStorage;
use super::tile::{CONSUMERS, Scheduler, SplitKScheduler, TILE_K, Tile, WorkTile};
use core::marker::PhantomData;
use cuda_std::hopper::WARPGROUP;
use cuda_std::{Global, GlobalMut, Packet, device, kernel, thread};

/// Stores accumulators as partial sums.
pub struct StorePartials<T> {
    partials: GlobalMut<f32>,
    consumer: u32,
    tile: PhantomData<T>,
}

/// Returns the packets of a thread for 64 rows of a tile.
const fn packets(tile_n: u32) -> u32 {
    tile_n / 8
}

/// Returns the first element of this thread's packet `packet` of the 64 rows with number `index`.
#[inline(always)]
fn partials_offset(tile_n: u32, index: u32, packet: u32) -> usize {
    let thread = thread::thread_idx_x() % WARPGROUP;
    ((index as usize * packets(tile_n) as usize + packet as usize) * WARPGROUP as usize + thread as usize) * 4
}

#[device]
impl<T: Tile> EpilogueStore<T> for StorePartials<T> {
    fn new(_: SharedStorage, operands: EpilogueOperands, consumer: u32) -> Self {
        Self { partials: operands.sums, consumer, tile: PhantomData }
    }

    fn store(&mut self, d: &ConsumerAccumulators<T::Accumulator>, tile: WorkTile) {
        let halves = T::CONSUMER_M / 64;
        let index = if T::COOPERATIVE { tile.index * CONSUMERS + self.consumer } else { tile.index } * halves;
        for packet in 0..packets(T::TILE_N) {
            let at = |d: &T::Accumulator| Packet::from_fn(|i| d[packet as usize * 4 + i]);
            self.partials.set_packet(partials_offset(T::TILE_N, index, packet), at(&d.upper));
            if halves > 1 {
                self.partials.set_packet(partials_offset(T::TILE_N, index + 1, packet), at(&d.lower));
            }
        }
    }
}

/// Packets of a thread that a block of the reduction processes.
const PACKETS_PER_BLOCK: u32 = 4;

/// Returns the grid of [`matmul_split_k_reduce`] for an output of `tiles` tiles.
#[cfg(not(target_arch = "nvptx64"))]
pub fn reduce_grid([tile_m, tile_n]: [u32; 2], tiles: usize) -> [u32; 3] {
    [packets(tile_n) / PACKETS_PER_BLOCK, tiles as u32 * (tile_m / 64), 1]
}

/// Adds the partial sums of [`matmul`](super::matmul()) over `split_k` slices of K, in tiles of
/// `tile_m` x `tile_n`, to out (M, N).
///
/// A block reduces four packets of each thread for 64 rows of a tile. Grid: (packets / 4, tiles · `tile_m` / 64).
#[kernel(threads = 128, blocks_per_sm = 8, requires = "wgmma", instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn matmul_split_k_reduce<O: AccumulateInto>(
    out: GlobalMut<O>,
    partials: Global<f32>,
    tile_m: u32,
    tile_n: u32,
    m: u32,
    n: u32,
    split_k: u32,
) {
    let scheduler = SplitKScheduler::new([tile_m, tile_n, TILE_K], [m, n, TILE_K], 1, Global::null());
    let row_blocks = tile_m / 64;
    let (count, index) = (scheduler.tiles() * row_blocks, thread::block_idx_y());
    let (row, column) = scheduler.tile(index / row_blocks);
    let row = row + index % row_blocks * 64;
    let thread = thread::thread_idx_x();
    let (warp, g, c) = (thread / 32, thread % 32 / 4, thread % 4);
    for i in 0..PACKETS_PER_BLOCK {
        let packet = thread::block_idx_x() * PACKETS_PER_BLOCK + i;
        let mut sums = [0.0; 4];
        let mut slice = 0;
        while slice < split_k {
            let partial = partials.packet(partials_offset(tile_n, slice * count + index, packet));
            for j in 0..4 {
                sums[j] += partial.get(j);
            }
            slice += 1;
        }
        let row = row + warp * 16 + g;
        let column = column + packet * 8 + c * 2;
        // A loop over an array of the two rows is placed in local memory.
        let add = |row: u32, sums: [f32; 2]| {
            if row < m && column < n {
                O::add(out, row as usize * n as usize + column as usize, sums);
            }
        };
        add(row, [sums[0], sums[1]]);
        add(row + 8, [sums[2], sums[3]]);
    }
}
