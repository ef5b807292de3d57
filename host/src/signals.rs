//! SIGINT, SIGTERM and SIGHUP. The first signal stops a run after its current step; a second one ends the process immediately.
//! SIGXFSZ is ignored, so that a file size limit is a write error.

use anyhow::{Context, Result};
use checkpoint::directory::remove_unpublished_files;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::{flag, low_level};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;
use system::process::print_error_within;
use system::thread;

/// A request to stop a run. Clones share the request.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicI32>);

/// The end of a command that a signal stopped. The run has written its checkpoint and its last lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stopped by signal {signal}")]
pub struct Stopped {
    signal: i32,
}

impl Stopped {
    /// Returns whether a process with this exit code was stopped by a signal.
    pub fn is_exit_code(code: i32) -> bool {
        [SIGHUP, SIGINT, SIGTERM].map(|signal| 128 + signal).contains(&code)
    }

    /// Returns the exit code of the process: 128 plus the number of the signal, as shells report it. A finished run exits with 0.
    pub fn exit_code(self) -> u8 {
        u8::try_from(128 + self.signal).unwrap_or(u8::MAX)
    }
}

impl Stop {
    /// Requests a stop, as SIGTERM does.
    pub fn request(&self) {
        self.0.store(SIGTERM, Ordering::Relaxed);
    }

    /// Returns whether a stop was requested.
    pub fn requested(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    /// Returns the end of the command after a stop. A rank that stops because another one received the signal ends as after
    /// SIGTERM.
    pub fn stopped(&self) -> Stopped {
        match self.0.load(Ordering::Relaxed) {
            0 => Stopped { signal: SIGTERM },
            signal => Stopped { signal },
        }
    }

    /// Starts a thread that handles signals, and returns the request that the first signal makes.
    ///
    /// A second signal removes unfinished checkpoint files from `directory` and exits with 128 plus the signal's number.
    /// SIGHUP stays ignored if the process was started with it ignored, as by `nohup`.
    pub fn on_signals(directory: Option<PathBuf>) -> Result<Self> {
        let stop = Self::default();
        let handled = [SIGINT, SIGTERM].into_iter().chain((!is_ignored(SIGHUP)).then_some(SIGHUP));
        let mut signals = Signals::new(handled).context("cannot listen for signals")?;
        let request = stop.clone();
        let listen = move || {
            for signal in &mut signals {
                if request.requested() {
                    // The checkpoint writer may still create files; the next run removes those.
                    let _ = directory.as_deref().map(remove_unpublished_files);
                    low_level::exit(128 + signal);
                }
                request.0.store(signal, Ordering::Relaxed);
                let name = low_level::signal_name(signal).unwrap_or("signal");
                // A reader of standard error that has stopped must not delay the next signal.
                let message = format!("{name}: stopping after this step; repeat the signal to stop immediately");
                let _ = print_error_within(&message, Duration::from_secs(1));
            }
        };
        thread::spawn("signals", None, listen).context("cannot start the signal thread")?;
        Ok(stop)
    }
}

/// Makes a write beyond the file size limit of the process (`ulimit -f`) fail with an error. By default the signal would end
/// the process.
pub fn report_file_size_limit() {
    // The flag is never read. If no handler can be installed, the limit ends the process as before.
    let _ = flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)));
}

/// Returns whether the process ignores a signal, according to the mask `SigIgn` in `/proc/self/status`.
fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_name_the_signal() {
        let stop = Stop::default();
        assert!(!stop.requested() && stop.stopped().exit_code() == 143);
        stop.0.store(SIGINT, Ordering::Relaxed);
        assert!(stop.requested() && stop.stopped().exit_code() == 130);
        assert_eq!(Stopped { signal: SIGHUP }.exit_code(), 129);
    }
}
