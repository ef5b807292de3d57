//! The OS threads that run the blocks of a launch, which may wait for each other.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Time without a change after which blocks count as livelocked if all of them poll or wait.
const PATIENCE: Duration = Duration::from_millis(500);

/// The OS threads that run the blocks of a launch.
#[derive(Default)]
pub struct Running {
    state: Mutex<State>,
    condition: Condvar,
    /// Number of changes of memory that threads access atomically, and of blocks that have started or ended.
    changes: AtomicU64,
    /// Number of threads with blocks that wait or are about to wait.
    sleepers: AtomicUsize,
    /// Number of threads with blocks that poll.
    polling: AtomicUsize,
}

#[derive(Default)]
struct State {
    /// Number of threads with a block that has started and not finished.
    active: usize,
    /// Number of these that have found no satisfied wait since the last change.
    waiting: usize,
    /// Set when all active threads wait.
    deadlocked: bool,
}

impl Running {
    fn change(&self, active: impl FnOnce(usize) -> usize) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.active = active(state.active);
        state.waiting = 0;
        self.changes.fetch_add(1, Ordering::SeqCst);
        self.condition.notify_all();
    }

    /// Records that a block has started, and whether it is the only one of its thread.
    pub fn started(&self, is_only: bool) {
        self.change(|active| active + usize::from(is_only));
    }

    /// Records that a block has finished, and whether it was the last one of its thread.
    pub fn finished(&self, is_last: bool) {
        self.change(|active| active - usize::from(is_last));
    }

    /// Records that memory has changed.
    pub fn changed(&self) {
        self.changes.fetch_add(1, Ordering::SeqCst);
        // A block that goes to sleep after this test sees the change before.
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.change(|active| active);
        }
    }

    /// Waits until `satisfied` returns true or all active threads wait.
    pub fn wait(&self, satisfied: impl Fn() -> bool) {
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while !satisfied() && !state.deadlocked {
            state.waiting += 1;
            if state.waiting == state.active {
                state.deadlocked = true;
                self.condition.notify_all();
            }
            let changes = self.changes.load(Ordering::SeqCst);
            while self.changes.load(Ordering::SeqCst) == changes && !state.deadlocked {
                state = self.condition.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A thread with blocks that may poll.
#[derive(Default)]
pub struct Polling {
    /// The count of changes at the last pause, and the time when it was new.
    seen: Option<(u64, Instant)>,
}

impl Polling {
    /// Records that a block of the thread can continue.
    pub fn end(&mut self, running: &Running) {
        if self.seen.take().is_some() {
            running.polling.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Lets other threads run. Returns false if all blocks have polled or waited for a while, and nothing has changed.
    pub fn pause(&mut self, running: &Running) -> bool {
        let changes = running.changes.load(Ordering::SeqCst);
        let is_first = self.seen.is_none();
        let (seen, since) = self.seen.get_or_insert((changes, Instant::now()));
        if is_first {
            running.polling.fetch_add(1, Ordering::SeqCst);
        }
        if *seen != changes {
            (*seen, *since) = (changes, Instant::now());
        }
        thread::yield_now();
        let idle = running.polling.load(Ordering::SeqCst) + running.sleepers.load(Ordering::SeqCst);
        let active = running.state.lock().unwrap_or_else(PoisonError::into_inner).active;
        idle < active || since.elapsed() < PATIENCE
    }
}
