//! Planted fault 4: a read of a tile before its TMA load has arrived.
//!
//! Problem: out (64, 64) = inp (64, 64), loaded by TMA and stored by the threads.
//! Fault: the threads do not wait for the mbarrier, but only at an ordinary barrier, which knows nothing of the copy.
//! Report: a use of the target of an asynchronous copy, with the lines of the read and of the load.

use cuda_std::hopper::mbarrier::MBarriers;
use cuda_std::hopper::{MBarrier, SwizzledTile, TensorMap};
use cuda_std::shared::Layout;
use cuda_std::{Global, GlobalMut, bf16, kernel, thread};

/// Lays out the shared memory: the tile and an mbarrier.
pub fn shared(layout: &mut Layout) -> (SwizzledTile<64>, MBarriers) {
    (layout.swizzled(), layout.mbarriers(1))
}

/// Copies the matrix. Grid: 1.
#[kernel(threads = 128, requires = "tma")]
pub fn fault_tma_without_wait(out: GlobalMut<bf16>, inp: Global<TensorMap>) {
    let (tile, barriers) = shared(&mut Layout::new());
    let (full, t) = (barriers.at(0), thread::thread_idx_x());
    if t == 0 {
        full.init(1);
        MBarrier::fence_init();
        full.arrive_expect_tx(64 * 128);
        tile.load(inp, 0, 0, full);
    }
    thread::sync_threads();
    for chunk in t % 2 * 4..t % 2 * 4 + 4 {
        let packet = tile.packet(t / 2, chunk); // fault: full.wait(0) must come before
        out.set_packet((t / 2 * 64 + chunk * 8) as usize, packet);
    }
}
