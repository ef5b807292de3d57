//! Detects failed ranks and ends the process if the training loop cannot.
//!
//! A thread of every rank sends a heartbeat each second with the progress of that rank. A rank without heartbeats has timed
//! out. A rank that makes no progress has stalled. The training loop receives the fault at its next collective.
//! A loop that waits for a GPU may never get there, because that GPU waits for the failed rank. The watchdog then exits the
//! process.

use super::fault::Fault;
use super::flight_recorder::FlightRecorder;
use engine::Result;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use system::{process, thread, time};

/// Time between heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// A rank without any message for this long has failed.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(20);

/// Time between the detection of a fault and the forced exit of the process.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// Status of collectives that run on a device, asynchronously to the training loop.
pub trait DeviceMonitor: Send + Sync {
    /// Returns the error of a failed collective, on any rank.
    fn check(&self) -> Result<()>;

    /// Aborts the collectives, so that nothing waits for them any more.
    fn abort(&self);
}

/// Progress of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Number of collectives on host values so far.
    pub calls: u64,
    /// Current step and operation, for example `step 17 of 100, computing`.
    pub activity: String,
}

impl Progress {
    /// Encodes the progress as the payload of a heartbeat.
    pub fn to_bytes(&self) -> Vec<u8> {
        [&self.calls.to_le_bytes(), self.activity.as_bytes()].concat()
    }

    /// Decodes the payload of a heartbeat.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (calls, activity) = bytes.split_first_chunk()?;
        Some(Self { calls: u64::from_le_bytes(*calls), activity: String::from_utf8_lossy(activity).into_owned() })
    }
}

/// A message of a watchdog to the other ranks.
#[derive(Debug)]
pub enum Note {
    /// This rank is alive, and has made this progress.
    Heartbeat(Progress),
    /// The run has failed.
    Fault(Fault),
}

/// Status of a rank.
#[derive(Clone, Debug)]
struct RankStatus {
    name: String,
    last_message: Instant,
    progress: Progress,
    /// Time of the last change of `progress`.
    last_progress: Instant,
    /// When its connection was closed.
    disconnected: Option<Instant>,
    /// The rank announced that it leaves, because its run has ended.
    leaving: bool,
}

/// State shared by the training loop, the receiving threads and the watchdog thread.
pub struct Watchdog {
    /// This rank, then the ranks that it is connected to.
    ranks: Mutex<Vec<RankStatus>>,
    /// The first fault, and its time.
    fault: Mutex<Option<(Fault, Instant)>>,
    stall_timeout: Mutex<Duration>,
    device: Mutex<Option<Arc<dyn DeviceMonitor>>>,
    recorder: FlightRecorder,
    stopped: AtomicBool,
    /// Whether the training loop has received the fault and waits for its checkpoint.
    saving: AtomicBool,
}

impl fmt::Debug for Watchdog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watchdog").field("ranks", &self.ranks).field("fault", &self.fault).finish_non_exhaustive()
    }
}

