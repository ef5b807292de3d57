//! Exercise: a kernel with data races.
//!
//! The kernel computes the running sums of each block in shared memory: in step d = 1, 2, 4, …, each thread adds the element d places before
//! its own. It has races, and on a GPU it is sometimes wrong. Run the tests, read the emulator's report, and make the kernel correct. Keep
//! one array in shared memory. Note which threads must reach a barrier, and that reads and writes of one step may race as well.

use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, SharedArray, kernel, thread};

/// Threads of a block.
pub const THREADS: usize = 128;

/// Lays out the shared memory: one sum for each thread.
pub fn shared(layout: &mut Layout) -> SharedArray<u32> {
    layout.array(THREADS).named("sums")
}

/// Computes out (n), the sum of the elements of inp (n) from the start of a block of 128 elements up to each element. Grid: n / 128,
/// rounded up.
#[kernel(threads = 128)]
pub fn running_sums(out: GlobalMut<u32>, inp: Global<u32>, n: u64) {
    let (sums, t, i) = (shared(&mut Layout::new()), thread::thread_idx_x() as usize, thread::index_1d());
    sums.set(t, if i < n as usize { inp.at(i) } else { 0 });
    let mut distance = 1;
    while distance < THREADS {
        thread::sync_threads();
        let added = if t >= distance { sums.at(t - distance) } else { 0 };
        thread::sync_threads();
        sums.set(t, sums.at(t) + added);
        distance *= 2;
    }
    if i < n as usize {
        out.set(i, sums.at(t));
    }
}
