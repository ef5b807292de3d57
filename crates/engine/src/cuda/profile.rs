//! Start and end of each launch on a stream, from a timed event before and after it.

use crate::{Interval, Result};
use cuda_driver::{Gpu, Stream, TimedEvent};

/// A profile in progress.
pub struct Profile {
    gpu: Gpu,
    origin: TimedEvent,
    launches: Vec<(String, TimedEvent, TimedEvent)>,
}

impl Profile {
    /// Starts a profile.
    pub fn start(gpu: &Gpu, stream: &Stream) -> Result<Self> {
        let origin = TimedEvent::new(gpu)?;
        origin.record(stream)?;
        Ok(Self { gpu: gpu.clone(), origin, launches: Vec::new() })
    }

    /// Records the start of a launch and returns the event for [`end`](Self::end).
    pub fn begin(&self, stream: &Stream) -> Result<TimedEvent> {
        let event = TimedEvent::new(&self.gpu)?;
        event.record(stream)?;
        Ok(event)
    }

    /// Records the end of a launch.
    pub fn end(&mut self, name: String, begin: TimedEvent, stream: &Stream) -> Result<()> {
        let end = self.begin(stream)?;
        self.launches.push((name, begin, end));
        Ok(())
    }

    /// Waits for the stream and returns all intervals in order.
    pub fn finish(self, stream: &Stream) -> Result<Vec<Interval>> {
        stream.synchronize()?;
        let at = |event: &TimedEvent| -> Result<f64> { Ok(f64::from(event.milliseconds_since(&self.origin)?) / 1e3) };
        let interval = |(name, begin, end): &(String, TimedEvent, TimedEvent)| {
            Ok(Interval { name: name.clone(), begin: at(begin)?, end: at(end)? })
        };
        self.launches.iter().map(interval).collect()
    }
}
