//! The clock.

use crate::simulation;
use std::time::Instant;

/// Returns the current time, as [`Instant::now`] does.
pub fn now() -> Instant {
    simulation::current().map_or_else(Instant::now, |task| task.now())
}
