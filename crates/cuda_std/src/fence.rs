//! Memory fences.

use crate::backend;

/// Orders this thread's earlier memory accesses before its later ones at device scope (`fence.acq_rel.gpu`).
///
/// Together with an atomic counter, it publishes partial results to the block that arrives last.
#[inline(always)]
pub fn device() {
    backend::fence_device();
}
