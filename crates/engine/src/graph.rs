//! Keys of CUDA graphs.

use std::sync::atomic::{AtomicU64, Ordering};

/// Identifies work that repeats unchanged, for [`Engine::capture_or_replay`](crate::Engine::capture_or_replay).
#[derive(Debug, PartialEq, Eq)]
pub struct GraphKey(pub(crate) u64);

impl GraphKey {
    /// Returns a key that differs from every other one in this process.
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl Default for GraphKey {
    fn default() -> Self {
        Self::new()
    }
}
