//! Ends a process whose run has lost a rank, whatever the process is waiting for.
//!
//! Every rank says each second that it lives, and how far it is, on a thread beside the training loop: a rank that is stopped
//! falls silent, one that hangs stays where it is. What is found the loop learns at its next call between ranks. If it does
//! not come to one, because it waits for a GPU that waits for the lost rank, the process ends here.

use super::fault::Fault;
use engine::Result;
use std::fmt;
use std::io::{Write, stderr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How often a rank says that it lives.
const BEAT: Duration = Duration::from_secs(1);

/// A rank that says nothing for so long is lost.
const SILENCE: Duration = Duration::from_secs(20);

/// How long the loop may take to end the run in order, once a rank is lost.
const GRACE: Duration = Duration::from_secs(5);

/// Collectives that go on beside the loop.
pub trait Device: Send + Sync {
    /// What has failed in them, on any rank.
    fn check(&self) -> Result<()>;

    /// Ends them, so that nobody waits for them.
    fn abort(&self);
}

/// How far a rank is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Grows with each call between ranks.
    pub calls: u64,
    /// `step 17 of 100`
    pub during: String,
}

impl Progress {
    pub fn to_bytes(&self) -> Vec<u8> {
        [&self.calls.to_le_bytes(), self.during.as_bytes()].concat()
    }

    pub fn of_bytes(bytes: &[u8]) -> Option<Self> {
        let (calls, during) = bytes.split_first_chunk()?;
        Some(Self { calls: u64::from_le_bytes(*calls), during: String::from_utf8_lossy(during).into_owned() })
    }
}

/// What is known of a rank; of this one, too.
#[derive(Clone, Debug)]
struct Seen {
    who: String,
    heard: Instant,
    progress: Progress,
    /// When it got there.
    since: Instant,
    /// Its connection has ended.
    gone: bool,
    /// It has said that it goes.
    leaves: bool,
}

/// Shared by the loop, the threads that read, and the one that watches.
pub struct Watch {
    /// This rank, then those that it is connected with.
    seen: Mutex<Vec<Seen>>,
    verdict: Mutex<Option<(Fault, Instant)>>,
    /// A rank that stays where it is for so long hangs.
    patience: Mutex<Duration>,
    device: Mutex<Option<Arc<dyn Device>>>,
    over: AtomicBool,
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("seen", &self.seen).field("verdict", &self.verdict).finish_non_exhaustive()
    }
}

