//! The layout of a thread block's shared memory.

use super::tile::{CONSUMERS, MAX_EPILOGUE_BUFFERS, MAX_STAGES, POOL_ROWS};
use cuda_std::hopper::mbarrier::MBarriers;
use cuda_std::hopper::{PipelineBarriers, SwizzledTile};
use cuda_std::shared::Layout;

/// Shared memory of a thread block, the same for every tile.
#[derive(Clone, Copy)]
pub struct SharedStorage {
    /// The pipeline stages, then the epilogue buffers of each consumer.
    pub pool: SwizzledTile<POOL_ROWS>,
    /// Barriers of the pipeline stages.
    pub pipeline: PipelineBarriers,
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
            // Without a call, in which LLVM would compute the addresses again.
            pipeline: PipelineBarriers { full: layout.mbarriers(MAX_STAGES), empty: layout.mbarriers(MAX_STAGES) },
            order_barrier: layout.mbarriers(CONSUMERS as usize),
            aux_full: layout.mbarriers((CONSUMERS * MAX_EPILOGUE_BUFFERS) as usize),
        }
    }
}
