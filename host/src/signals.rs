//! SIGINT and SIGTERM: the first asks a run to stop at the next step, the second ends the program.

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

/// Whether a run was asked to stop. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    pub fn request(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub fn requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Listens for signals from now on, on a thread. A second one ends the program with the code a shell has for it, after
    /// what is half written in `directory` has been removed.
    pub fn on_signals(directory: Option<PathBuf>) -> Result<Self> {
        let stop = Self::default();
        let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot listen for signals")?;
        let asked = stop.clone();
        let listen = move || {
            for signal in &mut signals {
                if asked.requested() {
                    // The writer may still be at it: what it makes now, the next run removes.
                    let _ = directory.as_deref().map(remove_temporary_files);
                    low_level::exit(128 + signal);
                }
                asked.request();
                let name = low_level::signal_name(signal).unwrap_or("a signal");
                let _ = writeln!(stderr(), "{name}: stopping after this step; once more to stop at once");
            }
        };
        thread::Builder::new().name("signals".into()).spawn(listen).context("cannot start a thread for signals")?;
        Ok(stop)
    }
}