/// A thread that panicked held it: what it guards is whole all the same.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watch {
    pub fn new<'a>(others: impl Iterator<Item = &'a str>, patience: Duration) -> Self {
        let now = Instant::now();
        let progress = Progress { calls: 0, during: "the run has not begun".to_owned() };
        let seen = |who: &str| Seen {
            who: who.to_owned(),
            heard: now,
            progress: progress.clone(),
            since: now,
            gone: false,
            leaves: false,
        };
        let seen = std::iter::once("this rank").chain(others).map(seen).collect();
        Self {
            seen: Mutex::new(seen),
            verdict: Mutex::new(None),
            patience: Mutex::new(patience),
            device: Mutex::new(None),
            over: AtomicBool::new(false),
        }
    }

    /// From now on a rank that stays where it is hangs after `patience`.
    pub fn set_patience(&self, patience: Duration) {
        let now = Instant::now();
        // What was allowed so far is no fault.
        lock(&self.seen).iter_mut().for_each(|seen| seen.since = now);
        *lock(&self.patience) = patience;
    }

    /// Looks after these collectives, too.
    pub fn set_device(&self, device: Arc<dyn Device>) {
        *lock(&self.device) = Some(device);
    }

    /// This rank is here now.
    pub fn note(&self, progress: Progress) {
        self.heard(0, Some(progress));
    }

    /// Something has come from the `i`-th of the others, counted from 1.
    pub fn heard(&self, i: usize, progress: Option<Progress>) {
        let mut seen = lock(&self.seen);
        let now = Instant::now();
        seen[i].heard = now;
        if let Some(progress) = progress.filter(|progress| *progress != seen[i].progress) {
            (seen[i].progress, seen[i].since) = (progress, now);
        }
    }

    /// It goes because the run has ended for it: it is not lost.
    pub fn leaves(&self, i: usize) {
        lock(&self.seen)[i].leaves = true;
    }

    pub fn gone(&self, i: usize) {
        lock(&self.seen)[i].gone = true;
    }

    /// How far this rank is.
    pub fn progress(&self) -> Progress {
        lock(&self.seen)[0].progress.clone()
    }

    /// Why the run must end; the first reason stays.
    pub fn decide(&self, fault: Fault) {
        lock(&self.verdict).get_or_insert((fault, Instant::now()));
    }

    pub fn verdict(&self) -> Option<Fault> {
        lock(&self.verdict).as_ref().map(|(fault, _)| fault.clone())
    }

    /// The run has ended in order: ranks that go now are not lost.
    pub fn is_over(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// What is wrong with the ranks at `now`.
    fn trouble(&self, now: Instant) -> Option<Fault> {
        let (device, patience) = (lock(&self.device).clone(), *lock(&self.patience));
        let failed = device.and_then(|device| device.check().err());
        let seen = lock(&self.seen);
        for Seen { who, heard, gone, .. } in seen[1..].iter().filter(|seen| !seen.leaves) {
            // All do the same at one time; what this one does is known best.
            let (who, during) = (who.clone(), seen[0].progress.during.clone());
            if *gone {
                return Some(Fault::Gone { who, during });
            }
            if now - *heard > SILENCE {
                return Some(Fault::Silent { who, waited: now - *heard, during });
            }
        }
        if let Some(error) = failed {
            let during = seen[0].progress.during.clone();
            return Some(Fault::Device { text: format!("{error:#}"), during });
        }
        // All wait for the one that is least far.
        let hangs = seen.iter().any(|seen| now - seen.since > patience);
        let last = seen.iter().filter(|_| hangs).min_by_key(|seen| seen.progress.calls)?;
        let (who, during) = (last.who.clone(), last.progress.during.clone());
        Some(Fault::Hangs { who, waited: now - last.since, during })
    }

    /// Watches until the run is over. `beat` tells the others that this rank lives; `tell` passes on why the run ends. Whoever
    /// holds the last other end of `self` may go at any time.
    pub fn start(
        self: &Arc<Self>,
        beat: impl Fn(&Progress) + Send + 'static,
        tell: impl Fn(&Fault) + Send + 'static,
    ) -> std::io::Result<()> {
        let watch = Arc::downgrade(self);
        let mut told = false;
        let mut round = move || {
            let Some(watch) = watch.upgrade() else { return false };
            if watch.over.load(Ordering::Relaxed) {
                return false;
            }
            beat(&watch.progress());
            if watch.verdict().is_none()
                && let Some(fault) = watch.trouble(Instant::now())
            {
                watch.decide(fault);
            }
            let verdict = lock(&watch.verdict).clone();
            let Some((fault, since)) = verdict else { return true };
            if !std::mem::replace(&mut told, true) {
                tell(&fault);
                // It may itself wait for what has failed.
                if let Some(device) = lock(&watch.device).take() {
                    let _ = thread::Builder::new().name("abort".into()).spawn(move || device.abort());
                }
            }
            if since.elapsed() > GRACE {
                end(&fault);
            }
            true
        };
        let turn = move || {
            while round() {
                thread::sleep(BEAT);
            }
        };
        thread::Builder::new().name("watchdog".into()).spawn(turn).map(|_| ())
    }
}

