//! Work recorded once, launched many times.

use crate::error::{Result, check};
use crate::{Gpu, Stream, sys};

/// Recorded work: what [`Stream::end_capture`] returns.
pub struct Graph {
    raw: sys::CUgraph,
    gpu: Gpu,
}

// SAFETY: a graph has no thread affinity, and no method changes it.
unsafe impl Send for Graph {}

impl Graph {
    pub(crate) fn from_raw(raw: sys::CUgraph, gpu: &Gpu) -> Self {
        Self { raw, gpu: gpu.clone() }
    }

    /// Makes it launchable.
    pub fn instantiate(&self) -> Result<GraphExec> {
        self.gpu.make_current()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the graph is live; writes one handle.
        check(unsafe { sys::cuGraphInstantiateWithFlags(&raw mut raw, self.raw, 0) }, "cuGraphInstantiate")?;
        Ok(GraphExec { raw, gpu: self.gpu.clone() })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() {
            // SAFETY: the handle is live and not used again.
            unsafe { sys::cuGraphDestroy(self.raw) };
        }
    }
}

/// A graph ready to launch.
pub struct GraphExec {
    raw: sys::CUgraphExec,
    gpu: Gpu,
}

// SAFETY: a launchable graph has no thread affinity; methods that are not thread-safe take `&mut self`.
unsafe impl Send for GraphExec {}

impl GraphExec {
    /// Queues all of the graph on `stream`.
    ///
    /// # Safety
    /// The memory that the recorded work names is still allocated and used as it was when recorded.
    pub unsafe fn launch(&mut self, stream: &Stream) -> Result<()> {
        // SAFETY: the handles are live; memory is the caller's promise.
        check(unsafe { sys::cuGraphLaunch(self.raw, stream.as_raw()) }, "cuGraphLaunch")
    }

    /// Moves the graph to the device, so that the first launch costs no more than the rest.
    pub fn upload(&mut self, stream: &Stream) -> Result<()> {
        // SAFETY: both handles are live.
        check(unsafe { sys::cuGraphUpload(self.raw, stream.as_raw()) }, "cuGraphUpload")
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() {
            // SAFETY: the handle is live and not used again.
            unsafe { sys::cuGraphExecDestroy(self.raw) };
        }
    }
}
