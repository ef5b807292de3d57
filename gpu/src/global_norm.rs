//! Deterministic reductions over whole arrays: the norm of the gradients, and the sum of the losses.
//!
//! The norm is a two-stage reduction without atomics. The result depends only on n and the grid.

use cuda_std::shared::Layout;
use cuda_std::{Element, Global, GlobalMut, Packet, SharedArray, block, kernel, math, thread};

/// Threads of a block of [`squared_sum`].
const THREADS: usize = 512;
/// Threads of the only block of [`sum`] and [`norm`].
const SUM_THREADS: usize = 1024;
/// Loads that a thread of [`sum`] or [`norm`] keeps in flight.
const BATCH: usize = 8;

/// Returns the grid size of [`squared_sum`], which is also the length of its `partials`.
pub fn squared_sum_grid<T: Element>(n: usize, sm_count: usize) -> u32 {
    n.div_ceil(THREADS * T::PACKET).min(sm_count * 4) as u32
}

/// Lays out the shared memory of all three kernels: the partial results of a block reduction.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(32)
}

/// Computes partials (grid), each block's share of the sum of squares of values (n), with a grid-stride loop.
///
/// Any n is allowed; `values` is 16-byte aligned. To reduce several arrays with one [`norm`], place their partials next
/// to each other. Grid: [`squared_sum_grid`]. Shared memory: [`shared`].
#[kernel(threads = 512, instances(bf16 = <cuda_std::bf16>, f32 = <f32>))]
pub fn squared_sum<T: Element>(partials: GlobalMut<f32>, values: Global<T>, n: u64) {
    let sum = block_squared_sum(values, n as usize, |i| values.packet_streaming(i));
    if thread::thread_idx_x() == 0 {
        partials.set(thread::block_idx_x() as usize, sum);
    }
}

/// Returns the block's share of the sum of squares of values (n), with a grid-stride loop. `packet` loads the packet from an index on.
#[inline(always)]
pub(crate) fn block_squared_sum<T: Element>(values: Global<T>, n: usize, packet: impl Fn(usize) -> Packet<T>) -> f32 {
    let thread = thread::index_1d();
    let mut sum = 0.0;
    let mut i = thread * T::PACKET;
    while i + T::PACKET <= n {
        let packet = packet(i);
        for k in 0..T::PACKET {
            sum = math::fma(packet.get(k), packet.get(k), sum);
        }
        i += thread::count_1d() * T::PACKET;
    }
    let tail = n / T::PACKET * T::PACKET + thread;
    if tail < n {
        let value = values.at(tail).to_f32();
        sum = math::fma(value, value, sum);
    }
    block::sum(sum, shared(&mut Layout::new()))
}

/// Computes out (1), the sum of values (n). Grid: one block. Shared memory: [`shared`].
#[kernel(threads = 1024)]
pub fn sum(out: GlobalMut<f32>, values: Global<f32>, n: u64) {
    let sum = block_sum(values, n as usize);
    if thread::thread_idx_x() == 0 {
        out.set(0, sum);
    }
}

/// Computes norm (1), the square root of the sum of partials (n) from [`squared_sum`]. Grid: one block. Shared memory:
/// [`shared`].
#[kernel(threads = 1024)]
pub fn norm(norm: GlobalMut<f32>, partials: Global<f32>, n: u64) {
    let sum = block_sum(partials, n as usize);
    if thread::thread_idx_x() == 0 {
        norm.set(0, math::sqrt(sum));
    }
}

/// Returns the sum of values (n), computed by the whole block.
#[inline(always)]
fn block_sum(values: Global<f32>, n: usize) -> f32 {
    let mut sum = 0.0;
    let mut i = thread::thread_idx_x() as usize;
    while i < n {
        let mut batch = [0.0; BATCH];
        for k in 0..BATCH {
            if i + k * SUM_THREADS < n {
                batch[k] = values.at(i + k * SUM_THREADS);
            }
        }
        for k in 0..BATCH {
            sum += batch[k];
        }
        i += BATCH * SUM_THREADS;
    }
    block::sum(sum, shared(&mut Layout::new()))
}