/// Locks a mutex even if a thread panicked while it held the lock. The data guarded in this crate is always consistent.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watchdog {
    /// Creates a watchdog for connections to `peers`. A rank without progress for `stall_timeout` has failed.
    pub fn new<'a>(peers: impl Iterator<Item = &'a str>, stall_timeout: Duration) -> Self {
        let now = time::now();
        let progress = Progress { calls: 0, activity: "startup".to_owned() };
        let status = |name: &str| RankStatus {
            name: name.to_owned(),
            last_message: now,
            progress: progress.clone(),
            last_progress: now,
            disconnected: None,
            leaving: false,
        };
        let ranks = std::iter::once("this rank").chain(peers).map(status).collect();
        Self {
            ranks: Mutex::new(ranks),
            fault: Mutex::new(None),
            stall_timeout: Mutex::new(stall_timeout),
            device: Mutex::new(None),
            recorder: FlightRecorder::default(),
            stopped: AtomicBool::new(false),
            saving: AtomicBool::new(false),
        }
    }

    /// Changes the stall timeout. Time that has passed so far does not count against the new timeout.
    pub fn set_stall_timeout(&self, timeout: Duration) {
        let now = time::now();
        lock(&self.ranks).iter_mut().for_each(|rank| rank.last_progress = now);
        *lock(&self.stall_timeout) = timeout;
    }

    /// Notes that the training loop has received the fault and waits for its checkpoint. Instead of the shutdown grace, the stall timeout
    /// then limits the time after the fault.
    pub fn set_saving(&self) {
        self.saving.store(true, Ordering::Relaxed);
    }

    /// Also monitors the collectives of a device.
    pub fn set_device(&self, device: Arc<dyn DeviceMonitor>) {
        *lock(&self.device) = Some(device);
    }

    /// Sets the progress of this rank.
    pub fn set_progress(&self, progress: Progress) {
        self.record_message(0, Some(progress));
    }

    /// Records a message from connected rank number `i`, counted from 1. Heartbeats contain progress.
    pub fn record_message(&self, i: usize, progress: Option<Progress>) {
        let mut ranks = lock(&self.ranks);
        let now = time::now();
        ranks[i].last_message = now;
        if let Some(progress) = progress.filter(|progress| *progress != ranks[i].progress) {
            (ranks[i].progress, ranks[i].last_progress) = (progress, now);
        }
    }

    /// Records that a connected rank leaves in order. Its later disconnection is not a fault.
    pub fn mark_leaving(&self, i: usize) {
        lock(&self.ranks)[i].leaving = true;
    }

    /// Records that the connection to a rank was closed.
    pub fn mark_disconnected(&self, i: usize) {
        lock(&self.ranks)[i].disconnected.get_or_insert_with(time::now);
    }

    /// Returns the progress of this rank.
    pub fn progress(&self) -> Progress {
        lock(&self.ranks)[0].progress.clone()
    }

    /// Returns the recorder of this rank's collectives.
    pub fn recorder(&self) -> &FlightRecorder {
        &self.recorder
    }

    /// Returns the activity of this rank, with the collective that it waits for.
    pub fn activity(&self) -> String {
        self.with_collective(self.progress().activity)
    }

    fn with_collective(&self, activity: String) -> String {
        match self.recorder.pending() {
            Some(collective) => format!("{activity} ({collective})"),
            None => activity,
        }
    }

    /// Reports a fault. Only the first reported fault is kept.
    pub fn report_fault(&self, fault: Fault) {
        lock(&self.fault).get_or_insert((fault, time::now()));
    }

    /// Returns the first fault.
    pub fn fault(&self) -> Option<Fault> {
        lock(&self.fault).as_ref().map(|(fault, _)| fault.clone())
    }

    /// Stops the watchdog, because the run has ended in order.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Makes allowance for `pause`, a time in which this process did not run. Messages of other ranks that arrived meanwhile have not
    /// been read yet.
    fn excuse(&self, pause: Duration) {
        for rank in lock(&self.ranks).iter_mut() {
            rank.last_message += pause;
            rank.last_progress += pause;
        }
    }

    /// Returns the fault visible at `now`, if any.
    fn detect_fault(&self, now: Instant) -> Option<Fault> {
        let (device, stall_timeout) = (lock(&self.device).clone(), *lock(&self.stall_timeout));
        let device_error = device.and_then(|device| device.check().err());
        let ranks = lock(&self.ranks);
        // All ranks run the same operations. The activity of this rank is the most recent one known.
        let activity = || self.with_collective(ranks[0].progress.activity.clone());
        let others = || ranks[1..].iter().filter(|rank| !rank.leaving);
        // The first one is the cause: a launcher may end the other ranks.
        let closed = others().filter_map(|rank| Some((rank.disconnected?, rank)));
        if let Some((_, rank)) = closed.min_by_key(|(since, _)| *since) {
            return Some(Fault::Disconnected { peer: rank.name.clone(), activity: activity() });
        }
        if let Some(rank) = others().find(|rank| now - rank.last_message > HEARTBEAT_TIMEOUT) {
            let waited = now - rank.last_message;
            return Some(Fault::TimedOut { peer: rank.name.clone(), waited, activity: activity() });
        }
        if let Some(error) = device_error {
            return Some(Fault::Device { text: format!("{error:#}"), activity: activity() });
        }
        // If any rank has stalled, the cause is the rank with the fewest calls: all others wait for it.
        let stalled = ranks.iter().any(|rank| now - rank.last_progress > stall_timeout);
        let (i, last) = ranks.iter().enumerate().filter(|_| stalled).min_by_key(|(_, rank)| rank.progress.calls)?;
        // Another rank sends its activity with the collective.
        let activity = if i == 0 { activity() } else { last.progress.activity.clone() };
        let peer = last.name.clone();
        Some(Fault::Stalled { peer, waited: now - last.last_progress, activity })
    }

    /// Starts the watchdog thread. It sends a heartbeat every second, and a fault once. `send` must not block.
    /// The thread ends after [`stop`](Self::stop), or when `self` is dropped everywhere else.
    pub fn start(self: &Arc<Self>, send: impl Fn(Note) + Send + 'static) -> std::io::Result<()> {
        let watchdog = Arc::downgrade(self);
        let mut announced = false;
        let mut tick = move |paused: Duration| {
            let Some(watchdog) = watchdog.upgrade() else { return false };
            if watchdog.stopped.load(Ordering::Relaxed) {
                return false;
            }
            if paused > HEARTBEAT_INTERVAL {
                watchdog.excuse(paused);
            }
            send(Note::Heartbeat(Progress { activity: watchdog.activity(), ..watchdog.progress() }));
            if watchdog.fault().is_none()
                && let Some(fault) = watchdog.detect_fault(time::now())
            {
                watchdog.report_fault(fault);
            }
            let fault = lock(&watchdog.fault).clone();
            let Some((fault, since)) = fault else { return true };
            if !std::mem::replace(&mut announced, true) {
                send(Note::Fault(fault.clone()));
                watchdog.recorder.dump(&fault.to_string());
                // The abort may itself block on the failed device, so it runs on its own thread.
                if let Some(device) = lock(&watchdog.device).take() {
                    let _ = thread::spawn("abort", None, move || device.abort());
                }
            }
            let saving = watchdog.saving.load(Ordering::Relaxed);
            let grace = if saving { *lock(&watchdog.stall_timeout) } else { SHUTDOWN_GRACE };
            if time::now() - since > grace {
                exit_process(&fault);
            }
            true
        };
        let run = move || {
            let mut paused = Duration::ZERO;
            while tick(paused) {
                let asleep = time::now();
                thread::sleep(HEARTBEAT_INTERVAL);
                paused = (time::now() - asleep).saturating_sub(HEARTBEAT_INTERVAL);
            }
        };
        thread::spawn("watchdog", None, run).map(|_| ())
    }
}

