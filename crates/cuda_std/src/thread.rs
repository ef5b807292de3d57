//! Where a thread is in its block and grid, and barriers among the threads of a block.

use crate::backend;

macro_rules! index {
    ($($(#[$doc:meta])* $name:ident)*) => {$(
        $(#[$doc])*
        #[inline(always)]
        pub fn $name() -> u32 {
            backend::$name()
        }
    )*};
}

index! {
    /// `%tid.x`
    thread_idx_x
    /// `%ctaid.x`
    block_idx_x
    /// `%ctaid.y`
    block_idx_y
    /// `%ctaid.z`
    block_idx_z
    /// `%ntid.x`
    block_dim_x
    /// `%nctaid.x`
    grid_dim_x
    /// `%nctaid.y`
    grid_dim_y
    /// `%nctaid.z`
    grid_dim_z
}

/// Index of this thread in a one-dimensional grid.
#[inline(always)]
pub fn index_1d() -> usize {
    block_idx_x() as usize * block_dim_x() as usize + thread_idx_x() as usize
}

/// Number of threads of a one-dimensional grid.
#[inline(always)]
pub fn count_1d() -> usize {
    grid_dim_x() as usize * block_dim_x() as usize
}

/// `value`, of which the compiler knows nothing more: what depends on it is computed after this point each time, not kept
/// in registers from before a loop.
#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    backend::opaque(value)
}

/// Barrier of all threads of the block (`bar.sync 0`); orders their shared and global accesses.
#[inline(always)]
#[track_caller]
pub fn sync_threads() {
    backend::sync_threads();
}

/// Named barrier: waits until `threads` threads have reached barrier `id` (`bar.sync id, threads`).
/// `id` in 1..16 (0 is [`sync_threads`]), `threads` a multiple of 32.
#[inline(always)]
#[track_caller]
pub fn sync_named(id: u32, threads: u32) {
    backend::sync_named(id, threads);
}

/// Arrives at a named barrier without waiting (`bar.arrive id, threads`).
#[inline(always)]
#[track_caller]
pub fn arrive_named(id: u32, threads: u32) {
    backend::arrive_named(id, threads);
}
