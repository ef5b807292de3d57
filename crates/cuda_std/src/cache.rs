//! L2 cache policies. A policy is a hint: it does not affect results.

use crate::backend;

/// L2 eviction priority of the lines that an access touches (`createpolicy`, `.L2::cache_hint`).
#[derive(Clone, Copy)]
pub struct CachePolicy(pub(crate) u64);

impl CachePolicy {
    /// Creates a policy for data that is not reused soon: its lines are evicted first.
    #[inline(always)]
    pub fn evict_first() -> Self {
        Self(backend::evict_first())
    }

    /// Creates a policy for data that is reused soon but does not fit into L2 as a whole.
    ///
    /// A `fraction` of the lines (above 0, at most 1), selected by address, is evicted last; the other lines are
    /// evicted first. The last read of the data should use [`Self::evict_first`], or its lines remain in L2.
    #[inline(always)]
    pub fn evict_last(fraction: f32) -> Self {
        Self(backend::evict_last(fraction))
    }
}
