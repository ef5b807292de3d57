//! Asynchronous copies from global to shared memory, which bypass registers (`cp.async`, `sm_80`). They are started by
//! [`crate::SharedTile::copy_packet_async`] and [`crate::SharedArray::copy_packet_async`].

use crate::backend;

/// Commits the copies that this thread has started since the last commit as a group (`cp.async.commit_group`).
#[inline(always)]
pub fn commit() {
    backend::async_copy_commit();
}

/// Waits until at most the `PENDING` newest groups of this thread are in flight (`cp.async.wait_group PENDING`).
///
/// A barrier must follow before other threads read the copied data.
#[inline(always)]
#[cfg_attr(not(target_arch = "nvptx64"), track_caller)]
pub fn wait<const PENDING: u32>() {
    backend::async_copy_wait::<PENDING>();
}
