//! Events that order work. (`cust`'s events cannot be waited for by a stream without destroying them.)

use super::sys;
use crate::error::{Result, check};
use crate::in_context::InContext;
use crate::{Gpu, Stream};

/// A marker in a stream that other streams and the host can wait for. It records no time, which makes it cheaper.
pub struct Event(InContext<Handle>);

struct Handle(sys::CUevent);

// SAFETY: the driver's event functions are thread-safe, and an event is not bound to a thread.
unsafe impl Send for Handle {}
// SAFETY: see `Send`.
unsafe impl Sync for Handle {}

impl Event {
    /// Creates an event that is not recorded yet.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        let create = || {
            let mut raw = std::ptr::null_mut();
            // SAFETY: the call writes one handle.
            check(unsafe { sys::cuEventCreate(&raw mut raw, sys::CU_EVENT_DISABLE_TIMING) }, || "cuEventCreate")?;
            Ok(Handle(raw))
        };
        InContext::create(gpu, create).map(Self)
    }

    /// Returns the driver's handle, valid as long as `self`.
    pub fn as_raw(&self) -> sys::CUevent {
        self.0.0
    }

    /// Records the event after all work queued on `stream` so far. It replaces an earlier record.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both handles are live.
        check(unsafe { sys::cuEventRecord(self.as_raw(), stream.as_raw()) }, || "cuEventRecord")
    }

    /// Blocks until the GPU has completed the event. Returns at once if the event was never recorded.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the handle is live.
        check(unsafe { sys::cuEventSynchronize(self.as_raw()) }, || "cuEventSynchronize")
    }

    /// Returns whether the GPU has completed the event.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the handle is live.
        match unsafe { sys::cuEventQuery(self.as_raw()) } {
            sys::CUDA_ERROR_NOT_READY => Ok(false),
            code => check(code, || "cuEventQuery").map(|()| true),
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle is live and not used again. An error would be one that an earlier call has returned.
        unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}
