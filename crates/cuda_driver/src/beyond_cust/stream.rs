//! Waits for events, copies and fills of raw device addresses, and stream capture.

use super::event::Event;
use super::graph::Graph;
use super::sys;
use crate::error::{Result, call_error, check};
use crate::{Error, Stream};

impl Stream {
    /// Queues work with `queue`. Returns an error if the stream's work is captured as a CUDA graph.
    pub(crate) fn in_order(&self, queue: impl FnOnce() -> Result<()>) -> Result<()> {
        let _order = self.lock();
        self.gpu().make_current()?;
        let mut capturing = 0;
        // SAFETY: the handle is live. The call writes one number, which is 0 if the stream runs its work.
        check(unsafe { sys::cuStreamIsCapturing(self.as_raw(), &raw mut capturing) }, || "cuStreamIsCapturing")?;
        if capturing == 0 { queue() } else { Err(Error::Capturing) }
    }

    /// Makes work queued from now on start after the work that `event` was recorded after.
    pub fn wait(&self, event: &Event) -> Result<()> {
        // An event of a stream that is captured adds this stream to the capture.
        let _order = self.lock();
        // SAFETY: both handles are live.
        check(unsafe { sys::cuStreamWaitEvent(self.as_raw(), event.as_raw(), 0) }, || "cuStreamWaitEvent")
    }

    /// Queues a copy of `from` to the device address `to`.
    ///
    /// # Safety
    /// `to` must cover the bytes of `from` in device memory that nothing else accesses during the copy. If `from` is pinned,
    /// it must stay alive and unchanged until the stream has completed the copy.
    pub unsafe fn upload<T: bytemuck::Pod>(&self, to: sys::CUdeviceptr, from: &[T]) -> Result<()> {
        let bytes = size_of_val(from);
        // SAFETY: `to` is the caller's promise; `from` is a slice of that many bytes.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), bytes, self.as_raw()) };
        check(code, || format!("copying {bytes} bytes to the GPU"))
    }

    /// Queues a copy of device memory at `from` into `to`.
    ///
    /// # Safety
    /// `from` must cover the bytes of `to` in device memory. `to` must stay alive and must not be accessed until the stream
    /// has completed the copy.
    pub unsafe fn download<T: bytemuck::Pod>(&self, to: &mut [T], from: sys::CUdeviceptr) -> Result<()> {
        let bytes = size_of_val(to);
        // SAFETY: `from` is the caller's promise; `to` is a slice of that many bytes, and every bit pattern is a `T`.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, bytes, self.as_raw()) };
        check(code, || format!("copying {bytes} bytes from the GPU"))
    }

    /// Queues a copy of `bytes` bytes within device memory.
    ///
    /// # Safety
    /// Both ranges must be device memory, must not overlap, and must not be written by anything else during the copy.
    pub unsafe fn copy(&self, to: sys::CUdeviceptr, from: sys::CUdeviceptr, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.as_raw()) };
        check(code, || format!("copying {bytes} bytes on the GPU"))
    }

    /// Queues a fill of `bytes` bytes at `to` with `value`.
    ///
    /// # Safety
    /// The range must be device memory that nothing else accesses during the fill.
    pub unsafe fn fill(&self, to: sys::CUdeviceptr, value: u8, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        let code = unsafe { sys::cuMemsetD8Async(to, value, bytes, self.as_raw()) };
        check(code, || format!("setting {bytes} bytes on the GPU"))
    }

    /// Starts to capture the work queued on this stream instead of running it.
    ///
    /// Other threads are not affected. Calls of this thread that cannot be captured, such as synchronization and allocation,
    /// fail until the capture ends.
    pub fn begin_capture(&self) -> Result<()> {
        let _order = self.lock();
        // SAFETY: the handle is live.
        let code = unsafe { sys::cuStreamBeginCapture_v2(self.as_raw(), sys::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) };
        check(code, || "cuStreamBeginCapture")
    }

    /// Ends the capture that [`begin_capture`](Self::begin_capture) started on the same thread, and returns the captured
    /// work. The stream runs its work again from now on, even after an error.
    pub fn end_capture(&self) -> Result<Graph> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the handle is live. The call writes one handle, which is null if the capture failed.
        let code = unsafe { sys::cuStreamEndCapture(self.as_raw(), &raw mut graph) };
        let graph = (!graph.is_null()).then(|| Graph::from_raw(graph, self.gpu())).transpose()?;
        if code != 0 {
            return Err(call_error(code, "cuStreamEndCapture"));
        }
        graph.ok_or_else(|| Error::Call {
            call: "cuStreamEndCapture".into(),
            code: sys::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            name: "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED".into(),
            text: "the capture contains no graph".into(),
        })
    }
}
