//! Random numbers of the operating system.

use crate::simulation;
use std::io;

/// Fills `bytes` with random numbers that nobody can predict, except in a simulation, where the seed determines them.
pub fn fill(bytes: &mut [u8]) -> io::Result<()> {
    match simulation::current() {
        Some(task) => task.fill_random(bytes),
        None => getrandom::fill(bytes)?,
    }
    Ok(())
}
