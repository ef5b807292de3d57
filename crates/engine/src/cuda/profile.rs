//! When each piece of work on a stream began and ended, by a timed event before and after it.

use crate::{Interval, Result};
use cuda_driver::{Gpu, Stream, TimedEvent};

pub struct Profile {
    gpu: Gpu,
    origin: TimedEvent,
    work: Vec<(String, TimedEvent, TimedEvent)>,
}

impl Profile {
    pub fn start(gpu: &Gpu, stream: &Stream) -> Result<Self> {
        let origin = TimedEvent::new(gpu)?;
        origin.record(stream)?;
        Ok(Self { gpu: gpu.clone(), origin, work: Vec::new() })
    }

    /// Marks the beginning of a piece of work; [`end`](Self::end) takes the mark.
    pub fn begin(&self, stream: &Stream) -> Result<TimedEvent> {
        let event = TimedEvent::new(&self.gpu)?;
        event.record(stream)?;
        Ok(event)
    }

    pub fn end(&mut self, name: String, begin: TimedEvent, stream: &Stream) -> Result<()> {
        let end = self.begin(stream)?;
        self.work.push((name, begin, end));
        Ok(())
    }

    /// Everything noted, in order, once the stream has passed it.
    pub fn finish(self, stream: &Stream) -> Result<Vec<Interval>> {
        stream.synchronize()?;
        let at = |event: &TimedEvent| -> Result<f64> { Ok(f64::from(event.milliseconds_since(&self.origin)?) / 1e3) };
        let interval = |(name, begin, end): &(String, TimedEvent, TimedEvent)| {
            Ok(Interval { name: name.clone(), begin: at(begin)?, end: at(end)? })
        };
        self.work.iter().map(interval).collect()
    }
}
