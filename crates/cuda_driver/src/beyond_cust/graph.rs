//! CUDA graphs: work captured once and launched many times.

use super::sys;
use crate::error::{Result, check};
use crate::in_context::InContext;
use crate::{Gpu, Stream};

/// Captured work, as returned by [`Stream::end_capture`].
pub struct Graph(InContext<GraphHandle>);

struct GraphHandle(sys::CUgraph);

// SAFETY: a graph is not bound to a thread, and no method modifies it.
unsafe impl Send for GraphHandle {}

impl Graph {
    /// Takes ownership of a live graph.
    pub(super) fn from_raw(raw: sys::CUgraph, gpu: &Gpu) -> Result<Self> {
        let handle = GraphHandle(raw);
        InContext::create(gpu, || Ok(handle)).map(Self)
    }

    /// Makes the graph launchable.
    pub fn instantiate(&self) -> Result<GraphExec> {
        let instantiate = || {
            let mut raw = std::ptr::null_mut();
            // SAFETY: the graph is live; the call writes one handle.
            let code = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut raw, self.0.0, 0) };
            check(code, || "cuGraphInstantiate")?;
            Ok(GraphExecHandle(raw))
        };
        InContext::create(self.0.gpu(), instantiate).map(GraphExec)
    }
}

impl Drop for GraphHandle {
    fn drop(&mut self) {
        // SAFETY: the handle is live and not used again.
        unsafe { sys::cuGraphDestroy(self.0) };
    }
}

/// A graph that is ready to launch.
pub struct GraphExec(InContext<GraphExecHandle>);

struct GraphExecHandle(sys::CUgraphExec);

// SAFETY: an executable graph is not bound to a thread. The methods that are not thread-safe take `&mut self`.
unsafe impl Send for GraphExecHandle {}

impl GraphExec {
    /// Queues the graph on `stream`.
    ///
    /// # Safety
    /// The memory that the captured work accesses must still be allocated, and used as it was at capture.
    pub unsafe fn launch(&mut self, stream: &Stream) -> Result<()> {
        // SAFETY: the handles are live; memory is the caller's promise.
        check(unsafe { sys::cuGraphLaunch(self.0.0, stream.as_raw()) }, || "cuGraphLaunch")
    }

    /// Transfers the graph to the device, so that the first launch costs no more than later ones.
    pub fn upload(&mut self, stream: &Stream) -> Result<()> {
        // SAFETY: both handles are live.
        check(unsafe { sys::cuGraphUpload(self.0.0, stream.as_raw()) }, || "cuGraphUpload")
    }
}

impl Drop for GraphExecHandle {
    fn drop(&mut self) {
        // SAFETY: the handle is live and not used again.
        unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}
