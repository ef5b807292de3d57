//! Step times, measured on the engine's clock from the end of one step to the end of the next.

use checkpoint::StepTimeAverage;
use std::time::Duration;

/// Measures the time of each training step.
#[derive(Default)]
pub struct Clock {
    last: Duration,
    /// Whether a step has ended. The first step is often slower, so averages leave it out.
    warm: bool,
}

impl Clock {
    /// Starts a clock at the engine's time `now`.
    pub fn start(now: Duration) -> Self {
        Self { last: now, warm: false }
    }

    /// Excludes the time since the last step, which was spent on something else.
    pub fn resume(&mut self, now: Duration) {
        self.last = now;
    }

    /// Returns the time of the step that ended at `at`, and adds it to the averages.
    pub fn step_ended(&mut self, at: Duration, pace: &mut StepTimeAverage) -> Duration {
        let elapsed = at.saturating_sub(self.last).max(Duration::from_nanos(1));
        self.last = at;
        if self.warm {
            pace.add(elapsed.as_secs_f64());
        }
        self.warm = true;
        elapsed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_exclude_the_first_step_and_pauses() {
        let start = Duration::from_secs(3);
        let ms = Duration::from_millis;
        let (mut clock, mut pace) = (Clock::start(start), StepTimeAverage::default());
        assert_eq!(clock.step_ended(start + ms(900), &mut pace), ms(900));
        assert_eq!((pace.smoothed(), pace.mean()), (None, None));
        assert_eq!(clock.step_ended(start + ms(1000), &mut pace), ms(100));
        assert!((pace.smoothed().unwrap() - 0.1).abs() < 1e-9);
        clock.resume(start + ms(5000));
        assert_eq!(clock.step_ended(start + ms(5200), &mut pace), ms(200));
        let smoothed = (0.95 * 0.05 * 0.1 + 0.05 * 0.2) / (1.0 - 0.95f64.powi(2));
        assert!((pace.smoothed().unwrap() - smoothed).abs() < 1e-9);
        assert!((pace.mean().unwrap() - 0.15).abs() < 1e-9);
        // The averages of a resumed run continue, without its first step.
        let mut clock = Clock::start(ms(0));
        clock.step_ended(ms(700), &mut pace);
        clock.step_ended(ms(850), &mut pace);
        assert!((pace.mean().unwrap() - 0.15).abs() < 1e-9);
        assert_eq!(pace.steps, 3);
    }
}
