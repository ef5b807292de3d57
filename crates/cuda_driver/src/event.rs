//! Marks in a stream.

use crate::error::{Result, check};
use crate::{Gpu, Stream, sys};

/// A mark that other streams and the host can wait for. Without a time, which makes it cheaper.
pub struct Event {
    raw: sys::CUevent,
    gpu: Gpu,
}

// SAFETY: the driver's event calls are thread-safe, and nothing here is bound to a thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    pub fn new(gpu: &Gpu) -> Result<Self> {
        Self::with_flags(gpu, sys::CU_EVENT_DISABLE_TIMING)
    }

    fn with_flags(gpu: &Gpu, flags: u32) -> Result<Self> {
        gpu.make_current()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        check(unsafe { sys::cuEventCreate(&raw mut raw, flags) }, "cuEventCreate")?;
        Ok(Self { raw, gpu: gpu.clone() })
    }

    pub fn as_raw(&self) -> sys::CUevent {
        self.raw
    }

    /// Marks the end of what is queued on `stream` so far; forgets an earlier mark.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both handles are live.
        check(unsafe { sys::cuEventRecord(self.raw, stream.as_raw()) }, "cuEventRecord")
    }

    /// Waits until the GPU has passed the mark; returns at once where there is none.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the handle is live.
        check(unsafe { sys::cuEventSynchronize(self.raw) }, "cuEventSynchronize")
    }

    /// Whether the GPU has passed the mark.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the handle is live.
        match unsafe { sys::cuEventQuery(self.raw) } {
            sys::CUDA_ERROR_NOT_READY => Ok(false),
            code => check(code, "cuEventQuery").map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() {
            // SAFETY: the handle is live and not used again. An error here is one an earlier call has reported.
            unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}

/// An [`Event`] that also notes when it was passed.
pub struct TimedEvent(Event);

impl TimedEvent {
    pub fn new(gpu: &Gpu) -> Result<Self> {
        Event::with_flags(gpu, 0).map(Self)
    }

    /// Milliseconds from `start` to this mark; both recorded and passed. Resolution is about half a microsecond.
    pub fn milliseconds_since(&self, start: &Self) -> Result<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: both handles are live; writes one float.
        let code = unsafe { sys::cuEventElapsedTime(&raw mut milliseconds, start.as_raw(), self.as_raw()) };
        check(code, "cuEventElapsedTime").map(|()| milliseconds)
    }
}

impl std::ops::Deref for TimedEvent {
    type Target = Event;

    fn deref(&self) -> &Event {
        &self.0
    }
}

/// Times work on a stream.
pub struct Stopwatch {
    start: TimedEvent,
    end: TimedEvent,
}

impl Stopwatch {
    pub fn new(stream: &Stream) -> Result<Self> {
        Ok(Self { start: TimedEvent::new(stream.gpu())?, end: TimedEvent::new(stream.gpu())? })
    }

    /// Mean milliseconds of a run. Waits for the stream.
    pub fn time<E: From<crate::Error>>(
        &self,
        stream: &Stream,
        runs: u32,
        mut run: impl FnMut() -> Result<(), E>,
    ) -> Result<f32, E> {
        self.start.record(stream)?;
        for _ in 0..runs {
            run()?;
        }
        self.end.record(stream)?;
        self.end.synchronize()?;
        Ok(self.end.milliseconds_since(&self.start)? / runs as f32)
    }
}
