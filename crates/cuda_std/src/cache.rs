//! What L2 keeps and what it lets go of first. It is advice: results do not depend on it.

use crate::backend;

/// Which lines are evicted first of those that an access brings into L2 or finds there (`createpolicy`, `.L2::cache_hint`).
#[derive(Clone, Copy)]
pub struct CachePolicy(pub(crate) u64);

impl CachePolicy {
    /// Lines that are not needed again soon: the first to go.
    #[inline(always)]
    pub fn evict_first() -> Self {
        Self(backend::evict_first())
    }

    /// Of the lines, `fraction` (above 0, at most 1), chosen by their addresses, are the last to go and the others the first: for what
    /// is soon read again and does not fit whole. Whoever reads it for the last time does so with [`Self::evict_first`], or it stays.
    #[inline(always)]
    pub fn evict_last(fraction: f32) -> Self {
        Self(backend::evict_last(fraction))
    }
}
