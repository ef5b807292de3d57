//! Ranges in the timelines of NVIDIA's profilers, Nsight Systems and Nsight Compute. Without a profiler they do nothing.

use std::fmt::Arguments;

/// A range of this thread, from its creation until it is dropped. Ranges are nested.
///
/// Work that is replayed as a CUDA graph has the range of the replay only.
pub struct Range(());

impl Range {
    /// Begins a range.
    pub fn new(name: Arguments) -> Self {
        ::nvtx::range_push!("{name}");
        Self(())
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        ::nvtx::range_pop!();
    }
}
