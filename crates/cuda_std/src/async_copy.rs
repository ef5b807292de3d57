//! Copies from global to shared memory that do not pass through registers (`cp.async`, `sm_80`).
//! Started by [`crate::SharedTile::copy_packet_async`] and [`crate::SharedArray::copy_packet_async`].

use crate::backend;

/// Closes a group of the copies this thread started since the last one (`cp.async.commit_group`).
#[inline(always)]
pub fn commit() {
    backend::async_copy_commit();
}

/// Waits until at most `PENDING` of this thread's newest groups are still under way (`cp.async.wait_group PENDING`).
/// A barrier must follow before other threads read what was copied.
#[inline(always)]
pub fn wait<const PENDING: u32>() {
    backend::async_copy_wait::<PENDING>();
}
