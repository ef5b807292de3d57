//! Streams.

use crate::Gpu;
use crate::error::{CustResultExt, Result};
use crate::in_context::InContext;
use crate::sys;
use cust::stream::StreamFlags;
use std::fmt;

/// A stream that does not synchronize with the legacy default stream.
///
/// Copies, fills, waits for events and stream capture are in `beyond_cust::stream`.
pub struct Stream(InContext<cust::stream::Stream>);

impl Stream {
    /// Creates a stream of default priority.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        // The late-bound `cuStreamCreateWithPriority` restores the flag, which cust removes.
        let create =
            || cust::stream::Stream::new(StreamFlags::NON_BLOCKING, None).in_call(|| "cuStreamCreateWithPriority");
        InContext::create(gpu, create).map(Self)
    }

    /// Returns the `cust` stream, for its own methods.
    pub fn as_cust(&self) -> &cust::stream::Stream {
        &self.0
    }

    /// Returns the driver's handle, valid as long as `self`.
    pub fn as_raw(&self) -> sys::CUstream {
        self.0.as_inner()
    }

    /// Returns the GPU that the stream belongs to.
    pub fn gpu(&self) -> &Gpu {
        self.0.gpu()
    }

    /// Blocks until all work queued so far has completed. Returns the error of work that failed.
    pub fn synchronize(&self) -> Result<()> {
        self.0.synchronize().in_call(|| "cuStreamSynchronize")
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream of {:?}", self.gpu())
    }
}
