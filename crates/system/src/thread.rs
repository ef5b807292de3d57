//! Threads.

use crate::simulation;
use rustix::process::Resource;
use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::io::{Error, ErrorKind, Result as IoResult};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::thread::{self, Builder, Result};
use std::time::Duration;

/// Work whose end can be waited for.
pub type JoinHandle<T> = Box<dyn HandleOperations<T>>;

/// The operations of a [`JoinHandle`].
pub trait HandleOperations<T>: Send {
    /// Waits for the end of the work and returns its result, or its panic.
    fn join(self: Box<Self>) -> Result<T>;

    /// Returns whether the work has ended.
    fn is_finished(&self) -> bool;
}

impl<T> fmt::Debug for dyn HandleOperations<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinHandle").finish_non_exhaustive()
    }
}

/// Work of a thread of this module.
struct Work<T> {
    result: Receiver<Result<T>>,
    finished: Arc<AtomicBool>,
}

/// The work of a thread.
type Job = Box<dyn FnOnce() + Send>;

/// One thread without work for each name. It is used again, so that a process can write its next checkpoint although a limit of
/// memory or of processes no longer allows new threads.
static IDLE: LazyLock<Mutex<HashMap<String, Sender<Job>>>> = LazyLock::new(Mutex::default);

/// Size of a stack if none is given, as in the standard library.
const STACK_BYTES: usize = 2 << 20;

/// Starts a thread, or uses an idle one of the same name. `stack_bytes` is the size of its stack, or `None` for the default. All threads
/// of a name have the same size.
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    stack_bytes: Option<usize>,
    run: impl FnOnce() -> T + Send + 'static,
) -> IoResult<JoinHandle<T>> {
    let name = name.into();
    if let Some(task) = simulation::current() {
        return Ok(Box::new(task.spawn(name, run)?));
    }
    let (send_result, result) = channel();
    let finished = Arc::<AtomicBool>::default();
    let (is_finished, job_name) = (finished.clone(), name.clone());
    let job = move |idle: Sender<Job>| {
        let result = catch_unwind(AssertUnwindSafe(run));
        // Before the end is visible, so that a waiting caller can use the thread again.
        IDLE.lock().unwrap_or_else(PoisonError::into_inner).insert(job_name, idle);
        // The receiver is gone if nobody waits for the result.
        let _ = send_result.send(result);
        is_finished.store(true, Ordering::Release);
    };
    let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
    match idle {
        Some(jobs) => {
            let again = jobs.clone();
            jobs.send(Box::new(move || job(again))).map_err(|_| Error::other("an idle thread has ended"))?;
        }
        None => start(name, stack_bytes.unwrap_or(STACK_BYTES), job)?,
    }
    Ok(Box::new(Work { result, finished }))
}

/// Starts a thread that performs `first` and then all jobs that it gets, until another thread of its name is idle.
fn start(name: String, stack_bytes: usize, first: impl FnOnce(Sender<Job>) + Send + 'static) -> IoResult<()> {
    check_addresses(stack_bytes)?;
    let (sender, jobs) = channel::<Job>();
    let work = move || {
        first(sender);
        for job in jobs {
            job();
        }
    };
    Builder::new().name(name).stack_size(stack_bytes).spawn(work).map(drop).map_err(|error| {
        Error::new(error.kind(), format!("{error}; raise the limits of the process (ulimit -u, ulimit -v)"))
    })
}

/// Checks that the limit of addresses allows another thread. The standard library aborts if a thread has its stack but gets no memory
/// for its signal handlers.
fn check_addresses(stack_bytes: usize) -> IoResult<()> {
    // The heap that glibc's malloc reserves for a thread, and some more.
    const HEAP_BYTES: usize = 66 << 20;
    let Some(limit) = rustix::process::getrlimit(Resource::As).current else { return Ok(()) };
    let statm = fs::read_to_string("/proc/self/statm")?;
    let pages = statm.split_whitespace().next().and_then(|pages| pages.parse::<usize>().ok()).unwrap_or(0);
    let used = pages.saturating_mul(rustix::param::page_size());
    let (needed, free) = (stack_bytes + HEAP_BYTES, usize::try_from(limit).unwrap_or(usize::MAX).saturating_sub(used));
    if needed <= free {
        return Ok(());
    }
    let text = format!(
        "expected {} MiB of free address space, found {} MiB; raise the limit of the process (ulimit -v)",
        needed >> 20,
        free >> 20
    );
    Err(Error::new(ErrorKind::OutOfMemory, text))
}

