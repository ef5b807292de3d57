//! The layout of a thread block's shared memory.

use super::tile::{CONSUMERS, MAX_EPILOGUE_BUFFERS, MAX_STAGES, POOL_ROWS};
use cuda_std::hopper::SwizzledTile;
use cuda_std::hopper::mbarrier::MBarriers;
use cuda_std::shared::Layout;
use cuda_std::thread;

/// Threads of a warpgroup.
pub const WARPGROUP: u32 = 128;

/// Returns true for the first thread of each warpgroup.
#[inline(always)]
pub fn is_warpgroup_leader() -> bool {
    thread::thread_idx_x().is_multiple_of(WARPGROUP)
}

/// Shared memory of a thread block, the same for every tile.
#[derive(Clone, Copy)]
pub struct SharedStorage {
    /// The pipeline stages, then the epilogue buffers of each consumer.
    pub pool: SwizzledTile<POOL_ROWS>,
    /// Barrier i completes when stage i holds its operands.
    pub full: MBarriers,
    /// Barrier i completes when stage i may be overwritten.
    pub empty: MBarriers,
    /// Barrier i completes when ping-pong consumer i may run its mainloop.
    pub order_barrier: MBarriers,
    /// Barrier i completes when epilogue buffer i holds its part of aux.
    pub aux_full: MBarriers,
}

impl SharedStorage {
    /// Takes the storage from `layout`.
    pub fn new(layout: &mut Layout) -> Self {
        Self {
            pool: layout.swizzled(),
            full: layout.mbarriers(MAX_STAGES),
            empty: layout.mbarriers(MAX_STAGES),
            order_barrier: layout.mbarriers(CONSUMERS as usize),
            aux_full: layout.mbarriers((CONSUMERS * MAX_EPILOGUE_BUFFERS) as usize),
        }
    }
}
