//! The sum of a matrix and a bias, and the bias gradient.
//!
//! Bias gradient: dbias (OC) += sum over rows of dout (rows, OC).
//!
//! A two-stage reduction without atomics. In the first stage, block (g, s) sums slice s of the rows for 32 packets of
//! columns into per-column partial sums, partials (slices, OC) f32. The second stage adds the sum over slices to dbias,
//! rounded to nearest even. The result is deterministic: it depends only on rows, OC and the number of slices. OC is a
//! multiple of the packet.

use crate::column_sum;
use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, SharedArray, bf16, kernel, thread, warp};

const THREADS: u32 = 256;
const WARPS: usize = (THREADS / warp::LANES) as usize;
const LANES: usize = warp::LANES as usize;
/// Rows that a warp loads before it sums them.
const BATCH: usize = 8;

/// Returns the number of row slices for which [`bias_backward`] fills a GPU with `sm_count` SMs.
pub fn bias_backward_slices<T: Element>(rows: usize, columns: usize, sm_count: usize) -> usize {
    let fill = (sm_count * 4).div_ceil(columns.div_ceil(LANES * T::PACKET));
    fill.min(rows.div_ceil(WARPS * BATCH))
}

/// Returns the grid of [`bias_backward`]: (groups of 32 packets of columns, slices, 1).
pub const fn bias_backward_grid<T: Element>(columns: usize, slices: usize) -> [u32; 3] {
    [columns.div_ceil(LANES * T::PACKET) as u32, slices as u32, 1]
}

/// Lays out the shared memory of [`bias_backward`]: the sums of each warp.
pub fn bias_backward_shared<T: Element>(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(THREADS as usize * T::PACKET)
}

/// Computes partials (slices, OC), the column sums of each slice of rows of dout (rows, OC).
///
/// Grid: [`bias_backward_grid`]. Shared memory: [`bias_backward_shared`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn bias_backward<T: Element>(partials: GlobalMut<f32>, dout: Global<T>, rows: u32, columns: u32) {
    let scratch = bias_backward_shared::<T>(&mut Layout::new());
    let (rows, columns) = (rows as usize, columns as usize);
    let (lane, warp) = (warp::lane() as usize, warp::index() as usize);
    let slice = thread::block_idx_y() as usize;
    let length = rows.div_ceil(thread::grid_dim_y() as usize);
    let end = rows.min((slice + 1) * length);
    let first_column = thread::block_idx_x() as usize * LANES * T::PACKET;
    let column = first_column + lane * T::PACKET;

    let mut sum = [0.0; 8];
    if column < columns {
        let mut row = slice * length + warp;
        while row < end {
            // Issues all loads before the first addition. With a condition per load, ptxas would interleave them.
            let mut batch = [Packet::zero(); BATCH];
            if row + (BATCH - 1) * WARPS < end {
                for k in 0..BATCH {
                    batch[k] = dout.packet_streaming((row + k * WARPS) * columns + column);
                }
            } else {
                for k in 0..BATCH {
                    if row + k * WARPS < end {
                        batch[k] = dout.packet_streaming((row + k * WARPS) * columns + column);
                    }
                }
            }
            for packet in &batch {
                for i in 0..T::PACKET {
                    sum[i] += packet.get(i);
                }
            }
            row += BATCH * WARPS;
        }
    }

    for i in 0..T::PACKET {
        scratch.set((warp * T::PACKET + i) * LANES + lane, sum[i]);
    }
    thread::sync_threads();
    let thread = thread::thread_idx_x() as usize;
    if thread < LANES * T::PACKET && first_column + thread < columns {
        let (owner, i) = (thread / T::PACKET, thread % T::PACKET);
        let mut total = 0.0;
        for w in 0..WARPS {
            total += scratch.at((w * T::PACKET + i) * LANES + owner);
        }
        partials.set(slice * columns + first_column + thread, total);
    }
}

/// Adds the sum over slices of partials (slices, OC) to dbias (OC).
///
/// Grid: [`column_sum::grid`] of OC. Shared memory: [`column_sum::shared`].
#[kernel(threads = 256, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn bias_backward_reduce<T: Element>(dbias: GlobalMut<T>, partials: Global<f32>, slices: u32, columns: u32) {
    if let Some((column, sum)) = column_sum::column_sum(partials, slices as usize, columns as usize) {
        dbias.set(column, T::from_f32(dbias.at(column).to_f32() + sum));
    }
}

/// Returns the grid of [`bias_add`] for out (rows, OC) of n elements.
pub const fn bias_add_grid(n: usize) -> u32 {
    n.div_ceil(THREADS as usize * bf16::PACKET) as u32
}

/// Adds bias (OC) to each row of out (rows, OC). `n` is rows · OC, and has fewer than 2^32 packets. Grid: [`bias_add_grid`].
#[kernel(threads = 256)]
pub fn bias_add(out: GlobalMut<bf16>, bias: Global<bf16>, n: u64, columns: u32) {
    let packet = thread::index_1d();
    let i = packet * bf16::PACKET;
    if i >= n as usize {
        return;
    }
    let column = packet as u32 % (columns / bf16::PACKET as u32).max(1) * bf16::PACKET as u32;
    let (x, b) = (out.packet(i), bias.packet(column as usize));
    out.set_packet(i, Packet::from_fn(|k| x.get(k) + b.get(k)));
}
