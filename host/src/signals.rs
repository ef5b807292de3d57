//! Signals that request a stop. The first one stops a run after its current step, or its current batch of an evaluation. A second
//! one ends the process immediately, unless it is a warning of a batch system. SIGXFSZ is ignored, so that a file size limit is a write
//! error.

use anyhow::{Context, Result};
use checkpoint::directory::remove_unpublished_files;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::{flag, low_level};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};
use system::process::print_error_within;
use system::thread;

/// Signals that end the process immediately if they are repeated.
const STOPS: [i32; 4] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];

/// Signals that batch systems send before they end a process. The kernel repeats SIGXCPU every second, so a repetition does nothing.
const WARNINGS: [i32; 3] = [SIGUSR1, SIGUSR2, SIGXCPU];

/// Time within which equal signals count as one. SLURM and systemd signal every process of a job, and a launcher among them forwards the
/// signal to its ranks.
const REPEATED: Duration = Duration::from_millis(200);

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

    const fn by(signal: i32) -> Self {
        Self { signal }
    }

    /// Returns the exit code of the process: 128 plus the number of SIGHUP, SIGINT or SIGTERM, as shells report it. Other signals have the
    /// code of SIGTERM, which supervisors know as a requested stop. A finished run exits with 0.
    pub fn exit_code(self) -> u8 {
        let named = [SIGHUP, SIGINT].contains(&self.signal);
        128 + if named { self.signal as u8 } else { SIGTERM as u8 }
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
            0 => Stopped::by(SIGTERM),
            signal => Stopped::by(signal),
        }
    }

    /// Starts a thread that handles signals, and returns the request that the first signal makes.
    ///
    /// A second signal removes unfinished checkpoint files from `directory` and exits with the code of [`Stopped`].
    /// Signals other than SIGINT and SIGTERM stay ignored if the process was started with them ignored, as by `nohup`.
    pub fn on_signals(directory: Option<PathBuf>) -> Result<Self> {
        let stop = Self::default();
        let kept = |signal: &i32| [SIGINT, SIGTERM].contains(signal) || !is_ignored(*signal);
        let mut signals =
            Signals::new(STOPS.into_iter().chain(WARNINGS).filter(kept)).context("cannot listen for signals")?;
        let request = stop.clone();
        let listen = move || {
            let mut requests = Requests::default();
            for signal in &mut signals {
                match requests.next(signal, Instant::now()) {
                    Response::Nothing => continue,
                    Response::Stop => {}
                    Response::Exit => {
                        // The checkpoint writer may still create files; the next run removes those.
                        let _ = directory.as_deref().map(remove_unpublished_files);
                        low_level::exit(Stopped::by(signal).exit_code().into());
                    }
                }
                let _ = request.0.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed);
                let name = low_level::signal_name(signal).unwrap_or("signal");
                let again = if STOPS.contains(&signal) { "; repeat the signal to stop immediately" } else { "" };
                // A reader of standard error that has stopped must not delay the next signal.
                let message = format!("{name}: stopping after this step or batch{again}");
                let _ = print_error_within(&message, Duration::from_secs(1));
            }
        };
        thread::spawn("signals", None, listen).context("cannot start the signal thread")?;
        Ok(stop)
    }
}

/// Ctrl-C in a conversation: it ends an answer, and not the program.
#[derive(Debug)]
pub struct Interrupts(Arc<AtomicBool>);

impl Interrupts {
    /// Listens from here on. A second SIGINT before [`clear`](Self::clear) ends the process, so that a computation that does not look at the
    /// first one can be ended.
    pub fn listen() -> Result<Self> {
        let set = Arc::new(AtomicBool::new(false));
        flag::register_conditional_shutdown(SIGINT, 128 + SIGINT, Arc::clone(&set))
            .and_then(|_| flag::register(SIGINT, Arc::clone(&set)))
            .context("cannot listen for signals")?;
        Ok(Self(set))
    }

    /// Forgets earlier interrupts.
    pub fn clear(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Returns whether there was an interrupt.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The effect of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Response {
    Nothing,
    Stop,
    Exit,
}

/// The signals so far.
#[derive(Default)]
struct Requests {
    /// The last signal of [`STOPS`] and its time.
    last: Option<(i32, Instant)>,
    warned: bool,
}

impl Requests {
    /// Returns the effect of the next signal.
    fn next(&mut self, signal: i32, now: Instant) -> Response {
        if WARNINGS.contains(&signal) {
            let first = self.last.is_none() && !self.warned;
            self.warned = true;
            return if first { Response::Stop } else { Response::Nothing };
        }
        match self.last.replace((signal, now)) {
            None => Response::Stop,
            Some((last, at)) if last == signal && now - at < REPEATED => Response::Nothing,
            Some(_) => Response::Exit,
        }
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
        assert_eq!(Stopped::by(SIGHUP).exit_code(), 129);
        for signal in [SIGQUIT, SIGUSR1, SIGUSR2, SIGXCPU] {
            let code = Stopped::by(signal).exit_code();
            assert!(code == 143 && Stopped::is_exit_code(code.into()), "{signal}");
        }
    }

    #[test]
    fn only_a_second_request_of_a_user_ends_the_process() {
        use Response::{Exit, Nothing, Stop};
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let responses = |signals: &[(i32, u64)]| {
            let mut requests = Requests::default();
            signals.iter().map(|&(signal, ms)| requests.next(signal, at(ms))).collect::<Vec<_>>()
        };
        assert_eq!(responses(&[(SIGTERM, 0), (SIGTERM, 300)]), [Stop, Exit]);
        assert_eq!(responses(&[(SIGINT, 0), (SIGTERM, 10)]), [Stop, Exit]);
        // A launcher forwards the signal that the batch system also sent to this process.
        assert_eq!(responses(&[(SIGTERM, 0), (SIGTERM, 100), (SIGTERM, 400)]), [Stop, Nothing, Exit]);
        assert_eq!(responses(&[(SIGXCPU, 0), (SIGXCPU, 1000), (SIGXCPU, 2000)]), [Stop, Nothing, Nothing]);
        // SLURM's time limit ends with SIGTERM.
        assert_eq!(responses(&[(SIGUSR1, 0), (SIGTERM, 60_000), (SIGTERM, 70_000)]), [Stop, Stop, Exit]);
        assert_eq!(responses(&[(SIGTERM, 0), (SIGUSR2, 1000)]), [Stop, Nothing]);
    }
}
