//! The blocks of a launch that run in parallel, and may wait for each other.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Time without a change after which blocks count as deadlocked if all of them poll or wait.
const PATIENCE: Duration = Duration::from_millis(500);

/// The blocks of a launch that run in parallel.
#[derive(Default)]
pub struct Running {
    state: Mutex<State>,
    condition: Condvar,
    /// Number of changes of memory that threads access atomically, and of blocks that have started or ended.
    changes: AtomicU64,
    /// Number of blocks that wait or are about to.
    sleepers: AtomicUsize,
    /// Number of blocks that poll.
    polling: AtomicUsize,
}

#[derive(Default)]
struct State {
    /// Number of blocks that have started and not finished.
    active: usize,
    /// Number of these that have found no satisfied wait since the last change.
    waiting: usize,
    /// Set when all active blocks wait.
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

    /// Records that a block has started.
    pub fn started(&self) {
        self.change(|active| active + 1);
    }

    /// Records that a block has finished.
    pub fn finished(&self) {
        self.change(|active| active - 1);
    }

    /// Records that memory has changed.
    pub fn changed(&self) {
        self.changes.fetch_add(1, Ordering::SeqCst);
        // A block that goes to sleep after this test sees the change before.
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.change(|active| active);
        }
    }

    /// Waits until `satisfied` returns true or all active blocks wait.
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

/// A block of a parallel launch, which may poll.
#[derive(Default)]
pub struct Polling {
    /// The count of changes at the last pause, and the time when it was new.
    seen: Option<(u64, Instant)>,
}

impl Polling {
    /// Records that threads of the block do not poll.
    pub fn end(&mut self, running: &Running) {
        if self.seen.take().is_some() {
            running.polling.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Lets other blocks run. Returns false if all blocks have polled or waited for a while, and nothing has changed.
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
