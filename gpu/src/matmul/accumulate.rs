//! Accumulation into an output in global memory by ordinary loads and stores.

use super::epilogue::{EpilogueOperands, EpilogueStore};
use super::mainloop::ConsumerAccumulators;
use super::shared::SharedStorage;
use super::tile::{Tile, WorkTile};
use core::marker::PhantomData;
use cuda_std::hopper::WARPGROUP;
use cuda_std::{GlobalMut, bf16, device, element, thread};

/// The element type of a weight gradient.
pub trait AccumulateInto: Copy + 'static {
    /// Adds `pair` to elements `i` and `i` + 1 of `out`. `i` is even.
    fn add(out: GlobalMut<Self>, i: usize, pair: [f32; 2]);
}

impl AccumulateInto for bf16 {
    #[inline(always)]
    fn add(out: GlobalMut<Self>, i: usize, [low, high]: [f32; 2]) {
        let [old_low, old_high] = out.reader().pair(i);
        out.set_pair(i, element::pack_pair(old_low + low, old_high + high));
    }
}

impl AccumulateInto for f32 {
    #[inline(always)]
    fn add(out: GlobalMut<Self>, i: usize, [low, high]: [f32; 2]) {
        let [old_low, old_high] = out.reader().pair(i);
        out.set_pair(i, [old_low + low, old_high + high]);
    }
}

/// Pairs of accumulators that a thread adds at a time. It divides the pairs of a row of every tile.
const BATCH: usize = 8;

/// Adds accumulators to an f32 output (M, N), the sums of its operands.
pub struct AccumulateF32<T> {
    out: GlobalMut<f32>,
    m: u32,
    n: u32,
    tile: PhantomData<T>,
}

impl<T: Tile> AccumulateF32<T> {
    /// Adds 64 rows of accumulators to the output from (`row`, `column`) on.
    ///
    /// All loads of a batch precede its stores. The compiler cannot reorder them, because a store could change what a later load reads, and
    /// one latency of memory per pair would make the epilogue as long as a mainloop of 4,096 columns.
    #[inline(always)]
    fn add(&self, d: &T::Accumulator, row: u32, column: u32) {
        let thread = thread::thread_idx_x() % WARPGROUP;
        let (row, column) = (row + thread / 32 * 16 + thread % 32 / 4, column + thread % 4 * 2);
        for half in 0..2 {
            let row = row + half * 8;
            if row < self.m {
                let row = self.out.skip(row as usize * self.n as usize);
                for first in 0..T::TILE_N as usize / 8 / BATCH {
                    let column = |k: usize| column as usize + (first * BATCH + k) * 8;
                    let mut old = [[0.0; 2]; BATCH];
                    for k in 0..BATCH {
                        if column(k) < self.n as usize {
                            old[k] = row.reader().pair(column(k));
                        }
                    }
                    for k in 0..BATCH {
                        let (i, [low, high]) = ((first * BATCH + k) * 4 + half as usize * 2, old[k]);
                        if column(k) < self.n as usize {
                            row.set_pair(column(k), [low + d[i], high + d[i + 1]]);
                        }
                    }
                }
            }
        }
    }
}

#[device]
impl<T: Tile> EpilogueStore<T> for AccumulateF32<T> {
    fn new(_: SharedStorage, EpilogueOperands { sums, m, n, .. }: EpilogueOperands, _: u32) -> Self {
        Self { out: sums, m, n, tile: PhantomData }
    }

    fn store(&mut self, d: &ConsumerAccumulators<T::Accumulator>, WorkTile { row, column, .. }: WorkTile) {
        self.add(&d.upper, row, column);
        if T::CONSUMER_M > 64 {
            self.add(&d.lower, row + 64, column);
        }
    }
}
