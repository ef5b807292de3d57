//! Faults that the emulator cannot see from within: those of the host's memory protection, and loops that call nothing of this crate.

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod linux {
    use super::super::trap;
    use std::mem::MaybeUninit;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Arc, Mutex, Once, PoisonError};
    use std::time::Duration;

    /// CPU time that a thread of a kernel may use without calling this crate.
    const PATIENCE: Duration = Duration::from_secs(5);

    /// An OS thread that emulates kernels.
    struct Watched {
        thread: libc::pthread_t,
        beats: Arc<AtomicU64>,
        /// The count of beats when the watchdog last looked and it had changed, and the CPU time of the thread then.
        seen: (u64, Duration),
    }

    static WATCHED: Mutex<Vec<Watched>> = Mutex::new(Vec::new());

    /// Counts the calls of this crate by the kernels of an OS thread, which is watched until it ends.
    struct Heart(Arc<AtomicU64>);

    thread_local! {
        static HEART: Heart = Heart::new();
    }

    impl Heart {
        fn new() -> Self {
            let beats = Arc::new(AtomicU64::new(0));
            // SAFETY: the function has no preconditions.
            let thread = unsafe { libc::pthread_self() };
            let watched = Watched { thread, beats: beats.clone(), seen: (0, Duration::ZERO) };
            WATCHED.lock().unwrap_or_else(PoisonError::into_inner).push(watched);
            Self(beats)
        }
    }

    impl Drop for Heart {
        fn drop(&mut self) {
            let mut watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
            watched.retain(|watched| !Arc::ptr_eq(&watched.beats, &self.0));
        }
    }

    /// Records that a kernel on this OS thread has called this crate.
    #[inline]
    pub fn beat() {
        HEART.with(|heart| heart.0.store(heart.0.load(Ordering::Relaxed) + 1, Ordering::Relaxed));
    }

    /// Watches this OS thread.
    pub fn watch() {
        static START: Once = Once::new();
        trap::install();
        HEART.with(|_| ());
        START.call_once(|| {
            let look = || loop {
                std::thread::sleep(Duration::from_secs(1));
                for watched in WATCHED.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
                    watched.look();
                }
            };
            // Without this thread, an endless loop is not reported.
            let _ = std::thread::Builder::new().name("emulator watchdog".to_owned()).spawn(look);
        });
    }

    impl Watched {
        fn look(&mut self) {
            let (beats, time) = (self.beats.load(Ordering::Relaxed), self.cpu_time());
            if beats != self.seen.0 {
                self.seen = (beats, time);
            } else if time.saturating_sub(self.seen.1) > PATIENCE {
                // SAFETY: the thread exists, because it removes itself from the list before it ends.
                unsafe { libc::pthread_kill(self.thread, trap::STUCK) };
            }
        }

        fn cpu_time(&self) -> Duration {
            let mut clock = 0;
            let mut time = MaybeUninit::<libc::timespec>::zeroed();
            // SAFETY: the thread exists, and both pointers are valid.
            let time = unsafe {
                libc::pthread_getcpuclockid(self.thread, &raw mut clock);
                libc::clock_gettime(clock, time.as_mut_ptr());
                time.assume_init()
            };
            Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
        }
    }
}

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
pub use linux::{beat, watch};

/// Does nothing: other hosts report neither memory faults nor endless loops.
#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
pub fn beat() {}

/// Does nothing. See [`beat`].
#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
pub fn watch() {}
