//! How long clients wait for tokens.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Number of texts whose medians are shown.
const TEXTS: usize = 100;

/// The times at which a text received tokens.
#[derive(Clone, Copy, Debug)]
pub struct Timeline {
    first: Instant,
    newest: Instant,
    tokens: u32,
}

impl Timeline {
    /// Notes a token that has just been generated.
    pub fn add(timeline: &mut Option<Self>) {
        let now = Instant::now();
        let timeline = timeline.get_or_insert(Self { first: now, newest: now, tokens: 0 });
        timeline.newest = now;
        timeline.tokens += 1;
    }
}

/// The waiting times of the last texts that have ended.
#[derive(Debug, Default)]
pub struct Latencies {
    /// From the arrival of the request, with the time in the queue.
    first: VecDeque<Duration>,
    /// Mean time of the other tokens of a text.
    token: VecDeque<Duration>,
}

impl Latencies {
    /// Adds a text of a request that came at `received`.
    pub fn add(&mut self, received: Instant, timeline: Timeline) {
        let Timeline { first, newest, tokens } = timeline;
        let push = |times: &mut VecDeque<Duration>, time| {
            times.truncate(TEXTS - 1);
            times.push_front(time);
        };
        push(&mut self.first, first - received);
        if tokens > 1 {
            push(&mut self.token, (newest - first) / (tokens - 1));
        }
    }

    /// Returns the median times until the first token and between tokens in milliseconds, or `None` before there is one.
    pub fn medians(&self) -> [Option<f64>; 2] {
        [&self.first, &self.token].map(|times| {
            let mut times: Vec<Duration> = times.iter().copied().collect();
            times.sort_unstable();
            times.get(times.len() / 2).map(|time| time.as_secs_f64() * 1e3)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_texts_determine_the_medians() {
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let mut latencies = Latencies::default();
        assert_eq!(latencies.medians(), [None; 2]);
        let text = |first, tokens| Timeline { first: start + ms(first), newest: start + ms(first + 12), tokens };
        latencies.add(start, text(5, 1));
        assert_eq!(latencies.medians(), [Some(5.0), None]);
        latencies.add(start, text(7, 4));
        latencies.add(start, text(9, 3));
        assert_eq!(latencies.medians(), [Some(7.0), Some(6.0)]);
        for _ in 0..TEXTS {
            latencies.add(start, text(100, 13));
        }
        assert_eq!(latencies.medians(), [Some(100.0), Some(1.0)]);
    }
}