/// Exits without running destructors or exit handlers, because they may block.
fn exit_process(fault: &Fault) {
    if !matches!(fault, Fault::ReportedByRank0 { .. }) {
        process::print_error(&format!("error: {fault}"));
    }
    process::exit(fault.exit_code())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn progress(calls: u64) -> Progress {
        Progress { calls, activity: format!("step {calls}") }
    }

    fn watchdog() -> Watchdog {
        let watchdog = Watchdog::new(["rank 1", "rank 2"].into_iter(), Duration::from_mins(1));
        for i in 0..3 {
            watchdog.record_message(i, Some(progress(7)));
        }
        watchdog
    }

    #[test]
    fn progress_round_trips_through_bytes() {
        for progress in [progress(0), Progress { calls: u64::MAX, activity: String::new() }] {
            assert_eq!(Progress::from_bytes(&progress.to_bytes()), Some(progress));
        }
        assert_eq!(Progress::from_bytes(b"short"), None);
    }

    #[test]
    fn timed_out_disconnected_and_stalled_ranks_are_named() {
        let now = Instant::now();
        let text = |watchdog: &Watchdog, later: u64| {
            watchdog.detect_fault(now + Duration::from_secs(later)).map(|fault| fault.to_string())
        };
        assert_eq!(text(&watchdog(), 10), None);
        let timed_out = watchdog();
        lock(&timed_out.ranks)[1].last_message = now + Duration::from_secs(15);
        assert!(text(&timed_out, 30).unwrap().starts_with("rank 2 timed out: no message for 30 s during step 7;"));
        let disconnected = watchdog();
        disconnected.mark_leaving(1);
        disconnected.mark_disconnected(1);
        assert_eq!(text(&disconnected, 0), None);
        disconnected.mark_disconnected(2);
        assert!(text(&disconnected, 0).unwrap().starts_with("rank 2 disconnected during step 7:"));
        let both = watchdog();
        both.mark_disconnected(2);
        both.mark_disconnected(1);
        lock(&both.ranks)[1].disconnected = Some(time::now() + Duration::from_secs(1));
        assert!(text(&both, 0).unwrap().starts_with("rank 2 disconnected"));
        let stalled = watchdog();
        for (i, calls) in [(0, 9), (1, 8), (2, 9)] {
            stalled.record_message(i, Some(progress(calls)));
            lock(&stalled.ranks)[i].last_message = now + Duration::from_secs(70);
        }
        assert_eq!(text(&stalled, 50), None);
        assert!(text(&stalled, 70).unwrap().starts_with("rank 1 made no progress for 70 s during step 8;"));
        // Recent progress resets the timer.
        for i in 0..3 {
            lock(&stalled.ranks)[i].last_progress = now + Duration::from_mins(1);
        }
        assert_eq!(text(&stalled, 70), None);
    }

    #[test]
    fn time_in_which_this_process_did_not_run_is_excused() {
        let watchdog = watchdog();
        let later = Instant::now() + Duration::from_secs(50);
        assert!(watchdog.detect_fault(later).is_some());
        watchdog.excuse(Duration::from_secs(40));
        assert!(watchdog.detect_fault(later).is_none());
    }

    #[test]
    fn changing_the_stall_timeout_resets_the_timer() {
        let watchdog = watchdog();
        let fails_after = |seconds| {
            let then = Instant::now() + Duration::from_secs(seconds);
            lock(&watchdog.ranks).iter_mut().for_each(|rank| rank.last_message = then);
            watchdog.detect_fault(then).is_some()
        };
        assert!(!fails_after(50) && fails_after(70));
        watchdog.set_stall_timeout(Duration::from_secs(90));
        assert!(!fails_after(70) && fails_after(100));
        lock(&watchdog.ranks)[1].last_progress = Instant::now().checked_sub(Duration::from_secs(30)).unwrap();
        watchdog.set_stall_timeout(Duration::from_secs(20));
        assert!(!fails_after(10) && fails_after(25));
    }

    /// A device with collectives that fail on request.
    #[derive(Default)]
    struct FakeDevice {
        failed: AtomicBool,
        aborted: AtomicBool,
    }

    impl FakeDevice {
        fn wait_for_abort(&self) {
            let deadline = Instant::now() + 3 * HEARTBEAT_INTERVAL;
            while !self.aborted.load(Ordering::Relaxed) {
                assert!(Instant::now() < deadline, "the collectives were not aborted");
                thread::sleep(HEARTBEAT_INTERVAL / 20);
            }
        }
    }

    impl DeviceMonitor for FakeDevice {
        fn check(&self) -> Result<()> {
            anyhow::ensure!(!self.failed.load(Ordering::Relaxed), "ncclRemoteError");
            Ok(())
        }

        fn abort(&self) {
            self.aborted.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn device_errors_are_announced_and_collectives_aborted() {
        let (watchdog, device) = (Arc::new(watchdog()), Arc::new(FakeDevice::default()));
        watchdog.set_device(device.clone());
        let announced = Arc::new(Mutex::new(Vec::new()));
        let log = announced.clone();
        let send = move |note| {
            if let Note::Fault(fault) = note {
                lock(&log).push(fault.to_string());
            }
        };
        watchdog.start(send).unwrap();
        thread::sleep(HEARTBEAT_INTERVAL * 3 / 2);
        assert!(watchdog.fault().is_none() && !device.aborted.load(Ordering::Relaxed));
        device.failed.store(true, Ordering::Relaxed);
        device.wait_for_abort();
        watchdog.stop();
        let fault = watchdog.fault().unwrap();
        let text = "ncclRemoteError; during step 7";
        assert_eq!((fault.to_string(), fault.is_recoverable()), (text.to_owned(), true));
        assert_eq!(*lock(&announced), [text]);
    }

    #[test]
    fn collectives_are_aborted_when_a_rank_disconnects() {
        let (watchdog, device) = (Arc::new(watchdog()), Arc::new(FakeDevice::default()));
        watchdog.set_device(device.clone());
        watchdog.mark_disconnected(2);
        watchdog.start(|_| {}).unwrap();
        device.wait_for_abort();
        watchdog.stop();
        assert!(watchdog.fault().unwrap().to_string().starts_with("rank 2 disconnected"));
    }

    #[test]
    fn the_first_fault_is_kept() {
        let watchdog = watchdog();
        assert!(watchdog.fault().is_none());
        watchdog.report_fault(Fault::Startup("first".into()));
        watchdog.report_fault(Fault::Startup("second".into()));
        assert_eq!(watchdog.fault().unwrap().to_string(), "first");
    }
}
