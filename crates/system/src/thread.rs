//! Threads.

use crate::simulation::{self, TaskHandle};
use std::io;
use std::thread::{self, Result};
use std::time::Duration;

/// A thread that can be joined.
#[derive(Debug)]
pub struct JoinHandle<T>(Handle<T>);

#[derive(Debug)]
enum Handle<T> {
    Real(thread::JoinHandle<T>),
    Simulated(TaskHandle<T>),
}

/// Starts a thread. `stack_bytes` is the size of its stack, or `None` for the default.
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    stack_bytes: Option<usize>,
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    if let Some(task) = simulation::current() {
        return Ok(JoinHandle(Handle::Simulated(task.spawn(name.into(), run)?)));
    }
    let builder = thread::Builder::new().name(name.into());
    let builder = match stack_bytes {
        Some(bytes) => builder.stack_size(bytes),
        None => builder,
    };
    Ok(JoinHandle(Handle::Real(builder.spawn(run)?)))
}

/// Suspends this thread.
pub fn sleep(duration: Duration) {
    match simulation::current() {
        Some(task) => task.sleep(duration),
        None => thread::sleep(duration),
    }
}

impl<T> JoinHandle<T> {
    /// Waits for the end of the thread and returns its result, or its panic.
    pub fn join(self) -> Result<T> {
        match self.0 {
            Handle::Real(thread) => thread.join(),
            Handle::Simulated(task) => task.join(),
        }
    }

    /// Returns whether the thread has ended.
    pub fn is_finished(&self) -> bool {
        match &self.0 {
            Handle::Real(thread) => thread.is_finished(),
            Handle::Simulated(task) => task.is_finished(),
        }
    }
}
