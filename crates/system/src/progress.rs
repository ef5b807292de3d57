//! Progress of long work. Libraries report it; a program may show it.
//!
//! Reports have no effect until the program calls [`show_with`], and none in a simulation.

use crate::simulation;
use std::fmt;
use std::io::{self, Read};
use std::sync::{Arc, OnceLock};

/// The unit of an amount of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes that are read or written.
    Bytes,
    /// Batches, steps, tensors or other parts.
    Count,
}

/// Receives the amount of work done since its last call. It is dropped when the work ends.
pub type Report = Arc<dyn Fn(u64) + Send + Sync>;

/// Receives name, unit and amount of work that begins. The amount is `None` if it is unknown. Returns `None` for work that is not
/// shown.
pub type Show = fn(&str, Unit, Option<u64>) -> Option<Report>;

static SHOW: OnceLock<Show> = OnceLock::new();

/// Sets the function that shows the work of this process. Only the first call has an effect.
pub fn show_with(show: Show) {
    let _ = SHOW.set(show);
}

/// Work that has begun. It ends when the last clone is dropped. The default value reports nothing.
#[derive(Clone, Default)]
pub struct Progress(Option<Report>);

/// Begins `total` bytes or parts of work.
pub fn start(name: &str, unit: Unit, total: u64) -> Progress {
    start_unbounded(name, unit, Some(total))
}

/// Begins work whose amount may be unknown.
pub fn start_unbounded(name: &str, unit: Unit, total: Option<u64>) -> Progress {
    let show = SHOW.get().filter(|_| simulation::current().is_none());
    Progress(show.and_then(|show| show(name, unit, total)))
}

impl Progress {
    /// Reports that more work is done.
    pub fn add(&self, amount: u64) {
        if let Some(report) = &self.0 {
            report(amount);
        }
    }

    /// Returns a reader that reports the bytes that are read from `inner`.
    pub fn count<R: Read>(self, inner: R) -> Counted<R> {
        Counted { inner, progress: self }
    }
}

/// A reader that reports the bytes that are read from it.
pub struct Counted<R> {
    inner: R,
    progress: Progress,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.progress.add(n as u64);
        Ok(n)
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Progress").field(&self.0.is_some()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulation::Simulation;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};

    static BEGUN: Mutex<Vec<(String, Option<u64>)>> = Mutex::new(Vec::new());
    static DONE: AtomicU64 = AtomicU64::new(0);
    static ENDED: AtomicU64 = AtomicU64::new(0);

    /// Counts when the report is dropped.
    struct End;

    impl Drop for End {
        fn drop(&mut self) {
            ENDED.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn show(name: &str, unit: Unit, total: Option<u64>) -> Option<Report> {
        BEGUN.lock().unwrap().push((name.to_owned(), total));
        if unit == Unit::Count {
            return None;
        }
        let end = End;
        Some(Arc::new(move |amount| {
            let _ = &end;
            DONE.fetch_add(amount, Ordering::Relaxed);
        }))
    }

    #[test]
    fn work_is_reported_after_the_program_asks_for_it_and_not_in_a_simulation() {
        start("before", Unit::Count, 1).add(1);
        show_with(show);
        let reading = start_unbounded("reading", Unit::Bytes, None);
        let mut reader = reading.clone().count(io::repeat(7).take(30));
        assert_eq!(io::copy(&mut reader, &mut io::sink()).unwrap(), 30);
        drop(reading);
        assert_eq!((DONE.load(Ordering::Relaxed), ENDED.load(Ordering::Relaxed)), (30, 0));
        drop(reader);
        assert_eq!(ENDED.load(Ordering::Relaxed), 1);
        start("hidden", Unit::Count, 5).add(5);
        Simulation::new(1).run(vec![Box::new(|| start("simulated", Unit::Bytes, 9).add(9))]).unwrap();
        assert_eq!(
            (DONE.load(Ordering::Relaxed), &*BEGUN.lock().unwrap()),
            (30, &vec![("reading".to_owned(), None), ("hidden".to_owned(), Some(5))])
        );
    }
}
