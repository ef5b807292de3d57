//! Events that record a time.

use crate::error::{CustResultExt, Result};
use crate::in_context::InContext;
use crate::{Gpu, Stream};
use cust::event::{EventFlags, EventStatus};

/// An event that records the time at which the GPU completes it.
pub struct TimedEvent(InContext<cust::event::Event>);

impl TimedEvent {
    /// Creates an event that is not recorded yet.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        let create = || cust::event::Event::new(EventFlags::DEFAULT).in_call(|| "cuEventCreate");
        InContext::create(gpu, create).map(Self)
    }

    /// Records the event after all work queued on `stream` so far. It replaces an earlier record.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.0.record(stream.as_cust()).in_call(|| "cuEventRecord")
    }

    /// Blocks until the GPU has completed the event. Returns at once if the event was never recorded.
    pub fn synchronize(&self) -> Result<()> {
        self.0.synchronize().in_call(|| "cuEventSynchronize")
    }

    /// Returns whether the GPU has completed the event.
    pub fn is_done(&self) -> Result<bool> {
        let status = self.0.query().in_call(|| "cuEventQuery")?;
        Ok(status == EventStatus::Ready)
    }

    /// Returns the milliseconds from `start` to this event, with a resolution of about half a microsecond. Both events must
    /// be completed.
    pub fn milliseconds_since(&self, start: &Self) -> Result<f32> {
        self.0.elapsed_time_f32(&start.0).in_call(|| "cuEventElapsedTime")
    }
}

/// Measures the GPU time of work on a stream.
pub struct Stopwatch {
    start: TimedEvent,
    end: TimedEvent,
}

impl Stopwatch {
    /// Creates the two events between which time is measured.
    pub fn new(stream: &Stream) -> Result<Self> {
        Ok(Self { start: TimedEvent::new(stream.gpu())?, end: TimedEvent::new(stream.gpu())? })
    }

    /// Calls `run`, which queues work on `stream`, `runs` times. Waits for the work and returns the mean milliseconds of one
    /// run.
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
