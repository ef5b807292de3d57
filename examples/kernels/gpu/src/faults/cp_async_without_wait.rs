//! Planted fault 3: a read of shared memory before its asynchronous copy has arrived.
//!
//! Problem: out (n) = 2 inp (n) f32, with inp copied to shared memory by `cp.async`.
//! Fault: `async_copy::wait` is missing after the commit. The read returns whatever was in shared memory before.
//! Report: a use of the target of an asynchronous copy, with the lines of the read and of the copy.

use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, Packet, SharedArray, async_copy, kernel, thread};

const THREADS: usize = 128;

/// Lays out the shared memory: a packet for each thread.
pub fn shared(layout: &mut Layout) -> SharedArray<f32> {
    layout.array(4 * THREADS).named("stage")
}

/// Computes out. Grid: n / 512.
#[kernel(threads = 128)]
pub fn fault_cp_async_without_wait(out: GlobalMut<f32>, inp: Global<f32>) {
    let (stage, t) = (shared(&mut Layout::new()), 4 * thread::thread_idx_x() as usize);
    stage.copy_packet_async(t, inp, 4 * thread::index_1d(), true);
    async_copy::commit();
    let x = stage.packet(t); // fault: async_copy::wait::<0>() must come before
    out.set_packet(4 * thread::index_1d(), Packet::from_fn(|k| 2.0 * x.get(k)));
    async_copy::wait::<0>();
}
