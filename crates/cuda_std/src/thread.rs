//! Thread and block indices, and barriers of a block.

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
    /// Returns the x index of this thread in its block (`%tid.x`).
    thread_idx_x
    /// Returns the y index of this thread in its block (`%tid.y`), 0 in a one-dimensional block.
    thread_idx_y
    /// Returns the z index of this thread in its block (`%tid.z`), 0 in a one- or two-dimensional block.
    thread_idx_z
    /// Returns the x index of this block in the grid (`%ctaid.x`).
    block_idx_x
    /// Returns the y index of this block in the grid (`%ctaid.y`).
    block_idx_y
    /// Returns the z index of this block in the grid (`%ctaid.z`).
    block_idx_z
    /// Returns the number of threads of a block in x (`%ntid.x`).
    block_dim_x
    /// Returns the number of threads of a block in y (`%ntid.y`).
    block_dim_y
    /// Returns the number of threads of a block in z (`%ntid.z`).
    block_dim_z
    /// Returns the number of blocks of the grid in x (`%nctaid.x`).
    grid_dim_x
    /// Returns the number of blocks of the grid in y (`%nctaid.y`).
    grid_dim_y
    /// Returns the number of blocks of the grid in z (`%nctaid.z`).
    grid_dim_z
}

/// Returns the index of this thread in a one-dimensional grid of one-dimensional blocks.
#[inline(always)]
#[track_caller]
pub fn index_1d() -> usize {
    block_idx_x() as usize * block_dim_x() as usize + backend::thread_idx_1d() as usize
}

/// Returns the index of this thread in its block of any dimension: x + `block_dim_x` · (y + `block_dim_y` · z). Consecutive indices
/// form warps.
#[inline(always)]
pub fn linear_index() -> u32 {
    thread_idx_x() + block_dim_x() * (thread_idx_y() + block_dim_y() * thread_idx_z())
}

/// Returns the cycles of this SM's clock, modulo 2^64 (`%clock64`). The emulator counts calls instead.
#[inline(always)]
pub fn clock() -> u64 {
    backend::clock()
}

/// Returns the nanoseconds of a clock that all SMs share (`%globaltimer`). Its resolution is about a microsecond.
#[inline(always)]
pub fn nanoseconds() -> u64 {
    backend::nanoseconds()
}

/// Suspends this thread for about `ns` nanoseconds, at most twice as long and at most a millisecond (`nanosleep.u32`).
///
/// A thread that polls memory calls it between two reads, so that other threads get more of the SM's time. It is a hint: the emulator
/// lets other threads run, and no result may depend on the duration. It orders no memory accesses.
#[inline(always)]
#[track_caller]
pub fn nanosleep(ns: u32) {
    backend::nanosleep(ns);
}

/// Stops the kernel with an error (`trap`). The launch fails, and the context of the GPU cannot be used again. The emulator reports
/// the thread and the line.
#[inline(always)]
#[track_caller]
pub fn trap() -> ! {
    backend::trap()
}

/// Returns the number of threads in a one-dimensional grid.
#[inline(always)]
pub fn count_1d() -> usize {
    grid_dim_x() as usize * block_dim_x() as usize
}

/// Returns `value` unchanged, but hides it from the compiler.
///
/// Values that depend on it are then recomputed after this point instead of occupying registers across a loop.
#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    backend::opaque(value)
}

/// Waits at a barrier of all threads of the block (`bar.sync 0`), which orders their shared and global memory accesses.
#[inline(always)]
#[track_caller]
pub fn sync_threads() {
    backend::sync_threads();
}

/// Waits like [`sync_threads`], and returns whether `predicate` is true in any thread of the block (`bar.red.or.pred 0`).
///
/// Threads that have returned from the kernel do not count. If one warp waits in this function, all others must wait in it too,
/// at any line.
#[inline(always)]
#[track_caller]
pub fn sync_threads_or(predicate: bool) -> bool {
    backend::sync_threads_or(predicate)
}

/// Waits like [`sync_threads`], and returns whether `predicate` is true in every thread of the block (`bar.red.and.pred 0`). See
/// [`sync_threads_or`].
#[inline(always)]
#[track_caller]
pub fn sync_threads_and(predicate: bool) -> bool {
    backend::sync_threads_and(predicate)
}

/// Waits like [`sync_threads`], and returns the number of threads of the block with a true `predicate` (`bar.red.popc.u32 0`). See
/// [`sync_threads_or`].
#[inline(always)]
#[track_caller]
pub fn sync_threads_count(predicate: bool) -> u32 {
    backend::sync_threads_count(predicate)
}

/// Waits until `threads` threads have arrived at named barrier `id` (`bar.sync id, threads`).
///
/// `id` must be in 1..16, because barrier 0 is [`sync_threads`]. `threads` must be a multiple of 32.
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
