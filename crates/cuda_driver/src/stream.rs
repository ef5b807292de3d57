//! Queues of work.

use crate::error::{Result, check, check_with};
use crate::{Event, Gpu, Graph, sys};
use std::fmt;

/// A stream that does not synchronise with the legacy default stream. (`cust::Stream::new` loses that flag.)
pub struct Stream {
    raw: sys::CUstream,
    gpu: Gpu,
}

// SAFETY: the driver's stream calls are thread-safe, and nothing here is bound to a thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub fn new(gpu: &Gpu) -> Result<Self> {
        gpu.make_current()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        check(unsafe { sys::cuStreamCreate(&raw mut raw, sys::CU_STREAM_NON_BLOCKING) }, "cuStreamCreate")?;
        Ok(Self { raw, gpu: gpu.clone() })
    }

    pub fn as_raw(&self) -> sys::CUstream {
        self.raw
    }

    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Waits until everything queued so far is done; reports what failed in it.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the handle is live.
        check(unsafe { sys::cuStreamSynchronize(self.raw) }, "cuStreamSynchronize")
    }

    /// Whether everything queued so far is done.
    pub fn is_idle(&self) -> Result<bool> {
        // SAFETY: the handle is live.
        match unsafe { sys::cuStreamQuery(self.raw) } {
            sys::CUDA_ERROR_NOT_READY => Ok(false),
            code => check(code, "cuStreamQuery").map(|()| true),
        }
    }

    /// Whether the driver made it non-blocking.
    pub fn is_non_blocking(&self) -> Result<bool> {
        let mut flags = 0;
        // SAFETY: writes one integer.
        check(unsafe { sys::cuStreamGetFlags(self.raw, &raw mut flags) }, "cuStreamGetFlags")?;
        Ok(flags & sys::CU_STREAM_NON_BLOCKING != 0)
    }

    /// Work queued from here on starts after what `event` recorded.
    pub fn wait(&self, event: &Event) -> Result<()> {
        // SAFETY: both handles are live.
        check(unsafe { sys::cuStreamWaitEvent(self.raw, event.as_raw(), 0) }, "cuStreamWaitEvent")
    }

    /// Queues a copy of `from` to the device address `to`.
    ///
    /// # Safety
    /// `to` covers the bytes of `from` in device memory that nothing else uses meanwhile. Where `from` is pinned, it
    /// stays alive and unchanged until the stream has passed the copy.
    pub unsafe fn upload<T: bytemuck::Pod>(&self, to: sys::CUdeviceptr, from: &[T]) -> Result<()> {
        let bytes = size_of_val(from);
        // SAFETY: the caller's promise for `to`; `from` is a slice of that many bytes.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), bytes, self.raw) };
        check_with(code, || format!("copying {bytes} bytes to the GPU"))
    }

    /// Queues a copy of device memory at `from` into `to`.
    ///
    /// # Safety
    /// `from` covers the bytes of `to` in device memory. `to` stays alive and is not touched until the stream has passed
    /// the copy.
    pub unsafe fn download<T: bytemuck::Pod>(&self, to: &mut [T], from: sys::CUdeviceptr) -> Result<()> {
        let bytes = size_of_val(to);
        // SAFETY: the caller's promise for `from`; `to` is a slice of that many bytes and any bits are a `T`.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, bytes, self.raw) };
        check_with(code, || format!("copying {bytes} bytes from the GPU"))
    }

    /// Queues a copy of `bytes` bytes inside device memory.
    ///
    /// # Safety
    /// Both ranges are device memory, do not overlap, and nothing else writes them meanwhile.
    pub unsafe fn copy(&self, to: sys::CUdeviceptr, from: sys::CUdeviceptr, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw) };
        check_with(code, || format!("copying {bytes} bytes on the GPU"))
    }

    /// Queues setting `bytes` bytes at `to` to `value`.
    ///
    /// # Safety
    /// The range is device memory that nothing else uses meanwhile.
    pub unsafe fn fill(&self, to: sys::CUdeviceptr, value: u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        let code = unsafe { sys::cuMemsetD8Async(to, value, bytes, self.raw) };
        check_with(code, || format!("setting {bytes} bytes on the GPU"))
    }

    /// Begins to record what is queued on this stream instead of running it. Other threads are not affected; calls of this
    /// thread that a recording cannot hold (synchronising, allocating) fail.
    pub fn begin_capture(&self) -> Result<()> {
        // SAFETY: the handle is live.
        let code = unsafe { sys::cuStreamBeginCapture_v2(self.raw, sys::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) };
        check(code, "cuStreamBeginCapture")
    }

    /// What was queued since [`begin_capture`](Self::begin_capture), on the same thread; from here on work runs again, even
    /// after an error.
    pub fn end_capture(&self) -> Result<Graph> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the handle is live; writes one handle, or null where what was queued cannot be recorded.
        let code = unsafe { sys::cuStreamEndCapture(self.raw, &raw mut graph) };
        let graph = (!graph.is_null()).then(|| Graph::from_raw(graph, &self.gpu));
        check(code, "cuStreamEndCapture")?;
        graph.ok_or_else(|| crate::Error::Call {
            call: "cuStreamEndCapture".into(),
            code: 901,
            name: "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED".into(),
            text: "the capture holds no graph".into(),
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() {
            // SAFETY: the handle is live and not used again. An error here is one an earlier call has reported.
            unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream of {:?}", self.gpu)
    }
}
