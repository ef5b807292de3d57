//! The clock.

use crate::simulation;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Unix time at which a simulation begins, in January 2027.
const SIMULATED_START: Duration = Duration::from_hours(500_000);

/// Returns the current time, as [`Instant::now`] does.
pub fn now() -> Instant {
    simulation::current().map_or_else(Instant::now, |task| task.now())
}

/// Returns the Unix time.
pub fn since_epoch() -> Duration {
    match simulation::current() {
        Some(task) => SIMULATED_START + task.elapsed(),
        None => SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
    }
}
