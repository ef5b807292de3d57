//! SIGINT and SIGTERM. The first signal stops a run after its current step; a second one ends the process immediately.

use anyhow::{Context, Result};
use checkpoint::directory::remove_temporary_files;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level;
use std::io::{Write, stderr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// A request to stop a run. Clones share the request.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Requests a stop.
    pub fn request(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns whether a stop was requested.
    pub fn requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Starts a thread that handles signals, and returns the request that the first signal makes.
    ///
    /// A second signal removes unfinished checkpoint files from `directory` and exits with 128 plus the signal's number.
    pub fn on_signals(directory: Option<PathBuf>) -> Result<Self> {
        let stop = Self::default();
        let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot listen for signals")?;
        let handled = stop.clone();
        let listen = move || {
            for signal in &mut signals {
                if handled.requested() {
                    // The checkpoint writer may still create files; the next run removes those.
                    let _ = directory.as_deref().map(remove_temporary_files);
                    low_level::exit(128 + signal);
                }
                handled.request();
                let name = low_level::signal_name(signal).unwrap_or("signal");
                // One write, so that the messages of several ranks do not mix within a line.
                let message = format!("{name}: stopping after this step; repeat the signal to stop immediately\n");
                let _ = stderr().write_all(message.as_bytes());
            }
        };
        thread::Builder::new().name("signals".into()).spawn(listen).context("cannot start the signal thread")?;
        Ok(stop)
    }
}