/// Without the ends of threads and libraries, any of which may be waiting.
fn end(fault: &Fault) {
    if !matches!(fault, Fault::Told { .. }) {
        let _ = writeln!(stderr(), "error: {fault}");
    }
    signal_hook::low_level::exit(fault.exit_code().into());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(calls: u64) -> Progress {
        Progress { calls, during: format!("step {calls}") }
    }

    fn watch() -> Watch {
        let watch = Watch::new(["rank 1", "rank 2"].into_iter(), Duration::from_mins(1));
        for i in 0..3 {
            watch.heard(i, Some(progress(7)));
        }
        watch
    }

    #[test]
    fn progress_travels() {
        for progress in [progress(0), Progress { calls: u64::MAX, during: String::new() }] {
            assert_eq!(Progress::of_bytes(&progress.to_bytes()), Some(progress));
        }
        assert_eq!(Progress::of_bytes(b"short"), None);
    }

    #[test]
    fn the_silent_the_gone_and_the_hanging_are_named() {
        let now = Instant::now();
        let text =
            |watch: &Watch, later: u64| watch.trouble(now + Duration::from_secs(later)).map(|fault| fault.to_string());
        assert_eq!(text(&watch(), 10), None);
        let silent = watch();
        lock(&silent.seen)[1].heard = now + Duration::from_secs(15);
        assert_eq!(text(&silent, 30).unwrap(), "nothing came from rank 2 in 30 s; step 7");
        let gone = watch();
        gone.leaves(1);
        gone.gone(1);
        assert_eq!(text(&gone, 0), None);
        gone.gone(2);
        assert_eq!(text(&gone, 0).unwrap(), "rank 2 has ended, or the connection to it; step 7");
        let hangs = watch();
        for (i, calls) in [(0, 9), (1, 8), (2, 9)] {
            hangs.heard(i, Some(progress(calls)));
            lock(&hangs.seen)[i].heard = now + Duration::from_secs(70);
        }
        assert_eq!(text(&hangs, 50), None);
        assert_eq!(text(&hangs, 70).unwrap(), "rank 1 stands still for 70 s; step 8");
        // Whoever has just gone on has not hung.
        for i in 0..3 {
            lock(&hangs.seen)[i].since = now + Duration::from_mins(1);
        }
        assert_eq!(text(&hangs, 70), None);
    }

    #[test]
    fn the_start_has_a_deadline_of_its_own() {
        let watch = watch();
        let later = |seconds| {
            let then = Instant::now() + Duration::from_secs(seconds);
            lock(&watch.seen).iter_mut().for_each(|seen| seen.heard = then);
            watch.trouble(then).is_some()
        };
        assert!(!later(50) && later(70));
        watch.set_patience(Duration::from_secs(90));
        assert!(!later(70) && later(100));
        // Time that has passed does not count against a shorter one.
        lock(&watch.seen)[1].since = Instant::now().checked_sub(Duration::from_secs(30)).unwrap();
        watch.set_patience(Duration::from_secs(20));
        assert!(!later(10) && later(25));
    }

    /// Fails once it is told to.
    #[derive(Default)]
    struct Collectives {
        broken: AtomicBool,
        aborted: AtomicBool,
    }

    impl Device for Collectives {
        fn check(&self) -> Result<()> {
            anyhow::ensure!(!self.broken.load(Ordering::Relaxed), "ncclRemoteError");
            Ok(())
        }

        fn abort(&self) {
            self.aborted.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn what_fails_on_the_device_is_told_and_aborted() {
        let (watch, device) = (Arc::new(watch()), Arc::new(Collectives::default()));
        watch.set_device(device.clone());
        let told = Arc::new(Mutex::new(Vec::new()));
        let telling = told.clone();
        watch.start(|_| {}, move |fault| lock(&telling).push(fault.to_string())).unwrap();
        thread::sleep(BEAT * 3 / 2);
        assert!(watch.verdict().is_none() && !device.aborted.load(Ordering::Relaxed));
        device.broken.store(true, Ordering::Relaxed);
        let deadline = Instant::now() + 3 * BEAT;
        while !device.aborted.load(Ordering::Relaxed) {
            assert!(Instant::now() < deadline, "nothing is aborted");
            thread::sleep(BEAT / 20);
        }
        watch.is_over();
        let fault = watch.verdict().unwrap();
        assert_eq!((fault.to_string(), fault.is_loss()), ("ncclRemoteError; step 7".to_owned(), true));
        assert_eq!(*lock(&told), ["ncclRemoteError; step 7"]);
    }

    #[test]
    fn collectives_are_aborted_when_a_rank_is_lost() {
        let (watch, device) = (Arc::new(watch()), Arc::new(Collectives::default()));
        watch.set_device(device.clone());
        watch.gone(2);
        watch.start(|_| {}, |_| {}).unwrap();
        let deadline = Instant::now() + 3 * BEAT;
        while !device.aborted.load(Ordering::Relaxed) {
            assert!(Instant::now() < deadline, "nothing is aborted");
            thread::sleep(BEAT / 20);
        }
        watch.is_over();
        assert!(watch.verdict().unwrap().to_string().starts_with("rank 2 has ended"));
    }

    #[test]
    fn the_first_verdict_stays() {
        let watch = watch();
        assert!(watch.verdict().is_none());
        watch.decide(Fault::Start("first".into()));
        watch.decide(Fault::Start("second".into()));
        assert_eq!(watch.verdict().unwrap().to_string(), "first");
    }
}