/// The maximum number of threads that [`check_variables`] accepts, unless the machine has more processors.
const MAX_THREADS: usize = 256;

/// Checks the environment variables with the number of threads that compute. More threads than processors only slow down each other, and
/// several thousand take minutes to start.
pub fn check_variables() -> std::result::Result<(), String> {
    let limit = thread::available_parallelism().map_or(1, usize::from).max(MAX_THREADS);
    // The second one is an older name, which rayon also reads.
    ["RAYON_NUM_THREADS", "RAYON_RS_NUM_CPUS"].into_iter().try_for_each(|name| {
        let number = std::env::var(name).unwrap_or_default();
        check_number(name, &number, limit)
    })
}

fn check_number(name: &str, number: &str, limit: usize) -> std::result::Result<(), String> {
    // Rayon ignores what is no number.
    let digits = number.trim_start_matches('+');
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    if !is_number || digits.parse().is_ok_and(|number: usize| number <= limit) {
        return Ok(());
    }
    Err(format!(
        "{name}: expected at most {limit} threads, found {number}; use a smaller number, or unset it to have one for each processor"
    ))
}

/// Checks that `count` more threads can run at the same time, because some libraries panic if one cannot start.
pub fn check(count: usize) -> IoResult<()> {
    if simulation::current().is_some() {
        return Ok(());
    }
    let gate = Arc::new(Mutex::new(()));
    let closed = gate.lock().unwrap_or_else(PoisonError::into_inner);
    let wait = || {
        let gate = gate.clone();
        move || drop(gate.lock())
    };
    let start = |_| check_addresses(STACK_BYTES).and_then(|()| Builder::new().spawn(wait()));
    let mut threads = Vec::new();
    let started = (0..count).map(start).try_for_each(|thread| thread.map(|thread| threads.push(thread)));
    let found = threads.len();
    drop(closed);
    for thread in threads {
        // It only waits.
        drop(thread.join());
    }
    started.map_err(|error| {
        let text = format!(
            "threads: {count} more threads are needed, but only {found} could be started: {error}; raise the limits of the process \
             (ulimit -u, ulimit -v)"
        );
        Error::new(error.kind(), text)
    })
}

/// Suspends this thread.
pub fn sleep(duration: Duration) {
    match simulation::current() {
        Some(task) => task.sleep(duration),
        None => thread::sleep(duration),
    }
}

impl<T: Send> HandleOperations<T> for Work<T> {
    fn join(self: Box<Self>) -> Result<T> {
        self.result.recv().unwrap_or_else(|ended| Err(Box::new(ended)))
    }

    fn is_finished(&self) -> bool {
        self.finished.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_threads_are_used_again() {
        let id = || thread::current().id();
        let first = spawn("again", None, id).unwrap().join().unwrap();
        let panic = spawn("again", None, move || {
            assert_ne!(thread::current().id(), first);
        });
        assert!(panic.unwrap().join().is_err());
        assert_eq!(spawn("again", None, id).unwrap().join().unwrap(), first);
        // Two at the same time are two threads.
        let (send, receive) = channel::<()>();
        let waits = spawn("again", None, move || receive.recv().is_err().then(id)).unwrap();
        assert_ne!(spawn("again", None, id).unwrap().join().unwrap(), first);
        assert!(!waits.is_finished());
        drop(send);
        assert_eq!(waits.join().unwrap(), Some(first));
        assert_ne!(spawn("other", None, id).unwrap().join().unwrap(), first);
    }

    #[test]
    fn numbers_of_threads_have_a_limit() {
        for number in ["", "0", "1", "+8", "8", "many", "-1"] {
            assert_eq!(check_number("NAME", number, 8), Ok(()), "{number}");
        }
        for number in ["9", "5000", "18446744073709551616"] {
            let expected = format!("NAME: expected at most 8 threads, found {number}; ");
            assert!(check_number("NAME", number, 8).unwrap_err().starts_with(&expected), "{number}");
        }
    }

    #[test]
    fn threads_that_can_start_are_counted() {
        check(4).unwrap();
    }
}
