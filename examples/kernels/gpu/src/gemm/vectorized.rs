//! GEMM, version 6: 16-byte loads and stores.
//!
//! Problem: as in version 1. N and K are multiples of 8.
//! Idea: each thread copies one packet of 8 bf16 of a and one of b. In shared memory, a is transposed, so that the 8 elements of a
//! that a thread needs are adjacent: it loads 4 floats with one instruction, 4 instructions for 64 multiply-adds.
//! Limit: the arithmetic units for f32. A tensor core multiplies bf16 more than ten times as fast.

use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, SharedArray, bf16, kernel, math, thread};

/// Rows and columns of the block's part of out.
pub const TILE: usize = 128;
/// Columns of K that are in shared memory at a time: 128 x 16 elements are 256 packets, one for each thread.
const DEPTH: usize = 16;
/// Rows and columns that a thread computes.
const SIDE: usize = 8;

/// Lays out the shared memory: the tiles of a, transposed, and b, both (16, 128).
pub fn shared(layout: &mut Layout) -> (SharedArray<f32>, SharedArray<f32>) {
    (layout.array(DEPTH * TILE).named("a_tile"), layout.array(DEPTH * TILE).named("b_tile"))
}

/// Returns the 8 elements that begin at `i`, as two loads of 16 bytes.
#[inline(always)]
fn eight(tile: SharedArray<f32>, i: usize) -> [f32; SIDE] {
    let (low, high) = (tile.packet(i), tile.packet(i + 4));
    core::array::from_fn(|k| if k < 4 { low.get(k) } else { high.get(k - 4) })
}

/// Computes out. Grid: (N / 128, M / 128), rounded up.
#[kernel(threads = 256)]
pub fn gemm_vectorized(out: GlobalMut<bf16>, a: Global<bf16>, b: Global<bf16>, m: u32, n: u32, k: u32) {
    let (a_tile, b_tile) = shared(&mut Layout::new());
    let (m, n, k, t) = (m as usize, n as usize, k as usize, thread::thread_idx_x() as usize);
    let (first_row, first_column) = (thread::block_idx_y() as usize * TILE, thread::block_idx_x() as usize * TILE);
    let (x, y) = (t % 16 * SIDE, t / 16 * SIDE);
    let mut sums = [[0.0; SIDE]; SIDE];
    for first in (0..k).step_by(DEPTH) {
        let (row, l) = (t % TILE, t / TILE * 8);
        let inside = first_row + row < m && first + l < k;
        let packet = if inside { a.packet((first_row + row) * k + first + l) } else { Packet::zero() };
        for i in 0..bf16::PACKET {
            a_tile.set((l + i) * TILE + row, packet.get(i));
        }
        let (l, column) = (t / 16, t % 16 * 8);
        let inside = first + l < k && first_column + column < n;
        let packet = if inside { b.packet((first + l) * n + first_column + column) } else { Packet::zero() };
        b_tile.set_packet(l * TILE + column, Packet::from_fn(|i| packet.get(i)));
        b_tile.set_packet(l * TILE + column + 4, Packet::from_fn(|i| packet.get(4 + i)));
        thread::sync_threads();
        for l in 0..DEPTH {
            let (of_a, of_b) = (eight(a_tile, l * TILE + y), eight(b_tile, l * TILE + x));
            for r in 0..SIDE {
                for c in 0..SIDE {
                    sums[r][c] = math::fma(of_a[r], of_b[c], sums[r][c]);
                }
            }
        }
        thread::sync_threads();
    }
    for r in 0..SIDE {
        if first_row + y + r < m && first_column + x < n {
            out.set_packet((first_row + y + r) * n + first_column + x, Packet::from_fn(|c| sums[r][c]));
        }
    }
}
