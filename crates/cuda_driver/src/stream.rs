//! Streams.

use crate::Gpu;
use crate::error::{CustResultExt, Result};
use crate::in_context::InContext;
use crate::sys;
use cust::stream::StreamFlags;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A stream that does not synchronize with the legacy default stream. Clones are the same stream.
///
/// Copies, fills, waits for events and stream capture are in `beyond_cust::stream`.
#[derive(Clone)]
pub struct Stream(Arc<Inner>);

struct Inner {
    stream: InContext<cust::stream::Stream>,
    /// Held while the stream starts to be captured, and while work is queued that must not be captured.
    order: Mutex<()>,
}

impl Stream {
    /// Creates a stream of default priority.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        // The late-bound `cuStreamCreateWithPriority` restores the flag, which cust removes.
        let create =
            || cust::stream::Stream::new(StreamFlags::NON_BLOCKING, None).in_call(|| "cuStreamCreateWithPriority");
        let stream = InContext::create(gpu, create)?;
        Ok(Self(Arc::new(Inner { stream, order: Mutex::new(()) })))
    }

    /// Returns the `cust` stream, for its own methods.
    pub fn as_cust(&self) -> &cust::stream::Stream {
        &self.0.stream
    }

    /// Returns the driver's handle, valid as long as `self`.
    pub fn as_raw(&self) -> sys::CUstream {
        self.0.stream.as_inner()
    }

    /// Returns a number that no other stream has at the same time, and that is not 0.
    pub(crate) fn identity(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, ()> {
        self.0.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the GPU that the stream belongs to.
    pub fn gpu(&self) -> &Gpu {
        self.0.stream.gpu()
    }

    /// Blocks until all work queued so far has completed. Returns the error of work that failed.
    pub fn synchronize(&self) -> Result<()> {
        self.0.stream.synchronize().in_call(|| "cuStreamSynchronize")
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream of {:?}", self.gpu())
    }
}
