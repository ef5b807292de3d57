//! Memory fences.

use crate::backend;

/// Orders this thread's earlier writes before its later ones for the whole device (`fence.acq_rel.gpu`); with an atomic
/// counter it publishes partial results to the block that arrives last.
#[inline(always)]
pub fn device() {
    backend::fence_device();
}
